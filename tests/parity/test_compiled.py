"""Layers compiled by torch.compile on two ranks, compared with the serial run without it.

Inductor, which takes most of the time, compiles the first case. Of the others torch runs the graphs
that Inductor would get.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters

from megacore.engine.build import Compiler, Graph
from tests._dist import run_distributed
from tests.parity._training import Case, Result, train_all
from tests.parity.test_layouts import (
    CP2,
    DELAYED,
    LLAMA,
    M4,
    PP2,
    SP,
    TP2,
    ZERO3,
    compare,
    selected,
    slow_unless,
)

COMPILED = {"compile": "on"}
SHORT = {"num_layers": 2}
CASES = {
    "tp2 sp": Case(TP2 | SP, COMPILED, SHORT),
    "llama cp2": Case(CP2, COMPILED, LLAMA | SHORT),
    "pp2, selective recomputation": Case(PP2, COMPILED | M4 | {"recompute": "selective"}, SHORT),
    "pp2 delayed": Case(PP2 | DELAYED, COMPILED | M4, SHORT),
    "llama dp2 parameters, full recomputation": Case(
        ZERO3, COMPILED | M4 | {"recompute": "full"}, LLAMA | SHORT
    ),
}
LONG = {"pp2, selective recomputation", "pp2 delayed"}
"""Cases that combine what others contain, which `make test-long` runs."""


def run_graph(_: Compiler, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Graph:
    """Divide a graph into forward and backward as for Inductor, and run its operators."""
    return aot_eager(graph, list(inputs))  # type: ignore[no-any-return,no-untyped-call]


def train_compiled(cases: dict[str, Case]) -> dict[str, Result]:
    first = dict(list(cases.items())[:1])
    results = train_all(first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compiler, "__call__", run_graph)  # its errors are not caught
        before = counters["stats"]["unique_graphs"]
        results |= train_all({name: cases[name] for name in cases if name not in first})
        assert counters["stats"]["unique_graphs"] > before
    return results


@pytest.fixture(scope="module")
def two_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Result]]:
    workspace = tmp_path_factory.mktemp("workspace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGACORE_WORKSPACE", str(workspace))
        # torch sets it after the first compilation
        patch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        results = run_distributed(2, train_compiled, selected(CASES, request))
    assert any((workspace / "compiled").rglob("*.so")), "nothing was compiled into the workspace"
    return results


@pytest.fixture(scope="module")
def serial() -> dict[str, Result]:
    return {}


@pytest.mark.parametrize("name", slow_unless(CASES, set(), LONG))
def test_compiled_layers_match_the_serial_run(
    name: str, two_ranks: list[dict[str, Result]], serial: dict[str, Result]
) -> None:
    compare(CASES[name], name, two_ranks, serial)
