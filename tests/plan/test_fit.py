"""Refusal of runs that do not fit, with the settings that would make them fit."""

from collections import namedtuple
from pathlib import Path

import pytest

from megacore.config import RunConfig, load_config
from megacore.errors import ConfigError
from megacore.plan.advice import Deployment
from megacore.plan.memory import GIB
from megacore.plan.preflight import Room, check_memory

VOCAB_SIZE = 50_257
XL = {"engine": "deepspeed", "launch.nproc_per_node": 4, "train.global_batch_size": 64}
"""1.56 B parameters: 23.2 GiB of main weights, moments and gradients, 2.9 GiB of fp16 weights."""

BF16 = {"train.precision": "bf16"}
"""Precision that DeepSpeed supports without ZeRO, unlike fp16."""


def conf(name: str = "gpt2-xl-zero3-offload", **overrides: object) -> RunConfig:
    """Return GPT-2 XL on 4 GPUs without offload, or another configuration.

    Keys without a dot belong to the section deepspeed.
    """
    base = (
        {**XL, "deepspeed.offload_optimizer": "none", "deepspeed.offload_param": "none"}
        if "xl" in name
        else {}
    )
    options = {
        key if "." in key or key == "engine" else f"deepspeed.{key}": value
        for key, value in overrides.items()
    }
    return load_config(name, base | options)


def refusal(
    config: RunConfig,
    device: float,
    host: float = 1000.0,
    device_type: str = "cuda",
    ranks: int = 4,
) -> str:
    """Return the message for ranks with this many GiB of device and host memory."""
    deployment = Deployment(ranks, VOCAB_SIZE, config.train.precision, device_type, int(host * GIB))
    room = Room(int(device * GIB), int(host * GIB), ranks)
    with pytest.raises(ConfigError) as caught:
        check_memory(config, deployment.estimate(config), room, deployment)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "device", "advice"),
    [
        # the smallest sufficient change of each kind
        (
            {"zero_stage": 0, **BF16},
            25,
            "deepspeed.zero_stage: 0 -> 1 (predicted 31.5 -> 21.9 GiB)",
        ),
        ({"zero_stage": 1}, 18, "deepspeed.zero_stage: 1 -> 2 (predicted 19.0 -> 14.6 GiB)"),
        ({"zero_stage": 1}, 14.5, "deepspeed.zero_stage: 1 -> 3 (predicted 19.0 -> 14.3 GiB)"),
        (
            {"zero_stage": 3, "offload_optimizer": "cpu"},
            8.0,
            "train.micro_batch_size: 16 -> 8 (predicted 8.51 -> 5.92",
        ),
        (
            {"engine": "native"},
            25,
            "parallel.data_parallel_sharding: none -> optimizer (predicted 32.0 -> 19.0",
        ),
        (
            {"engine": "native", "zero_stage": None},
            14.5,
            "parallel.data_parallel_sharding: none -> parameters (predicted 32.0 -> 13.0",
        ),
    ],
)
def test_sufficient_settings_are_named(
    overrides: dict[str, object], device: float, advice: str
) -> None:
    message = refusal(conf(**overrides), device)
    assert message.startswith("gpt2-xl-zero3-offload needs about ")
    assert f" and this machine has {device:.1f} GiB per rank: any of these suffices: " in message
    assert advice in message
    assert message.count(" (predicted ") <= 3


def test_a_single_sufficient_setting_is_named() -> None:
    assert refusal(conf(zero_stage=1), 9).endswith(
        " and this machine has 9.0 GiB per rank: this suffices: deepspeed.zero_stage: 1 -> 3, "
        "deepspeed.offload_optimizer: none -> cpu (predicted 19.0 -> 8.5 GiB)"
    )


def test_the_largest_savings_are_named_if_no_setting_suffices() -> None:
    message = refusal(conf(zero_stage=3), 2)
    ways = message.partition("no single setting suffices, these save most: ")[2].split("; ")
    assert [way.partition(":")[0] for way in ways] == [
        "deepspeed.offload_optimizer",
        "train.recompute",
        "train.micro_batch_size",
    ]


def test_the_smallest_configuration_has_no_setting_to_change() -> None:
    least = {"train.micro_batch_size": 1, "train.recompute": "full", "data.seq_length": 1}
    smallest = conf(
        zero_stage=3,
        offload_optimizer="cpu",
        offload_param="cpu",
        **least,
        **{"launch.nproc_per_node": 1},
    )
    assert refusal(smallest, 1, ranks=1).endswith("GiB per rank: no setting would save any")


def test_host_memory_is_checked_separately() -> None:
    config = conf(zero_stage=3, offload_optimizer="cpu", offload_param="cpu")
    assert refusal(config, 40, 7.5) == (
        "gpt2-xl-zero3-offload offloads about 8.0 GiB per rank to host memory and this machine has "
        "7.5 GiB of it per rank: lower launch.nproc_per_node (4), or set deepspeed.offload_param "
        "to none, or set deepspeed.offload_optimizer to none, or offload less or to nvme "
        "(deepspeed.offload_*)"
    )
    single_rank_message = refusal(config, 24, 20, ranks=1)
    assert (
        "offloads about 31.9 GiB per rank to host memory and this machine has 20.0 GiB"
        in single_rank_message
    )
    assert "launch.nproc_per_node" not in single_rank_message


def test_the_nvme_path_and_its_free_space_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = conf(zero_stage=3, offload_optimizer="nvme", nvme_path=str(tmp_path / "nvme"))
    assert refusal(missing, 40).endswith(f"its path {tmp_path}/nvme is no directory: make it")
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(17 * GIB))
    small = conf(zero_stage=3, offload_optimizer="nvme", nvme_path=str(tmp_path))
    assert refusal(small, 40) == (
        f"gpt2-xl-zero3-offload offloads about 4.4 GiB per rank to {tmp_path}, 17.4 GiB of 4 "
        "ranks, and 17.0 GiB are free there: give another path, or offload less"
    )
