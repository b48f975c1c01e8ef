"""Tests of the fast encoder and its fallback to `tokenizers`."""

import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken

from megacore.tokenizer import fast, load_tokenizer
from megacore.tokenizer.fast import GigatokenEncoder, choose_encoder, first_difference, take_sample
from megacore.tokenizer.load import Encoded, JsonTokenizer, Tokenizer
from tests.tokenizer._corpora import TEXTS, train_tokenizer, write_corpus


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> JsonTokenizer:
    root = tmp_path_factory.mktemp("fast")
    loaded = load_tokenizer(
        train_tokenizer(root / "tokenizer", write_corpus(root / "corpus", TEXTS))
    )
    assert isinstance(loaded, JsonTokenizer)
    return loaded


class WrongEncoder:
    """An encoder that encodes one text wrongly."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self._tokenizer = tokenizer
        self._text = text

    def encode_flat(self, texts: Sequence[str]) -> Encoded:
        return self._tokenizer.encode_flat(
            [text + "!" if text == self._text else text for text in texts]
        )


def test_gigatoken_is_chosen_if_both_encoders_agree(
    tokenizer: JsonTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = choose_encoder(tokenizer, TEXTS, 2)
    assert isinstance(encoder, GigatokenEncoder)
    assert caplog.records == []
    expected, result = tokenizer.encode_flat(TEXTS), encoder.encode_flat(TEXTS)
    assert np.array_equal(expected.ids, result.ids)
    assert np.array_equal(expected.lengths, result.lengths)
    assert encoder.encode_flat([]).lengths.tolist() == []
    assert encoder.encode_flat(["", ""]).lengths.tolist() == [0, 0]


def test_first_difference_returns_the_first_wrongly_encoded_text(tokenizer: JsonTokenizer) -> None:
    texts = [text for text in TEXTS if text]
    for text in ("größe 💡", texts[-1]):
        assert first_difference(tokenizer, WrongEncoder(tokenizer, text), texts) == text
    assert first_difference(tokenizer, WrongEncoder(tokenizer, "not there"), texts) is None


def test_a_difference_selects_the_fallback_and_logs_the_document(
    tokenizer: JsonTokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text = "value " * 100
    monkeypatch.setattr(
        fast, "GigatokenEncoder", lambda json, workers: WrongEncoder(tokenizer, text)
    )
    assert choose_encoder(tokenizer, ["fine", text], 2) is tokenizer
    assert caplog.messages == [
        f"gigatoken encodes '{text[:80]}…' differently: `tokenizers` encodes instead, slower"
    ]


def test_missing_gigatoken_selects_the_fallback_with_a_warning(
    tokenizer: JsonTokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    assert choose_encoder(tokenizer, TEXTS, 2) is tokenizer
    assert caplog.messages[0].startswith("gigatoken cannot be used (ModuleNotFoundError: ")


def test_an_unsupported_tokenizer_selects_the_fallback_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "</s>": 1}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    foreign = JsonTokenizer(backend, "</s>")
    assert choose_encoder(foreign, ["a b"], 1) is foreign
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize(
    ("added", "prefix_space", "text"),
    [
        (
            [
                AddedToken("\n\n", normalized=False),
                AddedToken("<|x|>", rstrip=True, normalized=False, special=True),
            ],
            False,
            "<|x|>\n\n",
        ),
        ([AddedToken(" tok", normalized=False)], True, "tok"),
        (
            [
                *(f"<|{number}|>" for number in range(100)),
                AddedToken("\n\n", normalized=False),
                AddedToken("<|x|>", rstrip=True, normalized=False, special=True),
                AddedToken("\t", rstrip=True, normalized=False),
            ],
            False,
            "<|x|>\t",
        ),
    ],
)
def test_added_tokens_that_gigatoken_finds_elsewhere_select_the_fallback(
    tokenizer: JsonTokenizer, added: list[str | AddedToken], prefix_space: bool, text: str
) -> None:
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    backend.add_tokens(added)
    extended = JsonTokenizer(backend, tokenizer.eod_token)
    substitute = GigatokenEncoder(str(backend.to_str()), 1)
    assert first_difference(extended, substitute, [text]) == text
    assert choose_encoder(extended, TEXTS, 1) is extended


def test_a_panic_of_the_bindings_selects_the_fallback_with_a_warning(
    tokenizer: JsonTokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    panic = type("PanicException", (BaseException,), {})

    def fail(json: str, workers: int) -> None:
        raise panic("index out of range")

    monkeypatch.setattr(fast, "GigatokenEncoder", fail)
    assert choose_encoder(tokenizer, TEXTS, 1) is tokenizer
    assert "(PanicException: index out of range)" in caplog.text


def test_a_keyboard_interrupt_is_not_caught(
    tokenizer: JsonTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(json: str, workers: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fast, "GigatokenEncoder", fail)
    with pytest.raises(KeyboardInterrupt):
        choose_encoder(tokenizer, TEXTS, 1)


def test_a_keyboard_interrupt_during_the_import_of_awkward_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, tokenizer: JsonTokenizer
) -> None:
    """gigatoken, which imports it itself, takes the interrupt for a missing library."""

    class Interrupt:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "awkward":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "awkward", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupt(), *sys.meta_path])
    with pytest.raises(KeyboardInterrupt):
        choose_encoder(tokenizer, TEXTS, workers=1)


def test_sample_is_truncated_to_its_limit() -> None:
    assert take_sample(["a" * 150_000, "b" * 150_000, "c"]) == ["a" * 150_000, "b" * 50_000]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Replace the measured memory of this process by an adjustable number."""
    used = {"bytes": 0}
    monkeypatch.setattr(fast, "anonymous_memory", lambda: used["bytes"])
    return used


