"""Steps of curation as datatrove's blocks, with counts of what they remove.

The module imports datatrove, so it is itself imported only where documents are curated.
"""

import os
import re
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.io import DataFolder, LocalFileSystem
from datatrove.pipeline import dedup, filters
from datatrove.pipeline.dedup import exact_dedup, minhash
from datatrove.pipeline.dedup.exact_dedup import ExactDedupConfig
from datatrove.pipeline.filters import url_filter
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.formatters.pii import PIIFormatter
from datatrove.utils.lid import FastTextLID
from datatrove.utils.word_tokenizers import WordTokenizer, load_word_tokenizer
from loguru import logger
from tqdm import tqdm

from megacore.config.curate import (
    C4QualityStep,
    CurateStep,
    ExactDedupStep,
    ExtractTextStep,
    FineWebQualityStep,
    GopherQualityStep,
    GopherRepetitionStep,
    LanguageStep,
    MinhashDedupStep,
    PiiStep,
    PythonStep,
    UrlStep,
)
from megacore.corpus.curate_job import load_function, url_lists
from megacore.corpus.curate_report import Tally
from megacore.corpus.curate_sources import FALLEN
from megacore.corpus.extract import ExtractText
from megacore.errors import ConfigError, DataFormatError, WorkspaceError, one_line
from megacore.paths import glob

logger.disable("datatrove")  # errors are raised, progress is counted in the receipts
for _module_with_bars in (exact_dedup, minhash):
    _module_with_bars.tqdm = partial(tqdm, disable=True)
_SHINGLES = 1024
"""N-grams that are hashed together: their hashes fit into the cache."""
_LAST_PRIORITY = 65_535
"""Priority of the first shard's documents among exact duplicates, datatrove's largest."""
_BUFFERED = 256
"""Signatures of each shard in memory while buckets are merged."""
_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")
_SENTENCE_END = re.compile(r"""[.!?…]+["'”’»)\]]*\s+|[。！？]+[」』”’]*\s*""")


class SeparatedWords(WordTokenizer):  # type: ignore[misc]
    """Words of letters and digits, other characters one by one, and sentences that end in marks."""

    def word_tokenize(self, text: str) -> list[str]:
        """Return the words of a text."""
        words: list[str] = _WORD.findall(text)
        return words

    def sent_tokenize(self, text: str) -> list[str]:
        """Return the sentences of a text without white space around them."""
        parts = (text[start:stop].strip() for start, stop in self.span_tokenize(text))
        return [part for part in parts if part]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        """Return start and end of each sentence; together they cover the text."""
        ends = [match.end() for match in _SENTENCE_END.finditer(text)]
        if text and (not ends or ends[-1] < len(text)):
            ends.append(len(text))
        return list(zip([0, *ends], ends, strict=False))

    # Blocks share datatrove's cache of words, whose key includes the tokenizer.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, SeparatedWords)

    def __hash__(self) -> int:
        return hash(SeparatedWords)


def words_of(language: str | None) -> Any:
    """Return the tokenizer of words for a step's `language`. Raises ConfigError."""
    if language is None:
        return SeparatedWords()
    try:
        return load_word_tokenizer(language)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"data.curate: language {language!r} has no tokenizer here ({one_line(error)}): "
            "install it, name another language, or leave language out"
        ) from error


class _Removed:
    """Writer of removed documents, in datatrove's sense, that counts them instead.

    Without a `reason`, it is the one that datatrove's filter notes in the field `filter_reason`.
    With one, that field is ignored: it may be the source's own.
    """

    def __init__(self, tally: Tally, step: str, reason: str | None = None) -> None:
        self._tally, self._step, self._reason = tally, step, reason

    def write(self, document: Document, rank: int = 0) -> None:
        """Count a removed document."""
        fields = document.metadata
        reason = fields.get(FALLEN) or self._reason or fields.get("filter_reason", "removed")
        self._tally.note_removed(self._step, str(reason), document)

    def __enter__(self) -> "_Removed":
        return self

    def __exit__(self, *error: object) -> None:
        return None


class _WithText(BaseFilter):  # type: ignore[misc]
    """Removal of documents of which a step has left no text."""

    name = "with text"

    def filter(self, document: Document) -> bool:
        """Return True if the document has text."""
        return bool(document.text.strip())


