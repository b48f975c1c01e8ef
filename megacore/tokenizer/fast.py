"""Byte-level BPE through gigatoken, held against `tokenizers` before use.

Its source is https://github.com/marcelroed/gigatoken.
"""

import ctypes
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megacore.tokenizer.load import Encoded, JsonTokenizer, Tokenizer

SAMPLE_CHARACTERS = 200_000
"""Text of the corpus that both tokenizers encode at the start of a run."""
_CACHE_BYTES = 128 << 20
"""What a thread's tokenizer may remember."""
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
"""What has told tokenizers apart before: contractions, white space, digits, marks, emoji, scripts,
long words."""


class Encoder(Protocol):
    """What turns texts into ids in several threads at a time.

    A `Tokenizer`, or a faster stand-in.
    """

    def encode_flat(self, texts: Sequence[str]) -> Encoded:
        """The ids of all texts end to end."""


def choose_encoder(tokenizer: Tokenizer, sample: Sequence[str], workers: int) -> Encoder:
    """Gigatoken for a byte-level BPE when it agrees with `tokenizer` on the sample.

    Else the tokenizer itself.

    A disagreement, a gigatoken that is missing, and a tokenizer that it refuses are each logged as
    a warning.
    """
    if not (isinstance(tokenizer, JsonTokenizer) and tokenizer.is_bpe):
        return tokenizer
    try:
        encoder = GigatokenEncoder(str(tokenizer.backend.to_str()), workers)
        different = first_difference(tokenizer, encoder, [*sample, *adversarial_texts(tokenizer)])
    except BaseException as error:
        # A panic of the bindings is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        _logger.warning(
            "gigatoken cannot be used (%s: %s): `tokenizers` encodes instead, slower",
            *_named(error),
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
    """The first text that the two encode differently."""
    expected, found = tokenizer.encode_flat(texts), encoder.encode_flat(texts)
    if np.array_equal(expected.lengths, found.lengths) and np.array_equal(expected.ids, found.ids):
        return None
    first, second = (np.split(each.ids, np.cumsum(each.lengths)[:-1]) for each in (expected, found))
    for text, one, other in zip(texts, first, second, strict=True):
        if not np.array_equal(one, other):
            return text
    raise AssertionError("the ids differ as a whole, but in no text")


def adversarial_texts(tokenizer: JsonTokenizer) -> list[str]:
    """Texts that tokenizers tend to differ on, with the tokenizer's own special tokens."""
    special = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()][
        :64
    ]
    around = [f"a{token}b {token} {token}{token}\n{token}" for token in special]
    return [*_ADVERSARIAL, *around, "".join(special), *(token[:-1] for token in special)]


def take_sample(texts: Sequence[str]) -> list[str]:
    """The first texts, about SAMPLE_CHARACTERS together, the last one cut."""
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
    """A gigatoken tokenizer for each thread that encodes, with bounded memory.

    The library remembers every word it has met. When this process has grown by _CACHE_BYTES for
    each thread (at least two) since the first tokenizer was made, all are made anew, which takes
    0.1 s each.
    """

    def __init__(self, tokenizer_json: str, workers: int) -> None:
        """Make the first tokenizer.

        Raises what gigatoken raises when it is missing or refuses the JSON.
        """
        self.rebuilds = 0
        """How often the tokenizers were made anew."""
        self._json = tokenizer_json
        self._limit = max(workers, 2) * _CACHE_BYTES
        self._lock = threading.Lock()
        self._generation = 0
        self._idle = [self._make(0)]
        self._old = 0  # instances of earlier generations that are still at work
        self._busy = 0
        self._first = anonymous_memory()
        self._baseline: int | None = self._first

    def encode_flat(self, texts: Sequence[str]) -> Encoded:
        """The ids of all texts end to end."""
        if not texts:
            return Encoded(np.zeros(0, np.uint32), np.zeros(0, np.int64))
        instance = self._take()
        try:
            layout = instance.tokenizer.encode_batch(texts, parallel=False).layout
        finally:
            self._give_back(instance)
        offsets = np.asarray(layout.offsets)
        return Encoded(np.asarray(layout.content.data)[offsets[0] : offsets[-1]], np.diff(offsets))

    def _make(self, generation: int) -> _Instance:
        import gigatoken  # only a byte-level BPE needs it

        if generation:
            _return_freed_memory()
        return _Instance(gigatoken.Tokenizer.from_json(self._json), generation)

    def _take(self) -> _Instance:
        with self._lock:
            self._busy += 1
            generation = self._generation
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
            current = instance.generation == self._generation
            if current:
                self._idle.append(instance)
            else:
                self._old -= 1
            if self._baseline is not None and resident - self._baseline > self._limit:
                self._generation += 1
                self.rebuilds += 1
                self._old = self._busy
                self._idle.clear()
                self._baseline = None
            elif self._baseline is None and current and not self._old:
                # Memory that something else in this process took must not make each batch begin
                # anew.
                self._baseline = max(self._first, resident - self._limit // 2)


def anonymous_memory() -> int:
    """Bytes of this process's memory that belong to no file."""
    resident, shared = Path("/proc/self/statm").read_text(encoding="ascii").split()[1:3]
    return (int(resident) - int(shared)) * _PAGE_BYTES


def _return_freed_memory() -> None:
    """Give the pages of earlier tokenizers back, which glibc would keep scattered."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


def _named(error: BaseException) -> tuple[str, str]:
    return type(error).__name__, str(error)
