"""Bytes that a rank needs for training."""

from dataclasses import dataclass

from megacore.config.run import RunConfig
from megacore.pipeline_parallel.partition import chunks_of
from megacore.plan.activations import Activations
from megacore.plan.parameters import chunk_parameters, padded_vocab_size

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
GIB = 2**30

_PROCESS_BYTES = {"cpu": 350 * 2**20, "cuda": 600 * 2**20}
"""The interpreter with torch (resident, measured), or a CUDA context with its libraries."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank, by what they hold."""

    parameters: int
    """Number of parameters on the rank, from which the next three follow."""
    weights: int
    """The weights that the model computes with, and under bf16 or fp16 the fp32 main weights."""
    gradients: int
    """The fp32 gradients that accumulate over micro batches."""
    optimizer: int
    """Adam's two fp32 moments."""
    activations: int
    """What forward passes keep for their backward passes, of all micro batches in flight."""
    logits: int
    """The output layer's logits and their gradient, where the rank has one."""
    process: int
    """Interpreter and libraries, or CUDA context."""

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.process


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

    Args:
        config: the run.
        vocab_size: entries of the vocabulary before padding.
        precision: fp32, bf16 or fp16.
        device_type: cpu or cuda.
        data_parallel_size: replicas; they share the batch, and with the distributed optimizer its state.

    Raises:
        ParallelLayoutError: layers or micro batches cannot be divided over the stages.
    """
    parallel, train = config.parallel, config.train
    stages, tensor = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    chunks, element = chunks_of(config, vocab_size), ELEMENT_BYTES[precision]
    half = precision != "fp32"
    kept = Activations(config, element, device_type)
    micro_batches = train.global_batch_size // (train.micro_batch_size * data_parallel_size)
    estimates = []
    for stage in range(stages):
        own = chunks[stage::stages]
        parameters = sum(chunk_parameters(config, vocab_size, chunk, tensor) for chunk in own)
        main = -(-parameters // (data_parallel_size if parallel.use_distributed_optimizer else 1))
        activations, losses = kept.peak(own, stage, micro_batches)
        # Logits of half precision live only as long as their fp32 copy, or its gradient, is made.
        bytes_per_logit = 4 * losses + (element if half and losses else 0)
        estimates.append(
            MemoryEstimate(
                parameters=parameters,
                weights=element * parameters + 4 * main if half else 4 * parameters,
                gradients=4 * parameters,
                optimizer=8 * main,
                activations=activations,
                logits=kept.predictions * padded_vocab_size(config, vocab_size) // tensor * bytes_per_logit,
                process=_PROCESS_BYTES[device_type],
            )
        )
    return tuple(estimates)
