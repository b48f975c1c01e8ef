"""Bytes that a rank needs for training."""

from dataclasses import dataclass

from megacore.config.deepspeed import zero_of
from megacore.config.run import RunConfig
from megacore.models.parameters import chunk_sizes, padded_vocab_size
from megacore.pipeline_parallel.partition import chunks_of
from megacore.plan.activations import Activations
from megacore.plan.buffers import Buffers, DeepSpeedMemory
from megacore.plan.zero import ELEMENT_BYTES, ZeroBytes, zero_bytes

GIB = 2**30

_PROCESS_BYTES = {"cpu": 350 * 2**20, "cuda": 600 * 2**20}
"""The interpreter with torch (resident, measured), or a CUDA context with its libraries."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank, by what they hold: on the device that computes, but for the last two."""

    parameters: int
    """Number of parameters on the rank that ZeRO divides over the replicas, from which the next three follow."""
    weights: int
    """The weights that the model computes with, and under bf16 or fp16 the fp32 main weights."""
    gradients: int
    """The gradients that accumulate over micro batches."""
    optimizer: int
    """Adam's two fp32 moments."""
    activations: int
    """What forward passes keep for their backward passes, of all micro batches in flight."""
    logits: int
    """The output layer's logits and their gradient, where the rank has one."""
    process: int
    """Interpreter and libraries, or CUDA context."""
    buffers: int = 0
    """DeepSpeed's buckets of gradients, and the weights that ZeRO stage 3 gathers or does not divide."""
    step: int = 0
    """What DeepSpeed makes for the optimizer's step, when the activations are gone."""
    host: int = 0
    """In main memory, beside a GPU: what is offloaded there, with its buffers."""
    nvme: int = 0
    """On disk: what is offloaded there."""

    @property
    def total(self) -> int:
        """Bytes of the device at the peak."""
        state = self.weights + self.gradients + self.optimizer + self.buffers + self.process
        return state + max(self.activations + self.logits, self.step)


def estimate_memory(
    config: RunConfig, vocab_size: int, precision: str, device_type: str, data_parallel_size: int = 1
) -> MemoryEstimate:
    """Peak memory of a rank of the pipeline stage that needs most; the arguments are those of `estimate_stages`."""
    stages = estimate_stages(config, vocab_size, precision, device_type, data_parallel_size)
    return max(stages, key=lambda stage: stage.total)


def estimate_stages(
    config: RunConfig, vocab_size: int, precision: str, device_type: str, data_parallel_size: int = 1
) -> tuple[MemoryEstimate, ...]:
    """Peak memory of one rank of each pipeline stage.

    On a CPU there is one memory alone, and what is offloaded stays where it is.

    Args:
        config: the run.
        vocab_size: entries of the vocabulary before padding.
        precision: fp32, bf16 or fp16.
        device_type: cpu or cuda.
        data_parallel_size: replicas; they share the batch, and what ZeRO divides.

    Raises:
        ParallelLayoutError: layers or micro batches cannot be divided over the stages.
    """
    parallel, train = config.parallel, config.train
    stages, tensor = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    chunks, element = chunks_of(config, vocab_size), ELEMENT_BYTES[precision]
    kept = Activations(config, element, device_type)
    micro_batches = train.global_batch_size // (train.micro_batch_size * data_parallel_size)
    estimates = []
    for stage in range(stages):
        own = chunks[stage::stages]
        sizes = [size for chunk in own for size in chunk_sizes(config, vocab_size, chunk, tensor)]
        state = model_state(config, sum(sizes), precision, data_parallel_size)
        extra = _buffers(config, sizes, precision, data_parallel_size)
        activations, losses = kept.peak(own, stage, micro_batches)
        offloaded = kept.offloaded(own, stage, micro_batches)
        here, there = state.device, state.cpu
        alone = device_type == "cpu"
        bytes_per_logit = element * losses  # their gradient takes their place
        estimates.append(
            MemoryEstimate(
                parameters=sum(sizes),
                weights=here.parameters + here.main_weights + alone * (there.parameters + there.main_weights),
                gradients=here.gradients + alone * there.gradients,
                optimizer=here.moments + alone * there.moments,
                activations=activations + alone * offloaded,
                logits=kept.predictions * padded_vocab_size(config, vocab_size) // tensor * bytes_per_logit,
                process=_PROCESS_BYTES[device_type],
                buffers=extra.device + alone * extra.cpu,
                step=extra.step,
                host=0 if alone else there.total + extra.cpu + offloaded,
                nvme=state.nvme.total,
            )
        )
    return tuple(estimates)


def model_state(config: RunConfig, parameters: int, precision: str, data_parallel_size: int) -> ZeroBytes:
    """Weights, gradients and optimizer state of a rank, as the configuration's engine keeps them.

    Args:
        config: the run.
        parameters: on the rank, before ZeRO divides them.
        precision: fp32, bf16 or fp16.
        data_parallel_size: replicas.
    """
    zero = zero_of(config)
    if config.engine == "native":
        return zero_bytes(parameters, zero.stage, data_parallel_size, precision, gradient_bytes=4)
    memory = _deepspeed(config, precision, data_parallel_size)
    return zero_bytes(
        parameters,
        zero.stage,
        data_parallel_size,
        precision,
        gradient_bytes=memory.gradient_bytes,
        main_weights=memory.main_weights,
        offload_optimizer=zero.offload_optimizer,
        offload_param=zero.offload_param,
    )


def engine_name(config: RunConfig) -> str:
    """As in `deepspeed ZeRO-3, optimizer on cpu, weights on nvme`."""
    if config.engine == "native":
        return config.engine
    zero = zero_of(config)
    places = {"optimizer": zero.offload_optimizer, "weights": zero.offload_param}
    moved = "".join(f", {what} on {where}" for what, where in places.items() if where != "none")
    return f"{config.engine} ZeRO-{zero.stage}{moved}"


def _buffers(config: RunConfig, sizes: list[int], precision: str, data_parallel_size: int) -> Buffers:
    if config.engine == "native":
        return Buffers()
    return _deepspeed(config, precision, data_parallel_size).buffers(sizes, data_parallel_size)


def _deepspeed(config: RunConfig, precision: str, data_parallel_size: int) -> DeepSpeedMemory:
    """What DeepSpeed is told; sizes do not depend on the device."""
    from megacore.engine.deepspeed.settings import deepspeed_settings

    settings = deepspeed_settings(
        config, precision=precision, device_type="cuda", data_parallel_size=data_parallel_size
    )
    return DeepSpeedMemory(settings, precision)