class _Pii(PIIFormatter):  # type: ignore[misc]
    """datatrove's formatter with replacements that do not depend on earlier documents."""

    def __init__(self, tally: Tally, step: str, options: dict[str, Any]) -> None:
        super().__init__(**options)
        self._tally, self._step = tally, step

    def format(self, text: str) -> str:
        """Return the text with the first replacements for its first addresses."""
        self.emails_replacer._replace_i = self.ip_replacer._replace_i = 0
        result: str = super().format(text)
        self._tally.changed[self._step] += result != text
        return result


class _Model(FastTextLID):  # type: ignore[misc]
    """fastText model of a local file."""

    def __init__(self, languages: list[str] | None, path: str) -> None:
        super().__init__(languages)
        self._path = path

    @property
    def model(self) -> Any:
        """Model, loaded once per process."""
        return load_model(self._path)


class _Language(filters.LanguageFilter):  # type: ignore[misc]
    """datatrove's filter with a local model, and counts of languages."""

    def __init__(self, tally: Tally, step: LanguageStep, model: str, removed: _Removed) -> None:
        languages = None if step.languages is None else list(step.languages)
        super().__init__(
            languages,
            step.language_threshold,
            removed,
            step.backend,
            step.label_only,
        )
        self.model = _Model(languages, model)
        self._tally = tally

    def filter(self, document: Document) -> Any:
        """Return True to keep the document, or the language for which it is removed."""
        kept = super().filter(document)
        language = document.metadata["language"]
        self._tally.languages_read[language] += 1
        return True if kept else (False, language)


class _Url(filters.URLFilter):  # type: ignore[misc]
    """datatrove's filter with lists from files and the installed list of public suffixes."""

    def __init__(self, step: UrlStep) -> None:
        from tldextract import TLDExtract

        super().__init__(
            step.soft_word_threshold,
            use_integrated_lists=step.use_integrated_lists,
            extra_domains=_entries(step, "extra_domains"),
            extra_urls=_entries(step, "extra_urls"),
            banned_words=_entries(step, "banned_words"),
            banned_subwords=_entries(step, "banned_subwords"),
            soft_banned_words=_entries(step, "soft_banned_words"),
        )
        # Otherwise the list is downloaded, and the documents that are kept depend on the day.
        self.tldextractor = TLDExtract(suffix_list_urls=(), cache_dir=None)
        self._field = step.field

    def filter(self, document: Document) -> Any:
        """Return True to keep the document, or the list for which it is removed."""
        url = document.metadata.get(self._field)
        if not isinstance(url, str) or not url:
            fields = ", ".join(sorted(document.metadata)) or "none"
            raise DataFormatError(
                f"{document.id} has no URL under {self._field!r}; its other fields are {fields}: "
                "set the field of the step url in data.curate, or remove the step"
            )
        document.metadata["url"] = url
        return super().filter(document)


class _Python(BaseFilter):  # type: ignore[misc]
    """Filter that calls a user's function."""

    name = "python"

    def __init__(self, tally: Tally, step: str, function: str, removed: _Removed) -> None:
        super().__init__(removed)
        self._tally, self._step, self._name = tally, step, function
        self._function = load_function(function)

    def filter(self, document: Document) -> bool:
        """Return True to keep the document, which the function may have changed."""
        values = {**document.metadata, "text": document.text, "source": document.id}
        try:
            result = self._function(values)
        except (Exception, SystemExit) as error:
            raise DataFormatError(
                f"data.curate: {self._name} failed for {document.id} with "
                f"{type(error).__name__}: {one_line(error)}: correct the function"
            ) from error
        if isinstance(result, bool | np.bool_):
            return bool(result)
        if not isinstance(result, dict) or not isinstance(result.get("text"), str):
            what = "a dictionary without text" if isinstance(result, dict) else repr(result)[:80]
            raise DataFormatError(
                f"data.curate: {self._name} returned {what} for {document.id}: return True, False, "
                "or a dictionary with text"
            )
        self._tally.changed[self._step] += result["text"] != document.text
        document.text = result["text"]
        document.metadata = {
            key: value for key, value in result.items() if key not in ("text", "source")
        }
        return True


