"""Division of a curation into tasks, and the receipts of those that are done.

A corpus is divided into shards. Steps run over each shard in one pass up to the next deduplication,
which compares signatures of all shards; the next pass removes what it found:

    pass 0: read, filters, write, signatures -> compare -> pass 1: read, remove, filters, write -> …

A task is a pass over one shard or a part of a comparison. Its receipt names its files with their
sizes. Nothing depends on the number of processes, nor on the hosts that run them.
"""

import hashlib
import importlib
import importlib.util
import inspect
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from pydantic import TypeAdapter

from megacore.artifact.files import (
    access_errors,
    canonical_json,
    link_or_copy,
    read_json,
    regular,
    sync_directory,
    write_json,
)
from megacore.artifact.manifest import file_digest
from megacore.config.curate import (
    CurateStep,
    DedupStep,
    LanguageStep,
    MinhashDedupStep,
    PythonStep,
    UrlStep,
    compares_sources,
)
from megacore.config.data import DEFAULT_CURATE_SHARD_MB, OnBadLine
from megacore.config.keys import key_parameters
from megacore.corpus.curate_report import merged_report
from megacore.corpus.documents import SourceFile, write_sources
from megacore.corpus.formats import BOM, DOCUMENT_BYTES
from megacore.corpus.segments import Segment, divide, numbered
from megacore.errors import ConfigError, DataFormatError, one_line
from megacore.paths import glob, is_dir, is_file

VERSION = 2
"""Version of the curate stage, increased whenever its output changes."""
DOCUMENTS_FOLDER = "documents"
JOB_NAME = "job.json"
_URL_LISTS = ("extra_domains", "extra_urls", "banned_words", "banned_subwords", "soft_banned_words")
_MAX_SHARDS = 65_535
_MAX_FINDERS = 16
_STEPS: TypeAdapter[tuple[CurateStep, ...]] = TypeAdapter(tuple[CurateStep, ...])


@dataclass(frozen=True)
class Phase:
    """Tasks that do not depend on each other; a phase follows the one before it."""

    name: str
    kind: Literal["documents", "earlier", "find", "buckets", "cluster"]
    """`earlier` signs documents that earlier sources keep."""
    tasks: int
    steps: tuple[int, ...] = ()
    """Filters that a pass over documents applies, by their place in the list of steps."""
    reads: str | None = None
    """Folder of the documents that are read; None for the source."""
    pending: int | None = None
    """Deduplication whose duplicates are removed first."""
    writes: str | None = None
    """Folder of the documents that are written, if any."""
    compares: int | None = None
    """Deduplication whose signatures are written or compared."""
    first: int = 0
    """Number of the first task's signatures: those of earlier sources follow the own ones."""

    @property
    def is_last(self) -> bool:
        """True if the phase writes the documents that are kept."""
        return self.writes == DOCUMENTS_FOLDER

    def outputs(self, rank: int) -> tuple[str, ...]:
        """Return patterns of the files, below the work directory, that a task writes."""
        dedup = f"dedup-{self.compares}"
        match self.kind:
            case "find":
                return (f"{dedup}/duplicates/{rank:05d}/*",)
            case "buckets":
                return (f"{dedup}/pairs/{rank:05d}_*",)
            case "cluster":
                return (f"{dedup}/remove/*",)
        number = self.first + rank
        written = () if self.writes is None else (f"{self.writes}/{document_file(rank)}",)
        signed = () if self.compares is None else (f"{dedup}/signatures/*/{number:05d}.*",)
        return (*written, *signed)


@contextmanager
def discarding_job(work: Path) -> Iterator[None]:
    """Discard the job in `work` if the body, which checks the source files again, refuses one.

    No later attempt may continue with the documents of a file that changed while it was read.
    """
    try:
        yield
    except DataFormatError:
        (work / JOB_NAME).unlink(missing_ok=True)
        raise


def document_file(rank: int) -> str:
    """Return the name of the file with a shard's documents."""
    return f"documents-{rank:05d}.jsonl"


