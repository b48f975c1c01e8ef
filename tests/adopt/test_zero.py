"""ZeRO in flags, in DeepSpeed's JSON and in Accelerate's YAML."""

import math
import re
from pathlib import Path

import pytest

from tests.adopt._samples import (
    DEEPSPEED_SCRIPT,
    NEOX_MODEL,
    adopted,
    config_of,
    gpt,
    refusals,
)

_OFFLOAD = '"offload_optimizer": {"device": "cpu"},'


@pytest.mark.parametrize(
    ("stage", "sharding"), [(0, "none"), (1, "optimizer"), (2, "gradients"), (3, "parameters")]
)
def test_zero_without_offload_is_native(tmp_path: Path, stage: int, sharding: str) -> None:
    text = DEEPSPEED_SCRIPT.replace(_OFFLOAD, "").replace("ZERO:-2", f"ZERO:-{stage}")
    result = adopted(tmp_path, "ds.sh", text)
    translated = config_of(tmp_path, result)
    assert (translated.engine, translated.parallel.data_parallel_sharding) == ("native", sharding)
    assert translated.deepspeed == type(translated.deepspeed)()
    remarks = result.draft.remarks  # type: ignore[union-attr]
    assert any(f"data_parallel_sharding: {sharding}" in each for each in remarks) == (stage > 0)
    assert any("reduce_bucket_size" in each and "engine native" in each for each in remarks)


@pytest.mark.parametrize(
    ("stage", "zero", "blocks", "reason"),
    [
        (2, _OFFLOAD, "", "offload of the optimizer (cpu)"),
        (3, '"offload_param": {"device": "cpu"},', "", "offload of weights (cpu)"),
        (2, "", '"activation_checkpointing": {"cpu_checkpointing": true},', "of activations"),
    ],
)
def test_what_only_deepspeed_has_keeps_its_engine(
    tmp_path: Path, stage: int, zero: str, blocks: str, reason: str
) -> None:
    text = DEEPSPEED_SCRIPT.replace(_OFFLOAD, zero).replace("ZERO:-2", f"ZERO:-{stage}")
    result = adopted(
        tmp_path, "ds.sh", text.replace('"steps_per_print"', f'{blocks} "steps_per_print"')
    )
    assert result.draft is not None
    assert result.draft.values["engine"].value == "deepspeed"
    assert result.draft.values["deepspeed.zero_stage"].value == stage
    (remark,) = [each for each in result.draft.remarks if each.startswith("engine deepspeed")]
    assert reason in remark


def test_offloaded_zero_2_is_deepspeed(tmp_path: Path) -> None:
    second = config_of(tmp_path, adopted(tmp_path, "ds.sh", DEEPSPEED_SCRIPT))
    assert second.engine == "deepspeed"
    assert (second.deepspeed.zero_stage, second.deepspeed.offload_optimizer) == (2, "cpu")
    assert second.train.train_iters == math.ceil(300e6 / 1024 / 128)


def test_curriculum_learning_of_the_json_is_refused(tmp_path: Path) -> None:
    text = DEEPSPEED_SCRIPT.replace(
        '"steps_per_print": 10', '"curriculum_learning": {"enabled": true}'
    )
    (refusal, *_) = refusals(adopted(tmp_path, "ds.sh", text))
    assert "curriculum learning" in refusal
    assert "data.seq_length_schedule" in refusal


def test_megatron_passes_its_own_optimizer_to_deepspeed(tmp_path: Path) -> None:
    own = '"optimizer": {"type": "Lion", "params": {"lr": 7.0, "betas": [0.1, 0.2]}}'
    text = DEEPSPEED_SCRIPT.replace(
        '"steps_per_print": 10', f'{own}, "scheduler": {{"type": "WarmupLR"}}'
    )
    result = adopted(tmp_path, "ds.sh", text)
    optim = config_of(tmp_path, result).optim
    assert (optim.lr, optim.adam_beta1, optim.adam_beta2) == (3e-4, 0.9, 0.999)
    assert "the program passes its own optimizer" in result.text


def test_deepspeeds_loss_scale_wins_over_the_flags(tmp_path: Path) -> None:
    flags = "--hysteresis 4 --min-loss-scale 64 --loss-scale-window 7 --initial-loss-scale 8"
    text = DEEPSPEED_SCRIPT.replace("--hysteresis 2", flags)
    text = text.replace(', "initial_scale_power": 11', ', "loss_scale_window": 500')
    scale = config_of(tmp_path, adopted(tmp_path, "ds.sh", text)).optim.loss_scale
    shown = (scale.initial, scale.window, scale.hysteresis, scale.minimum)
    assert shown == (2.0**16, 500, 2, 1.0)
    constant = text.replace('"loss_scale": 0', '"loss_scale": 128')
    scale = config_of(tmp_path, adopted(tmp_path, "ds.sh", constant)).optim.loss_scale
    assert (scale.initial, scale.minimum, scale.window) == (128, 128, 10**9)
    neox = NEOX_MODEL.replace(', "initial_scale_power": 12', "")
    assert config_of(tmp_path, adopted(tmp_path, "a.yml", neox)).optim.loss_scale.initial == 2.0**16
    alone = adopted(tmp_path, "ds.json", '{"fp16": {"enabled": true}, "train_batch_size": 8}')
    assert config_of(tmp_path, alone).optim.loss_scale.initial == 2.0**16


