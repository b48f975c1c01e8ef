"""Comparison of two runs: the first difference of the steps, and what differs before it.

A difference of the configuration, the data, the environment or the layout is a candidate. Each has
a step from which it applies. Some can change a loss at once, others only after an update, and some
only by rounding. The reasons of the first difference are the candidates that can explain it.
"""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megacore.compare.fields import AT_ONCE, ROUNDING, cause_of_field, shown
from megacore.compare.report import UNEXPLAINED, Finding, Report
from megacore.compare.run_record import (
    SERIES,
    Attempt,
    RunRecord,
    checkpoint_digest,
    read_run,
)
from megacore.config.batch_schedule import BatchSchedule
from megacore.config.difference import differing_values
from megacore.data.build import open_split
from megacore.data.samples import Dataset
from megacore.errors import ConfigError, MegacoreError, listed

_RESULTS = ("lm_loss", "loss", "grad_norm")
"""Results of a step: `lm_loss` of a pretraining, `loss` of a fine-tuning."""
_AVERAGED = ("lm_loss", "loss")
"""Values that are means over a log interval."""
_COUNTED = ("skipped_iterations", "nan_iterations")
"""Values that are counts of a log interval."""
_SUMMATION = 1e-12
"""Relative difference of equal means that another order of summation can make."""
_ROUNDING_ERROR = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 3e-2}
"""Largest relative difference at the first differing step that rounding can make, by precision."""
_LATER = frozenset({"evaluate", "zeroshot", "convert", "publish", "push"})
_ENVIRONMENT = {
    "kernels": "kernels",
    "precision": "precision",
    "device": "hardware",
    "hardware": "hardware",
    "versions": "versions",
    "ranks": "layout",
}


class _First(NamedTuple):
    """First step at which a value differs."""

    step: int
    a: float | None
    b: float | None

    @property
    def relative(self) -> float:
        """Relative difference; infinite if one is missing."""
        if not isinstance(self.a, int | float) or not isinstance(self.b, int | float):
            return float("inf")
        return abs(self.a - self.b) / max(abs(self.a), abs(self.b), 1e-30)


def compare_runs(a: Path, b: Path) -> Report:
    """Compare two runs by their directories.

    Raises:
        MegacoreError: if one of them cannot be read.
    """
    first, second = read_run(a), read_run(b)
    if ("num_epochs" in first.values.get("train", {})) != (
        "num_epochs" in second.values.get("train", {})
    ):
        raise ConfigError(f"{a} and {b} are a pretraining and a fine-tuning: give two of a kind")
    report = Report("runs", first.describe(), second.describe())
    report.findings += _configuration(first, second)
    report.findings += _inputs(first, second, report.findings)
    report.findings += _samples(first, second)
    report.findings += _environment(first, second)
    report.findings += _start(first, second)
    series = {name: _first_difference(first, second, name) for name in SERIES}
    report.findings += _events(first, second, series)
    report.findings += _lengths(first, second)
    _conclude(report, first, second, series)
    return report


def _configuration(a: RunRecord, b: RunRecord) -> list[Finding]:
    """Return a finding for each value of the configuration that differs."""
    if b.config is None:
        changes = _raw_changes(a.values, b.values)
    else:
        changes = [
            (change.field, change.before, change.now, frozenset(map(str, stages)))
            for change, stages in differing_values(a.values, b.config)
        ]
    findings = []
    for name, ours, theirs, stages in changes:
        cause = cause_of_field(name)
        remark = cause == "remark" or (stages and stages <= _LATER)
        step = max(_changed_at(name, record) for record in (a, b))
        entered = f"the key of {', '.join(sorted(stages))}" if stages else "no key"
        # The stages of a fine-tuning, or of another version's configuration, are not known here.
        key = "" if stages is None else f" (enters {entered})"
        when = f" from iteration {step + 1}, after a resume" if step else ""
        findings.append(
            Finding(
                "run",
                "remark" if remark else cause,
                f"{name}: {shown(ours)} in A, {shown(theirs)} in B{key}{when}",
                (name,),
                ours,
                theirs,
                differs=not remark,
                numbers={"step": float(step)},
            )
        )
    return findings


def _raw_changes(
    a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = ""
) -> list[tuple[str, Any, Any, frozenset[str] | None]]:
    """Return the fields that differ, with None for the stages whose key they enter."""
    changes: list[tuple[str, Any, Any, frozenset[str] | None]] = []
    for name in sorted(a.keys() | b.keys()):
        ours, theirs = a.get(name, "absent"), b.get(name, "absent")
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            changes += _raw_changes(ours, theirs, f"{prefix}{name}.")
        elif ours != theirs:
            changes.append((f"{prefix}{name}", ours, theirs, None))
    return changes


