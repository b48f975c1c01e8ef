"""Tests of building index maps of token files and of blends."""

import hashlib
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacore.data.gpt_dataset import GPTDataset
from megacore.data.index_directory import (
    BLEND_MAP_NAMES,
    MAP_NAMES,
    map_path,
    member_directory,
    read_description,
)
from megacore.data.index_maps import build_index_maps, build_split, index_plan
from megacore.data.index_options import (
    SPLIT_NAMES,
    IndexOptions,
    Member,
    Mixture,
    Packing,
    split_ranges,
)
from megacore.data.index_plans import plan_epochs
from megacore.errors import ConfigError, DataFormatError
from megacore.token_files.indexed_dataset import IndexedDataset
from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter
from tests.data import _index_helpers_reference as reference
from tests.data._files import write_tokens


def test_index_maps_and_samples_equal_megatron(shared_data: Path, tmp_path: Path) -> None:
    prefix, golden = (
        shared_data / "golden" / "C_merged",
        shared_data / "golden" / "separate_final_epoch",
    )
    parameters = json.loads((golden / "params.json").read_text())
    options = IndexOptions(
        split=parameters["split"],
        seq_length=parameters["sequence_length"],
        seed=parameters["random_seed"],
    )
    counts = build_index_maps(
        Mixture.single(str(prefix)), tmp_path, options, parameters["num_samples"]
    )
    for name in SPLIT_NAMES:
        expected = parameters["splits"][name]
        assert counts[name]["samples"] == expected["len"]
        for map_name in MAP_NAMES:
            result, expected_array = (
                np.load(map_path(folder, name, map_name)) for folder in (tmp_path, golden)
            )
            assert result.dtype == expected_array.dtype
            np.testing.assert_array_equal(result, expected_array)
        dataset, digest = GPTDataset(prefix, tmp_path, name, 64), hashlib.sha256()
        for sample in dataset.gather(range(len(dataset))):
            digest.update(sample[:-1].tobytes() + sample[1:].tobytes())
        assert digest.hexdigest() == expected["sha256_all_tokens_labels_int64le"]


def reference_split(
    lengths: np.ndarray, first: int, last: int, seq_length: int, seed: int, samples: int
) -> list:
    """Return Megatron's three maps of a split, computed only with NumPy."""
    tokens, state = int(lengths[first:last].sum()), np.random.RandomState(seed)
    epochs = 1
    while epochs * tokens < samples * seq_length + 1:
        epochs += 1
    before = ((epochs - 1) * tokens - 1) // seq_length
    separate = epochs > 1 and samples - before < int(0.8 * ((tokens - 1) // seq_length))
    parts = [epochs - 1, 1] if separate else [epochs]
    documents = []
    for part in parts:
        documents.append(np.tile(np.arange(first, last, dtype=np.int32), part))
        state.shuffle(documents[-1])
    total = (epochs * tokens - 1) // seq_length
    document_index = np.concatenate(documents)
    sample_index = reference.build_sample_index(lengths, document_index, seq_length, total, 1)
    orders = [np.arange(before), np.arange(before, total)] if separate else [np.arange(total)]
    for order in orders:
        state.shuffle(order)
    return [document_index, sample_index, np.concatenate(orders)]


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=3, max_size=30),
    seq_length=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
    samples=st.integers(0, 300),
)
def test_maps_of_a_split_equal_the_reference(
    lengths: list[int], seq_length: int, seed: int, samples: int
) -> None:
    sizes = np.array(lengths, np.int32)
    first, last = split_ranges("2,1", len(sizes))["train"]
    tokens = int(sizes[first:last].sum())
    if tokens <= seq_length:
        return
    plan = plan_epochs(tokens, seq_length, samples)
    options = IndexOptions(split="2,1", seq_length=seq_length, seed=seed)
    maps = build_split(sizes, first, last, plan, options)
    expected = reference_split(sizes, first, last, seq_length, seed, samples)
    for result, expected_array in zip(
        (maps.document_index, maps.sample_index, maps.shuffle_index), expected, strict=True
    ):
        np.testing.assert_array_equal(result, expected_array)
    assert maps.shuffle_index.dtype == np.uint32


def test_shuffle_index_shuffles_the_final_epoch_separately() -> None:
    sizes = np.full(50, 10, dtype=np.int32)
    plan = plan_epochs(500, 10, 60)  # 49 samples in the first epoch, 11 wanted of the second
    assert plan.separate_final_epoch
    options = IndexOptions(split=None, seq_length=10, seed=3)
    index = build_split(sizes, 0, 50, plan, options).shuffle_index
    before = plan.samples_before_final_epoch
    assert sorted(index[:before]) == list(range(before))
    assert sorted(index[before:]) == list(range(before, len(index)))


