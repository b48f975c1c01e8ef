"""Search of evaluation sets in a corpus: n-grams of words that an item and a document share.

Words are those of datatrove's `simplify_text`: lower case, numbers as 0, without punctuation and
accents. An item is contaminated if n consecutive words of it occur in a document (Brown et al.
2020, arXiv:2005.14165, appendix C, with n = 13). An item of fewer words cannot be searched.

A corpus is divided into shards that are searched side by side. The result of a shard is a file that
is written at once, so an attempt that was killed continues after the shards that are done. Nothing
depends on the number of processes.
"""

import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.artifact.files import (
    canonical_json,
    read_json,
    replace_file,
    save_array,
    workspace_errors,
    write_json,
)
from megacore.corpus.curate_job import (
    CurateOptions,
    Job,
    discarding_job,
    document_file,
    publish_documents,
)
from megacore.corpus.documents import names_sources, read_sources
from megacore.corpus.segments import segments
from megacore.errors import DataFormatError, WorkerLostError
from megacore.launch.workers import WorkerPool
from megacore.paths import exists

VERSION = 1
"""Version of the search and of the removal, increased whenever their output changes."""
SEARCH_NAME = "search.json"
HASHES_NAME = "documents.npy"
REPORT_NAME = "report.json"
_BENCHMARKS = "benchmarks.json"
_SEARCHED = "searched"
"""Name of the receipts of a search."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_TABLE_BITS = 24
_SPACE = re.compile(r"\s")
_CACHED_PARTS = 1 << 20
_CACHED_CHARACTERS = 64
"""Parts of more characters, such as lines of Chinese, are rarely repeated and not cached."""
_BATCH_CHARACTERS = 1 << 18
"""Characters of documents that are searched together: their hashes fit into the cache."""
_EXAMPLES = 20
"""Number of contaminated items of each evaluation set that are shown."""
_EXAMPLE_CHARACTERS = 200


@dataclass(frozen=True)
class Benchmark:
    """An evaluation set."""

    name: str
    """Name in metrics: wikitext, lambada, or lm_eval/TASK."""
    items: tuple[str, ...]
    """Text of each item."""


class _Words(dict[str, tuple[int, ...]]):
    """Cache of the word numbers of each part of a text; -1 stands for a word of no item."""

    def __init__(self, numbers: Mapping[str, int]) -> None:
        super().__init__()
        self._numbers = numbers
        self._unknown = (-1,)

    def __missing__(self, part: str) -> tuple[int, ...]:
        words = tuple([self._numbers.get(word, -1) for word in words_of(part)])
        if words == self._unknown:
            words = self._unknown  # most spellings: one tuple for all
        if len(part) <= _CACHED_CHARACTERS:
            if len(self) >= _CACHED_PARTS:
                self.clear()
            self[part] = words
        return words


def words_of(text: str) -> list[str]:
    """Return the words of a text as they are compared.

    No rule of `simplify_text` reaches across white space, so that the words of a text are those of
    its parts.
    """
    simplify, ascii_rules, rules = _simplification()
    words: list[str] = simplify(text, ascii_rules if text.isascii() else rules).split()
    return words


@cache
def _simplification() -> tuple[Callable[[str, Any], str], Any, Any]:
    """Return `simplify_text` with its rules for ASCII and for all texts.

    Only the search for accents looks at each character, and ASCII has none.
    """
    from datatrove.utils.text import DEF_TEXT_NORM_CONFIG, simplify_text

    ascii_rules = replace(DEF_TEXT_NORM_CONFIG, norm_unicode_diacritics=False)
    return simplify_text, ascii_rules, DEF_TEXT_NORM_CONFIG


def _parts(text: str) -> Iterator[list[str]]:
    """Yield lists of the parts of a text between white space, each of a batch's characters."""
    start = 0
    while start < len(text):
        space = _SPACE.search(text, start + _BATCH_CHARACTERS)
        stop = len(text) if space is None else space.start()
        yield text[start:stop].split()
        start = stop


