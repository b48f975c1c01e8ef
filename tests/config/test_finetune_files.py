"""Accelerate's YAML and DeepSpeed's JSON together.

Each fills in the values that the other leaves open; values in both must agree.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.config._finetune import Files, reread


def test_an_unknown_key_of_the_json_is_named(tmp_path: Path) -> None:
    message = Files(tmp_path).refusal(None, {"zero_optimisation": {"stage": 2}})
    assert "unknown key zero_optimisation in ds.json (did you mean zero_optimization?)" in message


def test_a_key_that_is_a_number_is_named(tmp_path: Path) -> None:
    launch = {"launch.deepspeed_config": {1: 2}}
    assert "unknown key 1 in launch.deepspeed_config (known: " in Files(tmp_path).refusal(**launch)


def test_a_section_train_that_is_no_mapping_is_named(tmp_path: Path) -> None:
    message = Files(tmp_path).refusal(None, {"zero_optimization": {"stage": 2}}, train=7)
    assert "train is 7: give a mapping of its fields" in message


def test_the_path_of_a_missing_file_is_on_one_line(tmp_path: Path) -> None:
    launch = {"launch.deepspeed_config": "a\nb"}
    assert "'a\\nb': there is no file a\\nb or " in Files(tmp_path).refusal(**launch)


def test_a_path_too_long_for_a_file_is_refused(tmp_path: Path) -> None:
    launch = {"launch.deepspeed_config": "a" * 300}
    assert "there is no file aaa" in Files(tmp_path).refusal(**launch)


@pytest.mark.parametrize(
    ("accelerate", "deepspeed", "sentence"),
    [
        (
            {"zero_stage": 2},
            {"zero_optimization": {"stage": 3}},
            (
                "zero_optimization.stage of ds.json is 3 but deepspeed_config.zero_stage of "
                "accelerate.yaml is 2"
            ),
        ),
        (
            {"zero_stage": 3, "offload_param_device": "cpu"},
            {"zero_optimization": {"stage": 3}},
            (
                "zero_optimization.offload_param.device of ds.json is none but "
                "deepspeed_config.offload_param_device of accelerate.yaml is cpu"
            ),
        ),
        (
            {"gradient_clipping": 1.0},
            {"zero_optimization": {"stage": 3}, "gradient_clipping": 0.5},
            (
                "gradient_clipping of ds.json is 0.5 but deepspeed_config.gradient_clipping of "
                "accelerate.yaml is 1.0"
            ),
        ),
        (
            {"gradient_accumulation_steps": 4},
            {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 2},
            (
                "gradient_accumulation_steps of ds.json is 2 but "
                "deepspeed_config.gradient_accumulation_steps of acc"
            ),
        ),
        (
            {},
            {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
            "bf16.enabled of ds.json is true but mixed_precision of accelerate.yaml is fp16",
        ),
        (
            None,
            {"zero_optimization": {"stage": 3}},
            (
                "of ds.json is 3 without offload of both parts but distributed_type of "
                "accelerate.yaml is MULTI_GPU"
            ),
        ),
    ],
)
def test_a_json_that_contradicts_accelerates_yaml_is_refused_with_both_files(
    tmp_path: Path, accelerate: dict[str, Any] | None, deepspeed: dict[str, Any], sentence: str
) -> None:
    written: dict[str, Any] = {
        "mixed_precision": "fp16",
        "num_processes": 2,
        "distributed_type": "MULTI_GPU",
    }
    if accelerate is not None:
        written |= {"distributed_type": "DEEPSPEED", "deepspeed_config": accelerate}
    message = Files(tmp_path).refusal(written, deepspeed)
    assert f"{sentence}" in message
    assert message.endswith("change one of them")


def test_auto_in_the_json_takes_the_value_of_accelerates_yaml(tmp_path: Path) -> None:
    written = {
        "mixed_precision": "bf16",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"gradient_clipping": 0.5, "gradient_accumulation_steps": 3},
    }
    content = {
        "zero_optimization": {"stage": 3},
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
    }
    config = Files(tmp_path).load(written, content)
    assert (config.launch.distributed, config.train.precision) == ("zero3", "bf16")
    assert (config.optim.clip_grad, config.train.gradient_accumulation_steps) == (0.5, 3)
    assert reread(config) == config


def test_a_required_value_may_come_from_the_json(tmp_path: Path) -> None:
    files = Files(tmp_path)
    content = {
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
    }
    assert files.load(None, content, optim={}).optim.lr == 3e-4
    assert "optim.lr is missing: give it a value" in files.refusal(optim={})
