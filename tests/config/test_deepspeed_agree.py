"""A user's DeepSpeed JSON and a configuration, which must agree."""

import inspect
from typing import Any

import pytest

from megacore.config.deepspeed import user_settings_of
from megacore.config.deepspeed_checks import SAME, SAME_IN_FP16, is_compared
from megacore.config.load import parse_config
from megacore.foreign.deepspeed_keys import definitions
from tests.config._deepspeed import PUBLIC, asking, nested, public, refusal

COMPARED = [key for key in definitions().keys if is_compared(key)]
FP16 = {"train": {"precision": "fp16"}, "optim": {"loss_scale": {"initial": 65536.0}}}
LINEAR = {"lr_decay_style": "linear", "lr_warmup_iters": 10}
DECAY = {
    "warmup_max_lr": 1e-3,
    "warmup_num_steps": 10,
    "warmup_type": "linear",
    "total_num_steps": 100,
}
COSINE = {
    "warmup_num_steps": 10,
    "warmup_type": "linear",
    "total_num_steps": 100,
    "cos_min_ratio": 0.1,
}


def adam(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": params}}


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


CONTRADICTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "train_batch_size": (
        {"train_batch_size": 16},
        {},
        "is 16 but train.global_batch_size is 8: change one of them",
    ),
    "train_micro_batch_size_per_gpu": (
        {"train_micro_batch_size_per_gpu": 4},
        {},
        "is 4 but train.micro_batch_size is 2",
    ),
    "gradient_accumulation_steps": (
        {"gradient_accumulation_steps": 4},
        {},
        (
            "is 4, x train.micro_batch_size 2 x 2 data-parallel ranks = 16, but "
            "train.global_batch_size is 8"
        ),
    ),
    "gradient_clipping": ({"gradient_clipping": 0.5}, {}, "is 0.5 but optim.clip_grad is 1.0"),
    "communication_data_type": (
        {"communication_data_type": "bf16"},
        {},
        "is bf16 but parallel.grad_reduce_dtype is fp32",
    ),
    "fp16.enabled": (
        {"fp16": {"enabled": True}},
        {},
        "is true but train.precision is fp32: set the latter to fp16",
    ),
    "bf16.enabled": (
        {"bf16": {"enabled": "true"}},
        {},
        "is true but train.precision is fp32: set the latter to bf16",
    ),
    "fp16.loss_scale": (
        {"fp16": {"loss_scale": 128}},
        FP16,
        "is 128, one scale for the whole run, but optim.loss_sca",
    ),
    "fp16.initial_scale_power": (
        {"fp16": {"initial_scale_power": 12}},
        FP16,
        "is 12, a first scale of 2^12, but optim.loss_scale.initial is 65536",
    ),
    "fp16.loss_scale_window": (
        {"fp16": {"loss_scale_window": 500}},
        FP16,
        "is 500 but optim.loss_scale.window is 1000",
    ),
    "fp16.hysteresis": (
        {"fp16": {"hysteresis": 4}},
        FP16,
        "is 4 but optim.loss_scale.hysteresis is 2",
    ),
    "fp16.min_loss_scale": (
        {"fp16": {"min_loss_scale": 2}},
        FP16,
        "is 2 but optim.loss_scale.minimum is 1.0",
    ),
    "fp16.consecutive_hysteresis": (
        {"fp16": {"consecutive_hysteresis": True}},
        FP16,
        "is true but optim.loss_scale.hysteresis 2 counts overflows since the scale last grew",
    ),
    "optimizer.params.lr": (adam(lr=2e-3), {}, "is 0.002 but optim.lr is 0.001"),
    "optimizer.params.eps": (adam(eps=1e-6), {}, "is 1e-06 but optim.adam_eps is 1e-08"),
    "optimizer.params.weight_decay": (
        adam(weight_decay=0.1),
        {},
        "is 0.1 but optim.weight_decay is 0.01",
    ),
    "optimizer.params.max_grad_norm": (
        adam(max_grad_norm=0.5),
        {},
        "is 0.5 but optim.clip_grad is 1.0",
    ),
    "optimizer.params.betas": (
        adam(betas=[0.9, 0.95]),
        {},
        "is [0.9, 0.95] but optim.adam_beta1 and optim.adam_beta2 are [0.9, 0.999]",
    ),
    "optimizer.params.adam_w_mode": (
        adam(adam_w_mode=False),
        {"optim": {"weight_decay": 0.01}},
        (
            "is false, Adam with weight decay in the gradient, but optim.weight_decay 0.01 is "
            "decoupled"
        ),
    ),
    "optimizer.params.torch_adam": (
        adam(torch_adam=True)
        | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        {},
        (
            "is true and the optimizer is offloaded but deepspeed.cpu_adam is auto: set the latter "
            "to torch"
        ),
    ),
    "zero_force_ds_cpu_optimizer": (
        {
            "zero_force_ds_cpu_optimizer": True,
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
        {"deepspeed": {"cpu_adam": "torch"}},
        (
            "is true and the optimizer is offloaded but deepspeed.cpu_adam is torch: set the "
            "latter to deepspeed"
        ),
    ),
    "scheduler.type": (
        scheduler("WarmupDecayLR"),
        {},
        "is WarmupDecayLR but optim.lr_decay_style is cosine: set the latter to linear",
    ),
    "scheduler.params.warmup_num_steps": (
        scheduler("WarmupDecayLR", **DECAY | {"warmup_num_steps": 20}),
        {"optim": LINEAR},
        "is 20 but optim.lr_warmup_iters is 10",
    ),
    "scheduler.params.warmup_type": (
        scheduler("WarmupDecayLR", **DECAY | {"warmup_type": "log"}),
        {"optim": LINEAR},
        "is log but optim.lr_warmup_style is linear",
    ),
    "scheduler.params.warmup_max_lr": (
        scheduler("WarmupDecayLR", **DECAY | {"warmup_max_lr": 2e-3}),
        {"optim": LINEAR},
        "is 0.002 but optim.lr is 0.001",
    ),
    "scheduler.params.warmup_min_lr": (
        scheduler("WarmupDecayLR", **DECAY, warmup_min_lr=1e-5),
        {"optim": LINEAR},
        "is 1e-05 but optim.min_lr is 0.0",
    ),
    "scheduler.params.total_num_steps": (
        scheduler("WarmupDecayLR", **DECAY | {"total_num_steps": 200}),
        {"optim": LINEAR},
        "is 200 but optim.lr_decay_iters is 100",
    ),
    "scheduler.params.cos_min_ratio": (
        scheduler("WarmupCosineLR", **COSINE),
        {"optim": {"lr_warmup_iters": 10, "min_lr": 2e-4}},
        "is 0.1 but optim.min_lr / optim.lr is 0.2",
    ),
    "scheduler.params.warmup_min_ratio": (
        scheduler("WarmupCosineLR", **COSINE, warmup_min_ratio=0.5),
        {"optim": {"lr_warmup_iters": 10, "min_lr": 1e-4}},
        "is 0.5 but optim.lr_warmup_init / optim.lr is 0.0",
    ),
}
"""A JSON, a configuration that contradicts it, and the message, for each key."""


@pytest.mark.parametrize("key", CONTRADICTIONS)
def test_a_contradiction_is_refused_with_both_names_and_values(key: str) -> None:
    content, sections, sentence = CONTRADICTIONS[key]
    deepspeed = sections.get("deepspeed", {}) | {"config": content}
    assert f"{key} of deepspeed.config {sentence}" in refusal(**sections | {"deepspeed": deepspeed})


def test_every_compared_key_has_a_contradiction() -> None:
    assert set(COMPARED) - {"optimizer.type"} <= set(CONTRADICTIONS)
    assert {*SAME, *SAME_IN_FP16} <= set(COMPARED)


@pytest.mark.parametrize("key", [key for key in COMPARED if not key.endswith(".type")])
def test_auto_takes_the_value_of_the_configuration(key: str) -> None:
    content = nested(key, "auto")
    optim: dict[str, Any] = {"lr": 7e-4, "adam_beta2": 0.9, "weight_decay": 0.3, "clip_grad": 0.7}
    if key.startswith("optimizer."):
        content["optimizer"]["type"] = "AdamW"
    if key.startswith("scheduler."):
        kind = "WarmupCosineLR" if "ratio" in key else "WarmupDecayLR"
        shape = COSINE if "ratio" in key else DECAY | {"warmup_max_lr": 7e-4}
        content = scheduler(kind, **shape | {key.rsplit(".", 1)[1]: "auto"})
        optim |= {"lr_warmup_iters": 10, "min_lr": 7e-5} if "ratio" in key else LINEAR
    config = asking(content, optim=optim, train={"precision": "bf16"})
    assert key in user_settings_of(config).autos


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"train": {"precision": "bf16"}},
            "fp16.enabled of deepspeed.config is true but train.precision is bf16",
        ),
        (
            {"train": {"precision": "auto"}},
            "fp16.enabled of deepspeed.config is true but train.precision is auto",
        ),
        ({"optim": {"loss_scale": {}}}, "but optim.loss_scale.initial is 4.29497e+09"),
    ],
)
def test_public_files_are_refused_with_a_configuration_that_disagrees(
    name: str, change: dict[str, Any], sentence: str
) -> None:
    sections = {
        section: PUBLIC[name][section] | change.get(section, {}) for section in PUBLIC[name]
    }
    assert sentence in refusal(public(name), **sections)


