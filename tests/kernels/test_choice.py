"""Choice of the implementation of each operation, and the norms of apex."""

import sys
from types import ModuleType
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.config.train import KernelsConfig
from megacore.errors import ConfigError
from megacore.kernels import activation, choice, dropout, implementation, norm, rope
from megacore.kernels.choice import Kernels, choose_kernels, plain_kernels, summary
from megacore.kernels.cpu import common
from megacore.kernels.implementation import (
    Implementation,
    Setting,
    cpp_obstacle,
    everywhere,
    first_usable,
    has_apex,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda")
POINTWISE = {
    "layer_norm": norm.LAYER_NORM,
    "rms_norm": norm.RMS_NORM,
    "bias_activation": activation.BIAS_ACTIVATION,
    "gated": activation.GATED,
    "rotate": rope.IMPLEMENTATIONS,
    "bias_dropout_add": dropout.BIAS_DROPOUT_ADD,
    "dropout": dropout.DROPOUT,
}


def test_every_operation_is_named_and_has_a_callable() -> None:
    for kernels in (
        choose_kernels(Setting(CPU, torch.float32)),
        choose_kernels(Setting(CPU, torch.bfloat16)),
        plain_kernels(),
    ):
        assert set(kernels.names) == set(Kernels.__dataclass_fields__) - {
            "names",
            "masks",
        }
        for operation, name in kernels.names.items():
            assert name
            assert getattr(kernels, operation) is not None


def test_plain_torch_is_usable_everywhere_and_last() -> None:
    for implementations in choice._OPERATIONS.values():
        assert implementations[-1].name.startswith("torch")
        for device in (CPU, GPU):
            for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
                assert implementations[-1].usable(Setting(device, dtype))
    assert all(name.startswith("torch") for name in plain_kernels().names.values())


def test_types_and_cpus_without_kernels_use_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for dtype in (torch.float16, torch.float64):
        names = dict(choose_kernels(Setting(CPU, dtype)).names)
        assert all(name.startswith("torch") for name in names.values()), names
    monkeypatch.setattr(common, "runs_fp32", lambda: False)
    monkeypatch.setattr(common, "runs_bf16", lambda: False)
    plain = dict(plain_kernels().names)
    for operation in ("attention", "packed_attention"):
        plain[operation] += ", masks in tiles"
    for dtype in (torch.float32, torch.bfloat16):
        assert choose_kernels(Setting(CPU, dtype)).names == plain


@pytest.mark.skipif(not common.runs_bf16(), reason="this CPU has no AVX512-BF16")
def test_a_cpu_with_avx512_bf16_uses_the_cpp_kernels() -> None:
    names = choose_kernels(Setting(CPU, torch.bfloat16)).names
    for operation in (
        "attention",
        "packed_attention",
        "cross_entropy",
        "optimizer",
        "weight_gradient",
    ):
        assert names[operation].startswith("C++"), operation


def test_installed_apex_is_the_first_choice_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(
        "apex" in name for name in choose_kernels(Setting(CPU, torch.float32)).names.values()
    )
    for name in ("amp_C", "fused_weight_gradient_mlp_cuda"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    has_apex.cache_clear()
    monkeypatch.setattr("importlib.import_module", sys.modules.__getitem__)
    setting = Setting(GPU, torch.bfloat16)
    try:
        for operation in ("optimizer", "sum_of_squares", "weight_gradient"):
            first = choice._OPERATIONS[operation][0]
            assert first.name.startswith("apex")
            assert first.usable(setting)
            assert not first.usable(Setting(CPU, torch.bfloat16))
    finally:
        has_apex.cache_clear()


def test_a_module_that_is_not_compiled_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise ModuleNotFoundError("No module named 'megacore.kernels.cpu._kernels'")

    monkeypatch.setitem(
        choice._OPERATIONS, "rotate", (Implementation("cpp", "C++", load, everywhere),)
    )
    with pytest.raises(
        ConfigError, match=r"_kernels'\): install megacore again.*train\.kernels to plain"
    ):
        choose_kernels(Setting(CPU, torch.float32))


def test_cpu_capabilities_are_not_queried_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megacore.kernels.cpu.common", None)
    monkeypatch.delattr("megacore.kernels.cpu.common")
    with pytest.raises(ImportError):
        cpp_obstacle(Setting(CPU, torch.float32))
    assert "CPUs only" in str(cpp_obstacle(Setting(GPU, torch.float32)))


def test_the_summary_groups_operations_by_implementation() -> None:
    assert summary({"a": "torch", "b": "C++", "c": "torch"}) == "torch: a, c; C++: b"


class Apex(ModuleType):
    """A stand-in for `apex.normalization.fused_layer_norm` that computes with torch."""

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
    monkeypatch.setattr(
        implementation, "has_apex", lambda module: module == "fused_layer_norm_cuda"
    )
    return stand_in


def test_apex_norms_equal_torch(apex: Apex) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (
        torch.randn(*shape, generator=generator) for shape in ((3, 4, 10), (10,), (10,))
    )
    name, layer_norm = first_usable(norm.LAYER_NORM, Setting(GPU, torch.bfloat16))
    assert name == "apex FusedLayerNorm"
    torch.testing.assert_close(
        layer_norm(x, weight, bias, 0.5), F.layer_norm(x, (10,), weight, bias, 0.5)
    )
    name, rms_norm = first_usable(norm.RMS_NORM, Setting(GPU, torch.bfloat16))
    assert name == "apex FusedRMSNorm"
    torch.testing.assert_close(rms_norm(x, weight, 0.5), F.rms_norm(x, (10,), weight, 0.5))
    assert apex.shapes == [[10], [10]]
    torch.testing.assert_close(
        layer_norm(x, weight, None, 0.5), F.layer_norm(x, (10,), weight, None, 0.5)
    )
    assert len(apex.shapes) == 2


def test_apex_norms_are_not_used_in_graphs_or_on_cpus(apex: Apex) -> None:
    for implementations in (norm.LAYER_NORM, norm.RMS_NORM):
        assert (
            first_usable(implementations, Setting(GPU, torch.bfloat16, compiled=True))[0] == "torch"
        )
        assert "apex" not in first_usable(implementations, Setting(CPU, torch.bfloat16))[0]


@pytest.mark.parametrize("operation", POINTWISE)
def test_plain_torch_is_used_if_nothing_else_runs(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implementation, "has_apex", lambda module: False)
    assert first_usable(POINTWISE[operation], Setting(GPU, torch.bfloat16))[0] == "torch"
    assert first_usable(POINTWISE[operation], Setting(CPU, torch.float16))[0] == "torch"
    assert first_usable(POINTWISE[operation], Setting(CPU, torch.float64))[0] == "torch"
    monkeypatch.setattr(common, "runs", lambda dtype: False)
    assert first_usable(POINTWISE[operation], Setting(CPU, torch.bfloat16))[0] == "torch"


@pytest.mark.skipif(not common.runs_bf16(), reason="this CPU has no AVX512-BF16")
@pytest.mark.parametrize("operation", POINTWISE)
def test_bf16_uses_avx512_on_cpus_that_support_it(operation: str) -> None:
    assert first_usable(POINTWISE[operation], Setting(CPU, torch.bfloat16))[0] == "C++ with AVX-512"


@pytest.mark.skipif(not common.runs_fp32(), reason="this CPU has no AVX-512")
def test_norms_and_dropout_of_compiled_models_are_left_to_torch() -> None:
    compiled = {
        operation: first_usable(implementations, Setting(CPU, torch.float32, compiled=True))[0]
        for operation, implementations in POINTWISE.items()
    }
    assert {operation for operation, name in compiled.items() if name == "torch"} == {
        "layer_norm",
        "rms_norm",
        "bias_dropout_add",
        "dropout",
    }


def test_the_configuration_has_the_options_of_every_operation() -> None:
    assert set(choice._CHOSEN_TOGETHER) == set(KernelsConfig.model_fields)
    operations = [operation for group in choice._CHOSEN_TOGETHER.values() for operation in group]
    assert sorted(operations) == sorted(choice._OPERATIONS)
    for name, group in choice._CHOSEN_TOGETHER.items():
        options = get_args(KernelsConfig.model_fields[name].annotation)
        for operation in group:
            existing = [each.option for each in choice._OPERATIONS[operation]]
            assert options == ("auto", *dict.fromkeys(existing)), operation


@pytest.mark.skipif(not common.runs_fp32(), reason="this CPU has no AVX-512")
def test_each_operation_has_its_own_choice() -> None:
    automatic = choose_kernels(Setting(CPU, torch.float32))
    plain = choose_kernels(
        Setting(CPU, torch.float32), config=KernelsConfig.model_validate("plain")
    )
    for name, group in choice._CHOSEN_TOGETHER.items():
        if name == "weight_gradient":
            continue  # torch is the automatic choice in fp32
        chosen = choose_kernels(
            Setting(CPU, torch.float32), config=KernelsConfig(**{name: "plain"})
        )
        for operation in chosen.names:
            expected = plain if operation in group else automatic
            assert chosen.names[operation] == expected.names[operation]
        for operation in set(group) - {"attention", "packed_attention"}:  # new in each choice
            assert getattr(chosen, operation) == getattr(plain, operation)
    tiled = "torch scaled_dot_product_attention, masks in tiles"  # only on CPUs
    attentions = {"attention": tiled, "packed_attention": tiled}
    assert plain.names == dict(plain_kernels().names) | attentions
    # torch.compile makes torch's norm the automatic choice; a configured one stays.
    compiled = Setting(CPU, torch.float32, compiled=True)
    names = choose_kernels(compiled, config=KernelsConfig(norm="cpp", attention="cpp")).names
    assert names["rms_norm"] == "C++ with AVX-512"
    assert names["attention"] == "C++ with AVX-512, torch for dropout and biases"


@pytest.mark.parametrize("option", ["auto", "plain", "cpp"])
def test_a_configuration_is_read_back_as_it_was_written(option: str) -> None:
    values = dict.fromkeys(KernelsConfig.model_fields, option)
    if option == "cpp":
        values["sum_of_squares"] = "plain"
    everything = KernelsConfig.model_validate(values)
    for config in (everything, everything.model_copy(update={"norm": "plain"})):
        written = config.model_dump(mode="json")
        assert KernelsConfig.model_validate(written) == config
    assert everything.for_evaluation.adamw == "auto"
    assert everything.for_evaluation.norm == option


REFUSED = {
    "norm: apex": (CPU, torch.float32, False, "runs on NVIDIA GPUs only.*is on cpu"),
    "adamw: apex": (GPU, torch.float32, False, "module amp_C cannot be imported"),
    "attention: cpp": (GPU, torch.bfloat16, False, "runs on CPUs only.*is on cuda"),
    "rope: cpp": (CPU, torch.float16, False, "fp32 and bf16 only, and the model in fp16"),
    "dropout: cpp": (CPU, torch.float32, True, "set train.compile to off"),
    "weight_gradient: cpp": (
        CPU,
        torch.float16,
        False,
        "fp32 and bf16 only, and the model in fp16",
    ),
    "weight_gradient: torch_fp32": (CPU, torch.bfloat16, False, "runs on GPUs only"),
    "weight_gradient: apex": (GPU, torch.float32, False, "half precision only"),
}


@pytest.mark.parametrize("chosen", REFUSED)
def test_an_implementation_that_cannot_run_is_refused(
    chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implementation, "has_apex", lambda module: False)
    name, option = chosen.split(": ")
    device, dtype, compiled, reason = REFUSED[chosen]
    config = KernelsConfig.model_validate({name: option})
    with pytest.raises(
        ConfigError, match=rf"train\.kernels\.{name} is {option}, .* here: .*{reason}"
    ):
        choose_kernels(Setting(device, dtype, compiled=compiled), config=config)


def test_a_soft_cap_of_the_scores_chooses_a_kernel_that_has_it() -> None:
    names = choose_kernels(Setting(CPU, torch.float32, softcapped=True)).names
    assert names["attention"] == "torch with stored scores"
    with pytest.raises(
        ConfigError, match=r"attention is cpp, .*: it has no soft cap .*attn_logit_softcapping"
    ):
        choose_kernels(
            Setting(CPU, torch.float32, softcapped=True), config=KernelsConfig(attention="cpp")
        )
    uncapped = choose_kernels(Setting(CPU, torch.float32), config=KernelsConfig(attention="plain"))
    assert uncapped.names["attention"].startswith("torch scaled_dot_product_attention")


@pytest.mark.parametrize(
    ("dtype", "instructions"), [(torch.float32, "AVX-512"), (torch.bfloat16, "AVX512-BF16")]
)
def test_a_configured_kernel_names_the_missing_instructions(
    dtype: torch.dtype, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "runs", lambda dtype: False)
    with pytest.raises(ConfigError, match=rf"norm is cpp.*this CPU has no {instructions};"):
        choose_kernels(Setting(CPU, dtype), config=KernelsConfig(norm="cpp"))


def test_compiled_cross_entropy_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: object) -> None:
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(torch, "compile", fail)
    with pytest.raises(ConfigError, match=r"does not work here \(RuntimeError: no compiler\);"):
        choose_kernels(Setting(CPU, torch.float32), config=KernelsConfig(cross_entropy="compiled"))
