"""Formulas for the memory of a rank under ZeRO.

A replica of ψ parameters in a 2-byte type has 2ψ bytes of weights, 2ψ of gradients and 12ψ of fp32
main weights and Adam's two moments. With each stage, N replicas divide more of them (Rajbhandari et
al. 2020, section 5):

| stage | bytes of a rank |
| --- | --- |
| 0 | 2ψ + 2ψ + 12ψ |
| 1 | 2ψ + 2ψ + 12ψ/N |
| 2 | 2ψ + 2ψ/N + 12ψ/N |
| 3 | 2ψ/N + 2ψ/N + 12ψ/N |

Offloading moves the optimizer state and the gradients, or the weights, to host memory (Ren et al.
2021) or to disk (Rajbhandari et al. 2021). Buckets and temporarily gathered weights are added:
`DeepSpeedMemory` computes what DeepSpeed allocates in addition to the state of the model, including
its copies for the step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megacore.config.deepspeed import OffloadDevice
from megacore.config.parallel import ZERO_STAGES
from megacore.data_parallel.sharding import Sharding, plan_buckets

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "sub_group_size": 1_000_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_param_persistence_threshold": 100_000,
}
"""DeepSpeed's defaults, in elements."""
_ALLREDUCE_ELEMENTS = 500_000_000
"""Elements of gradients per communication without ZeRO."""
_OPTIMIZER_SWAP_BUFFERS = 4
_PARAMETER_SWAP_BUFFERS = (5, 100_000_000)
"""Number of buffers, and elements of each, for reading and writing weights on NVMe."""


class ModelState(NamedTuple):
    """Bytes of a model's state by type."""

    parameters: int = 0
    """Weights that the model computes with."""
    gradients: int = 0
    """Gradients of all weights, or of those that this rank updates."""
    main_weights: int = 0
    """fp32 copies of the weights, which the optimizer updates."""
    moments: int = 0
    """Adam's two moments in fp32, or Muon's momentum."""

    @property
    def optimizer(self) -> int:
        """Optimizer state: main weights and moments."""
        return self.main_weights + self.moments

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self)


@dataclass(frozen=True)
class ZeroBytes:
    """Bytes of a model's state on a rank by storage."""

    device: ModelState
    """State on the device that computes."""
    cpu: ModelState
    """State offloaded to host memory."""
    nvme: ModelState
    """State offloaded to disk."""

    @property
    def parameters(self) -> int:
        """Weights that the model computes with, on all storages."""
        return self.device.parameters + self.cpu.parameters + self.nvme.parameters

    @property
    def gradients(self) -> int:
        """Gradients on all storages."""
        return self.device.gradients + self.cpu.gradients + self.nvme.gradients

    @property
    def optimizer(self) -> int:
        """Optimizer state on all storages."""
        return self.device.optimizer + self.cpu.optimizer + self.nvme.optimizer


def zero_bytes(
    parameters: int,
    stage: int,
    data_parallel_size: int,
    precision: str,
    *,
    gradient_bytes: int | None = None,
    main_weights: bool | None = None,
    offload_optimizer: OffloadDevice = "none",
    offload_param: OffloadDevice = "none",
    single_moment: int = 0,
) -> ZeroBytes:
    """Return the bytes of a model's state on one of `data_parallel_size` replicas.

    Args:
        parameters: number of parameters of a replica on the rank, after tensor and pipeline
            parallelism (ψ).
        stage: ZeRO stage: 0 divides nothing, 1 the optimizer state, 2 also gradients, 3 also
            weights.
        data_parallel_size: number of replicas (N).
        precision: data type of the computation: fp32, bf16 or fp16.
        gradient_bytes: bytes of an accumulated gradient; None means those of a weight.
        main_weights: True if the optimizer has copies of the weights; None means only in bf16 and
            fp16.
        offload_optimizer: storage of the optimizer state. If it is offloaded, the gradients are
            offloaded to host memory with stages 2 and 3.
        offload_param: storage of the weights with stage 3.
        single_moment: number of the parameters that have one moment instead of two.
    """
    element = ELEMENT_BYTES[precision]
    sharding = Sharding(ZERO_STAGES[stage], data_parallel_size)
    updated = sharding.share("optimizer", parameters)
    copies = precision != "fp32" if main_weights is None else main_weights
    weights = ModelState(parameters=element * sharding.share("parameters", parameters))
    gradients = ModelState(
        gradients=(element if gradient_bytes is None else gradient_bytes)
        * sharding.share("gradients", parameters)
    )
    optimizer = ModelState(
        main_weights=4 * updated * copies,
        moments=8 * updated - 4 * sharding.share("optimizer", single_moment),
    )
    offloads_gradients = offload_optimizer != "none" and stage >= 2
    places: dict[str, list[ModelState]] = {"none": [], "cpu": [], "nvme": []}
    places[offload_param].append(weights)
    places["cpu" if offloads_gradients else "none"].append(gradients)
    places[offload_optimizer].append(optimizer)
    return ZeroBytes(
        *(
            ModelState(*map(sum, zip(ModelState(), *parts, strict=True)))
            for parts in places.values()
        )
    )