@pytest.mark.parametrize(
    ("enabled", "precision", "sentence"),
    [
        (
            {"fp16": False},
            "fp16",
            "fp16.enabled of deepspeed.config is false but train.precision is fp16: say fp32",
        ),
        (
            {"bf16": False},
            "auto",
            "bf16.enabled of deepspeed.config is false but train.precision is auto: say fp32",
        ),
        (
            {"bf16": True},
            "auto",
            "bf16.enabled of deepspeed.config is true but train.precision is auto: set",
        ),
        (
            {"bf16": True, "fp16": True},
            "fp16",
            "fp16.enabled and bf16.enabled of deepspeed.config are both true",
        ),
    ],
)
def test_precisions_that_disagree_are_refused(
    enabled: dict[str, bool], precision: str, sentence: str
) -> None:
    content = {name: {"enabled": on} for name, on in enabled.items()}
    assert sentence in refusal(content, train={"precision": precision})


def test_precisions_that_agree_are_accepted() -> None:
    for precision in ("fp32", "bf16", "fp16"):
        content: dict[str, Any] = {
            name: {"enabled": name == precision} for name in ("fp16", "bf16")
        }
        asking(content | {"zero_optimization": {"stage": 1}}, train={"precision": precision})
    asking({"fp16": {"enabled": False}}, train={"precision": "auto"})


