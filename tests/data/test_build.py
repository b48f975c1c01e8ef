"""Splits as training opens them: one data set, blends, and one pass over each member."""

from pathlib import Path

import numpy as np
import pytest

from megacore.data.blended import BlendedDataset, ConcatDataset
from megacore.data.build import open_split
from megacore.data.gpt_dataset import GPTDataset
from megacore.data.index_maps import IndexOptions, Member, Mixture, build_index_maps, map_path, member_directory
from megacore.data.one_epoch import one_epoch, train_tokens
from megacore.data.samples import Dataset
from megacore.errors import DataFormatError
from tests.data._config import data_config
from tests.data._files import write_tokens

SEQ_LENGTH = 8
LENGTHS = ([30, 0, 9, 41, 12, 25, 33, 18, 7, 60], [50, 3, 44, 20, 31, 12], [9, 9, 70, 15, 26, 34, 40])
WEIGHTS = (0.5, 0.3, 0.2)


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    return [write_tokens(tmp_path / f"tokens-{number}", lengths) for number, lengths in enumerate(LENGTHS)]


@pytest.fixture
def blend(prefixes: list[str], tmp_path: Path) -> Path:
    directory = tmp_path / "index"
    directory.mkdir()
    mixture = Mixture.blend([Member(prefix, weight) for prefix, weight in zip(prefixes, WEIGHTS, strict=True)])
    build_index_maps(mixture, directory, options("50,25,25"), (90, 6, None))
    return directory


def options(split: str | None) -> IndexOptions:
    return IndexOptions(split=split, seq_length=SEQ_LENGTH, seed=5)


def opened(prefixes: list[str], directory: Path, name: str, **changes: object) -> Dataset:
    config = data_config(**{"split": "50,25,25", **changes})
    return open_split(prefixes, directory, name, config, seed=1, tokenizer_directory=directory)


def test_a_blend_is_its_members_samples_in_the_maps_order(prefixes: list[str], blend: Path) -> None:
    dataset = opened(prefixes, blend, "train")
    assert isinstance(dataset, BlendedDataset)
    members = [
        GPTDataset(prefix, member_directory(blend, number), "train", SEQ_LENGTH)
        for number, prefix in enumerate(prefixes)
    ]
    numbers, samples = (np.load(map_path(blend, "train", name)) for name in ("dataset", "dataset_sample"))
    assert len(dataset) == len(numbers) >= 90
    assert set(numbers) == {0, 1, 2}
    expected = np.stack([members[number][sample] for number, sample in zip(numbers, samples, strict=True)])
    np.testing.assert_array_equal(dataset.gather(range(len(dataset))), expected)
    some = np.array([41, 3, 3, 88, 0])
    out = np.zeros((5, SEQ_LENGTH + 1), np.int64)
    assert dataset.gather(some, out) is out
    np.testing.assert_array_equal(out, expected[some])
    with pytest.raises(IndexError, match=r"dataset_index\.npy has no sample 1000"):
        dataset.gather([1000])
    with pytest.raises(IndexError, match="has no sample -1"):
        dataset.gather([-1])


def test_a_split_without_data_sets_is_empty(prefixes: list[str], tmp_path: Path) -> None:
    mixture = Mixture.per_split([Member(prefixes[0])], [Member(prefixes[1], 1.0), Member(prefixes[2], 2.0)], [])
    build_index_maps(mixture, tmp_path, options(None), (4, 4, 0))
    assert [len(opened(prefixes, tmp_path, name, split=None)) >= 4 for name in ("train", "valid", "test")] == [
        True,
        True,
        False,
    ]
    assert opened(prefixes, tmp_path, "test", split=None).gather([]).shape == (0, SEQ_LENGTH + 1)
    [(prefix, tokens)] = train_tokens(prefixes, tmp_path, data_config(split=None))
    assert (prefix, len(tokens)) == (prefixes[0], sum(LENGTHS[0]))


