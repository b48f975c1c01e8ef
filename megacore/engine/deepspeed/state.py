"""Main weights and Adam's moments of a DeepSpeed engine, in the form of a checkpoint.

They are read and written through DeepSpeed's accessors, one parameter at a time, for every ZeRO
stage. Each data-parallel rank has an equal contiguous run of every parameter's elements, the same
run as under ZeRO-3.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.checkpoint.shard import TensorShard
from megacore.engine.deepspeed.join import import_deepspeed
from megacore.parallel.mesh import ParallelGroup
from megacore.tensor_parallel import Partition

KINDS = {"model": None, "optimizer.exp_avg": "exp_avg", "optimizer.exp_avg_sq": "exp_avg_sq"}
"""Key in Adam's state for each prefix of names in a checkpoint; None for the main weights."""


def shape_of(parameter: nn.Parameter) -> torch.Size:
    """Return the shape of a parameter, even if ZeRO-3 has partitioned it."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


class Moments(defaultdict[Tensor, dict[str, Any]]):
    """State of an Adam before its first step.

    It exists from the start, so that a checkpoint can be read into it.
    """

    def __init__(self, counter: Callable[[Tensor], Any]) -> None:
        """Create the state; `counter` returns step 0 of a weight in the type the optimizer uses."""
        super().__init__()
        self._counter = counter

    def __missing__(self, weight: Tensor) -> dict[str, Any]:
        """Create zero moments for a weight."""
        names = [name for name in KINDS.values() if name]
        self[weight] = {
            "step": self._counter(weight),
            **{
                name: torch.zeros_like(weight, dtype=torch.float32, requires_grad=False)
                for name in names
            },
        }
        return self[weight]

    def set_steps(self, steps: int) -> None:
        """Set the number of updates of all moments."""
        for state in self.values():
            step = state["step"]
            state["step"] = torch.full_like(step, steps) if isinstance(step, Tensor) else steps


class DeepSpeedState:
    """Reader and writer of the fp32 state of one engine's parameters."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        partitions: Mapping[str, Partition],
        optimizer: Any,
        moments: Moments,
        replicas: ParallelGroup,
    ) -> None:
        """Inspect an engine's parameters.

        Args:
            parameters: parameters by global name.
            partitions: division of parameters over tensor-parallel ranks; parameters that are not
                named are whole on each rank.
            optimizer: DeepSpeed's wrapper of our optimizer.
            moments: state of our optimizer.
            replicas: data-parallel ranks, with a process group even for a single rank.
        """
        self._parameters = dict(parameters)
        self._partitions = partitions
        self._moments = moments
        self._replicas = replicas
        deepspeed = import_deepspeed()
        self._api, self._zero = deepspeed.utils, deepspeed.zero
        first = next(iter(self._parameters.values()))
        self._partitioned = hasattr(first, "ds_id")
        self._mapped = hasattr(first, "_hp_mapping")
        self._main = (
            {} if self._partitioned or self._mapped else main_weights(optimizer, self._parameters)
        )
        if self._mapped:
            # The first step would do this, but a checkpoint is read before it.
            optimizer._lazy_init_hp_params_optimizer_state()
        if getattr(optimizer, "swap_optimizer", False):
            self._write_zeros(optimizer)

    def tensors(self) -> dict[str, Tensor | TensorShard]:
        """Return copies of this rank's runs in host memory, under the names of a checkpoint.

        Collective.
        """
        return {
            f"{kind}.{name}": TensorShard.of_runs(
                [(self._bounds(name)[0], self._read(name, key))],
                shape_of(parameter),
                torch.float32,
                self._partitions.get(name),
            )
            for kind, key in KINDS.items()
            for name, parameter in self._parameters.items()
        }

    def write(self, tensors: Mapping[str, Tensor | TensorShard]) -> None:
        """Write the values of `tensors`, all or some of those from `self.tensors`. Collective."""
        for full_name, shard in tensors.items():
            kind = next(kind for kind in KINDS if full_name.startswith(f"{kind}."))
            assert isinstance(shard, TensorShard)
            runs = [piece.reshape(-1) for piece in shard.pieces.values()]
            run = torch.cat(runs) if runs else torch.empty(0)
            self._write(full_name.removeprefix(f"{kind}."), KINDS[kind], run)

    def set_weight(self, name: str, values: Tensor) -> None:
        """Set a parameter to new values, identical on all replicas. Collective.

        The values are fp32, in the shape of this rank's part.
        """
        self._write(name, None, values.flatten()[slice(*self._bounds(name))])

    def _write_zeros(self, optimizer: Any) -> None:
        """Write zero moments of all groups to NVMe.

        DeepSpeed cannot read a file that it has not written.
        """
        groups = {
            optimizer.grad_position[optimizer.get_param_id(parameter)][0]: name
            for name, parameter in self._parameters.items()
        }
        for name in groups.values():
            self._write(name, "exp_avg", torch.empty(0))

    def _bounds(self, name: str) -> tuple[int, int]:
        """Return the start and the end (exclusive) of this rank's run of a parameter's elements."""
        count, length = shape_of(self._parameters[name]).numel(), self._run_length(name)
        start = min(self._replicas.rank * length, count)
        return start, min(start + length, count)

    def _run_length(self, name: str) -> int:
        return -(-shape_of(self._parameters[name]).numel() // self._replicas.size)

    @torch.no_grad()
    def _read(self, name: str, key: str | None) -> Tensor:
        parameter, (start, stop) = self._parameters[name], self._bounds(name)
        if self._partitioned:
            local = (
                self._api.safe_get_local_fp32_param(parameter)
                if key is None
                else self._api.safe_get_local_optimizer_state(parameter, key)
            )
            return _copied(local[: stop - start])
        if self._mapped:
            full = (
                self._api.safe_get_full_fp32_param(parameter)
                if key is None
                else self._api.safe_get_full_optimizer_state(parameter, key)
            )
        else:
            full = self._main[name] if key is None else self._moments[self._main[name]][key]
        return _copied(full.flatten()[start:stop])

    @torch.no_grad()
    def _write(self, name: str, key: str | None, run: Tensor) -> None:
        parameter = self._parameters[name]
        padded = torch.zeros(self._run_length(name), device=parameter.device)
        padded[: run.numel()].copy_(run)
        if self._partitioned:
            self._write_partition(parameter, key, padded)
            return
        full = self._gathered(padded)[: parameter.numel()].view(parameter.shape)
        if not self._mapped:
            (self._main[name] if key is None else self._moments[self._main[name]][key]).copy_(full)
        elif key is None:
            self._api.safe_set_full_fp32_param(parameter, full)
        else:
            self._api.safe_set_full_optimizer_state(parameter, full, key)
        if key is None:
            parameter.data.copy_(full)

    def _write_partition(self, parameter: nn.Parameter, key: str | None, padded: Tensor) -> None:
        if key is None:
            with self._zero.GatheredParameters([parameter], modifier_rank=0):
                self._api.safe_set_local_fp32_param(parameter, padded)
                parameter.data.copy_(self._api.safe_get_full_fp32_param(parameter))
            return
        # If a weight's part is on NVMe, DeepSpeed assumes that its length is 1.
        swapped_out = parameter.ds_tensor.numel() != padded.numel()  # type: ignore[attr-defined]
        with self._zero.GatheredParameters([parameter], enabled=swapped_out):
            self._api.safe_set_local_optimizer_state(parameter, padded, key)

    def _gathered(self, padded: Tensor) -> Tensor:
        """Return one parameter's elements, gathered from all replicas."""
        if self._replicas.size == 1:
            return padded
        full = padded.new_empty(padded.numel() * self._replicas.size)
        dist.all_gather(list(full.chunk(self._replicas.size)), padded, group=self._replicas.group)
        return full


def _copied(run: Tensor) -> Tensor:
    return run.detach().to("cpu", torch.float32, copy=True)


def main_weights(optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return DeepSpeed's fp32 copies of the weights of a lower-precision model, without ZeRO.

    For a model in fp32 they are its parameters.
    """
    if not hasattr(optimizer, "fp32_groups"):
        return dict(parameters)
    copies = {
        id(parameter): copy
        for group, copied in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        for parameter, copy in zip(group, copied, strict=True)
    }
    return {name: copies[id(parameter)] for name, parameter in parameters.items()}
