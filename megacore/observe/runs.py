"""State and progress of the runs in a workspace, read without a tracking server."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from megacore.artifact import Manifest, Workspace
from megacore.artifact.build import is_locked
from megacore.artifact.files import TEMPORARY, read_json
from megacore.artifact.manifest import MANIFEST_NAME
from megacore.artifact.workspace import EVENTS_FILE, FOLDERS, RUN_FILE, workspace_root
from megacore.errors import ArtifactError, ConfigError, DataFormatError, FileAccessError, listed
from megacore.observe.events import EventReader
from megacore.observe.heartbeat import ENDED, read_heartbeats
from megacore.paths import exists, glob, is_dir, is_file

RunState = Literal["running", "finished", "incomplete", "damaged"]

_UNREAD = DataFormatError, ArtifactError, FileAccessError
_NAMED = 8
"""Maximum number of runs that a message names."""
_REMOTE_SILENCE = 3600.0
"""Seconds without a heartbeat after which a rank on another host counts as dead."""


def runs(workspace: Workspace) -> list[dict[str, Any]]:
    """Return the pretrainings and fine-tunings of a workspace, last updated first.

    Each has name, key, state, iteration, train_iters, consumed_tokens, valid_ppl (of the best
    evaluated checkpoint, else of the newest), test_ppl, metric (of a fine-tuning's best model, as
    text), size_bytes, path and updated (Unix seconds); unknown values are None. A run is
    `running` while a process holds its lock, else `finished` if it has a manifest, else
    `incomplete`. It is `damaged` if its files cannot be read.
    """
    evaluated = _evaluated_perplexities(workspace)
    folders = (workspace.folder("train"), workspace.folder("finetune"))
    descriptions = [
        _describe(directory, evaluated)
        for folder in folders
        for directory in _run_directories(folder)
    ]
    return sorted(descriptions, key=lambda run: run["updated"] or 0.0, reverse=True)


def find_run(workspace: Workspace, name: str, *, state: RunState) -> Path:
    """Return the directory of the only run in `state` whose name, key or key prefix is `name`.

    Raises ConfigError if there is none, or more than one.
    """
    all_runs = runs(workspace)
    called = [
        run
        for run in all_runs
        if run["name"] == name or (name != "" and run["key"].startswith(name))
    ]
    matches = [run for run in called if run["state"] == state]
    if len(matches) == 1:
        return Path(matches[0]["path"])
    candidates = matches or called or all_runs
    if not candidates:
        raise ConfigError(
            f"no run is {name!r} in {workspace.root}, which has no runs: name another workspace "
            "with --workspace or MEGACORE_WORKSPACE"
        )
    listing = listed(
        [f"{run['key']} ({run['name']}, {run['state']})" for run in candidates], _NAMED
    )
    if called and not matches:
        verb = "is" if len(called) == 1 else "are"
        raise ConfigError(f"{listing} in {workspace.root} {verb} not {state}")
    found = f"{len(matches)} runs called {name!r} are {state}" if matches else f"no run is {name!r}"
    raise ConfigError(f"{found} in {workspace.root}, where there are {listing}: give one key")


def named_directory(name: str | Path, root: Path | None = None) -> Path:
    """Return the directory that `name` names in a workspace, or else the path `name`.

    A run is named by its key, the beginning of its key, or its name; another artifact by its key
    or the beginning of it. A path that exists, or that has several parts, names nothing else, and
    neither does the prefix of token files that exist.

    Args:
        name: name or path; a path need not exist.
        root: root of the workspace; None means MEGACORE_WORKSPACE, or ./workspace.

    Raises:
        ConfigError: if several runs and artifacts are called so.
    """
    path, text = Path(name), str(name)
    if not text or "/" in text or exists(path) or exists(f"{path}.idx"):
        return path
    root = root or workspace_root()
    directories = [
        directory
        for folder in dict.fromkeys(FOLDERS.values())
        for directory in sorted(glob(root / folder, "[!.]*"))
        if TEMPORARY not in directory.name and is_dir(directory)
    ]
    matches = [
        directory
        for directory in directories
        if directory.name.startswith(text) or _name_of(directory) == text
    ]
    exact = [directory for directory in matches if directory.name == text]
    if len(exact or matches) > 1:
        listing = listed([str(match.relative_to(root)) for match in matches], _NAMED)
        raise ConfigError(
            f"{len(matches)} runs or artifacts in {root} are called {text} ({listing}): give a key"
        )
    return next(iter(exact or matches), path)


def _name_of(directory: Path) -> str | None:
    """Return the name in a run's job file; None if there is none, or it cannot be read."""
    try:
        name = read_json(directory / RUN_FILE)["config"]["name"]
    except (OSError, ValueError, KeyError, TypeError, *_UNREAD):
        return None
    return name if isinstance(name, str) else None


