"""What DeepSpeed allocates beside the state of the model: buckets, gathered weights, and copies for the step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megacore.plan.zero import ELEMENT_BYTES

DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "sub_group_size": 1_000_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_param_persistence_threshold": 100_000,
}
"""DeepSpeed's own, in elements."""
_ALLREDUCE_ELEMENTS = 500_000_000
"""Gradients that travel at a time without ZeRO."""
_OPTIMIZER_SWAP_BUFFERS = 4
_PARAMETER_SWAP_BUFFERS = (5, 100_000_000)
"""How many, and elements of each, while what is on NVMe is read and written."""


@dataclass(frozen=True)
class Buffers:
    """Bytes on one rank beside its part of weights, gradients and optimizer state."""

    device: int = 0
    """While the model computes: buckets of gradients, and with ZeRO stage 3 gathered and persisted weights."""
    step: int = 0
    """For the optimizer's step alone, when there are no activations."""
    cpu: int = 0
    """In main memory, of what is offloaded."""


@dataclass(frozen=True)
class DeepSpeedMemory:
    """Settings of DeepSpeed's that say how much memory it takes."""

    settings: Mapping[str, Any]
    """What `deepspeed.initialize` gets."""
    precision: str
    """Compute type: fp32, bf16 or fp16."""

    @property
    def gradient_bytes(self) -> int:
        """Of a gradient where those of micro batches accumulate."""
        return ELEMENT_BYTES[self.settings["data_types"]["grad_accum_dtype"]]

    @property
    def main_weights(self) -> bool:
        """Whether the optimizer has copies of the weights: ZeRO makes them in fp32 as well."""
        return self.precision != "fp32" or self.stage > 0

    @property
    def stage(self) -> int:
        """ZeRO's."""
        return int(self._zero["stage"])

    def buffers(self, sizes: Sequence[int], data_parallel_size: int) -> Buffers:
        """What a rank allocates for parameters with these numbers of elements, which the replicas divide."""
        share = -(-sum(sizes) // data_parallel_size)
        if self.stage == 3:
            return self._stage3(sizes, share)
        if self.stage:
            return self._stage1_and_2(sizes, share)
        bucket = min(_ALLREDUCE_ELEMENTS, sum(sizes)) * self._travels
        return Buffers(bucket, 0 if self.precision == "fp32" else 4 * sum(sizes))

    def _stage1_and_2(self, sizes: Sequence[int], share: int) -> Buffers:
        bucket = self._elements("reduce_bucket_size") * self._travels
        offloads, widens = self._offloaded("optimizer") != "none", self.gradient_bytes > self._element
        if self.stage == 1 and self.precision == "bf16" and widens and not offloads:
            # BF16_Optimizer adds to one flat buffer, of which the step takes its part as it is; what it adds stays.
            return Buffers(min(bucket, sum(sizes) * self._travels) + sum(sizes) * self._element)
        device = bucket * (2 if self._zero.get("overlap_comm") else 1)
        # Gradients that accumulate in a wider type are in one flat buffer of this rank's part, with stage 2 all along.
        flat = 4 * share
        if not offloads:
            return Buffers(device, 0 if self.stage == 2 and widens else flat)
        largest = max(sizes) * self._element
        cpu = largest + share * self._element  # updated weights on their way back
        if self.stage == 1 or not widens:
            cpu += flat
        return Buffers(device + largest + (flat if widens else 0), 0, cpu)

    def _stage3(self, sizes: Sequence[int], share: int) -> Buffers:
        threshold = self._elements("stage3_param_persistence_threshold")
        persisted = sum(size for size in sizes if size <= threshold)
        gathered = min(sum(sizes), max(self._elements("stage3_max_live_parameters"), max(sizes)) + persisted)
        device = self._elements("reduce_bucket_size") * self._travels + gathered * self._element
        group = min(share, self._elements("sub_group_size"))
        where, cpu = self._offloaded("optimizer"), 0
        if where == "cpu":
            cpu = 4 * share
        elif where == "nvme":
            cpu = _OPTIMIZER_SWAP_BUFFERS * 4 * group
        if self._offloaded("param") == "nvme":
            number, elements = _PARAMETER_SWAP_BUFFERS
            cpu += number * elements * self._element
        return Buffers(device, 4 * group if where == "none" else 0, cpu)

    @property
    def _zero(self) -> Mapping[str, Any]:
        zero: Mapping[str, Any] = self.settings["zero_optimization"]
        return zero

    @property
    def _element(self) -> int:
        return ELEMENT_BYTES[self.precision]

    @property
    def _travels(self) -> int:
        """Bytes of a gradient on its way to other ranks."""
        return ELEMENT_BYTES[self.settings["communication_data_type"]]

    def _elements(self, name: str) -> int:
        return int(self._zero.get(name, DEFAULTS[name]))

    def _offloaded(self, what: str) -> str:
        return str(self._zero.get(f"offload_{what}", {}).get("device", "none"))
