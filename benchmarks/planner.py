"""Error of predictions against published runs, and the fit of their constants.

    python -m benchmarks.planner --table FILE.csv [FILE.csv …] [--fit]

A file has the columns of docs/planning.md and `iter_s`, the measured seconds; rows with the outcome
`suspect` are left out. Runs are grouped by source. The constants were fitted on some of a source's
models and not on the others (`fitted_on`), so the table tells them apart. Regret is how much slower
the run is that the prediction ranks first among those of one model, number of GPUs and batch than
the fastest measured one. `--fit` fits the constants of `conf/hardware/a100-80gb.yaml` and of the
programs again, and prints them, with the error of the memory of models on whose hidden size its
constants were not fitted; it takes some minutes.
"""

import argparse
import csv
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from megacore.errors import MegacoreError
from megacore.plan import iteration, operations, table
from megacore.plan.iteration import Iteration
from megacore.plan.machine import Machine
from megacore.plan.memory import GIB
from megacore.plan.operations import BLOOM_2022, MEGACORE, MEGATRON_2021, Software
from megacore.plan.table import iteration_of, predict_row, software_of

Row = dict[str, str]
_FITTED_HIDDEN = ("14336", "12288")
_FITTED_LAYERS = ("12", "24")
_FITTED_ROWS = frozenset({"bloom-L476", "bloom-L480"})
"""Two runs of a third hidden size, which show the cost of unaligned products."""
_FITTED_MODELS = ("mpt-125m", "mpt-760m", "mpt-3b", "mpt-13b", "mpt-70b")
_FITTED_GPUS = ("A100",)
_SMALLEST_CLUSTER = 64
"""GPUs above which a BLOOM run was fitted; smaller ones are of a truncated model."""
_PRIOR = 0.15
"""Weight of a constant's distance from its start, in units of its logarithm."""
_MOST_STEPS = 15
_MEMORY_CONSTANTS = ("_MEGATRON_PASSES", "_MEGATRON_FIXED", "_FP32_GRADIENTS")
_OUTLIER = 0.1
"""Relative error above which a run counts less (soft L1)."""


@dataclass(frozen=True)
class Measured:
    """Published run."""

    row: Row
    seconds: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.seconds - 1


def is_fitted(row: Mapping[str, str]) -> bool:
    """Return True if the constants were fitted on the run."""
    if not row["gpu"].startswith(_FITTED_GPUS):
        return False
    if "vTrain" in row["source"]:
        return row["layers"] in _FITTED_LAYERS
    if "BLOOM" in row["source"]:
        large = int(row["gpus"]) > _SMALLEST_CLUSTER
        known = row["hidden"] in _FITTED_HIDDEN or row["id"] in _FITTED_ROWS
        return large and known
    return row["model"] in _FITTED_MODELS


def read(paths: Iterable[Path]) -> list[Row]:
    """Return the rows of the files, without suspect ones."""
    rows = []
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            rows += [row for row in csv.DictReader(file) if row.get("outcome") != "suspect"]
    return rows


def regret(runs: Sequence[Measured]) -> float | None:
    """Return the mean regret over models, numbers of GPUs and batches; None without a choice."""
    groups: dict[tuple[str, ...], list[Measured]] = defaultdict(list)
    for run in runs:
        key = ("layers", "hidden", "heads", "seq", "gpu", "gpus", "global_batch")
        groups[tuple(run.row[column] for column in key)].append(run)
    regrets = [
        min(group, key=lambda run: run.predicted).seconds / min(run.seconds for run in group) - 1
        for group in groups.values()
        if len(group) > 1
    ]
    return statistics.mean(regrets) if regrets else None


