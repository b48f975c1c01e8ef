"""Program that checks and receives a job's files on another host.

    python -m megacore.cluster.placement.check

It reads one JSON object on stdin and writes one on stdout. `action` is one of

* `look` (shared files): report which of `items` are missing or have another size, and prove that
  each directory of `proofs` is shared: read the token of the starting host there, and write an
  answer that the starting host reads;
* `begin` (separate files): move checkpoints that are not the run's out of the way, report which of
  `items` are missing or damaged, create a directory for each of these with its good files (hard
  links), and check the free space;
* `finish`: compare the files copied to these directories, sync them and rename them into place;
* `clean`: remove the directories and tokens of a preparation that failed.

The starting host is the one that starts the job. Partly copied files never appear under their final
names. A crash leaves `*.tmp-copy-*`, which the next `begin` removes.
"""

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megacore.artifact.build import remove_tree
from megacore.artifact.files import sync_directory, sync_tree
from megacore.artifact.manifest import file_digest
from megacore.checkpoint.format import STALE_SUFFIX, TRACKER_NAME, iteration_of
from megacore.checkpoint.retain import name_complete_saves
from megacore.cluster.placement.files import COPY_MARK, Item
from megacore.paths import exists, glob, is_dir, is_file, rglob

SET_ASIDE = "set-aside"
"""Name of the run's subdirectory for complete checkpoints that this host wrote itself, instead of
receiving them from the starting host."""
_COPY = f"{STALE_SUFFIX}copy-"
_STALE_SECONDS = 3600.0
"""Seconds without a change after which a copy is stale; before that another job may still write it.
"""


def look(items: Iterable[Item], proofs: Iterable[dict[str, str]]) -> dict[str, Any]:
    """Return the shared files that are missing here, and the result of each proof."""
    missing = [
        f"{item.role}: {problem}" for item in items if (problem := _missing(item)) is not None
    ]
    return {"missing": missing, "proofs": [_prove(**proof) for proof in proofs]}


def _missing(item: Item) -> str | None:
    """Return a clause on the first file that is missing here or has another size, else None.

    No content is read, because the other hosts see the same files.
    """
    if not is_dir(item.directory):
        return f"{item.directory} is not there"
    for name, entry in item.entries.items():
        path = item.directory / name
        try:
            size = path.stat().st_size
        except OSError:
            return f"{path} is not there"
        if size != entry.size:
            return f"{path} has {size} bytes here and {entry.size} there"
    return None


def _prove(directory: str, name: str, answer: str) -> str | None:
    """Return why `directory` is not shared; None if it is.

    Args:
        directory: directory to check.
        name: name and content of the starting host's token.
        answer: name of the file to write for the starting host.
    """
    path = Path(directory)
    if not is_dir(path):
        return f"{path} is not there"
    token = path / name
    if not exists(token):
        return (
            f"{path} is another directory than on the machine that starts the run: {name}, "
            "written there, is not"
        )
    try:
        content = token.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        return f"{token} cannot be read: {error.strerror}"
    if content != name:
        return f"{token} has other content than was written on the machine that starts the run"
    try:
        (path / answer).write_text(name, encoding="ascii")
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return None


def begin(items: list[Item], token: str, run: dict[str, str]) -> dict[str, Any]:
    """Find the files to copy and prepare directories for them; see the module's docstring.

    Args:
        items: files that the job reads.
        token: part of the names of this copy's directories.
        run: paths of the run. `proof` is a file that exists only on the starting host, `exit` the
            directory of the ranks' exit reasons. For a training, `root` is the directory of its
            checkpoints (else "") and `keep` the name of the checkpoint to resume from.

    Returns:
        `items`, with the files to copy and the temporary directory of each item, and `rsync`, True
        if rsync is installed; or only `problem`.
    """
    if not exists(run["proof"]):  # otherwise these are the starting host's own files
        shutil.rmtree(run["exit"], ignore_errors=True)
        if run["root"]:
            _clear(Path(run["root"]), run["keep"])
    answers: list[dict[str, Any]] = []
    needed: dict[int, list[Any]] = {}
    for item in items:
        if exists(item.directory) and not is_dir(item.directory):
            return {"problem": f"{item.directory} is no directory ({item.role}): move it away"}
        _remove_stale_copies(item.directory)
        wrong = {
            name: problem for name in item.entries if (problem := _problem(item, name)) is not None
        }
        answers.append({"wrong": wrong, "temporary": str(_temporary(item, token))})
        if wrong:
            existing = _nearest(item.directory)
            size = sum(item.entries[name].size for name in wrong)
            needed.setdefault(existing.stat().st_dev, [existing, 0])[1] += size
    for existing, size in needed.values():
        free = shutil.disk_usage(existing).free
        if free < size:
            have, want = f"{free / 2**30:.2f} GiB", f"{size / 2**30:.2f} GiB"
            return {
                "problem": (
                    f"{existing} has {have} free and {want} must be copied there: free some space"
                )
            }
    for item, answer in zip(items, answers, strict=True):
        if answer["wrong"]:
            _open(item, Path(answer["temporary"]), answer["wrong"])
    return {"items": answers, "rsync": shutil.which("rsync") is not None}


