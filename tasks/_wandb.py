"""Forwarding of a training's events to Weights & Biases.

Row n of the wandb run is the n-th event in `events.jsonl` that is a point of a curve, the first for
each (kind, iteration), with MLflow's names. A resumed online run continues after the rows that the
server has, a resumed offline run after those of `wandb.json` in the run directory. Training never
waits: deliveries run in a thread, and failed ones are tried again later, with one warning.
"""

import logging
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.artifact.files import read_json, write_json
from megacore.artifact.workspace import EVENTS_FILE
from megacore.config.train import WandbConfig
from megacore.errors import TrackingError
from megacore.observe.events import EventReader
from megacore.redact import redact, redact_values
from tasks._flow_config import FlowConfig
from tasks._mlflow_events import BY_TOKENS, CURVES, Deliveries, SentEvents, points_of

if TYPE_CHECKING:
    from wandb import Run

STATE_FILE = "wandb.json"
"""Name of the file in the run directory with the wandb run's id and the number of its rows."""
_STEPS = ("iteration", "consumed_tokens")
"""Columns by which curves are drawn: the first by default."""
_ROWS = ("step",)
"""Kinds of events each of which is a row, because it has values that are never null."""
_INTERVAL = 2.0
_FIRST_BACKOFF = 5.0
_LONGEST_BACKOFF = 300.0
_INIT_TIMEOUT = 60.0
_FINISH_TIMEOUT = 15.0
_LONGEST_STOP = 20.0
"""Seconds that an ending attempt waits for the last rows."""
_log = logging.getLogger("prefect.megacore")


def row_of(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of an event by MLflow's names; empty if it is no point of a curve."""
    if event["kind"] not in CURVES:
        return {}
    points = points_of(event)
    values = {point.key: point.value for point in points if not point.key.endswith(BY_TOKENS)}
    steps = {name: event[name] for name in _STEPS if name in event}
    return steps | values if values else {}


class WandbRun:
    """Sender of a run directory's events to its wandb run."""

    def __init__(
        self,
        settings: WandbConfig,
        run_directory: Path,
        config: FlowConfig,
        *,
        interval: float = _INTERVAL,
    ) -> None:
        """Initialize the sender without reading or sending anything.

        Deliveries are at least `interval` seconds apart.
        """
        self._settings = settings
        self._directory = run_directory
        self._config = config
        self._deliveries = Deliveries(
            "wandb-forwarder", interval, (_FIRST_BACKOFF, _LONGEST_BACKOFF)
        )
        self._run: Run | None = None
        self._warned = False
        self._restart()

    def poll(self) -> None:
        """Start a delivery when one is due, and return at once.

        Raises RuntimeError when no thread can start now.
        """
        if not self._deliveries.busy and time.monotonic() >= self._deliveries.due:
            self._deliveries.start(self._attempt)

    def finish(self, *, failed: bool = False) -> None:
        """Deliver the last events and end the attempt; wait a limited time and never raise."""
        end = time.monotonic() + _LONGEST_STOP
        self._deliveries.join(_LONGEST_STOP)
        if not self._deliveries.busy:
            try:
                self._deliveries.start(lambda: self._finish(failed))
            except RuntimeError as error:  # no thread can start now
                self._warn(str(error))
            self._deliveries.join(max(0.0, end - time.monotonic()))
        if self._deliveries.busy:
            self._warn("it did not take the last rows in time")

    def _restart(self) -> None:
        """Read the events from the beginning: rows that were sent are only counted."""
        self._offset = self._number = self._next = 0
        self._seen = SentEvents()

    def _attempt(self) -> None:
        try:
            self._deliver()
        except Exception as error:  # tracking must not end a training
            self._warn(f"{type(error).__name__}: {error}")
            self._close(failed=True)
            self._deliveries.failed()
        else:
            self._deliveries.succeeded()

    def _finish(self, failed: bool) -> None:
        self._attempt()
        self._close(failed=failed)
        with suppress(Exception):
            import wandb

            # Its service writes files after a run's end, and may be killed with this process.
            wandb.teardown()

    def _close(self, *, failed: bool) -> None:
        run, self._run = self._run, None
        if run is not None:
            with suppress(Exception):
                run.finish(exit_code=int(failed))

    def _warn(self, reason: str) -> None:
        """Log one warning per attempt."""
        if not self._warned:
            self._warned = True
            _log.warning("wandb: %s; training continues, and rows are sent later", redact(reason))

    def _deliver(self) -> None:
        """Send all complete events in this thread."""
        if self._run is None:
            self._restart()
            self._run = self._open()
        sent = self._next
        self._count_sent()
        try:
            for event, end in EventReader(self._directory / EVENTS_FILE, self._offset):
                if self._is_new(event) and (row := row_of(event)):
                    self._run.log(row, step=self._number, commit=True)
                    self._next = self._number + 1
                    self._count(event)
                self._offset = end
        finally:
            if self._next != sent:
                write_json(self._state, {"run_id": self._run.id, "rows": self._next})

    def _count_sent(self) -> None:
        """Pass over the rows that were sent; each step is one, of which only the head is read."""
        events = EventReader(self._directory / EVENTS_FILE, self._offset, kinds=CURVES, heads=_ROWS)
        for event, end in events:
            if self._number >= self._next:
                return
            if self._is_new(event) and (event["kind"] in _ROWS or row_of(event)):
                self._count(event)
            self._offset = end

    def _is_new(self, event: Mapping[str, Any]) -> bool:
        return (event["kind"], int(event.get("iteration") or 0)) not in self._seen

    def _count(self, event: Mapping[str, Any]) -> None:
        self._number += 1
        self._seen.add(event["kind"], int(event.get("iteration") or 0))

    @property
    def _state(self) -> Path:
        return self._directory / STATE_FILE

    def _open(self) -> "Run":
        """Create or continue the wandb run. Raises TrackingError without an API key."""
        import wandb

        settings = self._settings
        online = settings.mode == "online"
        if online and not wandb.login(prompt=False):
            raise TrackingError(
                "there is no API key: set WANDB_API_KEY or run `wandb login`, or set "
                "tracking.wandb.mode to offline"
            )
        try:
            state = read_json(self._state)
        except FileNotFoundError:
            state = {"run_id": secrets.token_hex(8), "rows": 0}
            write_json(self._state, state)
        tracking = self._config.tracking
        run = wandb.init(
            project=settings.project or tracking.experiment,
            entity=settings.entity,
            name=settings.name or f"{self._config.name}-{self._directory.name[:8]}",
            tags=list(settings.tags),
            id=str(state["run_id"]),
            resume="allow" if online else None,
            mode=settings.mode,
            dir=str(self._directory),
            config=redact_values(self._config.model_dump(mode="json")),
            reinit="create_new",
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_job_creation=True,
                save_code=False,
                x_disable_meta=True,  # it contains the command and the user's name
                x_disable_stats=not tracking.system_metrics,
                init_timeout=_INIT_TIMEOUT,
                finish_timeout=_FINISH_TIMEOUT,
            ),
        )
        run.define_metric("*", step_metric=_STEPS[0])
        self._next = int(run.step) if online else int(state["rows"])
        return run
