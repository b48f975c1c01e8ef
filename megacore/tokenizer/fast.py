"""Fast byte-level BPE with gigatoken, whose results are compared with `tokenizers` before use.

gigatoken: https://github.com/marcelroed/gigatoken.
"""

import ctypes
import importlib
import itertools
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megacore.tokenizer.load import Encoded, JsonTokenizer, Tokenizer

SAMPLE_CHARACTERS = 200_000
"""Characters of the corpus that both tokenizers encode for the comparison."""
_CACHE_BYTES = 128 << 20
"""Bytes that the cache of one thread's tokenizer may take."""
_SHOWN_CHARACTERS = 80
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_logger = logging.getLogger(__name__)

_ADVERSARIAL = (
    "I'm you're he'd she'll they've DON'T i'M it''s 'tis",
    "  two\t\ttabs\n\n\nlines \r\n \u00a0\u2003\u3000\u200b\u2028 end   ",
    "1 22 333 4444 12345.678e-9 ½ ² ٣٤ Ⅷ",
    "e\u0301 é n\u0303 ñ a\u0308\u0323 ᾴ ｆｕｌｌ ﬁ Å \u212b",
    "👩‍👩‍👧‍👦 🏳️‍🌈 💡x😀😀 🇩🇪",
    "日本語のテキスト 한국어 العربية हिन्दी ไทย עברית",
    "foo_bar(x)==None!=...///***---___$$$ #tag @user a.b,c;d:e",
    "\x00\x01\x7f\x85\ufeff\ufffd\U0010ffff\u0378",
    " ",
    "a" * 3000,
)
"""Texts on which tokenizers have differed before: contractions, white space, digits, marks, emoji,
scripts, long words."""
_NEIGHBOURS = ("", "a", "é", "_", "1", "!", " ", "  ", "\n", "\r\n", "\t\x0b", "\u2028", "漢")
"""Texts around an added token that strips white space, or that is found as a whole word only."""
_ADDED_TOKENS = 64
"""Maximum number of added tokens whose texts are compared."""


class Encoder(Protocol):
    """Thread-safe encoder of texts: a `Tokenizer` or a faster substitute."""

    def encode_flat(self, texts: Sequence[str]) -> Encoded:
        """Return the concatenated ids of all texts."""


def choose_encoder(tokenizer: Tokenizer, sample: Sequence[str], workers: int) -> Encoder:
    """Return gigatoken for a byte-level BPE if it agrees with `tokenizer` on the sample.

    Otherwise return `tokenizer`, and log a warning if gigatoken is missing, refuses the tokenizer,
    or gives different ids.
    """
    if not (isinstance(tokenizer, JsonTokenizer) and tokenizer.is_bpe):
        return tokenizer
    try:
        encoder = GigatokenEncoder(str(tokenizer.backend.to_str()), workers)
        different = first_difference(tokenizer, encoder, [*sample, *adversarial_texts(tokenizer)])
    except BaseException as error:
        # A panic of the bindings is a BaseException, not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        _logger.warning(
            "gigatoken cannot be used (%s: %s): `tokenizers` encodes instead, slower",
            type(error).__name__,
            error,
        )
        return tokenizer
    if different is not None:
        shown = repr(
            different
            if len(different) <= _SHOWN_CHARACTERS
            else f"{different[:_SHOWN_CHARACTERS]}…"
        )
        _logger.warning(
            "gigatoken encodes %s differently: `tokenizers` encodes instead, slower", shown
        )
        return tokenizer
    return encoder


def first_difference(tokenizer: Tokenizer, encoder: Encoder, texts: Sequence[str]) -> str | None:
    """Return the first text that the two encode differently, or None."""
    with ThreadPoolExecutor(1, "megacore-compare") as pool:
        # `tokenizers` encodes without the GIL, while gigatoken's first call imports its library.
        encoding = pool.submit(tokenizer.encode_flat, texts)
        actual, expected = encoder.encode_flat(texts), encoding.result()
    if np.array_equal(expected.lengths, actual.lengths) and np.array_equal(
        expected.ids, actual.ids
    ):
        return None
    first, second = (
        np.split(each.ids, np.cumsum(each.lengths)[:-1]) for each in (expected, actual)
    )
    for text, expected_ids, actual_ids in zip(texts, first, second, strict=True):
        if not np.array_equal(expected_ids, actual_ids):
            return text
    raise AssertionError("the ids differ as a whole, but in no text")


