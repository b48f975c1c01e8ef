"""A small model whose gradients reach the buckets in every possible way."""

from typing import Any

import torch
from torch import Tensor, nn


class SinkProduct(torch.autograd.Function):
    """`x @ weight` or `x @ weight.T`; the weight's gradient goes into its sink, if it has one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink, ctx.transposed = getattr(weight, "grad_sink", None), transposed
        return x @ (weight.T if transposed else weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        dx = dy @ (weight if ctx.transposed else weight.T)
        dw = dy.T @ x if ctx.transposed else x.T @ dy
        if ctx.sink is None:
            return dx, dw, None
        ctx.sink.contribute(lambda: ctx.sink.main_grad.add_(dw))
        return dx, None, None


class Mixed(nn.Module):
    """A model with parameters of every kind.

    `tied` is used twice through its sink and `dense` once; autograd computes the gradient of
    `bias`; `unused` gets none. No size is a multiple of the alignment.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.tied = nn.Parameter(torch.randn(13, 7, generator=generator))
        self.dense = nn.Parameter(torch.randn(7, 7, generator=generator))
        self.bias = nn.Parameter(torch.randn(7, generator=generator))
        self.unused = nn.Parameter(torch.randn(5, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        hidden = SinkProduct.apply(x.to(self.tied.dtype), self.tied, False)
        hidden = torch.tanh(SinkProduct.apply(hidden, self.dense, True) + self.bias)
        logits: Tensor = SinkProduct.apply(hidden, self.tied, True)
        return logits.float().logsumexp(-1).mean()


def batch(seed: int) -> Tensor:
    """Return the input of one micro batch, [6, 13]."""
    return torch.randn(6, 13, generator=torch.Generator().manual_seed(seed))


def total_gradients(seeds: list[int]) -> dict[str, Tensor]:
    """Return the sum of the gradients of these micro batches by plain autograd."""
    model = Mixed()
    sum(model(batch(seed)) for seed in seeds).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