def test_plan_changes_only_if_the_maps_change(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [100] * 10)
    mixture, options = Mixture.single(prefix), IndexOptions(split="8,1,1", seq_length=10, seed=1)
    plan = index_plan(mixture, options, (40, 5, None))
    assert plan == index_plan(mixture, options, (79, 9, None))
    assert plan["train"] == {"epochs": 1, "separate_final_epoch": False}
    assert index_plan(mixture, options, (80, 5, None))["train"] == {
        "epochs": 2,
        "separate_final_epoch": True,
    }
    json.dumps(plan)


def test_counts_describe_each_split(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [100, 0] * 10)
    options = IndexOptions(split="8,1,1", seq_length=10, seed=1)
    counts = build_index_maps(Mixture.single(prefix), tmp_path, options, (100, 5, None))
    assert counts["train"] == {
        "sequences": 8,
        "tokens": 800,
        "samples": 159,
        "epochs": 2,
        "separate_final_epoch": True,
    }
    assert counts["test"]["samples"] == 9


def test_an_empty_split_is_refused_if_samples_are_requested(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [100] * 10)
    mixture, options = Mixture.single(prefix), IndexOptions(split="1,0,0", seq_length=10, seed=1)
    with pytest.raises(
        DataFormatError, match=r"the valid split of .* has 0 of 10 sequences .*requested: 7"
    ):
        build_index_maps(mixture, tmp_path, options, (5, 7, 0))
    with pytest.raises(
        DataFormatError,
        match=r"the test split .* gives train 9, valid 1, test 0\) .*: set data\.split to 80,10,10",
    ):
        index_plan(mixture, replace(options, split="9,1,0"), (5, 5, None))
    build_index_maps(mixture, tmp_path, options, (5, 0, 0))
    assert len(GPTDataset(prefix, tmp_path, "valid", 10)) == 0


def test_a_split_with_fewer_tokens_than_a_sample_is_refused(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [10] * 10)
    with pytest.raises(
        DataFormatError, match=r"with 10 tokens, but one sample takes 10 \+ 1 .*requested: 1"
    ):
        index_plan(
            Mixture.single(prefix), IndexOptions(split="8,1,1", seq_length=10, seed=1), (5, 1, 0)
        )


@pytest.mark.parametrize("lengths", [[1000], [5] * 30])
def test_a_text_that_no_split_divides_gets_other_advice(tmp_path: Path, lengths: list[int]) -> None:
    mixture = Mixture.single(write_tokens(tmp_path / "a", lengths))
    options = IndexOptions(split="969,30,1", seq_length=90, seed=1)
    with pytest.raises(
        DataFormatError, match=r"no data\.split gives each split a sample: cut the text into more"
    ):
        index_plan(mixture, options, (5, 1, None))


def test_split_ranges_count_sequences_and_not_documents(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_tokens(tmp_path / "a", [3, 0, 5]))
    assert split_ranges("1,1", len(dataset))["valid"] == (1, 2)
    assert dataset.count_tokens(1, 2) == 5


def load(directory: Path, split_name: str) -> list[np.ndarray]:
    return [np.load(map_path(directory, split_name, name)) for name in MAP_NAMES]


def test_validation_keeps_its_partial_sample_on_request(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [100, 7] * 5)
    options = IndexOptions(split="0,1,1", seq_length=10, seed=1, drop_last_partial=False)
    counts = build_index_maps(Mixture.single(prefix), tmp_path, options, (0, None, None))
    assert (counts["valid"]["samples"], counts["test"]["samples"]) == (32, 22)
    documents, rows, order = load(tmp_path, "valid")
    last = (len(documents) - 1, [100, 7][documents[-1] % 2] - 1)
    assert tuple(rows[-1]) == last
    assert sorted(order) == list(range(32))


@pytest.mark.parametrize("seed", range(20))
def test_a_partial_sample_may_end_in_an_empty_sequence(tmp_path: Path, seed: int) -> None:
    lengths = np.array([5, 7, 0, 9, 0, 6, 3, 0])
    prefix = tmp_path / "tokens"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_batch(np.arange(30, dtype=np.uint16), lengths, np.ones(8, np.int64))
    options = IndexOptions(split=None, seq_length=4, seed=seed, drop_last_partial=False)
    mixture = Mixture.per_split((), (Member(str(prefix)),), ())
    build_index_maps(mixture, tmp_path, options, (0, None, 0))
    samples = GPTDataset(prefix, tmp_path / "member-00", "valid", 4, keeps_partial=True)
    read = np.concatenate([samples[index] for index in range(len(samples))])
    assert set(read.tolist()) >= set(range(30))


