"""Weight gradients added to fp32 main gradients, by every implementation that runs here."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.kernels.implementation import Setting
from megacore.kernels.weight_gradient import IMPLEMENTATIONS, widening

CPU = torch.device("cpu")
ROWS, OUT, IN = 37, 11, 19


def factors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    main = torch.randn(OUT, IN, generator=generator)
    dy, x = torch.randn(ROWS, OUT, generator=generator), torch.randn(ROWS, IN, generator=generator)
    return main, dy.to(dtype), x.to(dtype)


RUNNING = [
    (each, dtype)
    for dtype in (torch.float32, torch.bfloat16)
    for each in IMPLEMENTATIONS
    if each.usable(Setting(CPU, dtype))
]


@pytest.mark.parametrize(
    ("implementation", "dtype"), RUNNING, ids=lambda value: getattr(value, "name", str(value))
)
def test_the_product_is_added_to_the_main_gradient(implementation: Any, dtype: torch.dtype) -> None:
    main, dy, x = factors(dtype)
    expected = main.double() + dy.double().t() @ x.double()
    implementation.load()(main, dy, x)
    rounded = dtype == torch.bfloat16 and implementation is IMPLEMENTATIONS[-1]
    torch.testing.assert_close(
        main.double(), expected, rtol=1e-2 if rounded else 1e-5, atol=2e-2 if rounded else 1e-5
    )


def test_the_implementation_for_gpus_adds_fp32_factors() -> None:
    main, dy, x = factors(torch.float32)
    expected = main + dy.t() @ x
    widening(main, dy, x)
    torch.testing.assert_close(main, expected)


def test_apex_receives_contiguous_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in has the arguments of wgrad_gemm_accum_fp32: x, dy and the main gradient."""

    def wgrad_gemm_accum_fp32(x: Tensor, dy: Tensor, main_grad: Tensor) -> None:
        assert x.is_contiguous()
        assert dy.is_contiguous()
        main_grad += dy.float().t() @ x.float()

    module = ModuleType("fused_weight_gradient_mlp_cuda")
    module.wgrad_gemm_accum_fp32 = wgrad_gemm_accum_fp32  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", module)
    main, dy, x = factors(torch.bfloat16)
    dy, x = dy[:1].expand_as(dy), x.t().contiguous().t()
    expected = main + dy.float().t() @ x.float()
    assert IMPLEMENTATIONS[0].name.startswith("apex")
    IMPLEMENTATIONS[0].load()(main, dy, x)
    torch.testing.assert_close(main, expected)
