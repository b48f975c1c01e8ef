"""History of a run, read from its events: attempts, curves, checkpoints and warnings."""

import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from megacore.observe.events import EventReader, Iterations
from tasks._plots import Curve

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

CURVES = {
    "step": {
        "train_loss": "lm_loss",
        "lr": "lr",
        "grad_norm": "grad_norm",
        "tokens_per_second": "tokens_per_second",
        "mfu": "mfu",
        "mfu_measured": "mfu_measured",
    },
    "evaluation": {"valid_loss": "lm_loss"},
    "perplexity": {"valid_ppl": "valid_ppl"},
}
"""Names of the curves and the fields of their events, by kind of event."""
_KIND_OF = {name: kind for kind, fields in CURVES.items() for name in fields}

_TOTAL = "total"
_COMPUTATION = ("forward-compute", "backward-compute", "forward-backward", "optimizer")
"""Phases in which a rank computes. The phases of waiting are nested in them."""


@dataclass
class Attempt:
    """One start of the run's processes."""

    number: int
    start: float
    """Time of its first event, in Unix seconds."""
    end: float
    """Time of its last event."""
    trained_before: float
    """Seconds of all earlier attempts together."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Its `start` event; empty if it ended before."""
    reason: str | None = None
    """Reason in its `exit` event; None if it was killed or is still running."""
    phases: "dict[str, array[float]]" = field(default_factory=dict)
    """Milliseconds per iteration by phase, and in all (`total`), with a value for each of its step
    events."""
    largest_batch: tuple[int, int] = (0, 0)
    """Samples per iteration of these events, and tokens of a sequence."""
    times: "array[float]" = field(default_factory=lambda: array("d"))
    """Times of its step events, in Unix seconds."""
    iterations: "array[float]" = field(default_factory=lambda: array("d"))
    """Iterations of its step events."""

    @property
    def seconds(self) -> float:
        """Time from its first event to its last."""
        return max(0.0, self.end - self.start)

    def add_phases(self, event: Mapping[str, Any]) -> None:
        """Add the times of a step event.

        Those of a ramp-up's smaller batches and of a schedule's shorter sequences do not count.
        """
        batch = event.get("global_batch_size", 0), event.get("seq_length", 0)
        if not event.get("phase_ms") or batch < self.largest_batch:
            return
        if batch > self.largest_batch:
            self.largest_batch = batch
            self.phases.clear()
        before = len(self.phases.get(_TOTAL, ()))
        for name, value in (*event["phase_ms"].items(), (_TOTAL, event["ms_per_iteration"])):
            if name not in self.phases:
                self.phases[name] = array("d", bytes(8 * before))
            self.phases[name].append(value)
        for column in self.phases.values():
            if len(column) == before:  # a phase that this event lacks
                column.append(0.0)

    @property
    def phase_ms(self) -> dict[str, float]:
        """Median milliseconds per iteration by phase; what no other phase has is `compute`."""
        if not self.phases:
            return {}
        medians = {name: median(column) for name, column in self.phases.items()}
        known = {
            name: value for name, value in medians.items() if name not in (_TOTAL, *_COMPUTATION)
        }
        return {"compute": max(0.0, medians[_TOTAL] - sum(known.values())), **known}

    @property
    def first_iteration(self) -> int:
        """Iteration with which it began."""
        return int(self.facts.get("iteration") or 0)

    @property
    def last_iteration(self) -> int:
        """Last iteration that it reported."""
        return max([self.first_iteration, *map(int, self.iterations[-1:])])


def end_of(attempt: Attempt, *, last: bool) -> str:
    """Return the reason why an attempt ended, also if its ranks did not report it."""
    if attempt.reason is not None:
        return attempt.reason
    return "no end reported" if last else "killed or lost"


@dataclass
class SavedCheckpoint:
    """A checkpoint that the run saved; None where a value is not reported."""

    iteration: int
    size_bytes: int | None = None
    seconds: float | None = None
    """Time of the save."""
    valid_ppl: float | None = None
    deleted: bool = False


class Points:
    """Columns of values by iteration, of which the first row of an iteration counts.

    A row takes the memory of its numbers.
    """

    def __init__(self, *names: str) -> None:
        self._iterations = array("d")
        self._columns = {name: array("d") for name in names}
        self._known = Iterations()

    def add(self, iteration: int, values: Sequence[float | None]) -> None:
        """Add a row, unless the iteration has one or all values are None."""
        if values.count(None) < len(values) and iteration not in self._known:
            self._known.add(iteration)
            self._iterations.append(iteration)
            for column, value in zip(self._columns.values(), values, strict=True):
                column.append(math.nan if value is None else value)

    def sorted(self, name: str) -> "tuple[Floats, Floats]":
        """Return the iterations with a value of `name`, in ascending order, and the values."""
        import numpy as np

        iterations, values = np.array(self._iterations), np.array(self._columns[name])
        order = np.argsort(iterations)
        order = order[~np.isnan(values[order])]
        return iterations[order], values[order]

    def curve(self, name: str) -> Curve:
        """Return the curve through the points of `name`."""
        iterations, values = self.sorted(name)
        return Curve(iterations.astype(int).tolist(), values.tolist())


