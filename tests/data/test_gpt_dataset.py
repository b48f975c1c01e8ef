"""Tests of the GPT data set: samples of token files and damaged index maps."""

from pathlib import Path

import numpy as np
import pytest

from megacore.data.gpt_dataset import GPTDataset
from megacore.data.index_directory import MAP_NAMES, map_path
from megacore.data.index_maps import build_index_maps
from megacore.data.index_options import IndexOptions, Mixture
from megacore.errors import DataFormatError
from tests.data._files import write_tokens

SEQ_LENGTH = 7


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    prefix = write_tokens(tmp_path / "a", [3, 1, 0, 20, 2, 9, 30])
    options = IndexOptions(split="1", seq_length=SEQ_LENGTH, seed=5)
    build_index_maps(Mixture.single(prefix), tmp_path, options, (None, 0, 0))
    return prefix


def test_samples_are_shuffled_windows_of_the_shuffled_documents(
    prefix: str, tmp_path: Path
) -> None:
    dataset = GPTDataset(prefix, tmp_path, "train", SEQ_LENGTH)
    order, documents = (
        np.load(map_path(tmp_path, "train", name)) for name in ("shuffle", "document")
    )
    stream = np.concatenate([dataset.tokens[i] for i in documents])
    assert len(dataset) == (len(stream) - 1) // SEQ_LENGTH
    for index, sample in enumerate(order):
        expected = stream[sample * SEQ_LENGTH : (sample + 1) * SEQ_LENGTH + 1]
        np.testing.assert_array_equal(dataset[index], expected)


def test_gather_returns_a_batch_of_samples(prefix: str, tmp_path: Path) -> None:
    dataset = GPTDataset(prefix, tmp_path, "train", SEQ_LENGTH)
    batch = dataset.gather([4, 0, 4])
    assert (batch.shape, batch.dtype) == ((3, SEQ_LENGTH + 1), np.int64)
    np.testing.assert_array_equal(batch, np.stack([dataset[4], dataset[0], dataset[4]]))


@pytest.mark.parametrize("index", [-1, 9])
def test_an_index_outside_the_split_is_refused(prefix: str, tmp_path: Path, index: int) -> None:
    dataset = GPTDataset(prefix, tmp_path, "train", SEQ_LENGTH)
    assert len(dataset) == 9
    with pytest.raises(IndexError, match="has no sample"):
        dataset[index]


def test_maps_of_another_sequence_length_are_refused(prefix: str, tmp_path: Path) -> None:
    for seq_length in (SEQ_LENGTH - 1, SEQ_LENGTH + 1):
        dataset = GPTDataset(prefix, tmp_path, "train", seq_length)
        with pytest.raises(DataFormatError, match=r"built for another data\.seq_length"):
            dataset.gather(range(len(dataset)))


def test_maps_of_other_tokens_are_refused(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(DataFormatError, match="was not built for"):
        GPTDataset(write_tokens(tmp_path / "b", [40]), tmp_path, "train", SEQ_LENGTH)


@pytest.mark.parametrize("name", MAP_NAMES)
@pytest.mark.parametrize("content", [None, b"", b"\x93NUMPY\x01\x00", b"text"])
def test_a_missing_or_damaged_map_is_refused_with_its_name(
    prefix: str, tmp_path: Path, name: str, content: bytes | None
) -> None:
    path = map_path(tmp_path, "train", name)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataFormatError, match=path.name):
        GPTDataset(prefix, tmp_path, "train", SEQ_LENGTH)


@pytest.mark.parametrize("name", MAP_NAMES)
@pytest.mark.parametrize("change", ["float", "pickle", "negative", "beyond"])
def test_a_map_with_wrong_types_or_values_is_refused(
    prefix: str, tmp_path: Path, name: str, change: str
) -> None:
    path = map_path(tmp_path, "train", name)
    values = np.load(path).astype(np.int64)
    if change == "float":
        values = values.astype(float)
    elif change == "pickle":
        values = values.astype(object)
    else:
        values.flat[-2 if name == "sample" else -1] = -1 if change == "negative" else 10**6
    np.save(path, values)
    with pytest.raises(DataFormatError, match=path.name):
        GPTDataset(prefix, tmp_path, "train", SEQ_LENGTH)


def test_an_offset_beyond_a_document_is_refused(prefix: str, tmp_path: Path) -> None:
    path = map_path(tmp_path, "train", "sample")
    rows = np.load(path)
    rows[3, 1] = 10**6
    np.save(path, rows)
    dataset = GPTDataset(prefix, tmp_path, "train", SEQ_LENGTH)
    with pytest.raises(DataFormatError, match=r"sample 2 does not have|sample 3 does not have"):
        dataset.gather(range(len(dataset)))
