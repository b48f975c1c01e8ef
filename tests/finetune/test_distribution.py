"""Distributions of fine-tuning, DeepSpeed's JSON, optimizer and schedule."""

import itertools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megacore.errors import ConfigError, LaunchError
from megacore.finetune.distribution import (
    check_precision,
    choose_fsdp_layers,
    deepspeed_json,
    fsdp_settings,
    training_arguments,
)
from megacore.finetune.trainer import parameter_groups, prepare
from tests.finetune._tiny_task import TinyTask, config
from tests.finetune._two_ranks import ADAMW, CASES, DECAY

LOSS_TOLERANCE = 1e-6
"""Tolerated relative difference of losses in fp32: ranks sum in another order."""
WEIGHT_TOLERANCE = 2e-5
"""Tolerated difference of weights after six steps with a learning rate of 5e-3.

Adam divides by the root of small numbers.
"""


SLOW = pytest.mark.slow
RANK_CASES = {
    "fast": ("ddp", "zero2"),
    "slow": [name for name in CASES if not name.endswith(" resumed")],
}


@pytest.mark.parametrize(
    "kind",
    ["zero2", *(pytest.param(kind, marks=SLOW) for kind in ("zero3", "zero3-offload", "fsdp"))],
)
def test_distributions_train_like_ddp(rank_results: list[dict[str, Any]], kind: str) -> None:
    for rank in rank_results:
        ddp, zero = rank["ddp"], rank[kind]
        assert zero["losses"] == pytest.approx(ddp["losses"], rel=LOSS_TOLERANCE)
        assert zero["norms"] == pytest.approx(ddp["norms"], rel=1e-5)
        assert zero["lr"] == ddp["lr"]
        assert zero["metrics"] == pytest.approx(ddp["metrics"], rel=LOSS_TOLERANCE)
        torch.testing.assert_close(zero["weights"], ddp["weights"], rtol=0, atol=WEIGHT_TOLERANCE)
    assert rank_results[0][kind]["losses"] == rank_results[1][kind]["losses"]
    assert ddp["losses"][-1] < ddp["losses"][0] - 0.1


@SLOW
@pytest.mark.parametrize("kind", ["ddp", "zero2", "zero3", "fsdp"])
def test_bf16_trains_like_fp32(rank_results: list[dict[str, Any]], kind: str) -> None:
    full_precision, rounded = rank_results[0]["ddp"], rank_results[0][f"{kind} bf16"]
    assert rounded["losses"] == pytest.approx(full_precision["losses"][:2], rel=5e-3)
    assert rounded["losses"] != full_precision["losses"][:2]
    assert all(weight.dtype == torch.float32 for weight in rounded["weights"].values())