class RunHistory:
    """Events of a run in the order in which they happened.

    Of a repeated iteration, the curves have the first report, as in MLflow.
    """

    def __init__(self, events: Path, *, heads: Collection[str] = ()) -> None:
        """Read an events.jsonl, which may be missing. Raises DataFormatError if it is damaged.

        Of the kinds `heads`, only time, attempt and iteration are read, which saves most of the
        time: `("step",)` is enough for attempts and checkpoints.
        """
        self.attempts: list[Attempt] = []
        self.checkpoints: dict[int, SavedCheckpoint] = {}
        self.warnings: list[dict[str, Any]] = []
        self.by_position: dict[int, list[dict[str, float]]] = {}
        """Start, loss and tokens of each range of positions, by iteration of the checkpoint. Of a
        repeated iteration they are of the last report, as the checkpoint."""
        self.by_source: dict[str, dict[str, Points]] = {}
        """Losses by kind of event and source."""
        self._points = {kind: Points(*fields) for kind, fields in CURVES.items()}
        self._tokens, self._seconds = Points("tokens"), Points("seconds")
        for points in (self._tokens, self._seconds):
            points.add(0, [0.0])
        for event, _ in EventReader(events, heads=heads):
            self._add(event)

    def by_iteration(self, name: str) -> Curve:
        """Return the curve `name` of CURVES, by iteration."""
        return self._points[_KIND_OF[name]].curve(name)

    def curve(self, name: str) -> Curve:
        """Return the curve `name` of CURVES, by consumed tokens."""
        iterations, values = self._points[_KIND_OF[name]].sorted(name)
        return Curve(self.tokens_at(iterations).round().astype(int).tolist(), values.tolist())

    def tokens_at(self, iterations: "Sequence[float] | Floats") -> "Floats":
        """Return the tokens consumed before the end of each iteration."""
        import numpy as np

        tokens: Floats = np.interp(np.asarray(iterations, float), *self._known_tokens)
        return tokens

    def seconds_at(self, iterations: "Sequence[float] | Floats") -> "Floats":
        """Return the training time up to each iteration, without the time between attempts."""
        import numpy as np

        seconds: Floats = np.interp(np.asarray(iterations, float), *self._known_seconds)
        return seconds

    @property
    def tokens(self) -> int:
        """Consumed tokens."""
        return round(float(self._known_tokens[1][-1]))

    @property
    def seconds(self) -> float:
        """Training time: all attempts, including what was trained again."""
        return sum(attempt.seconds for attempt in self.attempts)

    @property
    def step_iterations(self) -> "Floats":
        """Iterations with a known training time, from 0."""
        return self._known_seconds[0]

    @property
    def facts(self) -> dict[str, Any]:
        """The last `start` event; empty if there is none."""
        return next((attempt.facts for attempt in reversed(self.attempts) if attempt.facts), {})

    @cached_property
    def _known_tokens(self) -> "tuple[Floats, Floats]":
        return self._tokens.sorted("tokens")

    @cached_property
    def _known_seconds(self) -> "tuple[Floats, Floats]":
        return self._seconds.sorted("seconds")

    def _add(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        attempt = self._attempt(event)
        fields = CURVES.get(kind)
        if fields is not None:
            iteration = int(event["iteration"])
            self._points[kind].add(
                iteration, [_number(event.get(field)) for field in fields.values()]
            )
            self._add_tokens(event, iteration)
            for each in event.get("by_source") or ():
                points = self.by_source.setdefault(kind, {}).setdefault(
                    str(each["source"]), Points("loss")
                )
                points.add(iteration, [_number(each["loss"])])
            if kind == "step":
                attempt.times.append(event["time"])
                attempt.iterations.append(iteration)
                attempt.add_phases(event)
                self._seconds.add(iteration, [attempt.trained_before + attempt.seconds])
        if kind == "start":
            attempt.facts = event
        elif kind == "exit":
            attempt.reason = str(event.get("reason"))
        elif kind == "warning":
            self.warnings.append(event)
        elif kind in ("checkpoint", "perplexity", "checkpoint_deleted"):
            self._add_checkpoint(event)

    def _add_tokens(self, event: dict[str, Any], iteration: int) -> None:
        tokens = _number(event.get("consumed_tokens"))
        if tokens is not None:
            self._tokens.add(iteration, [tokens])

    def _attempt(self, event: dict[str, Any]) -> Attempt:
        """Return the attempt of an event, up to whose time it then lasts."""
        number = int(event.get("attempt") or 1)
        known = self.attempts[-1] if self.attempts else None
        time = _number(event.get("time"))
        if time is None:
            time = known.end if known else 0.0
        if known is None or known.number != number:
            self.attempts.append(Attempt(number, time, time, self.seconds))
            return self.attempts[-1]
        known.end = max(known.end, time)
        return known

    def _add_checkpoint(self, event: dict[str, Any]) -> None:
        iteration = int(event["iteration"])
        checkpoint = self.checkpoints.setdefault(iteration, SavedCheckpoint(iteration))
        if event["kind"] == "perplexity":
            if event.get("by_position"):
                self.by_position[iteration] = event["by_position"]
            checkpoint.valid_ppl = _number(event.get("valid_ppl"))
        elif event["kind"] == "checkpoint":
            self._add_tokens(event, iteration)
            checkpoint.size_bytes = event.get("size_bytes")
            # An attempt that finds a checkpoint of the one before does not know its time.
            checkpoint.seconds = _number(event.get("seconds")) or checkpoint.seconds
            checkpoint.deleted = False
        else:
            checkpoint.deleted = True


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None
