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

The update is of whole matrices in every layout. Tensor-parallel ranks gather G + μ M_t and apply
their slices of the result. With a distributed optimizer, momentum stays divided like AdamW's
moments, and each matrix has an owner among the replicas that computes NS (`Owners`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.config.optim import OptimConfig
from megacore.data_parallel.grad_sync import GradSync
from megacore.data_parallel.owners import Owners, runs_of
from megacore.kernels.choice import Kernels
from megacore.optim.adam import KINDS, MainWeight, MainWeightAdamW
from megacore.parallel.collectives import all_gather
from megacore.tensor_parallel.partition import Partition

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c of the iteration X := a X + (b A + c A²) X with A = X Xᵀ."""
ITERATIONS = 5
UPDATE_RMS = 0.2
"""Root mean square of the elements of an update for learning rate 1, about that of AdamW's."""
MOMENTUM = "optimizer.momentum"
"""Prefix of a momentum's name in a checkpoint."""
_NORM_EPSILON = 1e-7
_BLOCK = 1 << 17
"""Elements of momentum that a CPU updates at a time, so that they stay in its cache."""


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


def newton_schulz(matrix: Tensor) -> Tensor:
    """Return the approximate orthogonal factor U Vᵀ of a matrix U S Vᵀ, in its data type.

    Singular values become about 0.7 to 1.2; those below about 1e-3 of the matrix's norm remain
    smaller.
    """
    a, b, c = COEFFICIENTS
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    norm = torch.linalg.vector_norm(x, dtype=torch.float32)
    x = x / (norm + _NORM_EPSILON).to(x.dtype)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def newton_schulz_flops(rows: int, columns: int) -> float:
    """Return the floating-point operations of `newton_schulz`."""
    short, long = sorted((rows, columns))
    return ITERATIONS * (4.0 * short**2 * long + 2.0 * short**3)


def orthogonalized(weight: Tensor, parts: RowParts) -> Tensor:
    """Return `newton_schulz` of each of the matrices in a whole weight [r, c]."""
    result = torch.empty_like(weight)
    for source, target in zip(parts.split(weight), parts.split(result), strict=True):
        target.copy_(newton_schulz(source.flatten(0, 1)).view(target.shape))
    return result


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
    ) -> None:
        """Take the parameters of this rank's model chunks and cast them to the compute type.

        Args:
            syncs: gradients and fp32 parameters of each chunk, all of one mesh.
            config: momentum, betas and epsilon.
            dtype: new type of the model's weights; the main weights keep their bits.
            partitions: division of parameters over tensor-parallel ranks.
            kernels: implementation of the operations; None is plain torch.
            matrices: parameters that Muon updates, with the matrices in them.
        """
        super().__init__(syncs, config, dtype, partitions, kernels, single=matrices.keys())
        self._matrices = matrices
        self._momentum = config.muon_momentum
        self._dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
        self._shapes = {
            name: parameter.shape
            for sync in syncs
            for name, parameter in sync.parameters.items()
            if name in matrices
        }
        self._owners = self._make_owners() if syncs[0].sharded and self._shapes else None

    def _step(self, lr: float, weight_decay: float, divisor: Tensor) -> None:
        if self._owners is not None:
            self._step_of_shards(self._owners, lr, weight_decay, divisor)
            return
        for part in self._parts:
            self._adam(self._others(part.weights), lr, weight_decay, divisor)
            for main in self._muons(part.weights):
                self._accumulate(main, divisor)
                update = self._update_of(main.name, main.gradient.to(self._dtype))
                self._apply(main, update, lr, weight_decay)
            part.publish().wait()

    def _step_of_shards(
        self, owners: Owners, lr: float, weight_decay: float, divisor: Tensor
    ) -> None:
        """Update shards; AdamW runs while the owners' matrices are on their way."""
        for part in self._parts:
            for main in self._muons(part.weights):
                self._accumulate(main, divisor)
        collecting = owners.start_collect(
            {main.name: main.gradient for part in self._parts for main in self._muons(part.weights)}
        )
        for part in self._parts:
            self._adam(self._others(part.weights), lr, weight_decay, divisor)
        wholes = collecting.wait()
        for name, flat in owners.views(wholes, owners.owned).items():
            flat.copy_(self._update_of(name, flat.view(self._shapes[name])).flatten())
        updates = owners.views(owners.start_return(wholes).wait(), owners.held)
        pending = []
        for part in self._parts:
            for main in self._muons(part.weights):
                self._apply(main, updates[main.name], lr, weight_decay)
            pending.append(part.publish())
        for work in pending:
            work.wait()

    def _accumulate(self, main: MainWeight, divisor: Tensor) -> None:
        """Update the momentum, and replace the gradient G by G + μ M.

        Each operation rounds separately, so that the result does not depend on the division into
        shards and blocks.
        """
        size = _BLOCK if main.gradient.device.type == "cpu" else max(1, main.gradient.numel())
        for gradient, momentum in zip(
            torch.split(main.gradient.view(-1), size),
            torch.split(main.exp_avg.view(-1), size),
            strict=True,
        ):
            gradient.div_(divisor)
            momentum.mul_(self._momentum).add_(gradient)
            gradient.add_(momentum * self._momentum)

    def _update_of(self, name: str, direction: Tensor) -> Tensor:
        """Orthogonalize the whole weight of which `direction` is this rank's slice.

        Return this rank's slice of the result. Collective over the tensor-parallel ranks.
        """
        partition = self._partitions.get(name)
        if partition is None:
            return orthogonalized(direction, self._matrices[name])
        whole = all_gather(direction, self._mesh.tensor_parallel, partition.dim)
        return partition.shard(orthogonalized(whole.contiguous(), self._matrices[name]))

    def _apply(self, main: MainWeight, update: Tensor, lr: float, weight_decay: float) -> None:
        """Decay a main weight, subtract the update, and round it into the model's weight."""
        rows, columns = self._matrix_shape(main.name)
        factor = lr * UPDATE_RMS * max(rows, columns) ** 0.5
        main.weight.mul_(1.0 - lr * weight_decay)
        main.weight.sub_(update.to(torch.float32) * factor)
        if main.target is not None:
            main.target.copy_(main.weight)

    def _matrix_shape(self, name: str) -> tuple[int, int]:
        """Return rows and columns of each matrix in a whole weight."""
        shape, partition = tuple(self._shapes[name]), self._partitions.get(name)
        rows, columns = shape if partition is None else partition.global_shape(shape)
        return rows // self._matrices[name].parts, columns

    def _muons(self, weights: Sequence[MainWeight]) -> list[MainWeight]:
        return [main for main in weights if main.name in self._matrices]

    def _others(self, weights: Sequence[MainWeight]) -> list[MainWeight]:
        return [main for main in weights if main.name not in self._matrices]

    def _kinds(self, name: str) -> Mapping[str, str]:
        if name in self._matrices:
            return {"model": KINDS["model"], MOMENTUM: "exp_avg"}
        return super()._kinds(name)

    def _make_owners(self) -> Owners:
        """Divide the matrices over the replicas by the operations of Newton-Schulz."""
        group = self._mesh.data_context_parallel
        runs: dict[str, Sequence[range]] = {}
        for sync in self._syncs:
            for bucket in sync.buckets:
                runs |= runs_of(bucket, self._matrices, group.size)
        costs = {
            name: self._matrices[name].parts * newton_schulz_flops(*self._matrix_shape(name))
            for name in runs
        }
        return Owners(runs, costs, group, self._dtype, self._device)
