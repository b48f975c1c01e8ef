"""`python -m megacore.cluster.placement.check`.

What another machine finds of a job's files, and does for them.

One JSON object on stdin, one on stdout. `action` is one of

* `look` (shared files): which of `items` are not here as they are there, and the proof of each of
  `proofs`, a directory: the token that was written there is read here, and one is written here to
  be read there;
* `begin` (files of its own): what of `items` is missing or damaged, a directory for each of those
  with what is right of it (hard links), and whether there is room; first, checkpoints that are not
  the run's are put out of the way;
* `finish`: what was brought into those directories is compared, synced and renamed into place;
* `clean`: the directories and tokens of a preparation that failed are removed.

Nothing that is copied is ever seen by half: a crash leaves `*.tmp-copy-*`, which the next `begin`
removes.
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
from megacore.cluster.placement.files import COPY_MARK, Item

SET_ASIDE = "set-aside"
"""In the run directory: complete checkpoints of this machine that are not those of the machine that
starts the run."""
_COPY = f"{STALE_SUFFIX}copy-"
_STALE_SECONDS = 3600.0
"""A copy that grew within this time may still be under way, for another job."""


def look(items: Iterable[Item], proofs: Iterable[dict[str, str]]) -> dict[str, Any]:
    """Shared files that are not here, and the directories the token was read and written in."""
    missing = [
        f"{item.role}: {problem}" for item in items if (problem := _missing(item)) is not None
    ]
    return {"missing": missing, "proofs": [_prove(**proof) for proof in proofs]}


def _missing(item: Item) -> str | None:
    """The first file that is not here with its size; no content is read of what others see too."""
    if not item.directory.is_dir():
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
    """Why the directory is not shared, or None.

    `answer` is the file that is written for the others to see.
    """
    place = Path(directory)
    if not place.is_dir():
        return f"{place} is not there"
    token = place / name
    if not token.exists():
        return (
            f"{place} is another directory than on the machine that starts the run: {name}, "
            "written there, is not"
        )
    try:
        said = token.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        return f"{token} cannot be read: {error.strerror}"
    if said != name:
        return f"{token} has another content than was written on the machine that starts the run"
    try:
        (place / answer).write_text(name, encoding="ascii")
    except OSError as error:
        return f"{place} cannot be written: {error.strerror}"
    return None


def begin(items: list[Item], token: str, run: dict[str, str]) -> dict[str, Any]:
    """Find out what is to be copied, and make room for it; see the module.

    Args:
        items: what the job reads.
        token: names the directories of this copy.
        run: `proof`, a file that only the machine has that starts the job, `exit`, where ranks say
            why they ended, and of a training `root` of its checkpoints (else "") and `keep`, the
            name of the one that it goes on from.
    """
    if not Path(run["proof"]).exists():  # else these are the very files of that machine
        shutil.rmtree(run["exit"], ignore_errors=True)
        if run["root"]:
            _clear(Path(run["root"]), run["keep"])
    answers: list[dict[str, Any]] = []
    needed: dict[int, list[Any]] = {}
    for item in items:
        if item.directory.exists() and not item.directory.is_dir():
            return {"problem": f"{item.directory} is no directory ({item.role}): move it away"}
        _remove_stale_copies(item.directory)
        wrong = {
            name: problem for name in item.entries if (problem := _problem(item, name)) is not None
        }
        answers.append({"wrong": wrong, "temporary": str(_temporary(item, token))})
        if wrong:
            place = _nearest(item.directory)
            size = sum(item.entries[name].size for name in wrong)
            needed.setdefault(place.stat().st_dev, [place, 0])[1] += size
    for place, size in needed.values():
        free = shutil.disk_usage(place).free
        if free < size:
            have, want = f"{free / 2**30:.2f} GiB", f"{size / 2**30:.2f} GiB"
            return {
                "problem": (
                    f"{place} has {have} free and {want} are to be copied there: free some space"
                )
            }
    for item, answer in zip(items, answers, strict=True):
        if answer["wrong"]:
            _open(item, Path(answer["temporary"]), answer["wrong"])
    return {"items": answers, "rsync": shutil.which("rsync") is not None}


def _problem(item: Item, name: str) -> str | None:
    """Why a file has to be copied, in one clause."""
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
        return f"{path} is of another time"
    return None if file_digest(path) == entry.sha256 else f"{path} has another content"


def _temporary(item: Item, token: str) -> Path:
    """Where the files of an item are put before they are renamed."""
    if item.whole:
        return item.directory.with_name(f"{item.directory.name}{_COPY}{token}")
    return item.directory / f"files{_COPY}{token}"


def _open(item: Item, temporary: Path, wrong: Iterable[str]) -> None:
    """Make the directory, with links to those files of a whole that are right."""
    temporary.mkdir(parents=True, exist_ok=True)
    for name in item.entries:
        (temporary / name).parent.mkdir(parents=True, exist_ok=True)
        if item.whole and name not in wrong:
            os.link(item.directory / name, temporary / name)


def _nearest(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _remove_stale_copies(directory: Path) -> None:
    """Remove what copies left that were broken off."""
    beside = directory.parent.glob(f"{directory.name}{_COPY}*") if directory.parent.is_dir() else ()
    for path in [*beside, *directory.glob(f"files{_COPY}*")]:
        with contextlib.suppress(FileNotFoundError):  # another job has just ended its copying
            changed = max(part.lstat().st_ctime for part in [path, *path.rglob("*")])
            if time.time() - changed > _STALE_SECONDS:
                shutil.rmtree(path)


def _clear(root: Path, keep: str) -> None:
    """Leave no checkpoint on this machine that could be taken for the run's."""
    (root / TRACKER_NAME).unlink(missing_ok=True)
    for path in sorted(root.glob("iter_*")):
        if _COPY in path.name:
            continue
        if iteration_of(path) is None:
            shutil.rmtree(path)  # what a crash left of a save
        elif path.name != keep and (path / COPY_MARK).exists():
            remove_tree(path)
        elif not (path / COPY_MARK).exists():
            _set_aside(path, root.with_name(SET_ASIDE))