def adversarial_texts(tokenizer: JsonTokenizer) -> list[str]:
    """Return texts on which tokenizers tend to differ, some with the tokenizer's special tokens."""
    added = list(tokenizer.backend.get_added_tokens_decoder().values())
    special = [token.content for token in added[:_ADDED_TOKENS]]
    in_context = [f"a{token}b {token} {token}{token}\n{token}" for token in special]
    # Both neighbours decide whether these are found, and how much white space they take.
    dependent = [
        token.content for token in added if token.lstrip or token.rstrip or token.single_word
    ][:_ADDED_TOKENS]
    by_neighbours = [
        before + token + after
        for token in dependent
        for before, after in (
            *itertools.product(_NEIGHBOURS, _NEIGHBOURS),
            *((other, "") for other in (*special, *dependent)),
            *(("", other) for other in (*special, *dependent)),
        )
    ]
    return [
        *_ADVERSARIAL,
        *in_context,
        "".join(special),
        *(part for token in special for part in (token[:-1], token[1:])),
        *by_neighbours,
    ]


def take_sample(texts: Sequence[str]) -> list[str]:
    """Return the first texts, at most SAMPLE_CHARACTERS in total; the last one may be cut."""
    sample, room = [], SAMPLE_CHARACTERS
    for text in texts:
        sample.append(text[:room])
        room -= len(text)
        if room <= 0:
            break
    return sample


@dataclass
class _Instance:
    tokenizer: Any
    generation: int


class GigatokenEncoder:
    """An encoder with one gigatoken tokenizer per thread and bounded memory.

    The library caches every word. When this process has grown by _CACHE_BYTES per thread (at least
    two threads) since the first tokenizer was created, all tokenizers are created again, which
    takes 0.1 s each.
    """

    def __init__(self, tokenizer_json: str, workers: int) -> None:
        """Create the first tokenizer.

        Raises the errors of gigatoken if it is missing or refuses the JSON.
        """
        self.generation = 0
        """Number of times that the tokenizers were created again."""
        self._json = tokenizer_json
        self._limit = max(workers, 2) * _CACHE_BYTES
        self._lock = threading.Lock()
        self._idle = [self._make(0)]
        self._old = 0  # instances of earlier generations that are still in use
        self._busy = 0
        self._first = anonymous_memory()
        self._baseline: int | None = self._first

    def encode_flat(self, texts: Sequence[str]) -> Encoded:
        """Return the concatenated ids of all texts."""
        if not texts:
            return Encoded(np.zeros(0, np.uint32), np.zeros(0, np.int64))
        # gigatoken imports it in its first call and takes any error, Ctrl-C and SIGTERM included,
        # for its absence: the stop would be lost.
        importlib.import_module("awkward")
        instance = self._take()
        try:
            layout = instance.tokenizer.encode_batch(texts, parallel=False).layout
        finally:
            self._give_back(instance)
        offsets = np.asarray(layout.offsets)
        return Encoded(np.asarray(layout.content.data)[offsets[0] : offsets[-1]], np.diff(offsets))

    def _make(self, generation: int) -> _Instance:
        import gigatoken  # imported here because only a byte-level BPE needs it

        if generation:
            _return_freed_memory()
        return _Instance(gigatoken.Tokenizer.from_json(self._json), generation)

    def _take(self) -> _Instance:
        with self._lock:
            self._busy += 1
            generation = self.generation
            if self._idle:
                return self._idle.pop()
        try:
            return self._make(generation)
        except BaseException:
            with self._lock:
                self._busy -= 1
            raise

    def _give_back(self, instance: _Instance) -> None:
        resident = anonymous_memory()
        with self._lock:
            self._busy -= 1
            current = instance.generation == self.generation
            if current:
                self._idle.append(instance)
            else:
                self._old -= 1
            if self._baseline is not None and resident - self._baseline > self._limit:
                self.generation += 1
                self._old = self._busy
                self._idle.clear()
                self._baseline = None
            elif self._baseline is None and current and not self._old:
                # Memory taken by other parts of this process must not cause a rebuild after each
                # batch.
                self._baseline = max(self._first, resident - self._limit // 2)


def anonymous_memory() -> int:
    """Return the bytes of this process's resident memory that are not backed by files."""
    resident, shared = Path("/proc/self/statm").read_text(encoding="ascii").split()[1:3]
    return (int(resident) - int(shared)) * _PAGE_BYTES


def _return_freed_memory() -> None:
    """Return the free pages of earlier tokenizers, which glibc would keep, to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)
