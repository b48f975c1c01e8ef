"""Storage of a run: workspace, disk, token files and index maps.

`Proof` and the functions named `look_at_…` inspect the host they run on; only the functions that
read data sets import them. The other functions evaluate the hosts' answers.
"""

import os
import random
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.artifact.files import access_errors, workspace_errors
from megacore.doctor.findings import Facts, Finding, Judgement
from megacore.errors import MegacoreError
from megacore.paths import exists, glob, is_dir

if TYPE_CHECKING:
    from megacore.data.index_directory import IndexDescription
    from megacore.token_files.indexed_dataset import IndexedDataset

PREFIX = ".doctor-"
_HEAD = "head"
_WAIT = 5.0
"""Seconds within which a file share must show a new file to another host."""
_POLL = 0.05
_STALE = 3600.0
"""Age in seconds beyond which a proof is left over from a doctor that was killed."""
GIB = 2**30
LEAST_DISK = 5 * GIB
"""Free bytes below which a workspace counts as nearly full if the needs of the run are unknown."""
LEAST_INODES = 10_000
TOKENS_ACCEPTED = "the path of token files without .bin/.idx, or a directory of the tokenize stage"
"""Paths of token files that a doctor accepts, for messages."""
_IN_MEMORY = ("tmpfs", "ramfs")
_BLOCK = 1 << 22
"""Number of tokens that a thread reads at a time."""
_THREADS = 4


class Proof:
    """Directory in the workspace that proves that all hosts see the same workspace.

    Each host reads the file that the head (this host) has written there, and writes its own file.
    The directory is removed when the context ends.
    """

    def __init__(self, workspace: Path) -> None:
        """Choose the directory without creating it."""
        self.directory = workspace / f"{PREFIX}{secrets.token_hex(8)}"

    def __enter__(self) -> "Proof":
        """Create the directory and write the head's file. Raises WorkspaceError."""
        _remove_stale(self.directory.parent)
        with workspace_errors(self.directory):
            self.directory.mkdir(parents=True)
            (self.directory / _HEAD).write_text(self.directory.name, encoding="ascii")
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the directory."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def seen(self, hosts: Iterable[str]) -> dict[str, bool]:
        """Return, by host, True if its file is visible on this host."""
        deadline = time.monotonic() + _WAIT
        return {
            host: _appears(self.directory / host, self.directory.name, deadline) for host in hosts
        }


def look_at_workspace(workspace: Path, token: str | None, host: str) -> dict[str, Any]:
    """Check that this host can write to the workspace and sees the head's file there.

    Args:
        workspace: path of the workspace.
        token: directory of the proof; None if each host has its own workspace.
        host: name of this host.
    """
    if token is None:
        return {"exists": is_dir(workspace), "writes": _writes(workspace), "sees_head": None}
    directory = Path(token)
    answer: dict[str, Any] = {"exists": is_dir(workspace), "sees_head": False, "writes": None}
    if not answer["exists"]:
        return answer
    answer["sees_head"] = _appears(directory / _HEAD, directory.name, time.monotonic() + _WAIT)
    if answer["sees_head"]:
        try:
            (directory / host).write_text(directory.name, encoding="ascii")
            answer["writes"] = True
        except OSError as error:
            answer["writes"] = False
            answer["reason"] = error.strerror
    return answer


def _writes(workspace: Path) -> bool | None:
    """Return True if a file can be created in `workspace`; None if the directory is missing."""
    if not is_dir(workspace):
        return None
    probe = workspace / f"{PREFIX}{secrets.token_hex(8)}"
    try:
        probe.write_bytes(b"x")
    except OSError:
        return False
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return True


def _appears(path: Path, content: str, deadline: float) -> bool:
    while True:
        try:
            if path.read_text(encoding="ascii") == content:
                return True
        except (OSError, ValueError):
            pass  # missing or incomplete
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)


