"""Checks of files on disk: token files, index maps, artifacts, checkpoints and workspaces."""

import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from megacore.artifact.build import is_locked
from megacore.artifact.files import read_json, reason_of, unreadable
from megacore.artifact.manifest import MANIFEST_NAME, FileEntry, Manifest
from megacore.artifact.workspace import BEST_NAME, CHECKPOINTS_NAME, FOLDERS, RUN_FILE, kind_of
from megacore.checkpoint.format import (
    MARKER_NAME,
    STALE_SUFFIX,
    Marker,
    checkpoint_directories,
    iteration_of,
    marker_problem,
    reading,
)
from megacore.config.base import FinetuneStage
from megacore.data.index_directory import (
    BLEND_MAP_NAMES,
    IndexDescription,
    load_map,
    map_path,
    member_directory,
)
from megacore.data.index_options import SPLIT_NAMES
from megacore.errors import ArtifactError, CheckpointError, DataFormatError, FileAccessError
from megacore.inspect.index import (
    check_maps,
    check_sentence_map,
    describe_index,
    is_index_directory,
    open_map,
    outside,
)
from megacore.inspect.provenance import find_origins
from megacore.inspect.tokens import count_empty, find_prefixes, has_token_files
from megacore.observe.logging import counted
from megacore.paths import exists, glob, is_dir, is_symlink
from megacore.token_files.indexed_dataset import TOKENS_NAMES, IndexedDataset, bin_path, idx_path

_HASH_THREADS = 4
"""Number of files of an artifact hashed at a time; each keeps a core busy."""
_ACCEPTED = (
    "the path of token files without .bin/.idx, or the directory of token files, index maps, "
    "another artifact, a checkpoint, an import or a run, or a workspace"
)
"""Paths that can be checked, for messages."""
OnRead = Callable[[int], None]
"""Callback that receives the number of bytes of each block that was read."""


@dataclass(frozen=True)
class Check:
    """A passed check; a failed check raises an error instead."""

    name: str
    result: str
    """Result of the check in one clause."""


@dataclass(frozen=True)
class Damage:
    """An artifact or checkpoint with files that are missing or have changed."""

    name: str
    problem: str
    """Every problem, with the names of the files."""
    command: str
    """Shell command that deletes what is damaged."""
    remedy: str
    """Command that builds it again after that, and what it does."""


@dataclass(frozen=True)
class Unchecked:
    """An artifact or checkpoint that could not be compared and may be sound."""

    name: str
    state: Literal["not readable", "not complete"]
    reason: str
    """Cause and remedy in one sentence."""


Result = Check | Damage | Unchecked


def examine(path: str | Path, on_read: OnRead | None = None) -> Iterator[Result]:
    """Check a workspace, the directory of a run, a checkpoint or several by all their digests.

    Yields a result for each artifact and each checkpoint, but none for a run that is just
    beginning. Any other path is checked like `verify`, which raises DataFormatError, ArtifactError
    or FileAccessError.
    """
    place = Path(path).absolute()
    if iteration_of(place) is not None or exists(place / MARKER_NAME):
        yield from _examine_bare(place, on_read)
    elif _is_run(place):
        yield from _examine_run(place, place.parent, on_read)
    elif checkpoints := checkpoint_directories(place):
        for checkpoint in checkpoints:
            yield from _examine_bare(checkpoint, on_read)
    elif _is_workspace(place):
        for name in dict.fromkeys(FOLDERS.values()):
            yield from _unusable(place / name, place)
            for member in sorted(glob(place / name, "[!.]*")):
                if STALE_SUFFIX in member.name:
                    continue
                if not is_dir(member):
                    if is_symlink(member):
                        yield from _unusable(member, place)
                    continue
                yield from _or_unreadable(member, place, _examine_member(member, place, on_read))
    else:
        yield from verify(path)


def verify(path: str | Path) -> Iterator[Check]:
    """Check the files at `path` and yield each check that passes.

    `path` is a pair of token files (with or without .bin/.idx), a directory of them, a directory of
    index maps, or any other artifact, of which only the manifest is checked. Raises DataFormatError
    or ArtifactError at the first check that fails.
    """
    place = Path(path)
    if not is_dir(place):
        for prefix in find_prefixes(path, _ACCEPTED):
            yield from verify_tokens(prefix)
            yield from _verify_adjacent_manifest(prefix)
    elif is_index_directory(place):
        yield from verify_index(place)
        yield from verify_manifest(place)
    elif has_token_files(place):
        prefixes = find_prefixes(place)
        for prefix in prefixes:
            yield from verify_tokens(prefix)
        for directory in dict.fromkeys([place, *(Path(prefix).parent for prefix in prefixes)]):
            yield from verify_manifest(directory)
    elif exists(place / MANIFEST_NAME):
        yield from verify_manifest(place)
    else:
        if not any(place.iterdir()):
            raise DataFormatError(
                f"{place} is empty: a workspace has nothing to check before its first run; else "
                f"give {_ACCEPTED}"
            )
        raise DataFormatError(f"{place} holds nothing that can be checked: give {_ACCEPTED}")


