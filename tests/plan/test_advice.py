"""Advice on memory: only valid configurations, estimated by the planner, largest saving first."""

import importlib.util
from typing import Any

import pytest

from megacore.config import RunConfig, load_config
from megacore.hardware import Hardware
from megacore.plan.advice import Deployment, memory_advice, pair, parts_of, savings
from megacore.plan.layouts import layout_of
from megacore.plan.memory import GIB, estimate_memory

AMPLE_HOST_MEMORY = 10**15


def deployment(
    ranks: int, device: str = "cuda", precision: str = "bf16", host: int = AMPLE_HOST_MEMORY
) -> Deployment:
    return Deployment(ranks, 50_257, precision, device, host)


def settings(config: RunConfig, target: Deployment) -> dict[str, str]:
    """Return the advised settings by kind, in their order."""
    return {saving.kind: saving.setting for saving in savings(config, target)}


def gpt2(**overrides: Any) -> RunConfig:
    options = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config("gpt2-345m-8gpu", {"train.global_batch_size": 64, **options})


def test_every_kind_is_estimated_and_the_largest_saving_comes_first() -> None:
    config, target = gpt2(), deployment(8)
    advised = savings(config, target)
    assert [saving.bytes for saving in advised] == sorted(
        (saving.bytes for saving in advised), reverse=True
    )
    assert len({saving.kind for saving in advised}) == len(advised)
    assert {"batch", "zero", "offload", "tensor", "pipeline", "sequence"} <= {
        saving.kind for saving in advised
    }
    (batch,) = (saving for saving in advised if saving.kind == "batch")
    halved = gpt2(train__micro_batch_size=4)
    assert batch.setting == "train.micro_batch_size: 8 -> 4"
    assert batch.after == estimate_memory(halved, 50_257, "bf16", "cuda", 8)
    assert batch.bytes == batch.before.total - batch.after.total > 0
    assert (
        str(batch) == f"{batch.setting} (predicted {pair(batch.before.total, batch.after.total)})"
    )


def test_refused_configurations_are_not_advised() -> None:
    single_rank = settings(gpt2(launch__nproc_per_node=1), deployment(1))
    assert {"tensor", "pipeline", "zero", "ranks"}.isdisjoint(single_rank), (
        "one rank divides nothing"
    )
    list_of_layers = gpt2(
        parallel__pipeline_model_parallel_size=2, parallel__pipeline_partition=[12, 12]
    )
    assert "pipeline" not in settings(list_of_layers, deployment(8)), "the list has two entries"
    layers = {"model.num_layers": 3, "launch.nproc_per_node": "auto", "train.global_batch_size": 32}
    three = load_config("gpt2-tiny", layers)
    pipelined = load_config("gpt2-tiny", {**layers, "parallel.pipeline_model_parallel_size": 2})
    assert "pipeline" in settings(three, deployment(4, precision="fp32"))
    assert "pipeline" not in settings(pipelined, deployment(4, precision="fp32")), (
        "four stages of three layers"
    )


def test_every_advised_configuration_can_be_launched() -> None:
    from megacore.plan import advice

    config, target = gpt2(), deployment(8)
    for change in advice._changes(config, target):
        changed = advice._valid(config.model_dump(), change.values)
        if changed is not None and change.kind in settings(config, target):
            layout_of(changed, target.ranks, target.vocab_size)


def test_an_odd_batch_is_lowered_to_a_divisor() -> None:
    odd = gpt2(train__micro_batch_size=9, train__global_batch_size=72)
    assert settings(odd, deployment(8))["batch"] == "train.micro_batch_size: 9 -> 3"


def test_recomputation_of_some_layers_can_be_extended() -> None:
    some = gpt2(train__recompute="full", train__recompute_num_layers=3)
    assert settings(some, deployment(8))["recompute"] == "train.recompute_num_layers: 3 -> null"
    assert "recompute" not in settings(gpt2(train__recompute="full"), deployment(8))
    attention = settings(gpt2(train__recompute="selective"), deployment(8))
    assert attention["recompute"] == "train.recompute: selective -> full"


