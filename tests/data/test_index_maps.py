import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacore.data import _index_helpers as helpers
from megacore.data import index_helpers_ref as reference
from megacore.data.gpt_dataset import GPTDataset
from megacore.data.index_maps import (
    MAP_NAMES,
    build_index_maps,
    build_shuffle_index,
    build_split,
    index_plan,
    map_path,
    plan_epochs,
)
from megacore.data.indexed_dataset import IndexedDataset
from megacore.data.splits import SPLIT_NAMES, split_ranges
from megacore.errors import DataFormatError
from tests.data._files import write_tokens


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
@pytest.mark.parametrize("seed", [0, 1234, 2**32 - 1])
@pytest.mark.parametrize("count", [0, 1, 2, 1000, 70_001])
def test_shuffle_is_numpys(dtype: type, seed: int, count: int) -> None:
    ours, theirs = np.arange(count, dtype=dtype), np.arange(count, dtype=dtype)
    helpers.RandomState(seed).shuffle(ours)
    reference.shuffle(theirs, seed)
    np.testing.assert_array_equal(ours, theirs)


def test_shuffle_refuses_what_it_cannot_do_in_place() -> None:
    state = helpers.RandomState(1)
    frozen = np.arange(4, dtype=np.int32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="not writeable"):
        state.shuffle(frozen)
    with pytest.raises(TypeError):
        state.shuffle(np.arange(8, dtype=np.int32)[::2])
    with pytest.raises(ValueError, match="one-dimensional"):
        state.shuffle(np.zeros((2, 2), np.int32))


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=20).filter(any),
    order=st.randoms(use_true_random=False),
    epochs=st.integers(1, 3),
    seq_length=st.integers(1, 40),
    extra=st.integers(0, 1),
)
def test_sample_index_is_the_references(
    lengths: list[int], order: object, epochs: int, seq_length: int, extra: int
) -> None:
    sizes = np.array(lengths, np.int32)
    documents = np.tile(np.arange(len(lengths), dtype=np.int32), epochs)
    order.shuffle(documents)  # type: ignore[attr-defined]
    samples = max(0, (int(sizes.sum()) * epochs - extra) // seq_length)
    expected = reference.build_sample_index(sizes, documents, seq_length, samples, extra)
    narrow = helpers.build_sample_index_int32(sizes, documents, seq_length, samples, extra)
    wide = helpers.build_sample_index_int64(sizes, documents, seq_length, samples, extra)
    assert (narrow.dtype, wide.dtype) == (np.int32, np.int64)
    np.testing.assert_array_equal(narrow, expected)
    np.testing.assert_array_equal(wide, expected)
    for build in (helpers.build_sample_index_int32, reference.build_sample_index):
        with pytest.raises(ValueError, match="the documents end before the samples do"):
            build(sizes, documents, seq_length, samples + 1, extra)


def test_sample_index_checks_what_it_is_given() -> None:
    build = helpers.build_sample_index_int32
    sizes, outside = np.array([4], np.int32), np.array([1], np.int32)
    with pytest.raises(ValueError, match="out of range"):
        build(sizes, outside, 2, 1, 1)
    with pytest.raises(ValueError, match="seq_length must be positive"):
        build(sizes, np.zeros(1, np.int32), 0, 1, 1)
    with pytest.raises(TypeError):
        build(sizes.astype(np.int64), outside, 2, 1, 1)


def test_sample_index_counts_tokens_beyond_32_bits() -> None:
    sizes = np.full(3, 2**31 - 1, np.int32)
    documents = np.arange(3, dtype=np.int32)
    seq_length = 2**30
    expected = reference.build_sample_index(sizes, documents, seq_length, 5, 1)
    np.testing.assert_array_equal(helpers.build_sample_index_int32(sizes, documents, seq_length, 5, 1), expected)
    assert expected[-1].tolist() == [2, 5 * 2**30 - 2 * (2**31 - 1)]


@pytest.mark.parametrize(
    ("tokens", "seq_length", "samples", "expected"),
    [
        (137076, 64, 4924, (3, True, 6425, 4283)),
        (137076, 64, None, (1, False, 2141, 2141)),
        (137076, 64, 0, (1, False, 2141, 2141)),
        (1001, 10, 100, (1, False, 100, 100)),
        (1001, 10, 101, (2, True, 200, 100)),
        (1001, 10, 180, (2, False, 200, 200)),
    ],
)
def test_epochs_and_their_last_one(tokens: int, seq_length: int, samples: int | None, expected: tuple) -> None:
    plan = plan_epochs(tokens, seq_length, samples)
    assert (plan.epochs, plan.separate_final_epoch, plan.samples, plan.samples_before_final_epoch) == expected


def test_maps_and_samples_are_megatrons(shared_data: Path, tmp_path: Path) -> None:
    prefix, golden = shared_data / "golden" / "C_merged", shared_data / "golden" / "separate_final_epoch"
    parameters = json.loads((golden / "params.json").read_text())
    counts = build_index_maps(
        prefix,
        tmp_path,
        split=parameters["split"],
        seq_length=parameters["sequence_length"],
        seed=parameters["random_seed"],
        samples=parameters["num_samples"],
    )
    for name in SPLIT_NAMES:
        expected = parameters["splits"][name]
        assert counts[name]["samples"] == expected["len"]
        for map_name in MAP_NAMES:
            ours, theirs = (np.load(map_path(folder, name, map_name)) for folder in (tmp_path, golden))
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
        dataset, digest = GPTDataset(prefix, tmp_path, name, 64), hashlib.sha256()
        for sample in dataset.gather(range(len(dataset))):
            digest.update(sample[:-1].tobytes() + sample[1:].tobytes())
        assert digest.hexdigest() == expected["sha256_all_tokens_labels_int64le"]


def reference_split(lengths: np.ndarray, first: int, last: int, seq_length: int, seed: int, samples: int) -> list:
    """The rules of the three maps, written with NumPy alone."""
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
def test_maps_of_a_split_follow_the_rules(lengths: list[int], seq_length: int, seed: int, samples: int) -> None:
    sizes = np.array(lengths, np.int32)
    first, last = split_ranges("2,1", len(sizes))["train"]
    tokens = int(sizes[first:last].sum())
    if tokens <= seq_length:
        return
    maps = build_split(sizes, first, last, plan_epochs(tokens, seq_length, samples), seq_length, seed)
    expected = reference_split(sizes, first, last, seq_length, seed, samples)
    for ours, theirs in zip((maps.document_index, maps.sample_index, maps.shuffle_index), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert maps.shuffle_index.dtype == np.uint32


def test_shuffle_index_keeps_the_final_epoch_apart() -> None:
    index = build_shuffle_index(50, 30, helpers.RandomState(3))
    assert sorted(index[:30]) == list(range(30))
    assert sorted(index[30:]) == list(range(30, 50))


def test_plan_moves_only_when_the_maps_would(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [100] * 10)
    plan = index_plan(prefix, "8,1,1", 10, (40, 5, None))
    assert plan == index_plan(prefix, "8,1,1", 10, (79, 9, None))
    assert plan["train"] == {"epochs": 1, "separate_final_epoch": False}
    assert index_plan(prefix, "8,1,1", 10, (80, 5, None))["train"] == {"epochs": 2, "separate_final_epoch": True}
    json.dumps(plan)


def test_counts_say_what_each_split_has(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [100, 0] * 10)
    counts = build_index_maps(prefix, tmp_path, split="8,1,1", seq_length=10, seed=1, samples=(100, 5, None))
    assert counts["train"] == {
        "sequences": 8,
        "tokens": 800,
        "samples": 159,
        "epochs": 2,
        "separate_final_epoch": True,
    }
    assert counts["test"]["samples"] == 9


def test_empty_split_is_refused_when_samples_are_wanted(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [100] * 10)
    arguments = {"split": "1,0,0", "seq_length": 10, "seed": 1}
    with pytest.raises(DataFormatError, match=r"the valid split of .* has 0 of 10 sequences .*wanted: 7"):
        build_index_maps(prefix, tmp_path, **arguments, samples=(5, 7, 0))
    with pytest.raises(DataFormatError, match="the test split"):
        index_plan(prefix, "9,1,0", 10, (5, 5, None))
    build_index_maps(prefix, tmp_path, **arguments, samples=(5, 0, 0))
    assert len(GPTDataset(prefix, tmp_path, "valid", 10)) == 0


def test_split_below_one_sample_is_refused(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [10] * 10)
    with pytest.raises(DataFormatError, match=r"with 10 tokens, but one sample takes 10 \+ 1 .*wanted: 1"):
        index_plan(prefix, "8,1,1", 10, (5, 1, 0))


def test_split_bounds_agree_with_the_reader(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_tokens(tmp_path / "a", [3, 0, 5]))
    assert split_ranges("1,1", len(dataset))["valid"] == (1, 2)
    assert dataset.count_tokens(1, 2) == 5
