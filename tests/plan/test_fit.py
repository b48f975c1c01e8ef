"""What does not fit is refused with what would make it fit."""

from collections import namedtuple
from pathlib import Path

import pytest

from megacore.config import RunConfig, load_config
from megacore.errors import ConfigError
from megacore.plan.fit import Room, check_memory
from megacore.plan.memory import GIB, MemoryEstimate, estimate_memory

VOCAB_SIZE = 50_257
XL = {"engine": "deepspeed", "launch.nproc_per_node": 4, "train.global_batch_size": 64}
"""1.56 B parameters: 23.2 GiB of main weights, moments and gradients, 2.9 GiB of fp16 weights."""

BF16 = {"train.precision": "bf16"}
"""Which DeepSpeed has without ZeRO, unlike fp16."""


def conf(name: str = "gpt2-xl-zero3-offload", **overrides: object) -> RunConfig:
    """GPT-2 XL on 4 GPUs without offload, or another configuration; keys of the section deepspeed are plain."""
    base = {**XL, "deepspeed.offload_optimizer": "none", "deepspeed.offload_param": "none"} if "xl" in name else {}
    given = {key if "." in key or key == "engine" else f"deepspeed.{key}": value for key, value in overrides.items()}
    return load_config(name, base | given)


def refusal(config: RunConfig, device: float, host: float = 1000.0, **room: object) -> str:
    """What is said where a rank has this many GiB."""
    values: dict[str, object] = {"device_type": "cuda", "ranks": 4, "replicas": 4} | room
    there = Room(int(device * GIB), int(host * GIB), **values)  # type: ignore[arg-type]

    def estimate(changed: RunConfig) -> MemoryEstimate:
        return estimate_memory(changed, VOCAB_SIZE, changed.train.precision, there.device_type, there.replicas)

    with pytest.raises(ConfigError) as caught:
        check_memory(config, estimate(config), there, estimate)
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "device", "advice"),
    [
        # The least that suffices.
        ({"zero_stage": 0, **BF16}, 25, "set deepspeed.zero_stage to 1"),
        ({"zero_stage": 1}, 18, "set deepspeed.zero_stage to 2"),
        ({"zero_stage": 1}, 14.7, "set deepspeed.zero_stage to 3"),
        ({"zero_stage": 1}, 9, "set deepspeed.zero_stage to 3 and deepspeed.offload_optimizer to cpu"),
        (
            {"zero_stage": 2},
            8.5,
            "set deepspeed.zero_stage to 3 and deepspeed.offload_optimizer and deepspeed.offload_param to cpu",
        ),
        ({"zero_stage": 3, "offload_optimizer": "cpu"}, 8.5, "set deepspeed.offload_param to cpu"),
        # Nothing suffices: the most that there is.
        ({"zero_stage": 3}, 2, "set deepspeed.offload_optimizer and deepspeed.offload_param to cpu"),
        ({"zero_stage": 3, "offload_optimizer": "cpu"}, 2, "set deepspeed.offload_param to cpu"),
    ],
)
def test_a_stage_or_an_offload_that_suffices_is_named(given: dict[str, object], device: float, advice: str) -> None:
    message = refusal(conf(**given), device)
    assert message.startswith("gpt2-xl-zero3-offload needs about ")
    assert f" and this machine has {device:.1f} GiB per rank: lower train.micro_batch_size (16), or " in message
    assert f", or {advice}, or raise parallel.tensor_model_parallel_size (1) or" in message


def test_what_is_used_up_is_not_named() -> None:
    message = refusal(conf(zero_stage=3, offload_optimizer="cpu", offload_param="cpu"), 2)
    assert "deepspeed." not in message
    assert "zero_stage" not in refusal(conf(zero_stage=3), 2, replicas=1)


def test_the_native_engine_is_told_of_its_own_first() -> None:
    own = "set parallel.use_distributed_optimizer to true, or"
    assert refusal(conf(engine="native"), 13).count(own) == 1
    assert "or set engine to deepspeed, deepspeed.zero_stage to 3, or raise" in refusal(conf(engine="native"), 14.7)
    sharded = refusal(conf(engine="native", **{"parallel.use_distributed_optimizer": True}), 18)
    assert own not in sharded
    assert "or set engine to deepspeed, deepspeed.zero_stage to 2, or raise" in sharded
    assert "deepspeed" not in refusal(conf(engine="native"), 1)  # it would not fit either


def test_stages_of_a_pipeline_divide_the_optimizer_alone() -> None:
    pipeline = {"parallel.pipeline_model_parallel_size": 2, "train.micro_batch_size": 8}
    message = refusal(conf(zero_stage=0, **BF16, **pipeline), 5, replicas=2)
    assert "set deepspeed.zero_stage to 1 and deepspeed.offload_optimizer to cpu" in message


def test_on_a_cpu_nothing_is_offloaded() -> None:
    message = refusal(conf(zero_stage=1), 12, device_type="cpu")
    assert "or set deepspeed.zero_stage to 3, or lower launch.nproc_per_node (4)" in message
    assert "offload" not in message.removeprefix("gpt2-xl-zero3-offload")


def test_a_file_of_deepspeeds_own_is_named() -> None:
    assert "or raise zero_optimization.stage of deepspeed.config (2), or offload more there" in refusal(
        conf("gpt2-345m-zero2"), 2
    )


def test_main_memory_is_checked_by_itself() -> None:
    config = conf(zero_stage=3, offload_optimizer="cpu", offload_param="cpu")
    assert refusal(config, 40, 7.5) == (
        "gpt2-xl-zero3-offload offloads about 8.0 GiB per rank to main memory and this machine has 7.5 GiB of it per "
        "rank: lower launch.nproc_per_node (4), or set deepspeed.offload_param to none, or set "
        "deepspeed.offload_optimizer to none, or offload less or to nvme (deepspeed.offload_*)"
    )
    alone = refusal(config, 24, 20, ranks=1, replicas=1)
    assert "offloads about 31.9 GiB per rank to main memory and this machine has 20.0 GiB" in alone
    assert "launch.nproc_per_node" not in alone


def test_the_disk_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = conf(zero_stage=3, offload_optimizer="nvme", nvme_path=str(tmp_path / "nvme"))
    assert refusal(missing, 40).endswith(f"its path {tmp_path}/nvme is no directory: make it")
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(17 * GIB))
    small = conf(zero_stage=3, offload_optimizer="nvme", nvme_path=str(tmp_path))
    assert refusal(small, 40) == (
        f"gpt2-xl-zero3-offload offloads about 4.4 GiB per rank to {tmp_path}, 17.4 GiB of 4 ranks, and 17.0 GiB are "
        "free there: give another path, or offload less"
    )
