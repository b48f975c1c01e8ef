"""Which implementation of norms, activations, rotations and sums is used where, and how apex is called."""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.kernels import bias_activation, bias_dropout_add, dropout, norm, rope, swiglu
from megacore.kernels.cpu import support
from megacore.kernels.implementation import Setting, first_usable

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ALL = {
    "layer_norm": norm.LAYER_NORM,
    "rms_norm": norm.RMS_NORM,
    "bias_activation": bias_activation.IMPLEMENTATIONS,
    "gated": swiglu.IMPLEMENTATIONS,
    "rotate": rope.IMPLEMENTATIONS,
    "bias_dropout_add": bias_dropout_add.IMPLEMENTATIONS,
    "dropout": dropout.IMPLEMENTATIONS,
}


class Apex(ModuleType):
    """Stands in for `apex.normalization.fused_layer_norm`: the same arguments, computed by torch."""

    def __init__(self) -> None:
        super().__init__("apex.normalization.fused_layer_norm")
        self.shapes: list[list[int]] = []

    def fused_layer_norm_affine(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: list[int],
        eps: float = 1e-6,
        memory_efficient: bool = False,
    ) -> Tensor:
        assert not memory_efficient
        self.shapes.append(normalized_shape)
        return F.layer_norm(input, normalized_shape, weight.contiguous(), bias.contiguous(), eps)

    def fused_rms_norm_affine(
        self,
        input: Tensor,
        weight: Tensor,
        normalized_shape: list[int],
        eps: float = 1e-6,
        memory_efficient: bool = False,
    ) -> Tensor:
        assert not memory_efficient
        self.shapes.append(normalized_shape)
        return F.rms_norm(input, normalized_shape, weight.contiguous(), eps)


@pytest.fixture
def apex(monkeypatch: pytest.MonkeyPatch) -> Apex:
    stand_in = Apex()
    for name in ("apex", "apex.normalization"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.setattr(norm, "has_apex", lambda module: module == "fused_layer_norm_cuda")
    return stand_in


def test_apex_norms_on_gpus(apex: Apex) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((3, 4, 10), (10,), (10,)))
    name, layer_norm = first_usable(norm.LAYER_NORM, Setting(GPU, torch.bfloat16))
    assert name == "apex FusedLayerNorm"
    torch.testing.assert_close(layer_norm(x, weight, bias, 0.5), F.layer_norm(x, (10,), weight, bias, 0.5))
    name, rms_norm = first_usable(norm.RMS_NORM, Setting(GPU, torch.bfloat16))
    assert name == "apex FusedRMSNorm"
    torch.testing.assert_close(rms_norm(x, weight, 0.5), F.rms_norm(x, (10,), weight, 0.5))
    assert apex.shapes == [[10], [10]]
    torch.testing.assert_close(layer_norm(x, weight, None, 0.5), F.layer_norm(x, (10,), weight, None, 0.5))
    assert len(apex.shapes) == 2


def test_apex_norms_are_not_for_graphs_or_cpus(apex: Apex) -> None:
    for implementations in (norm.LAYER_NORM, norm.RMS_NORM):
        assert first_usable(implementations, Setting(GPU, torch.bfloat16, compiled=True))[0] == "torch"
        assert "apex" not in first_usable(implementations, Setting(CPU, torch.bfloat16))[0]


@pytest.mark.parametrize("operation", ALL)
def test_plain_torch_where_nothing_else_runs(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "has_apex", lambda module: False)
    assert first_usable(ALL[operation], Setting(GPU, torch.bfloat16))[0] == "torch"
    assert first_usable(ALL[operation], Setting(CPU, torch.float16))[0] == "torch"
    assert first_usable(ALL[operation], Setting(CPU, torch.float64))[0] == "torch"
    monkeypatch.setattr(support, "runs", lambda dtype: False)
    assert first_usable(ALL[operation], Setting(CPU, torch.bfloat16))[0] == "torch"


@pytest.mark.skipif(not support.runs_bf16(), reason="this CPU has no AVX512-BF16")
@pytest.mark.parametrize("operation", ALL)
def test_bf16_on_cpus_that_have_it(operation: str) -> None:
    assert first_usable(ALL[operation], Setting(CPU, torch.bfloat16))[0] == "C++ with AVX-512"


@pytest.mark.skipif(not support.runs_fp32(), reason="this CPU has no AVX-512")
def test_what_torch_compile_does_as_well_is_left_to_it() -> None:
    compiled = {
        operation: first_usable(found, Setting(CPU, torch.float32, compiled=True))[0]
        for operation, found in ALL.items()
    }
    assert {operation for operation, name in compiled.items() if name == "torch"} == {
        "layer_norm",
        "rms_norm",
        "bias_dropout_add",
        "dropout",
    }
