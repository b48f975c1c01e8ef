"""Kills at random moments, full disks and lost servers.

After each fault no partial output is visible, no process or file is left over, and the repeated
call gives the same result.

A failed case is repeated by its id, for instance `pytest
"tests/faults/test_kills.py::test_killed_call_can_be_repeated[save-async-2]"`, and any other case by
`python -m tests.faults.soak --case save-async-300017`.
"""

from collections.abc import Callable
from typing import Any

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
FAST = {"train-2-0", "save-async-0", "tokenize-0", "index-0", "disk-train-1"}
"""Cases that `make test` runs."""
LONG_KILLS = [case for case in KILLS if case.seed and str(case) not in FAST]
"""All but the first case of each kind, which `make test-long` runs."""


def marked(cases: list[Case]) -> list[Any]:
    marks = {case: pytest.mark.long if case in LONG_KILLS else pytest.mark.slow for case in cases}
    return [pytest.param(case, marks=() if str(case) in FAST else marks[case]) for case in cases]


@pytest.mark.parametrize("case", marked(KILLS), ids=str)
def test_killed_call_can_be_repeated(case: Case, outcome_of: OutcomeOf) -> None:
    (outcome,) = outcome_of(case)
    assert not outcome.faults, "\n".join(outcome.faults)


@pytest.mark.long
def test_most_kills_hit_a_running_call(
    outcome_of: OutcomeOf, request: pytest.FixtureRequest
) -> None:
    """Kills at wrong moments would test nothing."""
    if not {f"test_killed_call_can_be_repeated[{case}]" for case in LONG_KILLS} <= {
        item.name for item in request.session.items
    }:
        pytest.skip("only some cases were selected")
    outcomes = [outcome for case in LONG_KILLS for outcome in outcome_of(case)]
    assert len(outcomes) >= 25
    assert sum(outcome.hit for outcome in outcomes) >= 0.6 * len(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case("flow", 1)], ids=str)
def test_flow_killed_in_three_stages_can_be_repeated(case: Case, outcome_of: OutcomeOf) -> None:
    outcomes = outcome_of(case)
    assert len(outcomes) == KILLS_PER_FLOW
    assert not [fault for outcome in outcomes for fault in outcome.faults]
    assert any(outcome.hit for outcome in outcomes)


@pytest.mark.parametrize("case", marked(DISKS), ids=str)
def test_call_on_a_full_disk_is_refused_and_can_be_repeated(
    case: Case, outcome_of: OutcomeOf
) -> None:
    (outcome,) = outcome_of(case)
    assert not outcome.faults, "\n".join(outcome.faults)


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case("mlflow", 0)], ids=str)
def test_restarted_mlflow_server_has_all_points(case: Case, outcome_of: OutcomeOf) -> None:
    (outcome,) = outcome_of(case)
    assert not outcome.faults, "\n".join(outcome.faults)


def test_fast_cases_exist() -> None:
    assert {str(case) for case in (*KILLS, *DISKS)} >= FAST


def test_soak_contains_all_kinds_in_proportion() -> None:
    cases = soak_cases(500, seed=3)
    kills = {
        kind: sum(case.kind == kind for case in cases) for kind in {case.kind for case in cases}
    }
    assert 490 <= sum(kills.values()) + (KILLS_PER_FLOW - 1) * kills["flow"] <= 510
    assert kills.keys() == {*KILLS_IN_CI, "flow"}
    assert all(flow_stages(seed)[0] != flow_stages(seed)[1] for seed in range(20))
    assert {len(flow_stages(seed)) for seed in range(40)} == {KILLS_PER_FLOW}
