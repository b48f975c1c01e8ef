"""Estimates of a run's duration from its operations and an assumed rate."""

from collections.abc import Sequence

from megacore.config.batch_schedule import BatchSchedule
from megacore.config.run import RunConfig
from megacore.config.train import TrainConfig
from megacore.hardware import Hardware
from megacore.observe.flops import PEAK_TFLOPS, TransformerShape, peak_by_name, step_flops
from megacore.pipeline_parallel.partition import ModelChunk, chunks_of

SECONDS_PER_DAY = 86_400.0
UTILISATION = {"cuda": 0.25, "cpu": 0.4}
"""Fraction of the peak rate of matrix products that training is assumed to reach. It is an order of
magnitude, not a promise: the published 345M recipe reaches 70 of an A100's 312 TFLOP/s."""

_CPU_GFLOPS_FP32 = (("avx512f", 125.0), ("avx2", 60.0))
"""Measured or typical GFLOP/s of one core in fp32 matrix products, by instruction set."""
_CPU_GFLOPS_ANY = 15.0
_CPU_GFLOPS_NATIVE_HALF = 250.0
_CPU_GFLOPS_EMULATED_BF16 = 25.0
_CPU_GFLOPS_EMULATED_FP16 = 1.5
_FP16_FLAGS = frozenset({"avx512_fp16", "amx_fp16"})


def training_flops(config: RunConfig, vocab_size: int) -> int:
    """Return the operations of the run over all ranks (Narayanan et al. 2021).

    Includes validations, and the perplexity of each checkpoint over `evaluate.max_samples` samples.
    """
    shape = TransformerShape.of(config, config.model.padded_vocab_size(vocab_size))
    train = config.train
    consumed = BatchSchedule.of(train).consumed_after(train.train_iters)
    layers = recomputed_layers(chunks_of(config, vocab_size), train.recompute_num_layers)
    iterations = step_flops(shape, consumed, train.recompute, *layers)
    samples = config.eval_rounds * train.eval_iters * train.global_batch_size
    samples += config.checkpoint_rounds * (config.evaluate.max_samples or 0)
    return iterations + step_flops(shape, samples, "none") // 3


def recomputed_layers(chunks: Sequence[ModelChunk], limit: int | None) -> tuple[int, int]:
    """Return the number of recomputed layers of the model, with T5's decoder separately.

    Args:
        chunks: chunks of the whole model.
        limit: number of layers at the start of each chunk that recompute; None for all.
    """
    encoder, decoder = zip(*(_recomputed(chunk, limit) for chunk in chunks), strict=True)
    return sum(encoder), sum(decoder)


def chunk_flops(
    model: TransformerShape, train: TrainConfig, chunk: ModelChunk, *, forward: bool = False
) -> int:
    """Return the operations of a chunk for one training sample, over its tensor-parallel ranks.

    Args:
        model: shape of the whole model.
        train: training options, which select the recomputation.
        chunk: chunk to count.
        forward: True to count only the forward pass.
    """
    shape = model.part(len(chunk.layers), len(chunk.decoder_layers), head=chunk.has_head)
    if forward:
        return step_flops(shape, 1, "none") // 3
    return step_flops(shape, 1, train.recompute, *_recomputed(chunk, train.recompute_num_layers))


def _recomputed(chunk: ModelChunk, limit: int | None) -> tuple[int, int]:
    """Return the number of a chunk's recomputed layers, in the encoder and in T5's decoder.

    The first layers of the chunk recompute, those of the encoder before those of the decoder.
    """
    encoder, decoder = len(chunk.layers), len(chunk.decoder_layers)
    if limit is None:
        return encoder, decoder
    return min(limit, encoder), min(max(0, limit - encoder), decoder)


def stage_flops(config: RunConfig, vocab_size: int) -> tuple[int, ...]:
    """Return the operations of each pipeline stage for one training sample, over all its ranks.

    Raises ParallelLayoutError if the layers cannot be divided over the stages.
    """
    stages, chunks = config.parallel.pipeline_model_parallel_size, chunks_of(config, vocab_size)
    model = TransformerShape.of(config, config.model.padded_vocab_size(vocab_size))
    totals = [0] * stages
    for index, chunk in enumerate(chunks):
        totals[index % stages] += chunk_flops(model, config.train, chunk)
    return tuple(totals)


def pipeline_slowdown(stages: Sequence[int], micro_batches: int, chunks: int) -> float:
    """Return the ratio of an iteration's duration to the time of its operations, at least 1.

    The pipeline stage with the most operations determines the pace, and filling and draining the
    pipeline adds a bubble of (pp - 1) / (m v) of the compute time (Narayanan et al. 2021, section
    2.2).

    Args:
        stages: operations of each pipeline stage.
        micro_batches: number of micro batches of one step on each replica (m).
        chunks: number of chunks of each stage (v).
    """
    bubble = (len(stages) - 1) / (micro_batches * chunks)
    return max(stages) * len(stages) / sum(stages) * (1.0 + bubble)


def assumed_flops_per_second(hardware: Hardware, precision: str, ranks: int, threads: int) -> float:
    """Return the FLOP/s that `ranks` ranks of `threads` CPU threads each are assumed to reach.

    A GPU that is not in the table of data sheets counts as the slowest one in the table.
    """
    if not hardware.gpus:
        busy = min(hardware.cores, ranks * threads)
        return UTILISATION["cpu"] * busy * cpu_gflops_per_core(hardware, precision) * 1e9
    slowest = min(rate.fp32 if precision == "fp32" else rate.low for rate in PEAK_TFLOPS.values())
    peaks = [
        peak_by_name(gpu.name, precision, gpu.multiprocessors) or slowest
        for gpu in hardware.gpus[:ranks]
    ]
    return UTILISATION["cuda"] * ranks * min(peaks) * 1e12


def cpu_gflops_per_core(hardware: Hardware, precision: str) -> float:
    """Return the GFLOP/s of one core in matrix products.

    Half precision is emulated on CPUs without instructions for it.
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
    """Return the days of training at the rate of all ranks without waiting for other stages."""
    train, chunks = config.train, config.parallel.virtual_pipeline_model_parallel_size
    micro_batches = train.global_batch_size // (train.micro_batch_size * data_parallel_size)
    seconds = training_flops(config, vocab_size) / flops_per_second
    slowdown = pipeline_slowdown(stage_flops(config, vocab_size), micro_batches, chunks)
    return seconds * slowdown / SECONDS_PER_DAY