def _changed_at(name: str, record: RunRecord) -> int:
    """Return the iteration of the resume at which a run changed a value; 0 if it never did."""
    for attempt in record.attempts:
        changes = attempt.values.get("changes") or ()
        if any(str(change).startswith(f"{name}:") for change in changes):
            return attempt.iteration
    return 0


def _inputs(a: RunRecord, b: RunRecord, known: list[Finding]) -> Iterator[Finding]:
    """Yield the input artifacts with other contents."""
    explained = {finding.cause for finding in known}
    for role, cause in (("tokens", "data"), ("tokenizer", "tokenizer")):
        ours, theirs = a.inputs.get(role), b.inputs.get(role)
        if ours is None or theirs is None or ours == theirs:
            continue
        same = "" if cause in explained else ", though their configuration is the same"
        sentence = f"the {role} have other contents{same} ({ours[:12]} in A, {theirs[:12]} in B)"
        yield Finding("run", cause, sentence, (role,), ours, theirs, numbers={"step": 0.0})
    ours, theirs = a.job.get("vocab_size"), b.job.get("vocab_size")
    if ours != theirs:
        sentence = f"the vocabulary has {ours} entries in A, {theirs} in B"
        yield Finding(
            "run", "tokenizer", sentence, ("vocab_size",), ours, theirs, numbers={"step": 0.0}
        )


def _samples(a: RunRecord, b: RunRecord) -> list[Finding]:
    """Return the first consumed sample that differs."""
    if a.config is None or b.config is None:
        return []
    sample, note = first_other_sample(a, b)
    if sample is None:
        return [] if note is None else [Finding("run", "remark", note, differs=False)]
    step = BatchSchedule.of(a.config.train).iterations_for(sample + 1)
    sentence = f"the first consumed sample with other tokens is {sample:,} (iteration {step})"
    return [
        Finding(
            "run",
            "sample_order",
            sentence,
            (str(sample),),
            numbers={"step": float(step - 1), "sample": float(sample)},
        )
    ]


def _environment(a: RunRecord, b: RunRecord) -> Iterator[Finding]:
    """Yield the first iteration with other kernels, precision, hardware, versions or ranks."""
    starts = sorted({each.iteration for record in (a, b) for each in record.attempts})
    end = min(a.last_iteration, b.last_iteration)
    for name, cause in _ENVIRONMENT.items():
        for start in starts:
            ours, theirs = _at(a, start), _at(b, start)
            if ours is None or theirs is None or (start >= end > 0):
                continue
            first, second = ours.values.get(name), theirs.values.get(name)
            if first is None or second is None or first == second:
                continue
            resumed = " after a resume" if start else ""
            sentence = f"{name} from iteration {start + 1}{resumed}: {_pair(first, second)}"
            yield Finding(
                "run", cause, sentence, (name,), first, second, numbers={"step": float(start)}
            )
            break


def _at(record: RunRecord, iteration: int) -> Attempt | None:
    """Return the attempt that computed the iteration after `iteration`."""
    before = [attempt for attempt in record.attempts if attempt.iteration <= iteration]
    return before[-1] if before else None


def _pair(ours: Any, theirs: Any) -> str:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        return listed([f"{key} {ours.get(key)} in A, {theirs.get(key)} in B" for key in keys])
    return f"{shown(ours)} in A, {shown(theirs)} in B"


def _start(a: RunRecord, b: RunRecord) -> Iterator[Finding]:
    """Yield differences of the checkpoints that the runs began with or resumed from."""
    path = a.values.get("train", {}).get("pretrained_checkpoint")
    other = b.values.get("train", {}).get("pretrained_checkpoint")
    ours, theirs = checkpoint_digest(path), checkpoint_digest(other)
    if path == other and ours != theirs:
        yield Finding(
            "run", "initial_weights", f"{path} has other contents now", numbers={"step": 0.0}
        )
    starts = [record.attempts[0].iteration if record.attempts else 0 for record in (a, b)]
    if starts[0] != starts[1]:
        sentence = f"A begins after iteration {starts[0]}, B after {starts[1]}"
        numbers = {"step": float(min(starts))}
        yield Finding("run", "resumed_from", sentence, (), starts[0], starts[1], numbers=numbers)
    resumed = [{attempt.iteration for attempt in record.attempts[1:]} for record in (a, b)]
    for name, only in (("A", resumed[0] - resumed[1]), ("B", resumed[1] - resumed[0])):
        for iteration in sorted(only):
            yield Finding(
                "run",
                "resume",
                f"{name} was resumed after iteration {iteration}",
                (str(iteration),),
                differs=False,
                numbers={"step": float(iteration)},
            )