def publish_documents(folder: Path, directory: Path, shards: int) -> None:
    """Make `directory` a corpus of the documents of all shards, whose files are in `folder`."""
    files = []
    for rank in range(shards):
        path = directory / document_file(rank)
        link_or_copy(folder / path.name, path)
        files.append(SourceFile(path.name, path.stat().st_size, None))
    write_sources(directory, "jsonl", files, key="text", written=True)


def label_of(number: int, step: CurateStep) -> str:
    """Return the name of a step in reports: its number, from 1, and its type."""
    return f"{number + 1} {step.step}"


def plan_phases(steps: Sequence[CurateStep], shards: int, earlier: int = 0) -> list[Phase]:
    """Return the phases in order. The last one writes the documents that are kept.

    `earlier` is the number of shards with documents of earlier sources.
    """
    phases: list[Phase] = []
    filters: list[int] = []
    reads: str | None = None
    pending: int | None = None

    def documents(writes: str | None, compares: int | None) -> None:
        number = sum(phase.kind == "documents" for phase in phases)
        phases.append(
            Phase(
                f"pass-{number}",
                "documents",
                shards,
                tuple(filters),
                reads,
                pending,
                writes,
                compares,
            )
        )

    for number, step in enumerate(steps):
        if not isinstance(step, DedupStep):
            filters.append(number)
            continue
        unchanged = not filters and pending is None
        folder = reads if unchanged else f"documents-before-{number}"
        documents(None if unchanged else folder, number)
        if step.across_sources and earlier:
            name = f"earlier-{number}"
            phases.append(Phase(name, "earlier", earlier, compares=number, first=shards))
        if isinstance(step, MinhashDedupStep):
            phases.append(Phase(f"buckets-{number}", "buckets", step.num_buckets, compares=number))
            phases.append(Phase(f"cluster-{number}", "cluster", 1, compares=number))
        else:
            phases.append(Phase(f"find-{number}", "find", finders(shards), compares=number))
        filters, reads, pending = [], folder, number
    documents(DOCUMENTS_FOLDER, None)
    return phases


def finders(shards: int) -> int:
    """Return the number of tasks that compare exact signatures."""
    return min(_MAX_FINDERS, max(1, shards))


@dataclass(frozen=True)
class CurateOptions:
    """Options in addition to the steps."""

    shard_bytes: int = DEFAULT_CURATE_SHARD_MB * 10**6
    on_bad_line: OnBadLine = "stop"
    document_bytes: int = DOCUMENT_BYTES
    workers: int | None = None
    """Number of processes; None means one per core. With one, tasks run in this process."""

    @property
    def processes(self) -> int:
        """Number of processes with the default filled in."""
        return self.workers or len(os.sched_getaffinity(0))


def fingerprint(steps: Sequence[CurateStep]) -> list[dict[str, Any]]:
    """Return the steps as JSON for the stage's key, with the digests of the files they name.

    Raises ConfigError if a file is missing.
    """
    return [
        key_parameters(step, "curate", {name: _digest(step, name) for name in _resolved(step)})
        for step in steps
    ]


def url_lists(step: UrlStep) -> list[str]:
    """Return the paths of a step's lists."""
    return [path for name in _URL_LISTS if (path := getattr(step, name)) is not None]


def _resolved(step: CurateStep) -> tuple[str, ...]:
    match step:
        case LanguageStep():
            return ("model",)
        case UrlStep():
            return _URL_LISTS
        case PythonStep():
            return ("function",)
        case _:
            return ()


def _digest(step: CurateStep, name: str) -> Any:
    value: str | None = getattr(step, name)
    if value is None:
        return None
    if isinstance(step, PythonStep):
        return [value.rpartition(":")[2], _function_digest(value)]
    if not is_file(value):
        raise ConfigError(f"data.curate: {name} of the step {step.step} is {value}, no file")
    if isinstance(step, UrlStep):  # as the list is read
        with access_errors(Path(value)):
            content = regular(Path(value)).read_bytes()
        return hashlib.sha256(content.removeprefix(BOM)).hexdigest()
    return file_digest(Path(value))


