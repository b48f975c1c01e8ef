"""Cross entropy of logits with its gradient in their place.

There is no second tensor of their size, and none in fp32.

Half-precision logits are computed in fp32, a few rows at a time; what takes their place is rounded
once. In place as in Liger Kernel (Hsu et al. 2024, arXiv:2410.10989), and over a divided vocabulary
as in Megatron-LM.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megacore.kernels.implementation import Implementation, cpp_runs, everywhere

_CACHED_ELEMENTS = 1 << 17
"""Logits per thread of a block that stays in the cores' caches between passes: half a MiB of
fp32."""
_GPU_ELEMENTS = 1 << 25
"""Logits of a block on a GPU, where launches cost more than memory traffic: 128 MiB of fp32."""


class Statistics(Protocol):
    """What ranks sharing the vocabulary must know of each row of logits to tell its loss."""

    def __call__(self, logits: Tensor, columns: Tensor, with_sum: bool) -> Tensor:
        """Read logits [n, w].

        Args:
            logits: of this rank's part of the vocabulary.
            columns: of each row's label in it, int64 [n]; negative where another rank has it.
            with_sum: whether the sum of the logits is wanted.

        Returns:
            Per row the maximum, the logit of the label (0 where another rank has it), the sum of
            exp(logit - maximum), and the sum of the logits if wanted: [3 or 4, n], fp32 (fp64 for
            fp64 logits).
        """
        ...


class GradientInPlace(Protocol):
    """Replaces logits by the gradient of their row's loss."""

    def __call__(
        self,
        logits: Tensor,
        columns: Tensor,
        log_normaliser: Tensor,
        factor: Tensor | None,
        label_weight: float,
        evenly: float,
    ) -> None:
        """Write the gradient of the loss over logits [n, w].

        factor exp(logit - log_normaliser) - label_weight onehot(column) - evenly.

        Args:
            logits: of this rank's part of the vocabulary.
            columns: of each row's label in it, int64 [n]; negative where another rank has it.
            log_normaliser: of each row, [n].
            factor: of each row's softmax, [n]; None is 1.
            label_weight: what is subtracted at the label.
            evenly: what is subtracted everywhere.
        """
        ...


class LossInPlace(Protocol):
    """Both at once, where one rank has the whole vocabulary."""

    def __call__(
        self, logits: Tensor, columns: Tensor, label_smoothing: float, z_loss: float, scale: float
    ) -> Tensor:
        """The loss of each row of logits [n, v], which become `scale` times its gradient.

        loss = logsumexp - (1 - ε) logit_label - ε mean(logits) + z logsumexp².

        Args:
            logits: of the whole vocabulary.
            columns: of each row's label, int64 [n].
            label_smoothing: ε (Szegedy et al. 2016).
            z_loss: z (Chowdhery et al. 2022).
            scale: of the gradient, a power of two: fp16 has no exponents for small probabilities.

        Returns:
            [n], fp32 (fp64 for fp64 logits).
        """
        ...


@dataclass(frozen=True)
class CrossEntropy:
    """The three of one implementation."""

    statistics: Statistics
    gradient_: GradientInPlace
    loss_: LossInPlace


def statistics(logits: Tensor, columns: Tensor, with_sum: bool) -> Tensor:
    """See `Statistics`."""
    found = logits.new_empty(4 if with_sum else 3, logits.shape[0], dtype=_exact(logits))
    for block in _blocks(logits):
        exact, column = logits[block].to(found.dtype), columns[block].unsqueeze(1)
        maximum = exact.amax(1, keepdim=True)
        label = exact.gather(1, column.clamp(min=0)).masked_fill_(column < 0, 0.0)
        found[0, block], found[1, block] = maximum.squeeze(1), label.squeeze(1)
        if with_sum:
            found[3, block] = exact.sum(1)
        found[2, block] = (exact - maximum).exp_().sum(1)
    return found


def gradient_(
    logits: Tensor,
    columns: Tensor,
    log_normaliser: Tensor,
    factor: Tensor | None,
    label_weight: float,
    evenly: float,
) -> None:
    """See `GradientInPlace`."""
    for block in _blocks(logits):
        exact, column = logits[block].to(_exact(logits)), columns[block].unsqueeze(1)
        exact = (exact - log_normaliser[block].unsqueeze(1)).exp_()
        if factor is not None:
            exact *= factor[block].unsqueeze(1)
        _subtract_label_(exact, column, label_weight)
        logits[block] = exact.sub_(evenly) if evenly else exact


