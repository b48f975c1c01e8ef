"""Estimates of the memory that a rank needs for training: state, activations and buffers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megacore.config.deepspeed import ZeroSettings, zero_of
from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec
from megacore.data_parallel.sharding import Sharding
from megacore.models.parameters import chunk_matrices, chunk_sizes, layer_sizes
from megacore.pipeline_parallel.partition import ModelChunk, chunks_of
from megacore.plan.activations import Activations
from megacore.plan.zero import (
    ELEMENT_BYTES,
    Buffers,
    DeepSpeedMemory,
    ModelState,
    native_buffers,
    zero_bytes,
)

GIB = 2**30
_OWNERS_COPIES = (0, 8, 14)
"""Quarters of a rank's share of Muon's matrices in buffers at once, for the number of groups that
share them: in each of four overlapping rounds, sent, received and processed ones."""
_PROCESS_BYTES = {"cpu": 350 * 2**20, "cuda": 600 * 2**20}
"""Resident memory of the interpreter with torch (measured), or size of a CUDA context with its
libraries."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated bytes of a rank by purpose.

    They are on the device that computes, except for `host` and `nvme`.
    """

    parameters: int
    """Number of the rank's parameters before ZeRO divides them over the replicas, which determines
    the next three fields."""
    weights: int
    """Weights that the model computes with, and in bf16 or fp16 the fp32 main weights."""
    gradients: int
    """Gradients that accumulate over micro batches."""
    optimizer: int
    """Adam's two moments in fp32, or Muon's momentum."""
    activations: int
    """Activations stored for the backward passes, of all micro batches in flight."""
    logits: int
    """Logits of the output layer and their gradient, on ranks that have the layer."""
    passes: int
    """Peak of activations, logits and, on a GPU, messages and temporary tensors during forward and
    backward passes, see `Activations.peak`. CUDA graphs keep this
    memory, so that a validation needs more."""
    process: int
    """Interpreter and libraries, or the CUDA context."""
    buffers: int
    """Gradient buckets in addition to divided gradients, and the weights that ZeRO stage 3 gathers
    or does not divide. Those of the native engine on a GPU are in `passes`."""
    step: int
    """Buffers of DeepSpeed, or of Muon's owners, for the optimizer step, when the activations are
    freed."""
    host: int
    """Offloaded state and its buffers in host memory, when a GPU computes."""
    nvme: int
    """Offloaded state on disk."""

    @property
    def total(self) -> int:
        """Peak bytes on the device."""
        state = self.weights + self.gradients + self.optimizer + self.buffers + self.process
        return state + max(self.passes, self.step)


def estimate_memory(
    config: RunConfig,
    vocab_size: int,
    precision: str,
    device_type: str,
    data_parallel_size: int = 1,
) -> MemoryEstimate:
    """Return the peak memory of a rank on the pipeline stage that needs most.

    The arguments are those of `estimate_stages`.
    """
    stages = estimate_stages(config, vocab_size, precision, device_type, data_parallel_size)
    return max(stages, key=lambda stage: stage.total)


def estimate_stages(
    config: RunConfig,
    vocab_size: int,
    precision: str,
    device_type: str,
    data_parallel_size: int = 1,
) -> tuple[MemoryEstimate, ...]:
    """Return the peak memory of one rank of each pipeline stage.

    A CPU has only one memory: state offloaded to the CPU stays there and counts as device memory.

    Args:
        config: configuration of the run.
        vocab_size: entries of the vocabulary before padding.
        precision: data type of the computation: fp32, bf16 or fp16.
        device_type: cpu or cuda.
        data_parallel_size: number of replicas, over which the batch is divided and, by ZeRO, state.

    Raises:
        ParallelLayoutError: layers or micro batches cannot be divided over the pipeline stages.
    """
    parallel, train = config.parallel, config.train
    stages, tensor = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    chunks, element = chunks_of(config, vocab_size), ELEMENT_BYTES[precision]
    spec, zero = ModelSpec.of(config, vocab_size), zero_of(config)
    deepspeed = None
    if config.engine == "deepspeed":
        from megacore.engine.deepspeed.settings import deepspeed_settings

        settings = deepspeed_settings(  # the sizes do not depend on the device
            config, precision=precision, device_type="cuda", data_parallel_size=data_parallel_size
        )
        deepspeed = DeepSpeedMemory(settings, precision)
    storage = Activations(config, element, device_type)
    micro_batches = train.global_batch_size // (train.micro_batch_size * data_parallel_size)
    copies = data_parallel_size * parallel.context_parallel_size
    estimates = []
    for stage in range(stages):
        stage_chunks = chunks[stage::stages]
        sizes = [size for chunk in stage_chunks for size in chunk_sizes(spec, chunk, tensor)]
        matrices = muon_elements(config, stage_chunks)
        state = zero_bytes(
            sum(sizes),
            zero.stage,
            copies,
            precision,
            gradient_bytes=deepspeed.gradient_bytes if deepspeed else 4,
            main_weights=deepspeed.main_weights if deepspeed else None,
            offload_optimizer=zero.offload_optimizer,
            offload_param=zero.offload_param,
            single_moment=matrices,
        )
        extra = (
            deepspeed.buffers(sizes, data_parallel_size)
            if deepspeed
            else _native_buffers(config, spec, stage_chunks, sizes, element, copies)
        )
        activations, losses = storage.stored(stage_chunks, stage, micro_batches)
        offloaded = storage.offloaded(stage_chunks, stage, micro_batches)
        # of one micro batch; the gradient overwrites the logits
        logits = storage.predictions * spec.padded_vocab_size // tensor * element
        passes = activations + losses * logits
        if device_type == "cuda":
            temporary = (0, 0) if deepspeed else (extra.gathered, extra.device)
            passes = storage.peak(stage_chunks, stage, micro_batches, logits, temporary)
        if train.cuda_graphs:
            passes += storage.evaluation(logits)
        on_device, host = state.device, state.cpu.total + extra.cpu + offloaded
        # Those of the native engine on a GPU are in `passes`.
        buffers = 0 if device_type == "cuda" and deepspeed is None else extra.device
        if device_type == "cpu":  # its only memory has the offloaded state, too
            on_device = ModelState(*map(sum, zip(on_device, state.cpu, strict=True)))
            activations, passes = activations + offloaded, passes + offloaded
            buffers, host = buffers + extra.cpu, 0
        estimates.append(
            MemoryEstimate(
                parameters=sum(sizes),
                weights=on_device.parameters + on_device.main_weights,
                gradients=on_device.gradients,
                optimizer=on_device.moments,
                activations=activations,
                logits=losses * logits,
                passes=passes,
                process=_PROCESS_BYTES[device_type],
                buffers=buffers,
                step=extra.step
                + _owners_bytes(matrices, precision, copies if zero.stage else 1, tensor),
                host=host,
                nvme=state.nvme.total,
            )
        )
    return tuple(estimates)


def _native_buffers(
    config: RunConfig,
    spec: ModelSpec,
    chunks: Sequence[ModelChunk],
    sizes: Sequence[int],
    element: int,
    copies: int,
) -> Buffers:
    """Return the buffers of divided gradients and weights of a rank with these parameters."""
    parallel = config.parallel
    layers = {
        decoder: layer_sizes(spec.model, parallel.tensor_model_parallel_size, decoder=decoder)
        for decoder in (False, True)
        if any(chunk.decoder_layers if decoder else chunk.layers for chunk in chunks)
    }
    counts = Counter(sizes)
    for chunk in chunks:
        for size in layers.get(False, ()):
            counts[size] -= len(chunk.layers)
        for size in layers.get(True, ()):
            counts[size] -= len(chunk.decoder_layers)
    model = spec.model
    if spec.family == "gpt" and model.untie_embeddings_and_output_weights:
        # freed after its forward pass, as a unit
        table = spec.padded_vocab_size // parallel.tensor_model_parallel_size * model.hidden_size
        counts[table] -= 1
    return native_buffers(
        Sharding.of(parallel.data_parallel_sharding, copies),
        tuple(layers.values()),
        tuple(counts.elements()),
        element,
        parallel.grad_reduce_bucket_mb,
    )


def muon_elements(config: RunConfig, chunks: Sequence[ModelChunk]) -> int:
    """Return the number of a rank's parameters in chunks that Muon updates; 0 with AdamW."""
    if config.optim.name != "muon":
        return 0
    matrices = [shape for chunk in chunks for shape in chunk_matrices(config.model, chunk)]
    whole = sum(rows * columns for rows, columns in matrices)
    return whole // config.parallel.tensor_model_parallel_size


def whole_muon_elements(config: RunConfig, vocab_size: int) -> int:
    """Return the number of the whole model's parameters that Muon updates; 0 with AdamW."""
    tensor = config.parallel.tensor_model_parallel_size
    return tensor * muon_elements(config, chunks_of(config, vocab_size))


def _owners_bytes(matrices: int, precision: str, replicas: int, tensor: int) -> int:
    """Return the bytes of Muon's matrices on their way to owners and back.

    `matrices` are the elements of a rank's matrices, which replicas and tensor-parallel ranks
    share.
    """
    hops = (replicas > 1) + (tensor > 1)
    return ELEMENT_BYTES[precision] * _OWNERS_COPIES[hops] * -(-matrices // replicas) // 4


def engine_name(engine: str, zero: ZeroSettings) -> str:
    """Return a readable name such as `deepspeed ZeRO-3, optimizer on cpu, weights on nvme`."""
    if engine == "native":
        return engine
    places = {"optimizer": zero.offload_optimizer, "weights": zero.offload_param}
    moved = "".join(f", {what} on {where}" for what, where in places.items() if where != "none")
    return f"{engine} ZeRO-{zero.stage}{moved}"
