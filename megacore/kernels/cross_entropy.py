"""Cross entropy that overwrites the logits with its gradient.

No second tensor of the logits' size is allocated. Half-precision logits are converted to fp32 a few
rows at a time, and the gradient is rounded once. The gradient overwrites the logits as in Liger
Kernel (Hsu et al. 2024, arXiv:2410.10989), and the vocabulary may be divided over ranks as in
Megatron-LM.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from megacore.kernels.implementation import Implementation, Setting, cpp_obstacle, everywhere
from megacore.observe.logging import logger

F = TypeVar("F", bound=Callable[..., Any])

_CACHED_ELEMENTS = 1 << 17
"""Logits of a block per thread. The block stays in the cores' caches between passes: 512 KiB of
fp32."""
_GPU_ELEMENTS = 1 << 25
"""Logits of a block on a GPU, where kernel launches cost more than memory traffic: 128 MiB of
fp32."""


class Statistics(Protocol):
    """Interface of the row statistics that ranks exchange if the vocabulary is divided."""

    def __call__(self, logits: Tensor, columns: Tensor, with_sum: bool) -> Tensor:
        """Compute statistics of each row of logits [n, w].

        Args:
            logits: logits of this rank's part of the vocabulary.
            columns: column of each row's label, int64 [n]; negative if it is on another rank.
            with_sum: also return the sum of the logits.

        Returns:
            For each row the maximum, the label's logit (0 if it is on another rank), the sum of
            exp(logit - maximum), and if requested the sum of the logits: [3 or 4, n], fp32 (fp64
            for fp64 logits).
        """
        ...


class GradientInPlace(Protocol):
    """Interface of the gradient of each row's loss, which overwrites the logits."""

    def __call__(
        self,
        logits: Tensor,
        columns: Tensor,
        log_normaliser: Tensor,
        factor: Tensor | None,
        label_weight: float,
        evenly: float,
    ) -> None:
        """Overwrite logits [n, w] with the gradient of the loss.

        It is factor exp(logit - log_normaliser) - label_weight onehot(column) - evenly.

        Args:
            logits: logits of this rank's part of the vocabulary.
            columns: column of each row's label, int64 [n]; negative if it is on another rank.
            log_normaliser: logsumexp of each row, [n].
            factor: factor on each row's softmax, [n]; None means 1.
            label_weight: amount subtracted at the label.
            evenly: amount subtracted everywhere.
        """
        ...


class LossInPlace(Protocol):
    """Interface of the loss and its gradient in one call, for a vocabulary that is not divided."""

    def __call__(
        self, logits: Tensor, columns: Tensor, label_smoothing: float, z_loss: float, scale: float
    ) -> Tensor:
        """Return the loss of each row, and overwrite logits [n, v] with `scale` times its gradient.

        loss = logsumexp - (1 - ε) logit_label - ε mean(logits) + z logsumexp².

        Args:
            logits: logits of the whole vocabulary.
            columns: column of each row's label, int64 [n].
            label_smoothing: ε (Szegedy et al. 2016).
            z_loss: z (Chowdhery et al. 2022).
            scale: factor on the gradient, a power of two; without it, small probabilities would
                underflow in fp16.

        Returns:
            [n], fp32 (fp64 for fp64 logits).
        """
        ...


@dataclass(frozen=True)
class CrossEntropy:
    """The three functions of one implementation."""

    statistics: Statistics
    gradient_: GradientInPlace
    loss_: LossInPlace


def statistics(logits: Tensor, columns: Tensor, with_sum: bool) -> Tensor:
    """Compute the statistics in blocks of rows, see `Statistics`."""
    result = logits.new_empty(4 if with_sum else 3, logits.shape[0], dtype=_exact(logits))
    for block in _blocks(logits):
        exact, column = logits[block].to(result.dtype), columns[block].unsqueeze(1)
        maximum = exact.amax(1, keepdim=True)
        label = exact.gather(1, column.clamp(min=0)).masked_fill_(column < 0, 0.0)
        result[0, block], result[1, block] = maximum.squeeze(1), label.squeeze(1)
        if with_sum:
            result[3, block] = exact.sum(1)
        result[2, block] = (exact - maximum).exp_().sum(1)
    return result


def gradient_(
    logits: Tensor,
    columns: Tensor,
    log_normaliser: Tensor,
    factor: Tensor | None,
    label_weight: float,
    evenly: float,
) -> None:
    """Compute the gradient in blocks of rows, see `GradientInPlace`."""
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
    """Compute loss and gradient in blocks of rows, see `LossInPlace`."""
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
        del exact  # otherwise it would exist together with the next block
    return losses


REFERENCE = CrossEntropy(statistics, gradient_, loss_)


def _load_cpp() -> CrossEntropy:
    from megacore.kernels.cpu import cross_entropy

    return CrossEntropy(
        cross_entropy.label_statistics,
        cross_entropy.softmax_gradient_,
        cross_entropy.cross_entropy_,
    )


