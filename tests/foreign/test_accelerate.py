"""Translation of Accelerate's YAML into the launch configuration of a fine-tuning."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from megacore.config.load import parse_finetune_config
from megacore.foreign import accelerate as accelerate_yaml
from tests.config._finetune import Files, minimal, reread

DEEPSPEED: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "zero3_init_flag": False,
    "zero3_save_16bit_model": False,
    "zero_stage": 2,
}
QUESTIONNAIRE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "deepspeed_config": DEEPSPEED,
    "distributed_type": "DEEPSPEED",
    "downcast_bf16": "no",
    "dynamo_config": {},
    "enable_cpu_affinity": False,
    "fsdp_config": {},
    "gpu_ids": "all",
    "machine_rank": 0,
    "main_process_ip": None,
    "main_process_port": None,
    "main_training_function": "main",
    "megatron_lm_config": {},
    "mixed_precision": "fp16",
    "num_machines": 1,
    "num_processes": 2,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}
"""The YAML as the questionnaire writes it, with keys of older versions too."""
ON_CPU = {
    "distributed_type": "MULTI_CPU",
    "num_processes": 2,
    "mixed_precision": "no",
    "use_cpu": True,
}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def zero(**changes: Any) -> dict[str, Any]:
    """Return the YAML with other values in the block deepspeed_config; None removes one."""
    block = {name: value for name, value in (DEEPSPEED | changes).items() if value is not None}
    return QUESTIONNAIRE | {"deepspeed_config": block}


def test_the_questionnaires_yaml_is_translated(files: Files) -> None:
    config = files.load(QUESTIONNAIRE)
    assert (config.launch.distributed, config.launch.nproc_per_node, config.launch.nnodes) == (
        "zero2",
        2,
        1,
    )
    assert (
        config.train.precision,
        config.train.gradient_accumulation_steps,
        config.optim.clip_grad,
    ) == (
        "fp16",
        2,
        0.5,
    )
    # the configuration has the content, so no process reads the file again
    assert config.launch.accelerate_config == QUESTIONNAIRE
    assert config.launch.deepspeed_config is None
    assert reread(config) == config


@pytest.mark.parametrize(
    ("accelerate", "launch"),
    [
        ({"distributed_type": "NO"}, {"distributed": "ddp", "nproc_per_node": 1}),
        (
            {"distributed_type": "MULTI_GPU", "num_processes": 4},
            {"distributed": "ddp", "nproc_per_node": 4},
        ),
        (
            {"distributed_type": "MULTI_GPU", "num_processes": -1},
            {"nproc_per_node": "auto", "allow_cpu": False},
        ),
        (ON_CPU, {"distributed": "ddp", "nproc_per_node": 2, "allow_cpu": True}),
        (zero(zero_stage=0), {"distributed": "ddp"}),
        (zero(zero_stage=None), {"distributed": "zero2"}),
        (zero(zero_stage=3), {"distributed": "zero3"}),
        (
            zero(zero_stage=3, offload_optimizer_device="cpu", offload_param_device="cpu"),
            {"distributed": "zero3-offload", "deepspeed_config": None},
        ),
        (
            zero(
                deepspeed_hostfile="hosts",
                deepspeed_inclusion_filter="a:0,1@b",
                deepspeed_multinode_launcher="pdsh",
            )
            | {
                "num_machines": 2,
                "num_processes": 4,
                "main_process_ip": "10.0.0.1",
                "main_process_port": 29500,
            },
            {
                "hostfile": "hosts",
                "include": ("a:0,1", "b"),
                "nnodes": 2,
                "nproc_per_node": 2,
                "rdzv_endpoint": "10.0.0.1:29500",
            },
        ),
        (
            zero(deepspeed_hostfile="hosts", deepspeed_exclusion_filter="a")
            | {"num_machines": 2, "num_processes": 4, "main_process_ip": "first"},
            {"exclude": ("a",), "rdzv_endpoint": "first"},
        ),
    ],
)
def test_launch_values_are_translated(
    files: Files, accelerate: dict[str, Any], launch: dict[str, Any]
) -> None:
    config = files.load(accelerate)
    assert {name: getattr(config.launch, name) for name in launch} == launch
    assert reread(config) == config


@pytest.mark.parametrize(
    ("mixed_precision", "precision"),
    [("no", "fp32"), (False, "fp32"), ("bf16", "bf16"), ("FP16", "fp16"), (None, "auto")],
)
def test_mixed_precision_is_translated(files: Files, mixed_precision: Any, precision: str) -> None:
    assert (
        files.load(QUESTIONNAIRE | {"mixed_precision": mixed_precision}).train.precision
        == precision
    )


def test_the_fp16_key_of_old_files_is_read(files: Files) -> None:
    assert files.load({"distributed_type": "NO", "fp16": True}).train.precision == "fp16"


@pytest.mark.parametrize("part", ["optimizer", "param"])
def test_offload_of_one_part_becomes_deepspeed_settings(files: Files, part: str) -> None:
    config = files.load(zero(zero_stage=3, **{f"offload_{part}_device": "cpu"}))
    assert config.launch.distributed == "zero3"
    settings = config.launch.deepspeed_config
    assert isinstance(settings, dict)
    assert settings["zero_optimization"] == {
        "stage": 3,
        f"offload_{part}": {"device": "cpu", "pin_memory": True},
    }
    assert reread(config) == config
    optimizer_only = files.load(zero(offload_optimizer_device="cpu"))
    assert optimizer_only.launch.distributed == "zero2"


def test_a_named_json_is_read_relative_to_the_yaml(files: Files) -> None:
    accelerate = QUESTIONNAIRE | {
        "deepspeed_config": {"deepspeed_config_file": "ds.json", "zero3_init_flag": True}
    }
    content = {
        "zero_optimization": {"stage": 3},
        "gradient_clipping": 0.25,
        "fp16": {"enabled": "true"},
    }
    config = files.load(accelerate, content)
    assert (config.launch.distributed, config.optim.clip_grad, config.train.precision) == (
        "zero3",
        0.25,
        "fp16",
    )
    assert reread(config) == config
    same = files.load(accelerate, content, launch__deepspeed_config="ds.json")
    assert same == config


def test_two_different_jsons_are_refused_with_both_names(files: Files) -> None:
    (files.directory / "other.json").write_text('{"zero_optimization": {"stage": 2}}')
    accelerate = QUESTIONNAIRE | {"deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    message = files.refusal(
        accelerate, {"zero_optimization": {"stage": 3}}, launch__deepspeed_config="other.json"
    )
    assert (
        "deepspeed_config_file of accelerate.yaml is ds.json but launch.deepspeed_config is "
        "other.json"
    ) in message


def test_a_named_json_that_is_missing_is_refused(files: Files) -> None:
    message = files.refusal(
        QUESTIONNAIRE | {"deepspeed_config": {"deepspeed_config_file": "none.json"}}
    )
    assert "deepspeed_config_file of accelerate.yaml is 'none.json': there is no file" in message


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"compute_environment": "AMAZON_SAGEMAKER"},
            "compute_environment of accelerate.yaml is AMAZON_SAGEMAKER",
        ),
        *[
            (
                {"distributed_type": kind, "deepspeed_config": {}},
                f"distributed_type of accelerate.yaml is {kind}: use NO",
            )
            for kind in ("MEGATRON_LM", "XLA", "MULTI_XPU", "TP", None)
        ],
        (
            {"distributed_type": "MULTI_GPU"},
            "deepspeed_config of accelerate.yaml is given but distributed_type is MULTI",
        ),
        ({"deepspeed_config": 3}, "deepspeed_config of accelerate.yaml is 3: give a mapping"),
        (
            {"mixed_precision": "fp8"},
            "mixed_precision of accelerate.yaml is fp8: use no, fp16, bf16",
        ),
        (
            {"num_processes": 3, "num_machines": 2},
            "num_processes of accelerate.yaml is 3, which num_machines 2 does not",
        ),
        (
            {"num_processes": "two"},
            "num_processes of accelerate.yaml is two: give an integer above 0",
        ),
        ({"num_machines": 0}, "num_machines of accelerate.yaml is 0: give an integer above 0"),
        ({"machine_rank": 1}, "machine_rank of accelerate.yaml is 1"),
        (
            {"num_machines": 2, "num_processes": 2, "main_process_port": 1},
            "main_process_port of accelerate.yaml is 1 without main_process_ip",
        ),
        ({"num_machines": 2, "num_processes": 2}, "launch.nnodes is 2 without launch.hostfile"),
        (
            {"distributed_type": "NO", "deepspeed_config": {}},
            "num_processes of accelerate.yaml is 2 but distributed_type",
        ),
        (
            {"distributed_type": "MULTI_GPU", "deepspeed_config": {}, "use_cpu": True},
            "use_cpu of accelerate.yaml is true but distributed_type is MULTI_GPU",
        ),
        ({"use_cpu": "maybe"}, "use_cpu of accelerate.yaml is maybe: give true or false"),
        (
            {"mixed_presicion": "no"},
            "unknown key mixed_presicion in accelerate.yaml (did you mean mixed_precision?)",
        ),
    ],
)
def test_unsupported_values_are_refused_by_name(
    files: Files, changes: dict[str, Any], sentence: str
) -> None:
    assert sentence in files.refusal(QUESTIONNAIRE | changes)


SWITCHED_ON: dict[str, Any] = {
    "gpu_ids": "0,1",
    "rdzv_backend": "etcd",
    "dynamo_config": {"dynamo_backend": "INDUCTOR"},
    "dynamo_backend": "INDUCTOR",
    "downcast_bf16": "yes",
    "commands": ["ls"],
    "tpu_vm": ["a"],
    "tpu_env": ["A=1"],
    "command_file": "x.sh",
    "tpu_name": "a",
    "tpu_zone": "b",
}


@pytest.mark.parametrize("key", accelerate_yaml.REFUSED)
def test_each_refused_key_is_refused_unless_it_is_off(files: Files, key: str) -> None:
    on = {"some": "value"} if key.endswith("config") else True
    assert f"{key} of accelerate.yaml is " in files.refusal(
        QUESTIONNAIRE | {key: SWITCHED_ON.get(key, on)}
    )
    for off in (None, False, *accelerate_yaml.REFUSED[key][1]):
        parse_finetune_config(
            minimal() | {"launch": {"accelerate_config": QUESTIONNAIRE | {key: off}}}, origin="test"
        )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"zero_stage": 1}, "deepspeed_config.zero_stage of accelerate.yaml is 1: use 2 or 3"),
        (
            {"zero_stage": "two"},
            "deepspeed_config.zero_stage of accelerate.yaml is two: use 2 or 3",
        ),
        (
            {"offload_optimizer_device": "nvme"},
            "offload_optimizer_device of accelerate.yaml is nvme: use cpu or none",
        ),
        (
            {"offload_param_device": "cpu"},
            (
                "offload_param_device of accelerate.yaml is cpu but deepspeed_config.zero_stage of "
                "accelerate.yaml is 2"
            ),
        ),
        (
            {"zero_stage": 0, "offload_optimizer_device": "cpu"},
            (
                "offload_optimizer_device of accelerate.yaml is cpu but "
                "deepspeed_config.zero_stage of accelerate.yaml"
            ),
        ),
        (
            {"gradient_clipping": -1},
            "gradient_clipping of accelerate.yaml is -1: give a number above 0",
        ),
        (
            {"gradient_accumulation_steps": 1.5},
            "gradient_accumulation_steps of accelerate.yaml is 1.5: give a number",
        ),
        (
            {"deepspeed_multinode_launcher": "openmpi"},
            "deepspeed_multinode_launcher of accelerate.yaml is openmpi",
        ),
        (
            {"deepspeed_moe_layer_cls_names": "A"},
            "deepspeed_moe_layer_cls_names of accelerate.yaml is A, which is ref",
        ),
        (
            {"zero_stages": 2},
            (
                "unknown key deepspeed_config.zero_stages in accelerate.yaml (did you mean "
                "zero_stage?)"
            ),
        ),
    ],
)
def test_unsupported_deepspeed_values_are_refused_by_name(
    files: Files, changes: dict[str, Any], sentence: str
) -> None:
    assert sentence in files.refusal(zero(**changes))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            {"launch__distributed": "zero3"},
            "zero_stage of accelerate.yaml is 2, which is launch.distributed zero2, but",
        ),
        (
            {"launch__nproc_per_node": 4},
            "num_processes of accelerate.yaml is 2 but launch.nproc_per_node is 4",
        ),
        (
            {"train__precision": "bf16"},
            "mixed_precision of accelerate.yaml is fp16 but train.precision is bf16",
        ),
        (
            {"train__gradient_accumulation_steps": 1},
            "gradient_accumulation_steps of accelerate.yaml is 2 but train.grad",
        ),
        (
            {"optim__clip_grad": 1.0},
            "gradient_clipping of accelerate.yaml is 0.5 but optim.clip_grad is 1.0",
        ),
        (
            {"launch__nnodes": 2, "launch__hostfile": "hosts"},
            "num_machines of accelerate.yaml is 1 but launch.nnodes is 2",
        ),
    ],
)
def test_contradicted_values_are_refused_with_both_sides(
    files: Files, overrides: dict[str, Any], sentence: str
) -> None:
    message = files.refusal(QUESTIONNAIRE, **overrides)
    assert sentence in message
    assert message.startswith("small.yaml: ")
    assert ": change one of them, or remove " in message


def test_equal_values_on_both_sides_are_accepted(files: Files) -> None:
    config = files.load(
        QUESTIONNAIRE, launch__distributed="zero2", train__precision="fp16", optim__clip_grad=0.5
    )
    assert config == files.load(QUESTIONNAIRE)


def test_auto_takes_the_value_of_the_file(files: Files) -> None:
    config = files.load(
        QUESTIONNAIRE, launch__nproc_per_node="auto", train__precision="auto", launch__nnodes=None
    )
    assert (config.launch.nproc_per_node, config.train.precision, config.launch.nnodes) == (
        2,
        "fp16",
        1,
    )


def test_use_cpu_is_refused_if_the_configuration_forbids_it(files: Files) -> None:
    sentence = "use_cpu of accelerate.yaml is true but launch.allow_cpu is false"
    assert sentence in files.refusal(ON_CPU, launch__allow_cpu=False)


def test_every_key_that_accelerate_knows_is_in_a_table() -> None:
    known = accelerate_yaml.cluster_defaults()
    tables = {*accelerate_yaml.HONOURED, *accelerate_yaml.WITHOUT_EFFECT, *accelerate_yaml.REFUSED}
    assert len(known) > 20
    assert set(known) - tables == set()
    assert tables - set(known) == {"fp16", "dynamo_backend", "ipex_config"}  # of older versions


def test_every_key_of_accelerates_deepspeed_block_is_in_a_table() -> None:
    from accelerate.commands.config import cluster

    source = Path(cluster.__file__).read_text(encoding="utf-8")
    keys_read = set(re.findall(r'deepspeed_config\["(\w+)"\]', source))
    tables = {
        *accelerate_yaml.DEEPSPEED_HONOURED,
        *accelerate_yaml.DEEPSPEED_WITHOUT_EFFECT,
        *accelerate_yaml.DEEPSPEED_REFUSED,
    }
    assert len(keys_read) > 10
    assert keys_read == tables


def test_a_key_of_a_newer_accelerate_is_refused_unless_it_has_its_default(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = accelerate_yaml.cluster_defaults() | {"tomorrow": 3}
    monkeypatch.setattr(accelerate_yaml, "cluster_defaults", lambda: known)
    assert files.load(QUESTIONNAIRE | {"tomorrow": 3}).launch.distributed == "zero2"
    message = files.refusal(QUESTIONNAIRE | {"tomorrow": 4})
    assert "tomorrow of accelerate.yaml is 4, which is refused: nothing here uses it" in message


def test_a_yaml_is_refused_if_accelerate_is_not_installed(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = files.refusal(QUESTIONNAIRE)
    assert "accelerate.yaml is Accelerate's YAML, which Accelerate itself checks" in message
    assert message.endswith("pip install megacore[finetune]")


FSDP: dict[str, Any] = {
    "fsdp_activation_checkpointing": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_offload_params": "false",
    "fsdp_reshard_after_forward": True,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
    "fsdp_version": 2,
}
"""The block fsdp_config as the questionnaire writes it."""


def test_an_fsdp_block_is_read_by_accelerates_definition() -> None:
    claims = {claim.field: claim.value for claim in accelerate_yaml.read_fsdp(FSDP, "file")}
    assert claims == {f"fsdp_config.{key}": value for key, value in FSDP.items()} | {
        "fsdp_config.fsdp_offload_params": False
    }
    old = {"sharding_strategy": "full_shard", "min_num_params": "2000", "version": "1"}
    claims = {claim.field: claim.value for claim in accelerate_yaml.read_fsdp(old, "file")}
    assert claims == {
        "fsdp_config.fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_config.fsdp_min_num_params": 2000,
        "fsdp_config.fsdp_version": 1,
    }


@pytest.mark.parametrize(
    ("block", "sentence"),
    [
        (3, "fsdp_config of accelerate.yaml is 3: give a mapping"),
        (
            {"fsdp_offload_parms": True},
            (
                "unknown key fsdp_config.fsdp_offload_parms in accelerate.yaml (did you mean "
                "fsdp_offload_params?)"
            ),
        ),
        ({"fsdp_version": 3}, "fsdp_config.fsdp_version of accelerate.yaml is 3: give 1 or 2"),
        (
            {"fsdp_offload_params": 7},
            "fsdp_offload_params of accelerate.yaml is 7: give true or false",
        ),
        (
            {"fsdp_min_num_params": "x"},
            "fsdp_min_num_params of accelerate.yaml is x: give an integer",
        ),
        (
            {"fsdp_sharding_strategy": "ALL"},
            "is ALL: give one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD",
        ),
        ({"fsdp_reshard_after_forward": "ALL"}, "is ALL: give one of FULL_SHARD, SHARD_GRAD_OP"),
        (
            {"fsdp_transformer_layer_cls_to_wrap": 4},
            "cls_to_wrap of accelerate.yaml is 4: give text",
        ),
        (
            {"fsdp_sharding_strategy": "HYBRID_SHARD"},
            "is HYBRID_SHARD, which is refused: use FULL_SHARD or SHARD_GRAD_OP",
        ),
        (
            {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000},
            "is SIZE_BASED_WRAP, which is refused: torch's FSDP 2 cannot wrap a list of layers",
        ),
        (
            {"fsdp_activation_checkpointing_offload": True},
            "fsdp_activation_checkpointing_offload of accelerate.yaml is true, which is refused",
        ),
    ],
)
def test_an_impossible_fsdp_block_is_refused_by_name(
    files: Files, block: Any, sentence: str
) -> None:
    assert sentence in files.refusal(
        QUESTIONNAIRE | {"distributed_type": "FSDP", "deepspeed_config": {}, "fsdp_config": block}
    )


def test_an_fsdp_block_sets_distribution_and_recomputation(files: Files) -> None:
    accelerate = QUESTIONNAIRE | {"distributed_type": "FSDP", "deepspeed_config": {}}
    task = {"kind": "classification", "sentence1_column": "a"}
    for block, recomputes in (
        (FSDP, False),
        (FSDP | {"fsdp_activation_checkpointing": True}, True),
    ):
        config = files.load(accelerate | {"fsdp_config": block}, task=task)
        assert config.launch.distributed == "fsdp"
        assert config.train.gradient_checkpointing is recomputes


def test_fsdp_settings_are_translated_for_the_trainer() -> None:
    assert accelerate_yaml.fsdp_settings(FSDP, "file") == {
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_offload": False,
        "reshard_after_forward": True,
        "transformer_layer_cls_to_wrap": ["BertLayer"],
    }
    for strategy, reshards in {"full_shard": True, "SHARD_GRAD_OP": False}.items():
        old = {"fsdp_version": 1, "fsdp_sharding_strategy": strategy}
        assert accelerate_yaml.fsdp_settings(old, "file") == {"reshard_after_forward": reshards}


def test_an_fsdp_block_with_another_distributed_type_is_refused(files: Files) -> None:
    sentence = "fsdp_config of accelerate.yaml is given but distributed_type is DEEPSPEED"
    assert sentence in files.refusal(QUESTIONNAIRE | {"fsdp_config": FSDP})


@pytest.mark.parametrize("off", [None, False, {}])
def test_an_empty_fsdp_block_is_ignored(files: Files, off: Any) -> None:
    assert files.load(QUESTIONNAIRE | {"fsdp_config": off}).launch.distributed == "zero2"