class _Folder(DataFolder):  # type: ignore[misc]
    """datatrove's folder on a local disk, whose path may have any characters.

    datatrove's takes `[`, `*` and `?` of the path for patterns and lists nothing, and `::` for a
    chain of file systems.
    """

    def __init__(self, path: Path, expected: int = 0) -> None:
        """Take the folder, and the least number of files that a listing must have."""
        super().__init__(str(path), fs=LocalFileSystem())
        self._expected = expected

    def glob(self, path: str, maxdepth: int | None = None, **options: Any) -> dict[str, Any]:
        """Return details of the files that match a pattern, by their path in the folder."""
        names = (str(file.relative_to(self.path)) for file in glob(self.path, path))
        return {name: self.info(name) for name in names}

    def list_files(self, *args: Any, **options: Any) -> list[str]:
        """Return the paths of files. Raises WorkspaceError if they are too few."""
        files: list[str] = super().list_files(*args, **options)
        if len(files) < self._expected:
            raise WorkspaceError(
                f"{self.path} shows {len(files):,} of {self._expected:,} files of a deduplication: "
                "mount the workspace with the same content on all hosts, and start again"
            )
        return files


class _Minhash(dedup.MinhashDedupSignature):  # type: ignore[misc]
    """datatrove's signatures in memory that does not grow with a document's length."""

    def __init__(self, folder: _Folder, step: MinhashDedupStep) -> None:
        super().__init__(folder, minhash_config(step), words_of(step.language))
        # From version 4, xxhash takes bytes only, while datatrove gives it text.
        self._hash_func = _text_hash

    def get_signature(self, shingles: npt.NDArray[np.uint64]) -> list[list[int]]:
        """Return the least hashes of the n-grams [N, 1] by bucket."""
        parts = [
            [part for bucket in super(_Minhash, self).get_signature(chunk) for part in bucket]
            for chunk in np.split(shingles, range(_SHINGLES, len(shingles), _SHINGLES))
        ]
        least = np.array(parts, self.config.hash_config.np_dtype).min(axis=0)
        return [part.tolist() for part in np.split(least, self.config.num_buckets)]


def minhash_config(step: MinhashDedupStep) -> Any:
    """Return the step's options in datatrove's form."""
    return dedup.MinhashConfig(
        n_grams=step.n_grams,
        num_buckets=step.num_buckets,
        hashes_per_bucket=step.hashes_per_bucket,
        seed=step.seed,
    )


def _text_hash(text: str) -> int:
    return xxhash.xxh64_intdigest(text.encode())


def _text_of(document: Document) -> bytes:  # datatrove reads the annotation
    text: str = document.text
    return text.encode()


def exact_config(place: int = 0) -> Any:
    """Return the options of exact deduplication, by which the first shard's document is kept."""
    return ExactDedupConfig(_text_of, lambda document: _LAST_PRIORITY - place)


def filter_blocks(
    steps: Iterable[tuple[str, CurateStep]], tally: Tally, models: dict[str, str]
) -> list[Any]:
    """Return the blocks of steps other than deduplications, which are given with their labels."""
    blocks: list[Any] = []
    for label, step in steps:
        removed = _Removed(tally, label, "false" if isinstance(step, PythonStep) else None)
        blocks.append(_block(label, step, tally, removed, models))
        if isinstance(step, C4QualityStep | PythonStep):
            blocks.append(_WithText(_Removed(tally, label, "empty")))
    return blocks


def _block(
    label: str, step: CurateStep, tally: Tally, removed: _Removed, models: dict[str, str]
) -> Any:
    options = step.model_dump(exclude={"step", "language"})
    match step:
        case GopherQualityStep():
            options["stop_words"] = None if step.stop_words is None else list(step.stop_words)
            kind = filters.GopherQualityFilter
        case GopherRepetitionStep():
            kind = filters.GopherRepetitionFilter
        case C4QualityStep():
            kind = filters.C4QualityFilter
        case FineWebQualityStep():
            kind = filters.FineWebQualityFilter
        case LanguageStep():
            return _Language(tally, step, models[label], removed)
        case UrlStep():
            block = _url_filter(label, step, tuple(map(_mtime, url_lists(step))))
            block.exclusion_writer = removed
            return block
        case PiiStep():
            values = {name: value for name, value in options.items() if value is not None}
            return _Pii(tally, label, values)
        case ExtractTextStep():
            return ExtractText(tally, label, step)
        case PythonStep():
            return _Python(tally, label, step.function, removed)
        case _:
            raise TypeError(f"{step} is no filter")
    return kind(**options, language=words_of(step.language), exclusion_writer=removed)


