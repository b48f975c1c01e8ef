"""The MLflow run of a training from its start to its end.

It receives the events and measurements of the machine, is linked in Prefect, and gets the reason
why the attempt ended.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path
from typing import TYPE_CHECKING, Self

from prefect import get_run_logger
from prefect.artifacts import create_link_artifact

from megacore.artifact.workspace import EVENTS_FILE
from megacore.errors import TrainingStoppedError
from megacore.jobs.finetune import FinetuneJob
from megacore.jobs.run import TrainJob
from megacore.observe.events import EventReader
from megacore.observe.recorder import check_wandb
from tasks._logging import shown_in_prefect
from tasks._mlflow import RunFacts, RunStatus, Tracking
from tasks._mlflow_events import Forwarder
from tasks._monitor import TrainingMonitor
from tasks._publication import run_url, shown_by
from tasks._run_page import update_run_page
from tasks._wandb import WandbRun

if TYPE_CHECKING:
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

INTERVAL = 10.0
"""Seconds between two measurements of the machine."""
DENSE_SECONDS = 600.0
"""Seconds of an attempt in which MLflow gets each measurement; later it gets their means."""
AVERAGED = 6
"""Number of measurements in a mean. A month of single ones of 48 values, those of a host with eight
GPUs, would be 12 million rows."""
FINAL_FLUSH = 60.0
"""Seconds that a finished training waits for MLflow."""
EXIT_TAG = "megacore.exit_reason"
"""Tag of the MLflow run: the reason why its last attempt ended."""
STOP_FLUSH = 5.0
"""Seconds that a failed or stopped training waits for MLflow."""
_LONGEST_STOP = 2.0
"""Seconds that an ending attempt waits for the last measurements."""
_LOGGER = "mlflow.system_metrics.system_metrics_monitor"


class LiveRun:
    """Sender of an attempt's events that also links the run and measures the machine.

    Like the forwarder it never makes the training wait or fail.
    """

    def __init__(self, forwarder: Forwarder, attempt: int) -> None:
        """Initialize it without sending anything. Raises ConfigError without wandb."""
        self._forwarder = forwarder
        self._attempt = attempt
        options = forwarder.config.tracking
        self._wandb: WandbRun | None = None
        if options.wandb is not None:
            check_wandb()
            self._wandb = WandbRun(options.wandb, forwarder.directory, forwarder.config)
        self._metrics = SystemMetrics(forwarder.tracking.uri) if options.system_metrics else None
        self._linked = False
        self._warned = False

    def poll(self) -> None:
        """Send the events since the last call; begin to measure when the run exists."""
        try:
            self._poll()
        except RuntimeError as error:  # no thread can start now: the next poll tries again
            if not self._warned:
                get_run_logger().warning("MLflow gets no events now: %s", error)
            self._warned = True

    def _poll(self) -> None:
        self._forwarder.poll()
        if self._wandb is not None:
            self._wandb.poll()
        run_id = self._forwarder.run_id
        if run_id is None:
            return
        if self._metrics is not None:
            self._metrics.poll(run_id)
        if not self._linked:
            # A thread with the context of the task run, to which the link belongs.
            arguments = (_link, self._forwarder.tracking, run_id)
            threading.Thread(target=copy_context().run, args=arguments, daemon=True).start()
            self._linked = True

    def __enter__(self) -> Self:
        """Return the run."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the measurements and the attempt's wandb run."""
        if self._wandb is not None:
            self._wandb.finish(failed=error is not None)
        if self._metrics is not None:
            self._metrics.stop()

    def report_end(self, error: BaseException | None) -> None:
        """Report to MLflow how the attempt ended; what it lacks is sent later."""
        status: RunStatus = "FINISHED"
        if error is not None:
            failed = isinstance(error, Exception) and not isinstance(error, TrainingStoppedError)
            status = "FAILED" if failed else "KILLED"
        forwarder, tracking = self._forwarder, self._forwarder.tracking
        try:
            run_id = forwarder.finish(status, FINAL_FLUSH if error is None else STOP_FLUSH)
            reason = exit_reason(forwarder.directory / EVENTS_FILE, self._attempt, error)
            with tracking.errors("take why the run ended"):
                tracking.client.set_tag(run_id, EXIT_TAG, reason)
            update_run_page(tracking, run_id, forwarder.directory, forwarder.facts, ending=reason)
        except Exception as failure:
            # a failed report must neither hide the training's error nor fail a finished training
            get_run_logger().warning(
                "%s; the next attempt or publication sends what MLflow lacks", failure
            )