def loss_(
    logits: Tensor, columns: Tensor, label_smoothing: float, z_loss: float, scale: float
) -> Tensor:
    """See `LossInPlace`."""
    losses = logits.new_empty(logits.shape[0], dtype=_exact(logits))
    width, in_place = logits.shape[1], logits.dtype == losses.dtype
    for block in _blocks(logits):
        exact, column = logits[block].to(losses.dtype), columns[block].unsqueeze(1)
        maximum = exact.amax(1, keepdim=True)
        exact = exact.sub_(maximum)
        label = exact.gather(1, column)
        evenly = exact.mean(1, keepdim=True) if label_smoothing else 0.0
        total = exact.exp_().sum(1, keepdim=True)
        log_total = total.log()
        log_normaliser = log_total + maximum
        loss = (
            log_total
            - (1.0 - label_smoothing) * label
            - label_smoothing * evenly
            + z_loss * log_normaliser.square()
        )
        losses[block] = loss.squeeze(1)
        exact.mul_(scale * (1.0 + 2.0 * z_loss * log_normaliser) / total)
        _subtract_label_(exact, column, scale * (1.0 - label_smoothing))
        if label_smoothing:
            exact.sub_(scale * label_smoothing / width)
        if not in_place:
            logits[block] = exact
    return losses


REFERENCE = CrossEntropy(statistics, gradient_, loss_)


def _load_cpp() -> CrossEntropy:
    from megacore.kernels.cpu import cross_entropy

    return CrossEntropy(
        cross_entropy.label_statistics,
        cross_entropy.softmax_gradient_,
        cross_entropy.cross_entropy_,
    )


def whole_statistics(logits: Tensor, columns: Tensor, with_sum: bool) -> Tensor:
    """See `Statistics`; in one piece, for a compiler that keeps nothing of the logits' size."""
    exact = logits.to(_exact(logits))
    maximum, total = _maximum_and_total(exact)
    label = torch.where(
        columns >= 0, exact.gather(1, columns.clamp(min=0).unsqueeze(1)).squeeze(1), 0.0
    )
    return torch.stack(
        [maximum.squeeze(1), label, total.squeeze(1), *([exact.sum(1)] if with_sum else [])]
    )


def whole_gradient_(
    logits: Tensor,
    columns: Tensor,
    log_normaliser: Tensor,
    factor: Tensor | None,
    label_weight: float,
    evenly: float,
) -> None:
    """See `GradientInPlace`; in one piece."""
    softmax = (logits.to(_exact(logits)) - log_normaliser.unsqueeze(1)).exp()
    if factor is not None:
        softmax = softmax * factor.unsqueeze(1)
    logits.copy_(softmax - label_weight * _onehot(logits, columns) - evenly)


def whole_loss_(
    logits: Tensor, columns: Tensor, label_smoothing: float, z_loss: float, scale: float
) -> Tensor:
    """See `LossInPlace`; in one piece."""
    exact = logits.to(_exact(logits))
    maximum, total = _maximum_and_total(exact)
    log_total = total.log()
    log_normaliser = log_total + maximum
    label = exact.gather(1, columns.unsqueeze(1)) - maximum
    loss = log_total - (1.0 - label_smoothing) * label + z_loss * log_normaliser.square()
    if label_smoothing:
        loss = loss - label_smoothing * (exact.mean(1, keepdim=True) - maximum)
    softmax = (exact - maximum).exp() * ((1.0 + 2.0 * z_loss * log_normaliser) / total)
    target = (1.0 - label_smoothing) * _onehot(logits, columns) + label_smoothing / logits.shape[1]
    logits.copy_(scale * (softmax - target))
    return loss.squeeze(1)


def compiled(backend: str = "inductor") -> CrossEntropy:
    """Each of the three in one piece through torch.compile."""
    whole = (whole_statistics, whole_gradient_, whole_loss_)
    return CrossEntropy(*(torch.compile(each, fullgraph=True, backend=backend) for each in whole))  # type: ignore[arg-type]


IMPLEMENTATIONS = (
    Implementation("C++ with AVX-512, gradient in place", _load_cpp, cpp_runs),
    Implementation(
        "torch.compile, gradient in place",
        compiled,
        lambda setting: setting.device.type == "cuda" and setting.compiled,
    ),
    Implementation("torch, gradient in place", lambda: REFERENCE, everywhere),
)


def _exact(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _maximum_and_total(exact: Tensor) -> tuple[Tensor, Tensor]:
    maximum = exact.amax(1, keepdim=True)
    return maximum, (exact - maximum).exp().sum(1, keepdim=True)


def _onehot(logits: Tensor, columns: Tensor) -> Tensor:
    """By comparison, which a compiler computes where it is needed."""
    return torch.arange(logits.shape[1], device=logits.device) == columns.unsqueeze(1)


def _subtract_label_(values: Tensor, column: Tensor, weight: float) -> None:
    amount = torch.full_like(column, -weight, dtype=values.dtype).masked_fill_(column < 0, 0.0)
    values.scatter_add_(1, column.clamp(min=0), amount)


def _blocks(rows: Tensor) -> Iterator[slice]:
    """Runs of rows that are worked on together."""
    count, width = rows.shape
    most = (
        _CACHED_ELEMENTS * torch.get_num_threads() if rows.device.type == "cpu" else _GPU_ELEMENTS
    )
    step = max(1, most // width)
    for start in range(0, count, step):
        yield slice(start, start + step)