@SLOW
@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("deberta", "zero2"),
        ("deberta", "zero3"),
        ("deberta", "fsdp"),
        ("bert", "fsdp"),
        ("blenderbot", "zero2"),
        ("blenderbot", "zero3"),
    ],
)
def test_distributions_train_real_tasks_like_ddp(
    rank_results: list[dict[str, Any]], model: str, kind: str
) -> None:
    """Under ZeRO-3 no rank has the whole model.

    The head is nevertheless initialized, and texts are generated.
    """
    for rank in rank_results:
        ddp, zero = rank[f"{model} ddp"], rank[f"{model} {kind}"]
        assert zero["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
        for before, after in zip(ddp["metrics"], zero["metrics"], strict=True):
            assert after == pytest.approx(before, rel=1e-5)
    assert len(ddp["losses"]) == 3


@SLOW
@pytest.mark.parametrize("kind", ["zero2", "fsdp"])
def test_labels_of_a_regression_are_not_rounded_to_the_type_of_the_weights(
    rank_results: list[dict[str, Any]], kind: str
) -> None:
    """The first predictions are near 0, so that the loss is the mean square of the labels."""
    ddp, other = rank_results[0]["regression ddp"], rank_results[0][f"regression {kind}"]
    assert other["losses"] == pytest.approx(ddp["losses"], rel=1e-4)
    # Labels of 2008, which bf16 makes of 2010 and 2011, have a mean square of 4,032,064.
    assert other["losses"][0] == pytest.approx(2010.5**2, rel=5e-4)


@SLOW
def test_unused_weights_are_allowed(rank_results: list[dict[str, Any]]) -> None:
    """XLNet has weights for masks and segments that no loss depends on."""
    assert len(rank_results[0]["xlnet ddp"]["losses"]) == 3
    assert rank_results[0]["xlnet ddp"]["losses"] == pytest.approx(
        rank_results[0]["xlnet zero2"]["losses"], rel=1e-5
    )


@SLOW
def test_trained_head_is_replaced_under_zero_3(rank_results: list[dict[str, Any]]) -> None:
    ddp, zero = rank_results[0]["head ddp"], rank_results[0]["head zero3"]
    assert zero["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
    assert zero["metrics"][-1] == pytest.approx(ddp["metrics"][-1], rel=1e-5)


@SLOW
def test_incomplete_last_step_of_an_epoch_is_not_scaled_down(
    rank_results: list[dict[str, Any]],
) -> None:
    for rank, kind in itertools.product(rank_results, ("zero2", "fsdp")):
        ddp, zero = rank["ddp accumulated"], rank[f"{kind} accumulated"]
        assert len(ddp["losses"]) == 4, "3 batches in steps of 2, twice"
        assert zero["losses"] == pytest.approx(ddp["losses"], rel=LOSS_TOLERANCE)
        # With half of the gradient, the norm would be halved too.
        assert zero["norms"] == pytest.approx(ddp["norms"], rel=1e-5)
        assert ddp["norms"][1] > 0.6


@SLOW
def test_optimizer_of_the_json_equals_the_configured_one(
    rank_results: list[dict[str, Any]],
) -> None:
    plain, described = rank_results[0]["zero2"], rank_results[0]["json optimizer"]
    assert described["losses"] == pytest.approx(plain["losses"], rel=LOSS_TOLERANCE)
    assert described["lr"] == plain["lr"]
    torch.testing.assert_close(
        described["weights"], plain["weights"], rtol=0, atol=WEIGHT_TOLERANCE
    )


@SLOW
def test_schedule_of_the_json_counts_optimizer_steps(rank_results: list[dict[str, Any]]) -> None:
    """DeepSpeed's schedule lags a step and warms up in at least two.

    Divided among ranks it would end in step 4.
    """
    peak, total, warmup = 5e-3, 6, 2
    course = [0.0] + [
        peak * min(step / warmup, (total - step) / (total - warmup)) for step in range(5)
    ]
    assert rank_results[0]["json both"]["lr"] == pytest.approx(course)


@SLOW
def test_zero_3_divides_a_model_while_loading(rank_results: list[dict[str, Any]]) -> None:
    first, second = (rank["divided"] for rank in rank_results)
    assert first["kind"] == "DEEPSPEED"
    assert (first["whole"], second["whole"]) == (0, 0), "no rank holds a whole parameter"
    assert first["held"] + second["held"] >= first["all"] == second["all"] > 0
    assert first["held"] <= first["all"] // 2 + 64


def settings(**values: Any) -> dict[str, Any]:
    launch = values.pop("launch", {})
    configuration = config(launch={"distributed": "zero2"} | launch, **values)
    return deepspeed_json(
        configuration, precision="fp32", device_type="cpu", ranks=2, total_steps=60
    )


def test_auto_values_come_from_the_configuration() -> None:
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


def test_default_settings_offload_as_requested() -> None:
    assert "offload_param" not in settings()["zero_optimization"]
    zero = settings(launch={"distributed": "zero3-offload"})["zero_optimization"]
    offload = {"device": "cpu", "pin_memory": False}
    assert (zero["stage"], zero["offload_optimizer"], zero["offload_param"]) == (
        3,
        offload,
        offload,
    )
    assert zero["stage3_gather_16bit_weights_on_model_save"] is True


def test_offloaded_memory_is_pinned_on_a_gpu() -> None:
    configuration = config(launch={"distributed": "zero3-offload"})
    settings_of_rank = deepspeed_json(
        configuration, precision="fp16", device_type="cuda", ranks=1, total_steps=1
    )
    assert settings_of_rank["zero_optimization"]["offload_param"] == {
        "device": "cpu",
        "pin_memory": True,
    }
    assert settings_of_rank["fp16"] == {"enabled": True, "auto_cast": True}


def test_fp16_section_of_the_json_is_unchanged() -> None:
    content = {
        "zero_optimization": {"stage": 2},
        "fp16": {"enabled": True, "loss_scale_window": 500},
    }
    configuration = config(
        launch={"distributed": "zero2", "deepspeed_config": content}, train={"precision": "fp16"}
    )
    settings_of_rank = deepspeed_json(
        configuration, precision="fp16", device_type="cuda", ranks=1, total_steps=1
    )
    assert settings_of_rank["fp16"] == content["fp16"]


@pytest.mark.parametrize(
    ("content", "message"),
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
def test_json_that_contradicts_the_configuration_is_refused(
    content: dict[str, Any], message: str
) -> None:
    configuration = config(launch={"distributed": "zero2"})
    launch = configuration.launch.model_copy(update={"deepspeed_config": content})
    with pytest.raises(ConfigError, match=message):
        deepspeed_json(
            configuration.model_copy(update={"launch": launch}),
            precision="fp32",
            device_type="cpu",
            ranks=2,
            total_steps=1,
        )


def test_fp16_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.precision is fp16, which needs a GPU"):
        check_precision(config(train={"precision": "fp16"}), "fp16", "cpu")


def test_fsdp_settings_come_from_the_accelerate_config() -> None:
    configuration = config(launch={"distributed": "fsdp"})
    assert fsdp_settings(configuration) == {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}
    block = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": False,
        "fsdp_offload_params": True,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_transformer_layer_cls_to_wrap": "GPT2Block, GPT2MLP",
    }
    launch = configuration.launch.model_copy(update={"accelerate_config": {"fsdp_config": block}})
    assert fsdp_settings(configuration.model_copy(update={"launch": launch})) == {
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
def test_fsdp_with_one_rank_or_fp16_is_refused(
    tmp_path: Path, precision: str, message: str
) -> None:
    configuration = config(launch={"distributed": "fsdp"})
    with pytest.raises(ConfigError, match=message):
        training_arguments(
            configuration,
            precision=precision,
            device=torch.device("cuda"),
            total_steps=1,
            directory=tmp_path,
        )


def fsdp_layers(model: Any, configured: list[str] | None = None) -> list[str]:
    """Return the layers of a model that FSDP divides it by."""
    plugin = SimpleNamespace(transformer_cls_names_to_wrap=configured)
    choose_fsdp_layers(cast(Any, SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))), model)
    layers: list[str] = plugin.transformer_cls_names_to_wrap
    return layers


def test_fsdp_leaves_layers_around_the_embedding_and_those_of_other_models_out() -> None:
    import transformers

    sizes: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": 9, "pad_token_id": 0}
    sizes |= {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))
    assert fsdp_layers(bert) == ["BertLayer"]
    esm = transformers.EsmForSequenceClassification(transformers.EsmConfig(**sizes))
    assert fsdp_layers(esm) == ["EsmLayer"]
    assert fsdp_layers(bert, ["BertAttention"]) == ["BertAttention"]
    with pytest.raises(ConfigError, match="names BertEmbeddings, which contains the input embed"):
        fsdp_layers(bert, ["BertLayer", "BertEmbeddings"])


