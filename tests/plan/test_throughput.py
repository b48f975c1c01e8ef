import pytest

from megacore.config import RunConfig, load_config
from megacore.hardware import Gpu, Hardware
from megacore.parallel.rank_layout import RankLayout
from megacore.pipeline_parallel.partition import chunks_of
from megacore.plan.throughput import (
    RunTime,
    planned_iteration,
    predict_run,
    recomputed_layers,
    training_flops,
)

GIB = 2**30
A100 = Gpu("NVIDIA A100-SXM4-40GB", 40 * GIB)


def test_flops_with_recomputation_equal_narayanans_formula() -> None:
    without_validation = {
        "train.eval_interval": 500_001,
        "train.eval_iters": 1,
        "evaluate.max_samples": 1,
    }
    config = load_config("gpt2-345m", without_validation)
    batch, s, layers, h, v = 8, 1024, 24, 1024, 50_304
    iteration = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert training_flops(config, 50_257) == pytest.approx(500_000 * iteration, rel=1e-5)


def test_validations_count_as_forward_passes() -> None:
    common = {"train.train_iters": 100, "evaluate.max_samples": None}
    few = load_config("gpt2-tiny", common | {"train.eval_interval": 100, "train.eval_iters": 30})
    none = load_config("gpt2-tiny", common | {"train.eval_interval": 101, "train.eval_iters": 1})
    forward_passes = few.eval_rounds * 30 - none.eval_rounds
    per_iteration = training_flops(none, 8192) / (100 + none.eval_rounds / 3)
    checkpoints = training_flops(
        load_config("gpt2-tiny", {"train.train_iters": 100, "evaluate.max_samples": 32}), 8192
    ) - training_flops(load_config("gpt2-tiny", common), 8192)
    batches = 32 * few.checkpoint_rounds / few.train.global_batch_size
    assert checkpoints == pytest.approx(batches * per_iteration / 3)
    difference = training_flops(few, 8192) - training_flops(none, 8192)
    assert difference == pytest.approx(forward_passes * per_iteration / 3)


@pytest.mark.parametrize(("iterations", "rounds"), [(100, 2), (101, 3), (49, 1)])
def test_the_last_iteration_is_evaluated_and_saved_once(iterations: int, rounds: int) -> None:
    names = ("train.eval_interval", "checkpoint.save_interval")
    config = load_config("gpt2-tiny", dict.fromkeys(names, 50) | {"train.train_iters": iterations})
    assert (config.eval_rounds, config.checkpoint_rounds) == (rounds, rounds)


def tiny(**overrides: object) -> RunConfig:
    return load_config(
        "gpt2-tiny", {key.replace("__", "."): value for key, value in overrides.items()}
    )


def test_a_ramp_up_needs_fewer_flops() -> None:
    rampup = {"start": 8, "increment": 8, "samples": 160}
    settings = {"train__micro_batch_size": 4, "train__train_iters": 50, "train__eval_interval": 99}
    constant, ramp = tiny(**settings), tiny(**settings, train__rampup_batch_size=rampup)
    per_sample = (
        training_flops(tiny(**settings | {"train__train_iters": 51}), 8192)
        - training_flops(constant, 8192)
    ) / 16
    assert training_flops(constant, 8192) - training_flops(ramp, 8192) == pytest.approx(
        20 * 8 * per_sample
    )


def pipelined(pp: int, v: int = 1, **overrides: object) -> RunConfig:
    sizes = {"pipeline_model_parallel_size": pp, "virtual_pipeline_model_parallel_size": v}
    parallel = {f"parallel__{name}": size for name, size in sizes.items()}
    model = {"model__num_layers": 8, "train__global_batch_size": 64, "train__micro_batch_size": 2}
    return tiny(**model, **parallel, launch__nproc_per_node="auto", **overrides)


def recomputed(config: RunConfig) -> tuple[int, int]:
    return recomputed_layers(chunks_of(config, 8192), config.train.recompute_num_layers)


