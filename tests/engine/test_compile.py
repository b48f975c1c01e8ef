"""Conditions for compiled layers, and failures of the compiler.

tests/parity checks what compiled layers compute.
"""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.exc import TensorifyScalarRestartAnalysis

from megacore.config.run import RunConfig
from megacore.engine.base import Engine
from megacore.engine.build import _choose_kernels, build_engine, compiles
from megacore.errors import ConfigError
from megacore.kernels import flex
from megacore.parallel.mesh import ProcessMesh
from megacore.plan.activations import Activations
from tests.train import _runs

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TOKENS = torch.randint(
    0, _runs.VOCAB_SIZE, (4, 2, _runs.SEQ_LENGTH + 1), generator=torch.Generator().manual_seed(1)
)


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))


def run(compile: str) -> RunConfig:
    config = _runs.config()
    return config.model_copy(update={"train": config.train.model_copy(update={"compile": compile})})


def build(compile: str) -> Engine:
    return build_engine(
        run(compile),
        _runs.VOCAB_SIZE,
        ProcessMesh.serial(),
        special_tokens=_runs.TOKENS,
        device=CPU,
        precision="fp32",
    )


def losses(engine: Engine) -> list[float]:
    values = []
    for _ in range(3):
        engine.forward_backward(iter(TOKENS), range(len(TOKENS)))
        values.append(engine.update(1e-2, 0.1).loss)
    return values


class FailingCompiler:
    """A compiler that fails after `works_until` graphs."""

    def __init__(self, works_until: int, error: Exception | None = None) -> None:
        self.works_until, self.graphs = works_until, 0
        self.error = error or RuntimeError("no such instruction\nmore of it")

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        if self.graphs > self.works_until:
            raise self.error
        return graph.forward


def test_auto_compiles_only_on_a_gpu() -> None:
    expected = {
        ("auto", CPU): False,
        ("auto", GPU): True,
        ("on", CPU): True,
        ("on", GPU): True,
        ("off", GPU): False,
    }
    assert {
        (option, device): compiles(option, "native", device) for option, device in expected
    } == expected


def test_the_engine_deepspeed_does_not_compile() -> None:
    assert not compiles("auto", "deepspeed", GPU)
    values = _runs.config().model_dump() | {"engine": "deepspeed"}
    values["train"]["compile"] = "on"
    with pytest.raises(
        (ConfigError, ValueError),
        match=r"train\.compile is on.*engine is deepspeed.*train\.compile",
    ):
        RunConfig.model_validate(values)


def test_without_a_compiler_layers_are_not_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", FailingCompiler(0))
    with caplog.at_level(logging.WARNING, logger="megacore"):
        engine = build("on")
    assert engine.kernels["layers"] == "off: no such instruction"
    assert "runs without torch.compile" in caplog.text
    assert losses(engine) == losses(build("off"))


def test_a_failure_without_message_is_reported_by_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", FailingCompiler(0, AssertionError())
    )
    assert build("on").kernels["layers"] == "off: AssertionError"


def test_a_restart_of_torchs_analysis_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = FailingCompiler(0, TensorifyScalarRestartAnalysis())

    def once(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return compiler(graph, inputs) if not compiler.graphs else graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", once)
    assert build("on").kernels["layers"] == "torch.compile of each layer"
    assert compiler.graphs == 1
    assert "runs without torch.compile" not in caplog.text


def test_a_graph_that_cannot_be_compiled_runs_uncompiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", FailingCompiler(1)
    )  # after the test of the compiler
    engine = build("on")
    assert engine.kernels["layers"] == "torch.compile of each layer"
    with caplog.at_level(logging.WARNING, logger="megacore"):
        values = losses(engine)
    assert (
        "a part of the model runs without torch.compile, which failed: no such instruction"
        in caplog.text
    )
    # Compiled layers leave norms to the compiler, which rounds differently.
    assert values == pytest.approx(losses(build("off")), rel=1e-6)