def show(rows: Sequence[Row]) -> None:
    """Print errors by source, fitted runs apart from the others, and the errors of memory."""
    groups: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    memory: dict[str, list[tuple[Row, Row]]] = defaultdict(list)
    refused = 0
    for row in rows:
        prediction = predict_row(row)
        refused += bool(prediction["refused"])
        if prediction["refused"]:
            continue
        kind = f"{row['source']}, {row['gpu']}"
        if row.get("iter_s"):
            run = Measured(row, float(row["iter_s"]), float(prediction["predicted_iter_s"]))
            groups[kind, "fitted" if is_fitted(row) else "held out"].append(run)
        if row.get("mem_gib") or row.get("outcome") == "oom":
            memory[kind].append((row, prediction))
    lines = Table(title=f"time per iteration; {refused} rows cannot be modelled")
    for column in ("source", "rows", "number", "mean error", "median", "bias", "regret"):
        lines.add_column(column, justify="left" if column == "source" else "right")
    for (kind, fitted), runs in sorted(groups.items()):
        errors = [run.error for run in runs]
        chosen = regret(runs)
        lines.add_row(
            kind,
            fitted,
            str(len(runs)),
            f"{statistics.mean(map(abs, errors)):.1%}",
            f"{statistics.median(map(abs, errors)):.1%}",
            f"{statistics.mean(errors):+.1%}",
            "" if chosen is None else f"{chosen:.1%}",
        )
    Console(width=160).print(lines)
    for kind, pairs in sorted(memory.items()):
        _show_memory(kind, pairs)


def _show_memory(kind: str, pairs: Sequence[tuple[Row, Row]]) -> None:
    errors = [
        abs(float(prediction["predicted_mem_gib"]) / float(row["mem_gib"]) - 1)
        for row, prediction in pairs
        if row["mem_gib"]
    ]
    median_error = f"{statistics.median(errors):.1%}" if errors else "unknown"
    full = [prediction for row, prediction in pairs if row["outcome"] == "oom"]
    ran = [prediction for row, prediction in pairs if row["outcome"] == "ok"]
    Console(width=160).print(
        f"memory, {kind}: median error {median_error} of {len(errors)} runs; "
        f"{sum(each['predicted_fits'] == 'no' for each in full)} of {len(full)} runs out of memory "
        f"predicted, {sum(each['predicted_fits'] == 'no' for each in ran)} of {len(ran)} runs that "
        "fitted refused"
    )


