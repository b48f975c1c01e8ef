"""Translation of DeepSpeed's JSON into the launch configuration of a fine-tuning."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from megacore.config import FinetuneConfig
from megacore.config.load import parse_finetune_config
from megacore.errors import ConfigError
from megacore.foreign.deepspeed_claims import finetuning_keys
from megacore.foreign.deepspeed_keys import REFUSED, definitions
from tests.config._deepspeed import nested
from tests.config._finetune import minimal, reread

AUTO = "auto"
TUTORIAL: dict[str, Any] = json.loads(
    (Path(__file__).resolve().parents[2] / "conf" / "ds" / "finetune-zero2.json").read_text(
        encoding="utf-8"
    )
)


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object with the values of another; None removes a value."""
    result = copy.deepcopy(base)
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        elif value is None:
            result.pop(key, None)
        else:
            result[key] = value
    return result


def asking(content: dict[str, Any], **sections: dict[str, Any]) -> FinetuneConfig:
    """Return a fine-tuning with a JSON; each keyword gives values of one section."""
    values = minimal()
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    values["launch"] = values.get("launch", {}) | {"deepspeed_config": content}
    return parse_finetune_config(values, origin="test")


def refusal(content: dict[str, Any], **sections: dict[str, Any]) -> str:
    """Return the message with which such a fine-tuning is refused."""
    with pytest.raises(ConfigError) as caught:
        asking(content, **sections)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace("of launch.deepspeed_config", "of JSON")


def settings(config: FinetuneConfig) -> dict[str, Any]:
    """Return the JSON that the configuration contains."""
    assert isinstance(config.launch.deepspeed_config, dict)
    return config.launch.deepspeed_config


def test_the_tutorials_file_is_translated() -> None:
    config = asking(TUTORIAL, optim={"warmup_steps": 7})
    assert (config.launch.distributed, config.train.precision, config.optim.lr_scheduler) == (
        "zero2",
        "fp16",
        "linear",
    )
    stored = settings(config)
    assert stored["optimizer"]["params"] == {
        "lr": AUTO, "weight_decay": AUTO, "betas": AUTO, "eps": AUTO, "adam_w_mode": True,
    }  # fmt: skip
    assert stored["zero_optimization"]["reduce_bucket_size"] == 200_000_000
    assert reread(config) == config
    assert asking(stored, optim={"warmup_steps": 7}) == config


@pytest.mark.parametrize(
    ("zero", "distributed"),
    [
        ({"stage": 2}, "zero2"),
        ({"stage": 3}, "zero3"),
        (
            {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            },
            "zero3-offload",
        ),
        ({"stage": 3, "cpu_offload": True, "cpu_offload_params": True}, "zero3-offload"),
        (
            {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "none"},
            },
            "zero3",
        ),
        ({"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}, "zero2"),
        ({"stage": 3, "offload_param": {"device": "none", "pin_memory": True}}, "zero3"),
    ],
)
def test_the_distribution_follows_from_the_zero_block(
    zero: dict[str, Any], distributed: Any
) -> None:
    config = asking({"zero_optimization": zero})
    assert config.launch.distributed == distributed
    assert reread(config) == config
    assert asking({"zero_optimization": zero}, launch={"distributed": distributed}) == config


@pytest.mark.parametrize(
    "content", [{}, {"zero_optimization": {"stage": AUTO}}, {"zero_optimization": {}}]
)
@pytest.mark.parametrize("distributed", ["zero2", "zero3"])
def test_an_open_stage_is_filled_in(content: dict[str, Any], distributed: str) -> None:
    config = asking(content, launch={"distributed": distributed})
    assert settings(config)["zero_optimization"]["stage"] == int(distributed[4])
    assert reread(config) == config


def test_open_offload_devices_are_filled_in() -> None:
    open_ = {
        "zero_optimization": {
            "offload_optimizer": {"device": AUTO},
            "offload_param": {"device": AUTO},
        }
    }
    zero = settings(asking(open_, launch={"distributed": "zero3-offload"}))["zero_optimization"]
    assert zero == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    }
    zero = settings(asking(open_, launch={"distributed": "zero3"}))["zero_optimization"]
    assert zero == {
        "stage": 3,
        "offload_optimizer": {"device": "none"},
        "offload_param": {"device": "none"},
    }


