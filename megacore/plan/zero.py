"""What a rank holds under ZeRO, as formulas.

A replica of ψ parameters in a 2-byte type has 2ψ bytes of weights, 2ψ of gradients and 12ψ of fp32
main weights and Adam's two moments, of which N replicas divide more with each stage (Rajbhandari et
al. 2020, section 5):

| stage | bytes of a rank |
| --- | --- |
| 0 | 2ψ + 2ψ + 12ψ |
| 1 | 2ψ + 2ψ + 12ψ/N |
| 2 | 2ψ + 2ψ/N + 12ψ/N |
| 3 | 2ψ/N + 2ψ/N + 12ψ/N |

Offloading moves what lies in the columns of the optimizer and of the gradients, or of the weights,
to main memory (Ren et al. 2021) or to disk (Rajbhandari et al. 2021). Buckets, and what is gathered
for a moment, come on top: `DeepSpeedMemory` has what DeepSpeed allocates beside the state of the
model, with its copies for the step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megacore.config.deepspeed import OffloadDevice

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
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


class ModelState(NamedTuple):
    """Bytes of a model's state, by what they hold."""

    parameters: int = 0
    """The weights that the model computes with."""
    gradients: int = 0
    """Of all weights, or of those that this rank updates."""
    main_weights: int = 0
    """fp32 copies that the optimizer updates."""
    moments: int = 0
    """Adam's two, in fp32."""

    @property
    def optimizer(self) -> int:
        """The optimizer's state: main weights and moments."""
        return self.main_weights + self.moments

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return sum(self)


@dataclass(frozen=True)
class ZeroBytes:
    """The state of a model on one rank, by where it lies."""

    device: ModelState
    """Where the model computes."""
    cpu: ModelState
    """Offloaded to main memory."""
    nvme: ModelState
    """Offloaded to disk."""

    @property
    def parameters(self) -> int:
        """The weights that the model computes with, wherever they lie."""
        return self.device.parameters + self.cpu.parameters + self.nvme.parameters

    @property
    def gradients(self) -> int:
        """Gradients, wherever they lie."""
        return self.device.gradients + self.cpu.gradients + self.nvme.gradients

    @property
    def optimizer(self) -> int:
        """The optimizer's state, wherever it lies."""
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
) -> ZeroBytes:
    """Bytes on one of `data_parallel_size` replicas.

    Args:
        parameters: that the replicas hold, the rank's part of tensor and pipeline parallelism (ψ).
        stage: 0 divides nothing, 1 the optimizer's state, 2 gradients too, 3 weights too.
        data_parallel_size: replicas that divide (N).
        precision: compute type, fp32, bf16 or fp16.
        gradient_bytes: of one gradient where it accumulates; None means as of a weight.
        main_weights: whether the optimizer has copies of the weights; None means in bf16 and fp16
            alone.
        offload_optimizer: where its state goes, and with stage 2 and 3 the gradients: to main
            memory in any case.
        offload_param: where weights go, with stage 3.
    """
    element = ELEMENT_BYTES[precision]

    def share(divides_from: int) -> int:
        """Parameters of which a rank keeps something that is divided from a stage on."""
        return -(-parameters // data_parallel_size) if stage >= divides_from else parameters

    copies = precision != "fp32" if main_weights is None else main_weights
    weights = ModelState(parameters=element * share(3))
    gradients = ModelState(
        gradients=(element if gradient_bytes is None else gradient_bytes) * share(2)
    )
    optimizer = ModelState(main_weights=4 * share(1) * copies, moments=8 * share(1))
    offloads_gradients = offload_optimizer != "none" and stage >= 2
    places: dict[str, list[ModelState]] = {"none": [], "cpu": [], "nvme": []}
    places[offload_param].append(weights)
    places["cpu" if offloads_gradients else "none"].append(gradients)
    places[offload_optimizer].append(optimizer)
    return ZeroBytes(
        *(ModelState(*map(sum, zip(ModelState(), *held, strict=True))) for held in places.values())
    )


@dataclass(frozen=True)
class Buffers:
    """Bytes on one rank beside its part of weights, gradients and optimizer state."""

    device: int = 0
    """While the model computes: buckets of gradients, and with ZeRO stage 3 gathered and persisted
    weights."""
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
        """What a rank allocates for parameters of these sizes, which the replicas divide."""
        share = -(-sum(sizes) // data_parallel_size)
        if self.stage == 3:
            return self._stage3(sizes, share)
        if self.stage:
            return self._stage1_and_2(sizes, share)
        bucket = min(_ALLREDUCE_ELEMENTS, sum(sizes)) * self._travels
        return Buffers(bucket, 0 if self.precision == "fp32" else 4 * sum(sizes))

    def _stage1_and_2(self, sizes: Sequence[int], share: int) -> Buffers:
        bucket = self._elements("reduce_bucket_size") * self._travels
        offloads, widens = (
            self._offloaded("optimizer") != "none",
            self.gradient_bytes > self._element,
        )
        if self.stage == 1 and self.precision == "bf16" and widens and not offloads:
            # BF16_Optimizer adds to one flat buffer, of which the step takes its part as it is;
            # what it adds stays.
            return Buffers(min(bucket, sum(sizes) * self._travels) + sum(sizes) * self._element)
        device = bucket * (2 if self._zero.get("overlap_comm") else 1)
        # Gradients that accumulate in a wider type are in one flat buffer of this rank's part, with
        # stage 2 all along.
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
        gathered = min(
            sum(sizes), max(self._elements("stage3_max_live_parameters"), max(sizes)) + persisted
        )
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
