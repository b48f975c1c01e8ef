"""Cross entropy in C++, compared with float64: values, gradients, divided vocabularies, NaN."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megacore.errors import ConfigError
from megacore.kernels.cpu.common import runs_bf16
from megacore.kernels.cpu.cross_entropy import cross_entropy_, label_statistics, softmax_gradient_

pytestmark = pytest.mark.skipif(not runs_bf16(), reason="the CPU has no AVX512-BF16")

DTYPES = (torch.bfloat16, torch.float32)
WIDTHS = (1, 15, 16, 67, 128, 1003)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def reference(
    logits: Tensor, columns: Tensor, smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return losses and the gradient of their sum in float64."""
    exact = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(
        exact, columns, reduction="none", label_smoothing=smoothing
    )
    losses = losses + z_loss * exact.logsumexp(1).square()
    losses.sum().backward()
    assert exact.grad is not None
    return losses.detach(), exact.grad


def random_inputs(
    rows: int, width: int, dtype: torch.dtype, scale: float = 3.0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 10007 + width)
    logits = (scale * torch.randn(rows, width, generator=generator)).to(dtype)
    return logits, torch.randint(width, (rows,), generator=generator)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Check equality up to fp32 accuracy, and one rounding of a result in bf16."""
    relative = 2**-8 if dtype == torch.bfloat16 else 4e-6
    torch.testing.assert_close(actual.double(), expected, rtol=relative, atol=4e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.01), (0.2, 0.003)]
)
def test_losses_and_gradients_equal_float64(
    dtype: torch.dtype, width: int, smoothing: float, z_loss: float
) -> None:
    logits, columns = random_inputs(9, width, dtype)
    losses, gradient = reference(logits, columns, smoothing, z_loss)
    actual = cross_entropy_(logits, columns, smoothing, z_loss)
    assert actual.dtype == torch.float32
    assert_close(actual, losses, torch.float32)
    assert_close(logits, gradient, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_is_scaled(dtype: torch.dtype) -> None:
    logits, columns = random_inputs(5, 70, dtype)
    losses, gradient = reference(logits, columns, 0.1, 0.01)
    assert_close(cross_entropy_(logits, columns, 0.1, 0.01, 64.0), losses, torch.float32)
    assert_close(logits / 64, gradient, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows_are_accepted(dtype: torch.dtype) -> None:
    wide, columns = random_inputs(6, 90, dtype)
    before = wide.clone()
    columns %= 67
    losses, gradient = reference(wide[:, :67], columns)
    assert_close(cross_entropy_(wide[:, :67], columns), losses, torch.float32)
    assert_close(wide[:, :67], gradient, dtype)
    assert wide[:, 67:].equal(before[:, 67:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_label_out_of_range_makes_only_its_row_nan(dtype: torch.dtype) -> None:
    logits, columns = random_inputs(4, 50, dtype)
    valid_logits, valid_columns = logits[[0, 3]], columns[[0, 3]]
    columns[1], columns[2] = -1, 50
    losses = cross_entropy_(logits, columns, 0.1, 0.01)
    assert losses[1:3].isnan().all()
    assert logits[1:3].isnan().all()
    assert losses[[0, 3]].equal(cross_entropy_(valid_logits, valid_columns, 0.1, 0.01))
    assert logits[[0, 3]].equal(valid_logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_equal_float64(dtype: torch.dtype) -> None:
    logits, columns = random_inputs(7, 205, dtype)
    columns[2], columns[5] = -3, 205
    before = logits.clone()
    exact = logits.double()
    maximum = exact.amax(1)
    label = exact.gather(1, columns.clamp(0, 204)[:, None])[:, 0]
    label[[2, 5]] = 0.0
    expected = torch.stack((maximum, label, (exact - maximum[:, None]).exp().sum(1), exact.sum(1)))
    statistics = label_statistics(logits, columns, with_sum=True)
    assert statistics[:2].double().equal(expected[:2])
    torch.testing.assert_close(statistics.double(), expected, rtol=2e-6, atol=1e-4)
    assert label_statistics(logits, columns).equal(statistics[:3])
    assert logits.equal(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.02)])
def test_two_halves_of_the_vocabulary_equal_the_whole(
    dtype: torch.dtype, smoothing: float, z_loss: float
) -> None:
    """Two ranks' statistics make one loss, and their gradients are the halves of one gradient."""
    logits, columns = random_inputs(8, 300, dtype)
    halves = [logits[:, :150].contiguous(), logits[:, 150:].contiguous()]
    local = [columns, columns - 150]
    maxima, labels, totals, sums = torch.stack(
        [
            label_statistics(half, half_columns, with_sum=True)
            for half, half_columns in zip(halves, local, strict=True)
        ],
        dim=1,
    )
    maximum = maxima.amax(0)
    normaliser = (totals * (maxima - maximum).exp()).sum(0).log() + maximum
    losses = normaliser - (1 - smoothing) * labels.sum(0) - smoothing * sums.sum(0) / 300
    losses += z_loss * normaliser.square()
    factor = 1 + 2 * z_loss * normaliser if z_loss else None
    for half, half_columns in zip(halves, local, strict=True):
        softmax_gradient_(half, half_columns, normaliser, factor, 1 - smoothing, smoothing / 300)
    expected = cross_entropy_(logits, columns, smoothing, z_loss)
    torch.testing.assert_close(losses, expected, rtol=4e-6, atol=4e-6)
    assert_close(torch.cat(halves, 1), logits.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_and_huge_logits_equal_float64(dtype: torch.dtype) -> None:
    logits, columns = random_inputs(4, 40, dtype)
    logits[0, 20:] = -torch.inf  # padding
    logits[1] *= 1e30
    logits[2], logits[2, 7] = -1e38, 1e38
    columns[:3] = torch.tensor([3, int(logits[1].argmax()), 7])
    losses, gradient = reference(logits, columns)
    actual = cross_entropy_(logits, columns)
    assert_close(actual, losses, torch.float32)
    assert_close(logits, gradient, dtype)
    assert actual[1:3].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_with_only_padding_contributes_nothing(dtype: torch.dtype) -> None:
    logits = torch.full((1, 33), -torch.inf, dtype=dtype)
    statistics = label_statistics(logits, torch.tensor([-1]))
    assert statistics[:, 0].tolist() == [-torch.inf, 0.0, 0.0]
    softmax_gradient_(logits, torch.tensor([-1]), torch.tensor([2.5]))
    assert logits.eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("column", [0, 64, 66])
def test_nan_reaches_the_loss(dtype: torch.dtype, column: int) -> None:
    logits, columns = random_inputs(2, 67, dtype)
    logits[0, column] = torch.nan
    assert label_statistics(logits, columns)[2].isnan().tolist() == [True, False]
    assert cross_entropy_(logits, columns).isnan().tolist() == [True, False]
    assert logits[0].isnan().all()
    assert not logits[1].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_change_the_result(dtype: torch.dtype) -> None:
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        logits, columns = random_inputs(67, 133, dtype)
        statistics = label_statistics(logits, columns, with_sum=True)
        part = logits.clone()
        softmax_gradient_(part, columns, statistics[2].log() + statistics[0])
        results.append((statistics, part, cross_entropy_(logits, columns, 0.1, 0.01), logits))
    assert all(one.equal(two) for one, two in zip(*results, strict=True))


def test_compiled_results_are_identical() -> None:
    def losses_and_gradients(logits: Tensor, columns: Tensor) -> tuple[Tensor, ...]:
        fused, separate = logits * 2, logits * 2
        losses = cross_entropy_(fused, columns, 0.1)
        statistics = label_statistics(separate, columns, with_sum=True)
        softmax_gradient_(
            separate, columns, statistics[2].log() + statistics[0], None, 0.9, 0.1 / 100
        )
        return losses + 1, fused + 1, statistics, separate + 1

    logits, columns = random_inputs(12, 100, torch.bfloat16)
    compiled = torch.compile(losses_and_gradients, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(
        compiled(logits, columns), losses_and_gradients(logits, columns), strict=True
    ):
        assert actual.equal(expected)


def test_unsupported_arguments_are_refused() -> None:
    logits, columns = random_inputs(4, 20, torch.float32)
    with pytest.raises(ConfigError, match="contiguous rows"):
        cross_entropy_(logits.t(), torch.zeros(20, dtype=torch.int64))
    with pytest.raises(ConfigError, match="bf16 or fp32"):
        label_statistics(logits.double(), columns)
    with pytest.raises(ConfigError, match="labels"):
        cross_entropy_(logits, columns.int())
    with pytest.raises(ConfigError, match="labels"):
        cross_entropy_(logits, columns[:3])
    with pytest.raises(ConfigError, match="log_normaliser"):
        softmax_gradient_(logits, columns, torch.zeros(3))