def _function_digest(name: str) -> str:
    code = getattr(inspect.unwrap(load_function(name)), "__code__", None)
    if code is None or not is_file(code.co_filename):
        raise ConfigError(
            f"data.curate: {name} is not defined in a Python file, so that a change of it would go "
            "unnoticed: name a function with `def`"
        )
    return file_digest(Path(code.co_filename))


def load_function(name: str) -> Callable[[dict[str, Any]], Any]:
    """Return the function `module:name` or `path/to/file.py:name`. Raises ConfigError."""
    place, _, attribute = name.rpartition(":")
    try:
        function = getattr(_module(place), attribute)
    except (Exception, SystemExit) as error:
        reason = one_line(error)
        raise ConfigError(
            f"data.curate: {name} cannot be loaded ({type(error).__name__}: {reason}): name "
            "a function of a module that Python finds, or path/to/file.py:name"
        ) from error
    if not callable(function):
        raise ConfigError(f"data.curate: {name} is no function but {function!r}: name a function")
    loaded: Callable[[dict[str, Any]], Any] = function
    return loaded


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        if os.getcwd() not in sys.path:  # a console script has its own directory there
            sys.path.append(os.getcwd())
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_installed(setting: str) -> None:
    """Raise ConfigError unless datatrove, which the `setting` needs, is installed."""
    try:
        import datatrove  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{setting} needs {error.name}, which is not installed: install megacore[curate], or "
            f"remove {setting}"
        ) from error