def verify_tokens(prefix: str) -> Iterator[Check]:
    """Check the structure of a pair of token files, and `documents.json` if it exists.

    Raises DataFormatError.
    """
    dataset = IndexedDataset(prefix)
    name, sequences, tokens = Path(prefix).name, len(dataset), len(dataset.tokens)
    itemsize = dataset.dtype.itemsize
    size = idx_path(prefix).stat().st_size
    modes = (
        " and modes"
        if size == 34 + 13 * sequences + 8 * len(dataset.document_indices) and sequences
        else ""
    )
    yield Check(
        f"{name}.idx",
        f"version 1, {dataset.dtype.name}, {counted(sequences, 'sequence')}{modes}, {size:,} bytes "
        "as these take",
    )
    yield Check("pointers", f"{sequences:,}, each where the sequence before it ends")
    yield Check(
        f"{name}.bin",
        f"sum of lengths {tokens:,} x {itemsize} bytes = {bin_path(prefix).stat().st_size:,}, its "
        "size",
    )
    yield Check(
        "document index",
        f"{counted(dataset.documents, 'document')}, {count_empty(dataset):,} empty, from 0 to "
        f"{sequences:,}",
    )
    origins = find_origins(prefix, dataset.documents)
    if origins is not None:
        yield Check(
            origins.path.name,
            f"{counted(origins.documents, 'document')} from {counted(len(origins.files), 'file')}",
        )


def verify_index(directory: Path) -> Iterator[Check]:
    """Check index maps against the token files they were built for. Raises DataFormatError."""
    index = describe_index(directory)
    options = index.options
    yield Check(
        "index.json",
        f"seq_length {options.seq_length}, seed {options.seed}, "
        f"{counted(len(index.members), 'data set')}",
    )
    for number, member in enumerate(index.members):
        dataset = IndexedDataset(member.prefix)
        yield Check(
            f"tokens {number}",
            f"{member.prefix}: {counted(len(dataset), 'sequence')}, "
            f"{counted(len(dataset.tokens), 'token')}",
        )
        place = directory if index.single else member_directory(directory, number)
        for split in filter(member.weights.__contains__, SPLIT_NAMES):
            if (
                exists(map_path(place, split, index.counting_map))
                or index.single
                or index.samples.get(split)
            ):
                check = check_maps if options.sentences is None else check_sentence_map
                yield Check(f"{split} maps {number}", check(dataset, place, split, options))
    if not index.single:
        yield from _verify_blends(directory, index)
    for split, count in index.samples.items():
        path = map_path(
            directory, split, index.counting_map if index.single else BLEND_MAP_NAMES[0]
        )
        samples = len(load_map(path)) if count or exists(path) else 0
        if samples != count:
            raise DataFormatError(
                f"{directory}/index.json counts {count} {split} samples, but its maps have "
                f"{samples}: build them again"
            )


def _verify_blends(directory: Path, index: IndexDescription) -> Iterator[Check]:
    """Check that each blend contains only existing samples of its members."""
    for split, members in index.blends.items():
        if not index.samples.get(split):
            continue
        datasets, numbers = (open_map(map_path(directory, split, name)) for name in BLEND_MAP_NAMES)
        path = map_path(directory, split, BLEND_MAP_NAMES[0])
        if len(datasets) != len(numbers):
            raise DataFormatError(
                f"{path} has {len(datasets)} samples, the other map {len(numbers)}: build them "
                "again"
            )
        if len(datasets) and (wrong := outside(datasets, len(members))) is not None:
            raise DataFormatError(
                f"{path} names data set {wrong} of {len(members)}: build the maps again"
            )
        shares = []
        for place, member in enumerate(members):
            taken = np.asarray(numbers)[np.asarray(datasets) == place]
            available = len(
                load_map(map_path(member_directory(directory, member), split, index.counting_map))
            )
            if len(taken) and (wrong := outside(taken, available)) is not None:
                raise DataFormatError(
                    f"{path}: the blend takes sample {wrong} of member {member}, which has "
                    f"{available}: build it again"
                )
            shares.append(f"{len(taken) / max(1, len(datasets)):.1%} of member {member}")
        yield Check(f"{split} blend", f"{counted(len(datasets), 'sample')}: {', '.join(shares)}")


def verify_manifest(directory: Path) -> Iterator[Check]:
    """Check size and hash of every file in a directory's manifest. Raises ArtifactError."""
    if exists(directory / MANIFEST_NAME):
        yield _check_files(directory, Manifest.read(directory).files, MANIFEST_NAME)
    else:
        yield Check("manifest", f"{directory} has none: hashes were not checked")


