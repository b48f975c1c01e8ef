"""What the workspace itself tells about its runs, without a tracking server."""

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from megacore.artifact import Manifest, Workspace
from megacore.artifact.files import read_json
from megacore.artifact.manifest import MANIFEST_NAME
from megacore.errors import ArtifactError, ConfigError, DataFormatError
from megacore.observe.events import EventReader
from megacore.observe.heartbeat import ENDED, read_heartbeats

RunState = Literal["running", "finished", "incomplete", "damaged"]

RUN_FILE = "run.json"
EVENTS_FILE = "events.jsonl"
_NAMED = 8
"""Runs that a message names."""
_REMOTE_SILENCE = 3600.0
"""Seconds after which a rank of another machine that tells nothing is taken for gone."""


def runs(workspace: Workspace) -> list[dict[str, Any]]:
    """The pretrainings and fine-tunings of a workspace, the one that reported last first.

    Each has name, key, state, iteration, train_iters, consumed_tokens, valid_ppl (of the last
    validation), test_ppl, metric (of a fine-tuning's best model, as text), size_bytes, path and
    updated (Unix seconds); what is not known is None. A run is `finished` once its manifest is
    there, `running` while a process holds its lock, `damaged` when its files cannot be read.
    """
    test_ppl = _test_perplexities(workspace)
    folders = (workspace.folder("train"), workspace.folder("finetune"))
    found = [
        _describe(directory, test_ppl)
        for folder in folders
        for directory in _run_directories(folder)
    ]
    return sorted(found, key=lambda run: run["updated"] or 0.0, reverse=True)


def find_run(workspace: Workspace, name: str, *, state: RunState) -> Path:
    """Directory of the one run in `state` whose key is, or begins with, or whose name is `name`.

    Raises ConfigError when there is none, or more than one.
    """
    every = runs(workspace)
    found = [run for run in every if run["state"] == state and _is_called(run, name)]
    if len(found) != 1:
        shown = found or [run for run in every if _is_called(run, name)] or every
        named = (
            ", ".join(f"{run['key']} ({run['name']}, {run['state']})" for run in shown[:_NAMED])
            or "none"
        )
        named += f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else ""
        what = f"{len(found)} runs are {state}" if found else f"no run is {state}"
        raise ConfigError(
            f"{what} under {name!r} in {workspace.root}, where there are {named}: give one key"
        )
    return Path(found[0]["path"])


def is_training(directory: Path) -> bool:
    """Whether a task holds a run's lock, or a rank started by hand has a heartbeat there."""
    if _locked(directory.with_name(f".{directory.name}.lock")):
        return True
    beats = [beat for beat in read_heartbeats(directory / "exit") if beat.phase != ENDED]
    return any(
        beat.alive if beat.here else time.time() - beat.time < _REMOTE_SILENCE for beat in beats
    )


def _is_called(run: dict[str, Any], name: str) -> bool:
    return run["name"] == name or (name != "" and run["key"].startswith(name))


def _run_directories(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        for directory in sorted(folder.iterdir()):
            if (directory / RUN_FILE).is_file():
                yield directory


def _describe(directory: Path, test_ppl: dict[str, float]) -> dict[str, Any]:
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
        run.update(name=config["name"], train_iters=_planned_iterations(config["train"]))
        run.update(_progress(directory / EVENTS_FILE))
        manifest = Manifest.read(directory) if (directory / MANIFEST_NAME).exists() else None
    except (OSError, ValueError, KeyError, TypeError, DataFormatError, ArtifactError):
        return run
    if manifest is not None:
        run["test_ppl"] = test_ppl.get(manifest.digest)
    run["state"] = _state(directory, finished=manifest is not None)
    return run


def _progress(events: Path) -> dict[str, Any]:
    """Where the run is: of an iteration that is reported again, the later report counts."""
    progress: dict[str, Any] = {}
    for event, _ in EventReader(events):
        progress["updated"] = event["time"]
        if "total_iterations" in event:
            progress["train_iters"] = event["total_iterations"]
        if event["kind"] == "step":
            progress.update(iteration=event["iteration"], consumed_tokens=event["consumed_tokens"])
        elif event["kind"] == "evaluation":
            progress["valid_ppl"] = (event.get("metrics") or event).get("ppl")
        elif event["kind"] == "best":
            progress["metric"] = f"{event['metric']} {event['value']:.4f}"
    return progress


def _planned_iterations(train: dict[str, Any]) -> int | None:
    """How far a configuration leads.

    A fine-tuning's epochs are steps only once its samples are counted.
    """
    planned: int | None = train["max_steps" if "num_epochs" in train else "train_iters"]
    return planned


def _state(directory: Path, *, finished: bool) -> RunState:
    if _locked(directory.with_name(f".{directory.name}.lock")):
        return "running"
    return "finished" if finished else "incomplete"


def _locked(path: Path) -> bool:
    """Whether a process holds the lock that `megacore.artifact.lock` takes."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _size(directory: Path) -> int:
    """Bytes of all files below; files that retention deletes meanwhile count as gone."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(Path(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _test_perplexities(workspace: Workspace) -> dict[str, float]:
    """The `test_ppl` that evaluations counted, by the digest of the run that they read.

    The newest counts.
    """
    found: dict[str, float] = {}
    folder = workspace.folder("evaluate")
    for path in sorted(folder.glob(f"*/{MANIFEST_NAME}"), key=lambda path: path.stat().st_mtime):
        try:
            manifest = Manifest.read(path.parent)
            ppl = manifest.counts.get("test_ppl")
        except ArtifactError:
            continue
        if ppl is not None:
            found.update(dict.fromkeys(manifest.inputs.values(), float(ppl)))
    return found