@dataclass(frozen=True)
class Buffers:
    """Bytes of a rank's buffers, in addition to weights, gradients and optimizer state."""

    device: int = 0
    """Buffers during forward and backward passes: gradient buckets, and with ZeRO stage 3 gathered
    and persistent weights."""
    step: int = 0
    """Buffers of the optimizer step only, when no activations exist."""
    cpu: int = 0
    """Buffers in host memory for offloaded state."""
    gathered: int = 0
    """Part of `device` that exists in forward passes too."""


def native_buffers(
    sharding: Sharding,
    layers: Sequence[Sequence[int]],
    others: Sequence[int],
    element: int,
    bucket_mb: float,
) -> Buffers:
    """Return the temporary buffers of the native engine's divided gradients and weights.

    The largest other parameter is the token table, whose gradient waits for the pass's last layer
    if it is tied. Meanwhile a layer's buckets are filled and reduced in turn. `layers` has the
    sizes of the parameters of each kind of layer, and `others` those of the other parameters, which
    stay gathered during the passes.
    """
    if not sharding.divides("gradients") or sharding.replicas == 1:
        return Buffers()
    buckets = [
        sum(bucket.values())
        for sizes in layers
        for bucket in plan_buckets({str(n): size for n, size in enumerate(sizes)}, bucket_mb)
    ]
    gradients = 4 * (max(others, default=0) + 2 * max(buckets, default=0))
    if not sharding.divides("parameters"):
        return Buffers(gradients)
    gathered = element * (sum(others) + 2 * max(map(sum, layers), default=0))
    return Buffers(gradients + gathered, gathered=gathered)


@dataclass(frozen=True)
class DeepSpeedMemory:
    """DeepSpeed's settings that determine its memory."""

    settings: Mapping[str, Any]
    """Settings passed to `deepspeed.initialize`."""
    precision: str
    """Data type of the computation: fp32, bf16 or fp16."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient that accumulates over micro batches."""
        return ELEMENT_BYTES[self.settings["data_types"]["grad_accum_dtype"]]

    @property
    def main_weights(self) -> bool:
        """True if the optimizer has copies of the weights; with ZeRO this is so in fp32 too."""
        return self.precision != "fp32" or self.stage > 0

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return int(self._zero["stage"])

    def buffers(self, sizes: Sequence[int], data_parallel_size: int) -> Buffers:
        """Return the buffers of a rank for parameters of these sizes, which the replicas divide."""
        share = -(-sum(sizes) // data_parallel_size)
        if self.stage == 3:
            return self._stage3(sizes, share)
        if self.stage:
            return self._stage1_and_2(sizes, share)
        bucket = min(_ALLREDUCE_ELEMENTS, sum(sizes)) * self._communication_bytes
        return Buffers(bucket, 0 if self.precision == "fp32" else 4 * sum(sizes))

    def _stage1_and_2(self, sizes: Sequence[int], share: int) -> Buffers:
        bucket = self._elements("reduce_bucket_size") * self._communication_bytes
        offloads = self._offloaded("optimizer") != "none"
        widens = self.gradient_bytes > self._element
        if self.stage == 1 and self.precision == "bf16" and widens and not offloads:
            # BF16_Optimizer accumulates in one flat buffer, of which the step uses its part
            # directly. The buffer persists.
            return Buffers(
                min(bucket, sum(sizes) * self._communication_bytes) + sum(sizes) * self._element
            )
        device = bucket * (2 if self._zero.get("overlap_comm") else 1)
        # Gradients that accumulate in a wider type are in one flat buffer of this rank's part, with
        # stage 2 permanently.
        flat = 4 * share
        if not offloads:
            return Buffers(device, 0 if self.stage == 2 and widens else flat)
        largest = max(sizes) * self._element
        cpu = largest + share * self._element  # updated weights, before they are copied back
        if self.stage == 1 or not widens:
            cpu += flat
        return Buffers(device + largest + (flat if widens else 0), 0, cpu)

    def _stage3(self, sizes: Sequence[int], share: int) -> Buffers:
        threshold = self._elements("stage3_param_persistence_threshold")
        persisted = sum(size for size in sizes if size <= threshold)
        gathered = min(
            sum(sizes), max(self._elements("stage3_max_live_parameters"), max(sizes)) + persisted
        )
        device = (
            self._elements("reduce_bucket_size") * self._communication_bytes
            + gathered * self._element
        )
        group = min(share, self._elements("sub_group_size"))
        optimizer_device, cpu = self._offloaded("optimizer"), 0
        if optimizer_device == "cpu":
            cpu = 4 * share
        elif optimizer_device == "nvme":
            cpu = _OPTIMIZER_SWAP_BUFFERS * 4 * group
        if self._offloaded("param") == "nvme":
            number, elements = _PARAMETER_SWAP_BUFFERS
            cpu += number * elements * self._element
        return Buffers(device, 4 * group if optimizer_device == "none" else 0, cpu=cpu)

    @property
    def _zero(self) -> Mapping[str, Any]:
        zero: Mapping[str, Any] = self.settings["zero_optimization"]
        return zero

    @property
    def _element(self) -> int:
        return ELEMENT_BYTES[self.precision]

    @property
    def _communication_bytes(self) -> int:
        """Bytes of a gradient in communication."""
        return ELEMENT_BYTES[self.settings["communication_data_type"]]

    def _elements(self, name: str) -> int:
        return int(self._zero.get(name, DEFAULTS[name]))

    def _offloaded(self, what: str) -> str:
        return str(self._zero.get(f"offload_{what}", {}).get("device", "none"))
