"""The settings for DeepSpeed: they are complete and mean the same to DeepSpeed."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.config import RunConfig
from megacore.config.deepspeed import user_settings_of
from megacore.config.deepspeed_checks import is_compared
from megacore.engine.deepspeed import settings as deepspeed_settings_module
from megacore.engine.deepspeed.join import import_deepspeed
from megacore.engine.deepspeed.settings import NEVER, deepspeed_settings
from megacore.errors import ConfigError
from megacore.foreign.deepspeed_keys import definitions
from megacore.foreign.files import read_settings_json
from megacore.optim.param_schedule import LrSchedule
from tests.config._deepspeed import PUBLIC, asking, nested, public

ROOT = Path(__file__).resolve().parents[2]
KEYS = definitions().keys
PASSED = [key for key in KEYS if not is_compared(key)]


@pytest.fixture(autouse=True)
def every_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the packages of all monitors be installed."""
    monkeypatch.setattr(deepspeed_settings_module, "is_installed", lambda package: True)


def settings(
    config: RunConfig, *, device_type: str = "cuda", data_parallel_size: int = 2
) -> dict[str, Any]:
    precision = config.train.precision
    assert precision != "auto"
    return deepspeed_settings(
        config, precision=precision, device_type=device_type, data_parallel_size=data_parallel_size
    )


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def parsed(values: dict[str, Any]) -> Any:
    """Return the configuration that DeepSpeed reads from the settings on one replica."""
    import_deepspeed()
    from deepspeed.runtime.config import DeepSpeedConfig

    return DeepSpeedConfig(values)


def test_settings_of_a_small_run_are_complete() -> None:
    config = asking(deepspeed={"zero_stage": 2}, parallel={"grad_reduce_dtype": "bf16"})
    assert settings(config) == {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": NEVER,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 6_553_600},
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "bf16",
    }


def test_fp16_has_the_loss_scale_of_the_configuration() -> None:
    scale = {"initial": 2.0**20, "window": 500, "hysteresis": 3, "minimum": 4.0}
    sections = {"train": {"precision": "fp16"}, "deepspeed": {"zero_stage": 1}}
    values = settings(asking(optim={"loss_scale": scale}, **sections))
    assert values["fp16"] == {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 20,
        "loss_scale_window": 500,
        "hysteresis": 3,
        "consecutive_hysteresis": False,
        "min_loss_scale": 4,
    }
    read = parsed(values | {"train_batch_size": 4})
    assert read.float16_config.dynamic_loss_scale_args() == {
        "init_scale": 2**20,
        "scale_window": 500,
        "delayed_shift": 3,
        "consecutive_hysteresis": False,
        "min_scale": 4,
    }


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        (0, "fp32"),
        (0, "bf16"),
        *((stage, each) for stage in (1, 2, 3) for each in ("fp32", "bf16", "fp16")),
    ],
)
def test_gradients_add_up_in_fp32_where_deepspeed_can(stage: int, precision: str) -> None:
    values = settings(asking(deepspeed={"zero_stage": stage}, train={"precision": precision}))
    assert values["data_types"]["grad_accum_dtype"] == ("fp32" if stage else precision)


