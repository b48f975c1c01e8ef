"""One run of a flow: its configuration, its stages in order, and the final table."""

import functools
import json
import logging
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, ParamSpec, Self, TypeVar

import yaml
from prefect import State, Task, get_run_logger
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.context import FlowRunContext
from prefect.logging.handlers import APILogWorker
from prefect.states import Cancelled, Failed
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from megacore.artifact import Artifact
from megacore.artifact.files import access_error
from megacore.config.finetune import FinetuneConfig
from megacore.config.load import name_of
from megacore.errors import MegacoreError, TrainingStoppedError
from megacore.observe.logging import output_fault
from megacore.redact import redact, redact_values
from tasks._cache import StageResult, summarize
from tasks._flow_config import FlowConfig
from tasks._form import all_overrides
from tasks._logging import CountedRetries, shown_in_prefect
from tasks._retry import retry_delays
from tasks._temporary_server import note_ended

_log = logging.getLogger("prefect.megacore")

DELETED = "Deleted"
"""Name of the state of a task run whose checkpoint was deleted before the stage was done."""
Config = TypeVar("Config", bound=FlowConfig)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Share = Callable[[Any, Sequence[tuple[Any, ...]]], tuple[int, Sequence[Any]]]
"""Function of a configuration and the inputs of several task runs that returns how many of them run
side by side, and the configuration of each."""


@dataclass(frozen=True)
class StageRow:
    """One row of the final table."""

    stage: str
    outcome: str
    """One of ran, cached, failed, stopped and deleted."""
    seconds: float
    key: str
    """Name of the artifact's directory, by which commands find it; "-" without an artifact."""
    counts: dict[str, Any]

    def cells(self) -> dict[str, str]:
        """Return the row as text by column."""
        return {
            "stage": self.stage,
            "outcome": self.outcome,
            "seconds": f"{self.seconds:.1f}",
            "key": self.key,
            "counts": summarize(self.counts),
        }