def test_the_recomputation_limit_applies_to_each_chunk() -> None:
    some = {"train__recompute": "full", "train__recompute_num_layers": 2}
    assert recomputed(pipelined(1, **some)) == (2, 0)
    assert recomputed(pipelined(4, **some, parallel__pipeline_partition="uniform")) == (8, 0)
    assert recomputed(pipelined(2, 2, **some, parallel__pipeline_partition=[3, 3, 1, 1])) == (6, 0)
    assert recomputed(pipelined(2, train__recompute="full")) == (8, 0)


def predicted(config: RunConfig, hardware: Hardware, ranks: int, threads: int = 1) -> RunTime:
    return predict_run(planned_iteration(config, 8192, hardware, RankLayout(data=ranks), threads))


def test_a_run_lasts_as_its_iterations_and_validations() -> None:
    settings = {"train__train_iters": 100, "train__eval_interval": 101, "train__eval_iters": 1}
    config = tiny(**settings, evaluate__max_samples=1)
    time = predicted(config, Hardware(2, GIB), 1)
    assert time.seconds == pytest.approx(100 * time.iteration.seconds, rel=0.02)
    longer = tiny(**settings | {"train__eval_iters": 60}, evaluate__max_samples=1)
    assert predicted(longer, Hardware(2, GIB), 1).seconds > 1.1 * time.seconds


def test_the_cpu_rate_depends_on_busy_cores_and_instruction_sets() -> None:
    avx2 = Hardware(8, GIB, cpu_flags=frozenset({"avx2"}))
    avx512 = Hardware(8, GIB, cpu_flags=frozenset({"avx2", "avx512f"}))
    config = tiny(train__precision="fp32", train__micro_batch_size=1)

    def compute(hardware: Hardware, ranks: int, threads: int) -> float:
        return predicted(config, hardware, ranks, threads).iteration.compute

    assert compute(avx512, 2, 4) < compute(avx2, 2, 4)
    assert compute(avx2, 8, 4) == compute(avx2, 8, 1)
    assert compute(avx2, 2, 1) > compute(avx2, 2, 4)
    half = tiny(train__precision="fp16", train__micro_batch_size=1)
    slow = predicted(half, avx2, 2, 4).iteration.compute
    assert slow > 8 * compute(avx2, 2, 4)


def test_an_unknown_gpu_counts_as_the_slowest_known() -> None:
    unknown = Hardware(8, GIB, (Gpu("Frobnicator 9000", GIB),))
    known = Hardware(8, GIB, (A100,))
    slow, fast = (predicted(tiny(), hardware, 1) for hardware in (unknown, known))
    assert slow.hardware == "Frobnicator 9000"
    assert slow.seconds > fast.seconds > 0


def test_more_ranks_than_cores_share_them() -> None:
    config = tiny(train__micro_batch_size=1, train__precision="fp32")
    two, four = (predicted(config, Hardware(2, GIB), ranks) for ranks in (2, 4))
    assert four.iteration.seconds > 0.9 * two.iteration.seconds


def test_ranks_of_two_hosts_communicate_over_the_network() -> None:
    hardware = Hardware(8, GIB, (A100,) * 4)
    config = tiny(train__micro_batch_size=1)
    layout = RankLayout(data=4)

    def data(ranks_per_host: int) -> float:
        run = predict_run(
            planned_iteration(config, 8192, hardware, layout, 1, ranks_per_host=ranks_per_host)
        )
        return run.iteration.data + run.iteration.other

    assert data(2) > data(4)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(91.0, "1.5 minutes"), (5_400.0, "1.5 hours"), (86_400 * 98.8, "98.8 days")],
)
def test_a_duration_has_a_unit_of_its_size(seconds: float, expected: str) -> None:
    iteration = predicted(tiny(), Hardware(2, GIB), 1).iteration
    assert RunTime(iteration, "CPU core", seconds).duration == expected