def test_the_json_may_set_accumulation_in_the_type_of_the_model() -> None:
    content = {"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "bf16"}}
    assert settings(asking(content, train={"precision": "bf16"}))["data_types"] == {
        "grad_accum_dtype": "bf16"
    }


def test_the_section_of_the_configuration_reaches_deepspeed() -> None:
    section = {
        "zero_stage": 3,
        "offload_optimizer": "nvme",
        "offload_param": "cpu",
        "nvme_path": "/nvme",
        "overlap_comm": False,
        "reduce_bucket_size": 1000,
        "sub_group_size": 2000,
        "stage3_prefetch_bucket_size": 3000,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 4000,
        "stage3_max_reuse_distance": 5000,
        "cpu_checkpointing": True,
    }
    config = asking(deepspeed=section, train={"recompute": "full"})
    values = settings(config)
    assert values["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
        "offload_param": {"device": "cpu", "nvme_path": "/nvme"},
        "overlap_comm": False,
        "reduce_bucket_size": 1000,
        "sub_group_size": 2000,
        "stage3_prefetch_bucket_size": 3000,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 4000,
        "stage3_max_reuse_distance": 5000,
    }
    assert values["activation_checkpointing"] == {"cpu_checkpointing": True}
    zero = parsed(values | {"train_batch_size": 4}).zero_config
    assert (zero.prefetch_bucket_size, zero.max_live_parameters, zero.sub_group_size) == (
        3000,
        4000,
        2000,
    )
    assert (zero.offload_optimizer.device, zero.offload_param.device) == ("nvme", "cpu")
    assert zero.offload_param.pin_memory


def test_memory_is_not_pinned_on_a_cpu() -> None:
    config = asking(public("accelerate-zero3-offload"), **PUBLIC["accelerate-zero3-offload"])
    for device_type, pinned in (("cuda", True), ("cpu", False)):
        zero = settings(config, device_type=device_type, data_parallel_size=2)["zero_optimization"]
        assert (
            zero["offload_optimizer"]
            == zero["offload_param"]
            == {"device": "cpu", "pin_memory": pinned}
        )


@pytest.mark.parametrize("name", PUBLIC)
def test_public_keys_reach_deepspeed_or_equal_the_configuration(name: str) -> None:
    config = asking(public(name), **PUBLIC[name])
    values = settings(config)
    passed, requested = dict(leaves(values)), user_settings_of(config)
    for key, value in leaves(public(name)):
        assert key in KEYS
        if value != "auto" and key in PASSED:
            assert passed[key] == value
        elif value == "auto" and key in PASSED and key in requested.values:
            assert passed[key] == requested.values[key]
        elif is_compared(key) and key in passed and value != "auto":
            assert passed[key] == (value == "true" or value)
    assert "auto" not in passed.values()
    assert not {"optimizer", "scheduler"} & set(values)


@pytest.mark.parametrize("name", PUBLIC)
def test_deepspeed_accepts_the_settings_of_the_public_files(name: str) -> None:
    # On one replica, the batch of files with one accumulation step is one micro batch.
    batch = 16 if name == "megatron-zero1" else 4
    train = PUBLIC[name]["train"] | {"global_batch_size": batch}
    config = asking(public(name), **PUBLIC[name] | {"train": train}, launch={"nproc_per_node": 1})
    read = parsed(settings(config, data_parallel_size=1))
    assert read.train_batch_size == config.train.global_batch_size
    assert read.train_micro_batch_size_per_gpu == 4
    assert read.gradient_clipping == 1.0
    assert read.float16_config.enabled
    assert not read.bfloat16_config.enabled
    assert read.float16_config.initial_dynamic_scale() == config.optim.loss_scale.initial
    assert read.optimizer_name is read.scheduler_name is None
    assert read.steps_per_print == public(name)["steps_per_print"]
    assert read.zero_config.stage == public(name)["zero_optimization"]["stage"]
    zero = read.zero_config
    if name == "accelerate-zero2":
        assert (zero.allgather_bucket_size, zero.reduce_bucket_size, zero.overlap_comm) == (
            2 * 10**8,
            2 * 10**8,
            True,
        )
    if name == "accelerate-zero3-offload":
        assert (zero.offload_optimizer.device, zero.offload_param.device) == ("cpu", "cpu")
        assert (
            zero.reduce_bucket_size,
            zero.prefetch_bucket_size,
            zero.param_persistence_threshold,
        ) == (
            1024,
            921,
            320,
        )
        assert (zero.sub_group_size, zero.gather_16bit_weights_on_model_save) == (10**9, False)
    if name == "megatron-zero1":
        assert (read.wall_clock_breakdown, read.zero_allow_untested_optimizer) == (True, False)
        assert (read.monitor_config.wandb.enabled, read.monitor_config.wandb.project) == (
            True,
            "gpt-pretraining",
        )


@pytest.mark.parametrize("name", ["zero2", "zero3-offload"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_deepspeed_accepts_the_settings_of_the_examples(name: str, precision: str) -> None:
    content = read_settings_json(ROOT / "conf" / "ds" / f"{name}.json")
    config = asking(content, train={"precision": precision}, launch={"nproc_per_node": 1})
    read = parsed(settings(config, data_parallel_size=1))
    assert (read.float16_config.enabled, read.bfloat16_config.enabled) == (
        precision == "fp16",
        precision == "bf16",
    )
    assert read.gradient_accumulation_steps == 4


def example(key: str) -> Any:
    by_kind = {
        "flag": True,
        "size": 4,
        "integer": 4,
        "number": 2.0,
        "text": "some",
        "list": ["all_reduce"],
    }
    return (KEYS[key].choices or (by_kind[KEYS[key].kind],))[-1]


@pytest.mark.parametrize("key", PASSED)
def test_deepspeed_reads_every_key_that_is_passed_on(key: str) -> None:
    content: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    if key.startswith("zero_optimization.offload") or key.startswith("aio."):
        block = "offload_param" if "offload_param" in key else "offload_optimizer"
        content["zero_optimization"][block] = {"device": "nvme", "nvme_path": "/nvme"}
    if key.endswith("allgather_bucket_size"):
        content["zero_optimization"]["stage"] = 2
    if key == "activation_checkpointing.contiguous_memory_optimization":
        content["activation_checkpointing"] = {
            "partition_activations": True,
            "number_checkpoints": 2,
        }
    target = content
    *blocks, leaf = key.split(".")
    for block in blocks:
        target = target.setdefault(block, {})
    value = "fp32" if key == "data_types.grad_accum_dtype" else example(key)
    target[leaf] = value
    config = asking(
        content,
        train={"recompute": "full", "precision": "bf16"},
        parallel={"tensor_model_parallel_size": 2},
        deepspeed={"cpu_adam": "deepspeed"} | {"config": content}
        if "offload_optimizer" in str(content)
        else {},
    )
    values = settings(config, data_parallel_size=1)
    assert dict(leaves(values))[key] == value
    if key != "aio.use_gds":  # DeepSpeed refuses this key without a GPU
        parsed(values)


@pytest.mark.parametrize(
    ("monitor", "package"),
    [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml")],
)
def test_a_monitor_without_its_package_is_refused(
    monkeypatch: pytest.MonkeyPatch, monitor: str, package: str
) -> None:
    monkeypatch.setattr(deepspeed_settings_module, "is_installed", lambda name: name != package)
    config = asking(nested(f"{monitor}.enabled", True))
    with pytest.raises(ConfigError) as caught:
        settings(config)
    assert str(caught.value) == (
        f"{monitor}.enabled of deepspeed.config is true but the package {package} is not "
        "installed: install it, or set the former to false"
    )
    settings(asking({"csv_monitor": {"enabled": True}}))
    settings(asking(nested(f"{monitor}.enabled", False)))


def test_gradient_accumulation_is_checked_against_the_number_of_ranks() -> None:
    config = asking({"gradient_accumulation_steps": 2}, launch={"nproc_per_node": "auto"})
    assert settings(config, data_parallel_size=2)["gradient_accumulation_steps"] == 2
    with pytest.raises(
        ConfigError, match=r"is 2, x train.micro_batch_size 2 x 4 data-parallel ranks = 16, but"
    ):
        settings(config, data_parallel_size=4)


def test_the_resolved_precision_is_set() -> None:
    config = asking(deepspeed={"zero_stage": 1}, train={"precision": "auto"})
    values = deepspeed_settings(config, precision="bf16", device_type="cuda", data_parallel_size=2)
    assert (values["bf16"], values["fp16"]) == ({"enabled": True}, {"enabled": False})
    content = {"data_types": {"grad_accum_dtype": "fp16"}}
    with pytest.raises(ConfigError, match="is fp16 but with ZeRO stage 0 and precision bf16"):
        deepspeed_settings(
            asking(content, train={"precision": "auto"}),
            precision="bf16",
            device_type="cuda",
            data_parallel_size=2,
        )


def test_a_ramped_up_batch_size_is_set_to_its_final_value() -> None:
    config = asking(train={"rampup_batch_size": {"start": 4, "increment": 4, "samples": 40}})
    assert settings(config)["gradient_accumulation_steps"] == 2


def test_warm_up_and_decay_equal_deepspeeds_schedulers() -> None:
    import_deepspeed()
    from deepspeed.runtime.lr_schedules import WarmupDecayLR, WarmupLR

    weight = torch.nn.Parameter(torch.zeros(1))
    for style in ("linear", "log"):
        for warmup in (1, 2, 7) if style == "log" else (2, 7):
            shape = {
                "warmup_min_lr": 1e-5,
                "warmup_max_lr": 1e-3,
                "warmup_num_steps": warmup,
                "warmup_type": style,
            }
            for decay, theirs in (
                ("constant", WarmupLR(torch.optim.AdamW([weight]), **shape)),
                ("linear", WarmupDecayLR(torch.optim.AdamW([weight]), total_num_steps=20, **shape)),
            ):
                ours = LrSchedule(
                    lr=1e-3,
                    min_lr=1e-5,
                    # DeepSpeed warms up for two steps at least.
                    warmup_steps=max(2, warmup),
                    decay_steps=20,
                    style="linear" if decay == "linear" else "constant",
                    init_lr=1e-5,
                    warmup_style="log" if style == "log" else "linear",
                )
                for step in range(1, 25):
                    theirs.step(step)
                    assert math.isclose(ours.at(step), theirs.get_last_lr()[0], rel_tol=1e-12), (
                        decay,
                        shape,
                        step,
                    )


def test_keys_missing_in_the_json_have_deepspeeds_defaults() -> None:
    content = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}}
    values = settings(asking(content, train={"precision": "fp16"}), data_parallel_size=1)
    assert values["fp16"]["initial_scale_power"] == 16
    assert "reduce_bucket_size" not in values["zero_optimization"]
    read = parsed(values)
    assert read.float16_config.initial_dynamic_scale() == 2**16
    assert read.zero_config.reduce_bucket_size == 500_000_000
