"""A model's state on data-parallel ranks: DeepSpeed's ZeRO and offload, torch, the native engine.

    python -m benchmarks.zero state [--size 124M] [--precision fp32 bf16]
        [--optimizer adam|muon] [--rounds 2] [--steps 2] [--exposed]
    python -m benchmarks.zero fit --device cuda [--sizes 345M 1.5B]

`state` counts the bytes of parameters, gradients and optimizer state on one of two ranks of a GPT,
in the engine's tensors after the last backward pass and before the step, and compares them with
ZeRO's formula. It also measures peak memory, tokens per second and, with `--exposed`, by how many
seconds a step is longer than that of a single rank that updates the same share of the state. One
variant runs at a time, in separate processes. Every other round is in reverse order, ratios are
taken within a round, and medians are printed. `fit` searches the largest micro batch that fits and
measures the time of an epoch with it. `--smoke` runs either of them with a tiny model.
"""

import argparse
import os
import statistics
import sys
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import _zero_census as census
from benchmarks._verdict import Check, verdict
from benchmarks._zero_fit import fit_table
from benchmarks._zero_ranks import started
from benchmarks._zero_variants import (
    DISTRIBUTED,
    REFERENCE,
    SAME_IN_TORCH,
    SAME_STAGE,
    SIZES,
    STATES,
    VARIANTS,
    Work,
)
from megacore.config.deepspeed import zero_of
from megacore.engine.deepspeed.operators import build_operator
from megacore.engine.deepspeed.settings import deepspeed_settings
from megacore.plan.memory import whole_muon_elements
from megacore.plan.zero import ELEMENT_BYTES, ZeroBytes, zero_bytes

TOLERANCE, FASTER = 0.05, 1.3
MB = 1e6
_OWN_COLUMNS = (census.PERSISTED, census.BUCKETS)


@dataclass
class Measured:
    """Measurements of one variant."""

    work: Work
    seconds: list[float] = field(default_factory=list)
    """Seconds of a step on the slowest rank, in each round."""
    memory: list[dict[str, float]] = field(default_factory=list)
    """Memory of the rank with the highest peak, in each round."""
    alone: list[float] = field(default_factory=list)
    """Seconds of the same work of a rank without messages, in each round in which it was
    measured."""
    rank_census: dict[str, Any] = field(default_factory=dict)
    """Census of the first rank."""

    def run_alone(self, steps: int) -> None:
        """Measure a single rank, whose update counts by the share of the state that ranks have."""
        with started(replace(self.work, ranks=1)) as ranks:
            ranks.ask("run 1")
            result = ranks.ask(f"run {steps}")[0]
        stage = zero_of(self.work.config()).stage if VARIANTS[self.work.variant].own else 3
        share = 1 / self.work.ranks if stage else 1.0
        self.alone.append(result["seconds"] - (1 - share) * result["update"])

    @property
    def exposed(self) -> float:
        """Seconds that a step's messages add, as the median over the rounds."""
        pairs = zip(self.seconds, self.alone, strict=True)
        return statistics.median(seconds - alone for seconds, alone in pairs)

    def run(self, steps: int) -> None:
        """Start the ranks, warm up, make steps, and take the census once."""
        with started(self.work) as ranks:
            ranks.ask("run 1")
            results = ranks.ask(f"run {steps}")
            self.rank_census = self.rank_census or ranks.ask("census")[0]
        self.seconds.append(max(rank["seconds"] for rank in results))
        self.memory.append(max(results, key=lambda rank: float(rank["training_mb"])))

    def peak(self, moment: str) -> float:
        """Return the resident memory in MB at `moment`, as the median over the rounds."""
        return statistics.median(each[f"{moment}_mb"] for each in self.memory)

    def ratio(self, other: "Measured") -> float:
        """Return the median speedup over another variant, taken within rounds."""
        return statistics.median(
            other_seconds / seconds
            for seconds, other_seconds in zip(self.seconds, other.seconds, strict=True)
        )


def formula(work: Work, psi: int) -> ZeroBytes:
    """Return ZeRO's formula, with gradients in the type in which micro batches accumulate them."""
    config = work.config()
    zero, accumulated = zero_of(config), 4
    if config.engine == "deepspeed":
        settings = deepspeed_settings(
            config, precision=work.precision, device_type=work.device, data_parallel_size=work.ranks
        )
        accumulated = ELEMENT_BYTES[settings["data_types"]["grad_accum_dtype"]]
    return zero_bytes(
        psi,
        zero.stage,
        work.ranks,
        work.precision,
        gradient_bytes=accumulated,
        offload_optimizer=zero.offload_optimizer,
        offload_param=zero.offload_param,
        single_moment=whole_muon_elements(config, SIZES[work.size].vocab_size),
    )


