from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.data import index_helpers_ref as reference
from megacore.data.index_directory import map_path
from megacore.data.indexed_dataset import IndexedDataset
from megacore.data.sentence_maps import build_masked_lm_map, build_sentence_maps, load_sentence_map
from megacore.data.token_format import DTYPES, HEADER, MAGIC
from megacore.errors import ConfigError, DataFormatError

DOCUMENTS = [[5, 9, 3, 12, 8], [4], [7, 7], [], [600, 3, 4], [6, 2, 9, 9, 1, 4, 3, 3]] * 4


def write_sentences(prefix: Path, documents: list[list[int]]) -> IndexedDataset:
    """Token files with a sequence per sentence."""
    lengths = np.array([length for document in documents for length in document], "<i4")
    starts = np.cumsum([0, *map(len, documents)]).astype("<i8")
    pointers = (np.cumsum(lengths, dtype="<i8") - lengths) * 2
    code = next(code for code, dtype in DTYPES.items() if dtype == np.dtype("<u2"))
    header = HEADER.pack(MAGIC, 1, code, len(lengths), len(starts))
    Path(f"{prefix}.idx").write_bytes(header + lengths.tobytes() + pointers.astype("<i8").tobytes() + starts.tobytes())
    Path(f"{prefix}.bin").write_bytes(bytes(2 * int(lengths.sum())))
    return IndexedDataset(prefix)


def build(dataset: IndexedDataset, first: int, last: int, **changes: Any) -> np.ndarray:
    arguments: dict[str, Any] = {
        "max_samples": None,
        "max_sequence_length": 20,
        "short_sequence_probability": 0.1,
        "seed": 1234,
        "minimum_sentences": 2,
    }
    return build_masked_lm_map(dataset, first, last, **arguments | changes)


@pytest.mark.parametrize(("max_samples", "minimum"), [(None, 2), (0, 2), (40, 1), (41, 2), (200, 2)])
def test_map_of_a_split_is_the_references(tmp_path: Path, max_samples: int | None, minimum: int) -> None:
    dataset = write_sentences(tmp_path / "a", DOCUMENTS)
    rows = build(dataset, 2, 15, max_samples=max_samples, minimum_sentences=minimum)
    limits = (2**40, 1) if max_samples is None else (max_samples, 2**31)
    starts = np.array(dataset.document_indices[2:16])
    lengths = np.array(dataset.lengths)
    expected = reference.build_sentence_map(starts, lengths, *limits, 20, 0.1, minimum, 1234)
    assert rows.dtype == np.uint32
    np.testing.assert_array_equal(rows, expected)
    assert len(rows) >= (max_samples or 0)


def test_documents_that_give_no_sample_are_refused(tmp_path: Path) -> None:
    dataset = write_sentences(tmp_path / "a", DOCUMENTS)
    with pytest.raises(DataFormatError, match=r"none of the documents 3 … 4 of .* takes at least 2"):
        build(dataset, 3, 5, max_samples=10)
    assert build(dataset, 3, 5, max_samples=0).shape == (0, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_sequence_length": 1}, "at most 1 tokens"),
        ({"short_sequence_probability": -0.1}, "is -0.1"),
        ({"short_sequence_probability": 1.5}, "is 1.5"),
        ({"short_sequence_probability": float("nan")}, "is nan"),
    ],
)
def test_values_out_of_range(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(write_sentences(tmp_path / "a", DOCUMENTS), 0, 5, **changes)


@pytest.mark.parametrize(("kind", "length", "minimum"), [("bert", 17, 2), ("t5", 18, 1)])
def test_maps_are_written_and_read(tmp_path: Path, kind: Any, length: int, minimum: int) -> None:
    dataset = write_sentences(tmp_path / "a", DOCUMENTS)
    counts = build_sentence_maps(
        tmp_path / "a", tmp_path, kind, split="4,1,1", seq_length=20, seed=3, samples=(50, 5, None)
    )
    assert counts["train"]["documents"] == 16
    expected = build(dataset, 0, 16, max_samples=50, max_sequence_length=length, seed=3, minimum_sentences=minimum)
    rows = load_sentence_map(tmp_path, "train", dataset)
    np.testing.assert_array_equal(rows, expected)
    assert counts["train"]["samples"] == len(rows)
    assert len(load_sentence_map(tmp_path, "test", dataset)) == counts["test"]["samples"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros((2, 3), np.int32), "is an array of int32"),
        (np.zeros((2, 2), np.uint32), "with shape"),
        (np.array([[0, 999, 5]], np.uint32), "points beyond the 5 sentences"),
        (np.array([[3, 3, 5]], np.uint32), "points beyond"),
    ],
)
def test_map_of_other_sentences_is_refused(tmp_path: Path, values: np.ndarray, message: str) -> None:
    dataset = write_sentences(tmp_path / "a", [[1, 2, 3], [4, 5]])
    np.save(map_path(tmp_path, "train", "sentence"), values)
    with pytest.raises(DataFormatError, match=message):
        load_sentence_map(tmp_path, "train", dataset)


def test_map_that_is_missing_or_cut_off(tmp_path: Path) -> None:
    dataset = write_sentences(tmp_path / "a", [[1, 2, 3]])
    with pytest.raises(DataFormatError, match="does not exist: build the index maps first"):
        load_sentence_map(tmp_path, "valid", dataset)
    map_path(tmp_path, "valid", "sentence").write_bytes(b"\x93NUMPY")
    with pytest.raises(DataFormatError, match="is not a readable map"):
        load_sentence_map(tmp_path, "valid", dataset)
    with pytest.raises(DataFormatError, match="there is no split training"):
        load_sentence_map(tmp_path, "training", dataset)