@contextmanager
def watched(
    job: TrainJob | FinetuneJob, facts: RunFacts, iterations: int | None, label: str = "training"
) -> Iterator[Callable[[], None]]:
    """Show the training in the body in MLflow and Prefect, and report how it ended.

    Yields a function to call a few times a second. `iterations` is the last iteration; None if the
    events tell it.
    """
    config, directory = job.config, Path(job.run_directory)
    live = LiveRun(Forwarder(Tracking.of(config), directory, config, facts), job.attempt)
    events = directory / EVENTS_FILE
    monitor = TrainingMonitor(job.attempt_log, events, iterations, live.poll, label=label)
    try:
        with live, monitor:
            yield monitor.poll
            monitor.poll()
    except BaseException as error:
        live.report_end(error)
        raise
    live.report_end(None)


def exit_reason(events: Path, attempt: int, error: BaseException | None) -> str:
    """Return the reason why an attempt ended, by an error unless `error` is None.

    It is the reason in the `exit` event of the attempt's ranks, otherwise the name of the error. A
    cancellation or a signal to this process reaches the ranks as a signal. They report it if they
    could save.
    """
    if isinstance(error, Exception) and not isinstance(error, TrainingStoppedError):
        return type(error).__name__  # the ranks may have finished before the error
    for event in EventReader(events, kinds=("exit",)).newest_first():
        if event["attempt"] == attempt:
            return str(event["reason"])
    return "finished" if error is None else type(error).__name__


class SystemMetrics:
    """MLflow's own measurements of this host, as the metrics `system/…` of a run.

    MLflow's monitor ends when the store does not answer, and is then started again. All of its
    calls are made in threads. An attempt continues the curves of the one before. After
    DENSE_SECONDS the values are means, unless MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING is set.
    """

    def __init__(self, tracking_uri: str, *, interval: float | None = None) -> None:
        """Initialize it without measuring; `interval` is in seconds, None means INTERVAL."""
        self._uri = tracking_uri
        self._interval = INTERVAL if interval is None else interval
        self._monitor: SystemMetricsMonitor | None = None
        self._starter: threading.Thread | None = None
        self._due = 0.0
        self._begun = time.monotonic()
        # What it logs about an outage could contain the store's password.
        logging.getLogger(_LOGGER).setLevel(logging.CRITICAL)

    @property
    def measures(self) -> bool:
        """True while MLflow's monitor runs."""
        thread = None if self._monitor is None else self._monitor._process
        return thread is not None and thread.is_alive()

    def poll(self, run_id: str) -> None:
        """Start the monitor if it does not run, at most once per interval; return at once."""
        if self._monitor is not None and time.monotonic() > self._begun + DENSE_SECONDS:
            _average(self._monitor)
        starting = self._starter is not None and self._starter.is_alive()
        if starting or time.monotonic() < self._due or self.measures:
            return
        self._due = time.monotonic() + self._interval
        self._starter = threading.Thread(target=self._start, args=(run_id,), daemon=True)
        self._starter.start()

    def stop(self) -> None:
        """End the monitor, and wait at most _LONGEST_STOP seconds for its last measurements."""
        ending = threading.Thread(target=self._finish, daemon=True)
        ending.start()
        ending.join(_LONGEST_STOP)

    def _start(self, run_id: str) -> None:
        from mlflow.exceptions import MlflowException
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
        from sqlalchemy.exc import SQLAlchemyError

        try:
            self._monitor = SystemMetricsMonitor(
                run_id,
                sampling_interval=self._interval,
                resume_logging=True,
                tracking_uri=self._uri,
            )
            self._monitor.start()
        except (MlflowException, SQLAlchemyError, OSError):
            self._monitor = None  # the next poll tries again

    def _finish(self) -> None:
        if self._starter is not None:
            self._starter.join()
        if self._monitor is not None:
            self._monitor.finish()


def _average(monitor: "SystemMetricsMonitor") -> None:
    """Let a monitor send means of AVERAGED measurements, unless the environment has a number."""
    from mlflow.environment_variables import MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING

    if not MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING.is_set():
        monitor.samples_before_logging = AVERAGED


def _link(tracking: Tracking, run_id: str) -> None:
    """Link the run's page in the flow run, if a server shows it."""
    with shown_in_prefect("the link to the MLflow run"):
        server = shown_by(tracking)
        if server is not None:
            page = run_url(tracking, server, run_id)
            create_link_artifact(link=page, link_text="MLflow run", key="mlflow-run")
