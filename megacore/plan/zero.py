"""The state of a model on one rank under ZeRO, as a formula.

A replica of ψ parameters in a 2-byte type has 2ψ bytes of weights, 2ψ of gradients and 12ψ of fp32 main weights and
Adam's two moments, of which N replicas divide more with each stage (Rajbhandari et al. 2020, section 5):

| stage | bytes of a rank |
| --- | --- |
| 0 | 2ψ + 2ψ + 12ψ |
| 1 | 2ψ + 2ψ + 12ψ/N |
| 2 | 2ψ + 2ψ/N + 12ψ/N |
| 3 | 2ψ/N + 2ψ/N + 12ψ/N |

Offloading moves what lies in the columns of the optimizer and of the gradients, or of the weights, to main memory
(Ren et al. 2021) or to disk (Rajbhandari et al. 2021). Buckets, and what is gathered for a moment, come on top.
"""

from dataclasses import dataclass
from typing import NamedTuple

from megacore.config.deepspeed import OffloadDevice

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


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
        main_weights: whether the optimizer has copies of the weights; None means in bf16 and fp16 alone.
        offload_optimizer: where its state goes, and with stage 2 and 3 the gradients: to main memory in any case.
        offload_param: where weights go, with stage 3.
    """
    element = ELEMENT_BYTES[precision]

    def share(divides_from: int) -> int:
        """Parameters of which a rank keeps something that is divided from a stage on."""
        return -(-parameters // data_parallel_size) if stage >= divides_from else parameters

    copies = precision != "fp32" if main_weights is None else main_weights
    weights = ModelState(parameters=element * share(3))
    gradients = ModelState(gradients=(element if gradient_bytes is None else gradient_bytes) * share(2))
    optimizer = ModelState(main_weights=4 * share(1) * copies, moments=8 * share(1))
    offloads_gradients = offload_optimizer != "none" and stage >= 2
    places: dict[str, list[ModelState]] = {"none": [], "cpu": [], "nvme": []}
    places[offload_param].append(weights)
    places["cpu" if offloads_gradients else "none"].append(gradients)
    places[offload_optimizer].append(optimizer)
    return ZeroBytes(*(ModelState(*map(sum, zip(ModelState(), *held, strict=True))) for held in places.values()))