DOCUMENTS: dict[str, dict[str, Any]] = {"data": {"reset_attention_mask": True}}
ALIBI = {"position_embedding_type": "alibi"}
WINDOW = {"sliding_window": 5}
CP2 = {"parallel": {"context_parallel_size": 2}, "launch": {"nproc_per_node": 2}}
BLOCKS = "spans in blocks"
MASKS: dict[str, tuple[dict[str, Any], str | None, int]] = {
    "none": ({}, None, 0),
    "a window as long as the sequence": ({"model": {"sliding_window": 16}}, None, 0),
    "documents": (DOCUMENTS, BLOCKS, 1),
    "a window": ({"model": WINDOW}, BLOCKS, 1),
    "alibi": ({"model": ALIBI}, BLOCKS, 1),
    "a soft cap": ({"model": {"attn_logit_softcapping": 2.0}}, BLOCKS, 1),
    "parts of sequences": (CP2, BLOCKS, 1),
    "flex": (DOCUMENTS | {"kernels": {"attention": "flex"}}, BLOCKS, 1),
    "plain": (
        DOCUMENTS | {"kernels": {"attention": "plain"}},
        "dense (train.kernels.attention is plain)",
        0,
    ),
    "dropout": (
        DOCUMENTS | {"model": {"attention_dropout": 0.1}},
        "dense (FlexAttention is not used: it drops no weights (model.attention_dropout is 0.1))",
        0,
    ),
    "small heads": (
        DOCUMENTS | {"model": {"kv_channels": 8}},
        "dense (FlexAttention is not used: it needs heads of 16 or more features (they have 8))",
        0,
    ),
    "uncompiled": (
        DOCUMENTS | {"compile": "off"},
        "dense (FlexAttention is not used: the layers are not compiled (train.compile), and it "
        "would store all scores)",
        0,
    ),
}
"""Sections of a configuration, the form of its masks in the run's record on a GPU, and trials of
FlexAttention at the start of the run."""


def masked(sections: dict[str, Any]) -> RunConfig:
    values = dict(sections)
    plain = {"weight_gradient": "plain", "cross_entropy": "plain"}  # without a GPU
    train = {"kernels": plain | values.pop("kernels", {}), "compile": values.pop("compile", "auto")}
    model = {"hidden_size": 32, **values.pop("model", {})}
    return _runs.config(train=train, model=model, **values)


def gpu_compiler(config: RunConfig) -> Any:
    if not compiles(config.train.compile, config.engine, GPU):
        return None
    return SimpleNamespace(works=True, device=GPU, compile=None)


@pytest.mark.parametrize("name", MASKS)
def test_masks_in_compiled_layers_on_a_gpu_choose_flex(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials: list[Any] = []
    monkeypatch.setattr(flex, "try_out", lambda *arguments: trials.append(arguments))
    sections, form, expected_trials = MASKS[name]
    config = masked(sections)
    kernels, forms = _choose_kernels(config, GPU, torch.bfloat16, gpu_compiler(config))
    assert forms.get("masks") == form
    assert (kernels.masks == "blocks") == (form == BLOCKS)
    assert ("FlexAttention" in kernels.names["packed_attention"]) == (form == BLOCKS)
    assert len(trials) == expected_trials
    if form is not None:  # the planner's prediction
        assert Activations(config, 2, "cuda")._blocked == (form == BLOCKS)


def test_a_cpu_tries_no_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "try_out", None)
    compiler: Any = SimpleNamespace(works=True, device=CPU, compile=None)
    kernels, forms = _choose_kernels(masked(DOCUMENTS), CPU, torch.float32, compiler)
    assert kernels.masks != "blocks"
    assert forms["masks"] == "spans"


def test_where_flex_does_not_compile_masks_are_dense(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such instruction\nmore of it")

    monkeypatch.setattr(flex, "try_out", fail)
    config = masked(DOCUMENTS)
    kernels, forms = _choose_kernels(config, GPU, torch.bfloat16, gpu_compiler(config))
    assert kernels.masks != "blocks"
    reason = "it does not compile here: no such instruction"
    assert forms["masks"] == f"dense (FlexAttention is not used: {reason})"
    assert "runs without torch.compile" not in caplog.text
    config = masked(DOCUMENTS | {"kernels": {"attention": "flex"}})
    with pytest.raises(ConfigError, match=rf"attention is flex, which cannot run here: {reason}"):
        _choose_kernels(config, GPU, torch.bfloat16, gpu_compiler(config))


@pytest.mark.parametrize("values", [{}, ALIBI, {"attn_logit_softcapping": 2.0}], ids=str)
def test_the_trial_of_flex_is_of_the_models_attention(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, whose gradients torch refuses, one operator at a time."""
    monkeypatch.setattr(flex.flex, "_validate_device", lambda *_: None)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    model = masked({"model": {"num_query_groups": 1, "kv_channels": 24} | values}).model
    flex.try_out(backend, CPU, torch.float32, model)
    torch._dynamo.reset()
    (graph,) = graphs
    shapes = [
        node.meta["example_value"].shape for node in graph.graph.nodes if node.op == "placeholder"
    ]
    assert {(1, 2, 256, 24), (1, 1, 256, 24)} < set(shapes)
    code = graph.print_readable(print_output=False)
    assert ("tanh" in code) == ("attn_logit_softcapping" in values)
    assert ((2,) in shapes) == (values == ALIBI)  # the slopes
