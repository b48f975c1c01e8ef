"""Tests of packing by best fit: against a naive packer, and of the samples that are read."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacore.data import _compiled
from megacore.data.best_fit import build_best_fit, piece_counts
from megacore.data.build import open_split
from megacore.data.index_directory import INDEX_NAME, member_directory, read_description
from megacore.data.index_maps import build_index_maps, index_plan
from megacore.data.index_options import IndexOptions, Member, Mixture, SentenceOptions
from megacore.errors import ConfigError
from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter
from tests.data._config import run_config

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(any)
SIZES = [30, 9, 0, 41, 12, 1, 33, 18, 7, 60, 2, 5, 5, 19]


def write(prefix: Path, lengths: list[int], first: int = 0) -> str:
    """Write documents of different tokens, numbered from `first`."""
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        for end, length in zip((first + np.cumsum(lengths)).tolist(), lengths, strict=True):
            writer.add_document(np.arange(end - length, end))
    return str(prefix)


def options(seq_length: int = 10, **values: Any) -> IndexOptions:
    return IndexOptions(split="1", seq_length=seq_length, seed=5, packing="best_fit", **values)


def read(directory: Path, prefixes: list[str], seq_length: int = 10, **data: Any) -> np.ndarray:
    """Read all samples of the train split."""
    config = run_config(seq_length=seq_length, packing="best_fit", **data)
    dataset = open_split(prefixes, directory, "train", config, tokenizer_directory=directory)
    return dataset.gather(range(len(dataset)))


def naive_samples(lengths: list[int], seq_length: int, extra: int) -> int:
    """Return the number of samples of best-fit-decreasing, by trying each open sample."""
    samples, rests = 0, []
    for length in filter(None, lengths):
        left = length
        while left > seq_length + extra:
            left -= seq_length
            samples += 1
        rests.append(left)
    spaces: list[int] = []
    for rest in sorted(rests, reverse=True):
        fitting = [number for number, space in enumerate(spaces) if space >= rest]
        if fitting:
            spaces[min(fitting, key=spaces.__getitem__)] -= rest
        else:
            spaces.append(seq_length + extra - rest)
    return samples + len(spaces)


@settings(max_examples=150, deadline=None)
@given(
    lengths=LENGTHS,
    seq_length=st.integers(1, 20),
    extra=st.booleans(),
    epochs=st.integers(1, 3),
)
def test_samples_hold_whole_documents_and_are_as_few_as_best_fit_gives(
    lengths: list[int], seq_length: int, extra: bool, epochs: int
) -> None:
    per_epoch = naive_samples(lengths, seq_length, int(extra))
    with TemporaryDirectory() as name:
        directory = Path(name)
        prefix = write(directory / "a", lengths)
        requested = (epochs - 1) * per_epoch + 1
        maps = options(seq_length, add_extra_token=extra)
        counts = build_index_maps(Mixture.single(prefix), directory, maps, (requested, 0, 0))
        train = counts["train"]
        assert (train["epochs"], train["samples"]) == (epochs, epochs * per_epoch)
        batch = read(directory, [prefix], seq_length, add_extra_token=extra)
    assert batch.shape == (epochs * per_epoch, seq_length + 1)
    # Padding is at the end of a sample only.
    assert not ((batch[:, :-1] < 0) & (batch[:, 1:] >= 0)).any()
    capacity = seq_length + extra
    assert (batch[:, capacity:] == -1).all()
    assert train["padding"] == pytest.approx((batch[:, :capacity] < 0).mean(), abs=1e-6)
    ends = np.cumsum(lengths).tolist()
    for epoch in range(epochs):
        rows = batch[epoch * per_epoch : (epoch + 1) * per_epoch].tolist()
        texts = ["".join(f",{token}" for token in row if token >= 0) + "," for row in rows]
        if extra:  # each token but a document's first is predicted once from its predecessor
            pairs = Counter(pair for row in rows for pair in pairwise(row) if -1 not in pair)
        for end, length in zip(ends, lengths, strict=True):
            tokens = range(end - length, end)
            if 0 < length <= capacity:
                document = "".join(f",{token}" for token in tokens) + ","
                assert sum(document in text for text in texts) == 1
            if extra:
                assert all(pairs[token - 1, token] == 1 for token in tokens[1:])
        if not extra:
            seen = Counter(token for row in rows for token in row if token >= 0)
            assert seen == Counter(range(sum(lengths)))


@given(lengths=LENGTHS, seq_length=st.integers(1, 20), extra=st.integers(0, 1))
def test_counts_do_not_depend_on_the_order_and_equal_the_pieces(
    lengths: list[int], seq_length: int, extra: int
) -> None:
    sizes = np.array(lengths, np.int32)
    counted = _compiled.count_best_fit(sizes, seq_length, extra)
    assert counted == _compiled.count_best_fit(np.sort(sizes), seq_length, extra)
    assert counted[0] == naive_samples(lengths, seq_length, extra)
    assert counted[1] == piece_counts(sizes, seq_length, extra).sum()


def test_spaces_are_found_over_the_whole_range_of_a_long_context() -> None:
    sizes = np.random.default_rng(1).integers(1, 140_000, 300).astype(np.int32)
    samples, _ = _compiled.count_best_fit(sizes, 131_072, 1)
    assert samples == naive_samples(sizes.tolist(), 131_072, 1)
    maps = build_best_fit(sizes, 0, 300, 1, 131_072, 1, 1)  # raises if it packs differently
    assert len(maps.shuffle_index) == samples


def test_maps_of_more_epochs_begin_with_those_of_fewer() -> None:
    sizes = np.array(SIZES, np.int32)
    two, three = (build_best_fit(sizes, 2, 14, epochs, 10, 7, 1) for epochs in (2, 3))
    pieces, samples = len(two.document_index), len(two.shuffle_index)
    np.testing.assert_array_equal(three.document_index[:pieces], two.document_index)
    np.testing.assert_array_equal(three.sample_index[: samples + 1, 0], two.sample_index[:, 0])
    np.testing.assert_array_equal(three.shuffle_index[:samples], two.shuffle_index)
    assert (two.document_index[: pieces // 2] != two.document_index[pieces // 2 :]).any()
    again, other = (build_best_fit(sizes, 2, 14, 2, 10, seed, 1) for seed in (7, 8))
    np.testing.assert_array_equal(again.sample_index, two.sample_index)
    assert (other.document_index != two.document_index).any()


def test_plan_keeps_the_key_within_an_epoch(tmp_path: Path) -> None:
    mixture = Mixture.single(write(tmp_path / "a", SIZES))
    per_epoch = naive_samples(SIZES, 10, 1)
    plans = [
        index_plan(mixture, options(), (samples, 0, 0))["train"]
        for samples in (1, per_epoch, per_epoch + 1)
    ]
    assert [plan["epochs"] for plan in plans] == [1, 1, 2]
    assert plans[0] == plans[1]


def test_a_blend_counts_the_padding_of_the_samples_that_it_draws(tmp_path: Path) -> None:
    prefixes = [write(tmp_path / "a", SIZES), write(tmp_path / "b", [7] * 30, 1000)]
    (tmp_path / "index").mkdir()
    mixture = Mixture.blend([Member(prefixes[0], 1.0), Member(prefixes[1], 3.0)])
    counts = build_index_maps(mixture, tmp_path / "index", options(), (40, 0, 0))["train"]
    assert counts["members"][1]["padding"] == pytest.approx(4 / 11, abs=1e-6)
    batch = read(tmp_path / "index", prefixes)
    assert (batch >= 1000).any(axis=1).sum() == 30
    expected = (batch < 0).mean()
    # The first data set has other samples than an average of all when few are drawn.
    assert counts["padding"] == pytest.approx(expected, abs=0.03)
    description = read_description(tmp_path / "index")
    assert description.padding["train"] == counts["padding"]
    maps = np.load(member_directory(tmp_path / "index", 1) / "train_sample_index.npy")
    assert (maps[:-1, 1] == 0).all()


def test_index_json_has_padding_only_for_samples_of_whole_documents(tmp_path: Path) -> None:
    mixture = Mixture.single(write(tmp_path / "a", SIZES))
    for packing, padded in (("packed", False), ("best_fit", True), ("unpacked", True)):
        maps = IndexOptions(split="1", seq_length=10, seed=5, packing=packing)  # type: ignore[arg-type]
        build_index_maps(mixture, tmp_path, maps, (5, 0, 0))
        assert ("padding" in json.loads((tmp_path / INDEX_NAME).read_text())) == padded
        assert bool(read_description(tmp_path).padding) == padded


def test_other_families_and_arrays_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.packing, .* which those of bert are not"):
        options(sentences=SentenceOptions("bert"))
    with pytest.raises(ConfigError, match=r"data\.packing best_fit does not have"):
        options(style="neox")
    sizes, order = np.array([3, 25], np.int32), np.array([1, 0], np.int32)
    samples, pieces = _compiled.count_best_fit(sizes, 10, 1)

    def pack(lengths: Any, order: Any, samples: int, pieces: int) -> None:
        _compiled.pack_best_fit_int32(
            lengths,
            order,
            10,
            1,
            0,
            np.empty(pieces, np.int32),
            np.empty((samples, 2), np.int32),
        )

    pack(sizes, order, samples, pieces)
    for change in ((1, 0), (-1, 0), (0, 1), (0, -1)):
        with pytest.raises(ValueError, match="do not fit the documents"):
            pack(sizes, order, samples + change[0], pieces + change[1])
    with pytest.raises(ValueError, match="out of range"):
        pack(sizes, order + 1, samples, pieces)
    with pytest.raises(ValueError, match="a length is negative"):
        pack(-sizes, order, samples, pieces)
    with pytest.raises(ValueError, match="a length is negative"):
        _compiled.count_best_fit(-sizes, 10, 1)
