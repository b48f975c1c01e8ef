"""The weight gradient in C++, compared with float64."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megacore.errors import ConfigError
from megacore.kernels.cpu.common import runs_bf16
from megacore.kernels.cpu.weight_grad import accumulate_

pytestmark = pytest.mark.skipif(not runs_bf16(), reason="the CPU has no AVX512-BF16")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def random_inputs(rows: int, out_features: int, in_features: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random main gradient, dy and x."""
    generator = torch.Generator().manual_seed(rows)
    dy = torch.randn(rows, out_features, generator=generator).bfloat16()
    x = torch.randn(rows, in_features, generator=generator).bfloat16()
    return torch.randn(out_features, in_features, generator=generator), dy, x


def check(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """Check that the error is within a few fp32 units of the sum of the terms' magnitudes."""
    product, before = dy.double().t() @ x.double(), main_grad.double()
    magnitude = dy.double().abs().t() @ x.double().abs() + before.abs()
    accumulate_(main_grad, dy, x)
    assert ((main_grad.double() - before - product).abs() <= 4e-7 * magnitude).all()


@pytest.mark.parametrize("rows", [1, 2, 31, 64])
@pytest.mark.parametrize("out_features", [1, 8, 13, 32, 100])
@pytest.mark.parametrize("in_features", [1, 16, 31, 32, 45, 131])
def test_sums_equal_float64(rows: int, out_features: int, in_features: int) -> None:
    check(*random_inputs(rows, out_features, in_features))


def test_many_rows_and_tasks_equal_float64() -> None:
    check(*random_inputs(4099, 197, 70))


def test_no_rows_add_nothing() -> None:
    main_grad, dy, x = random_inputs(0, 5, 7)
    before = main_grad.clone()
    accumulate_(main_grad, dy, x)
    assert main_grad.equal(before)


def test_small_contributions_survive() -> None:
    """bf16 cannot represent 257: rounding the product before the addition would lose a row."""
    ones = torch.ones(257, 32, dtype=torch.bfloat16)
    main_grad = torch.zeros(32, 32)
    accumulate_(main_grad, ones, ones)
    assert main_grad.eq(257.0).all()


def test_strided_rows_are_accepted() -> None:
    main_grad, dy, x = random_inputs(50, 90, 80)
    guarded = main_grad.clone()
    product = dy[:, 5:45].double().t() @ x[:, 3:70].double()
    accumulate_(guarded[20:60, 7:74], dy[:, 5:45], x[:, 3:70])
    expected = main_grad.double()
    expected[20:60, 7:74] += product
    torch.testing.assert_close(guarded.double(), expected, rtol=1e-5, atol=1e-5)
    guarded[20:60, 7:74] = main_grad[20:60, 7:74]
    assert guarded.equal(main_grad)


def test_strided_columns_are_accepted() -> None:
    main_grad, dy, x = random_inputs(50, 24, 40)
    expected = main_grad.clone()
    accumulate_(expected, dy, x)
    accumulate_(main_grad, dy.t().contiguous().t(), x)
    assert main_grad.equal(expected)
    summed = torch.zeros(24, 40)
    accumulate_(summed, torch.ones(1, 1, dtype=torch.bfloat16).expand(50, 24), x)
    torch.testing.assert_close(summed, x.float().sum(0).expand(24, 40), rtol=1e-5, atol=1e-5)


def test_threads_do_not_change_the_result() -> None:
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        main_grad, dy, x = random_inputs(2100, 200, 90)
        accumulate_(main_grad, dy, x)
        results.append(main_grad)
    assert results[0].equal(results[1])


def test_nan_stays_in_its_row_and_column() -> None:
    main_grad, dy, x = random_inputs(33, 40, 50)
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
    with pytest.raises(ConfigError, match="bf16"):
        accumulate_(main_grad, dy.float(), x)
    with pytest.raises(ConfigError, match="contiguous rows"):
        accumulate_(torch.zeros(7, 6).t(), dy, x)