def _remove_stale(workspace: Path) -> None:
    for path in glob(workspace, f"{PREFIX}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE:
                shutil.rmtree(path) if is_dir(path) else path.unlink()


def workspaces(facts: Facts) -> Finding | None:
    """Check that every host can write the workspace, and that a shared one is one directory."""
    judgement = Judgement("workspace")
    shared = len(facts.hosts) > 1 and facts.shared
    disk_answers = dict(facts.answered("disk"))
    for host, value in facts.answered("workspace"):
        if shared:
            _shared_workspace(judgement, facts, host, value)
        elif value["writes"] is False or (
            value["writes"] is None and not disk_answers.get(host, {}).get("writable", True)
        ):
            judgement.note(host, "cannot be written")
            judgement.error(
                host,
                f"{facts.workspace} cannot be written on {host}: correct its owner or its mount",
            )
        else:
            judgement.note(host, "writable" if value["exists"] else "not there yet, will be made")
    judgement.unanswered(
        facts,
        "workspace",
        "error",
        f"look at what is mounted at {facts.workspace} (a dead file share?)",
    )
    return judgement.finding()


def _shared_workspace(judgement: Judgement, facts: Facts, host: str, value: dict[str, Any]) -> None:
    path = facts.workspace
    if not value["exists"]:
        judgement.note(host, "missing")
        judgement.error(
            host,
            f"{path} does not exist on {host}: mount the shared file system there at the same "
            "path, or set launch.data_placement to node_local",
        )
    elif not value["sees_head"]:
        judgement.note(host, "another directory")
        judgement.error(
            host,
            f"{path} on {host} is not the directory that this machine has there: mount the same "
            "file system at the same path, or set launch.data_placement to node_local",
        )
    elif not value["writes"]:
        judgement.note(host, "read only")
        reason = value.get("reason") or "not allowed"
        judgement.error(
            host, f"{path} cannot be written on {host} ({reason}): correct its owner or its mount"
        )
    elif not facts.seen.get(host):
        judgement.note(host, "not seen here")
        judgement.error(
            host,
            f"what {host} writes to {path} is not seen on this machine within {_WAIT:g} s: look "
            "at the file system's caching (NFS: actimeo, lookupcache)",
        )
    else:
        judgement.note(host, "the same directory, read and written")


def look_at_disk(workspace: Path) -> dict[str, Any]:
    """Return space and file system of the workspace, or of its nearest existing parent."""
    directory = workspace
    while not exists(directory) and directory != directory.parent:
        directory = directory.parent
    usage = shutil.disk_usage(directory)
    kind, source = file_system(directory)
    return {
        "path": str(workspace),
        "exists": is_dir(workspace),
        "writable": os.access(directory, os.W_OK | os.X_OK) and is_dir(directory),
        "free": usage.free,
        "total": usage.total,
        "inodes_free": _inodes(directory),
        "kind": kind,
        "source": source,
    }


def _inodes(directory: Path) -> int | None:
    """Return the number of free inodes; None for a file system that does not count them."""
    status = os.statvfs(directory)
    return status.f_favail if status.f_files else None


def file_system(path: Path, table: Path = Path("/proc/self/mountinfo")) -> tuple[str, str]:
    """Return type and source of the mount of a path.

    If several mounts contain the path, use the last one with the longest mount point.
    """
    longest, mount = -1, ("unknown", "unknown")
    target = os.path.realpath(path)
    for line in table.read_text(encoding="utf-8", errors="replace").splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4].encode().decode("unicode_escape")
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:
            kind, source = right.split()[:2]
            longest, mount = len(point), (kind, source)
    return mount


