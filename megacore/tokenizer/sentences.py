"""Sentence splitting with nltk's Punkt (Kiss and Strunk 2006), or with rules without a model."""

import io
import re
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.artifact.files import reason_of
from megacore.config.data import Splitter
from megacore.errors import DataFormatError, DownloadError, WorkerLostError
from megacore.launch.workers import WorkerPool
from megacore.paths import is_dir, is_file, rglob
from megacore.tokenizer.load import text_batches

VERSION = 1
"""Version of the punkt stage, increased whenever its output changes."""
PIECE_CHARACTERS = 1_000_000
"""Maximum length of a piece; longer texts are first cut into such pieces, as in Megatron-LM."""
_MODELS = "tokenizers/punkt_tab"
"""Path of Punkt's models below a data directory of nltk."""
_BATCH_CHARACTERS = 1 << 18
"""Characters of text that a process splits at a time."""

Split = Callable[[str], list[str]]

_ABBREVIATIONS = frozenset(
    """
    al apr approx aug ave bros ca capt cf ch co col corp dec dept dr e.g ed eds eq eqs est etc ex
    feb fig figs gen gov hon i.e inc jan jr jul jun lt ltd maj mar mr mrs ms mt no nos nov oct op
    p.m a.m pp prof rep rev sec sen sep sept sgt sr st u.k u.n u.s univ viz vol vols vs
    """.split()  # noqa: SIM905 (a list of strings would take a page)
)
_MARKS = ".!?…"
_OPENERS = "\"'“‘«([¿¡"
_END = re.compile(r"""[.!?…](?P<close>["'”’»)\]]*)(?P<space>\s+)|(?P<blank>\n[^\S\n]*\n\s*)""")
_LAST_WORD = re.compile(r"\S*\Z")
_LOOK_BACK = 24
"""Number of characters examined before a full stop, longer than any abbreviation."""


@dataclass(frozen=True)
class SplitterChoice:
    """Options of a sentence splitter, which are sent to its worker processes."""

    kind: Splitter
    language: str = "english"
    keep_newlines: bool = False
    """True if the white space between two sentences is kept at the end of the first."""
    data: str | None = None
    """Directory with Punkt's models."""


def make_splitter(choice: SplitterChoice) -> Split:
    """Return a function that splits a text into sentences.

    Raises DataFormatError if the model is missing or damaged.
    """
    split = _rules(choice.keep_newlines) if choice.kind == "rules" else _punkt(choice)

    def split_pieces(text: str) -> list[str]:
        pieces = (
            text[start : start + PIECE_CHARACTERS]
            for start in range(0, len(text), PIECE_CHARACTERS)
        )
        return [sentence for piece in pieces for sentence in split(piece)]

    return split_pieces


def _rules(keep_newlines: bool) -> Split:
    """Return a function that splits a text into sentences by rules.

    A sentence ends at a blank line, and after . ! ? … (and closing quotes or brackets) before white
    space.

    A sentence does not end before a lower-case letter. A single full stop does not end it after an
    abbreviation of a short English list, after a single letter (J. R. R. Tolkien), or after a
    number at the start of a line.
    """

    def split(text: str) -> list[str]:
        body = text.rstrip()
        sentences, start = [], 0
        for match in _END.finditer(body):
            if match["blank"] is None and not _is_end(match, body):
                continue
            stop = (
                match.end()
                if keep_newlines
                else match.start("blank" if match["blank"] else "space")
            )
            sentences.append(body[start:stop])
            start = match.end()
        if keep_newlines:
            return [sentence for sentence in (*sentences, text[start:]) if sentence]
        return [sentence.strip() for sentence in (*sentences, body[start:]) if sentence.strip()]

    return split


def _is_end(match: "re.Match[str]", text: str) -> bool:
    mark, after = match.start(), match.end()
    if match["space"].count("\n") > 1:
        return True
    if text[after].islower():
        return False
    if text[mark] != "." or match["close"] or (mark and text[mark - 1] in _MARKS):
        return True
    words = text[max(0, mark - _LOOK_BACK) : mark]
    last_word = _LAST_WORD.search(words)
    word = last_word.group().lstrip(_OPENERS) if last_word else ""
    if word.lower() in _ABBREVIATIONS or (len(word) == 1 and word.isalpha()):
        return False
    first_of_line = not words[: len(words) - len(word)].rpartition("\n")[2].strip() and (
        "\n" in words or mark < _LOOK_BACK
    )
    return not (word.isdigit() and first_of_line)


def _punkt(choice: SplitterChoice) -> Split:
    # Imported here because it imports slowly and is seldom needed.
    from nltk.tokenize.punkt import PunktLanguageVars, PunktSentenceTokenizer

    variables = PunktLanguageVars()
    if choice.keep_newlines:
        # The white space after a sentence belongs to it, as in Megatron-LM. The leading (?<!\S)\S*
        # does not change the sentences, but avoids quadratic time for long words.
        context = rf"(?<!\S)\S*{variables._re_sent_end_chars}\s*"
        after = rf"(?=(?P<after_tok>{variables._re_non_word_chars}|(?P<next_tok>\S+)))"
        variables._re_period_context = re.compile(context + after, re.VERBOSE)
    tokenizer = PunktSentenceTokenizer(
        _read_punkt(Path(choice.data or "."), choice.language), lang_vars=variables
    )
    return lambda text: [str(sentence) for sentence in tokenizer.tokenize(text)]


