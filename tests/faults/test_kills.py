"""SIGKILL at random moments.

Nothing partial is visible, nothing is left over, and the same call finishes the same.

A case that failed is repeated by its id, as in `pytest
"tests/faults/test_kills.py::test_killed[save-async-2]"`, and any other by `python -m
tests.faults.soak --case save-async-300017`.
"""

from collections.abc import Callable

import pytest

from tests.faults._cases import Outcome
from tests.faults._matrix import (
    DISK,
    DISKS_IN_CI,
    KILLS_IN_CI,
    KILLS_PER_FLOW,
    Case,
    flow_stages,
    soak_cases,
)

OutcomeOf = Callable[[Case], list[Outcome]]
KILLS = [Case(kind, seed) for kind, count in KILLS_IN_CI.items() for seed in range(count)]
DISKS = [Case(f"{DISK}{kind}", seed) for seed, kind in enumerate(DISKS_IN_CI)]
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("case", KILLS, ids=str)
def test_killed(case: Case, outcome_of: OutcomeOf) -> None:
    (outcome,) = outcome_of(case)
    assert not outcome.faults, "\n".join(outcome.faults)


def test_most_kills_hit(outcome_of: OutcomeOf, request: pytest.FixtureRequest) -> None:
    """Else the moments are drawn wrongly and nothing is tested."""
    if not {f"test_killed[{case}]" for case in KILLS} <= {
        item.name for item in request.session.items
    }:
        pytest.skip("only some cases were selected")
    outcomes = [outcome for case in KILLS for outcome in outcome_of(case)]
    assert len(outcomes) >= 40
    assert sum(outcome.hit for outcome in outcomes) >= 0.6 * len(outcomes)


@pytest.mark.parametrize("case", [Case("flow", 1)], ids=str)
def test_flow_killed_in_three_stages(case: Case, outcome_of: OutcomeOf) -> None:
    outcomes = outcome_of(case)
    assert len(outcomes) == KILLS_PER_FLOW
    assert not [fault for outcome in outcomes for fault in outcome.faults]
    assert any(outcome.hit for outcome in outcomes)


@pytest.mark.parametrize("case", DISKS, ids=str)
def test_full_disk(case: Case, outcome_of: OutcomeOf) -> None:
    (outcome,) = outcome_of(case)
    assert not outcome.faults, "\n".join(outcome.faults)


@pytest.mark.parametrize("case", [Case("mlflow", 0)], ids=str)
def test_mlflow_server_killed_and_restarted(case: Case, outcome_of: OutcomeOf) -> None:
    (outcome,) = outcome_of(case)
    assert not outcome.faults, "\n".join(outcome.faults)


def test_a_soak_has_all_kinds_in_proportion() -> None:
    cases = soak_cases(500, seed=3)
    kills = {
        kind: sum(case.kind == kind for case in cases) for kind in {case.kind for case in cases}
    }
    assert 490 <= sum(kills.values()) + (KILLS_PER_FLOW - 1) * kills["flow"] <= 510
    assert kills.keys() == {*KILLS_IN_CI, "flow"}
    assert all(flow_stages(seed)[0] != flow_stages(seed)[1] for seed in range(20))
    assert {len(flow_stages(seed)) for seed in range(40)} == {KILLS_PER_FLOW}