@pytest.mark.parametrize(
    ("content", "sections", "sentence"),
    [
        (
            {"zero_optimization": {"stage": 2}},
            {"launch": {"distributed": "ddp"}},
            "stage of JSON is 2, which is launch.",
        ),
        (
            {"zero_optimization": {"stage": 2}},
            {"launch": {"distributed": "zero3"}},
            "but launch.distributed is zero3: ch",
        ),
        (
            {"zero_optimization": {"stage": 3}},
            {"launch": {"distributed": "zero3-offload"}},
            (
                "stage of JSON is 3 without offload of both parts, which is launch.distributed "
                "zero3, but launch."
                "distributed is zero3-offload"
            ),
        ),
        (
            {"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": True}},
            {"launch": {"distributed": "zero3"}},
            (
                "stage of JSON is 3 with both parts offloaded, which is launch.distributed "
                "zero3-offload, but"
            ),
        ),
        (
            {},
            {"launch": {"distributed": "ddp"}},
            "is DeepSpeed's JSON but launch.distributed is ddp",
        ),
        ({}, {}, "zero_optimization.stage of JSON is missing, and launch.distributed too"),
        (
            {"zero_optimization": {"stage": 0}},
            {},
            "zero_optimization.stage of JSON is 0: use 2 or 3",
        ),
        (
            {"zero_optimization": {"stage": 1}},
            {},
            "zero_optimization.stage of JSON is 1: use 2 or 3",
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/x"},
                }
            },
            {},
            "offload_optimizer.device of JSON is nvme: use cpu or none",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            {},
            (
                "offload_param.device of JSON is cpu but zero_optimization.stage of JSON is 2: use "
                "stage 3, or none"
            ),
        ),
    ],
)
def test_an_impossible_distribution_is_refused_with_both_sides(
    content: dict[str, Any], sections: dict[str, Any], sentence: str
) -> None:
    assert sentence in refusal(content, **sections)


NUMBERS: list[tuple[str, Any, str, Any]] = [
    ("train_micro_batch_size_per_gpu", 3, "train.micro_batch_size", 4),
    ("gradient_accumulation_steps", 2, "train.gradient_accumulation_steps", 3),
    ("gradient_clipping", 0.25, "optim.clip_grad", 1.0),
    ("optimizer.params.lr", 1e-3, "optim.lr", 2e-3),
    ("optimizer.params.weight_decay", 0.1, "optim.weight_decay", 0.0),
    ("optimizer.params.eps", 1e-6, "optim.adam_eps", 1e-8),
    ("scheduler.params.warmup_max_lr", 1e-3, "optim.lr", 2e-3),
    ("scheduler.params.warmup_num_steps", 5, "optim.warmup_steps", 6),
]


@pytest.mark.parametrize(("key", "value", "field", "other"), NUMBERS)
def test_a_number_replaces_our_default_and_must_equal_our_value(
    key: str, value: Any, field: str, other: Any
) -> None:
    content = merged(TUTORIAL, nested(key, value))
    section, name = field.split(".")
    config = asking(content)
    assert getattr(getattr(config, section), name) == value
    assert reread(config) == config
    assert asking(content, **{section: {name: value}}) == config
    message = refusal(content, **{section: {name: other}})
    assert (
        f"{key} of JSON is {value} but {field} is {other}: change one of them, or remove {field}"
        in message
    )


def test_betas_replace_our_defaults_and_must_equal_our_values() -> None:
    content = merged(TUTORIAL, nested("optimizer.params.betas", [0.8, 0.9]))
    config = asking(content)
    assert (config.optim.adam_beta1, config.optim.adam_beta2) == (0.8, 0.9)
    message = refusal(content, optim={"adam_beta2": 0.95})
    assert "optimizer.params.betas[1] of JSON is 0.9 but optim.adam_beta2 is 0.95" in message


@pytest.mark.parametrize(
    ("blocks", "precision"),
    [
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"fp16": {"enabled": "true"}}, "fp16"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"bfloat16": {"enabled": True}, "fp16": {"enabled": False}}, "bf16"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": False}}, "fp32"),
        ({"bf16": {"enabled": False}}, "fp32"),
        ({"fp16": {"enabled": False}}, "auto"),
        ({"fp16": {"enabled": AUTO}, "bf16": {"enabled": AUTO}}, "auto"),
        ({}, "auto"),
    ],
)
def test_the_precision_follows_from_the_blocks(blocks: dict[str, Any], precision: str) -> None:
    config = asking({"zero_optimization": {"stage": 2}} | blocks)
    assert config.train.precision == precision
    assert reread(config) == config