def test_samples_do_not_overlap_without_an_extra_token(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [100] * 10)
    options = IndexOptions(split="8,1,1", seq_length=10, seed=1, add_extra_token=False)
    counts = build_index_maps(Mixture.single(prefix), tmp_path, options, (80, None, 0))
    assert (counts["train"]["samples"], counts["train"]["epochs"], counts["valid"]["samples"]) == (
        80,
        1,
        10,
    )


@pytest.mark.parametrize("packing", ["unpacked", "pack_until_overflow"])
def test_all_samples_of_whole_documents_are_shuffled_together(packing: Packing) -> None:
    lengths = np.full(40, 7, np.int32)
    plan = plan_epochs(int(lengths.sum()), 16, None)
    options = IndexOptions(split=None, seq_length=16, seed=3, packing=packing)
    maps = build_split(lengths, 0, 40, plan, options)
    state = np.random.RandomState(3)
    state.shuffle(np.arange(len(maps.document_index)))
    expected = np.arange(len(maps.sample_index) - 1)
    state.shuffle(expected)
    assert maps.shuffle_index.tolist() == expected.tolist()


@pytest.mark.parametrize(("packing", "samples"), [("unpacked", 20), ("pack_until_overflow", 10)])
def test_packings_of_whole_documents_use_complete_epochs(
    tmp_path: Path, packing: str, samples: int
) -> None:
    prefix = write_tokens(tmp_path / "a", [5, 0] * 10)
    options = IndexOptions(split="1", seq_length=9, seed=1, packing=packing)  # type: ignore[arg-type]
    counts = build_index_maps(Mixture.single(prefix), tmp_path, options, (samples - 1, 0, 0))
    documents, rows, order = load(tmp_path, "train")
    assert (counts["train"]["epochs"], counts["train"]["samples"], len(documents)) == (
        2,
        samples,
        20,
    )
    assert (len(rows), sorted(order)) == (samples + 1, list(range(samples)))


def reference_neox(
    lengths: np.ndarray, first: int, last: int, seq_length: int, seed: int, samples: int
) -> list:
    """Return GPT-NeoX's three maps of a split, computed only with NumPy."""
    tokens, state, epochs = int(lengths[first:last].sum()), np.random.RandomState(seed), 1
    while (epochs * tokens - 1) // seq_length < samples:
        epochs += 1
    documents = np.tile(np.arange(first, last, dtype=np.int32), epochs)
    state.shuffle(documents)
    order = np.arange((epochs * tokens - 1) // seq_length, dtype=np.uint32)
    rows = reference.build_sample_index(lengths, documents, seq_length, len(order), 1)
    state.shuffle(order)
    return [documents, rows, order]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=12, max_size=30),
    seq_length=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
    samples=st.integers(1, 300),
)
def test_maps_of_style_neox_equal_the_reference(
    lengths: list[int], seq_length: int, seed: int, samples: int
) -> None:
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        prefix = write_tokens(directory / "a", [length + seq_length for length in lengths])
        options = IndexOptions(split="3,2,1", seq_length=seq_length, seed=seed, style="neox")
        build_index_maps(Mixture.single(prefix), directory, options, (samples, 1, 1))
        sizes = np.array(lengths, np.int32) + seq_length
        first, last = split_ranges("3,2,1", len(lengths), "neox")["train"]
        expected = reference_neox(sizes, first, last, seq_length, seed, samples)
        for result, expected_array in zip(load(directory, "train"), expected, strict=True):
            assert result.dtype == expected_array.dtype
            np.testing.assert_array_equal(result, expected_array)


def test_a_blend_has_the_reference_order_and_maps_of_each_member(tmp_path: Path) -> None:
    a, b = (write_tokens(tmp_path / name, [count] * 10) for name, count in (("a", 100), ("b", 30)))
    options, index = IndexOptions(split="8,1,1", seq_length=10, seed=1), tmp_path / "index"
    index.mkdir()
    mixture = Mixture.blend((Member(a, 1.0), Member(b, 3.0)))
    counts = build_index_maps(mixture, index, options, (100, 4, None))
    train = counts["train"]
    assert train["samples"] == 25 + 75
    assert [
        (member["prefix"], member["drawn"], member["epochs"]) for member in train["members"]
    ] == [
        ("a", 25, 1),
        ("b", 75, 4),  # 75 with the surplus are 76 samples; an epoch has 23.9
    ]
    dataset_index, sample_index = (
        np.load(map_path(index, "train", name)) for name in BLEND_MAP_NAMES
    )
    expected = reference.build_blend([0.25, 0.75], 100)
    for result, expected_array in zip((dataset_index, sample_index), expected, strict=True):
        assert result.dtype == expected_array.dtype
        np.testing.assert_array_equal(result, expected_array)
    # None requests every sample of every member once, regardless of the weights.
    assert counts["test"]["samples"] == 9 + 2
    single = tmp_path / "single"
    single.mkdir()
    build_index_maps(Mixture.single(b), single, options, (76, 0, None))
    for result, expected_array in zip(
        load(member_directory(index, 1), "train"), load(single, "train"), strict=True
    ):
        np.testing.assert_array_equal(result, expected_array)


