"""Tiny models and what two ranks do with them, made once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `model` and, of the same with dropout, `dropout`."""
    pytest.importorskip("accelerate")
    from tests.finetune import _tiny_task

    root = tmp_path_factory.mktemp("finetune")
    _tiny_task.write_model(root / "model")
    _tiny_task.write_model(root / "dropout", dropout=0.2)
    return root


@pytest.fixture(scope="session")
def two(tiny_root: Path) -> list[dict[str, Any]]:
    """What each of two ranks did in the cases of `_two_ranks`."""
    pytest.importorskip("deepspeed")
    from tests._dist import run_distributed
    from tests.finetune import _two_ranks

    for model in _two_ranks.DISTRIBUTED:
        _two_ranks.write_real(tiny_root, model)
    return run_distributed(2, _two_ranks.cases, tiny_root, timeout=150)


@pytest.fixture
def accelerator() -> Iterator[Any]:
    """Of one process, which leaves nothing behind."""
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
