import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from megacore.tokenizer import fast, load_tokenizer
from megacore.tokenizer.fast import GigatokenEncoder, choose_encoder, first_difference, take_sample
from megacore.tokenizer.load import Encoded, JsonTokenizer, Tokenizer
from tests.tokenizer._corpora import TEXTS, train_tokenizer, write_corpus


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> JsonTokenizer:
    root = tmp_path_factory.mktemp("fast")
    found = load_tokenizer(
        train_tokenizer(root / "tokenizer", write_corpus(root / "corpus", TEXTS))
    )
    assert isinstance(found, JsonTokenizer)
    return found


class Wrong:
    """Encodes one text as another would be."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self._tokenizer = tokenizer
        self._text = text

    def encode_flat(self, texts: Sequence[str]) -> Encoded:
        return self._tokenizer.encode_flat(
            [text + "!" if text == self._text else text for text in texts]
        )


def test_both_agree_and_gigatoken_encodes(
    tokenizer: JsonTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = choose_encoder(tokenizer, TEXTS, 2)
    assert isinstance(encoder, GigatokenEncoder)
    assert caplog.records == []
    expected, found = tokenizer.encode_flat(TEXTS), encoder.encode_flat(TEXTS)
    assert np.array_equal(expected.ids, found.ids)
    assert np.array_equal(expected.lengths, found.lengths)
    assert encoder.encode_flat([]).lengths.tolist() == []
    assert encoder.encode_flat(["", ""]).lengths.tolist() == [0, 0]


def test_every_difference_is_found(tokenizer: JsonTokenizer) -> None:
    texts = [text for text in TEXTS if text]
    for text in ("größe 💡", texts[-1]):
        assert first_difference(tokenizer, Wrong(tokenizer, text), texts) == text
    assert first_difference(tokenizer, Wrong(tokenizer, "not there"), texts) is None


def test_difference_switches_to_the_fallback_and_shows_the_document(
    tokenizer: JsonTokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text = "value " * 100
    monkeypatch.setattr(fast, "GigatokenEncoder", lambda json, workers: Wrong(tokenizer, text))
    assert choose_encoder(tokenizer, ["fine", text], 2) is tokenizer
    assert caplog.messages == [
        f"gigatoken encodes '{text[:80]}…' differently: `tokenizers` encodes instead, slower"
    ]


def test_missing_gigatoken_is_a_warning(
    tokenizer: JsonTokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    assert choose_encoder(tokenizer, TEXTS, 2) is tokenizer
    assert caplog.messages[0].startswith("gigatoken cannot be used (ModuleNotFoundError: ")


def test_refused_tokenizer_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "</s>": 1}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    foreign = JsonTokenizer(backend, "</s>")
    assert choose_encoder(foreign, ["a b"], 1) is foreign
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_panic_of_the_bindings_is_a_warning(
    tokenizer: JsonTokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    panic = type("PanicException", (BaseException,), {})

    def fail(json: str, workers: int) -> None:
        raise panic("index out of range")

    monkeypatch.setattr(fast, "GigatokenEncoder", fail)
    assert choose_encoder(tokenizer, TEXTS, 1) is tokenizer
    assert "(PanicException: index out of range)" in caplog.text


def test_interrupt_is_not_taken_for_a_refusal(
    tokenizer: JsonTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(json: str, workers: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fast, "GigatokenEncoder", fail)
    with pytest.raises(KeyboardInterrupt):
        choose_encoder(tokenizer, TEXTS, 1)


def test_sample_is_cut() -> None:
    assert take_sample(["a" * 150_000, "b" * 150_000, "c"]) == ["a" * 150_000, "b" * 50_000]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What this process is said to use."""
    used = {"bytes": 0}
    monkeypatch.setattr(fast, "anonymous_memory", lambda: used["bytes"])
    return used


def made(encoder: GigatokenEncoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Generations of the tokenizers that are made from now on."""
    generations: list[int] = []
    make = encoder._make

    def count(generation: int) -> Any:
        generations.append(generation)
        return make(generation)

    monkeypatch.setattr(encoder, "_make", count)
    return generations


def test_tokenizers_are_made_anew_when_memory_grows(
    tokenizer: JsonTokenizer, memory: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = GigatokenEncoder(str(tokenizer.backend.to_str()), 2)
    generations = made(encoder, monkeypatch)
    expected = encoder.encode_flat(TEXTS).ids
    limit = 2 * fast._CACHE_BYTES
    for used, rebuilds in (
        (limit, 0),
        (limit + 1, 1),
        (0, 1),
        (limit + 1, 2),
        (2 * limit, 2),
        (3 * limit, 3),
    ):
        memory["bytes"] = used
        assert np.array_equal(encoder.encode_flat(TEXTS).ids, expected)
        assert encoder.rebuilds == rebuilds, used
    assert generations == [1, 2]


def test_memory_that_others_took_does_not_make_each_batch_begin_anew(
    tokenizer: JsonTokenizer, memory: dict[str, int]
) -> None:
    encoder = GigatokenEncoder(str(tokenizer.backend.to_str()), 2)
    memory["bytes"] = 20 * fast._CACHE_BYTES
    for _ in range(5):
        encoder.encode_flat(TEXTS)
    assert encoder.rebuilds == 1


def test_tokenizers_at_work_are_not_given_back(
    tokenizer: JsonTokenizer, memory: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was busy when the others were made anew is dropped when it is done."""
    encoder = GigatokenEncoder(str(tokenizer.backend.to_str()), 2)
    generations = made(encoder, monkeypatch)
    busy = encoder._take()
    memory["bytes"] = 3 * fast._CACHE_BYTES
    encoder.encode_flat(TEXTS)
    assert encoder.rebuilds == 1
    encoder._give_back(busy)
    memory["bytes"] = 0
    encoder.encode_flat(TEXTS)
    assert generations == [0, 1]
    assert [instance.generation for instance in encoder._idle] == [1]


def test_threads_encode_at_the_same_time(tokenizer: JsonTokenizer) -> None:
    encoder = GigatokenEncoder(str(tokenizer.backend.to_str()), 4)
    expected = encoder.encode_flat(TEXTS).ids
    found: list[bool] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(np.array_equal(encoder.encode_flat(TEXTS).ids, expected))
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8


def test_resident_memory_is_read(tmp_path: Path) -> None:
    before = fast.anonymous_memory()
    taken = np.ones(8 << 20)
    assert fast.anonymous_memory() - before > taken.nbytes // 2