class Index:
    """N-grams of evaluation sets, whose size does not depend on the corpus."""

    def __init__(self, benchmarks: Sequence[Benchmark], ngram: int) -> None:
        self.ngram = ngram
        self.items = [
            (number, item)
            for number, benchmark in enumerate(benchmarks)
            for item in range(len(benchmark.items))
        ]
        """Number of the evaluation set and of its item, by the item's number in the index."""
        parts = [text.split() for benchmark in benchmarks for text in benchmark.items]
        known = {part: words_of(part) for part in set(chain.from_iterable(parts))}
        texts = [[word for part in each for word in known[part]] for each in parts]
        self.lengths = np.array([len(words) for words in texts], np.int64)
        """i64[items]: number of words of each item."""
        self.words = sorted(set(chain.from_iterable(texts)))
        numbers = {word: number for number, word in enumerate(self.words)}
        self._numbers = _Words(numbers)
        draws = np.random.default_rng(ngram)
        self._values = draws.integers(0, 2**64, max(1, len(self.words)), np.uint64)
        flat = np.fromiter(map(numbers.__getitem__, chain.from_iterable(texts)), np.int64)
        owner = np.repeat(np.arange(len(texts)), self.lengths)
        count = max(0, len(flat) - ngram + 1)
        # The first and the last word of an n-gram belong to the same item.
        starts = np.flatnonzero(owner[:count] == owner[ngram - 1 : ngram - 1 + count])
        hashes = self._hash(flat)[starts] if count else np.zeros(0, np.uint64)
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._starts, self._owner = hashes[order], starts[order], owner
        self._flat = flat
        self._table = np.zeros(1 << _TABLE_BITS, np.bool_)
        self._table[self._hashes >> np.uint64(64 - _TABLE_BITS)] = True

    def _hash(self, words: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Return the hashes of all n-grams of n or more words, in order.

        The hash of 2 k words is computed from two hashes of k words, which takes about 2 log2 n
        steps instead of n.
        """
        block, length = self._values[words], 1
        hashes, done = block, 0
        for bit in range(self.ngram.bit_length()):
            if self.ngram >> bit & 1:
                hashes = _joined(hashes, block, done) if done else block
                done += length
            if self.ngram >> bit > 1:
                block, length = _joined(block, block, length), 2 * length
        return hashes

    def _words(self, text: str) -> npt.NDArray[np.int64]:
        """Return the numbers of a text's words, and an unknown word that ends all n-grams."""
        parts = map(self._numbers.__getitem__, chain.from_iterable(_parts(text)))
        return np.fromiter(chain(chain.from_iterable(parts), (-1,)), np.int64)

    def find(self, texts: Sequence[str]) -> list[dict[int, str]]:
        """Return for each text the items that share an n-gram with it, and the first such n-gram.

        The texts are searched in one pass, because most documents are short.
        """
        matches: list[dict[int, str]] = [{} for _ in texts]
        arrays = [self._words(text) for text in texts]
        words = np.concatenate([np.zeros(0, np.int64), *arrays])
        count = len(words) - self.ngram + 1
        if count < 1:
            return matches
        unknown = np.zeros(len(words) + 1, np.int64)
        np.cumsum(words < 0, out=unknown[1:])
        hashes = self._hash(words)
        likely = self._table[hashes >> np.uint64(64 - _TABLE_BITS)]
        starts = np.flatnonzero(likely & (unknown[self.ngram :] == unknown[:count]))
        left = np.searchsorted(self._hashes, hashes[starts], "left")
        right = np.searchsorted(self._hashes, hashes[starts], "right")
        ends = np.cumsum([len(each) for each in arrays])
        owners = np.searchsorted(ends, starts, "right")
        known: set[tuple[int, bytes]] = set()
        for at in np.flatnonzero(left < right):
            gram = words[starts[at] : starts[at] + self.ngram]
            if (key := (int(owners[at]), gram.tobytes())) in known:
                continue
            known.add(key)
            same = self._starts[left[at] : right[at]]
            # Different n-grams may have the same hash.
            equal = (self._flat[same[:, None] + np.arange(self.ngram)] == gram).all(1)
            text = " ".join(self.words[number] for number in gram)
            for item in self._owner[same[equal]].tolist():
                matches[owners[at]].setdefault(item, text)
        return matches


def _joined(
    first: npt.NDArray[np.uint64], second: npt.NDArray[np.uint64], distance: int
) -> npt.NDArray[np.uint64]:
    """Combine each hash in `first` with the one in `second` that begins `distance` words later."""
    following = second[distance:]
    hashes = first[: len(following)] * _FACTOR
    hashes ^= hashes >> np.uint64(29)
    hashes += following[: len(hashes)]
    return hashes


def search_corpus(
    corpus: Path,
    directory: Path,
    work: Path,
    benchmarks: Sequence[Benchmark],
    ngram: int,
    options: CurateOptions,
) -> dict[str, Any]:
    """Search evaluation sets in a corpus directory, and write what was found to `directory`.

    Args:
        corpus: corpus directory.
        directory: empty directory for `search.json` and `documents.npy`, the hash of each document.
        work: directory of intermediate files, in which an earlier call with the same arguments
            continues; the caller removes it when `directory` is safe.
        benchmarks: evaluation sets with different names.
        ngram: number of words.
        options: sizes and number of processes.

    Returns counts. Raises ConfigError, DataFormatError, WorkerLostError, WorkspaceError.
    """
    with workspace_errors(work):
        work.mkdir(parents=True, exist_ok=True)
        job = _prepared(corpus, work, options)
        sets = [[benchmark.name, benchmark.items] for benchmark in benchmarks]  # the order counts
        write_json(work / _BENCHMARKS, {"ngram": ngram, "benchmarks": sets})
        _run_shards(job, _SEARCHED, _search_shard, options.processes)
        with discarding_job(work):
            read_sources(corpus)
        matches: dict[int, dict[str, str]] = {}
        hashes, hits = [], []
        for rank in range(len(job.shards)):
            shard = read_json(_receipt(work, _SEARCHED, rank))
            for item, example in shard["items"].items():
                matches.setdefault(int(item), example)
            hashes.append(np.fromfile(_numbers(work, "hashes", rank), "<u8"))
            hits.append(shard["hits"])
        save_array(directory / HASHES_NAME, np.concatenate([np.zeros(0, "<u8"), *hashes]))
        content = _summary(benchmarks, _read_index(work), matches) | {
            "shards": [
                {"documents": len(each), "hits": own}
                for each, own in zip(hashes, hits, strict=True)
            ]
        }
        write_json(directory / SEARCH_NAME, content)
        _index.cache_clear()  # the process of the flow goes on
    return {
        "documents": sum(map(len, hashes)),
        "hits": sum(map(len, hits)),
        "items": sum(len(each.items) for each in benchmarks),
        "contaminated_items": len(matches),
        "ngram": ngram,
    }


def _prepared(corpus: Path, work: Path, options: CurateOptions) -> Job:
    """Return the job of a search or removal, which has no steps of curation."""
    return Job.prepare(work, segments(corpus), (), {}, options, named=names_sources(corpus))


def _summary(
    benchmarks: Sequence[Benchmark], index: Index, found: Mapping[int, dict[str, str]]
) -> dict[str, Any]:
    """Return for each evaluation set its numbers of items, and the contaminated ones."""
    rows: dict[str, Any] = {
        each.name: {"items": len(each.items), "searched": 0, "found": {}} for each in benchmarks
    }
    for number, (benchmark, item) in enumerate(index.items):
        row = rows[benchmarks[benchmark].name]
        row["searched"] += int(index.lengths[number] >= index.ngram)
        if number in found:
            text = benchmarks[benchmark].items[item][:_EXAMPLE_CHARACTERS]
            row["found"][str(item)] = {"text": text, **found[number]}
    return {"ngram": index.ngram, "benchmarks": rows}


def _read_index(work: Path) -> Index:
    """Return the index of a search, built once per process."""
    return _index(work, (work / _BENCHMARKS).stat().st_mtime_ns)


@lru_cache(1)
def _index(work: Path, modified: int) -> Index:
    values = read_json(work / _BENCHMARKS)
    sets = [Benchmark(name, tuple(items)) for name, items in values["benchmarks"]]
    return Index(sets, values["ngram"])


def _documents(job: Job, rank: int) -> Iterator[Any]:
    """Yield the documents of a shard, without the empty ones."""
    from megacore.corpus.curate_documents import ReadShard

    reader = ReadShard(
        job.shards[rank],
        None,
        all_fields=False,
        named=job.named,
        on_bad_line=job.on_bad_line,
        document_bytes=job.document_bytes,
    )
    yield from reader.run(None)


def _batches(documents: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield documents together until they have the characters of a batch."""
    batch: list[Any] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


def _search_shard(work: Path, rank: int) -> None:
    import xxhash

    job = Job.read(work)
    index = _read_index(work)
    hits: list[int] = []
    items: dict[int, dict[str, str]] = {}
    hashes = array("Q")
    for batch in _batches(_documents(job, rank)):
        for document, found in zip(batch, index.find([each.text for each in batch]), strict=True):
            if found:
                hits.append(len(hashes))
            for item, gram in found.items():
                items.setdefault(item, {"document": document.id, "ngram": gram})
            words = " ".join(document.text.lower().split())
            hashes.append(xxhash.xxh3_64_intdigest(words.encode("utf-8", "surrogatepass")))
    replace_file(_numbers(work, "hashes", rank), np.array(hashes, "<u8").tobytes())
    write_json(_receipt(work, _SEARCHED, rank), {"hits": hits, "items": items})


def remove_documents(
    corpus: Path,
    searches: Sequence[Path],
    number: int,
    directory: Path,
    work: Path,
    options: CurateOptions,
) -> dict[str, Any]:
    """Write the documents of a corpus that share no n-gram with an evaluation set.

    Of documents that differ only in case and white space, in all sources of a run, the first one
    stays: the held-out splits are ranges of documents, and a copy might fall into another one.

    Args:
        corpus: corpus directory.
        searches: results of `search_corpus` for all sources, with the same options.
        number: number of the corpus among them.
        directory: empty corpus directory, on the file system of `work`.
        work: see `search_corpus`.
        options: sizes and number of processes.

    Returns counts. Raises DataFormatError, WorkerLostError, WorkspaceError.
    """
    with workspace_errors(work):
        work.mkdir(parents=True, exist_ok=True)
        job = _prepared(corpus, work, options)
        copies = _copies(searches, number)
        search = read_json(searches[number] / SEARCH_NAME)
        if len(search["shards"]) != len(job.shards):
            raise DataFormatError(
                f"{corpus} is divided into {len(job.shards):,} shards, and was divided into "
                f"{len(search['shards']):,} when it was searched: leave the source unchanged "
                "during a run"
            )
        first = 0
        for rank, shard in enumerate(search["shards"]):
            stop = first + shard["documents"]
            in_shard = copies[slice(*np.searchsorted(copies, (first, stop)))] - first
            numbers = np.setdiff1d(in_shard, shard["hits"]).astype("<u8")
            # Each attempt writes them again. `write_json` would list the directory of all shards.
            replace_file(_numbers(work, "copies", rank), numbers.tobytes(), durable=False)
            replace_file(_plan(work, rank), canonical_json(shard), durable=False)
            first = stop
        _run_shards(job, "remove", _remove_from_shard, options.processes)
        with discarding_job(work):
            read_sources(corpus)
        receipts = [read_json(_receipt(work, "remove", rank)) for rank in range(len(job.shards))]
        publish_documents(work, directory, len(job.shards))
    counts = {
        name: sum(receipt[name] for receipt in receipts)
        for name in ("documents", "bytes", "words", "removed", "removed_copies")
    }
    if not counts["documents"]:
        raise _nothing_left(corpus, counts["removed"], counts["removed_copies"])
    examples = list(chain.from_iterable(receipt["examples"] for receipt in receipts))
    write_json(directory / REPORT_NAME, {**counts, "examples": examples[:_EXAMPLES]})
    return {**counts, "files": len(job.shards), "skipped_files": 0}


def _nothing_left(corpus: Path, removed: int, copies: int) -> DataFormatError:
    """Return the error for a corpus of which no document stays, with its remedy."""
    if not removed:
        return DataFormatError(
            f"{corpus} has no documents in which evaluate.contamination could search: give "
            "another data.source"
        )
    if removed == copies:
        return DataFormatError(
            f"evaluate.contamination: remove leaves none of {removed:,} documents of {corpus}, "
            "because all are copies of documents of earlier sources: remove this source from the "
            "blend"
        )
    return DataFormatError(
        f"evaluate.contamination: remove leaves none of {removed:,} documents of {corpus}, of "
        f"which {removed - copies:,} share an n-gram with an evaluation set and {copies:,} are "
        "copies of others: raise evaluate.contamination_ngram, or evaluate on other texts"
    )


def _copies(searches: Sequence[Path], number: int) -> npt.NDArray[np.int64]:
    """Return the documents of a source that copy an earlier one of it or of a source before it."""
    hashes = [np.load(each / HASHES_NAME) for each in searches[: number + 1]]
    joined = np.concatenate(hashes)
    _, firsts = np.unique(joined, return_index=True)
    later = np.ones(len(joined), np.bool_)
    later[firsts] = False
    copies: npt.NDArray[np.int64] = np.flatnonzero(later[len(joined) - len(hashes[-1]) :])
    return copies


def _remove_from_shard(work: Path, rank: int) -> None:
    from megacore.corpus.curate_documents import WriteDocuments
    from megacore.corpus.curate_report import Tally

    job, plan, tally = Job.read(work), read_json(_plan(work, rank)), Tally()
    hits, copies = set(plan["hits"]), np.fromfile(_numbers(work, "copies", rank), "<u8")
    is_copy = np.zeros(plan["documents"], np.bool_)
    is_copy[copies] = True
    examples: list[dict[str, str]] = []
    read = 0

    def kept() -> Iterator[Any]:
        nonlocal read
        for number, document in enumerate(_documents(job, rank)):
            read += 1
            copied = number < len(is_copy) and is_copy[number]
            reason = "n-gram" if number in hits else "copy" if copied else None
            if reason is None:
                yield document
            elif len(examples) < _EXAMPLES:
                text = document.text[:_EXAMPLE_CHARACTERS]
                examples.append({"reason": reason, "document": document.id, "text": text})

    path = work / document_file(rank)
    for _ in WriteDocuments(path, tally, job.document_bytes).run(kept()):
        pass
    if read != plan["documents"]:
        raise DataFormatError(
            f"shard {rank} of {job.shards[rank][0][0].path} has {read:,} documents, and had "
            f"{plan['documents']:,} when it was searched: leave the source unchanged during a run"
        )
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    counts = {name: tally.kept[name] for name in ("documents", "bytes", "words")}
    removed = {"removed": len(hits) + len(copies), "removed_copies": len(copies)}
    write_json(_receipt(work, "remove", rank), {**counts, **removed, "examples": examples})


def _receipt(work: Path, phase: str, rank: int) -> Path:
    return work / f"{phase}-{rank:05d}.json"


def _numbers(work: Path, name: str, rank: int) -> Path:
    """Return the path of a shard's array of u64.

    A compressed file is a single shard, whose documents are too many for numbers in JSON.
    """
    return work / f"{name}-{rank:05d}.u8"


def _plan(work: Path, rank: int) -> Path:
    return work / f"plan-{rank:05d}.json"


def _run_shards(
    job: Job, phase: str, function: Callable[[Path, int], None], processes: int
) -> None:
    """Run a function on the shards without a receipt: in processes, or with one in this one."""
    missing = [
        rank for rank in range(len(job.shards)) if not exists(_receipt(job.work, phase, rank))
    ]
    if min(processes, len(missing)) <= 1:
        for rank in missing:
            function(job.work, rank)
        return
    try:
        with WorkerPool(min(processes, len(missing))) as pool:
            for future in as_completed([pool.submit(function, job.work, rank) for rank in missing]):
                future.result()
    except BrokenExecutor as error:
        raise WorkerLostError(
            "a process of evaluate.contamination was killed, perhaps because memory ran out: the "
            "shards that are done are kept; run it again with fewer processes "
            "(data.curate_workers)"
        ) from error


def shares(searches: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return the contaminated items of each evaluation set in any of several searched corpora.

    Each row has `items`, those of at least n words (`searched`), `contaminated` and `share`, their
    quotient (None without searched items), and `examples`.
    """
    rows: dict[str, dict[str, Any]] = {}
    for directory in searches:
        for name, row in read_json(directory / SEARCH_NAME)["benchmarks"].items():
            known = rows.setdefault(name, {**row, "found": {}})
            known["found"] = {**row["found"], **known["found"]}
    return {
        name: {
            "items": row["items"],
            "searched": row["searched"],
            "contaminated": len(row["found"]),
            "share": len(row["found"]) / row["searched"] if row["searched"] else None,
            "examples": [
                {"item": int(item), **example}
                for item, example in sorted(row["found"].items(), key=lambda each: int(each[0]))
            ][:_EXAMPLES],
        }
        for name, row in rows.items()
    }