@pytest.mark.parametrize(
    ("old", "new", "both"),
    [
        ('batch_size_per_gpu": $MBS', 'batch_size_per_gpu": 2', "--micro-batch-size 4"),
        ('train_batch_size": $GBS', 'train_batch_size": 64', "--global-batch-size 128"),
        ('"steps_per_print": 10', '"gradient_accumulation_steps": 2', "--global-batch-size 128"),
    ],
)
def test_batches_of_the_json_that_contradict_the_flags_are_refused(
    tmp_path: Path, old: str, new: str, both: str
) -> None:
    refused = refusals(adopted(tmp_path, "ds.sh", DEEPSPEED_SCRIPT.replace(old, new)))
    assert any(new.strip('"').replace('"', "") in text and both in text for text in refused)


def test_deepspeeds_json_and_accelerates_yaml_alone(tmp_path: Path) -> None:
    json = (
        '{"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true}, '
        '"zero_optimization": {"stage": 3}}'
    )
    result = config_of(tmp_path, adopted(tmp_path, "ds.json", json))
    assert (result.engine, result.train.precision) == ("native", "bf16")
    assert result.parallel.data_parallel_sharding == "parameters"
    pytest.importorskip("accelerate")
    text = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\n"
        "num_processes: 4\nnum_machines: 1\n"
    )
    result = config_of(tmp_path, adopted(tmp_path, "acc.yaml", text))
    assert (result.launch.nproc_per_node, result.train.precision) == (4, "bf16")


def test_the_path_of_a_json_may_be_unknown(tmp_path: Path) -> None:
    result = gpt(tmp_path, "--deepspeed --deepspeed_config ds_$(date).json --zero-stage 1")
    assert config_of(tmp_path, result).parallel.data_parallel_sharding == "optimizer"
    assert "this file was not found" in result.text


def test_unreadable_values_of_deepspeeds_json_are_refused_by_name(tmp_path: Path) -> None:
    json = (
        '{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}, "fp16": '
        '{"enabled": true, "hysteresis": 1e999, "initial_scale_power": 99999}, '
        '"optimizer": {"params": {"betas": []}}}'
    )
    keys = [re.split("[: ]", text)[0] for text in refusals(adopted(tmp_path, "ds.json", json))]
    assert keys == ["fp16.hysteresis", "fp16.initial_scale_power", "optimizer.params.betas"]


ACCELERATE = """\
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 0.5
  offload_optimizer_device: none
  offload_param_device: none
  zero_stage: 2
distributed_type: DEEPSPEED
machine_rank: 0
main_process_ip: 10.0.0.1
main_process_port: 29500
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""


@pytest.mark.parametrize(
    ("old", "new", "engine", "sharding", "offload"),
    [
        ("", "", "native", "gradients", ("none", "none")),
        ("zero_stage: 2", "zero_stage: 3", "native", "parameters", ("none", "none")),
        ("optimizer_device: none", "optimizer_device: cpu", "deepspeed", "none", ("cpu", "none")),
        (
            "none\n  offload_param_device: none\n  zero_stage: 2",
            "cpu\n  offload_param_device: cpu\n  zero_stage: 3",
            "deepspeed",
            "none",
            ("cpu", "cpu"),
        ),
    ],
)
def test_accelerates_zero_and_hosts_are_translated(
    tmp_path: Path, old: str, new: str, engine: str, sharding: str, offload: tuple[str, str]
) -> None:
    pytest.importorskip("accelerate")
    result = adopted(tmp_path, "acc.yaml", ACCELERATE.replace(old, new) if old else ACCELERATE)
    config = config_of(tmp_path, result)
    assert (config.engine, config.parallel.data_parallel_sharding) == (engine, sharding)
    assert (config.deepspeed.offload_optimizer, config.deepspeed.offload_param) == offload
    assert (config.launch.nnodes, config.launch.nproc_per_node) == (2, 8)
    assert (config.optim.clip_grad, config.train.global_batch_size) == (0.5, 16)
    assert result.draft is not None
    assert "launch.hostfile" in [name for name, _ in result.draft.questions]
    for line in ACCELERATE.splitlines():
        assert line.strip().partition(":")[0] in result.text


def test_a_json_that_accelerates_yaml_names_is_refused_with_the_command(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    block = "deepspeed_config:\n  deepspeed_config_file: ds.json\n"
    text = block + "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 4\n"
    result = adopted(tmp_path, "acc.yaml", text, partial=True)
    assert refusals(result) == [
        "deepspeed_config_file ds.json: settings in another file; nearest: megacore adopt ds.json"
    ]
    assert config_of(tmp_path, result).launch.nproc_per_node == 4


@pytest.mark.parametrize(
    ("enabled", "precision"), [("1", "bf16"), ("true", "bf16"), ('"True"', "bf16"), ("0", "auto")]
)
def test_a_precision_is_enabled_as_in_deepspeed(
    tmp_path: Path, enabled: str, precision: str
) -> None:
    text = f'{{"bf16": {{"enabled": {enabled}}}, "train_batch_size": 8}}'
    assert config_of(tmp_path, adopted(tmp_path, "ds.json", text)).train.precision == precision


def test_a_precision_that_is_neither_enabled_nor_disabled_is_refused(tmp_path: Path) -> None:
    result = adopted(tmp_path, "ds.json", '{"fp16": {"enabled": "yes"}, "train_batch_size": 8}')
    assert "fp16.enabled: yes (ds.json:1): its value cannot be read" in refusals(result)[0]


def test_a_placeholder_of_a_template_is_a_missing_value(tmp_path: Path) -> None:
    text = '{"fp16": {"enabled": CONFIG_FP16_ENABLED}, "train_batch_size": 8}'
    result = adopted(tmp_path, "ds.json", text)
    assert result.draft is not None
    assert (result.outcome, result.draft.missing[0][1]) == ("incomplete", "fp16.enabled")
