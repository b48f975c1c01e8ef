"""Distributions, DeepSpeed's JSON, optimizer and schedule."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.errors import ConfigError, LaunchError
from megacore.finetune.distribution import (
    check_precision,
    deepspeed_json,
    fsdp_settings,
    training_arguments,
)
from megacore.finetune.trainer import parameter_groups, prepare
from tests.finetune._tiny_task import TinyTask, config
from tests.finetune._two_ranks import ADAMW, DECAY

LOSSES = 1e-6
"""Relative difference of losses in fp32: sums over ranks in another order."""
WEIGHTS = 2e-5
"""Of weights after six steps with a learning rate of 5e-3; Adam divides by the root of small
numbers."""


@pytest.mark.parametrize("kind", ["zero2", "zero3", "zero3-offload", "fsdp"])
def test_each_distribution_learns_what_ddp_does(two: list[dict[str, Any]], kind: str) -> None:
    for rank in two:
        ddp, zero = rank["ddp"], rank[kind]
        assert zero["losses"] == pytest.approx(ddp["losses"], rel=LOSSES)
        assert zero["norms"] == pytest.approx(ddp["norms"], rel=1e-5)
        assert zero["lr"] == ddp["lr"]
        assert zero["metrics"] == pytest.approx(ddp["metrics"], rel=LOSSES)
        torch.testing.assert_close(zero["weights"], ddp["weights"], rtol=0, atol=WEIGHTS)
    assert two[0][kind]["losses"] == two[1][kind]["losses"]
    assert ddp["losses"][-1] < ddp["losses"][0] - 0.1


@pytest.mark.parametrize("kind", ["ddp", "zero2", "zero3", "fsdp"])
def test_bf16_learns_what_fp32_does(two: list[dict[str, Any]], kind: str) -> None:
    whole, rounded = two[0]["ddp"], two[0][f"{kind} bf16"]
    assert rounded["losses"] == pytest.approx(whole["losses"][:2], rel=5e-3)
    assert rounded["losses"] != whole["losses"][:2]
    assert all(weight.dtype == torch.float32 for weight in rounded["weights"].values())


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("deberta", "zero2"),
        ("deberta", "zero3"),
        ("deberta", "fsdp"),
        ("blenderbot", "zero2"),
        ("blenderbot", "zero3"),
    ],
)
def test_zero_learns_what_ddp_does_with_real_tasks(
    two: list[dict[str, Any]], model: str, kind: str
) -> None:
    """Under ZeRO-3 the head is drawn, and texts are written, with a model that no rank has as a
    whole."""
    for rank in two:
        ddp, zero = rank[f"{model} ddp"], rank[f"{model} {kind}"]
        assert zero["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
        for before, after in zip(ddp["metrics"], zero["metrics"], strict=True):
            assert after == pytest.approx(before, rel=1e-5)
    assert len(ddp["losses"]) == 3


def test_weights_that_no_loss_depends_on_are_let_be(two: list[dict[str, Any]]) -> None:
    """XLNet's for masks and segments."""
    assert len(two[0]["xlnet ddp"]["losses"]) == 3
    assert two[0]["xlnet ddp"]["losses"] == pytest.approx(two[0]["xlnet zero2"]["losses"], rel=1e-5)