def test_fsdp_refuses_an_encoder_decoder() -> None:
    from transformers import T5Config, T5ForSequenceClassification

    config = T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(ConfigError, match=r"fsdp .* T5ForSequenceClassification, .* to zero3"):
        fsdp_layers(T5ForSequenceClassification(config))


def test_other_distribution_than_configured_is_refused(
    tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import trainer

    before = dict(os.environ)
    original = trainer.Accelerator

    def other(**values: Any) -> Any:
        configuration = original(**values)
        monkeypatch.setattr(type(configuration), "num_processes", property(lambda self: 7))
        return configuration

    monkeypatch.setattr(trainer, "Accelerator", other)
    with pytest.raises(
        LaunchError, match=r"launch\.distributed is ddp on 1 ranks and Accelerate chose NO on 7"
    ):
        prepare(
            config(),
            TinyTask(tiny_root / "model"),
            precision="fp32",
            device=torch.device("cpu"),
            directory=tmp_path,
        )
    assert {name for name in os.environ if name not in before} <= {"DS_ACCELERATOR"}


def test_single_rank_joins_no_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that starts one rank numbers it too.

    A group that Accelerate creates would support only NCCL on GPUs.
    """
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    settings_of_rank = training_arguments(
        config(), precision="fp32", device=torch.device("cpu"), total_steps=1, directory=tmp_path
    )
    assert settings_of_rank.distributed_state.distributed_type.value == "NO"
    assert not torch.distributed.is_initialized()


def test_biases_and_norms_have_no_weight_decay(tiny_root: Path) -> None:
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
