import pytest

from megacore.config import load_config
from megacore.plan.hardware import Gpu, Hardware
from megacore.plan.throughput import assumed_flops_per_second, training_days, training_flops

GIB = 2**30
A100 = Gpu("NVIDIA A100-SXM4-40GB", 40 * GIB)


def test_flops_are_narayanans_formula_with_recomputation() -> None:
    config = load_config("gpt2-345m", {"train.eval_interval": 500_001, "train.eval_iters": 1})
    batch, s, layers, h, v = 8, 1024, 24, 1024, 50_304
    iteration = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert training_flops(config, 50_257) == pytest.approx(500_000 * iteration, rel=1e-5)


def test_validations_count_as_forward_passes() -> None:
    few = load_config("gpt2-tiny", {"train.train_iters": 100, "train.eval_interval": 100, "train.eval_iters": 30})
    none = load_config("gpt2-tiny", {"train.train_iters": 100, "train.eval_interval": 101, "train.eval_iters": 1})
    forward_passes = few.eval_rounds * 30 - none.eval_rounds
    per_iteration = training_flops(none, 8192) / (100 + none.eval_rounds / 3)
    difference = training_flops(few, 8192) - training_flops(none, 8192)
    assert difference == pytest.approx(forward_passes * per_iteration / 3)


def test_the_published_run_takes_about_two_days_on_eight_a100() -> None:
    config = load_config("gpt2-345m-8gpu")
    rate = assumed_flops_per_second(Hardware(64, 512 * GIB, (A100,) * 8), "fp16", 8, 8)
    assert training_days(config, 50_257, rate) == pytest.approx(500_000 * 0.368 / 86_400, rel=0.3)


def test_cpu_rate_counts_busy_cores_and_instruction_sets() -> None:
    avx2 = Hardware(8, GIB, cpu_flags=frozenset({"avx2"}))
    avx512 = Hardware(8, GIB, cpu_flags=frozenset({"avx2", "avx512f"}))
    assert assumed_flops_per_second(avx512, "fp32", 2, 4) > assumed_flops_per_second(avx2, "fp32", 2, 4)
    assert assumed_flops_per_second(avx2, "fp32", 8, 4) == assumed_flops_per_second(avx2, "fp32", 8, 1)
    assert assumed_flops_per_second(avx2, "fp32", 2, 1) == assumed_flops_per_second(avx2, "fp32", 8, 1) / 4
    assert assumed_flops_per_second(avx2, "fp16", 2, 4) < assumed_flops_per_second(avx2, "fp32", 2, 4) / 10


def test_an_unknown_gpu_counts_as_the_slowest_known() -> None:
    unknown = Hardware(8, GIB, (Gpu("Frobnicator 9000", GIB),))
    assert (
        0
        < assumed_flops_per_second(unknown, "bf16", 1, 8)
        <= assumed_flops_per_second(Hardware(8, GIB, (A100,)), "bf16", 1, 8)
    )
