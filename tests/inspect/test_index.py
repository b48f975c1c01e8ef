from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.data.build import open_split
from megacore.data.index_directory import map_path
from megacore.data.index_maps import build_index_maps
from megacore.data.index_options import IndexOptions, Member, Mixture
from megacore.errors import DataFormatError
from megacore.inspect.index import describe_index, find_sample, is_index_directory
from megacore.token_files.indexed_dataset import IndexedDataset
from tests.data._config import run_config
from tests.data._files import write_tokens

SEQ_LENGTH = 5
LENGTHS = [3, 1, 0, 20, 2, 0, 9, 30, 5, 6, 7, 8]


def check_every_sample(
    directory: Path, prefixes: tuple[str, ...], split: str, **values: Any
) -> int:
    """Check that the parts of each sample are the tokens that training reads.

    Returns:
        Number of samples.
    """
    config = run_config(seq_length=SEQ_LENGTH, **values)
    dataset = open_split(prefixes, directory, split, config, tokenizer_directory=directory)
    for number in range(len(dataset)):
        sample = find_sample(directory, split, number)
        tokens = IndexedDataset(sample.prefix)
        read = [
            tokens.get(part.sequence, part.start, part.stop - part.start) for part in sample.parts
        ]
        row = dataset.gather([number])[0]
        np.testing.assert_array_equal(np.concatenate(read), row[row >= 0])
        assert sample.tokens == np.count_nonzero(row >= 0)
        assert sample.prefix == prefixes[sample.member]
        for part in sample.parts:
            first, last = tokens.document_indices[part.document : part.document + 2]
            assert first <= part.sequence < last
            assert part.length == tokens.lengths[part.sequence]
    return len(dataset)


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("packing", ["packed", "best_fit", "pack_until_overflow", "unpacked"])
def test_parts_of_samples_equal_what_training_reads(
    tmp_path: Path, packing: Any, extra: bool
) -> None:
    prefix = write_tokens(tmp_path / "a", LENGTHS)
    options = IndexOptions(
        split="8,4",
        seq_length=SEQ_LENGTH,
        seed=3,
        packing=packing,
        add_extra_token=extra,
        drop_last_partial=False,
    )
    build_index_maps(Mixture.single(prefix), tmp_path, options, (40, None, 0))
    values = {"packing": packing, "add_extra_token": extra, "drop_last_partial": False}
    assert check_every_sample(tmp_path, (prefix,), "train", **values) >= 40
    assert check_every_sample(tmp_path, (prefix,), "valid", **values) > 2
    assert find_sample(tmp_path, "train", 7).member_sample == 7


def test_samples_of_a_blend_are_traced_to_their_members(tmp_path: Path) -> None:
    prefixes = tuple(
        write_tokens(tmp_path / name, LENGTHS[first_length:])
        for first_length, name in enumerate("abc")
    )
    members = [
        Member(prefix, weight) for prefix, weight in zip(prefixes, (1.0, 5.0, 2.0), strict=True)
    ]
    (tmp_path / "index").mkdir()
    options = IndexOptions(split="1,1", seq_length=SEQ_LENGTH, seed=3)
    build_index_maps(Mixture.blend(members), tmp_path / "index", options, (30, 8, 0))
    assert check_every_sample(tmp_path / "index", prefixes, "train") >= 30
    assert check_every_sample(tmp_path / "index", prefixes, "valid") >= 8
    members_drawn = [
        find_sample(tmp_path / "index", "train", number).member for number in range(30)
    ]
    assert max(set(members_drawn), key=members_drawn.count) == 1


def test_each_split_has_its_own_members(tmp_path: Path) -> None:
    prefixes = tuple(
        write_tokens(tmp_path / name, LENGTHS[first_length:])
        for first_length, name in enumerate("abc")
    )
    a, b, c = (Member(prefix, 1.0) for prefix in prefixes)
    (tmp_path / "index").mkdir()
    options = IndexOptions(split=None, seq_length=SEQ_LENGTH, seed=3)
    build_index_maps(Mixture.per_split([a], [c, b], []), tmp_path / "index", options, (10, 9, 0))
    assert {find_sample(tmp_path / "index", "train", number).prefix for number in range(10)} == {
        prefixes[0]
    }
    assert {find_sample(tmp_path / "index", "valid", number).prefix for number in range(9)} == set(
        prefixes[1:]
    )
    with pytest.raises(
        DataFormatError, match=r"has no test samples \(it has \d+ train, \d+ valid\)"
    ):
        find_sample(tmp_path / "index", "test", 0)


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """Return a directory with the tokens `a` and their index maps."""
    prefix = write_tokens(tmp_path / "a", LENGTHS)
    build_index_maps(
        Mixture.single(prefix), tmp_path, IndexOptions("1", SEQ_LENGTH, seed=3), (None, 0, 0)
    )
    return tmp_path


@pytest.mark.parametrize("number", [-1, 10**6])
def test_a_sample_out_of_range_is_refused(index: Path, number: int) -> None:
    with pytest.raises(DataFormatError, match=f"has no sample {number}: it has"):
        find_sample(index, "train", number)


@pytest.mark.parametrize(
    ("name", "value"), [("document", 10**6), ("document", -1), ("sample", 10**6), ("shuffle", -1)]
)
def test_maps_that_do_not_fit_their_tokens_are_refused(index: Path, name: str, value: int) -> None:
    path = map_path(index, "train", name)
    values = np.load(path).astype(np.int64)
    values[:] = value
    np.save(path, values)
    with pytest.raises(DataFormatError, match=r"row -?\d+ of \d+ does not fit"):
        find_sample(index, "train", 0)


def test_maps_of_an_older_version_are_refused(index: Path) -> None:
    assert is_index_directory(index)
    (index / "index.json").unlink()
    assert is_index_directory(index)
    with pytest.raises(
        DataFormatError, match=r"has no index.json: .* build them again with `megacore index`"
    ):
        describe_index(index)
    assert not is_index_directory(index.parent)


def test_sentence_maps_without_index_json_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train_sentence_index.npy").touch()
    assert is_index_directory(tmp_path)
    with pytest.raises(
        DataFormatError, match=r"has no index\.json: its index maps are of an older version"
    ):
        describe_index(tmp_path)