def test_a_blend_without_weights_uses_every_sample_at_most_once(tmp_path: Path) -> None:
    a, b = (write_tokens(tmp_path / name, [count] * 10) for name, count in (("a", 100), ("b", 30)))
    mixture, options = (
        Mixture.blend((Member(a), Member(b))),
        IndexOptions(split="1", seq_length=10, seed=1),
    )
    assert build_index_maps(mixture, tmp_path, options, (None, 0, 0))["train"]["samples"] == 99 + 29
    assert build_index_maps(mixture, tmp_path, options, (100, 0, 0))["train"]["samples"] == 100
    assert np.load(map_path(tmp_path, "train", "dataset")).shape == (100,)
    with pytest.raises(
        DataFormatError,
        match=r"129 samples are requested from the train split, but .* has 128: give them",
    ):
        build_index_maps(mixture, tmp_path, options, (129, 0, 0))


@pytest.mark.parametrize("samples", [8, 16, 32, 40])
def test_a_blend_of_many_data_sets_gives_a_few_samples(tmp_path: Path, samples: int) -> None:
    members = []
    for number in range(31):
        prefix = str(tmp_path / f"{number}")
        with IndexedDatasetWriter(prefix, np.uint16) as writer:
            for _ in range(3):
                writer.add_document(np.ones(33, np.uint16))
        members.append(Member(prefix, 1.0 if number else 31.0))
    options = IndexOptions(split=None, seq_length=8, seed=1)
    (tmp_path / "maps").mkdir()
    mixture = Mixture.per_split((), members, ())
    counts = build_index_maps(mixture, tmp_path / "maps", options, (0, samples, 0))["valid"]
    assert counts["samples"] >= samples


def test_splits_with_separate_data_sets_have_separate_maps(tmp_path: Path) -> None:
    a, b, c = (write_tokens(tmp_path / name, [30] * 10) for name in "abc")
    mixture = Mixture.per_split([Member(a, 1.0), Member(c, 1.0)], [Member(b), Member(c)], [])
    options = IndexOptions(split=None, seq_length=10, seed=1)
    counts = build_index_maps(mixture, tmp_path, options, (20, None, None))
    assert set(counts) == {"train", "valid"}
    description = read_description(tmp_path)
    assert description.samples == {"train": 20, "valid": 2 * 29}
    assert description.blends == {"train": (0, 1), "valid": (2, 1)}
    written = sorted(
        str(path.relative_to(tmp_path)) for path in tmp_path.glob("member-01/*document*")
    )
    assert written == ["member-01/train_document_index.npy", "member-01/valid_document_index.npy"]
    assert not list(tmp_path.glob("**/test_*"))
    assert set(index_plan(mixture, options, (20, None, None))) == {"train", "valid"}


def test_the_only_data_set_of_a_split_has_complete_epochs(tmp_path: Path) -> None:
    a, b = (write_tokens(tmp_path / name, [30] * 10) for name in "ab")
    mixture = Mixture.per_split([Member(a, 1.0)], [Member(b, 2.0)], [])
    counts = build_index_maps(
        mixture, tmp_path, IndexOptions(split=None, seq_length=10, seed=1), (40, 5, 0)
    )
    assert (counts["train"]["samples"], counts["valid"]["samples"]) == (59, 29)  # complete epochs
    np.testing.assert_array_equal(
        np.load(map_path(tmp_path, "train", "dataset_sample")), np.arange(59)
    )


@pytest.mark.parametrize(
    ("mixture", "split", "samples", "message"),
    [
        (Mixture.single("{a}"), None, (1, 1, 1), "data.split is missing"),
        (Mixture.per_split([Member("{a}")], [], []), "1,1,1", (1, 0, 0), "leave data.split out"),
        (
            Mixture.per_split([Member("{a}")], [], []),
            None,
            (1, 3, 0),
            "3 samples are requested from the valid split, which",
        ),
        (Mixture.single("{a}"), "1,1,1", (-1, 0, 0), "-1 samples are requested from the train"),
    ],
)
def test_mixtures_that_contradict_the_options_are_refused(
    tmp_path: Path, mixture: Mixture, split: str | None, samples: tuple, message: str
) -> None:
    prefix = write_tokens(tmp_path / "a", [30] * 10)
    named = tuple(
        tuple(replace(member, prefix=prefix) for member in mixture.of(name)) for name in SPLIT_NAMES
    )
    options = IndexOptions(split=split, seq_length=10, seed=1)
    with pytest.raises(ConfigError, match=message):
        index_plan(Mixture(*named, whole=mixture.whole), options, samples)
