"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) for matrices.

For a matrix W of r rows and c columns with the gradient G, in step t:

    M_t = μ M_(t-1) + G
    O_t = NS(G + μ M_t)                                 (Nesterov's momentum)
    W_t = W_(t-1) - η (0.2 √max(r, c) O_t + λ W_(t-1))

NS approximates the nearest orthogonal matrix by Newton-Schulz iterations. The factor 0.2 √max(r, c)
gives the update the root mean square of AdamW's, so that AdamW's learning rate and weight decay can
be used (Liu et al. 2025, arXiv:2502.16982, section 2.2).

The matrices are those of the layers' linear projections. A weight that projects to several things,
such as q, k and v, is treated as one matrix each. Embeddings, the output head, biases and norms are
updated by AdamW.

The update is of whole matrices in every layout. Momentum is divided like AdamW's moments, over
tensor-parallel ranks and, with a distributed optimizer, over replicas. Each matrix has an owner
among these ranks, which collects G + μ M_t, computes NS and returns the parts (`Owners`). The
matrices are processed in rounds, so that messages of one overlap with NS of the next.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.config.optim import OptimConfig
from megacore.data_parallel.grad_sync import GradSync
from megacore.data_parallel.owners import (
    Division,
    Round,
    Slices,
    plan_rounds,
    runs_of,
    staggered,
)
from megacore.kernels.choice import Kernels
from megacore.observe.flops import LARGE, WIDE, newton_schulz_products
from megacore.optim.adam import KINDS, Initial, MainWeight, MainWeightAdamW
from megacore.parallel.collectives import Pending
from megacore.tensor_parallel.partition import Partition

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c of the iteration X := a X + (b A + c A²) X with A = X Xᵀ."""
ITERATIONS = 5
WIDE_ITERATIONS = (3, 2)
"""Iterations in each polynomial by which a large wide matrix is multiplied."""
_STRIP = 256
"""Rows of that triangle in one product."""
UPDATE_RMS = 0.2
"""Root mean square of the elements of an update for learning rate 1, about that of AdamW's."""
MOMENTUM = "optimizer.momentum"
"""Prefix of a momentum's name in a checkpoint."""
ROUNDS = 4
"""Rounds of matrices whose messages overlap with the products of others."""
NO_ROUND = -1
"""Number in place of a round's for weights without matrices."""
_NORM_EPSILON = 1e-7
_BLOCK = 1 << 17
"""Elements that a CPU updates at a time, so that they stay in its cache."""


@dataclass(frozen=True)
class RowParts:
    """Matrices whose rows are interleaved in one weight: rows [repetition][part][row]."""

    parts: int = 1
    """Number of matrices."""
    rows: int = 1
    """Consecutive rows of one matrix."""

    def split(self, weight: Tensor) -> Sequence[Tensor]:
        """Return views [repetitions, rows, c] of the matrices of a whole weight [r, c]."""
        return weight.view(-1, self.parts, self.rows, weight.shape[1]).unbind(1)


def newton_schulz(matrices: Tensor) -> Tensor:
    """Return approximate orthogonal factors U Vᵀ of matrices U S Vᵀ [..., r, c], in their type.

    Singular values become about 0.7 to 1.2; those below about 1e-3 of a matrix's norm remain
    smaller. Small matrices are processed together, large ones one by one.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.reshape(-1, *matrices.shape[-2:])
    x = x.mT if tall else x
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = x / (norm + _NORM_EPSILON).to(x.dtype)
    if len(x) > 1 and x.shape[1] < LARGE:
        x = _iterated(x)
    else:
        x = torch.stack([_iterated(each) for each in x])
    return (x.mT if tall else x).reshape(matrices.shape)


def _iterated(x: Tensor) -> Tensor:
    """Return the iterations' result for a matrix X [n, m] of norm 1, or for several [p, n, m].

    A large wide matrix is multiplied by polynomials of A = X Xᵀ, which is smaller: a step X := Q X
    with Q = a I + b A + c A² makes Q A Q of A. In bf16 five steps in one polynomial would lose
    small singular values, so that A is computed again from X after three.
    """
    if x.shape[-2] >= LARGE and x.shape[-1] >= WIDE * x.shape[-2]:
        for count in WIDE_ITERATIONS:
            x = _polynomial(_symmetric(x, x.mT), count) @ x
        return x
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = _symmetric(x, x.mT)
        x = _sum(x, _symmetric(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _polynomial(gram: Tensor, count: int) -> Tensor:
    """Return the polynomial of A = X Xᵀ [n, n] by which `count` iterations multiply X."""
    a, b, c = COEFFICIENTS
    product = None
    for remaining in reversed(range(count)):
        # The iteration's factor Q without its term a I.
        factor = _symmetric(gram, gram, gram, beta=b, alpha=c)
        if product is None:
            product = factor.clone()
            product.diagonal().add_(a)
        else:
            product = _symmetric(factor, product, product, beta=a)
        if remaining:
            half = _symmetric(factor, gram, gram, beta=a)
            gram = _symmetric(half, factor, half, beta=a)
    assert product is not None
    return product


def _symmetric(
    x: Tensor, y: Tensor, added: Tensor | None = None, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """Return α X Y + β `added`, which is symmetric, for matrices [n, n] or [p, n, n].

    On a CPU, of a large one only the lower triangle is computed, in strips, and mirrored.
    """
    size = x.shape[-2]
    if x.device.type != "cpu" or size < LARGE:
        return x @ y if added is None else _sum(added, x, y, beta=beta, alpha=alpha)
    result = x.new_empty(size, size)
    for start in range(0, size, _STRIP):
        stop = min(start + _STRIP, size)
        target = result[start:stop, :stop]
        if added is None:
            torch.mm(x[start:stop], y[:, :stop], out=target)
        else:
            torch.addmm(
                added[start:stop, :stop],
                x[start:stop],
                y[:, :stop],
                beta=beta,
                alpha=alpha,
                out=target,
            )
        result[:start, start:stop] = target[:, :start].mT
    return result


def _sum(added: Tensor, x: Tensor, y: Tensor, *, beta: float, alpha: float = 1.0) -> Tensor:
    add = torch.addmm if x.dim() == 2 else torch.baddbmm
    return add(added, x, y, beta=beta, alpha=alpha)


def newton_schulz_flops(rows: int, columns: int) -> float:
    """Return the floating-point operations of `newton_schulz` for a matrix."""
    return sum(products.flops for products in newton_schulz_products(rows, columns))


def orthogonalized(weight: Tensor, parts: RowParts) -> Tensor:
    """Return `newton_schulz` of each of the matrices in a whole weight [r, c]."""
    sources = parts.split(weight)
    result = newton_schulz(torch.stack([source.flatten(0, 1) for source in sources]))
    return torch.stack(list(result.view(len(sources), *sources[0].shape)), dim=1).view_as(weight)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of the same elements of contiguous tensors; on a CPU as many as its cache holds.

    There is one block on other devices.
    """
    elements = tensors[0].numel()
    size = _BLOCK if tensors[0].device.type == "cpu" else max(1, elements)
    yield from zip(*(torch.split(tensor.view(-1), size) for tensor in tensors), strict=True)


class MainWeightMuon(MainWeightAdamW):
    """Muon for matrices and AdamW for other parameters, with fp32 main weights.

    Newton-Schulz runs in bf16, or in fp32 if the model computes in fp32.
    """

    def __init__(
        self,
        syncs: Sequence[GradSync],
        config: OptimConfig,
        dtype: torch.dtype,
        partitions: Mapping[str, Partition] | None = None,
        kernels: Kernels | None = None,
        *,
        matrices: Mapping[str, RowParts],
        initial: Initial | None = None,
    ) -> None:
        """Take the parameters of this rank's model chunks and cast them to the compute type.

        Args:
            syncs: gradients and fp32 parameters of each chunk, all of one mesh.
            config: momentum, betas and epsilon.
            dtype: new type of the model's weights; the main weights keep their bits.
            partitions: division of parameters over tensor-parallel ranks.
            kernels: implementation of the operations; None is plain torch.
            matrices: parameters that Muon updates, with the matrices in them.
            initial: see `MainWeightAdamW`.
        """
        super().__init__(
            syncs, config, dtype, partitions, kernels, single=matrices.keys(), initial=initial
        )
        self._matrices = matrices
        self._momentum = config.muon_momentum
        self._dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
        self._shapes = {
            name: parameter.shape
            for sync in syncs
            for name, parameter in sync.parameters.items()
            if name in matrices
        }
        self._rounds = self._plan_rounds()
        self._weights = {
            main.name: main
            for part in self._parts
            for main in part.weights
            if main.name in matrices
        }
        self._last_rounds = self._rounds_before_publication()

    def _step(self, lr: float, weight_decay: float, divisor: Tensor) -> None:
        pending: list[Pending] = []

        def publish(after: int) -> None:
            for part, last in zip(self._parts, self._last_rounds, strict=True):
                if last == after:
                    pending.append(part.publish())

        def others() -> Iterator[None]:
            """Update the other parameters by AdamW, after the first messages have started."""
            yield
            for part in self._parts:
                weights = [main for main in part.weights if main.name not in self._matrices]
                self._adam(weights, lr, weight_decay, divisor)
            publish(NO_ROUND)

        def matrices(number: int) -> Iterator[None]:
            yield from self._update_round(self._rounds[number], lr, weight_decay, divisor)
            publish(number)

        staggered([others(), *map(matrices, range(len(self._rounds)))])
        for work in pending:
            work.wait()

    def _update_round(
        self, matrices: Round, lr: float, weight_decay: float, divisor: Tensor
    ) -> Iterator[None]:
        """Update the matrices of a round; yield after messages have started."""
        weights = [self._weights[name] for name in matrices.names if name in self._weights]
        parts: Mapping[str, Tensor] = {main.name: main.gradient for main in weights}
        for main in weights:
            self._accumulate(main, divisor)
        for owners in matrices.hops:
            arriving = owners.start_collect(parts)
            yield
            parts = owners.without(parts) | owners.views(arriving.wait())
        parts = {name: self._orthogonalized(name, whole) for name, whole in parts.items()}
        for owners in reversed(matrices.hops):
            returning = owners.start_return(parts)
            yield
            parts = owners.without(parts) | owners.returned(returning.wait())
        for main in weights:
            self._apply(main, parts[main.name].view(main.weight.shape), lr, weight_decay)

    def _accumulate(self, main: MainWeight, divisor: Tensor) -> None:
        """Update the momentum, and replace the gradient G by G + μ M.

        Each operation rounds separately, so that the result does not depend on the division into
        shards and blocks.
        """
        for gradient, momentum in _blocks(main.gradient, main.exp_avg):
            gradient.div_(divisor)
            momentum.mul_(self._momentum).add_(gradient)
            gradient.add_(momentum * self._momentum)

    def _orthogonalized(self, name: str, direction: Tensor) -> Tensor:
        """Return the orthogonalized matrices of a whole weight, given in any shape and type."""
        whole = direction.to(self._dtype).view(self._whole_shape(name))
        return orthogonalized(whole, self._matrices[name])

    def _apply(self, main: MainWeight, update: Tensor, lr: float, weight_decay: float) -> None:
        """Decay a main weight, subtract the update, and round it into the model's weight."""
        rows, columns = self._matrix_shape(main.name)
        factor = lr * UPDATE_RMS * max(rows, columns) ** 0.5
        for weight, change in _blocks(main.weight, update):
            weight.mul_(1.0 - lr * weight_decay)
            weight.sub_(change.to(torch.float32) * factor)
        if main.target is not None:
            main.target.copy_(main.weight)

    def _whole_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight, not divided over tensor-parallel ranks."""
        shape, partition = tuple(self._shapes[name]), self._partitions.get(name)
        return shape if partition is None else partition.global_shape(shape)

    def _matrix_shape(self, name: str) -> tuple[int, int]:
        """Return rows and columns of each matrix in a whole weight."""
        rows, columns = self._whole_shape(name)
        return rows // self._matrices[name].parts, columns

    def _kinds(self, name: str) -> Mapping[str, str]:
        if name in self._matrices:
            return {"model": KINDS["model"], MOMENTUM: "exp_avg"}
        return super()._kinds(name)

    def _plan_rounds(self) -> list[Round]:
        """Divide the matrices into rounds, and each round by products over the ranks."""
        replicas, tensor = self._mesh.data_context_parallel, self._mesh.tensor_parallel
        shards: dict[str, Division] = {}
        for sync in self._syncs:
            for bucket in sync.buckets if sync.sharded else ():
                shards |= runs_of(bucket.layout, self._matrices, sync.sharding)
        slices: dict[str, Division] = {
            name: Slices(self._whole_shape(name), partition.dim, partition.size)
            for name, partition in self._partitions.items()
            if name in self._shapes
        }
        costs = {
            name: self._matrices[name].parts * newton_schulz_flops(*self._matrix_shape(name))
            for name in shards or self._shapes
        }
        levels = [(shards, replicas), (slices, tensor)]
        return plan_rounds(costs, levels, ROUNDS, self._dtype, self._device)

    def _rounds_before_publication(self) -> list[int]:
        """Return the last round with a matrix of each part of the weights, on any rank."""
        contents = [
            sizes
            for sync in self._syncs
            for sizes in (
                [bucket.layout.sizes for bucket in sync.buckets]
                if sync.sharded
                else [sync.parameters]
            )
        ]
        return [
            max(
                (
                    n
                    for n, each in enumerate(self._rounds)
                    if not sizes.keys().isdisjoint(each.names)
                ),
                default=NO_ROUND,
            )
            for sizes in contents
        ]
