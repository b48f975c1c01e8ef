"""The weight gradient in C++, compared with float64."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megacore.errors import ConfigError
from megacore.kernels.cpu.common import runs_bf16, runs_fp32
from megacore.kernels.cpu.weight_grad import accumulate_

pytestmark = pytest.mark.skipif(not runs_fp32(), reason="the CPU has no AVX-512")
needs_bf16 = pytest.mark.skipif(not runs_bf16(), reason="the CPU has no AVX512-BF16")
types = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bf16)], ids=["fp32", "bf16"]
)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def random_inputs(
    rows: int, out_features: int, in_features: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random main gradient, dy and x."""
    generator = torch.Generator().manual_seed(rows)
    dy = torch.randn(rows, out_features, generator=generator).to(dtype)
    x = torch.randn(rows, in_features, generator=generator).to(dtype)
    return torch.randn(out_features, in_features, generator=generator), dy, x


def check(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """Check that the error is within a few fp32 units of the sum of the terms' magnitudes."""
    product, before = dy.double().t() @ x.double(), main_grad.double()
    magnitude = dy.double().abs().t() @ x.double().abs() + before.abs()
    accumulate_(main_grad, dy, x)
    assert ((main_grad.double() - before - product).abs() <= 4e-7 * magnitude).all()


@types
@pytest.mark.parametrize("rows", [1, 2, 31, 64])
@pytest.mark.parametrize("out_features", [1, 8, 13, 32, 100])
@pytest.mark.parametrize("in_features", [1, 16, 31, 32, 45, 131])
def test_sums_equal_float64(
    rows: int, out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    check(*random_inputs(rows, out_features, in_features, dtype))


@types
def test_many_rows_and_tasks_equal_float64(dtype: torch.dtype) -> None:
    check(*random_inputs(4099, 197, 70, dtype))


@types
def test_no_rows_add_nothing(dtype: torch.dtype) -> None:
    main_grad, dy, x = random_inputs(0, 5, 7, dtype)
    before = main_grad.clone()
    accumulate_(main_grad, dy, x)
    assert main_grad.equal(before)


@needs_bf16
def test_small_contributions_survive() -> None:
    """bf16 cannot represent 257: rounding the product before the addition would lose a row."""
    ones = torch.ones(257, 32, dtype=torch.bfloat16)
    main_grad = torch.zeros(32, 32)
    accumulate_(main_grad, ones, ones)
    assert main_grad.eq(257.0).all()


@types
def test_strided_rows_are_accepted(dtype: torch.dtype) -> None:
    main_grad, dy, x = random_inputs(50, 90, 80, dtype)
    guarded = main_grad.clone()
    product = dy[:, 5:45].double().t() @ x[:, 3:70].double()
    accumulate_(guarded[20:60, 7:74], dy[:, 5:45], x[:, 3:70])
    expected = main_grad.double()
    expected[20:60, 7:74] += product
    torch.testing.assert_close(guarded.double(), expected, rtol=1e-5, atol=1e-5)
    guarded[20:60, 7:74] = main_grad[20:60, 7:74]
    assert guarded.equal(main_grad)


@types
def test_strided_columns_are_accepted(dtype: torch.dtype) -> None:
    main_grad, dy, x = random_inputs(50, 24, 40, dtype)
    expected = main_grad.clone()
    accumulate_(expected, dy, x)
    accumulate_(main_grad, dy.t().contiguous().t(), x)
    assert main_grad.equal(expected)
    summed = torch.zeros(24, 40)
    accumulate_(summed, torch.ones(1, 1, dtype=dtype).expand(50, 24), x)
    torch.testing.assert_close(summed, x.float().sum(0).expand(24, 40), rtol=1e-5, atol=1e-5)


@types
def test_threads_do_not_change_the_result(dtype: torch.dtype) -> None:
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        main_grad, dy, x = random_inputs(2100, 200, 90, dtype)
        accumulate_(main_grad, dy, x)
        results.append(main_grad)
    assert results[0].equal(results[1])


@types
def test_nan_stays_in_its_row_and_column(dtype: torch.dtype) -> None:
    main_grad, dy, x = random_inputs(33, 40, 50, dtype)
    dy[32, 3] = torch.nan
    accumulate_(main_grad, dy, x)
    assert main_grad[3].isnan().all()
    assert main_grad.isnan().sum() == 50


def test_compiled_results_are_identical() -> None:
    def step(main_grad: Tensor, dy: Tensor, x: Tensor) -> Tensor:
        accumulate_(main_grad, dy * 2, x)
        return main_grad + 1

    eager, graph = random_inputs(40, 30, 20), random_inputs(40, 30, 20)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert compiled(*graph).equal(step(*eager))
    assert graph[0].equal(eager[0])


def test_unsupported_arguments_are_refused() -> None:
    main_grad, dy, x = random_inputs(10, 6, 7)
    with pytest.raises(ConfigError, match=r"\[o, i\]"):
        accumulate_(main_grad.t(), dy, x)
    with pytest.raises(ConfigError, match=r"\[o, i\]"):
        accumulate_(main_grad, dy, x[:9])
    with pytest.raises(ConfigError, match="one type"):
        accumulate_(main_grad, dy.bfloat16(), x)
    with pytest.raises(ConfigError, match="bf16 and fp32"):
        accumulate_(main_grad, dy.half(), x.half())
    with pytest.raises(ConfigError, match="main gradient in fp32"):
        accumulate_(main_grad.bfloat16(), dy, x)
    with pytest.raises(ConfigError, match="contiguous rows"):
        accumulate_(torch.zeros(7, 6).t(), dy, x)