@pytest.mark.parametrize(
    ("blocks", "precision", "sentence"),
    [
        (
            {"fp16": {"enabled": True}},
            "bf16",
            "fp16.enabled of JSON is true, which is train.precision fp16, but train.pr",
        ),
        ({"bf16": {"enabled": True}}, "fp32", "but train.precision is fp32"),
        (
            {"bf16": {"enabled": False}},
            "bf16",
            "bf16.enabled of JSON is false, which is train.precision fp32, but train",
        ),
        (
            {"fp16": {"enabled": False}},
            "fp16",
            "fp16.enabled of JSON is false but train.precision is fp16",
        ),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            "auto",
            "fp16.enabled and bf16.enabled of JSON are both",
        ),
    ],
)
def test_contradicting_precisions_are_refused(
    blocks: dict[str, Any], precision: str, sentence: str
) -> None:
    content = {"zero_optimization": {"stage": 2}} | blocks
    message = refusal(content, train={"precision": precision}).replace(
        "launch.deepspeed_config", "JSON"
    )
    assert sentence in message


@pytest.mark.parametrize(
    ("kind", "lr_scheduler"),
    [
        ("WarmupLR", "constant_with_warmup"),
        ("WarmupDecayLR", "linear"),
        ("WarmupCosineLR", "cosine"),
    ],
)
def test_schedulers_are_translated(kind: str, lr_scheduler: str) -> None:
    content = merged(TUTORIAL, {"scheduler": None}) | {"scheduler": {"type": kind}}
    config = asking(content)
    assert config.optim.lr_scheduler == lr_scheduler
    params = settings(config)["scheduler"]["params"]
    assert set(params.values()) == {AUTO}  # values that the JSON omits are the configuration's
    assert "warmup_num_steps" in params
    assert reread(config) == config
    other = "polynomial"
    message = refusal(content, optim={"lr_scheduler": other})
    assert (
        f"scheduler.type of JSON is {kind}, which is optim.lr_scheduler {lr_scheduler}, but "
        f"optim.lr_scheduler is {other}"
    ) in message


