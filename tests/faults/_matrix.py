"""Cases of continuous integration and of `make soak`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.faults._cases import Bench, Outcome
from tests.faults._disk import run_on_full_disk
from tests.faults._flow import STAGES, run_chain
from tests.faults._outage import mlflow_outage, prefect_outage
from tests.faults._servers import address, prefect_server, running

DISK = "disk-"


@dataclass(frozen=True)
class Case:
    """One case, repeated by its id."""

    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.seed}"


KILLS_IN_CI = {
    "launcher": 3,
    "train-2": 3,
    "train": 3,
    "train-async": 3,
    "save": 3,
    "save-async": 3,
    "export": 3,
    "tokenize-worker": 3,
    "tokenize": 3,
    "tokenize-shards": 3,
    "tokenizer": 3,
    "download": 3,
    "collect": 3,
    "index": 3,
    "blend": 3,
}
"""Number of cases of each kind; the single case of `flow` contains three more kills."""
DISKS_IN_CI = (
    "train-async",
    "train",
    "save-async",
    "save",
    "export",
    "tokenize",
    "tokenizer",
    "index",
    "collect",
    "download",
)
SOAK_WEIGHTS = {
    "flow": 6,
    "launcher": 8,
    "train-2": 8,
    "train": 8,
    "train-async": 8,
    "save": 8,
    "save-async": 8,
    "export": 7,
    "tokenize-worker": 6,
    "tokenize": 6,
    "tokenize-shards": 5,
    "tokenizer": 4,
    "download": 7,
    "collect": 4,
    "index": 5,
    "blend": 2,
}
"""Share of each kind in the kills, in percent."""
KILLS_PER_FLOW = 3
SERVERLESS_EVERY = 3
"""Every n-th case of the flow runs without a Prefect server."""


def run_case(bench: Bench, case: Case, store: Path | None = None) -> list[Outcome]:
    """Run a case; return one outcome for each kill.

    `store` is a migrated, empty mlflow.db for a flow, which saves a few seconds.
    """
    chain = partial(
        run_chain,
        bench.directory,
        bench.nursery,
        seed=case.seed,
        stages=flow_stages(case.seed),
        store=store,
    )
    if case.kind == "flow" and case.seed % SERVERLESS_EVERY == 0:
        # Without a server the flow starts its own, which must not outlive it either.
        return chain(api=None)
    if case.kind == "flow":
        with running(
            prefect_server(bench.directory / f"prefect-{case}", bench.directory)
        ) as server:
            return chain(api=address(server))
    if case.kind == "mlflow":
        return [mlflow_outage(bench.directory, bench.nursery, case.seed)]
    if case.kind == "prefect":
        return [prefect_outage(bench.directory, bench.nursery, case.seed)]
    if case.kind.startswith(DISK):
        return [run_on_full_disk(bench, bench.kinds[case.kind.removeprefix(DISK)], case.seed)]
    return [bench.run(case.kind, case.seed)]


def flow_stages(seed: int) -> tuple[str, ...]:
    """Return three stages of the flow, in order, always including the training."""
    others = [stage for stage in STAGES if stage != "train"]
    left_out = (seed % len(others), (seed + 1 + seed // len(others)) % len(others))
    chosen = [stage for number, stage in enumerate(others) if number not in left_out][
        : KILLS_PER_FLOW - 1
    ]
    return tuple(stage for stage in STAGES if stage == "train" or stage in chosen)


def soak_cases(kills: int, seed: int, only: Sequence[str] = ()) -> list[Case]:
    """Return the cases of a soak, the expensive kinds first.

    The kills of each kind follow its weight, with at least one case of each.
    """
    first = seed * 100_000
    chosen = {kind: weight for kind, weight in SOAK_WEIGHTS.items() if not only or kind in only}
    total = sum(chosen.values())
    cases = []
    for kind, weight in chosen.items():
        count = kills * weight / total / (KILLS_PER_FLOW if kind == "flow" else 1)
        cases += [Case(kind, first + number) for number in range(max(1, round(count)))]
    return cases
