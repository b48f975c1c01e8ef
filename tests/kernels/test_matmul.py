"""Products by oneDNN and by torch's other library, compared with float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megacore.kernels import matmul
from megacore.kernels.cpu import common
from megacore.kernels.matmul import add_product_, affine, measured_tflops, multiply

ROWS, OUT, IN = 65, 130, 127
CHOICES = [(True, False), (False, True), (True, True), (False, False)]


@pytest.fixture(params=CHOICES, ids=str)
def choice(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, bool]:
    """Use oneDNN in fp32 and in bf16 with a bias, or not, also for small products."""
    chosen: tuple[bool, bool] = request.param
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    if chosen[1] and not common.runs_bf16():
        pytest.skip("this CPU has no AVX512-BF16")
    monkeypatch.setattr(matmul, "_available", lambda: chosen)
    monkeypatch.setattr(matmul, "_LEAST_WORK", 1)
    return chosen


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the shapes of the inputs that oneDNN multiplied."""
    shapes: list[tuple[int, ...]] = []
    original = torch.ops.mkldnn._linear_pointwise

    def recorded(x: Tensor, *rest: object) -> Tensor:
        shapes.append(tuple(x.shape))
        return original(x, *rest)  # type: ignore[no-any-return]

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", recorded)
    return shapes


def factors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = ((ROWS, IN), (OUT, IN), (2 * OUT,))
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    return x, weight, bias[::2]


def close(actual: Tensor, expected: Tensor) -> None:
    rtol, atol = (1e-5, 5e-5) if actual.dtype == torch.float32 else (1e-2, 1e-2)
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)


def transposed(weight: Tensor) -> Tensor:
    return weight.t().contiguous().t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("layout", [Tensor.contiguous, transposed])
def test_products_equal_float64(
    choice: tuple[bool, bool], dtype: torch.dtype, share: float, layout: Callable[[Tensor], Tensor]
) -> None:
    x, weight, bias = factors(dtype)
    product = x.double() @ weight.double().t()
    for rows in (x, transposed(x)):
        close(affine(rows, layout(weight)), product)
        close(multiply(rows, layout(weight.t())), product)
        result = affine(rows, layout(weight), bias, share)
        close(result, product + share * bias.double())
        assert result.is_contiguous()
        assert not result._is_view()
    total = torch.ones(ROWS, OUT, dtype=dtype)
    add_product_(total, x, layout(weight.t()))
    close(total, product + 1.0)


def test_onednn_multiplies_only_where_it_is_faster(
    choice: tuple[bool, bool], calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fp32, bf16_with_bias = choice
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x, weight, bias = factors(dtype)
        for argument in (None, bias):
            expected = fp32 if dtype == torch.float32 else bf16_with_bias and argument is not None
            calls.clear()
            affine(x, weight, argument)
            assert calls == [(ROWS, IN)] * (expected and dtype != torch.float64)
    monkeypatch.setattr(matmul, "_LEAST_WORK", ROWS * OUT * IN + 1)
    calls.clear()
    affine(x.float(), weight.float())
    assert not calls


@pytest.mark.skipif(not common.outruns_mkl(), reason="MKL multiplies on this CPU")
def test_threads_do_not_change_the_result() -> None:
    x, weight = torch.randn(300, 200), torch.randn(100, 200)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(affine(x, weight))
    finally:
        torch.set_num_threads(threads)
    assert results[0].equal(results[1])


def test_the_measured_rate_of_a_cpu_is_plausible() -> None:
    assert 1e-4 < measured_tflops("fp32", seconds=0.02) < 100.0


@pytest.mark.parametrize(
    ("family", "avx512", "mkl", "expected"),
    [
        (26, True, True, True),
        (25, True, True, False),  # Zen 4 has half of the width
        (0, True, True, False),  # Intel
        (26, False, True, False),
        (26, True, False, False),
    ],
)
def test_onednn_and_our_kernels_outrun_mkl_on_amds_cpus_since_zen_5(
    family: int, avx512: bool, mkl: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common._kernels, "amd_family", lambda: family)
    monkeypatch.setattr(common, "runs_fp32", lambda: avx512)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    assert common.outruns_mkl.__wrapped__() is expected