def _verify_adjacent_manifest(prefix: str) -> Iterator[Check]:
    """Check the manifest that the command line writes next to token files."""
    path = Path(f"{prefix}.{MANIFEST_NAME}")
    if exists(path):
        yield _check_files(path.parent, _read_files(path), path.name)
    elif Path(prefix).name in TOKENS_NAMES:
        yield from verify_manifest(path.parent)
    else:
        yield Check("manifest", f"{path.name} is not there: hashes were not checked")


def _read_files(path: Path) -> dict[str, FileEntry]:
    try:
        values: Any = read_json(path)
        return {name: FileEntry(**entry) for name, entry in values["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, OSError) and (fault := unreadable(error, path)) is not None:
            raise fault from error
        raise ArtifactError(
            f"{path} is damaged ({reason_of(error)}): tokenize again, or delete it to do without"
        ) from error


def _check_files(directory: Path, files: Mapping[str, FileEntry], name: str) -> Check:
    if problems := _problems(directory, files):
        raise ArtifactError(
            f"{directory}: {'; '.join(problems)}: delete what is damaged and build it again, or "
            "copy it again from where it is whole"
        )
    return Check(name, _whole(files))


def _whole(files: Mapping[str, FileEntry]) -> str:
    size = sum(entry.size for entry in files.values())
    return f"{counted(len(files), 'file')}, {size:,} bytes, sha256 as it was written"


def _problems(
    directory: Path, files: Mapping[str, FileEntry], on_read: OnRead | None = None
) -> list[str]:
    """Compare the digests of all files, several at a time, and return the problems.

    Raises FileAccessError if a file cannot be read now.
    """
    with ThreadPoolExecutor(_HASH_THREADS, "megacore-hash") as pool:
        problems = pool.map(
            lambda item: item[1].problem(directory, item[0], "full", on_read), files.items()
        )
        return list(filter(None, problems))


def _is_workspace(place: Path) -> bool:
    return not exists(place / MANIFEST_NAME) and any(
        is_dir(place / name) for name in FOLDERS.values()
    )


def _is_run(place: Path) -> bool:
    return exists(place / RUN_FILE) or any(
        checkpoint_directories(place / name) for name in (CHECKPOINTS_NAME, BEST_NAME)
    )


def _or_unreadable(path: Path, root: Path, results: Iterator[Result]) -> Iterator[Result]:
    """Yield `results`; where reading fails, yield that `path`, named from `root`, is not readable.

    Nothing is to be deleted for that.
    """
    try:
        yield from results
    except (FileAccessError, OSError) as error:
        fault = unreadable(error, path) if isinstance(error, OSError) else error
        if fault is None:
            raise
        yield Unchecked(path.relative_to(root).as_posix(), "not readable", str(fault))


def _unusable(path: Path, root: Path) -> Iterator[Unchecked]:
    """Yield that `path`, named from `root`, is not readable if it is there and no directory."""
    if os.path.lexists(path) and not is_dir(path):
        yield Unchecked(
            path.relative_to(root).as_posix(),
            "not readable",
            f"{path} is {kind_of(path)}, and should be a directory: mount or restore what it "
            "stands for",
        )


def _examine_member(member: Path, root: Path, on_read: OnRead | None) -> Iterator[Result]:
    """Check a directory in a folder of the workspace `root`."""
    if _is_run(member):
        yield from _examine_run(member, root, on_read)
    elif exists(member / MANIFEST_NAME):
        yield from _examine_artifact(member, root, on_read)
    else:
        yield from _incomplete(member, root)


def _incomplete(directory: Path, root: Path) -> Iterator[Unchecked]:
    """Yield that `directory`, which has no manifest, is not complete, unless something works on it.

    A run that is just beginning is locked.
    """
    if not is_locked(directory) and exists(directory):
        yield Unchecked(
            directory.relative_to(root).as_posix(),
            "not complete",
            f"it has no {MANIFEST_NAME}, and nothing works on it: the same `make pretrain` or "
            "`make finetune` command completes it",
        )


def _examine_artifact(directory: Path, root: Path, on_read: OnRead | None) -> Iterator[Result]:
    name = directory.relative_to(root).as_posix()
    stage = ""
    try:
        manifest = Manifest.read(directory)
        stage = manifest.stage
        problem = "; ".join(_problems(directory, manifest.files, on_read))
    except ArtifactError as error:
        problem = str(error)
    if not problem:
        yield Check(name, _whole(manifest.files))
    elif exists(directory):  # another process may have removed it
        flow = "finetune" if stage in get_args(FinetuneStage) else "pretrain"
        flow = flow if stage else "pretrain` or `make finetune"
        named = f" (stage {stage})" if stage else ""
        remedy = f"the same `make {flow}` command builds it again{named}"
        yield Damage(name, problem, _delete(directory), remedy)


def _examine_run(run: Path, root: Path, on_read: OnRead | None) -> Iterator[Result]:
    """Check a run's job file, its manifest, which lists the markers of checkpoints, and these."""
    files: dict[str, FileEntry] = {}
    if exists(run / RUN_FILE):
        yield from _examine_job_file(run, root)
        if not exists(run / MANIFEST_NAME):
            yield from _incomplete(run, root)
    if exists(run / MANIFEST_NAME):
        try:
            files = Manifest.read(run).files
        except FileAccessError as error:
            name = (run / MANIFEST_NAME).relative_to(root).as_posix()
            yield Unchecked(name, "not readable", str(error))
        except ArtifactError as error:
            yield Damage(
                (run / MANIFEST_NAME).relative_to(root).as_posix(),
                str(error.__cause__ or error),
                _delete(run / MANIFEST_NAME),
                "the same `make pretrain` or `make finetune` command writes it again",
            )
    markers = {
        (run / name).parent: {MARKER_NAME: entry}
        for name, entry in files.items()
        if name.endswith(f"/{MARKER_NAME}")
    }
    listed = (checkpoint_directories(run / name) for name in (CHECKPOINTS_NAME, BEST_NAME))
    for directory in dict.fromkeys([*markers, *(path for paths in listed for path in paths)]):
        yield from _examine_checkpoint(directory, root, markers.get(directory, {}), on_read)


def _examine_job_file(run: Path, root: Path) -> Iterator[Result]:
    """Yield the damage of a run's job file, if any."""
    path = run / RUN_FILE
    name = path.relative_to(root).as_posix()
    try:
        problem = "" if isinstance(read_json(path), dict) else "it holds no JSON object"
    except FileAccessError as error:
        yield Unchecked(name, "not readable", str(error))
        return
    except OSError as error:
        fault = unreadable(error, path)
        if fault is not None:
            yield Unchecked(name, "not readable", str(fault))
            return
        problem = "" if isinstance(error, FileNotFoundError) else str(error.strerror)
    except ValueError as error:
        problem = f"it cannot be parsed: {error}"
    if problem:
        # Without the manifest the stage runs again, from the last checkpoint.
        paths = filter(exists, (path, run / MANIFEST_NAME))
        yield Damage(
            name,
            problem,
            _delete(*paths),
            "the same `make pretrain` or `make finetune` command writes it again",
        )


def _examine_bare(checkpoint: Path, on_read: OnRead | None) -> Iterator[Result]:
    """Check a checkpoint without the manifest of its run, if it has one."""
    run = checkpoint.parent.parent
    root = run if _is_run(run) else checkpoint.parent
    yield from _examine_checkpoint(checkpoint, root, {}, on_read)


def _examine_checkpoint(
    directory: Path, root: Path, listed: Mapping[str, FileEntry], on_read: OnRead | None
) -> Iterator[Result]:
    """Check a checkpoint like `_compare_checkpoint`, or yield that it is not readable."""
    results = _compare_checkpoint(directory, root, listed, on_read)
    return _or_unreadable(directory, root, results)


def _compare_checkpoint(
    directory: Path, root: Path, listed: Mapping[str, FileEntry], on_read: OnRead | None
) -> Iterator[Result]:
    """Check a checkpoint by its marker, and the marker by `listed` of the run's manifest."""
    name = directory.relative_to(root).as_posix()
    try:
        with reading(directory):
            marker = Marker.read(directory)
            files = {
                file: FileEntry(record.size, record.sha256, 0)
                for file, record in marker.files.items()
            }
            wrong = marker_problem(directory, marker)
            problems = [wrong] if wrong else _problems(directory, {**listed, **files}, on_read)
    except CheckpointError as error:
        problems = [str(error)]
    if not problems:
        yield Check(name, _whole(files))
        return
    if not exists(directory) and not listed:  # deleted by its run, which keeps only some
        return
    run = directory.parent.parent
    if directory.parent.name not in {CHECKPOINTS_NAME, BEST_NAME} or not any(
        exists(run / name) for name in (RUN_FILE, MANIFEST_NAME)
    ):
        command = _delete(directory)
        remedy = "import it again into an empty directory, or copy it again from where it is whole"
    elif directory.parent.name == BEST_NAME:
        command = _delete(run)
        remedy = "the same `make finetune` command trains the run again"
    else:
        command = _delete(directory)
        remedy = (
            "the same `make pretrain` or `make finetune` command resumes from the newest "
            "checkpoint that is left, or from the beginning"
        )
    yield Damage(name, "; ".join(problems), command, remedy)


def _delete(*paths: Path) -> str:
    flags = ["-r"] if any(is_dir(path) for path in paths) else []
    return shlex.join(["rm", *flags, "--", *map(str, paths)])