def _common_steps(a: RunRecord, b: RunRecord) -> list[int]:
    """Return the iterations of which both runs have a step, ascending."""
    return [step for step in sorted(a.steps) if step in b.steps]


def _first_difference(a: RunRecord, b: RunRecord, name: str) -> _First | None:
    """Return the first common step at which a value differs; None if it never does."""
    for step in _common_steps(a, b):
        ours, theirs = _values_at(a, b, step, name)
        difference = _First(step, ours, theirs)
        is_rounding = name in _AVERAGED and difference.relative <= _SUMMATION
        if ours != theirs and not is_rounding:
            return difference
    return None


def _values_at(a: RunRecord, b: RunRecord, step: int, name: str) -> tuple[Any, Any]:
    """Return the values of both runs at a common step.

    Means and counts of different log intervals are over the iterations since the last one that ends
    an interval of both runs; both are None if there is none, or if the event of an interval in
    between is missing.
    """
    ours, theirs = getattr(a.steps[step], name), getattr(b.steps[step], name)
    if name not in _AVERAGED + _COUNTED:
        return ours, theirs
    intervals = _since_common(a, b, step)
    if intervals is None:
        return None, None
    if len(intervals[0]) == len(intervals[1]) == 1:
        return ours, theirs
    values = [_over(record, own, name) for record, own in zip((a, b), intervals, strict=True)]
    return (None, None) if None in values else (values[0], values[1])


def _since_common(
    a: RunRecord, b: RunRecord, step: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]] | None:
    """Return the log intervals of both runs since the last iteration at which one of each begins.

    None if there is none. They are those up to a common step, the last one first. Usually there is
    one of each, and no earlier event is read: the whole run would be read for each step otherwise.
    """
    earlier, their_earlier = _ends(a, step), _ends(b, step)
    ours, theirs = [next(earlier)], [next(their_earlier)]
    while ours[-1][0] != theirs[-1][0]:
        longer, rest = (ours, earlier) if ours[-1][0] > theirs[-1][0] else (theirs, their_earlier)
        interval = next(rest, None)
        if interval is None:
            return None
        longer.append(interval)
    return ours, theirs


def _ends(record: RunRecord, step: int) -> Iterator[tuple[int, int]]:
    """Yield the log intervals up to a logged step, the last one first.

    An interval is given by the iterations after which it begins and ends. The earliest one may
    begin where no event is.
    """
    end = step
    while end in record.steps:
        begin = end - _iterations(record, end)
        yield begin, end
        end = begin


def _iterations(record: RunRecord, end: int) -> int:
    """Return the number of iterations of the log interval that ends with a logged step."""
    recorded = record.steps[end].interval_iterations
    if isinstance(recorded, int) and recorded > 0:
        return recorded
    # Records of earlier versions do not have it; their log_interval may have changed in a resume.
    interval = record.values.get("train", {}).get("log_interval") or 1
    return (end - 1) % interval + 1


def _over(record: RunRecord, intervals: list[tuple[int, int]], name: str) -> float | None:
    """Return a count, or the mean of a loss over the applied iterations, over log intervals.

    Returns None if an event or its value is missing.
    """
    total, weight = 0.0, 0
    for begin, end in intervals:
        step = record.steps.get(end)
        if step is None:
            return None
        value, applied = getattr(step, name), end - begin - int(step.skipped_iterations or 0)
        if not applied and name in _AVERAGED:
            continue  # without applied iterations there is no mean
        if value is None:
            return None
        total += value if name in _COUNTED else value * applied
        weight += applied
    if name in _COUNTED:
        return total
    return total / weight if weight else None


