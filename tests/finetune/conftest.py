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


@pytest.fixture(scope="module")
def rank_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory with the runs of `rank_results`."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def rank_results(
    tiny_root: Path, rank_root: Path, request: pytest.FixtureRequest
) -> list[dict[str, Any]]:
    """Return the results of two ranks: those that the module's selected tests need.

    The module's RANK_CASES has the names of the cases of fast and of slow tests.
    """
    pytest.importorskip("deepspeed")
    from tests._dist import run_distributed
    from tests.finetune import _two_ranks

    speeds = {
        "slow" if item.get_closest_marker("slow") else "fast"
        for item in request.session.items
        if item.path == request.path and "rank_results" in getattr(item, "fixturenames", ())
    }
    needed = {name for speed in speeds for name in request.module.RANK_CASES[speed]}
    names = [name for name in _two_ranks.CASES if name in needed]
    assert len(names) == len(needed), needed
    for model in _two_ranks.DISTRIBUTED:
        if any(name.startswith(f"{model} ") for name in names):
            _two_ranks.write_real(tiny_root, model)
    return run_distributed(2, _two_ranks.run_cases, tiny_root, rank_root, names)


@pytest.fixture
def accelerator() -> Iterator[Any]:
    """Provide the Accelerator of one process and reset its state afterwards."""
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
