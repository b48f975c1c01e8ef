"""Tests of the compiled gatherer and packer against a slow reference and with damaged maps."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacore.data._compiled import Gatherer
from megacore.data.build import open_split
from megacore.data.index_directory import MAP_NAMES, map_path
from megacore.data.index_maps import build_index_maps
from megacore.data.index_options import IndexOptions, Mixture
from megacore.data.index_plans import least_samples, pack_sample_index
from megacore.token_files.indexed_dataset import IndexedDataset
from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter
from tests.data._config import run_config
from tests.data._reference import samples_of

WHOLE = ("pack_until_overflow", "unpacked")
CONSECUTIVE = ("packed", *WHOLE)
"""Packings with which a sample is one range of the document index."""
DTYPES = ("u1", "i1", "i2", "u2", "i4", "i8")
LENGTHS = st.lists(st.integers(0, 25), min_size=1, max_size=30).filter(
    lambda lengths: sum(lengths) > 12
)


def tokens(count: int, dtype: str) -> np.ndarray:
    """Return tokens that differ from their neighbours and reach the limits of their type."""
    return np.resize(
        np.array([0, 1, 5, np.iinfo(dtype).max, 2, np.iinfo(dtype).max - 1, 3], dtype), count
    )


def write(prefix: Path, lengths: Sequence[int], dtype: str) -> None:
    stream = tokens(sum(lengths), dtype)
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for end, length in zip(np.cumsum(lengths), lengths, strict=True):
            writer.add_document(stream[end - length : end])


@settings(max_examples=150, deadline=None)
@given(
    lengths=LENGTHS,
    dtype=st.sampled_from(DTYPES),
    seq_length=st.integers(1, 11),
    packing=st.sampled_from(CONSECUTIVE),
    extra=st.booleans(),
    keep_partial=st.booleans(),
    requested=st.integers(1, 40),
    order=st.randoms(use_true_random=False),
)
def test_gathered_samples_equal_the_reference(
    lengths: list[int],
    dtype: str,
    seq_length: int,
    packing: str,
    extra: bool,
    keep_partial: bool,
    requested: int,
    order: object,
) -> None:
    options = IndexOptions(
        split="0,1,0",
        seq_length=seq_length,
        seed=3,
        packing=packing,  # type: ignore[arg-type]
        add_extra_token=extra,
        drop_last_partial=not keep_partial,
    )
    config = run_config(
        seq_length=seq_length,
        packing=packing,
        add_extra_token=extra,
        drop_last_partial=not keep_partial or packing != "packed",
    )
    with TemporaryDirectory() as folder:
        prefix = Path(folder, "tokens")
        write(prefix, lengths, dtype)
        build_index_maps(Mixture.single(str(prefix)), folder, options, (0, requested, 0))
        dataset = open_split([str(prefix)], folder, "valid", config, tokenizer_directory=folder)
        documents, _, shuffle = (np.load(map_path(folder, "valid", name)) for name in MAP_NAMES)
        stored = IndexedDataset(prefix)
        expected = samples_of(
            [stored[i].tolist() for i in documents],
            seq_length,
            packing,
            int(extra),
            keep_partial=keep_partial,
        )
        assert len(dataset) == len(expected) >= requested
        indices = list(range(len(dataset))) * 2
        order.shuffle(indices)  # type: ignore[attr-defined]
        assert dataset.gather(indices).tolist() == [expected[shuffle[index]] for index in indices]
        assert dataset.gather([]).shape == (0, seq_length + 1)


@settings(max_examples=100, deadline=None)
@given(
    lengths=LENGTHS,
    seq_length=st.integers(1, 11),
    packing=st.sampled_from(WHOLE),
    extra=st.integers(0, 1),
)
def test_least_samples_is_a_lower_bound_of_an_epoch(
    lengths: list[int], seq_length: int, packing: str, extra: int
) -> None:
    sizes, documents = np.array(lengths, np.int32), np.arange(len(lengths), dtype=np.int32)
    rows = pack_sample_index(sizes, documents, seq_length, packing, extra)  # type: ignore[arg-type]
    documents_with_tokens = np.count_nonzero(sizes)
    least = least_samples(int(sizes.sum()), int(documents_with_tokens), seq_length, packing, extra)  # type: ignore[arg-type]
    assert rows.dtype == np.int32
    assert len(rows) - 1 >= least
    assert packing == "pack_until_overflow" or len(rows) - 1 == least == documents_with_tokens


@given(lengths=LENGTHS, seq_length=st.integers(1, 11))
def test_packing_until_overflow_predicts_each_token_once(
    lengths: list[int], seq_length: int
) -> None:
    # The first token of a document has no preceding token to predict it from.
    ends = np.cumsum(lengths).tolist()
    documents = [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]
    samples = samples_of(documents, seq_length, "pack_until_overflow", 1)
    labels = sorted(token for sample in samples for token in sample[1:])
    for document in documents:
        assert all(labels.count(token) == 1 for token in document[1:])


def small_gatherer(**changes: object) -> Gatherer:
    """Return a gatherer of six documents, one of them empty, with four samples of 5 + 1 tokens."""
    values: dict[str, object] = {
        "tokens": np.arange(24, dtype=np.uint16),
        "pointers": np.array([0, 8, 8, 20, 30, 40], np.int64),
        "document_index": np.array([4, 0, 1, 2, 5, 3], np.int32),
        "sample_index": np.array([[0, 0], [1, 0], [3, 1], [4, 0], [5, 1]], np.int32),
        "shuffle_index": np.array([2, 0, 3, 1], np.uint32),
        "seq_length": 5,
        "extra": 1,
        "whole_documents": False,
        "short_last": False,
    }
    return Gatherer(**(values | changes))  # type: ignore[arg-type]


NUMBERS = st.one_of(
    st.integers(-2, 8), st.sampled_from([2**31 - 1, 2**62, 2**63 - 1, -(2**63), -(2**31)])
)


@settings(max_examples=400, deadline=None)
@given(
    documents=st.lists(NUMBERS, max_size=8),
    rows=st.lists(st.tuples(NUMBERS, NUMBERS), min_size=5, max_size=5),
    shuffle=st.lists(NUMBERS, min_size=4, max_size=4),
    pointers=st.lists(NUMBERS, max_size=8),
    packing=st.sampled_from(("packed", "whole", "best_fit")),
    extra=st.integers(0, 1),
)
def test_damaged_maps_never_cause_writes_outside_the_row(
    documents: list[int],
    rows: list[tuple[int, int]],
    shuffle: list[int],
    pointers: list[int],
    packing: str,
    extra: int,
) -> None:
    gatherer = small_gatherer(
        pointers=np.array(pointers, np.int64),
        document_index=np.array(documents, np.int64),
        sample_index=np.array(rows, np.int64),
        shuffle_index=np.array(shuffle, np.int64),
        whole_documents=packing != "packed",
        best_fit=packing == "best_fit",
        extra=extra,
        short_last=True,
    )
    for index in range(4):
        out = np.full((3, 6), -7, np.int64)
        first_damaged = gatherer.gather(np.array([index]), out, np.array([1]))
        assert (out[[0, 2]] == -7).all()
        if first_damaged < 0:
            assert ((out[1] >= -1) & (out[1] < 24)).all()


def test_each_sample_is_copied_to_its_row() -> None:
    gatherer, out = small_gatherer(), np.full((4, 6), -7, np.int64)
    assert gatherer.gather(np.array([0, 1]), out, np.array([3, 1])) == -1
    assert out.tolist() == [[-7] * 6, [15, 16, 17, 18, 19, 0], [-7] * 6, [5, 6, 7, 8, 9, 20]]


@pytest.mark.parametrize(
    "arguments",
    [
        {"tokens": np.zeros(4)},
        {"tokens": np.zeros((2, 2), np.int32)},
        {"document_index": np.zeros(4, np.int16)},
        {"shuffle_index": np.zeros(8, np.uint32)[::2]},
        {"shuffle_index": np.zeros(2, np.uint32)},
        {"extra": 2},
        {"best_fit": True},
        {"seq_length": 0},
    ],
)
def test_arguments_of_wrong_type_or_shape_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        small_gatherer(**arguments)


def test_output_rows_and_indices_that_do_not_fit_are_refused() -> None:
    gatherer, indices, out = small_gatherer(), np.array([0, 1]), np.zeros((2, 6), np.int64)
    frozen = out.copy()
    frozen.flags.writeable = False
    for rows in (np.array([0]), np.array([0, 2]), np.array([-1, 0])):
        with pytest.raises(ValueError, match="rows"):
            gatherer.gather(indices, out, rows)
    for wrong in (frozen, out[:1]):
        with pytest.raises(ValueError, match=r"writeable|rows do not fit"):
            gatherer.gather(indices, wrong)
    for wrong in (out.astype(np.int32), np.zeros((6, 2), np.int64).T):
        with pytest.raises(TypeError):
            gatherer.gather(indices, wrong)
    with pytest.raises(IndexError, match="4"):
        gatherer.gather(np.array([4]), out)


def test_packing_refuses_invalid_documents_and_lengths() -> None:
    lengths = np.array([3, 4], np.int32)
    with pytest.raises(ValueError, match="document_index is out of range"):
        pack_sample_index(lengths, np.array([2], np.int32), 4, "pack_until_overflow", 1)
    with pytest.raises(ValueError, match="a length is negative"):
        pack_sample_index(-lengths, np.array([0], np.int32), 4, "pack_until_overflow", 1)
