"""Tests of BERT's samples against a reference of Megatron core's, and of their distribution."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.config.data import MaskedLmConfig
from megacore.data.index_directory import map_path
from megacore.data.index_options import IndexOptions, Mixture, SentenceOptions
from megacore.data.sentence_dataset import MaskedLmDataset
from megacore.data.sentence_maps import build_sentence_maps, load_sentence_map
from megacore.errors import DataFormatError
from megacore.token_files.indexed_dataset import IndexedDataset
from megacore.tokenizer.vocabulary import Vocabulary
from tests.data._sentences import CLS, MASK, SEP, VOCAB_SIZE, bert_row, vocabulary, write_lengths

SEQ_LENGTH = 64
VOCABULARY = vocabulary()


def documents(count: int = 60, longest: int = 25) -> list[list[int]]:
    random = np.random.default_rng(count)
    return [random.integers(1, longest, random.integers(1, 12)).tolist() for _ in range(count)]


def build(
    directory: Path, *, pairs: bool = True, seed: int = 1234, short: float = 0.3, **changes: Any
) -> IndexedDataset:
    """Write sentences and their maps to `directory`."""
    tokens = write_lengths(directory / "s", changes.pop("documents", documents()))
    sentences = SentenceOptions("bert", 2 if pairs else 1, short)
    options = IndexOptions(split="8,1,1", seq_length=SEQ_LENGTH, seed=seed, sentences=sentences)
    build_sentence_maps(Mixture.single(tokens.prefix), directory, options, (150, 20, None))
    return tokens


def open_dataset(
    tokens: IndexedDataset, directory: Path, split: str = "train", **changes: Any
) -> MaskedLmDataset:
    defaults: dict[str, Any] = {
        "seq_length": SEQ_LENGTH,
        "vocabulary": VOCABULARY,
        "config": MaskedLmConfig(),
        "seed": 1234,
    }
    return MaskedLmDataset(tokens.prefix, directory, split, **defaults | changes)


@pytest.mark.parametrize(
    ("config", "pairs", "seed"),
    [
        ({}, True, 1234),
        ({"max_ngram": 1, "masked_lm_prob": 0.3}, True, 2**31 - 5),
        ({"whole_word_masking": False, "max_ngram": 5}, True, 7),
        ({"masked_lm_prob": 0.05}, False, 1234),
        ({"use_geometric_distribution": True, "max_ngram": 10, "masked_lm_prob": 0.3}, True, 1234),
        ({"use_geometric_distribution": True, "whole_word_masking": False}, False, 7),
    ],
)
def test_samples_equal_the_reference(
    tmp_path: Path, config: dict[str, Any], pairs: bool, seed: int
) -> None:
    tokens = build(tmp_path, pairs=pairs, seed=seed)
    masked_lm = MaskedLmConfig.model_validate(config)
    dataset = open_dataset(tokens, tmp_path, config=masked_lm, seed=seed, binary_head=pairs)
    rows = load_sentence_map(tmp_path, "train", tokens)
    assert len(dataset) == len(rows) >= 150
    expected = [
        bert_row(
            [tokens[sentence].tolist() for sentence in range(first, end)],
            int(target),
            seed + number,
            SEQ_LENGTH,
            VOCABULARY,
            share=masked_lm.masked_lm_prob,
            whole_words=masked_lm.whole_word_masking,
            ngram=masked_lm.max_ngram,
            geometric=masked_lm.use_geometric_distribution,
            pairs=pairs,
        )
        for number, (first, end, target) in enumerate(rows.tolist())
    ]
    np.testing.assert_array_equal(dataset.gather(range(len(dataset))), expected)


def test_samples_are_gathered_into_the_requested_rows(tmp_path: Path) -> None:
    dataset = open_dataset(build(tmp_path), tmp_path)
    assert (dataset.seq_length, dataset.width) == (SEQ_LENGTH, 3 * SEQ_LENGTH + 1)
    samples = dataset.gather(range(len(dataset)))
    indices = np.array([9, 3, 3, 0])
    out = np.zeros((6, dataset.width), np.int64)
    assert dataset.gather(indices, out, np.array([5, 0, 2, 1])) is out
    np.testing.assert_array_equal(out[[5, 0, 2, 1]], samples[indices])
    assert not out[3:5].any()
    np.testing.assert_array_equal(dataset[7], samples[7])


def test_an_index_outside_the_split_is_refused(tmp_path: Path) -> None:
    dataset = open_dataset(build(tmp_path), tmp_path)
    for index in (-1, len(dataset)):
        with pytest.raises(IndexError, match=f"has no sample {index}: it has {len(dataset)}"):
            dataset.gather([index])


def test_rows_have_two_segments_and_the_shares_of_masked_tokens(tmp_path: Path) -> None:
    """Check [CLS] A [SEP] B [SEP] with segments 0 and 1, and the shares of predicted tokens.

    15 % of the tokens are predicted: 80 % of these are masked, 10 % random, 10 % unchanged.
    """
    tokens = build(tmp_path, short=0.0, documents=documents(400))
    dataset = open_dataset(tokens, tmp_path)
    rows = dataset.gather(range(len(dataset)))
    read, labels, segments = rows[:, :-1].reshape(len(rows), 3, -1).swapaxes(0, 1)
    present, predicted = read >= 0, labels >= 0
    assert (present == (segments >= 0)).all()
    assert (read[:, 0] == CLS).all()
    for row, segment in zip(read, segments, strict=True):
        last = int((row >= 0).sum()) - 1
        first = int((segment == 0).sum()) - 1
        assert row[last] == row[first] == SEP
        assert segment[: last + 1].tolist() == [0] * (first + 1) + [1] * (last - first)
    share = predicted.sum() / present.sum()
    assert 0.13 < share <= 0.15
    masked = (read == MASK) & predicted
    unchanged = (read == labels) & predicted
    assert abs(masked.sum() / predicted.sum() - 0.8) < 0.03
    assert abs(unchanged.sum() / predicted.sum() - 0.1) < 0.03
    assert (read[predicted] < VOCAB_SIZE).all()
    assert 0.4 < rows[:, -1].mean() < 0.6


def test_all_tokens_of_a_word_are_masked_together(tmp_path: Path) -> None:
    dataset = open_dataset(build(tmp_path), tmp_path)
    read, labels, _ = (
        dataset.gather(range(len(dataset)))[:, :-1].reshape(len(dataset), 3, -1).swapaxes(0, 1)
    )
    texts = np.where(labels >= 0, labels, read)
    continued = np.isin(texts[:, 1:], np.flatnonzero(VOCABULARY.continues)) & (texts[:, :-1] > MASK)
    together = (labels[:, 1:] >= 0) == (labels[:, :-1] >= 0)
    assert continued.sum() > 500
    assert together[continued].all()


def test_next_sentence_prediction_takes_another_document(tmp_path: Path) -> None:
    # All tokens of a document are equal and differ from those of other documents.
    lengths = [[6, 5, 7]] * 30
    tokens = write_lengths(tmp_path / "s", lengths)
    ids = np.repeat(np.arange(30) + 10, 18).astype("u2")
    Path(f"{tokens.prefix}.bin").write_bytes(ids.tobytes())
    options = IndexOptions(
        split="1", seq_length=32, seed=1, sentences=SentenceOptions("bert", 2, 0.0)
    )
    build_sentence_maps(Mixture.single(tokens.prefix), tmp_path, options, (300, 0, 0))
    config = MaskedLmConfig(sentence_task="nsp", masked_lm_prob=0.01)
    dataset = MaskedLmDataset(
        tokens.prefix,
        tmp_path,
        "train",
        seq_length=32,
        vocabulary=VOCABULARY,
        config=config,
        seed=1,
    )
    labels = []
    for row in dataset.gather(range(len(dataset))):
        read, label, segments = row[:-1].reshape(3, -1)
        text = np.where(label >= 0, label, read)
        first, second = (
            set(text[(segments == segment) & (text >= 10)].tolist()) for segment in (0, 1)
        )
        assert len(first) == len(second) == 1
        assert (first != second) == row[-1]
        labels.append(row[-1])
    assert 0.4 < np.mean(labels) < 0.6


def test_next_sentence_prediction_needs_two_documents(tmp_path: Path) -> None:
    tokens = write_lengths(tmp_path / "s", [[6, 5, 7, 3, 4, 5]])
    options = IndexOptions(split="1", seq_length=16, seed=1, sentences=SentenceOptions("bert", 2))
    build_sentence_maps(Mixture.single(tokens.prefix), tmp_path, options, (4, 0, 0))
    changes = {"seq_length": 16, "config": MaskedLmConfig(sentence_task="nsp")}
    with pytest.raises(DataFormatError, match="has samples of only one document"):
        open_dataset(tokens, tmp_path, **changes)
    assert len(open_dataset(tokens, tmp_path, "valid", **changes)) == 0


def test_maps_of_longer_samples_are_refused(tmp_path: Path) -> None:
    tokens = build(tmp_path)
    with pytest.raises(
        DataFormatError,
        match=r"train_sentence_index\.npy has samples of .* where 2 to 29 have room",
    ):
        open_dataset(tokens, tmp_path, seq_length=32)


def test_token_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    tokens = build(tmp_path)
    smaller = Vocabulary(VOCABULARY.special, VOCABULARY.continues[:100].copy())
    with pytest.raises(DataFormatError, match=r"token ids that the vocabulary does not have"):
        open_dataset(tokens, tmp_path, vocabulary=smaller).gather(range(20))


def test_a_sample_with_too_few_sentences_is_refused(tmp_path: Path) -> None:
    tokens = build(tmp_path)
    rows = np.load(map_path(tmp_path, "train", "sentence"))
    rows[3, 1] = rows[3, 0] + 1
    np.save(map_path(tmp_path, "train", "sentence"), rows)
    with pytest.raises(
        DataFormatError, match=r"sample 3 cannot be read from .*: it has too few sentences"
    ):
        open_dataset(tokens, tmp_path).gather(range(5))