def is_training(directory: Path) -> bool:
    """Return True if a task holds the run's lock, or a rank started without a task is alive."""
    if is_locked(directory):
        return True
    beats = [beat for beat in read_heartbeats(directory / "exit") if beat.phase != ENDED]
    return any(
        beat.alive if beat.here else time.time() - beat.time < _REMOTE_SILENCE for beat in beats
    )


def _run_directories(folder: Path) -> Iterator[Path]:
    if is_dir(folder):
        for directory in sorted(folder.iterdir()):
            if is_file(directory / RUN_FILE):
                yield directory


def _describe(directory: Path, evaluated: dict[str, dict[str, float]]) -> dict[str, Any]:
    run: dict[str, Any] = {
        "name": None,
        "key": directory.name,
        "state": "damaged",
        "iteration": None,
        "train_iters": None,
        "consumed_tokens": None,
        "valid_ppl": None,
        "test_ppl": None,
        "metric": None,
        "size_bytes": _size(directory),
        "path": str(directory),
        "updated": None,
    }
    try:
        config = read_json(directory / RUN_FILE)["config"]
        fine_tunes = "num_epochs" in config["train"]
        # The steps of a fine-tuning's epochs are unknown until its samples are counted.
        planned = config["train"]["max_steps" if fine_tunes else "train_iters"]
        run.update(name=config["name"], train_iters=planned)
        run.update(_progress(directory / EVENTS_FILE, fine_tunes=fine_tunes))
        manifest = Manifest.read(directory) if exists(directory / MANIFEST_NAME) else None
    except (OSError, ValueError, KeyError, TypeError, *_UNREAD):
        return run
    if manifest is not None:
        run.update(evaluated.get(manifest.digest, {}))
    finished = "incomplete" if manifest is None else "finished"
    run["state"] = "running" if is_locked(directory) else finished
    return run


def _progress(events: Path, *, fine_tunes: bool) -> dict[str, Any]:
    """Return the progress of a run; if an iteration was repeated, its later event counts.

    The events are read from the end, as far as needed.
    """

    def newest(*kinds: str, field: str = "kind") -> dict[str, Any]:
        found = EventReader(events, kinds=kinds or None).newest_first()
        return next((event for event in found if field in event), {})

    # A run may end between two log intervals, each of which has an event `step`.
    last, reached = newest(), newest("step", "exit", field="iteration")
    step = reached if reached.get("kind") == "step" else newest("step")
    progress: dict[str, Any] = {"updated": last["time"]} if last else {}
    if reached:
        progress["iteration"] = reached["iteration"]
    if step:
        progress["consumed_tokens"] = step["consumed_tokens"]
    if not fine_tunes:
        return progress | {"valid_ppl": newest("perplexity").get("valid_ppl")}
    planned, best = newest("start", "step", field="total_iterations"), newest("best")
    if planned:
        progress["train_iters"] = planned["total_iterations"]
    if best:
        progress["metric"] = f"{best['metric']} {best['value']:.4f}"
    evaluation = newest("evaluation", field="metrics")
    return progress | {"valid_ppl": evaluation.get("metrics", {}).get("ppl")}


def _size(directory: Path) -> int:
    """Return the size of all files in bytes, ignoring files that are deleted while counting."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(Path(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _evaluated_perplexities(workspace: Workspace) -> dict[str, dict[str, float]]:
    """Return `valid_ppl` and `test_ppl` of evaluations by the digest of the evaluated run.

    If there are several, the newest counts.
    """
    evaluations = list[tuple[float, Manifest]]()
    for path in glob(workspace.folder("evaluate"), f"*/{MANIFEST_NAME}"):
        with suppress(FileNotFoundError, ArtifactError, FileAccessError):
            evaluations.append((path.stat().st_mtime, Manifest.read(path.parent)))
    perplexities: dict[str, dict[str, float]] = {}
    for _, manifest in sorted(evaluations, key=lambda each: each[0]):
        names = ("valid_ppl", "test_ppl")
        counts = {name: float(manifest.counts[name]) for name in names if name in manifest.counts}
        perplexities.update(dict.fromkeys(manifest.inputs.values(), counts))
    return perplexities