def test_a_head_gives_way_under_zero_3_too(two: list[dict[str, Any]]) -> None:
    ddp, zero = two[0]["head ddp"], two[0]["head zero3"]
    assert zero["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
    assert zero["metrics"][-1] == pytest.approx(ddp["metrics"][-1], rel=1e-5)


def test_the_last_step_of_an_epoch_weighs_its_batches_alike(two: list[dict[str, Any]]) -> None:
    for rank, kind in itertools.product(two, ("zero2", "fsdp")):
        ddp, zero = rank["ddp accumulated"], rank[f"{kind} accumulated"]
        assert len(ddp["losses"]) == 4, "3 batches in steps of 2, twice"
        assert zero["losses"] == pytest.approx(ddp["losses"], rel=LOSSES)
        # With half of the gradient the norm would be half of it, too.
        assert zero["norms"] == pytest.approx(ddp["norms"], rel=1e-5)
        assert ddp["norms"][1] > 0.6


def test_a_json_with_an_optimizer_equals_the_settings_without(two: list[dict[str, Any]]) -> None:
    plain, described = two[0]["zero2"], two[0]["json optimizer"]
    assert described["losses"] == pytest.approx(plain["losses"], rel=LOSSES)
    assert described["lr"] == plain["lr"]
    torch.testing.assert_close(described["weights"], plain["weights"], rtol=0, atol=WEIGHTS)


def test_a_schedule_of_the_json_counts_optimizer_steps(two: list[dict[str, Any]]) -> None:
    """DeepSpeed's course lags a step and warms up in two at least.

    Divided among ranks it would end in step 4.
    """
    peak, total, warmup = 5e-3, 6, 2
    course = [0.0] + [
        peak * min(step / warmup, (total - step) / (total - warmup)) for step in range(5)
    ]
    assert two[0]["json both"]["lr"] == pytest.approx(course)


def test_a_model_is_divided_while_it_is_read(two: list[dict[str, Any]]) -> None:
    first, second = (rank["divided"] for rank in two)
    assert first["kind"] == "DEEPSPEED"
    assert (first["whole"], second["whole"]) == (0, 0), "no rank holds a whole parameter"
    assert first["held"] + second["held"] >= first["all"] == second["all"] > 0
    assert first["held"] <= first["all"] // 2 + 64


def settings(**values: Any) -> dict[str, Any]:
    launch = values.pop("launch", {})
    made = config(launch={"distributed": "zero2"} | launch, **values)
    return deepspeed_json(made, precision="fp32", device_type="cpu", ranks=2, total_steps=60)


def test_auto_is_filled_from_the_configuration() -> None:
    filled = settings(
        launch={"deepspeed_config": ADAMW | {"scheduler": DECAY}},
        optim={"weight_decay": 0.03, "warmup_steps": 7},
    )
    assert filled["train_batch_size"] == 8
    assert filled["gradient_clipping"] == 1.0
    assert filled["optimizer"]["params"] == {
        "lr": 5e-3,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.03,
        "torch_adam": True,
    }
    assert filled["scheduler"]["params"] == {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 5e-3,
        "warmup_num_steps": 7,
        "total_num_steps": 60,
        "warmup_type": "linear",
    }
    assert filled["zero_optimization"]["reduce_bucket_size"] == "auto", "it depends on the model"
    assert (filled["fp16"]["enabled"], filled["bf16"]["enabled"]) == (False, False)


def test_our_own_settings_offload_what_is_asked_for() -> None:
    assert "offload_param" not in settings()["zero_optimization"]
    zero = settings(launch={"distributed": "zero3-offload"})["zero_optimization"]
    offload = {"device": "cpu", "pin_memory": False}
    assert (zero["stage"], zero["offload_optimizer"], zero["offload_param"]) == (
        3,
        offload,
        offload,
    )
    assert zero["stage3_gather_16bit_weights_on_model_save"] is True


def test_a_gpu_pins_what_is_offloaded() -> None:
    made = config(launch={"distributed": "zero3-offload"})
    found = deepspeed_json(made, precision="fp16", device_type="cuda", ranks=1, total_steps=1)
    assert found["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert found["fp16"] == {"enabled": True, "auto_cast": True}


def test_what_a_block_for_fp16_leaves_out_is_left_to_deepspeed() -> None:
    content = {
        "zero_optimization": {"stage": 2},
        "fp16": {"enabled": True, "loss_scale_window": 500},
    }
    made = config(
        launch={"distributed": "zero2", "deepspeed_config": content}, train={"precision": "fp16"}
    )
    found = deepspeed_json(made, precision="fp16", device_type="cuda", ranks=1, total_steps=1)
    assert found["fp16"] == content["fp16"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"zero_optimization": {"stage": 2}, "train_batch_size": 64},
            r"train_batch_size .* is 64 and .* is 8",
        ),
        (
            {"zero_optimization": {"stage": 2, "allgather_bucket_size": "auto"}},
            "allgather_bucket_size .* nothing here",
        ),
        (
            {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}},
            "fp16.enabled .* train.precision is fp32",
        ),
        (
            ADAMW | {"optimizer": {"type": "Adam", "params": {"torch_adam": False}}},
            "torch_adam .* is false",
        ),
    ],
)
def test_a_json_that_contradicts_the_configuration_is_refused(
    given: dict[str, Any], message: str
) -> None:
    made = config(launch={"distributed": "zero2"})
    launch = made.launch.model_copy(update={"deepspeed_config": given})
    with pytest.raises(ConfigError, match=message):
        deepspeed_json(
            made.model_copy(update={"launch": launch}),
            precision="fp32",
            device_type="cpu",
            ranks=2,
            total_steps=1,
        )


