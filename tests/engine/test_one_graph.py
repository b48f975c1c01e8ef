"""Compiled layers: each kind is one graph, which computes what the layer computes without it.

The back end runs the graph's operators one by one, so results are equal in every bit.
"""

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters

from megacore.engine.base import Engine
from megacore.engine.build import Compiler, build_engine
from megacore.engine.native import NativeEngine
from tests._dist import run_distributed
from tests.parity import _training
from tests.parity._training import Case

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "num_query_groups": 2,
    "add_bias_linear": False,
}
GEMMA2 = LLAMA | {
    "norm_position": "sandwich",
    "apply_layernorm_1p": True,
    "sliding_window": 5,
    "window_attn_skip_freq": 2,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
OLMO2 = LLAMA | {
    "norm_position": "reordered",
    "qk_layernorm": True,
    "qk_layernorm_scope": "projection",
}
ALIBI = {"position_embedding_type": "alibi", "parallel_residual": True}
T5 = {"position_embedding_type": "relative", "normalization": "rmsnorm"}
TP2 = {"tensor_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
SP = {"sequence_parallel": True}
SERIAL = {
    "gpt": Case(model=DROPOUT, train={"recompute": "full"}),
    "llama": Case(model=LLAMA, train={"recompute": "selective"}),
    "alibi": Case(model=ALIBI),
    "gemma2": Case(model=GEMMA2),
    "olmo2": Case(model=OLMO2),
    "bert": Case(model=DROPOUT, family="bert"),
    "t5": Case(model=T5, family="t5"),
}
TWO_RANKS = {
    "gpt": Case(TP2),
    "llama": Case(TP2 | SP, model=LLAMA),
    "parts": Case(CP2, model=LLAMA),
    "parts with dropout": Case(CP2, {"recompute": "full"}, DROPOUT),
    "gemma2": Case(TP2, model=GEMMA2),
    "olmo2": Case(TP2 | SP, model=OLMO2),
    "one group of keys": Case(TP2 | SP, model=LLAMA | {"num_query_groups": 1}),
}


def case_result(case: Case, compiled: bool) -> dict[str, Any]:
    """Return losses and main gradients of two micro batches, and the graphs and their breaks."""
    options = {"kernels": "plain", "compile": "on" if compiled else "off"}
    config = _training.config(
        Case(
            case.parallel,
            case.train | options,
            {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4} | case.model,
            family=case.family,
        )
    )
    torch._dynamo.reset()
    counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compiler, "__call__", lambda self, graph, inputs: aot_eager(graph, inputs))
        engine = build_engine(
            config,
            _training.VOCAB,
            _training.mesh_of(config),
            special_tokens=_training.TOKENS,
            device=torch.device("cpu"),
            precision="fp32",
        )
        assert ("layers" in engine.kernels) == compiled
        counters.clear()
        losses = backward(engine, _training.samples(case.family)[:8])
    return {
        "losses": losses,
        "gradients": gradients(engine),
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": [reason.splitlines()[0] for reason in counters["graph_break"]],
    }


def backward(engine: Engine, samples: Tensor) -> list[Tensor]:
    engine.forward_backward(iter(samples.split(4)), [5, 6])
    assert isinstance(engine, NativeEngine)
    return [loss.clone() for loss in engine._losses]


def gradients(engine: Engine) -> dict[str, Tensor]:
    assert isinstance(engine, NativeEngine)
    return {name: grad for sync in engine._syncs for name, grad in sync.gradients.items()}


def both(cases: dict[str, Case]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    return {
        name: (case_result(case, True), case_result(case, False)) for name, case in cases.items()
    }


def check(name: str, compiled: dict[str, Any], eager: dict[str, Any]) -> None:
    assert compiled["breaks"] == []
    # T5's encoder and decoder; Gemma 2's layers with and without a window
    assert compiled["graphs"] == (2 if name in ("t5", "gemma2") else 1)
    assert eager["graphs"] == 0
    assert len(compiled["losses"]) == len(eager["losses"]) > 0
    for loss, expected in zip(compiled["losses"], eager["losses"], strict=True):
        assert torch.equal(loss, expected)
    assert compiled["gradients"].keys() == eager["gradients"].keys()
    for parameter, gradient in compiled["gradients"].items():
        assert torch.equal(gradient, eager["gradients"][parameter]), parameter
        assert gradient.any(), parameter


@pytest.mark.parametrize(
    "name",
    [
        *("gpt", "llama", "bert", "t5", "gemma2"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("alibi", "olmo2")),
    ],
)
def test_a_layer_is_one_graph(name: str) -> None:
    check(name, case_result(SERIAL[name], True), case_result(SERIAL[name], False))


@pytest.mark.slow
def test_a_layer_is_one_graph_on_two_ranks() -> None:
    for results in run_distributed(2, both, TWO_RANKS):
        for name, (compiled, eager) in results.items():
            check(name, compiled, eager)
