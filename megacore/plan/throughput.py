"""How long a run takes, from the operations of its iterations and an assumed rate."""

from megacore.config.run import RunConfig
from megacore.observe.flops import PEAK_TFLOPS, TransformerShape, peak_by_name, step_flops
from megacore.plan.hardware import Hardware
from megacore.plan.memory import padded_vocab_size

SECONDS_PER_DAY = 86_400.0
UTILISATION = {"cuda": 0.25, "cpu": 0.4}
"""Share of the matrix products' peak that training reaches: an order of magnitude, not a promise. The published 345M
recipe makes 70 of an A100's 312 TFLOP/s."""

_CPU_GFLOPS_FP32 = (("avx512f", 125.0), ("avx2", 60.0))
"""Measured or typical GFLOP/s of one core in fp32 matrix products, by instruction set."""
_CPU_GFLOPS_ANY = 15.0
_CPU_GFLOPS_NATIVE_HALF = 250.0
_CPU_GFLOPS_EMULATED_BF16 = 25.0
_CPU_GFLOPS_EMULATED_FP16 = 1.5
_FP16_FLAGS = frozenset({"avx512_fp16", "amx_fp16"})


def training_flops(config: RunConfig, vocab_size: int) -> int:
    """Operations of the whole run, over all ranks: iterations and validations (Narayanan et al. 2021)."""
    shape = TransformerShape.of(config, padded_vocab_size(config, vocab_size))
    train = config.train
    iterations = train.train_iters * step_flops(shape, train.global_batch_size, train.recompute)
    samples = config.eval_rounds * train.eval_iters * train.global_batch_size
    return iterations + step_flops(shape, samples, "none") // 3


def assumed_flops_per_second(hardware: Hardware, precision: str, ranks: int, threads: int) -> float:
    """FLOP/s that `ranks` of `threads` CPU threads each are assumed to reach together on this machine.

    A GPU that is not in the table of data sheets counts as the slowest one there.
    """
    if not hardware.gpus:
        busy = min(hardware.cores, ranks * threads)
        return UTILISATION["cpu"] * busy * cpu_gflops_per_core(hardware, precision) * 1e9
    slowest = min(rate.fp32 if precision == "fp32" else rate.low for rate in PEAK_TFLOPS.values())
    peaks = [peak_by_name(gpu.name, precision) or slowest for gpu in hardware.gpus[:ranks]]
    return UTILISATION["cuda"] * ranks * min(peaks) * 1e12


def cpu_gflops_per_core(hardware: Hardware, precision: str) -> float:
    """GFLOP/s of one core in matrix products; half precision without instructions for it is emulated."""
    if precision == "bf16":
        return _CPU_GFLOPS_NATIVE_HALF if hardware.native_bf16 else _CPU_GFLOPS_EMULATED_BF16
    if precision == "fp16":
        return _CPU_GFLOPS_EMULATED_FP16 if _FP16_FLAGS.isdisjoint(hardware.cpu_flags) else _CPU_GFLOPS_NATIVE_HALF
    return next((rate for flag, rate in _CPU_GFLOPS_FP32 if flag in hardware.cpu_flags), _CPU_GFLOPS_ANY)


def training_days(config: RunConfig, vocab_size: int, flops_per_second: float) -> float:
    """Days of training at a rate of all ranks together."""
    return training_flops(config, vocab_size) / flops_per_second / SECONDS_PER_DAY
