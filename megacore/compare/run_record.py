"""Record of a run in its directory: configuration, inputs, attempts and steps."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from megacore.artifact.files import read_json, reason_of
from megacore.artifact.manifest import MANIFEST_NAME, Manifest, file_digest
from megacore.artifact.workspace import EVENTS_FILE, RUN_FILE
from megacore.checkpoint.format import MARKER_NAME
from megacore.config.run import RunConfig, with_current_names
from megacore.errors import ArtifactError, ConfigError, DataFormatError, FileAccessError
from megacore.jobs.run import TrainJob
from megacore.observe.events import EventReader
from megacore.paths import is_file


class Step(NamedTuple):
    """Values of a step event that a record keeps; a million whole events would take gigabytes."""

    lm_loss: Any = None
    loss: Any = None
    grad_norm: Any = None
    lr: Any = None
    global_batch_size: Any = None
    consumed_samples: Any = None
    loss_scale: Any = None
    skipped_iterations: Any = None
    nan_iterations: Any = None
    interval_iterations: Any = None


SERIES = Step._fields[:-1]
"""Values of a step that are compared."""


@dataclass(frozen=True)
class Attempt:
    """One start of a run's processes."""

    iteration: int
    """Iteration after which it begins."""
    values: Mapping[str, Any]
    """Values of the event."""


@dataclass
class RunRecord:
    """Contents of a run's directory."""

    directory: Path
    job: Mapping[str, Any]
    """Content of run.json."""
    config: RunConfig | None
    """Configuration of the last attempt; None if this version of megacore cannot read it."""
    attempts: list[Attempt] = field(default_factory=list)
    steps: dict[int, Step] = field(default_factory=dict)
    """Values of the step event by iteration; if an iteration was repeated, of the later one."""
    evaluations: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Validation or perplexity event by iteration."""
    events: list[Mapping[str, Any]] = field(default_factory=list)
    """Other events."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Digest of each input artifact, by role; empty where no manifest is there."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Configuration as JSON."""
        values: Mapping[str, Any] = self.job["config"]
        return values

    @property
    def last_iteration(self) -> int:
        """Last iteration of which there is a step; 0 without any."""
        return max(self.steps, default=0)

    @property
    def end(self) -> str:
        """Reason of the last end of the training."""
        reasons = [event.get("reason") for event in self.events if event["kind"] == "exit"]
        return str(reasons[-1]) if reasons else "without an end"

    def describe(self) -> dict[str, Any]:
        """Return path, name and progress for the report."""
        return {
            "path": str(self.directory),
            "name": self.values.get("name"),
            "key": self.directory.name,
            "iteration": self.last_iteration,
            "attempts": len(self.attempts),
            "end": self.end,
        }


def read_run(directory: Path) -> RunRecord:
    """Read a run's directory.

    Raises:
        DataFormatError: if run.json or events.jsonl is missing or damaged.
        FileAccessError: if one of them cannot be read now.
    """
    path = directory / RUN_FILE
    try:
        job = read_json(path)
        if not isinstance(job["config"], dict):
            raise TypeError("config is no object")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataFormatError(
            f"{path} cannot be read ({reason_of(error)}): give the directory of a run"
        ) from error
    record = RunRecord(directory, job, _config(path, job))
    for event, _ in EventReader(directory / EVENTS_FILE):
        _add(record, event)
    record.inputs = _inputs(directory, job)
    return record


def _config(path: Path, job: Mapping[str, Any]) -> RunConfig | None:
    try:
        return TrainJob.read(path).config
    except ConfigError:
        pass
    try:
        return RunConfig.model_validate(with_current_names(job["config"]))
    except ValidationError:
        return None


def _add(record: RunRecord, event: Mapping[str, Any]) -> None:
    match event["kind"]:
        case "start":
            record.attempts.append(Attempt(int(event.get("iteration") or 0), event))
        case "step":
            record.steps[int(event["iteration"])] = Step(*map(event.get, Step._fields))
        case "evaluation" | "perplexity":
            known = record.evaluations.get(int(event["iteration"]), {})
            record.evaluations[int(event["iteration"])] = {**known, **event}
        case _:
            record.events.append(event)


def _inputs(directory: Path, job: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of tokens, tokenizer and index maps, as far as their manifests are there.

    A finished run's manifest names those of tokens and tokenizer.
    """
    digests: dict[str, str] = {}
    prefixes = job.get("token_prefixes") or ()
    places = {
        "index": job.get("index_directory"),
        "tokenizer": job.get("tokenizer_directory"),
        "tokens": str(Path(prefixes[0]).parent) if prefixes else None,
    }
    for role, place in places.items():
        digest = None if place is None else _digest(Path(place))
        if digest is not None:
            digests[role] = digest
    with suppress(ArtifactError, FileAccessError):
        digests |= Manifest.read(directory).inputs
    return digests


def _digest(directory: Path) -> str | None:
    if not is_file(directory / MANIFEST_NAME):
        return None
    try:
        return Manifest.read(directory).digest
    except (ArtifactError, FileAccessError):
        return None


def checkpoint_digest(path: object) -> str | None:
    """Return the digest of a checkpoint's marker; None if it is not there."""
    if not isinstance(path, str):
        return None
    marker = Path(path) / MARKER_NAME
    try:
        return file_digest(marker) if is_file(marker) else None
    except OSError:
        return None
