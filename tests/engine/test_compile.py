"""Conditions for compiled layers, and failures of the compiler.

tests/parity checks what compiled layers compute.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import TensorifyScalarRestartAnalysis

from megacore.config.run import RunConfig
from megacore.engine.base import Engine
from megacore.engine.build import build_engine, compiles
from megacore.errors import ConfigError
from megacore.parallel.mesh import ProcessMesh
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
