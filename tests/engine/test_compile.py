"""When layers are compiled, and what happens where they cannot be.

tests/parity has what compiled layers compute.
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


def engine(compile: str) -> Engine:
    return build_engine(
        run(compile),
        _runs.VOCAB_SIZE,
        ProcessMesh.serial(),
        special_tokens=_runs.TOKENS,
        device=CPU,
        precision="fp32",
    )


def losses(own: Engine) -> list[float]:
    found = []
    for _ in range(3):
        own.forward_backward(iter(TOKENS), range(len(TOKENS)))
        found.append(own.update(1e-2, 0.1).loss)
    return found


class Broken:
    """A compiler that fails from some graph on."""

    def __init__(self, works_until: int, error: Exception | None = None) -> None:
        self.works_until, self.graphs = works_until, 0
        self.error = error or RuntimeError("no such instruction\nmore of it")

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        if self.graphs > self.works_until:
            raise self.error
        return graph.forward


def test_auto_compiles_on_a_gpu_alone() -> None:
    expected = {
        ("auto", CPU): False,
        ("auto", GPU): True,
        ("on", CPU): True,
        ("on", GPU): True,
        ("off", GPU): False,
    }
    assert {
        (wanted, device): compiles(wanted, "native", device) for wanted, device in expected
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


def test_without_a_compiler_layers_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", Broken(0))
    with caplog.at_level(logging.WARNING, logger="megacore"):
        own = engine("on")
    assert own.kernels["layers"] == "off: no such instruction"
    assert "runs without torch.compile" in caplog.text
    assert losses(own) == losses(engine("off"))


def test_a_failure_without_words_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", Broken(0, AssertionError()))
    assert engine("on").kernels["layers"] == "off: AssertionError"


def test_torch_may_ask_for_another_graph(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = Broken(0, TensorifyScalarRestartAnalysis())

    def once(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return asked(graph, inputs) if not asked.graphs else graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", once)
    assert engine("on").kernels["layers"] == "torch.compile of each layer"
    assert asked.graphs == 1
    assert "runs without torch.compile" not in caplog.text


def test_a_graph_that_cannot_be_compiled_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", Broken(2))
    own = engine("on")
    assert own.kernels["layers"] == "torch.compile of each layer"
    with caplog.at_level(logging.WARNING, logger="megacore"):
        found = losses(own)
    assert (
        "a part of the model runs without torch.compile, which failed: no such instruction"
        in caplog.text
    )
    # Compiled layers leave norms to the compiler: they are rounded otherwise.
    assert found == pytest.approx(losses(engine("off")), rel=1e-6)