def test_keys_of_the_users_deepspeed_json_are_named() -> None:
    config = load_config("gpt2-345m-zero2", {"launch.nproc_per_node": 4})
    advice = settings(config, deployment(4))["offload"]
    assert advice.startswith(
        "zero_optimization.stage of deepspeed.config: 2 -> 3, zero_optimization.offload_optimizer."
    )
    assert (
        "zero_optimization.allgather_bucket_size of deepspeed.config: 200000000 -> null" in advice
    )


def test_offloading_needs_a_gpu_and_host_memory() -> None:
    config = load_config(
        "gpt2-xl-zero3-offload",
        {"deepspeed.offload_optimizer": "none", "deepspeed.offload_param": "none"},
    )
    assert "offload" in settings(config, deployment(1, precision="fp16"))
    assert "offload" not in settings(config, deployment(1, precision="fp16", host=GIB))
    assert "offload" not in settings(config, deployment(1, "cpu", "fp32"))


def test_fewer_ranks_are_advised_on_a_cpu() -> None:
    config = load_config("gpt2-tiny", {"launch.nproc_per_node": 2})
    ranks = savings(config, deployment(2, "cpu", "fp32"))[0]
    assert ranks.setting == "launch.nproc_per_node: 2 -> 1"
    assert ranks.bytes == ranks.before.total - ranks.after.total / 2
    assert str(ranks).endswith(" MiB for each of them)")


def test_deepspeed_is_not_advised_if_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    advised = settings(gpt2(), deployment(8))
    assert "offload" not in advised
    assert advised["zero"] == "parallel.data_parallel_sharding: none -> parameters"


def test_memory_advice_has_the_prediction_by_part_and_three_settings() -> None:
    config, target = gpt2(), deployment(8)
    message = memory_advice(config, target, rank=3)
    assert message.startswith(
        f"predicted for rank 3: {parts_of(target.estimate(config))}; what helps most: "
    )
    for part in ("weights ", "gradients ", "optimizer ", "activations ", "logits ", "process "):
        assert part in message
    assert message.count(" (predicted ") == 3
    assert memory_advice(config, target).startswith("predicted for the rank that needs most: ")


def test_the_prediction_is_for_the_pipeline_stage_of_the_rank() -> None:
    config, target = gpt2(parallel__pipeline_model_parallel_size=2), deployment(8)
    first, last = target.estimate(config, 0), target.estimate(config, 7)
    assert first.logits == 0 < last.logits
    assert target.estimate(config) in (first, last)


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (int(61.2 * GIB), int(37.5 * GIB), "61.2 -> 37.5 GiB"),
        (int(8.77 * GIB), int(5.99 * GIB), "8.77 -> 5.99 GiB"),
        (700 * 2**20, 25 * 2**20, "700.0 -> 25.0 MiB"),
    ],
)
def test_both_numbers_of_a_pair_have_the_same_unit(before: int, after: int, text: str) -> None:
    assert pair(before, after) == text


def test_the_memory_limit_is_the_lowest_of_the_control_groups(tmp_path: Any) -> None:
    from megacore.hardware import memory_limit

    (tmp_path / "cgroup").write_text("4:memory:/job/step\n0::/slice/job\n")
    inner = tmp_path / "fs" / "slice" / "job"
    inner.mkdir(parents=True)
    assert memory_limit(tmp_path / "cgroup", tmp_path / "fs") is None
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text("3000\n")
    assert memory_limit(tmp_path / "cgroup", tmp_path / "fs") == 3000
    old = tmp_path / "fs" / "memory" / "job" / "step"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_limit(tmp_path / "cgroup", tmp_path / "fs") == 3000
    (old / "memory.limit_in_bytes").write_text("2000\n")
    assert memory_limit(tmp_path / "cgroup", tmp_path / "fs") == 2000
    assert memory_limit(tmp_path / "none", tmp_path / "fs") is None
    assert Hardware.detect().memory > 0