def _read_punkt(directory: Path, language: str) -> Any:
    """Read the parameters from the four tables of a `punkt_tab` model. Raises DataFormatError."""
    from nltk.tabdata import PunktDecoder
    from nltk.tokenize.punkt import PunktParameters

    folder = model_directory(directory, language)
    decoder, parameters = PunktDecoder(), PunktParameters()
    parameters.collocations = set(_punkt_table(folder / "collocations.tab", decoder.tab2tups))
    parameters.sent_starters = _punkt_table(folder / "sent_starters.txt", decoder.txt2set)
    parameters.abbrev_types = _punkt_table(folder / "abbrev_types.txt", decoder.txt2set)
    parameters.ortho_context = _punkt_table(folder / "ortho_context.tab", decoder.tab2intdict)
    return parameters


def _punkt_table(path: Path, decode: Callable[[Any], Any]) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return decode(file)
    except (OSError, ValueError, IndexError) as error:
        raise DataFormatError(
            f"the Punkt model in {path.parent} is damaged ({path.name}: {reason_of(error)}): "
            "download it again"
        ) from error


def model_directory(directory: Path, language: str) -> Path:
    """Return the directory, below `directory`, with the model of a language.

    Raises DataFormatError if there is none.
    """
    root = directory / _MODELS
    if is_dir(root / language):
        return root / language
    known = (
        ", ".join(sorted(path.name for path in root.iterdir() if is_dir(path)))
        if is_dir(root)
        else "none"
    )
    raise DataFormatError(
        f"{directory} has no Punkt model of {language!r} (it has: {known}): name another "
        "data.language, or set data.sentence_splitter to rules, which need no model"
    )


def download_punkt(directory: Path, language: str) -> dict[str, int]:
    """Download nltk's `punkt_tab` models into the empty `directory`, and return their bytes.

    Raises DownloadError if the download fails, DataFormatError if no model is for the language.
    """
    from nltk.downloader import Downloader

    try:
        fetched = Downloader().download(
            "punkt_tab",
            download_dir=str(directory),
            quiet=True,
            raise_on_error=True,
            print_error_to=io.StringIO(),  # the exception has the same message
        )
    except Exception as error:  # nltk raises ValueError, URLError, PermissionError and others
        raise _unreachable(error) from error
    if not fetched:
        raise _unreachable("nltk gave no reason")
    model_directory(directory, language)
    return {"bytes": sum(path.stat().st_size for path in rglob(directory, "*") if is_file(path))}


def find_punkt(language: str) -> Path | None:
    """Return the directory of nltk's search path with a language's model, or None."""
    from nltk import data

    for name in data.path:
        if is_dir(Path(name, _MODELS, language)):
            return Path(name)
    return None


def _unreachable(reason: object) -> DownloadError:
    return DownloadError(
        f"nltk's Punkt models cannot be downloaded ({reason}): check the network, or set "
        "data.sentence_splitter to rules, which need no download"
    )


class SentenceSplitter(AbstractContextManager["SentenceSplitter"]):
    """A context manager that splits texts into sentences in worker processes.

    Processes are used because the splitters are pure Python. With one worker, texts are split in
    this process.
    """

    def __init__(self, choice: SplitterChoice, workers: int) -> None:
        """Check that the model exists, then create the pool. Raises DataFormatError."""
        self._choice = choice
        self._split = _splitter_of(choice)
        self._pool = WorkerPool(workers) if workers > 1 else None
        self._broken = False

    def split(self, texts: Sequence[str]) -> tuple[list[str], npt.NDArray[np.int64]]:
        """Return all sentences, and the number of sentences of each text. Thread-safe.

        Raises WorkerLostError.
        """
        if self._pool is None:
            parts = [self._split(text) for text in texts]
        else:
            try:
                futures = [
                    self._pool.submit(split_texts, self._choice, batch)
                    for batch in text_batches(texts, _BATCH_CHARACTERS)
                ]
                parts = [part for future in futures for part in future.result()]
            except BrokenExecutor as error:
                self._broken = True
                raise WorkerLostError(
                    "a process that divided text into sentences was killed, perhaps because memory "
                    "ran out: nothing was written; use fewer workers (data.workers, --workers), or "
                    "free memory"
                ) from error
        counts = np.fromiter(map(len, parts), np.int64, len(parts))
        return [sentence for part in parts for sentence in part], counts

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._pool is None:
            return
        if self._broken:
            self._pool.kill()
        else:
            self._pool.shutdown(cancel_futures=kind is not None)


def split_texts(choice: SplitterChoice, texts: Sequence[str]) -> list[list[str]]:
    """Return the sentences of each text; runs in the processes of SentenceSplitter."""
    split = _splitter_of(choice)
    return [split(text) for text in texts]


@cache
def _splitter_of(choice: SplitterChoice) -> Split:
    return make_splitter(choice)
