"""The search for the largest micro batch that fits: doubling, then bisection."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fits:
    """Answer of a probe: the micro batch fits."""

    peak_memory: int
    """Peak memory in bytes of the rank that used the most."""


@dataclass(frozen=True)
class TooLarge:
    """Answer of a probe: memory does not suffice for the micro batch."""

    reason: str
    """Message of the rank that ran out of memory, as one sentence."""


Answer = Fits | TooLarge
Probe = Callable[[int], Answer]
"""Function that tries a micro batch; failures other than lack of memory are raised."""


@dataclass(frozen=True)
class Found:
    """Result of a search."""

    batch: int
    """Largest micro batch that fits; 0 if not even 1 fits."""
    tried: dict[int, Answer]
    """Answer of each probe, in the order of the probes."""

    @property
    def peak_memory(self) -> int | None:
        """Peak memory in bytes of the rank that used the most at `batch`; None if nothing fits."""
        answer = self.tried.get(self.batch)
        return answer.peak_memory if isinstance(answer, Fits) else None

    @property
    def reason(self) -> str | None:
        """Reason why `batch` + 1 does not fit; None if the limit ended the search."""
        answer = self.tried.get(self.batch + 1)
        return answer.reason if isinstance(answer, TooLarge) else None


def largest_batch(probe: Probe, *, limit: int, start: int = 1) -> Found:
    """Find the largest micro batch from 1 to `limit` that fits.

    The search assumes that memory grows with the batch: every micro batch smaller than a fitting
    one fits, too. It doubles the batch from `start` until one is too large, then bisects between
    the largest that fits (or 0) and the smallest that does not. It takes at most 2 + 2 log2(limit)
    probes, and fewer the nearer `start` is to the result.

    Args:
        probe: function that tries a micro batch, called at most once for each.
        limit: largest micro batch to try, 1 or more.
        start: first micro batch to try; values above `limit` count as `limit`.

    Raises the errors of `probe`.
    """
    assert limit >= 1, limit
    assert start >= 1, start
    tried: dict[int, Answer] = {}
    fitting, too_large, batch = 0, limit + 1, min(start, limit)
    while too_large - fitting > 1:
        tried[batch] = probe(batch)
        if isinstance(tried[batch], Fits):
            fitting = batch
        else:
            too_large = batch
        doubling = too_large > limit
        batch = min(2 * fitting, limit) if doubling else (fitting + too_large) // 2
    return Found(fitting, tried)


def table_rows(reports: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the table with one row for each method, and a dash for missing figures."""
    epochs = [report["epoch"] for report in reports if report["epoch"] is not None]
    names = dict.fromkeys(name for epoch in epochs for name in epoch["metrics"] if name != "loss")
    rows = []
    for report in reports:
        epoch, peak = report["epoch"], report["peak_memory"]
        metrics = {} if epoch is None else epoch["metrics"]
        rows.append(
            {
                "method": report["method"],
                "largest batch per rank": str(report["batch"] or "-"),
                "peak memory of a rank (GB)": "-" if peak is None else gigabytes(peak),
                "time per epoch (s)": "-" if epoch is None else f"{train_seconds(epoch):.1f}",
                "evaluation (s)": "-" if epoch is None else f"{epoch['evaluation_seconds']:.1f}",
            }
            | {name: f"{metrics[name]:.4f}" if name in metrics else "-" for name in names}
        )
    return rows


def as_markdown(rows: Sequence[dict[str, str]]) -> str:
    """Format the rows as a Markdown table; all columns but the first are right-aligned."""
    lines = [
        list(rows[0]),
        ["---"] + ["---:"] * (len(rows[0]) - 1),
        *([*row.values()] for row in rows),
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def notes(reports: Sequence[dict[str, Any]]) -> str:
    """Return the text below the table: conditions, reasons for the limits, best settings."""
    first, lines = reports[0], [""]
    limits = [report["memory_limit"] for report in reports if report["memory_limit"] is not None]
    room = "95 % of each GPU" if not limits else f"{gigabytes(min(limits))} GB of memory each"
    ranks = f"{first['ranks']} rank{'s' if first['ranks'] > 1 else ''}"
    lines.append(
        f"{ranks} in {first['precision']}, {room}; epochs of {first['samples']:,} samples."
    )
    lines += ["", *(f"- {report['method']}: {_end(report)}" for report in reports)]
    timed = [report for report in reports if report["epoch"] is not None]
    if timed:
        best = min(timed, key=lambda report: train_seconds(report["epoch"]))
        lines += [
            "",
            (
                f"The shortest epoch: `launch.distributed={best['method']} "
                f"train.micro_batch_size={best['batch']}`."
            ),
        ]
    return "\n".join(lines) + "\n"


def _end(report: dict[str, Any]) -> str:
    """Return the reason why there is no larger micro batch, or no epoch, as one clause."""
    batch = report["batch"]
    if report["epoch_failure"] is not None:
        return f"{batch} fits for some steps, and the epoch did not: {report['epoch_failure']}"
    if report["reason"] is None:
        return (
            f"{batch} is the most that was tried (the samples of a rank, or "
            "find_batch_size.max_batch)"
        )
    return f"{batch + 1} does not fit: {report['reason']}"


def train_seconds(epoch: dict[str, Any]) -> float:
    """Return the training time of the single epoch in a fine-tuning's result."""
    return float(epoch["train_seconds_per_epoch"])


def gigabytes(count: int) -> str:
    """Format a number of bytes in GB, without the unit."""
    return f"{count / 1e9:.2f}"