def _set_aside(path: Path, folder: Path) -> None:
    """Move a checkpoint that this machine wrote for itself, as when it started the run.

    Nothing else may have it.
    """
    folder.mkdir(exist_ok=True)
    target, number = folder / path.name, 1
    while target.exists():
        target, number = folder / f"{path.name}-{number}", number + 1
    os.rename(path, target)
    sync_directory(folder)


def finish(items: list[Item], token: str, copied: list[list[str]]) -> dict[str, Any]:
    """Compare what was copied, by size and hash, and let it appear.

    `copied` names the files of each item.
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
        if not path.is_file() or path.stat().st_size != entry.size:
            return f"{item.directory / name} was not copied as a whole"
        if file_digest(path) != entry.sha256:
            return (
                f"{item.directory / name} has another content than it should have after it was "
                "copied"
            )
    return None


def _appear(item: Item, temporary: Path) -> None:
    """Rename a whole directory into place, unless another job has brought the same meanwhile.

    That job may be reading it.
    """
    target = item.directory
    if target.exists():
        if all(_problem(item, name) is None for name in item.entries):
            shutil.rmtree(temporary)
            return
        remove_tree(target)
    os.rename(temporary, target)
    sync_directory(target.parent)


def clean(items: list[Item], token: str, files: Iterable[str]) -> dict[str, Any]:
    """Remove the copies under way and the tokens."""
    for item in items:
        shutil.rmtree(_temporary(item, token), ignore_errors=True)
    for file in files:
        Path(file).unlink(missing_ok=True)
    return {}


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """What the process on another machine says to a question.

    `problem` where its files cannot be written.
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
    """Answer the question on stdin."""
    sys.stdout.write(json.dumps(answer(json.load(sys.stdin))) + "\n")


if __name__ == "__main__":
    main()
