"""Recorder of a run: events, log lines and TensorBoard files."""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from megacore.artifact.files import naming, workspace_errors
from megacore.artifact.workspace import EVENTS_FILE
from megacore.errors import ConfigError
from megacore.observe.events import EventReader, EventWriter
from megacore.observe.logging import (
    StepReport,
    display_name,
    logger,
    perplexity,
    perplexity_line,
    source_line,
    step_line,
    time_line,
    validation_line,
)

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Recorder:
    """Recorder that writes on rank 0 and does nothing on the others.

    The training loop can call it on every rank.
    """

    def __init__(self, run_directory: Path, *, attempt: int, rank: int, tensorboard: bool) -> None:
        """Open `events.jsonl` and, if requested, `tensorboard/` of a run directory.

        Raises:
            ConfigError: TensorBoard files are requested, but the package is missing.
            WorkspaceError: the directory is not writable.
        """
        writes = rank == 0
        self._path = run_directory / EVENTS_FILE
        self._events = EventWriter(self._path, attempt) if writes else None
        self._board = (
            TensorBoardWriter(run_directory / "tensorboard") if writes and tensorboard else None
        )

    def event(self, kind: str, **values: Any) -> None:
        """Write one event; a `start` has the iteration after which the attempt begins."""
        if self._events:
            self._events.write(kind, **values)
        if self._board and kind == "start":
            self._board.begin(values["iteration"])

    def reported_checkpoints(self) -> dict[int, str]:
        """Return the paths of existing checkpoints by iteration, from the events (rank 0 only)."""
        checkpoints: dict[int, str] = {}
        if self._events:
            kinds = ("checkpoint", "checkpoint_deleted")
            for event, _ in EventReader(self._path, kinds=kinds):
                if event["kind"] == "checkpoint":
                    checkpoints[int(event["iteration"])] = str(event["path"])
                else:
                    checkpoints.pop(int(event["iteration"]), None)
        return checkpoints

    def validation_losses(self) -> dict[int, float]:
        """Return the finite `valid_loss` of each measured iteration (rank 0 only)."""
        if not self._events:
            return {}
        return {
            int(event["iteration"]): float(event["valid_loss"])
            for event, _ in EventReader(self._path, kinds=("perplexity",))
            if isinstance(event["valid_loss"], int | float)
        }

    def measured_at(self, iteration: int) -> frozenset[str]:
        """Return which of evaluation and perplexity an iteration has (rank 0 only)."""
        if not self._events:
            return frozenset()
        return frozenset(
            str(event["kind"])
            for event, _ in EventReader(self._path, kinds=("evaluation", "perplexity"))
            if event["iteration"] == iteration
        )

    def warning(self, message: str) -> None:
        """Log a warning and write it as an event."""
        if self._events:
            logger.warning(message)
            self._events.write("warning", message=message)

    def step(self, report: StepReport, milliseconds: Mapping[str, float]) -> None:
        """Record the means of one log interval, and this rank's time per iteration by phase."""
        if not self._events:
            return
        logger.info(step_line(report))
        if report.by_source:
            logger.info(source_line("estimated training loss", report.by_source))
        logger.info(time_line(milliseconds))
        self._events.write("step", **report.event, phase_ms=dict(milliseconds))
        if self._board:
            values = {
                "lm loss": report.lm_loss,
                **{display_name(name): loss for name, loss in report.further_losses.items()},
                "learning-rate": report.lr,
                "grad-norm": report.grad_norm,
                "loss-scale": report.loss_scale,
                "iteration-time": report.ms_per_iteration / 1000.0,
                "tokens-per-second": report.tokens_per_second,
                "mfu": report.mfu,
                "mfu-measured": report.mfu_measured,
            }
            self._board.scalars(values, report.iteration)

    def evaluation(
        self,
        iteration: int,
        losses: Mapping[str, float],
        *,
        samples: int,
        consumed_samples: int,
        consumed_tokens: int,
        by_source: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Record one validation; `losses` are by name, `lm_loss` first.

        `by_source` has source, loss and tokens of each source of a blend.
        """
        if not self._events:
            return
        line = validation_line(iteration, losses)
        logger.info("-" * len(line))
        logger.info(line)
        logger.info("-" * len(line))
        if by_source:
            logger.info(source_line("validation loss", by_source))
        self._events.write(
            "evaluation",
            iteration=iteration,
            consumed_samples=consumed_samples,
            consumed_tokens=consumed_tokens,
            **losses,
            samples=samples,
            **_by_source(by_source),
        )
        if self._board:
            tags = {f"{display_name(name)} validation": loss for name, loss in losses.items()}
            ppl = perplexity(losses["lm_loss"])
            self._board.scalars(tags | {"lm loss validation ppl": ppl}, iteration)

    def perplexity(
        self,
        iteration: int,
        loss: float,
        *,
        samples: int,
        seconds: float,
        consumed_samples: int,
        consumed_tokens: int,
        by_position: Sequence[Mapping[str, float | None]] = (),
        by_source: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Record `valid_loss` and `valid_ppl` of the weights after an iteration.

        `by_position` has start, loss and tokens of each range of positions, `by_source` has source,
        loss and tokens of each source of a blend.
        """
        if not self._events:
            return
        ppl = perplexity(loss)
        logger.info(perplexity_line(iteration, loss, samples=samples, seconds=seconds))
        if by_source:
            logger.info(source_line("valid_loss", by_source))
        self._events.write(
            "perplexity",
            iteration=iteration,
            consumed_samples=consumed_samples,
            consumed_tokens=consumed_tokens,
            valid_loss=loss,
            valid_ppl=ppl,
            samples=samples,
            seconds=seconds,
            by_position=by_position,
            **_by_source(by_source),
        )
        if self._board:
            self._board.scalars({"valid_loss": loss, "valid_ppl": ppl}, iteration)

    def close(self) -> None:
        """Close the files."""
        if self._events:
            self._events.close()
        if self._board:
            self._board.close()

    def __enter__(self) -> Self:
        """Return the recorder."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self.close()


def _by_source(losses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the field of an event with losses by source; none for a single source."""
    if not losses:
        return {}
    rows = [
        {**each, "loss": each["loss"] if math.isfinite(each["loss"]) else None} for each in losses
    ]
    return {"by_source": rows}


def check_tensorboard() -> None:
    """Raise ConfigError if the package for `tracking.tensorboard` is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "tracking.tensorboard is true and the package tensorboard is not installed: "
            "install megacore with its extra, `pip install -e .[tensorboard]`, or set it to false"
        )


def check_wandb() -> None:
    """Raise ConfigError if the package for `tracking.wandb` is missing."""
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "tracking.wandb is given and the package wandb is not installed: install megacore with "
            "its extra, `pip install -e .[wandb]`, or remove it"
        )


class TensorBoardWriter:
    """Writer of scalars by iteration, with the tags of Megatron-LM."""

    def __init__(self, directory: Path) -> None:
        """Prepare to write into `directory`; the first values create the file.

        Raises ConfigError if the package is missing.
        """
        check_tensorboard()
        self._directory = directory
        self._writer: SummaryWriter | None = None
        self._purge_step = 0

    def begin(self, iteration: int) -> None:
        """Let new files hide what earlier ones have of iterations after this one."""
        self._purge_step = iteration + 1

    def scalars(self, values: Mapping[str, float | None], iteration: int) -> None:
        """Write values by tag; skip None.

        Raises WorkspaceError or FileAccessError, also for values of an earlier call.
        """
        from torch.utils.tensorboard import SummaryWriter

        with workspace_errors(self._directory), naming(self._directory):
            if self._writer is None:
                self._writer = SummaryWriter(str(self._directory), purge_step=self._purge_step)
            for tag, value in values.items():
                if value is not None:
                    self._writer.add_scalar(tag, value, iteration)
            self._writer.flush()

    def close(self) -> None:
        """Close the file. Raises WorkspaceError or FileAccessError if the last write fails."""
        if self._writer is not None:
            with workspace_errors(self._directory), naming(self._directory):
                self._writer.close()
