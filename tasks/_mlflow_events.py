"""Forwarding of a training's events to MLflow, exactly once.

For each (kind, iteration), the first event in `events.jsonl` is sent, in the file's order, with the
event's time as timestamp. A file in the run directory records the offset up to which the store has
all events; it is updated after each batch. Events that may have arrived without being committed
(after a start, a failure or a kill) are first compared with the store's history. Training never
waits: deliveries run in a thread, and failed deliveries are tried again later.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megacore.artifact import lock
from megacore.artifact.files import read_json, reason_of, workspace_errors, write_json
from megacore.artifact.workspace import EVENTS_FILE
from megacore.errors import DataFormatError, FileAccessError, TrackingError, WorkspaceError
from megacore.observe.events import EventReader, Iterations
from megacore.observe.logging import perplexity
from megacore.paths import exists, is_file
from tasks._checkpoint_models import (
    POSITION_PREFIXES,
    ensure_checkpoint_model,
    log_checkpoint_perplexity,
    mark_deleted,
    position_metrics,
)
from tasks._doctor import send_preflight
from tasks._flow_config import FlowConfig
from tasks._mlflow import (
    STORE_ERRORS,
    RunFacts,
    RunStatus,
    Tracking,
    end_run,
    ensure_run,
    recorded_run_id,
    stored_steps,
)

OFFSET_FILE = "mlflow_offset.json"
"""Name of the file in the run directory with the MLflow run id, the committed offset in
events.jsonl, in bytes, and the version of the metrics' names."""
SENTENCE_LOSSES = ("sop_loss", "nsp_loss")
"""Losses of BERT's binary head; a run has at most one of them."""


def _in_group(group: str, names: Iterable[str]) -> dict[str, str]:
    """Return the metric `group/name` of each field."""
    return {name: f"{group}/{name}" for name in names}


CURVES: Mapping[str, Mapping[str, str]] = {
    "step": _in_group(
        "train",
        ("lm_loss", "loss", *SENTENCE_LOSSES, "lr", "mfu", "mfu_measured", "tokens_per_second"),
    )
    | _in_group(
        "vitals",
        (
            "grad_norm",
            "loss_scale",
            "ms_per_iteration",
            "samples_per_second",
            "tflops",
            "exposed_communication_ms",
            "memory_mb",
            "skipped_iterations",
            "nan_iterations",
            "global_batch_size",
            "epoch",
        ),
    ),
    "evaluation": _in_group("validation", ("lm_loss", "loss", *SENTENCE_LOSSES)),
    "perplexity": {"valid_ppl": "validation/ppl"},
    "test": {"loss": "test_loss"},
    "epoch": {
        "train_seconds": "vitals/epoch_train_seconds",
        "evaluation_seconds": "vitals/epoch_evaluation_seconds",
    },
}
"""Fields that become metrics and the names of these in MLflow, by kind of event.

A run's page shows the groups, the names before the slash, in alphabetical order, and then the
metrics without a group: first losses, learning rate, throughput and perplexity, then the vitals,
last the values of checkpoints and of the exported model.
"""
WITH_TOKENS = frozenset(
    {"train/lm_loss", "train/loss", "validation/lm_loss", "validation/loss", "validation/ppl"}
)
"""Metrics that have a second curve by consumed tokens."""
BY_POSITION = "by_position"
"""Field of a perplexity event with the loss of each range of positions."""
BY_SOURCE = "by_source"
"""Field of an event with the loss of each source of a blend."""
SOURCE_PREFIXES = {
    "step": "train/loss_by_source/",
    "evaluation": "validation/loss_by_source/",
    "perplexity": "validation/ppl_by_source/",
}
"""Prefixes of the metrics of a source, by kind of event; the source's name follows."""
PREFIXES = {"evaluation": "validation/", "test": "test_"}
"""Prefixes of the metrics in the field METRICS, by kind of event."""
ATTEMPTS = "attempts"
"""Tag with the number of attempts."""
METRICS = "metrics"
"""Field of a fine-tuning's evaluations with further metrics by name."""
BY_TOKENS = "_by_tokens"
"""Suffix of the curve whose step is consumed tokens instead of the iteration."""