def record_generations(encoder: GigatokenEncoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that collects the generation of each tokenizer created from now on."""
    generations: list[int] = []
    make = encoder._make

    def count(generation: int) -> Any:
        generations.append(generation)
        return make(generation)

    monkeypatch.setattr(encoder, "_make", count)
    return generations


def test_tokenizers_are_rebuilt_when_memory_grows(
    tokenizer: JsonTokenizer, memory: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = GigatokenEncoder(str(tokenizer.backend.to_str()), 2)
    generations = record_generations(encoder, monkeypatch)
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
        assert encoder.generation == rebuilds, used
    assert generations == [1, 2]


def test_memory_of_other_owners_causes_only_one_rebuild(
    tokenizer: JsonTokenizer, memory: dict[str, int]
) -> None:
    encoder = GigatokenEncoder(str(tokenizer.backend.to_str()), 2)
    memory["bytes"] = 20 * fast._CACHE_BYTES
    for _ in range(5):
        encoder.encode_flat(TEXTS)
    assert encoder.generation == 1


def test_a_tokenizer_of_an_old_generation_is_dropped_after_use(
    tokenizer: JsonTokenizer, memory: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # `busy` is in use while the idle tokenizers are rebuilt.
    encoder = GigatokenEncoder(str(tokenizer.backend.to_str()), 2)
    generations = record_generations(encoder, monkeypatch)
    busy = encoder._take()
    memory["bytes"] = 3 * fast._CACHE_BYTES
    encoder.encode_flat(TEXTS)
    assert encoder.generation == 1
    encoder._give_back(busy)
    memory["bytes"] = 0
    encoder.encode_flat(TEXTS)
    assert generations == [0, 1]
    assert [instance.generation for instance in encoder._idle] == [1]


def test_concurrent_threads_encode_correctly(tokenizer: JsonTokenizer) -> None:
    encoder = GigatokenEncoder(str(tokenizer.backend.to_str()), 4)
    expected = encoder.encode_flat(TEXTS).ids
    results: list[bool] = []
    threads = [
        threading.Thread(
            target=lambda: results.append(np.array_equal(encoder.encode_flat(TEXTS).ids, expected))
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8


def test_anonymous_memory_grows_with_an_allocation(tmp_path: Path) -> None:
    before = fast.anonymous_memory()
    allocated = np.ones(8 << 20)
    assert fast.anonymous_memory() - before > allocated.nbytes // 2