def test_fp16_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.precision is fp16, which needs a GPU"):
        check_precision(config(train={"precision": "fp16"}), "fp16", "cpu")


def test_an_accelerate_yaml_says_how_fsdp_divides() -> None:
    made = config(launch={"distributed": "fsdp"})
    assert fsdp_settings(made) == {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}
    block = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": False,
        "fsdp_offload_params": True,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_transformer_layer_cls_to_wrap": "GPT2Block, GPT2MLP",
    }
    launch = made.launch.model_copy(update={"accelerate_config": {"fsdp_config": block}})
    assert fsdp_settings(made.model_copy(update={"launch": launch})) == {
        "version": 2,
        "state_dict_type": "SHARDED_STATE_DICT",
        "reshard_after_forward": False,
        "cpu_offload": True,
        "transformer_layer_cls_to_wrap": ["GPT2Block", "GPT2MLP"],
    }


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("fp16", "launch.distributed is fsdp and train.precision fp16, .* untested"),
        ("fp32", "there is one rank"),
    ],
)
def test_fsdp_is_for_several_ranks_and_not_for_fp16(
    tmp_path: Path, precision: str, message: str
) -> None:
    made = config(launch={"distributed": "fsdp"})
    with pytest.raises(ConfigError, match=message):
        training_arguments(
            made,
            precision=precision,
            device=torch.device("cuda"),
            total_steps=1,
            directory=tmp_path,
        )


def test_another_distribution_than_asked_for_is_refused(
    tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import trainer

    before = dict(os.environ)
    original = trainer.Accelerator

    def other(**values: Any) -> Any:
        made = original(**values)
        monkeypatch.setattr(type(made), "num_processes", property(lambda self: 7))
        return made

    monkeypatch.setattr(trainer, "Accelerator", other)
    with pytest.raises(
        LaunchError, match=r"launch\.distributed is ddp on 1 ranks and Accelerate came to NO on 7"
    ):
        prepare(
            config(),
            TinyTask(tiny_root / "model"),
            precision="fp32",
            device=torch.device("cpu"),
            directory=tmp_path,
        )
    assert {name for name in os.environ if name not in before} <= {"DS_ACCELERATOR"}


def test_a_rank_alone_joins_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that starts one rank numbers it, too.

    A group that Accelerate made would be of NCCL alone on GPUs.
    """
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    found = training_arguments(
        config(), precision="fp32", device=torch.device("cpu"), total_steps=1, directory=tmp_path
    )
    assert found.distributed_state.distributed_type.value == "NO"
    assert not torch.distributed.is_initialized()


def test_biases_and_norms_do_not_decay(tiny_root: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_root / "model")
    decaying, others = parameter_groups(model, 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert sum(len(group["params"]) for group in (decaying, others)) == len(names)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert all(
        ".ln_" in names[id(each)] or names[id(each)].endswith(".bias") for each in others["params"]
    )
    assert {"transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"} <= {
        names[id(each)] for each in decaying["params"]
    }