def test_loss_scales_are_compared_only_with_fp16() -> None:
    content = {"fp16": {"enabled": False, "loss_scale": 128, "initial_scale_power": 7}}
    asking(content, train={"precision": "bf16"})


def test_accumulation_steps_must_fit_the_batch_for_any_number_of_ranks() -> None:
    launch = {"nproc_per_node": "auto"}
    asking({"gradient_accumulation_steps": 2}, launch=launch)
    assert "is 3, x train.micro_batch_size 2 = 6, but train.global_batch_size is 8" in refusal(
        {"gradient_accumulation_steps": 3}, launch=launch
    )


def test_fixed_accumulation_steps_contradict_a_batch_ramp_up() -> None:
    train = {"rampup_batch_size": {"start": 4, "increment": 4, "samples": 40}}
    asking({"train_batch_size": 8, "gradient_accumulation_steps": "auto"}, train=train)
    assert (
        "gradient_accumulation_steps of deepspeed.config is 2 but train.rampup_batch_size lets "
        "the batch grow from 4 to 8"
    ) in refusal({"gradient_accumulation_steps": 2}, train=train)


def test_a_fixed_weight_decay_contradicts_a_weight_decay_schedule() -> None:
    optim = {"weight_decay_incr_style": "linear", "end_weight_decay": 0.1}
    asking(adam(weight_decay="auto"), optim=optim)
    assert "is 0.01 but optim.weight_decay_incr_style is linear" in refusal(
        adam(weight_decay=0.01), optim=optim
    )