_METRICS_PER_BATCH = 1000
_BATCHES_AHEAD = 20
"""Batches whose steps are looked up in the store together with those of the next one."""
_ALL_STEPS = range(1 << 63)
_NAMES = 2
"""Version of the names in CURVES. A run whose events were sent under other names sends them again.
"""
_FIRST_BACKOFF = 1.0
_LONGEST_BACKOFF = 60.0
_MOST_DOUBLINGS = 10
"""Doublings of the first pause after which it is the longest; a float ends at 1,024 of them."""
_log = logging.getLogger("prefect.megacore")


@dataclass(frozen=True)
class Point:
    """One value of one curve."""

    key: str
    value: float
    timestamp_ms: int
    step: int


@dataclass
class Batch:
    """Events that are sent together and committed by one offset."""

    end: int
    points: list[Point] = field(default_factory=list)
    seen: set[tuple[str, int]] = field(default_factory=set)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    """Events of checkpoints: saved, measured, deleted."""
    files: list[str] = field(default_factory=list)
    """Paths of profiles, relative to the run directory."""
    tables: set[str] = field(default_factory=set)
    """Paths of tables, relative to the run directory."""
    progress: dict[str, str] = field(default_factory=dict)
    """Tags of the run by the last step: columns of MLflow's table of runs."""


def points_of(event: Mapping[str, Any]) -> Iterator[Point]:
    """Yield the metrics of an event of CURVES by iteration, losses and perplexities also by tokens.

    Values that are null are left out.
    """
    kind, timestamp = event["kind"], round(1000 * event["time"])
    measured = (event.get(METRICS) or {}) if kind in PREFIXES else {}
    values = {f"{PREFIXES[kind]}{name}": value for name, value in measured.items()} | {
        name: event[field] for field, name in CURVES[kind].items() if field in event
    }
    values |= position_metrics(POSITION_PREFIXES["valid"], event.get(BY_POSITION) or ())
    for each in event.get(BY_SOURCE) or ():
        loss = each["loss"]
        ppl = kind == "perplexity" and loss is not None
        values[f"{SOURCE_PREFIXES[kind]}{each['source']}"] = perplexity(loss) if ppl else loss
    for name, value in values.items():
        if value is not None:
            yield Point(name, float(value), timestamp, int(event["iteration"]))
            if name in WITH_TOKENS:
                tokens = int(event["consumed_tokens"])
                yield Point(f"{name}{BY_TOKENS}", float(value), timestamp, tokens)


class SentEvents:
    """Set of pairs (kind, iteration) in the memory of a few numbers, also after a month."""

    def __init__(self) -> None:
        """Create an empty set."""
        self._iterations: dict[str, Iterations] = {}

    def add(self, kind: str, iteration: int) -> None:
        """Add an event that is not in the set."""
        self._iterations.setdefault(kind, Iterations()).add(iteration)

    def __contains__(self, event: object) -> bool:
        """Return True if an event was added."""
        assert isinstance(event, tuple)
        kind, iteration = event
        return kind in self._iterations and iteration in self._iterations[kind]


