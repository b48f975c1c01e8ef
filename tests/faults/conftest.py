"""Fixtures that run all selected cases two at a time while each test waits for its case."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.faults._cases import Bench, Outcome
from tests.faults._kinds import KINDS
from tests.faults._matrix import Case, run_case
from tests.faults._processes import Nursery

WORKERS = 2
FIRST = ("flow", "mlflow", "launcher")
"""Kinds to start first because they take long."""


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Provide the runner of cases, with the state they share."""
    directory = tmp_path_factory.mktemp("faults")
    bench_of_session = Bench(directory, Nursery(directory / "logs"), KINDS)
    yield bench_of_session
    bench_of_session.close()


@pytest.fixture(scope="session")
def outcome_of(
    request: pytest.FixtureRequest, bench: Bench
) -> Iterator[Callable[[Case], list[Outcome]]]:
    """Return a function that waits for a case."""
    selected = [
        item.callspec.params.get("case")
        for item in request.session.items
        if hasattr(item, "callspec")
    ]
    cases = [case for case in selected if isinstance(case, Case)]
    cases.sort(key=lambda case: FIRST.index(case.kind) if case.kind in FIRST else len(FIRST))
    store = (
        request.getfixturevalue("empty_store")
        if any(case.kind == "flow" for case in cases)
        else None
    )
    pool = ThreadPoolExecutor(WORKERS)
    futures: dict[Case, Future[list[Outcome]]] = {
        case: pool.submit(run_case, bench, case, store) for case in cases
    }
    yield lambda case: futures[case].result()
    pool.shutdown(cancel_futures=True)