def state_table(measured: dict[str, Measured]) -> tuple[list[str], list[tuple[str, str, float]]]:
    """Return the rows of a Markdown table, and the ratio of each state's bytes to the formula."""
    rows = [
        "| variant | parameters | gradients | optimizer | bytes per parameter | of these offloaded "
        f"| {' | '.join(_OWN_COLUMNS)} | further | of live tensors known |",
        "| --- |" + " ---: |" * (5 + len(_OWN_COLUMNS)) + " --- | ---: |",
    ]
    ratios = []
    for name, each in measured.items():
        if not VARIANTS[name].own:
            continue
        kinds = dict(each.rank_census["kinds"])
        expected = formula(each.work, each.rank_census["psi"])
        known_bytes = sum(kinds.values())
        optimizer = (
            (census.MOMENTS,) if each.work.precision == "fp32" else (census.MAIN, census.MOMENTS)
        )
        offloaded = sum(
            each.rank_census["hosted"].get(kind, 0)
            for kind in (census.PARAMETERS, census.GRADIENTS, *optimizer)
        )
        pairs = {
            "parameters": (kinds.pop(census.PARAMETERS, 0), expected.parameters),
            "gradients": (kinds.pop(census.GRADIENTS, 0), expected.gradients),
            "optimizer": (sum(kinds.pop(kind, 0) for kind in optimizer), expected.optimizer),
        }
        ratios += [
            (name, part, count / formula_bytes) for part, (count, formula_bytes) in pairs.items()
        ]
        cells = [
            f"{count / MB:,.0f} ({count / formula_bytes:.3f})"
            for count, formula_bytes in pairs.values()
        ]
        counted, known = (sum(part) for part in zip(*pairs.values(), strict=True))
        psi = each.rank_census["psi"]
        cells += [f"{counted / psi:.2f} ({known / psi:.2f})"]
        cells += [f"{offloaded / MB:,.0f}" if offloaded else "-"]
        cells += [f"{kinds.pop(kind, 0) / MB:,.1f}" for kind in _OWN_COLUMNS]
        further = [
            f"{_further(kind)} {count / MB:,.0f}"
            for kind, count in kinds.items()
            if count >= MB / 10
        ]
        cells += [
            ", ".join(further) or "-",
            f"{known_bytes / (known_bytes + each.rank_census['unknown']):.3%}",
        ]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows, ratios


def speed_table(measured: dict[str, Measured]) -> list[str]:
    """Return the rows of a Markdown table of speed and peak memory."""
    rows = [
        (
            "| variant | tokens/s | to native | to native, optimizer divided | exposed messages, s "
            "| before the model | peak of building it | peak of training | of this temporary | "
            "heap of the model | of this known |"
        ),
        "| --- |" + " ---: |" * 10,
    ]
    for name, each in measured.items():
        work = each.work
        tokens = (
            SIZES[work.size].seq_length * work.micro_batch_size * work.micro_batches * work.ranks
        )
        before, building, training = (
            each.peak(moment) for moment in ("before", "building", "training")
        )
        cells = [f"{tokens / statistics.median(each.seconds):,.0f}"]
        cells += [f"{each.ratio(measured[other]):.2f}" for other in (REFERENCE, DISTRIBUTED)]
        cells += [f"{each.exposed:.2f}" if each.alone else "-"]
        cells += [f"{mb:,.0f}" for mb in (before, building, training)]
        if VARIANTS[name].own:
            known_bytes = sum(each.rank_census["kinds"].values())
            heap = each.rank_census["allocated"]
            # Between two steps, the process has only the model and its initial memory.
            cells += [f"{mb:,.0f}" for mb in (training - before - heap / MB, heap / MB)]
            cells += [f"{known_bytes / heap:.1%}"]
        else:
            cells += ["-"] * 3
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


def _further(kind: str) -> str:
    return "fp32 copy of the weights" if kind == census.MAIN else kind