def progress_of(event: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of a run whose last step is `event`."""
    values = {
        "step": event["iteration"],
        "tokens": event.get("consumed_tokens"),
        ATTEMPTS: event.get("attempt"),
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def next_batch(events: Path, offset: int, seen: Container[tuple[str, int]]) -> Batch:
    """Read the next batch to send from `offset`: whole events, as many as fit into one request."""
    batch = Batch(offset)
    for event, end in EventReader(events, offset):
        kind = event["kind"]
        if kind == "perplexity":
            batch.checkpoints.append(event)
        if kind in CURVES:
            identity = (kind, int(event["iteration"]))
            if identity not in seen and identity not in batch.seen:
                points = _checked_points(event, events, end)
                if len(batch.points) + len(points) > _METRICS_PER_BATCH:
                    break
                batch.points += points
                batch.seen.add(identity)
        elif kind in {"checkpoint", "checkpoint_deleted"}:
            if kind == "checkpoint" and not {"consumed_tokens", "size_bytes"} <= event.keys():
                raise _damaged(events, end, "it lacks consumed_tokens or size_bytes")
            batch.checkpoints.append(event)
        elif kind == "profile":
            files = event.get("files")
            if not isinstance(files, list) or not all(isinstance(name, str) for name in files):
                raise _damaged(events, end, "it lacks files")
            batch.files += files
        elif kind == "answers":
            if not isinstance(event.get("file"), str):
                raise _damaged(events, end, "it lacks file")
            batch.tables.add(event["file"])
        if kind == "step":
            batch.progress = progress_of(event)
        batch.end = end
    return batch


def _checked_points(event: Mapping[str, Any], events: Path, end: int) -> list[Point]:
    """Return the points of an event; raise DataFormatError if its fields are damaged."""
    try:
        return list(points_of(event))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _damaged(events, end, f"{type(error).__name__}: {error}") from error


def _damaged(events: Path, end: int, reason: str) -> DataFormatError:
    return DataFormatError(
        f"{events}: the event that ends at byte {end} is damaged ({reason}): delete the run"
    )


class Deliveries:
    """Deliveries of a run's events in a thread, one at a time, for which the training never waits.

    Attributes:
        failures: number of failed deliveries in a row.
        due: time before which no delivery begins, by `time.monotonic`.
    """

    def __init__(self, name: str, interval: float, pauses: tuple[float, float]) -> None:
        """Initialize without a thread, which is called `name`.

        Deliveries are at least `interval` seconds apart. After a failure it is the first of
        `pauses`, which doubles with each further one up to the second.
        """
        self.failures = 0
        self.due = 0.0
        self._name = name
        self._interval = interval
        self._pauses = pauses
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """True while a delivery is made."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, deliver: Callable[[], None]) -> None:
        """Begin a delivery, which calls `succeeded` or `failed`. Raises RuntimeError."""
        thread = threading.Thread(target=deliver, name=self._name, daemon=True)
        thread.start()
        self._thread = thread  # only one that runs can be waited for

    def join(self, timeout: float) -> None:
        """Wait for the end of the delivery, at most `timeout` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)

    def succeeded(self) -> None:
        """Note that everything was delivered."""
        self.failures = 0
        self.due = time.monotonic() + self._interval

    def failed(self) -> None:
        """Note that a delivery failed, which is repeated later."""
        first, longest = self._pauses
        pause = first * 2 ** min(self.failures, _MOST_DOUBLINGS)
        self.due = time.monotonic() + min(pause, longest)
        self.failures += 1


class Forwarder:
    """Sender of a run directory's events to its MLflow run.

    The MLflow run is created once the store answers.

    Attributes:
        tracking: MLflow store.
        directory: directory of events.jsonl.
        config: configuration that is recorded with the run.
        facts: further facts that are recorded with the run.
    """

    def __init__(
        self,
        tracking: Tracking,
        run_directory: Path,
        config: FlowConfig,
        facts: RunFacts,
        *,
        interval: float = 2.0,
    ) -> None:
        """Initialize the forwarder without reading or sending anything.

        Deliveries are at least `interval` seconds apart.
        """
        self.tracking = tracking
        self.directory = run_directory
        self.config = config
        self.facts = facts
        self._deliveries = Deliveries(
            "mlflow-forwarder", interval, (_FIRST_BACKOFF, _LONGEST_BACKOFF)
        )
        self._events = run_directory / EVENTS_FILE
        self._run_id: str | None = None
        self._offset = 0
        self._seen = SentEvents()
        self._doubt_end = 0
        self._history: dict[str, tuple[range, set[int]]] = {}
        self._error: Exception | None = None
        self._progress = 0.0
        self._closed = False

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run, None until the store has answered."""
        return self._run_id

    def poll(self) -> None:
        """Start a delivery when one is due, and return at once.

        Raises RuntimeError when no thread can start now.
        """
        waits = self._deliveries.busy or time.monotonic() < self._deliveries.due
        if waits or isinstance(self._error, _FatalError):
            return
        if self._run_id is None or self._behind():
            self._start()

    def flush(self, timeout: float = 120.0) -> str:
        """Deliver all events written to events.jsonl so far, and return the run's id.

        Raises TrackingError when the store accepted nothing for `timeout` seconds,
        WorkspaceError or FileAccessError when this host's disk refuses, and DataFormatError when
        events.jsonl is damaged.
        """
        self._progress = time.monotonic()
        # A delivery in progress may have read the file before its last events were written.
        self._join(timeout)
        while True:
            self._start()
            self._join(timeout)
            if isinstance(self._error, _FatalError):
                raise self._error.cause
            if isinstance(self._error, WorkspaceError | FileAccessError):
                raise self._error
            if self._error is None and self._run_id is not None:
                return self._run_id
            pause = self._deliveries.due - time.monotonic()
            if time.monotonic() + pause > self._progress + timeout:
                raise TrackingError(
                    f"the run's events are not all in MLflow: {self._error}"
                ) from self._error
            time.sleep(max(0.0, pause))

    def finish(self, status: RunStatus = "FINISHED", timeout: float = 120.0) -> str:
        """Flush, set the run's final status, and return its id. Raises the errors of `flush`.

        The status is also set if the events cannot be read or their offset not be written, such as
        on a full disk: a store elsewhere would show the run as running forever.
        """
        try:
            run_id = self.flush(timeout)
        except (WorkspaceError, FileAccessError, DataFormatError):
            with suppress(*STORE_ERRORS):
                sent_to = recorded_run_id(self.directory)
                if sent_to is not None:
                    end_run(self.tracking, sent_to, status)
            raise
        end_run(self.tracking, run_id, status)
        return run_id

    def _join(self, timeout: float) -> None:
        while self._deliveries.busy:
            left = self._progress + timeout - time.monotonic()
            if left <= 0:
                self._closed = True
                raise TrackingError(
                    f"MLflow took no events for {timeout:g} s: start again to send the rest"
                )
            self._deliveries.join(left)

    def _behind(self) -> bool:
        try:
            return self._events.stat().st_size > self._offset
        except OSError:  # it does not exist yet, or the file server fails
            return False

    def _start(self) -> None:
        self._closed = False
        self._deliveries.start(self._attempt)

    def _attempt(self) -> None:
        """Deliver once; a failure is stored and sets the time of the next attempt."""
        try:
            self.deliver()
        except STORE_ERRORS as error:
            if self._deliveries.failures == 0:
                _log.warning("%s; training continues, its events are sent later", error)
            self._error = error
            self._deliveries.failed()
        except Exception as error:  # a thread has no caller: flush raises it
            _log.warning(
                "MLflow gets no more of the run's events: %s: %s", type(error).__name__, error
            )
            self._error = _FatalError(error)
        else:
            self._error = None
            self._deliveries.succeeded()

    def deliver(self) -> None:
        """Send all complete events in this thread. Raises TrackingError.

        One process at a time delivers the events of a run: a flow may publish it while another one
        extends it.
        """
        path = self.directory / OFFSET_FILE
        with workspace_errors(path), lock(path, on_wait=_log.debug):
            self._deliver()

    def _deliver(self) -> None:
        if self._run_id is None:
            run_id = ensure_run(self.tracking, self.directory, self.config, self.facts)
            send_preflight(self.tracking, run_id, self.directory)
            self._restore(run_id)
        elif self._committed_offset(self._run_id) != self._offset:  # another process has sent
            self._restore(self._run_id)
        while not self._closed:
            batch = next_batch(self._events, self._offset, self._seen)
            if batch.end == self._offset:
                return
            try:
                self._send(batch)
                if not self._closed:
                    self._commit(batch)
            except STORE_ERRORS:
                # The store may have received the batch all the same, or may have lost the run.
                # The next delivery checks both.
                self._run_id = None
                raise

    def _restore(self, run_id: str) -> None:
        """Continue after the last committed delivery to this run."""
        self._offset = self._committed_offset(run_id)
        self._seen = SentEvents()
        for event, end in EventReader(self._events, kinds=CURVES, heads=CURVES):
            if end > self._offset:
                break
            identity = (event["kind"], int(event["iteration"]))
            if identity not in self._seen:
                self._seen.add(*identity)
        self._doubt_end = self._events.stat().st_size if exists(self._events) else 0
        self._history = {}
        self._run_id = run_id

    def _committed_offset(self, run_id: str) -> int:
        path = self.directory / OFFSET_FILE
        try:
            state = read_json(path)
            known = state["run_id"] == run_id and state.get("names") == _NAMES
            offset = int(state["offset"]) if known else 0
            return offset if _ends_an_event(self._events, offset) else 0
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrackingError(
                f"{path} is damaged ({reason_of(error)}): delete it, and events are compared again"
            ) from error

    def _send(self, batch: Batch) -> None:
        from mlflow.entities import Metric, RunTag
        from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

        assert self._run_id is not None
        with self.tracking.errors("take the run's events"):
            points = self._unsent(batch.points) if self._offset < self._doubt_end else batch.points
            metrics = [
                Metric(point.key, point.value, point.timestamp_ms, point.step) for point in points
            ]
            tags = [RunTag(name, value) for name, value in batch.progress.items()]
            if metrics or tags:
                self.tracking.client.log_batch(self._run_id, metrics=metrics, tags=tags)
            for event in batch.checkpoints:
                self._record_checkpoint(event)
            for name in batch.files:
                self._send_file(self.directory / name, Path(name).parent.name)
            for name in sorted(batch.tables):
                # The file has all rows: sending it again replaces them.
                self._send_file(self.directory / name)
                table = json.dumps([{"path": name, "type": "table"}])
                self.tracking.client.set_tag(self._run_id, MLFLOW_LOGGED_ARTIFACTS, table)

    def _send_file(self, path: Path, folder: str | None = None) -> None:
        """Log a file as an artifact of the run, in `folder` if it is not None.

        A file that no longer exists is left out.
        """
        assert self._run_id is not None
        if is_file(path):
            self.tracking.client.log_artifact(self._run_id, str(path), folder)
        else:
            _log.warning("%s is not there any more: MLflow does not get it", path)

    def _unsent(self, points: list[Point]) -> list[Point]:
        """Return the points whose (metric, step) the store lacked when deliveries to it began."""
        steps: dict[str, list[int]] = {}
        for point in points:
            steps.setdefault(point.key, []).append(point.step)
        stored = {key: self._stored(key, min(each), max(each)) for key, each in steps.items()}
        return [point for point in points if point.step not in stored[point.key]]

    def _stored(self, key: str, first: int, last: int) -> set[int]:
        """Return the steps of a metric from `first` to `last` that the store has.

        The whole history of a metric is read only if these are too many for one answer: that of a
        month takes the store minutes and gigabytes.
        """
        known, stored = self._history.get(key, (range(0), set()))
        if first in known and last in known:
            return stored
        assert self._run_id is not None
        ahead = range(first, last + 1 + _BATCHES_AHEAD * (last + 1 - first))
        for part in (ahead, range(first, last + 1)):
            found = stored_steps(self.tracking, self._run_id, key, part)
            self._progress = time.monotonic()
            if found is not None:
                self._history[key] = part, found
                return found
        history = self.tracking.client.get_metric_history(self._run_id, key)
        self._progress = time.monotonic()  # a long history takes minutes
        found = {metric.step for metric in history}
        self._history[key] = _ALL_STEPS, found
        return found

    def _record_checkpoint(self, event: Mapping[str, Any]) -> None:
        assert self._run_id is not None
        if event["kind"] == "checkpoint":
            ensure_checkpoint_model(
                self.tracking,
                self._run_id,
                self.config.name,
                event,
                self.directory,
                self.facts.datasets,
            )
        elif event["kind"] == "perplexity":
            log_checkpoint_perplexity(self.tracking, self._run_id, event, self.facts.datasets)
        else:
            mark_deleted(self.tracking, self._run_id, int(event["iteration"]))

    def _commit(self, batch: Batch) -> None:
        state = {"run_id": self._run_id, "offset": batch.end, "names": _NAMES}
        write_json(self.directory / OFFSET_FILE, state)
        self._offset = batch.end
        self._progress = time.monotonic()
        for kind, iteration in sorted(batch.seen):
            self._seen.add(kind, iteration)
        if self._offset >= self._doubt_end:
            self._history = {}


def _ends_an_event(events: Path, offset: int) -> bool:
    """Return True if an event ends at `offset`.

    False means that the file lost its end, such as after a crash of the host. Then all events are
    compared again.
    """
    if offset == 0:
        return True
    with open(events, "rb") as file:
        file.seek(offset - 1)
        return file.read(1) == b"\n"


class _FatalError(Exception):
    """A failure that no later attempt can fix."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause
