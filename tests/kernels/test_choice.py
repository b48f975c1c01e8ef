"""Which implementation an operation gets."""

import sys
from types import ModuleType

import pytest
import torch

from megacore.errors import ConfigError
from megacore.kernels import choice
from megacore.kernels.apex import has_apex
from megacore.kernels.choice import Kernels, choose_kernels, plain_kernels, summary
from megacore.kernels.cpu import support
from megacore.kernels.implementation import Implementation, Setting, cpp_runs, everywhere

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_every_operation_is_named_and_has_a_callable() -> None:
    for kernels in (choose_kernels(CPU, torch.float32), choose_kernels(CPU, torch.bfloat16), plain_kernels()):
        assert set(kernels.names) == set(Kernels.__dataclass_fields__) - {"names"}
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


def test_types_and_machines_without_kernels_compute_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float16, torch.float64):
        names = dict(choose_kernels(CPU, dtype).names)
        assert names.pop("sum_of_squares")  # of main gradients, which are fp32
        assert all(name.startswith("torch") for name in names.values()), names
    monkeypatch.setattr(support, "runs_fp32", lambda: False)
    monkeypatch.setattr(support, "runs_bf16", lambda: False)
    for dtype in (torch.float32, torch.bfloat16):
        assert choose_kernels(CPU, dtype).names == plain_kernels().names


@pytest.mark.skipif(not support.runs_bf16(), reason="this CPU has no AVX512-BF16")
def test_a_cpu_with_the_instructions_has_kernels_of_its_own() -> None:
    names = choose_kernels(CPU, torch.bfloat16).names
    for operation in ("attention", "packed_attention", "cross_entropy", "optimizer", "weight_gradient"):
        assert names[operation].startswith("C++"), operation


def test_apex_computes_on_a_gpu_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any("apex" in name for name in choose_kernels(CPU, torch.float32).names.values())
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


def test_a_module_that_is_not_compiled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise ModuleNotFoundError("No module named 'megacore.kernels.cpu._rope'")

    monkeypatch.setitem(choice._OPERATIONS, "rotate", (Implementation("C++", load, everywhere),))
    with pytest.raises(ConfigError, match=r"_rope'\): install megacore again.*train\.kernels to plain"):
        choose_kernels(CPU, torch.float32)


def test_on_a_gpu_the_cpu_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megacore.kernels.cpu.support", None)
    monkeypatch.delattr("megacore.kernels.cpu.support")
    with pytest.raises(ImportError):
        cpp_runs(Setting(CPU, torch.float32))
    assert not cpp_runs(Setting(GPU, torch.float32))


def test_the_summary_groups_operations_by_what_computes_them() -> None:
    assert summary({"a": "torch", "b": "C++", "c": "torch"}) == "torch: a, c; C++: b"