def duplicate_filter(step: CurateStep, label: str, folder: Path, tally: Tally) -> Any:
    """Return the block that removes the duplicates recorded in `folder`."""
    removed = _Removed(tally, label, "duplicate")
    if isinstance(step, ExactDedupStep):
        return dedup.ExactDedupFilter(_Folder(folder / "duplicates"), exact_config(), removed)
    return dedup.MinhashDedupFilter(
        _Folder(folder / "remove"), removed, load_cluster_ids=True, lines_to_buffer=_BUFFERED
    )


def signature_block(step: CurateStep, folder: Path, place: int, finders: int) -> Any:
    """Return the block that writes the signatures of the shard at a place into `folder`."""
    signatures = _Folder(folder / "signatures")
    if isinstance(step, MinhashDedupStep):
        return _Minhash(signatures, step)
    return dedup.ExactDedupSignature(signatures, exact_config(place), finders)


def finding_block(step: CurateStep, folder: Path, kind: str, inputs: int) -> Any:
    """Return the block that compares signatures: of kind `find`, `buckets` or `cluster`.

    `inputs` is the number of files that a task reads.
    """
    if isinstance(step, MinhashDedupStep):
        config = minhash_config(step)
        if kind == "buckets":
            return dedup.MinhashDedupBuckets(
                _Folder(folder / "signatures", inputs),
                _Folder(folder / "pairs"),
                config=config,
                lines_to_buffer=_BUFFERED,
            )
        return dedup.MinhashDedupCluster(
            _Folder(folder / "pairs", inputs),
            _Folder(folder / "remove"),
            config=config,
            save_cluster_id=True,
            save_cluster_size=True,
            lines_to_buffer=_BUFFERED,
        )
    return dedup.ExactFindDedups(
        _Folder(folder / "signatures", inputs),
        _Folder(folder / "duplicates"),
        exact_config(),
        lines_to_buffer=_BUFFERED,
    )


class Executor(LocalPipelineExecutor):  # type: ignore[misc]
    """datatrove's local executor for one task in this process, with another mark of completion."""

    def __init__(
        self, pipeline: list[Any], tasks: int, folder: Path, complete: Callable[[], None]
    ) -> None:
        """Run `pipeline`, log below `folder`, and call `complete` when a task has ended."""
        super().__init__(pipeline, tasks=tasks, logging_dir=_Folder(folder), skip_completed=False)
        self._complete = complete

    def run_task(self, rank: int) -> None:
        """Run one task."""
        # The second local rank writes nothing on the terminal.
        self._run_for_rank(rank, local_rank=1)

    def mark_rank_as_completed(self, rank: int) -> None:
        """Record that the task has ended."""
        self._complete()


@cache
def _url_filter(label: str, step: UrlStep, mtimes_ns: tuple[int, ...]) -> _Url:
    """Return the filter of a step, whose lists are read once per process unless they change."""
    return _Url(step)


def _entries(step: UrlStep, name: str) -> list[str] | None:
    """Return the entries of one of the step's lists. Raises DataFormatError."""
    path: str | None = getattr(step, name)
    if path is None:
        return None
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataFormatError(
            f"{path}, {name} of the step url in data.curate, is not UTF-8 ({error}): convert it"
        ) from error
    entries = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if name not in ("extra_domains", "extra_urls"):
        empty = next((entry for entry in entries if not url_filter.normalize(entry)), None)
        if empty is not None:  # datatrove would remove all URLs that end with a mark
            raise DataFormatError(
                f"{path}, {name} of the step url in data.curate, has {empty!r}, of which no letter "
                "a-z or digit is left to compare: remove it"
            )
    return entries


def _mtime(path: str) -> int:
    return os.stat(path).st_mtime_ns


def load_model(path: str) -> Any:
    """Return a fastText model, read once per process unless it changes. Raises DataFormatError."""
    return _load_model(path, _mtime(path))


@cache
def _load_model(path: str, mtime_ns: int) -> Any:
    from fasttext.FastText import _FastText

    try:
        return _FastText(path)
    except ValueError as error:
        raise DataFormatError(
            f"{path} is no fastText model ({one_line(error)}): correct the model of the step "
            "language_id in data.curate"
        ) from error