def _events(a: RunRecord, b: RunRecord, series: Mapping[str, _First | None]) -> Iterator[Finding]:
    """Yield the first differences of the schedules, and skipped iterations."""
    causes = {
        "lr": ("lr_schedule", "learning rate"),
        "global_batch_size": ("batch_size", "global batch size"),
        "consumed_samples": ("batch_size", "consumed samples"),
        "loss_scale": ("loss_scale", "loss scale"),
        "skipped_iterations": ("skipped_iterations", "skipped iterations"),
        "nan_iterations": ("skipped_iterations", "iterations without a finite loss"),
    }
    for name, (cause, text) in causes.items():
        first = series[name]
        if first is None:
            continue
        sentence = f"{text} at step {first.step}: {shown(first.a)} in A, {shown(first.b)} in B"
        yield Finding(
            "run",
            cause,
            sentence,
            (name,),
            first.a,
            first.b,
            numbers={"step": float(first.step - 1)},
        )
    bad = [
        {
            int(event.get("iteration") or 0)
            for event in record.events
            if event["kind"] == "bad_batch"
        }
        for record in (a, b)
    ]
    only = bad[0] ^ bad[1]
    if only:
        step = min(only)
        name = "A" if step in bad[0] else "B"
        sentence = f"only {name} has a bad batch at iteration {step}"
        yield Finding(
            "run", "skipped_iterations", sentence, (str(step),), numbers={"step": float(step - 1)}
        )


def _lengths(a: RunRecord, b: RunRecord) -> list[Finding]:
    if a.last_iteration == b.last_iteration:
        return []
    sentence = (
        f"A has steps up to {a.last_iteration} ({a.end}), B up to {b.last_iteration} ({b.end})"
    )
    return [
        Finding(
            "run",
            "length",
            sentence,
            (),
            a.last_iteration,
            b.last_iteration,
            numbers={"step": float(min(a.last_iteration, b.last_iteration))},
        )
    ]


def _conclude(
    report: Report, a: RunRecord, b: RunRecord, series: Mapping[str, _First | None]
) -> None:
    """Find the first different result, and mark the candidates that can be its reason."""
    results = [(name, series[name]) for name in _RESULTS]
    differing = [(name, first) for name, first in results if first is not None]
    common = len(_common_steps(a, b))
    report.facts["common_steps"] = common
    report.facts["first_differences"] = {
        name: None if first is None else first._asdict() for name, first in series.items()
    }
    report.facts["compared"] = ["configuration", "inputs", f"{common} steps"]
    if not differing:
        if common:
            report.findings.append(
                Finding(
                    "run",
                    "remark",
                    f"loss and gradient norm are equal at all {common} common steps",
                    differs=False,
                )
            )
        return
    name, first = min(differing, key=lambda each: each[1].step)
    reasons = _reasons(report.findings, a, b, first, series)
    report.facts["first_step"] = first.step
    report.facts["reasons"] = list(dict.fromkeys(finding.cause for finding in reasons))
    report.findings = [
        replace(each, explains="all") if each in reasons else each for each in report.findings
    ]
    without_reason = "nondeterminism" if _is_small(first, a) else UNEXPLAINED
    cause = reasons[0].cause if reasons else without_reason
    because = (
        f"; because of {listed(report.facts['reasons']).replace('_', ' ')}"
        if reasons
        else _without_reason_text(cause, first, a, b, name)
    )
    missing = math.isinf(first.relative)  # JSON has no infinity
    size = "" if missing else f" (relative difference {first.relative:.1e})"
    text = (
        f"{name} differs first at step {first.step}: {shown_exactly(first.a)} in A, "
        f"{shown_exactly(first.b)} in B{size}{because}"
    )
    report.findings.insert(
        0,
        Finding(
            "run",
            cause,
            text,
            (name,),
            first.a,
            first.b,
            explains="all",
            numbers={"step": float(first.step)} | ({} if missing else {"relative": first.relative}),
        ),
    )


_NO_REASONS = frozenset({"length", "resume", "train_iters"})
"""Causes that change no result by themselves."""
_RECORDED = {"lr_schedule": ("lr",), "batch_size": ("global_batch_size", "consumed_samples")}
"""Series that show from which step a difference of the configuration has an effect, by cause."""


_SETTINGS_OF_SKIPPING = ("train.loss_spike", "train.nonfinite")
"""Beginnings of settings that have an effect only where a run skipped iterations."""
_SKIPPED = ("skipped_iterations", "nan_iterations")


def _since(finding: Finding, series: Mapping[str, _First | None]) -> float:
    """Return the number of iterations before the first one that a finding can affect."""
    step = finding.numbers.get("step", 0.0)
    names = _RECORDED.get(finding.cause)
    if finding.where and finding.where[0].startswith(_SETTINGS_OF_SKIPPING):
        names = _SKIPPED
    if names is None:
        return step
    steps = [first.step - 1 for name in names if (first := series[name]) is not None]
    return max(step, min(steps, default=math.inf))