class _Fit:
    """Constants of a machine and of the programs as one vector of logarithms."""

    machine = (
        "half_depth",
        "traffic",
        "operation_us",
        "node.latency_us",
        "host.layer_forward_us",
        "host.layer_backward_us",
        "host.collective_us",
        "host.head_us",
        "host.embedding_us",
        "attention_efficiency.0",
        "attention_efficiency.1",
    )
    software = (
        (
            "megatron",
            MEGATRON_2021,
            ("hidden_passes", "loss_bytes", "optimizer_us", "message_us", "unfused_softmax_us"),
        ),
        (
            "megacore",
            MEGACORE,
            (
                "hidden_passes",
                "loss_bytes",
                "optimizer_bytes",
                "optimizer_us",
                "product_share",
            ),
        ),
        ("bloom", BLOOM_2022, ("launch_wait", "product_share")),
    )
    modules = (
        (operations, "_UNALIGNED"),
        (iteration, "_MORE_RANKS"),
        (iteration, "_SMOOTH"),
    )

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows: list[tuple[Iteration, float]] = []
        for row in rows:
            if not row.get("iter_s") or not is_fitted(row):
                continue
            try:
                self.rows.append((iteration_of(row), float(row["iter_s"])))
            except MegacoreError as error:
                sys.stderr.write(f"{row['id']}: {error}\n")
        self.base = max((each.machine for each, _ in self.rows), key=lambda each: each.memory_gib)
        values = self.base.model_dump()
        self.start = {name: _value(values, name) for name in self.machine}
        for program, options, names in self.software:
            self.start |= {f"{program}.{name}": getattr(options, name) for name in names}
        self.start |= {name: getattr(module, name) for module, name in self.modules}

    def run(self) -> dict[str, float]:
        """Return the fitted constants."""
        from scipy.optimize import least_squares

        fitted = least_squares(
            self._residuals,
            np.zeros(len(self.start)),
            loss="soft_l1",
            f_scale=_OUTLIER,
            max_nfev=_MOST_STEPS,
        )
        return self._constants(fitted.x)

    def _constants(self, logarithms: npt.NDArray[np.float64]) -> dict[str, float]:
        pairs = zip(self.start.items(), logarithms, strict=True)
        constants = {name: value * math.exp(each) for (name, value), each in pairs}
        return {
            name: min(1.0, value) if name.endswith("product_share") else value
            for name, value in constants.items()
        }

    def _residuals(self, logarithms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        constants = self._constants(logarithms)
        for module, name in self.modules:
            setattr(module, name, constants[name])
        programs: dict[Software, Software] = {}
        for program, options, names in self.software:
            changes: dict[str, Any] = {name: constants[f"{program}.{name}"] for name in names}
            # BLOOM's program is Megatron's, with constants of its own
            start = programs[MEGATRON_2021] if options is BLOOM_2022 else options
            programs[options] = replace(start, **changes)
        errors = [
            math.log(
                replace(
                    each,
                    machine=self._machine(each.machine, constants),
                    software=programs[each.software],
                )
                .predict()
                .seconds
                / seconds
            )
            for each, seconds in self.rows
        ]
        return np.array([*errors, *(_PRIOR * logarithms)])

    def _machine(self, machine: Machine, constants: Mapping[str, float]) -> Machine:
        values = machine.model_dump()
        for name in self.machine:
            _set(values, name, constants[name])
        return Machine.model_validate(values)


def split_memory(rows: Sequence[Row]) -> str:
    """Return the error of the memory of each half of the hidden sizes, fitted on the other half."""
    from scipy.optimize import least_squares

    runs = [
        (iteration_of(row), float(row["mem_gib"]), row["hidden"] in _FITTED_HIDDEN)
        for row in rows
        if row.get("mem_gib") and software_of(row) is BLOOM_2022
    ]
    start = np.array(
        [*(BLOOM_2022.state_bytes or ()), *(getattr(table, name) for name in _MEMORY_CONSTANTS)]
    )

    def errors(logarithms: npt.NDArray[np.float64], part: bool) -> npt.NDArray[np.float64]:
        kept, divided, *others = start * np.exp(logarithms)
        for name, value in zip(_MEMORY_CONSTANTS, others, strict=True):
            setattr(table, name, value)
        software = replace(BLOOM_2022, state_bytes=(kept, divided))
        return np.array(
            [
                math.log(table.memory_of(replace(each, software=software)) / (gib * GIB))
                for each, gib, fitted in runs
                if fitted == part
            ]
        )

    lines = []
    for part in (True, False):
        fitted = least_squares(
            errors, np.zeros(len(start)), loss="soft_l1", f_scale=_OUTLIER / 2, args=(part,)
        ).x
        other = np.abs(np.expm1(errors(fitted, not part)))
        lines.append(
            f"memory fitted on {sum(each[2] == part for each in runs)} runs: median error "
            f"{np.median(other):.1%} of the {len(other)} others\n"
        )
    return "".join(lines)


def _value(values: Mapping[str, Any], name: str) -> float:
    value: Any = values
    for part in name.split("."):
        value = value[int(part) if part.isdigit() else part]
    return float(value)


def _set(values: dict[str, Any], name: str, value: float) -> None:
    *parents, leaf = name.split(".")
    if leaf.isdigit():
        pair = list(values[parents[0]])
        pair[int(leaf)] = value
        values[parents[0]] = tuple(pair)
        return
    for part in parents:
        values = values[part]
    values[leaf] = value


def main() -> None:
    """Print the errors, or fit the constants."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--table", type=Path, nargs="+", required=True)
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    rows = read(options.table)
    if options.fit:
        sys.stdout.write(split_memory(rows))
        for name, value in _Fit(rows).run().items():
            sys.stdout.write(f"{name}: {value:.3g}\n")
        return
    show(rows)


if __name__ == "__main__":
    main()
