"""Tests of T5's samples with Megatron core's spans and with T5's random spans."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.config.data import SpanCorruptionConfig
from megacore.data.index_options import IndexOptions, Mixture, SentenceOptions
from megacore.data.sentence_dataset import T5Dataset
from megacore.data.sentence_maps import build_sentence_maps, load_sentence_map
from megacore.token_files.indexed_dataset import IndexedDataset
from tests.data._sentences import SENTINELS, SEP, joined, t5_row, vocabulary, write_lengths

SEQ_LENGTH, DECODER = 96, 48
VOCABULARY = vocabulary()
MEGATRON = {"mean_span_length": None}


def build(directory: Path, seed: int = 1234, short: float = 0.2) -> IndexedDataset:
    random = np.random.default_rng(5)
    documents = [random.integers(1, 30, random.integers(1, 14)).tolist() for _ in range(80)]
    tokens = write_lengths(directory / "s", documents)
    options = IndexOptions(
        split="8,1,1",
        seq_length=SEQ_LENGTH,
        seed=seed,
        sentences=SentenceOptions("t5", short_seq_prob=short),
    )
    build_sentence_maps(Mixture.single(tokens.prefix), directory, options, (150, 20, None))
    return tokens


def open_dataset(
    tokens: IndexedDataset, directory: Path, seed: int = 1234, **config: Any
) -> T5Dataset:
    span_corruption = SpanCorruptionConfig.model_validate({"decoder_seq_length": DECODER, **config})
    return T5Dataset(
        tokens.prefix,
        directory,
        "train",
        seq_length=SEQ_LENGTH,
        vocabulary=VOCABULARY,
        config=span_corruption,
        seed=seed,
    )


def texts(tokens: IndexedDataset, directory: Path) -> list[tuple[list[list[int]], int]]:
    """Return (sentences, target) of each sample."""
    rows = load_sentence_map(directory, "train", tokens).tolist()
    return [
        ([tokens[sentence].tolist() for sentence in range(first, end)], target)
        for first, end, target in rows
    ]


def restore(row: np.ndarray) -> tuple[list[int], list[list[int]]]:
    """Return the text of a row with its spans restored, and the spans."""
    encoder, decoder = (part[part >= 0].tolist() for part in (row[:SEQ_LENGTH], row[SEQ_LENGTH:]))
    assert decoder.pop() == SEP
    spans: list[list[int]] = []
    for token in decoder:
        if token in SENTINELS:
            assert token == SENTINELS[len(spans)]
            spans.append([])
        else:
            spans[-1].append(token)
    assert [token for token in encoder if token in SENTINELS] == list(SENTINELS[: len(spans)])
    text: list[int] = []
    for token in encoder:
        text += spans[SENTINELS.index(token)] if token in SENTINELS else [token]
    return text, spans


@pytest.mark.parametrize("seed", [1234, 2**31 - 60])
@pytest.mark.parametrize("share", [0.15, 0.3])
def test_samples_with_megatrons_spans_equal_the_reference(
    tmp_path: Path, seed: int, share: float
) -> None:
    tokens = build(tmp_path, seed)
    rows = open_dataset(tokens, tmp_path, seed, noise_density=share, **MEGATRON).gather(range(150))
    compared = 0
    for number, (row, (sentences, target)) in enumerate(
        zip(rows, texts(tokens, tmp_path), strict=False)
    ):
        expected = t5_row(
            sentences, target, seed + number, SEQ_LENGTH, DECODER, VOCABULARY, share=share
        )
        if expected is not None:
            np.testing.assert_array_equal(row, expected)
            compared += 1
    assert compared > 120


def test_spans_that_do_not_fit_remain_in_the_text(tmp_path: Path) -> None:
    tokens = build(tmp_path)
    dataset = open_dataset(tokens, tmp_path, decoder_seq_length=8, **MEGATRON)
    assert dataset.width == SEQ_LENGTH + 8
    rows = dataset.gather(range(150))
    for row, (sentences, target) in zip(rows, texts(tokens, tmp_path), strict=False):
        assert restore(row)[0] == joined(sentences)[:target]
    assert (rows[:, SEQ_LENGTH:] >= 0).sum(1).max() == 8


@pytest.mark.parametrize(("share", "mean"), [(0.15, 3.0), (0.3, 1.0), (0.5, 8.0)])
def test_random_spans_have_the_configured_share_and_mean_length(
    tmp_path: Path, share: float, mean: float
) -> None:
    tokens = build(tmp_path, short=0.0)
    dataset = open_dataset(
        tokens, tmp_path, noise_density=share, mean_span_length=mean, decoder_seq_length=96
    )
    lengths = []
    for row, (sentences, target) in zip(
        dataset.gather(range(150)), texts(tokens, tmp_path), strict=False
    ):
        text, spans = restore(row)
        expected = joined(sentences)[:target]
        assert text == expected
        noise = min(max(round(len(expected) * share), 1), len(expected) - 1)
        assert sum(map(len, spans)) == noise
        assert all(spans)
        assert (
            len(spans) == max(1, min(round(noise / mean), len(expected) - noise))
            if noise
            else not spans
        )
        assert row[0] not in SENTINELS
        lengths += [len(span) for span in spans]
    assert abs(np.mean(lengths) - mean) < 0.3 * mean
    assert mean == 1.0 or np.std(lengths) > 0.5


def test_a_sample_depends_only_on_seed_and_number(tmp_path: Path) -> None:
    tokens = build(tmp_path)
    for config in ({}, MEGATRON):
        dataset = open_dataset(tokens, tmp_path, **config)
        samples = dataset.gather(range(40))
        np.testing.assert_array_equal(dataset.gather(range(39, -1, -1))[::-1], samples)
        np.testing.assert_array_equal(open_dataset(tokens, tmp_path, **config)[17], samples[17])
        assert (
            open_dataset(tokens, tmp_path, seed=99, **config).gather(range(40)) != samples
        ).any()
