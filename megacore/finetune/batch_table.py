"""The table of the comparison of distributions: largest micro batch, time of an epoch, metrics, and what to set."""

from collections.abc import Sequence
from typing import Any


def table_rows(reports: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """The table, a row for each method, a dash where there is no figure."""
    epochs = [each["epoch"] for each in reports if each["epoch"] is not None]
    names = dict.fromkeys(name for epoch in epochs for name in epoch["metrics"] if name != "loss")
    rows = []
    for each in reports:
        epoch, peak = each["epoch"], each["peak_memory"]
        metrics = {} if epoch is None else epoch["metrics"]
        rows.append(
            {
                "method": each["method"],
                "largest batch per rank": str(each["batch"] or "-"),
                "peak memory of a rank (GB)": "-" if peak is None else gigabytes(peak),
                "time per epoch (s)": "-" if epoch is None else f"{train_seconds(epoch):.1f}",
                "evaluation (s)": "-" if epoch is None else f"{epoch['evaluation_seconds']:.1f}",
            }
            | {name: f"{metrics[name]:.4f}" if name in metrics else "-" for name in names}
        )
    return rows


def as_markdown(rows: Sequence[dict[str, str]]) -> str:
    """The rows as a markdown table; all columns but the first are figures."""
    lines = [list(rows[0]), ["---"] + ["---:"] * (len(rows[0]) - 1), *([*row.values()] for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def notes(reports: Sequence[dict[str, Any]]) -> str:
    """What stands below the table: under which conditions, why no more fits, and what to set."""
    first, lines = reports[0], [""]
    limits = [each["memory_limit"] for each in reports if each["memory_limit"] is not None]
    room = "95 % of each GPU" if not limits else f"{gigabytes(min(limits))} GB of memory each"
    ranks = f"{first['ranks']} rank{'s' if first['ranks'] > 1 else ''}"
    lines.append(f"{ranks} in {first['precision']}, {room}; epochs of {first['samples']:,} samples.")
    lines += ["", *(f"- {each['method']}: {_end(each)}" for each in reports)]
    timed = [each for each in reports if each["epoch"] is not None]
    if timed:
        best = min(timed, key=lambda each: train_seconds(each["epoch"]))
        lines += [
            "",
            f"The shortest epoch: `launch.distributed={best['method']} train.micro_batch_size={best['batch']}`.",
        ]
    return "\n".join(lines) + "\n"


def _end(report: dict[str, Any]) -> str:
    """Why there is no larger micro batch, or no epoch, in one clause."""
    batch = report["batch"]
    if report["epoch_failure"] is not None:
        return f"{batch} fits for some steps, and the epoch did not: {report['epoch_failure']}"
    if report["reason"] is None:
        return f"{batch} is the most that was tried (the samples of a rank, or find_batch_size.max_batch)"
    return f"{batch + 1} does not fit: {report['reason']}"


def train_seconds(epoch: dict[str, Any]) -> float:
    """Of a fine-tuning's result: the training time of its one epoch."""
    return float(epoch["train_seconds_per_epoch"])


def gigabytes(count: int) -> str:
    """A number of bytes as GB, without the unit."""
    return f"{count / 1e9:.2f}"