def test_every_name_of_adam_is_accepted() -> None:
    for kind in ("Adam", "adamw", "AdamW"):
        asking(
            {
                "optimizer": {
                    "type": kind,
                    "params": {"adam_w_mode": True, "torch_adam": True, "lr": "1e-3"},
                }
            }
        )


def test_a_cpu_adam_that_the_configuration_names_is_accepted() -> None:
    zero = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    asking(deepspeed={"config": zero | adam(torch_adam=True), "cpu_adam": "torch"})
    asking(
        deepspeed={"config": zero | {"zero_force_ds_cpu_optimizer": True}, "cpu_adam": "deepspeed"}
    )
    asking({"zero_force_ds_cpu_optimizer": True})


def test_schedulers_equal_to_the_configured_schedule_are_accepted() -> None:
    asking(scheduler("WarmupDecayLR", **DECAY), optim=LINEAR)
    asking(scheduler("WarmupDecayLR", **dict.fromkeys(DECAY, "auto")), optim=LINEAR | {"lr": 3e-4})
    asking(
        scheduler("WarmupDecayLR", **DECAY, warmup_min_lr=1e-4),
        optim=LINEAR | {"min_lr": 1e-4, "lr_warmup_init": 1e-4},
    )
    asking(
        scheduler("WarmupDecayLR", **DECAY | {"warmup_num_steps": 0}),
        optim={"lr_decay_style": "linear"},
    )
    asking(
        scheduler("WarmupLR", warmup_num_steps=10, warmup_type="linear"),
        optim={"lr_decay_style": "constant", "lr_warmup_iters": 10},
    )
    asking(scheduler("WarmupCosineLR", **COSINE), optim={"lr_warmup_iters": 10, "min_lr": 1e-4})


@pytest.mark.parametrize(
    ("content", "optim", "sentence"),
    [
        (
            scheduler("WarmupDecayLR", warmup_max_lr="auto", total_num_steps="auto"),
            LINEAR,
            (
                "scheduler.params.warmup_num_steps of deepspeed.config is 1000 by DeepSpeed's "
                "default but optim.lr_warmup_iters is 10"
            ),
        ),
        (
            scheduler("WarmupDecayLR", warmup_num_steps="auto"),
            LINEAR,
            "scheduler.params.warmup_type of deepspeed.config is log by DeepSpeed's default but "
            "optim.lr_warmup_style is linear",
        ),
        (
            scheduler("WarmupDecayLR", **DECAY, warmup_min_lr="auto"),
            LINEAR | {"min_lr": 1e-4},
            (
                "WarmupDecayLR, which starts and ends at one rate, but optim.lr_warmup_init is 0.0 "
                "and optim.min_lr 0.0001"
            ),
        ),
        (
            scheduler("WarmupLR", warmup_num_steps=10, warmup_type="linear", warmup_min_lr=1e-5),
            {"lr_decay_style": "constant", "lr_warmup_iters": 10},
            (
                "scheduler.params.warmup_min_lr of deepspeed.config is 1e-05 but "
                "optim.lr_warmup_init is 0.0"
            ),
        ),
        (
            scheduler("WarmupLR"),
            LINEAR,
            "is WarmupLR but optim.lr_decay_style is linear: set the latter to constant",
        ),
        (
            scheduler("WarmupCosineLR"),
            LINEAR,
            "is WarmupCosineLR but optim.lr_decay_style is linear: set the latter to cosine",
        ),
    ],
)
def test_missing_scheduler_parameters_have_deepspeeds_defaults(
    content: dict[str, Any], optim: dict[str, Any], sentence: str
) -> None:
    assert sentence in refusal(content, optim=optim)