def contestants(options: argparse.Namespace, precision: str) -> dict[str, Measured]:
    """Return the variants that are compared, not yet measured."""
    size = "tiny" if options.smoke else options.size
    possible = [
        name
        for name, variant in STATES.items()
        if options.optimizer == "adam" or variant.engine == "native"
    ]
    names = [
        name for name in possible if name in {REFERENCE, DISTRIBUTED, *(options.variants or STATES)}
    ]
    if any(VARIANTS[name].compiled_adam for name in names):
        build_operator("cpu_adam")
    return {
        name: Measured(
            Work(
                name,
                size,
                precision,
                options.device,
                options.ranks,
                micro_batches=options.micro_batches,
                optimizer=options.optimizer,
            )
        )
        for name in names
    }


def take_turns(
    measured: dict[str, Measured], number: int, steps: int, *, alone: bool = False
) -> None:
    """Run every variant once, if asked also on a single rank; in reverse order in odd rounds."""
    for name in measured if number % 2 == 0 else reversed(measured):
        load = os.getloadavg()[0]
        each = measured[name]
        each.run(steps)
        if alone:
            each.run_alone(steps)
        sys.stderr.write(
            f"{each.work.precision} round {number + 1} {name}: {each.seconds[-1]:.2f} s, load "
            f"before {load:.1f}, largest unknown "
            f"{each.rank_census.get('largest_unknown', ['not counted'])[:1]}\n"
        )


def report(measured: dict[str, Measured]) -> Check:
    """Print both tables and the differences from the formula.

    Return the check of the largest ratio of a state's bytes to the formula.
    """
    rows, ratios = state_table(measured)
    beyond = [
        f"{name}: {part} {ratio:.3f} of the formula"
        for name, part, ratio in ratios
        if abs(ratio - 1) > TOLERANCE
    ]
    first = measured[REFERENCE]
    title = (
        f"{first.work.precision}, {first.rank_census['psi']:,} parameters; MB, and how many times "
        "the formula:"
    )
    sys.stdout.write("\n".join(["", title, "", *rows, "", *speed_table(measured), ""]))
    for line in beyond:
        sys.stdout.write(f"beyond {TOLERANCE:.0%}: {line}\n")
    sys.stdout.flush()
    largest = max(ratio for _, _, ratio in ratios)
    return Check(
        f"{first.work.precision}: most of a state to the formula",
        largest,
        1.0 + TOLERANCE,
        at_most=True,
    )


def speedups(measured: dict[str, Measured]) -> list[Check]:
    """Return the checks of the native engine's speed against DeepSpeed's and fully_shard."""
    return [
        Check(
            f"{measured[native].work.precision}: {native} to {peer}",
            measured[native].ratio(measured[peer]),
            goal,
        )
        for peers, goal in ((SAME_STAGE, FASTER), (SAME_IN_TORCH, 1.0))
        for native, peer in peers.items()
        if native in measured and peer in measured
    ]


def main() -> int:
    """Run the requested measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("state", "fit"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, help="default: 2 on a CPU, every GPU")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--smoke", action="store_true", help="with a tiny model")
    state = parser.add_argument_group("state")
    state.add_argument("--size", choices=SIZES, default="124M")
    state.add_argument("--variants", nargs="+", choices=STATES, help="besides the two native ones")
    state.add_argument(
        "--optimizer", choices=("adam", "muon"), default="adam", help="muon: native variants only"
    )
    state.add_argument("--rounds", type=int, default=2)
    state.add_argument("--steps", type=int, default=2, help="of each variant in a round")
    state.add_argument(
        "--micro-batches", type=int, default=2, help="of one sample, on each rank in a step"
    )
    state.add_argument(
        "--exposed", action="store_true", help="measure each variant also alone on one rank"
    )
    fit = parser.add_argument_group("fit")
    fit.add_argument("--sizes", nargs="+", choices=SIZES, default=["345M", "1.5B"])
    fit.add_argument("--samples", type=int, default=10_000, help="of an epoch")
    fit.add_argument("--most", type=int, default=1024, help="largest micro batch that is tried")
    options = parser.parse_args()
    if options.ranks is None:
        options.ranks = 2 if options.device == "cpu" else _gpus()
    checks: list[Check] = []
    for precision in options.precision or (
        ["fp32", "bf16"] if options.what == "state" else ["bf16"]
    ):
        if options.what == "fit":
            fit_table(options, precision)
            continue
        measured = contestants(options, precision)
        for number in range(options.rounds):
            take_turns(measured, number, options.steps, alone=options.exposed)
        checks.append(report(measured))
        checks += speedups(measured)
    return verdict(f"zero {options.what}", checks)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(main())