@dataclass
class StageRunner(Generic[Config]):
    """Runner of stages that records the outcome of each.

    A dry run calls the same functions of a flow with a `tasks._plan.DryRun`, for which artifacts
    may be missing. What these functions do with artifacts between the stages goes through `value`
    and `report`.
    """

    config: Config
    rows: list[StageRow] = field(default_factory=list)
    summary: str = ""
    """Markdown that is shown below the table and stored with the flow run."""
    contamination: Artifact | None = None
    """Shares of contaminated items; None without `evaluate.contamination`."""
    ended: State[Any] | None = None
    """Return value of the flow: the state of a run whose training was stopped on request, otherwise
    None."""
    _runs: Counter[str] = field(default_factory=Counter, init=False)
    """Number of runs of each stage that is numbered."""

    @classmethod
    def start(cls, config: Config) -> Self:
        """Store the merged configuration as an artifact of the flow run, and return its runner."""
        store_config(config)
        return cls(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Show the table, which after a failure contains the finished stages and the failed one.

        A training that was stopped on request has not failed: the flow ends in the state `ended`.
        """
        if self.rows and (error is None or isinstance(error, Exception)):
            self._report()
        if isinstance(error, TrainingStoppedError):
            self.ended = stopped(error, self.config)
        return self.ended is not None

    def stage(self, task: Task[..., StageResult], *inputs: Any) -> Artifact:
        """Run one stage with the configured retries; if it fails, the flow fails."""
        result = self._record(self._next_name(task.name), *self._call(task, self.config, inputs))
        assert result is not None, f"{task.name} ended in the state {DELETED}"
        return result.artifact

    def stages(
        self,
        task: Task[..., StageResult],
        inputs: Sequence[tuple[Any, ...]],
        *,
        at_once: int = 1,
        share: Share | None = None,
    ) -> tuple[Artifact, ...]:
        """Run one stage for each of several inputs side by side, in one task run each.

        If one fails, the others are finished first, so that the next run reuses them; then the
        error of the first input that failed fails the flow. An interruption does not wait for them.
        `at_once` of them run at the same time, all with the flow's configuration, unless `share`
        decides both.
        """
        if len(inputs) == 1:
            return (self.stage(task, *inputs[0]),)
        configs: Sequence[Config] = [self.config] * len(inputs)
        if share is not None:
            at_once, configs = share(self.config, inputs)
        names = [self._next_name(task.name) for _ in inputs]
        pool = ThreadPoolExecutor(at_once, f"megacore-{task.name}")
        try:
            # Each thread has its own copy of the context, with the flow run that Prefect reads.
            futures = [
                pool.submit(copy_context().run, self._call, task, config, arguments)
                for config, arguments in zip(configs, inputs, strict=True)
            ]
            ended = [future.result() for future in futures]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        results, errors = [], []
        for name, (state, seconds) in zip(names, ended, strict=True):
            try:
                results.append(self._record(name, state, seconds))
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return tuple(result.artifact for result in results if result is not None)

    def checkpoint_stage(
        self, task: Task[..., Any], checkpoint: str, *inputs: Any
    ) -> StageResult | None:
        """Run a stage for one checkpoint, in a task run and a row with the checkpoint's name.

        Returns None if the checkpoint was deleted before the stage was done.
        """
        name = f"{task.name} {checkpoint}"
        named = task.with_options(task_run_name=name)
        return self._record(name, *self._call(named, self.config, inputs))

    def value(self, function: Callable[..., Result], *artifacts: Artifact) -> Result:
        """Return `function(config, *artifacts)`, an input of a stage that is no artifact."""
        return function(self.config, *artifacts)

    def report(self, function: Callable[..., str | None], *artifacts: Artifact) -> None:
        """Call `function(config, *artifacts)`, and add the markdown it returns to the summary."""
        self.summary += function(self.config, *artifacts) or ""

    def _call(
        self, task: Task[..., Any], config: Config, inputs: tuple[Any, ...]
    ) -> tuple[State[StageResult], float]:
        """Run a task with the configured retries; return its final state and its seconds."""
        launch = self.config.launch
        counts = isinstance(task.retries, CountedRetries)
        retries = CountedRetries(launch.retries) if counts else launch.retries
        delays = [] if counts else retry_delays(launch)  # a training waits by itself
        configured = task.with_options(retries=retries, retry_delay_seconds=delays)
        started = time.monotonic()
        state: State[StageResult] = configured(config, *inputs, return_state=True)  # type: ignore[assignment]
        note_ended(state.state_details.task_run_id)
        return state, time.monotonic() - started

    def _record(self, name: str, state: State[StageResult], seconds: float) -> StageResult | None:
        """Add the row of a task that ended, and return its result. Raises the task's error."""
        if not state.is_completed():
            stopped = isinstance(state.result(raise_on_failure=False), TrainingStoppedError)
            self.rows.append(StageRow(name, "stopped" if stopped else "failed", seconds, "-", {}))
            state.result()
        if state.name == DELETED:
            self.rows.append(StageRow(name, "deleted", seconds, "-", {}))
            return None
        result = state.result()
        artifact, ran = result.artifact, result.ran and state.name != "Cached"
        self.rows.append(
            StageRow(name, "ran" if ran else "cached", seconds, artifact.name, artifact.counts)
        )
        return StageResult(artifact=artifact, ran=ran)

    def _next_name(self, stage: str) -> str:
        """Return the name of the stage's next run."""
        self._runs[stage] += 1
        return numbered(stage, self._runs[stage] - 1)

    def _report(self) -> None:
        cells = [row.cells() for row in self.rows]
        console = Output()
        table = Table(title=f"stages of {self.config.name}")
        for column in cells[0]:
            table.add_column(column, overflow="fold", no_wrap=column in ("stage", "outcome", "key"))
        for row in cells:
            table.add_row(*row.values())
        console.print(table)
        if self.summary:
            console.print(Markdown(self.summary))
        with shown_in_prefect("the table of stages"):
            create_table_artifact(cells, key="stages", description=f"stages of {self.config.name}")
            if self.summary:
                create_markdown_artifact(
                    self.summary, key="summary", description=f"outcome of {self.config.name}"
                )


class Output(Console):
    """Console on standard output that ends no flow if that was closed or cannot be written."""

    def __init__(self) -> None:
        super().__init__(width=None if sys.stdout.isatty() else 160)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, or warn if it cannot be written."""
        try:
            super().print(*objects, **options)
        except OSError as error:
            self.quiet = True
            _log.warning(output_fault(error) or str(error))

    def print_text(self, text: str) -> None:
        """Print text as it is, without wrapping and colors."""
        self.print(text, soft_wrap=True, highlight=False, markup=False)

    def on_broken_pipe(self) -> None:
        """Print no more. Rich would end the process."""
        self.quiet = True


def summary_table(titles: Sequence[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a markdown table; all columns but the first are right-aligned."""
    ruler = ["---", *["---:"] * (len(titles) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (titles, ruler, *rows)]


def store_config(config: FlowConfig) -> None:
    """Store a merged configuration, with all defaults, as an artifact of the flow run."""
    text = yaml.safe_dump(redact_values(config.model_dump(mode="json")), sort_keys=False)
    create_markdown_artifact(
        f"```yaml\n{text}```\n", key="config", description=f"merged config of {config.name}"
    )


def stopped(error: TrainingStoppedError, config: FlowConfig) -> State[Any]:
    """Return the state of a flow run whose training was stopped: neither completed nor failed.

    Its result is the error.
    """
    command = resume_command(config)
    return Cancelled(
        name="Stopped", message=f"{error}: {command}" if command else str(error), data=error
    )


def sentence_state(
    function: Callable[Parameters, Result],
) -> Callable[Parameters, Result | State[Any]]:
    """Make a user error the message of the flow run's state, as one sentence.

    The error is logged, and sent to the server before the state, after which nobody reads logs.
    """

    @functools.wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result | State[Any]:
        try:
            return function(*args, **kwargs)
        except (MegacoreError, OSError) as failure:
            error = access_error(failure) if isinstance(failure, OSError) else failure
            if error is None:
                raise
            log = get_run_logger()
            log.error("%s: %s", type(error).__name__, error)
            _send_logs()
            state: State[Any] = Failed(message=f"{type(error).__name__}: {error}", data=error)
            state.state_details.retriable = False
            return state

    return run


def _send_logs() -> None:
    """Send the log lines that wait for their batch, for at most Prefect's 5 s."""
    APILogWorker.drain_all(timeout=5)


def run_name() -> str:
    """Return the name of the current flow run: flow, configuration, and a switch that is on.

    A configuration given as a path is named by its stem, like a file without `name`.
    """
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow is not None
    parameters = context.parameters or {}
    switches = [name.replace("_", "-") for name, value in parameters.items() if value is True]
    conf = str(parameters["conf"])
    path = Path(conf if conf.endswith((".yaml", ".yml")) else f"{conf}.yaml")
    return "-".join([context.flow.name, name_of(path), *switches])


def resume_command(config: FlowConfig) -> str | None:
    """Return the command line that resumes the current flow run, without its secrets.

    It names the version of a registered model with which the run began: an alias may have been
    moved when somebody runs the command. None outside of a flow run.
    """
    context = FlowRunContext.get()
    if context is None or context.flow is None:
        return None
    parameters = context.parameters or {}
    words = [
        "python",
        "-m",
        f"flows.{context.flow.name.replace('-', '_')}",
        "--conf",
        str(parameters["conf"]),
    ]
    overrides = dict(all_overrides(parameters) or {})
    if isinstance(config, FinetuneConfig) and config.model.path.startswith("models:/"):
        overrides["model.path"] = config.model.path
    for key, value in redact_values(overrides).items():
        words += ["-o", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    words += [f"--{name.replace('_', '-')}" for name, value in parameters.items() if value is True]
    return redact(shlex.join(words))


def numbered(stage: str, number: int) -> str:
    """Return the name of a stage's run for the source with this number: collect, collect 2, ….

    Numbers count from 0.
    """
    return f"{stage} {number + 1}" if number else stage
