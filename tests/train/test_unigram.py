"""Tests of the unigram model, the baseline of perplexities."""

import math

import numpy as np
import pytest

from megacore.errors import DataFormatError
from megacore.train import score
from megacore.train.score import UnigramModel, in_blocks


def test_perplexity_is_that_of_smoothed_frequencies() -> None:
    # P(0) = 4/7, P(1) = 2/7, P(2) = 1/7
    model = UnigramModel(
        [("a", np.array([0, 0, 0], np.uint16)), ("b", np.array([1], np.uint16))], 3
    )
    assert model.perplexity([np.array([[0, 2]])]) == pytest.approx(math.sqrt(7 / 4 * 7))
    assert model.perplexity(
        [np.array([0]), np.array([], np.int64), np.array([[2]])]
    ) == pytest.approx(7 / 2)
    assert model.perplexity([]) == math.inf


@pytest.mark.parametrize("wrong", [3, -4])
def test_an_id_outside_the_vocabulary_is_refused(wrong: int) -> None:
    with pytest.raises(
        DataFormatError, match=rf"a\.bin holds the token id {wrong}, but the vocabulary has 3"
    ):
        UnigramModel([("a", np.array([0, wrong, 1], np.int32))], 3)


def test_each_block_of_a_large_corpus_has_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score, "_BLOCK_TOKENS", 2)
    beats: list[int] = []
    parts = [("a", np.arange(5)), ("b", np.arange(0)), ("c", np.arange(2))]
    blocks = [
        (prefix, block.tolist(), len(beats))
        for prefix, block in in_blocks(parts, lambda: beats.append(0))
    ]
    assert blocks == [("a", [0, 1], 1), ("a", [2, 3], 2), ("a", [4], 3), ("c", [0, 1], 4)]