def _problem(item: Item, name: str) -> str | None:
    """Return the reason for copying a file (one clause); None if it is up to date."""
    path, entry = item.directory / name, item.entries[name]
    try:
        status = path.stat()
    except OSError:
        return f"{path} is missing"
    if status.st_size != entry.size:
        return f"{path} has {status.st_size} bytes instead of {entry.size}"
    if not item.full and status.st_mtime_ns == entry.mtime_ns:
        return None
    if entry.sha256 is None:
        return f"{path} has another modification time"
    return None if file_digest(path) == entry.sha256 else f"{path} has other content"


def _temporary(item: Item, token: str) -> Path:
    """Return the directory of an item's files before they are renamed into place."""
    if item.whole:
        return item.directory.with_name(f"{item.directory.name}{_COPY}{token}")
    return item.directory / f"files{_COPY}{token}"


def _open(item: Item, temporary: Path, wrong: Iterable[str]) -> None:
    """Create an item's temporary directory; for a whole directory, link the good files there."""
    temporary.mkdir(parents=True, exist_ok=True)
    for name in item.entries:
        (temporary / name).parent.mkdir(parents=True, exist_ok=True)
        if item.whole and name not in wrong:
            os.link(item.directory / name, temporary / name)


def _nearest(path: Path) -> Path:
    while not exists(path):
        path = path.parent
    return path


def _remove_stale_copies(directory: Path) -> None:
    """Remove the directories of interrupted copies."""
    siblings = (
        glob(directory.parent, f"{directory.name}{_COPY}*") if is_dir(directory.parent) else ()
    )
    for path in [*siblings, *glob(directory, f"files{_COPY}*")]:
        with contextlib.suppress(FileNotFoundError):  # another job has just finished its copy
            changed = max(part.lstat().st_ctime for part in [path, *rglob(path, "*")])
            if time.time() - changed > _STALE_SECONDS:
                shutil.rmtree(path)


def _clear(root: Path, keep: str) -> None:
    """Leave only the copy of checkpoint `keep`, so that the run resumes from no other checkpoint.

    Other copies are removed, and checkpoints that this host wrote itself are moved.
    """
    (root / TRACKER_NAME).unlink(missing_ok=True)
    name_complete_saves(root)
    for path in sorted(glob(root, "iter_*")):
        if _COPY in path.name:
            continue
        if iteration_of(path) is None:
            shutil.rmtree(path)  # an incomplete save
        elif path.name != keep and exists(path / COPY_MARK):
            remove_tree(path)
        elif not exists(path / COPY_MARK):
            _set_aside(path, root.with_name(SET_ASIDE))


def _set_aside(path: Path, folder: Path) -> None:
    """Move a checkpoint that this host wrote itself, for example when it started the run.

    It is not deleted, because there may be no other copy.
    """
    folder.mkdir(exist_ok=True)
    target, number = folder / path.name, 1
    while exists(target):
        target, number = folder / f"{path.name}-{number}", number + 1
    os.rename(path, target)
    sync_directory(folder)


def finish(items: list[Item], token: str, copied: list[list[str]]) -> dict[str, Any]:
    """Compare the copied files by size and digest, and rename them into place.

    `copied` contains the names of each item's copied files.
    """
    for item, names in zip(items, copied, strict=True):
        temporary = _temporary(item, token)
        if problem := _copied_problem(item, temporary, names):
            return {"problem": problem}
        if item.checkpoint:
            (temporary / COPY_MARK).write_text(
                "copied from the machine that starts the run\n", encoding="ascii"
            )
        sync_tree(temporary)
        if item.whole:
            _appear(item, temporary)
        else:
            for name in names:
                os.replace(temporary / name, item.directory / name)
            sync_directory(item.directory)
            shutil.rmtree(temporary)
    return {}


def _copied_problem(item: Item, temporary: Path, names: list[str]) -> str | None:
    for name in names:
        path, entry = temporary / name, item.entries[name]
        if not is_file(path) or path.stat().st_size != entry.size:
            return f"{item.directory / name} was not copied completely"
        if file_digest(path) != entry.sha256:
            return (
                f"{item.directory / name} has other content than it should have after it was copied"
            )
    return None


def _appear(item: Item, temporary: Path) -> None:
    """Rename a whole directory into place, unless another job has already done so.

    That job may be reading the same directory.
    """
    target = item.directory
    if exists(target):
        if all(_problem(item, name) is None for name in item.entries):
            shutil.rmtree(temporary)
            return
        remove_tree(target)
    os.rename(temporary, target)
    sync_directory(target.parent)


def clean(items: list[Item], token: str, files: Iterable[str]) -> dict[str, Any]:
    """Remove unfinished copies and the tokens."""
    for item in items:
        shutil.rmtree(_temporary(item, token), ignore_errors=True)
    for file in files:
        Path(file).unlink(missing_ok=True)
    return {}


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Perform the action of `question` and return its result.

    The result has only the entry `problem` if files cannot be read or written.
    """
    actions: dict[str, Callable[..., dict[str, Any]]] = {
        "look": look,
        "begin": begin,
        "finish": finish,
        "clean": clean,
    }
    action = actions[question.pop("action")]
    question["items"] = [Item.of(values) for values in question["items"]]
    try:
        return action(**question)
    except OSError as error:
        return {
            "problem": f"{error.filename or 'a file'} cannot be written or read: {error.strerror}"
        }


def main() -> None:
    """Read a question from stdin and write the answer to stdout."""
    sys.stdout.write(json.dumps(answer(json.load(sys.stdin))) + "\n")


if __name__ == "__main__":
    main()
