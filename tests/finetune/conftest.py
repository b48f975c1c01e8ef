"""Tiny models, and the results of two ranks with them, computed once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the tiny model, `model`, and the same with dropout, `dropout`."""
    pytest.importorskip("accelerate")
    from tests.finetune import _tiny_task

    root = tmp_path_factory.mktemp("finetune")
    _tiny_task.write_model(root / "model")
    _tiny_task.write_model(root / "dropout", dropout=0.2)
    return root


@pytest.fixture(scope="session")
def rank_results(tiny_root: Path, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return the results of `_two_ranks.cases` by rank: the fast cases, or all for slow tests."""
    pytest.importorskip("deepspeed")
    from tests._dist import run_distributed
    from tests.finetune import _two_ranks

    slow = any(
        item.get_closest_marker("slow") and "rank_results" in getattr(item, "fixturenames", ())
        for item in request.session.items
    )
    for model in _two_ranks.DISTRIBUTED if slow else ():
        _two_ranks.write_real(tiny_root, model)
    only = () if slow else _two_ranks.FAST
    return run_distributed(2, _two_ranks.cases, tiny_root, only, timeout=150)


@pytest.fixture
def accelerator() -> Iterator[Any]:
    """Provide the Accelerator of one process and reset its state afterwards."""
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