def disks(facts: Facts) -> Finding | None:
    """Check that there is enough space for the output of a run."""
    judgement = Judgement("disk")
    needs = facts.needs
    writers = facts.answered("disk")
    first = writers[0][0] if writers else ""
    for host, value in writers:
        free = value["free"]
        judgement.note(
            host, f"{free / GIB:,.1f} of {value['total'] / GIB:,.1f} GiB free, {value['kind']}"
        )
        # With node-local workspaces the other hosts store the shards of one checkpoint until they
        # are gathered.
        if needs is not None and free < needs.checkpoint:
            judgement.error(
                host,
                f"{value['path']} on {host} has {free / GIB:.1f} GiB free, and one checkpoint of "
                f"{needs.name} takes {needs.checkpoint / GIB:.1f} GiB: make room (megacore clean), "
                "or move the workspace (MEGACORE_WORKSPACE)",
            )
        elif needs is not None and free < needs.checkpoints and (host == first or facts.shared):
            judgement.warn(
                host,
                f"{value['path']} on {host} has {free / GIB:.1f} GiB free, and the checkpoints "
                f"that {needs.name} keeps take {needs.checkpoints / GIB:.1f} GiB: make room, or "
                "lower checkpoint.keep_last",
            )
        elif needs is None and free < LEAST_DISK:
            judgement.warn(
                host,
                f"{value['path']} on {host} has {free / GIB:.1f} GiB free: make room (megacore "
                "clean)",
            )
        if value["inodes_free"] is not None and value["inodes_free"] < LEAST_INODES:
            judgement.warn(
                host,
                f"{value['path']} on {host} has {value['inodes_free']} inodes free: remove files "
                "that nobody needs",
            )
        if value["kind"] in _IN_MEMORY:
            judgement.warn(
                host,
                f"{value['path']} on {host} is in host memory ({value['kind']}), and checkpoints "
                "there are lost with it: set MEGACORE_WORKSPACE to a disk",
            )
    judgement.unanswered(
        facts, "disk", "error", f"look at what is mounted at {facts.workspace} (a dead file share?)"
    )
    return judgement.finding()


def look_at_tokens(
    prefixes: Sequence[str], vocab_size: int | None, share: tuple[int, int], seconds: float
) -> dict[str, Any]:
    """Open the token files, and compare this host's share of the tokens with the vocabulary.

    Args:
        prefixes: paths of the token files without .bin/.idx.
        vocab_size: number of vocabulary entries; None only opens the files.
        share: (k, n) for every n-th block from the k-th on.
        seconds: time after which no further block is read. The order of blocks is random, so that a
            partial check still covers all parts of the files.
    """
    from megacore.inspect.tokens import require_pair
    from megacore.token_files.indexed_dataset import IndexedDataset, idx_path

    deadline = time.monotonic() + seconds
    files: list[dict[str, Any]] = []
    for prefix in prefixes:
        try:
            with access_errors(idx_path(prefix)):
                require_pair(prefix, TOKENS_ACCEPTED)
            dataset = IndexedDataset(prefix)
        except MegacoreError as error:
            files.append({"prefix": prefix, "problem": str(error)})
            continue
        file = {
            "prefix": prefix,
            "tokens": len(dataset.tokens),
            "documents": dataset.documents,
            "read": 0,
        }
        if vocab_size is not None:
            file |= _scan(dataset, vocab_size, share, deadline)
        files.append(file)
    return {"files": files, "vocab_size": vocab_size}


def _scan(
    dataset: "IndexedDataset", vocab_size: int, share: tuple[int, int], deadline: float
) -> dict[str, Any]:
    """Return the number of tokens read, their extremes, and the position of the first bad one."""
    first, step = share
    starts = list(range(first * _BLOCK, len(dataset.tokens), step * _BLOCK))
    planned = sum(min(_BLOCK, len(dataset.tokens) - start) for start in starts)
    random.Random(0).shuffle(starts)
    read, smallest, largest = 0, 0, 0
    outside: list[int] = []

    def look(start: int) -> tuple[int, int, int, int] | None:
        if time.monotonic() > deadline:
            return None
        block = dataset.tokens[start : start + _BLOCK]
        low, high = int(block.min()), int(block.max())
        bad = -1
        if low < 0 or high >= vocab_size:
            bad = start + int(((block < 0) | (block >= vocab_size)).argmax())
        return len(block), low, high, bad

    with ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0)))) as pool:
        for result in pool.map(look, starts):
            if result is None:
                continue
            length, low, high, bad = result
            read, smallest, largest = read + length, min(smallest, low), max(largest, high)
            outside += [bad] if bad >= 0 else []
    return {
        "read": read,
        "planned": planned,
        "smallest": smallest,
        "largest": largest,
        "outside": min(outside, default=None),
    }