@dataclass(frozen=True)
class Job:
    """The division of one curation into shards, which is stored in its work directory."""

    work: Path
    steps: tuple[CurateStep, ...]
    shards: tuple[tuple[tuple[Segment, int], ...], ...]
    """Segments of each shard with the number of their first line or row."""
    models: Mapping[str, str]
    """Paths of fastText models by the labels of their steps."""
    named: bool
    on_bad_line: OnBadLine
    document_bytes: int
    earlier: tuple[tuple[int, tuple[tuple[Segment, int], ...]], ...] = ()
    """Shards of documents that earlier sources keep, each with the number of its source from 1."""

    @classmethod
    def prepare(
        cls,
        work: Path,
        parts: Sequence[Segment],
        steps: Sequence[CurateStep],
        models: Mapping[str, str],
        options: CurateOptions,
        *,
        named: bool,
        earlier: Sequence[Sequence[Segment]] = (),
    ) -> "Job":
        """Divide the corpus, or read the division of an earlier attempt, and store it in `work`.

        An attempt at something else is discarded. `earlier` holds the documents of each source
        whose duplicates are removed.
        """
        identity = {
            "version": VERSION,
            "parts": [[asdict(part), *_state(part)] for part in parts],
            "steps": fingerprint(steps),
            "shard_bytes": options.shard_bytes,
            "skip_bad_lines": options.on_bad_line == "skip",  # its name in earlier versions
            "named": named,
        } | (
            {"earlier": [[[asdict(part), *_state(part)] for part in source] for source in earlier]}
            if earlier
            else {}
        )
        digest = hashlib.sha256(canonical_json(identity)).hexdigest()
        path = work / JOB_NAME
        # These values do not change the documents that are kept, or the digest covers them.
        current = {
            "models": dict(models),
            "on_bad_line": options.on_bad_line,
            "document_bytes": options.document_bytes,
        }
        with suppress(OSError, ValueError, KeyError, TypeError):
            values = read_json(path)
            if values["digest"] == digest:
                write_json(path, values | current)
                return cls.read(work)
        # A kill between the deletions must not leave a job whose files are missing.
        path.unlink(missing_ok=True)
        sync_directory(work)
        for stale in glob(work, "[!.]*"):  # not the caller's lock
            shutil.rmtree(stale) if is_dir(stale) else stale.unlink()
        shards = divide(parts, options.shard_bytes)
        others = [
            (number, shard)
            for number, source in enumerate(earlier, 1)
            for shard in divide(source, options.shard_bytes)
        ]
        if (count := len(shards) + len(others)) > _MAX_SHARDS:
            raise ConfigError(
                f"data.curate_shard_mb of {options.shard_bytes // 10**6} divides the corpus into "
                f"{count:,} shards, more than {_MAX_SHARDS:,}: raise it"
            )
        write_json(
            path,
            {
                "digest": digest,
                "steps": [step.model_dump(mode="json") for step in steps],
                "shards": [
                    [[asdict(part), line] for part, line in shard] for shard in numbered(shards)
                ],
                "earlier": [
                    [number, [[asdict(part), 1] for part in shard]] for number, shard in others
                ],
                "named": named,
                **current,
            },
        )
        return cls.read(work)

    @classmethod
    def read(cls, work: Path) -> "Job":
        """Read the job in a work directory. Raises OSError, ValueError, KeyError, TypeError."""
        values = read_json(work / JOB_NAME)
        return cls(
            work,
            _STEPS.validate_python(values["steps"]),
            tuple(map(_shard, values["shards"])),
            values["models"],
            values["named"],
            values["on_bad_line"],
            values["document_bytes"],
            tuple((number, _shard(shard)) for number, shard in values["earlier"]),
        )

    @cached_property
    def phases(self) -> list[Phase]:
        """Phases in order."""
        return plan_phases(self.steps, len(self.shards), len(self.earlier))

    def compares_sources(self, number: int) -> bool:
        """Return True if the step with this place also compares with earlier sources."""
        return bool(self.earlier) and compares_sources(self.steps[number : number + 1])

    def folder(self, phase: Phase) -> Path:
        """Return the folder with the receipts of a phase."""
        return self.work / "phases" / phase.name

    def receipt(self, phase: Phase, rank: int) -> Path:
        """Return the path of a task's receipt."""
        return self.folder(phase) / f"{rank:05d}.json"

    def dedup_folder(self, number: int) -> Path:
        """Return the folder of the deduplication with this place among the steps."""
        return self.work / f"dedup-{number}"

    def clusters_file(self, number: int) -> Path:
        """Return the path of a deduplication's numbers of duplicates."""
        return self.work / f"clusters-{number}.json"

    def files(self, phase: Phase, rank: int) -> dict[str, int]:
        """Return the files of a task that is done with their sizes, as its receipt names them."""
        files: dict[str, int] = read_json(self.receipt(phase, rank))["files"]
        return files

    def is_done(self, phase: Phase, rank: int) -> bool:
        """Return True if a task left a receipt, and its files have the sizes that it names."""
        try:
            return all(
                (self.work / name).stat().st_size == size
                for name, size in self.files(phase, rank).items()
            )
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def complete(self, phase: Phase, rank: int, tally: dict[str, Any]) -> None:
        """Sync a task's files, then write its receipt."""
        paths = [path for pattern in phase.outputs(rank) for path in glob(self.work, pattern)]
        for path in paths:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        for folder in {path.parent for path in paths}:
            sync_directory(folder)
        files = {str(path.relative_to(self.work)): path.stat().st_size for path in sorted(paths)}
        write_json(self.receipt(phase, rank), {"files": files, "tally": tally})

    def report(self) -> dict[str, Any]:
        """Return the report of all phases."""
        receipts = [
            read_json(self.receipt(phase, rank))["tally"]
            for phase in self.phases
            if phase.kind == "documents"
            for rank in range(phase.tasks)
        ]
        clusters = {
            label_of(number, step): read_json(self.clusters_file(number))
            for number, step in enumerate(self.steps)
            if isinstance(step, DedupStep)
        }
        labels = [label_of(number, step) for number, step in enumerate(self.steps)]
        return merged_report(labels, receipts, clusters)


def _shard(values: Any) -> tuple[tuple[Segment, int], ...]:
    return tuple((Segment(**part), int(line)) for part, line in values)


def _state(part: Segment) -> list[int]:
    status = os.stat(part.path)
    return [status.st_size, status.st_mtime_ns]