@pytest.mark.parametrize(
    ("scheduler", "sentence"),
    [
        (
            {"type": "OneCycle", "params": {}},
            "scheduler.type of JSON is OneCycle, and no optim.lr_scheduler is like it",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_num_steps": 0}},
            "warmup_num_steps of JSON is 0: DeepSpeed takes 1",
        ),
        (
            {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 9, "total_num_steps": 9}},
            "warmup_num_steps of JSON is 9 but total_num_steps is 9",
        ),
        (
            {"type": "WarmupLR", "params": {"total_num_steps": 9}},
            "unknown key scheduler.params.total_num_steps",
        ),
        ({"params": {"warmup_num_steps": 9}}, "has scheduler.params without scheduler.type"),
    ],
)
def test_unsupported_schedulers_are_refused(scheduler: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal({"zero_optimization": {"stage": 2}, "scheduler": scheduler})


@pytest.mark.parametrize("kind", ["SGD", "RMSprop", "Adamax", "NAdam", "RAdam"])
def test_optimizers_of_torch_are_accepted(kind: str) -> None:
    config = asking(
        {
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": kind.lower(), "params": {"lr": 1e-3}},
        }
    )
    assert settings(config)["optimizer"] == {
        "type": kind,
        "params": {"lr": 1e-3, "weight_decay": AUTO},
    }
    assert reread(config) == config


def test_parameters_of_other_optimizers_stay_unchanged() -> None:
    params = {"lr": 1e-3, "momentum": 0.9, "nesterov": True, "dampening": AUTO}
    stored = settings(
        asking({"zero_optimization": {"stage": 2}, "optimizer": {"type": "SGD", "params": params}})
    )
    assert stored["optimizer"]["params"] == {
        "lr": 1e-3,
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": AUTO,
    }


@pytest.mark.parametrize(
    ("optimizer", "sentence"),
    [
        *[
            ({"type": kind}, f"optimizer.type of JSON is {kind} and DeepSpeed would")
            for kind in ("Adagrad", "Lamb", "Muon")
        ],
        (
            {"type": "SGD", "params": {"eps": 1e-8}},
            "optimizer.params.eps of JSON is no parameter of SGD, which has lr",
        ),
        (
            {"type": "AdamW", "params": {"momentum": 0.9}},
            "optimizer.params.momentum of JSON is no parameter of AdamW",
        ),
        (
            {"type": "AdamW", "params": {"torch_adam": False}},
            "torch_adam of JSON is false, which is refused",
        ),
        (
            {"type": "AdamW", "params": {"max_grad_norm": 1.0}},
            "max_grad_norm of JSON is 1.0, which is refused",
        ),
        (
            {"type": "AdamW", "params": {"lr": "high"}},
            'optimizer.params.lr of JSON is "high": give a finite number',
        ),
    ],
)
def test_unsupported_optimizers_are_refused(optimizer: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal({"zero_optimization": {"stage": 2}, "optimizer": optimizer})


@pytest.mark.parametrize(
    ("batch", "launch", "fits"),
    [
        (16, {"nproc_per_node": 2}, True),
        (24, {"nproc_per_node": 2}, False),
        (24, {"nproc_per_node": "auto"}, True),
        (20, {}, False),
        (32, {"nproc_per_node": 2, "kind": "slurm", "nnodes": 2}, True),
        (16, {"nproc_per_node": 2, "kind": "slurm", "nnodes": 2}, False),
        (24, {"nproc_per_node": 2, "hostfile": "hosts"}, True),
    ],
)
def test_train_batch_size_must_be_the_product(
    batch: int, launch: dict[str, Any], fits: bool
) -> None:
    content = {"zero_optimization": {"stage": 2}, "train_batch_size": batch}
    if fits:
        assert asking(content, launch=launch).train.micro_batch_size == 8
    else:
        message = refusal(content, launch=launch)
        assert (
            f"train_batch_size of JSON is {batch} but train.micro_batch_size 8 x "
            "train.gradient_accumulation_"
        ) in message
        assert " = " in message


def test_the_product_uses_the_numbers_of_the_json() -> None:
    content = {
        "zero_optimization": {"stage": 2},
        "train_batch_size": 80,
        "train_micro_batch_size_per_gpu": 40,
    }
    assert asking(content, launch={"nproc_per_node": 2}).train.micro_batch_size == 40
    assert "train.micro_batch_size 40 x train.gradient_accumulation_steps 1 x 4 ranks = 160" in (
        refusal(content, launch={"nproc_per_node": 4})
    )


ACCEPTED = finetuning_keys("JSON")


def test_every_key_of_deepspeed_is_honoured_or_refused() -> None:
    missing = {
        key
        for key in (*definitions().keys, *REFUSED)
        if key not in ACCEPTED.keys
        and key not in ACCEPTED.refused
        and key.split(".")[0] not in ACCEPTED.refused
    }
    assert missing == set()
    assert set(ACCEPTED.keys) & set(ACCEPTED.refused) == set()


@pytest.mark.parametrize(
    "name",
    [
        "tensorboard",
        "wandb",
        "comet",
        "csv_monitor",
        "activation_checkpointing",
        "aio",
        "zero_force_ds_cpu_optimizer",
    ],
)
def test_unsupported_blocks_are_refused_unless_they_are_off(name: str) -> None:
    zero = {"zero_optimization": {"stage": 2}}
    is_flag = name.startswith("zero_force")
    on: Any = (
        True
        if is_flag
        else {"profile": True}
        if name.startswith("activation")
        else {"enabled": True}
    )
    off: Any = (
        False
        if is_flag
        else {"profile": False}
        if name.startswith("activation")
        else {"enabled": False}
    )
    assert f"{name} of JSON is " in refusal(zero | {name: on})
    assert name not in settings(asking(zero | {name: off}))


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_reasons_do_not_mention_options_of_pretraining(key: str) -> None:
    if key not in ACCEPTED.refused:
        assert key in ACCEPTED.keys
        return
    reason = ACCEPTED.refused[key].reason
    for word in (
        "megacore trains",
        "section parallel",
        "deepspeed.cpu_adam",
        "megacore plan",
        "any engine",
    ):
        assert word not in reason


@pytest.mark.parametrize(
    ("scheduler", "optim", "warmup"),
    [
        ({"type": "WarmupDecayLR"}, {}, 1000),
        ({"type": "WarmupDecayLR"}, {"warmup_steps": 7}, 7),
        ({"type": "WarmupDecayLR", "params": {"warmup_num_steps": AUTO}}, {}, 0),
        (None, {}, 0),
    ],
)
def test_a_missing_warm_up_is_deepspeeds_default(
    scheduler: dict[str, Any] | None, optim: dict[str, Any], warmup: int
) -> None:
    content = merged({"zero_optimization": {"stage": 2}}, {"scheduler": scheduler})
    config = asking(content, optim=optim)
    assert config.optim.warmup_steps == warmup
    assert reread(config) == config


@pytest.mark.parametrize(
    ("params", "optim", "weight_decay"),
    [
        ({}, {}, 0.0),
        ({"torch_adam": True}, {}, 0.01),
        ({"torch_adam": True}, {"weight_decay": 0.2}, 0.2),
        ({"torch_adam": True, "weight_decay": AUTO}, {}, 0.0),
    ],
)
def test_a_missing_weight_decay_is_the_default_of_the_optimizer_class(
    params: dict[str, Any], optim: dict[str, Any], weight_decay: float
) -> None:
    content = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": params}}
    config = asking(content, optim=optim)
    assert config.optim.weight_decay == weight_decay
    assert (config.optim.adam_beta1, config.optim.adam_beta2) == (0.9, 0.999)
    assert reread(config) == config