ZERO_1 = {"zero_optimization": {"stage": 1}}
IN_FP16 = {"train": {"precision": "fp16"}}


@pytest.mark.parametrize(
    ("content", "optim", "initial"),
    [
        (ZERO_1 | {"fp16": {"enabled": True}}, {}, 2.0**16),
        (ZERO_1, {}, 2.0**16),
        (ZERO_1 | {"fp16": {"enabled": True}}, {"loss_scale": {"window": 7}}, 2.0**16),
        (ZERO_1 | {"fp16": {"enabled": True}}, {"loss_scale": {"initial": 2.0**20}}, 2.0**20),
        (ZERO_1 | {"fp16": {"enabled": True, "initial_scale_power": "auto"}}, {}, 2.0**32),
    ],
)
def test_a_missing_initial_loss_scale_is_deepspeeds_default(
    content: dict[str, Any], optim: dict[str, Any], initial: float
) -> None:
    config = asking(content, optim=optim, **IN_FP16)
    assert config.optim.loss_scale.initial == initial
    assert config.optim.loss_scale.window == optim.get("loss_scale", {}).get("window", 1000)
    assert parse_config(config.model_dump(mode="json"), origin="test") == config


def test_defaults_of_a_json_need_no_section_optim() -> None:
    content = ZERO_1 | {"fp16": {"enabled": True}} | adam(lr=1e-3)
    values = asking(content, optim={"lr": 1e-3}, **IN_FP16).model_dump(mode="json")
    del values["optim"]
    optim = parse_config(values, origin="test").optim
    assert (optim.loss_scale.initial, optim.weight_decay) == (2.0**16, 0.0)


def test_the_loss_scale_is_the_configurations_without_a_json() -> None:
    config = asking(deepspeed={"zero_stage": 1}, **IN_FP16)
    assert config.optim.loss_scale.initial == 2.0**32
    assert asking(ZERO_1, engine="native", **IN_FP16).optim == config.optim


@pytest.mark.parametrize(
    ("content", "optim", "weight_decay"),
    [
        (adam(), {}, 0.0),
        (adam(torch_adam=True), {}, 0.01),
        (adam(), {"weight_decay": 0.3}, 0.3),
        (adam(weight_decay="auto"), {}, 0.01),
        ({}, {}, 0.01),
        (adam(), {"weight_decay_incr_style": "linear", "end_weight_decay": 0.1}, 0.01),
    ],
)
def test_a_missing_weight_decay_is_the_default_of_the_optimizer_class(
    content: dict[str, Any], optim: dict[str, Any], weight_decay: float
) -> None:
    assert asking(content, optim=optim).optim.weight_decay == weight_decay


def test_defaults_equal_those_of_deepspeeds_classes() -> None:
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
    from deepspeed.runtime.lr_schedules import WarmupCosineLR
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config

    known, fp16 = definitions(), DeepSpeedFP16Config()
    assert known.default("fp16.initial_scale_power") == fp16.initial_scale_power == 16
    assert known.default("fp16.hysteresis") == fp16.hysteresis
    assert known.default("gradient_clipping") == GRADIENT_CLIPPING_DEFAULT
    assert asking({}).optim.clip_grad == GRADIENT_CLIPPING_DEFAULT
    floor = inspect.signature(WarmupCosineLR).parameters["cos_min_ratio"].default
    assert known.schedulers["WarmupCosineLR"]["cos_min_ratio"] == floor