def _reasons(
    findings: list[Finding],
    a: RunRecord,
    b: RunRecord,
    first: _First,
    series: Mapping[str, _First | None],
) -> list[Finding]:
    """Return the findings that can explain the first different result, the strongest kind only."""
    before = max((step for step in _common_steps(a, b) if step < first.step), default=0)
    active = [
        each
        for each in findings
        if (each.differs or each.cause == "resume") and _since(each, series) < first.step
    ]
    at_once = [each for each in active if each.cause in AT_ONCE]
    updates = [
        each
        for each in active
        if each.cause not in AT_ONCE | ROUNDING | _NO_REASONS
        and (first.step - before > 1 or _since(each, series) + 1 < first.step)
    ]
    rounding = [each for each in active if each.cause in ROUNDING]
    small = _is_small(first, a)
    for chosen in (_from_the_start(at_once, before, small), updates):
        if chosen:
            return chosen
    if rounding and small:
        return rounding
    resumes = [
        each
        for each in active
        if each.cause == "resume" and before <= each.numbers["step"] < first.step
    ]
    return resumes or rounding


def _from_the_start(at_once: list[Finding], before: int, small: bool) -> list[Finding]:
    """Return the findings that change the loss of their first iteration.

    Those that apply from the start are no reason if all earlier steps are equal, except where a
    later sample or batch is the first that differs.
    """
    late = [each for each in at_once if each.numbers.get("step", 0.0) >= before]
    return late or ([] if before and small else at_once)


def _is_small(first: _First, record: RunRecord) -> bool:
    """Return True if rounding in the precision of a run can make the difference."""
    precision = record.attempts[0].values.get("precision") if record.attempts else None
    precision = precision or record.values.get("train", {}).get("precision")
    return first.relative <= _ROUNDING_ERROR.get(str(precision), 1e-4)


def _without_reason_text(cause: str, first: _First, a: RunRecord, b: RunRecord, name: str) -> str:
    if cause == UNEXPLAINED:
        return "; nothing that is recorded explains it"
    last = _common_steps(a, b)[-1]
    ours, theirs = _values_at(a, b, last, name)
    grown = _First(last, ours, theirs).relative
    return (
        "; nothing that is recorded differs before it, and the difference has the size of "
        f"rounding: the computation is not deterministic (at step {last} it is {grown:.1e})"
    )


def shown_exactly(value: Any) -> str:
    """Return a number with enough digits to see a difference of rounding."""
    return f"{value:.9g}" if isinstance(value, float) else shown(value)


_AT_ONCE = 64
"""Samples that are read together."""
_SECONDS = 30.0
"""Time after which the comparison stops."""


def first_other_sample(a: RunRecord, b: RunRecord) -> tuple[int | None, str | None]:
    """Return the first consumed sample with other tokens, and a note if it was not compared.

    Runs that read the same files in the same order are not read.
    """
    if _same_files(a, b):
        return None, None
    consumed = min(_consumed(a), _consumed(b))
    try:
        ours, theirs = _open(a), _open(b)
    except (MegacoreError, OSError, ValueError) as error:
        return None, f"the order of the samples was not compared: {error}"
    if ours.width != theirs.width:
        return 0, None
    count = min(len(ours), len(theirs), consumed or len(ours))
    started = time.monotonic()
    for start in range(0, count, _AT_ONCE):
        rows = range(start, min(start + _AT_ONCE, count))
        different = np.any(ours.gather(rows) != theirs.gather(rows), axis=1)
        if different.any():
            return start + int(different.argmax()), None
        if time.monotonic() - started > _SECONDS:
            return None, f"the first {rows.stop:,} of {count:,} consumed samples are equal"
    return None, None


def _same_files(a: RunRecord, b: RunRecord) -> bool:
    """Return True if index maps, tokens and seed are the same."""
    if a.values.get("seed") != b.values.get("seed") or a.values.get("data") != b.values.get("data"):
        return False
    digests = [(record.inputs.get("index"), record.inputs.get("tokens")) for record in (a, b)]
    if None not in digests[0] and digests[0] == digests[1]:
        return True
    places = [
        (
            str(Path(str(record.job.get("index_directory"))).resolve()),
            [str(Path(each).resolve()) for each in record.job.get("token_prefixes") or ()],
        )
        for record in (a, b)
    ]
    return places[0] == places[1]


def _consumed(record: RunRecord) -> int:
    last = record.steps.get(record.last_iteration)
    return 0 if last is None else int(last.consumed_samples or 0)


def _open(record: RunRecord) -> Dataset:
    assert record.config is not None
    return open_split(
        record.job["token_prefixes"],
        record.job["index_directory"],
        "train",
        record.config,
        tokenizer_directory=record.job["tokenizer_directory"],
    )
