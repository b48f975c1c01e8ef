"""Tests of the compiled index helpers against a reference, with and without SIMD instructions."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacore.data import _compiled as helpers
from tests.data import _index_helpers_reference as reference

PORTABLE = pytest.mark.parametrize("portable", [False, True])
ROUND = 8 * 64 * 512
"""Samples per round in which a blend of up to 8 data sets is computed in segments."""


@PORTABLE
@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
@pytest.mark.parametrize("seed", [0, 1234, 2**32 - 1])
@pytest.mark.parametrize("count", [0, 1, 2, 127, 128, 129, 257, 1000, 2**16, 70_001])
def test_shuffle_equals_numpys(dtype: type, seed: int, count: int, portable: bool) -> None:
    result, expected = np.arange(count, dtype=dtype), np.arange(count, dtype=dtype)
    helpers.RandomState(seed, portable).shuffle(result)
    reference.shuffle(expected, seed)
    np.testing.assert_array_equal(result, expected)


@PORTABLE
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), counts=st.lists(st.integers(0, 3000), min_size=1, max_size=5)
)
def test_consecutive_shuffles_equal_numpys(portable: bool, seed: int, counts: list[int]) -> None:
    state, numpy_state = helpers.RandomState(seed, portable), np.random.RandomState(seed)
    for count in counts:
        result, expected = np.arange(count, dtype=np.int32), np.arange(count, dtype=np.int32)
        state.shuffle(result)
        numpy_state.shuffle(expected)
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_beyond_32_bits_is_refused(seed: int) -> None:
    with pytest.raises(TypeError):
        helpers.RandomState(seed)


def test_shuffle_refuses_arrays_it_cannot_change_in_place() -> None:
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
    epochs=st.integers(1, 12),
    seq_length=st.integers(1, 40),
    extra=st.integers(0, 1),
    partial=st.booleans(),
)
def test_sample_index_equals_the_reference(
    lengths: list[int], order: Any, epochs: int, seq_length: int, extra: int, partial: bool
) -> None:
    sizes = np.array(lengths, np.int32)
    documents = np.tile(np.arange(len(lengths), dtype=np.int32), epochs)
    order.shuffle(documents)
    samples = max(0, (int(sizes.sum()) * epochs - extra) // seq_length) + partial
    expected = reference.build_sample_index(sizes, documents, seq_length, samples, extra, partial)
    narrow = helpers.build_sample_index_int32(sizes, documents, seq_length, samples, extra, partial)
    wide = helpers.build_sample_index_int64(sizes, documents, seq_length, samples, extra, partial)
    assert (narrow.dtype, wide.dtype) == (np.int32, np.int64)
    np.testing.assert_array_equal(narrow, expected)
    np.testing.assert_array_equal(wide, expected)
    for build in (helpers.build_sample_index_int32, reference.build_sample_index):
        with pytest.raises(ValueError, match="the documents end before the samples do"):
            build(sizes, documents, seq_length, samples + 1, extra, partial)


def test_sample_index_refuses_invalid_arguments() -> None:
    build = helpers.build_sample_index_int32
    sizes, first, outside = np.array([4], np.int32), np.zeros(1, np.int32), np.array([1], np.int32)
    with pytest.raises(ValueError, match="out of range"):
        build(sizes, outside, 2, 1, 1)
    with pytest.raises(ValueError, match="out of range"):
        build(sizes, np.array([-1], np.int32), 2, 1, 1)
    with pytest.raises(ValueError, match="negative"):
        build(np.array([4, -1], np.int32), first, 2, 1, 1)
    with pytest.raises(ValueError, match="seq_length must be positive"):
        build(sizes, first, 0, 1, 1)
    with pytest.raises(ValueError, match="no last sample"):
        build(sizes, first, 2, 0, 1, partial=True)
    with pytest.raises(TypeError):
        build(sizes.astype(np.int64), outside, 2, 1, 1)  # type: ignore[arg-type]


def test_sample_index_is_exact_beyond_32_bits_of_tokens() -> None:
    sizes = np.full(3, 2**31 - 1, np.int32)
    documents = np.arange(3, dtype=np.int32)
    seq_length = 2**30
    expected = reference.build_sample_index(sizes, documents, seq_length, 5, 1)
    np.testing.assert_array_equal(
        helpers.build_sample_index_int32(sizes, documents, seq_length, 5, 1), expected
    )
    assert expected[-1].tolist() == [2, 5 * 2**30 - 2 * (2**31 - 1)]


@pytest.mark.parametrize("length", [65534, 65535, 65536, 200_000])
def test_sample_index_equals_the_reference_for_lengths_beyond_16_bits(length: int) -> None:
    sizes = np.array([7, length, 3], np.int32)
    documents = np.array([1, 0, 1, 2, 1], np.int32)
    samples = (int(sizes[documents].sum()) - 1) // 1000
    expected = reference.build_sample_index(sizes, documents, 1000, samples, 1)
    np.testing.assert_array_equal(
        helpers.build_sample_index_int32(sizes, documents, 1000, samples, 1), expected
    )


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=40), size=st.integers(0, 300))
def test_blend_equals_the_reference(weights: list[float], size: int) -> None:
    shares = np.array(weights) / np.sum(weights)
    reference_blend = reference.build_blend(shares, size)
    for result, expected in zip(helpers.build_blend(shares, size), reference_blend, strict=True):
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result, expected)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12))
def test_exhaustive_blend_equals_the_reference(sizes: list[int]) -> None:
    blend = helpers.build_exhaustive_blend(np.array(sizes))
    for result, expected in zip(blend, reference.build_exhaustive_blend(sizes), strict=True):
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(np.bincount(blend[0], minlength=len(sizes)), sizes)


def test_ties_of_equal_weights_are_resolved_like_megatron(shared_data: Path) -> None:
    golden = np.load(shared_data / "golden" / "blend" / "w3tie.npz")
    dataset_index, sample_index = helpers.build_blend(
        golden["weights"], len(golden["dataset_index"])
    )
    np.testing.assert_array_equal(dataset_index, golden["dataset_index"])
    np.testing.assert_array_equal(sample_index, golden["dataset_sample_index"])


@pytest.mark.parametrize("datasets", [1, 3, 8, 9, 17, 33])
@pytest.mark.parametrize("power", [0, 1, 6])
def test_a_blend_in_segments_equals_the_sequential_one(datasets: int, power: int) -> None:
    weights = np.random.RandomState(datasets).random_sample(datasets) ** power
    shares, size = weights / weights.sum(), ROUND + 3000
    for result, expected in zip(
        helpers.build_blend(shares, size), helpers.build_blend(shares, size, True), strict=True
    ):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    "sizes", [[ROUND, 1, 2, ROUND // 2], [100, ROUND + 7], [ROUND // 9] * 11, [0, ROUND * 2, 5]]
)
def test_an_exhaustive_blend_in_segments_equals_the_sequential_one(sizes: list[int]) -> None:
    limits = np.array(sizes)
    dataset_index, sample_index = helpers.build_exhaustive_blend(limits)
    for result, expected in zip(
        (dataset_index, sample_index), helpers.build_exhaustive_blend(limits, True), strict=True
    ):
        np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(np.bincount(dataset_index, minlength=len(sizes)), sizes)


def test_blend_refuses_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="add up to 1"):
        helpers.build_blend(np.array([0.5, 0.6]), 4)
    with pytest.raises(ValueError, match="must not be negative"):
        helpers.build_blend(np.array([1.5, -0.5]), 4)
    with pytest.raises(ValueError, match="must not be negative"):
        helpers.build_blend(np.array([np.nan, 1.0]), 4)
    with pytest.raises(ValueError, match="must not be negative"):
        helpers.build_blend(np.ones(1), -1)
    with pytest.raises(ValueError, match="at least one"):
        helpers.build_blend(np.ones(0), 4)
    with pytest.raises(ValueError, match="at most 32767"):
        helpers.build_blend(np.full(32768, 1 / 32768), 4)
    with pytest.raises(ValueError, match="must not be negative"):
        helpers.build_exhaustive_blend(np.array([3, -1]))
    with pytest.raises(ValueError, match="exceed the memory"):
        helpers.build_exhaustive_blend(np.array([2**62, 2**62]))
    with pytest.raises(TypeError):
        helpers.build_blend(np.ones(1, np.float32), 4)  # type: ignore[arg-type]


def test_blend_supports_as_many_data_sets_as_int16() -> None:
    dataset_index, _ = helpers.build_blend(np.full(32767, 1 / 32767), 32767)
    assert sorted(dataset_index.tolist()) == list(range(32767))


@settings(max_examples=150, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(1, 40), max_size=12), max_size=12),
    long=st.booleans(),
    max_samples=st.integers(0, 60),
    max_epochs=st.integers(0, 30),
    max_length=st.integers(2, 80),
    short=st.sampled_from([0.0, 0.1, 0.3, 1.0]),
    min_sentences=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_sentence_map_equals_the_reference(
    documents: list[list[int]], long: bool, **arguments: Any
) -> None:
    lengths = np.array([length for document in documents for length in document], np.int32)
    if long and len(lengths):
        lengths[len(lengths) // 2] = 513
    starts = np.cumsum([0, *map(len, documents)])
    values = list(arguments.values())
    max_samples, max_epochs, max_length, short, min_sentences, seed = values
    build_arguments = (
        starts,
        lengths,
        max_samples,
        max_epochs,
        max_length,
        short,
        min_sentences,
        seed,
    )
    expected = reference.build_sentence_map(*build_arguments)
    for build, dtype in (
        (helpers.build_sentence_map_uint32, np.uint32),
        (helpers.build_sentence_map_uint64, np.uint64),
    ):
        rows = build(*build_arguments)
        assert rows.dtype == dtype
        np.testing.assert_array_equal(rows, expected)


def test_sentence_map_refuses_invalid_arguments() -> None:
    starts, lengths = np.array([0, 2]), np.ones(2, np.int32)

    def build(
        starts: Any = starts, max_length: int = 5, short: float = 0.1, min_sentences: int = 1
    ) -> Any:
        return helpers.build_sentence_map_uint32(
            starts, lengths, 9, 1, max_length, short, min_sentences, 1
        )

    assert len(build()) == 1
    with pytest.raises(ValueError, match="out of range"):
        build(starts=np.array([0, 3]))
    with pytest.raises(ValueError, match="falling"):
        build(starts=np.array([0, 2, 1]))
    with pytest.raises(ValueError, match="one-dimensional"):
        build(starts=np.zeros(0, np.int64))
    with pytest.raises(ValueError, match="at least 2"):
        build(max_length=1)
    with pytest.raises(ValueError, match="short_probability"):
        build(short=float("nan"))
    with pytest.raises(ValueError, match="positive"):
        build(min_sentences=0)


def test_sentence_map_outlives_its_inputs() -> None:
    rows = helpers.build_sentence_map_uint32(
        np.array([0, 4]), np.ones(4, np.int32), 9, 1, 5, 0.0, 1, 1
    )
    gc.collect()
    assert rows.tolist() == [[0, 4, 5]]