def tokens(facts: Facts) -> Finding | None:
    """Check that the token files are complete, and that the vocabulary contains every id."""
    judgement = Judgement("tokens")
    for host, value in facts.answered("tokens"):
        read = sum(file.get("read", 0) for file in value["files"])
        planned = sum(file.get("planned", 0) for file in value["files"])
        part = f"{read / planned:.0%} of " if planned and read < planned else ""
        opened = [file for file in value["files"] if "problem" not in file]
        ids = (
            f"ids of {part}{planned:,} tokens below {value['vocab_size']}"
            if value["vocab_size"] is not None
            else "the vocabulary of the tokenizer is not known here, so ids are not compared"
        )
        judgement.note(host, f"{_files(opened)}{ids}" if opened else "no readable token files")
        for file in value["files"]:
            if "problem" in file:
                judgement.error(host, f"on {host}, {file['problem']}")
            elif file.get("outside") is not None:
                judgement.error(
                    host,
                    f"{file['prefix']}.bin holds the id {_worst_id(file)} (at token "
                    f"{file['outside']:,}), and the vocabulary has {value['vocab_size']:,} "
                    "entries: tokenize again with the run's tokenizer",
                )
    judgement.unanswered(
        facts, "tokens", "error", "look at the disk with the token files", late="warning"
    )
    return judgement.finding()


def _files(files: list[dict[str, Any]]) -> str:
    return f"{len(files)} files, " if len(files) > 1 else ""


def _worst_id(file: dict[str, Any]) -> int:
    return int(file["smallest"] if file["smallest"] < 0 else file["largest"])


def look_at_index(directory: Path, prefixes: Sequence[str]) -> dict[str, Any]:
    """Read all index maps; return their number, and token files that are not the run's.

    Raises DataFormatError.
    """
    from megacore.data.index_directory import load_map, read_description

    index = read_description(directory)
    paths = list(_maps(directory, index))
    for path in paths:
        load_map(path)
    known = {os.path.realpath(prefix) for prefix in prefixes}
    others = [
        member.prefix for member in index.members if os.path.realpath(member.prefix) not in known
    ]
    return {
        "directory": str(directory),
        "maps": len(paths),
        "samples": dict(index.samples),
        "others": others,
    }


def _maps(directory: Path, index: "IndexDescription") -> Iterator[Path]:
    """Yield the map paths of each non-empty split: those of its data sets and of their blend."""
    from megacore.data.index_directory import (
        BLEND_MAP_NAMES,
        MAP_NAMES,
        SENTENCE_MAP_NAME,
        map_path,
        member_directory,
    )

    names = MAP_NAMES if index.options.sentences is None else (SENTENCE_MAP_NAME,)
    for split in (split for split, count in index.samples.items() if count):
        if index.single:
            yield from (map_path(directory, split, name) for name in names)
            continue
        yield from (map_path(directory, split, name) for name in BLEND_MAP_NAMES)
        for number, member in enumerate(index.members):
            if split in member.weights:
                yield from (
                    map_path(member_directory(directory, number), split, name) for name in names
                )


def index_maps(facts: Facts) -> Finding | None:
    """Check that the run's index maps are readable and belong to its token files."""
    judgement = Judgement("index maps")
    for host, value in facts.answered("index"):
        samples = ", ".join(f"{count:,} {split}" for split, count in value["samples"].items())
        judgement.note(host, f"{value['maps']} maps, {samples} samples")
        if value["others"]:
            judgement.error(
                host,
                f"the index maps in {value['directory']} are of {value['others'][0]}, which is not "
                "among the run's token files: build them again",
            )
    judgement.unanswered(facts, "index", "error", "", late="warning")
    return judgement.finding()