def softcapped(kernel: CrossEntropy, cap: float) -> CrossEntropy:
    """Return a kernel that takes logits x and computes with c tanh(x / c), with c = `cap`.

    The capped logits exist in fp32 for a block of rows at a time, on which `kernel` computes; its
    gradient is multiplied by 1 - tanh², and rounded once.
    """

    def capped(logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return c tanh(x / c) and its derivative, of a block."""
        tanh = (logits.to(_exact(logits)) / cap).tanh_()
        return tanh * cap, tanh.square_().neg_().add_(1.0)

    def capped_statistics(logits: Tensor, columns: Tensor, with_sum: bool) -> Tensor:
        return torch.cat(
            [
                kernel.statistics(capped(logits[block])[0], columns[block], with_sum)
                for block in _blocks(logits)
            ],
            1,
        )

    def capped_gradient_(
        logits: Tensor,
        columns: Tensor,
        log_normaliser: Tensor,
        factor: Tensor | None,
        label_weight: float,
        evenly: float,
    ) -> None:
        for block in _blocks(logits):
            values, derivative = capped(logits[block])
            part = None if factor is None else factor[block]
            kernel.gradient_(
                values, columns[block], log_normaliser[block], part, label_weight, evenly
            )
            logits[block] = values.mul_(derivative)

    def capped_loss_(
        logits: Tensor, columns: Tensor, label_smoothing: float, z_loss: float, scale: float
    ) -> Tensor:
        losses = []
        for block in _blocks(logits):
            values, derivative = capped(logits[block])
            losses.append(kernel.loss_(values, columns[block], label_smoothing, z_loss, scale))
            logits[block] = values.mul_(derivative)
        return torch.cat(losses)

    return CrossEntropy(capped_statistics, capped_gradient_, capped_loss_)


def whole_statistics(logits: Tensor, columns: Tensor, with_sum: bool) -> Tensor:
    """Compute the statistics without blocks, for a compiler that avoids large temporaries."""
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
    """Compute the gradient without blocks, see `GradientInPlace`."""
    softmax = (logits.to(_exact(logits)) - log_normaliser.unsqueeze(1)).exp()
    if factor is not None:
        softmax = softmax * factor.unsqueeze(1)
    logits.copy_(softmax - label_weight * _onehot(logits, columns) - evenly)


def whole_loss_(
    logits: Tensor, columns: Tensor, label_smoothing: float, z_loss: float, scale: float
) -> Tensor:
    """Compute loss and gradient without blocks, see `LossInPlace`."""
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


def compiled(backend: str | Callable[..., Any] = "inductor") -> CrossEntropy:
    """Return the three functions without blocks, each compiled by torch.compile.

    If the compiler or one of its kernels fails, they go on as `REFERENCE`, with one warning.
    """
    switch = _Switch()
    return CrossEntropy(
        switch.function(whole_statistics, statistics, backend),
        switch.function(whole_gradient_, gradient_, backend),
        switch.function(whole_loss_, loss_, backend),
    )


class _Switch:
    """Choice between compiled functions and their replacements, made by the first failure."""

    def __init__(self) -> None:
        self._failed = False

    def function(self, whole: F, replacement: F, backend: str | Callable[..., Any]) -> F:
        """Return a function that compiles and calls `whole`, or calls `replacement`.

        A kernel that fails has not changed the logits: they are overwritten last. Only lack of
        memory is no failure of the compiler.
        """
        # After another number of rows, as in an evaluation, torch would compile a graph for any
        # number. In training it could give other bits than that of a run that has just resumed.
        fast: Callable[..., Any] = torch.compile(
            whole, fullgraph=True, dynamic=False, backend=backend
        )

        def call(*arguments: Any) -> Any:
            if not self._failed:
                try:
                    return fast(*arguments)
                except Exception as error:
                    # The compiler wraps the errors of its own measurements.
                    lacks = getattr(error, "inner_exception", error)
                    if isinstance(lacks, torch.OutOfMemoryError | MemoryError):
                        raise
                    self._failed = True
                    logger.warning(
                        "the cross entropy runs without torch.compile, which failed: %s",
                        _reason(error),
                    )
            return replacement(*arguments)

        return cast(F, call)


def _compiler_obstacle(setting: Setting) -> str | None:
    """Return why torch.compile does not work here, tested on a small function."""
    if setting.compiled:
        return None
    try:
        torch.compile(torch.nn.functional.silu)(torch.ones(8, device=setting.device))
    except Exception as error:
        return f"torch.compile does not work here ({_reason(error)})"
    return None


def _reason(error: Exception) -> str:
    """Return type and first line of the compiler's error, which torch.compile wraps."""
    error = getattr(error, "inner_exception", error)
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


IMPLEMENTATIONS = (
    Implementation("cpp", "C++ with AVX-512, gradient in place", _load_cpp, cpp_obstacle),
    Implementation(
        "compiled",
        "torch.compile, gradient in place",
        compiled,
        _compiler_obstacle,
        lambda setting: setting.device.type == "cuda" and setting.compiled,
    ),
    Implementation("plain", "torch, gradient in place", lambda: REFERENCE, everywhere),
)


def _exact(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _maximum_and_total(exact: Tensor) -> tuple[Tensor, Tensor]:
    maximum = exact.amax(1, keepdim=True)
    return maximum, (exact - maximum).exp().sum(1, keepdim=True)


def _onehot(logits: Tensor, columns: Tensor) -> Tensor:
    """Return the one-hot matrix, computed by a comparison that a compiler can fuse."""
    return torch.arange(logits.shape[1], device=logits.device) == columns.unsqueeze(1)


def _subtract_label_(values: Tensor, column: Tensor, weight: float) -> None:
    amount = torch.full_like(column, -weight, dtype=values.dtype).masked_fill_(column < 0, 0.0)
    values.scatter_add_(1, column.clamp(min=0), amount)


def _blocks(rows: Tensor) -> Iterator[slice]:
    """Yield slices of rows that are processed together."""
    count, width = rows.shape
    most = (
        _CACHED_ELEMENTS * torch.get_num_threads() if rows.device.type == "cpu" else _GPU_ELEMENTS
    )
    step = max(1, most // width)
    for start in range(0, count, step):
        yield slice(start, start + step)