def test_data_sets_one_after_the_other(prefixes: list[str], blend: Path) -> None:
    members = [
        GPTDataset(prefix, member_directory(blend, number), "test", SEQ_LENGTH)
        for number, prefix in enumerate(prefixes)
    ]
    dataset = ConcatDataset(members, SEQ_LENGTH)
    expected = np.concatenate([member.gather(range(len(member))) for member in members])
    assert len(dataset) == len(expected)
    np.testing.assert_array_equal(dataset.gather(range(len(dataset) - 1, -1, -1)), expected[::-1])
    with pytest.raises(IndexError, match=f"no sample {len(dataset)}: it has {len(dataset)}"):
        dataset.gather([len(dataset)])


@pytest.mark.parametrize("name", ["valid", "test"])
def test_one_epoch_has_each_sample_of_each_member_once(
    prefixes: list[str], blend: Path, tmp_path: Path, name: str
) -> None:
    """Every document of the split, whatever was blended: what the packing loses is less than a sample per member."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    dataset = one_epoch(prefixes, blend, name, data_config(split="50,25,25"), scratch)
    assert list(scratch.iterdir()) == []
    bounds = [{"valid": (5, 8), "test": (8, 10)}, {"valid": (2, 4), "test": (4, 6)}, {"valid": (4, 5), "test": (5, 7)}]
    counts = [
        sum([length for length in lengths if length][slice(*bound[name])])
        for lengths, bound in zip(([30, 9, 41, 12, 25, 33, 18, 7, 60], *LENGTHS[1:]), bounds, strict=True)
    ]
    assert len(dataset) > 3
    assert abs(len(dataset) - sum((count - 1) // SEQ_LENGTH for count in counts)) <= 3


def test_one_epoch_of_a_single_data_set_is_that_of_its_maps(prefixes: list[str], tmp_path: Path) -> None:
    config = data_config(split="50,25,25")
    build_index_maps(Mixture.single(prefixes[0]), tmp_path, options("50,25,25"), (20, None, None))
    own = opened(prefixes[:1], tmp_path, "valid").gather(range(3))
    np.testing.assert_array_equal(one_epoch(prefixes[:1], tmp_path, "valid", config, tmp_path).gather(range(3)), own)


def test_train_tokens_are_those_of_the_split(prefixes: list[str], blend: Path) -> None:
    found = list(train_tokens(prefixes, blend, data_config(split="50,25,25")))
    assert [prefix for prefix, _ in found] == prefixes
    assert [len(tokens) for _, tokens in found] == [92, 97, 103]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_length": 9}, r"built for data\.seq_length 8, not 9"),
        ({"packing": "unpacked"}, r"built for data\.packing packed, not unpacked"),
        ({"add_extra_token": False}, r"built for data\.add_extra_token True, not False"),
    ],
)
def test_maps_for_another_configuration_are_refused(
    prefixes: list[str], blend: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(DataFormatError, match=message):
        opened(prefixes, blend, "train", **changes)


def test_maps_of_other_data_sets_are_refused(prefixes: list[str], blend: Path) -> None:
    with pytest.raises(DataFormatError, match="built for 3 pairs of token files, not for 2"):
        opened(prefixes[:2], blend, "train")


@pytest.mark.parametrize("change", ["negative", "beyond", "float", "shorter", "missing"])
@pytest.mark.parametrize("name", ["dataset", "dataset_sample"])
def test_a_damaged_blend_is_refused(prefixes: list[str], blend: Path, name: str, change: str) -> None:
    path = map_path(blend, "train", name)
    values = np.load(path)
    if change == "missing":
        path.unlink()
    else:
        if change in ("negative", "beyond"):
            values[3] = -1 if change == "negative" else 1000
        np.save(path, {"float": values.astype(float), "shorter": values[:-1]}.get(change, values))
    with pytest.raises(DataFormatError, match=r"dataset_index\.npy|dataset_sample_index\.npy"):
        opened(prefixes, blend, "train").gather(range(90))
