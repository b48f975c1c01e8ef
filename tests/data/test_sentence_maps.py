"""Tests of sentence maps, the index maps of BERT and T5."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.data.index_directory import map_path, member_directory, read_description
from megacore.data.index_options import IndexOptions, Member, Mixture, SentenceOptions
from megacore.data.sentence_maps import (
    SentencePart,
    build_sentence_map,
    build_sentence_maps,
    count_samples,
    load_sentence_map,
    sentence_plan,
)
from megacore.errors import ConfigError, DataFormatError
from megacore.token_files.indexed_dataset import IndexedDataset
from tests.data import _index_helpers_reference as reference
from tests.data._sentences import write_lengths

DOCUMENTS = [[5, 9, 3, 12, 8], [4], [7, 7], [], [600, 3, 4], [6, 2, 9, 9, 1, 4, 3, 3]] * 4
BERT = SentenceOptions("bert", minimum_sentences=2)
T5 = SentenceOptions("t5")


def options(sentences: SentenceOptions | None = BERT, **changes: Any) -> IndexOptions:
    defaults: dict[str, Any] = {
        "split": "4,1,1",
        "seq_length": 23,
        "seed": 1234,
        "sentences": sentences,
    }
    return IndexOptions(**defaults | changes)


@pytest.mark.parametrize(("requested", "minimum"), [(None, 2), (0, 2), (40, 1), (41, 2), (200, 2)])
def test_map_of_a_split_equals_the_reference(
    tmp_path: Path, requested: int | None, minimum: int
) -> None:
    dataset = write_lengths(tmp_path / "a", DOCUMENTS)
    part = SentencePart(dataset, 2, 15, requested)
    index_options = options(SentenceOptions("bert", minimum))
    rows = build_sentence_map(part, index_options)
    limits = (2**40, 1) if requested is None else (requested, 2**31)
    starts = np.array(dataset.document_indices[2:16])
    lengths = np.array(dataset.lengths)
    expected = reference.build_sentence_map(starts, lengths, *limits, 20, 0.1, minimum, 1234)
    assert rows.dtype == np.uint32
    np.testing.assert_array_equal(rows, expected)
    assert len(rows) >= (requested or 0)
    epochs, samples = count_samples(part, index_options)
    assert samples == len(rows)
    if epochs > 1:  # one epoch less has too few samples
        fewer = reference.build_sentence_map(
            starts, lengths, 2**40, epochs - 1, 20, 0.1, minimum, 1234
        )
        assert len(fewer) < (requested or 0) <= samples


def test_documents_without_a_sample_are_refused(tmp_path: Path) -> None:
    dataset = write_lengths(tmp_path / "a", DOCUMENTS)
    for build in (build_sentence_map, count_samples):
        with pytest.raises(
            DataFormatError, match=r"none of the documents 3 … 4 of .* takes at least 2"
        ):
            build(SentencePart(dataset, 3, 5, 10), options())
    assert build_sentence_map(SentencePart(dataset, 3, 5, 0), options()).shape == (0, 3)
    with pytest.raises(DataFormatError, match="the split has 0 of 24 documents"):
        build_sentence_map(SentencePart(dataset, 3, 3, None), options())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: options(seq_length=4),
            "data.seq_length is 4: a sample of bert has 3 special tokens",
        ),
        (lambda: SentenceOptions("t5", short_seq_prob=-0.1), "short_seq_prob is -0.1"),
        (lambda: SentenceOptions("t5", short_seq_prob=1.5), "short_seq_prob is 1.5"),
        (lambda: SentenceOptions("t5", short_seq_prob=float("nan")), "short_seq_prob is nan"),
        (
            lambda: SentenceOptions("bert", minimum_sentences=3),
            "take 1 or 2 sentences at least, not bert with 3",
        ),
        (
            lambda: options(packing="unpacked"),
            "are for samples of tokens, which those of bert are not",
        ),
        (lambda: options(add_extra_token=False), "leave them at their defaults"),
        (
            lambda: build_sentence_maps(
                Mixture.single("a"), ".", options(sentences=None), (1, 1, 1)
            ),
            "say for which",
        ),
    ],
)
def test_invalid_options_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("sentences", [BERT, T5])
def test_maps_and_their_description_are_read_back(
    tmp_path: Path, sentences: SentenceOptions
) -> None:
    dataset = write_lengths(tmp_path / "a", DOCUMENTS)
    index_options = options(sentences, seed=3)
    mixture = Mixture.single(str(tmp_path / "a"))
    counts = build_sentence_maps(mixture, tmp_path, index_options, (50, 5, None))
    assert (counts["train"]["documents"], counts["train"]["sequences"]) == (16, 46)
    rows = load_sentence_map(tmp_path, "train", dataset)
    np.testing.assert_array_equal(
        rows, build_sentence_map(SentencePart(dataset, 0, 16, 50), index_options)
    )
    assert counts["train"]["samples"] == len(rows)
    description = read_description(tmp_path)
    assert description.options == index_options
    assert description.single
    assert description.samples == {name: entry["samples"] for name, entry in counts.items()}
    epochs = {name: {"epochs": entry["epochs"]} for name, entry in counts.items()}
    assert sentence_plan(mixture, index_options, (50, 5, None)) == epochs
    # As many epochs give the same maps.
    assert sentence_plan(mixture, index_options, (len(rows), 5, None)) == epochs


def test_a_blend_has_maps_of_each_member(tmp_path: Path) -> None:
    first, second = (write_lengths(tmp_path / name, DOCUMENTS) for name in "ab")
    mixture = Mixture.blend([Member(first.prefix, 1.0), Member(second.prefix, 3.0)])
    directory = tmp_path / "maps"
    directory.mkdir()
    counts = build_sentence_maps(mixture, directory, options(), (100, 8, None))
    assert [entry["drawn"] for entry in counts["train"]["members"]] == [25, 75]
    assert counts["train"]["samples"] == 100
    assert counts["test"]["samples"] == sum(entry["samples"] for entry in counts["test"]["members"])
    assert counts["train"]["documents"] == 32
    datasets, samples = (
        np.load(map_path(directory, "train", name)) for name in ("dataset", "dataset_sample")
    )
    for number, dataset in enumerate((first, second)):
        rows = load_sentence_map(member_directory(directory, number), "train", dataset)
        assert samples[datasets == number].max() < len(rows)
    assert sentence_plan(mixture, options(), (100, 8, None))["train"]["size"] == 100
    json.loads((directory / "index.json").read_text())


def test_separate_data_sets_of_splits_are_used_entirely(tmp_path: Path) -> None:
    prefixes = [write_lengths(tmp_path / name, DOCUMENTS).prefix for name in "ab"]
    mixture = Mixture.per_split([Member(prefixes[0])], [Member(prefixes[1])], [])
    counts = build_sentence_maps(mixture, tmp_path, options(split=None), (10, None, 0))
    assert {name: entry["documents"] for name, entry in counts.items()} == {
        "train": 24,
        "valid": 24,
    }
    with pytest.raises(
        ConfigError, match="3 samples are requested from the test split, which has no data set"
    ):
        build_sentence_maps(mixture, tmp_path, options(split=None), (10, None, 3))
    with pytest.raises(
        ConfigError, match=r"data\.split is 4,1,1, but each data set belongs to one split whole"
    ):
        build_sentence_maps(mixture, tmp_path, options(), (10, None, 0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros((2, 3), np.int32), "is an array of int32"),
        (np.zeros((2, 2), np.uint32), "with shape"),
        (np.array([[0, 999, 5]], np.uint32), "points beyond the 5 sentences"),
        (np.array([[3, 3, 5]], np.uint32), "points beyond"),
        (
            np.array([[0, 2, 5], [0, 2, 9]], np.uint32),
            "samples of 5 to 9 tokens where 2 to 8 have room",
        ),
        (np.array([[0, 2, 1]], np.uint32), "samples of 1 to 1 tokens"),
    ],
)
def test_an_invalid_map_or_one_of_other_sentences_is_refused(
    tmp_path: Path, values: np.ndarray, message: str
) -> None:
    dataset = write_lengths(tmp_path / "a", [[1, 2, 3], [4, 5]])
    np.save(map_path(tmp_path, "train", "sentence"), values)
    with pytest.raises(DataFormatError, match=message):
        load_sentence_map(tmp_path, "train", dataset, 8)


def test_a_missing_or_truncated_map_and_an_unknown_split_are_refused(tmp_path: Path) -> None:
    dataset = write_lengths(tmp_path / "a", [[1, 2, 3]])
    with pytest.raises(DataFormatError, match="does not exist: build the index maps first"):
        load_sentence_map(tmp_path, "valid", dataset)
    map_path(tmp_path, "valid", "sentence").write_bytes(b"\x93NUMPY")
    with pytest.raises(DataFormatError, match="is not a readable index map"):
        load_sentence_map(tmp_path, "valid", dataset)
    with pytest.raises(DataFormatError, match="there is no split training"):
        load_sentence_map(tmp_path, "training", dataset)


@pytest.mark.parametrize("change", [{"kind": "gpt"}, {"minimum_sentences": 0}, {"unknown": 1}])
def test_a_description_with_damaged_sentence_options_is_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    prefix = write_lengths(tmp_path / "a", DOCUMENTS).prefix
    build_sentence_maps(Mixture.single(prefix), tmp_path, options(), (5, 5, 5))
    path = tmp_path / "index.json"
    content = json.loads(path.read_text())
    content["sentences"] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(DataFormatError, match=r"index\.json is damaged"):
        read_description(tmp_path)


def test_t5_takes_all_sentences_of_a_document_as_one_sample(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_lengths(tmp_path / "a", [[3, 4], [2, 2]]).prefix)
    rows = build_sentence_map(SentencePart(dataset, 0, 2, None), options(T5))
    assert sorted(rows.tolist()) == [[0, 2, 21], [2, 4, 21]]
