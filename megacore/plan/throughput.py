"""How long a run takes, from the operations of its iterations and an assumed rate."""

from collections.abc import Sequence

from megacore.config.batch_schedule import BatchSchedule
from megacore.config.run import RunConfig
from megacore.config.train import TrainConfig
from megacore.hardware import Hardware
from megacore.observe.flops import PEAK_TFLOPS, TransformerShape, peak_by_name, step_flops
from megacore.pipeline_parallel.partition import ModelChunk, chunks_of

SECONDS_PER_DAY = 86_400.0
UTILISATION = {"cuda": 0.25, "cpu": 0.4}
"""Share of the matrix products' peak that training reaches: an order of magnitude, not a promise.
The published 345M recipe makes 70 of an A100's 312 TFLOP/s."""

_CPU_GFLOPS_FP32 = (("avx512f", 125.0), ("avx2", 60.0))
"""Measured or typical GFLOP/s of one core in fp32 matrix products, by instruction set."""
_CPU_GFLOPS_ANY = 15.0
_CPU_GFLOPS_NATIVE_HALF = 250.0
_CPU_GFLOPS_EMULATED_BF16 = 25.0
_CPU_GFLOPS_EMULATED_FP16 = 1.5
_FP16_FLAGS = frozenset({"avx512_fp16", "amx_fp16"})


def training_flops(config: RunConfig, vocab_size: int) -> int:
    """Operations of the whole run, all ranks and validations (Narayanan et al. 2021)."""
    shape = TransformerShape.of(config, config.model.padded_vocab_size(vocab_size))
    train = config.train
    consumed = BatchSchedule.of(train).consumed_after(train.train_iters)
    layers = recomputed_layers(chunks_of(config, vocab_size), train.recompute_num_layers)
    iterations = step_flops(shape, consumed, train.recompute, *layers)
    samples = config.eval_rounds * train.eval_iters * train.global_batch_size
    return iterations + step_flops(shape, samples, "none") // 3


def recomputed_layers(chunks: Sequence[ModelChunk], limit: int | None) -> tuple[int, int]:
    """Count the layers of the whole model that recompute, those of T5's decoder by themselves.

    Args:
        chunks: of the whole model.
        limit: how many of the first layers of each chunk recompute, None for all.
    """
    encoder, decoder = zip(*(_recomputed(chunk, limit) for chunk in chunks), strict=True)
    return sum(encoder), sum(decoder)


def chunk_flops(
    model: TransformerShape, train: TrainConfig, chunk: ModelChunk, *, forward: bool = False
) -> int:
    """Count the operations of a chunk for one training sample, over its tensor-parallel ranks.

    Args:
        model: shape of the whole model.
        train: what is computed again.
        chunk: which part.
        forward: count the forward pass only.
    """
    shape = model.part(len(chunk.layers), len(chunk.decoder_layers), head=chunk.has_head)
    if forward:
        return step_flops(shape, 1, "none") // 3
    return step_flops(shape, 1, train.recompute, *_recomputed(chunk, train.recompute_num_layers))


def _recomputed(chunk: ModelChunk, limit: int | None) -> tuple[int, int]:
    """Count the layers of a chunk that recompute, of the encoder and T5's decoder.

    They are the first ones of both together.
    """
    encoder, decoder = len(chunk.layers), len(chunk.decoder_layers)
    if limit is None:
        return encoder, decoder
    return min(limit, encoder), min(max(0, limit - encoder), decoder)


def stage_flops(config: RunConfig, vocab_size: int) -> tuple[int, ...]:
    """Operations of each pipeline stage for one training sample, over all its ranks.

    Raises ParallelLayoutError when the layers cannot be divided over the stages.
    """
    stages, chunks = config.parallel.pipeline_model_parallel_size, chunks_of(config, vocab_size)
    model = TransformerShape.of(config, config.model.padded_vocab_size(vocab_size))
    totals = [0] * stages
    for index, chunk in enumerate(chunks):
        totals[index % stages] += chunk_flops(model, config.train, chunk)
    return tuple(totals)


def pipeline_slowdown(stages: Sequence[int], micro_batches: int, chunks: int) -> float:
    """Return how many times longer an iteration takes than its operations alone, at least 1.

    The stage with the most operations sets the pace of all, and filling and draining the pipeline
    leaves a bubble of (pp - 1) / (m v) of the compute time (Narayanan et al. 2021, section 2.2).

    Args:
        stages: operations of each.
        micro_batches: of one step on each replica (m).
        chunks: of each stage (v).
    """
    bubble = (len(stages) - 1) / (micro_batches * chunks)
    return max(stages) * len(stages) / sum(stages) * (1.0 + bubble)


def assumed_flops_per_second(hardware: Hardware, precision: str, ranks: int, threads: int) -> float:
    """FLOP/s that `ranks` of `threads` CPU threads each are assumed to reach here together.

    A GPU that is not in the table of data sheets counts as the slowest one there.
    """
    if not hardware.gpus:
        busy = min(hardware.cores, ranks * threads)
        return UTILISATION["cpu"] * busy * cpu_gflops_per_core(hardware, precision) * 1e9
    slowest = min(rate.fp32 if precision == "fp32" else rate.low for rate in PEAK_TFLOPS.values())
    peaks = [peak_by_name(gpu.name, precision) or slowest for gpu in hardware.gpus[:ranks]]
    return UTILISATION["cuda"] * ranks * min(peaks) * 1e12


def cpu_gflops_per_core(hardware: Hardware, precision: str) -> float:
    """GFLOP/s of one core in matrix products.

    Half precision without instructions for it is emulated.
    """
    if precision == "bf16":
        return _CPU_GFLOPS_NATIVE_HALF if hardware.native_bf16 else _CPU_GFLOPS_EMULATED_BF16
    if precision == "fp16":
        return (
            _CPU_GFLOPS_EMULATED_FP16
            if _FP16_FLAGS.isdisjoint(hardware.cpu_flags)
            else _CPU_GFLOPS_NATIVE_HALF
        )
    return next(
        (rate for flag, rate in _CPU_GFLOPS_FP32 if flag in hardware.cpu_flags), _CPU_GFLOPS_ANY
    )


def training_days(
    config: RunConfig, vocab_size: int, flops_per_second: float, data_parallel_size: int = 1
) -> float:
    """Days of training at a rate that all ranks reach while none waits for another stage."""
    train, chunks = config.train, config.parallel.virtual_pipeline_model_parallel_size
    micro_batches = train.global_batch_size // (train.micro_batch_size * data_parallel_size)
    seconds = training_flops(config, vocab_size) / flops_per_second
    slowdown = pipeline_slowdown(stage_flops(config, vocab_size), micro_batches, chunks)
    return seconds * slowdown / SECONDS_PER_DAY
