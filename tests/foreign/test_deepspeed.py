"""Reading a user's DeepSpeed JSON: its file, its keys and its values."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megacore.config.deepspeed import FIELDS, ZeroSettings, user_settings_of, zero_of
from megacore.config.load import load_config, read_config
from megacore.errors import ConfigError
from megacore.foreign.deepspeed import read_keys
from megacore.foreign.deepspeed_keys import REFUSED, definitions
from megacore.foreign.files import read_settings_json
from tests._limits import HANG
from tests.config._deepspeed import PUBLIC, asking, nested, public, refusal

ROOT = Path(__file__).resolve().parents[2]
DEFINITIONS = definitions()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"fp16": {}', "is not JSON (Expecting ',' delimiter"),
        ('{"fp16": {"enabled": true, "enabled": false}}', "the key enabled is given twice"),
        ('{"gradient_clipping": NaN}', "NaN is no number"),
        ('{"gradient_clipping": -Infinity}', "-Infinity is no number"),
        ('{"train_batch_size": 8, // of all ranks\n}', "JSON has no comments"),
        ("[1, 2]", "holds [1, 2]: give an object"),
        ("\udcff", "is not JSON"),
    ],
)
def test_a_damaged_file_is_refused_with_its_problem(
    tmp_path: Path, content: str, problem: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        read_settings_json(path)
    assert str(caught.value).startswith(f"deepspeed.config {path} ")
    assert problem in str(caught.value)


def test_loading_the_yaml_replaces_the_path_with_the_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = {
        "engine": "deepspeed",
        "deepspeed.config": "conf/ds/zero2.json",
        "train.precision": "fp32",
    }
    config = load_config("gpt2-tiny", overrides, conf_dir=ROOT / "conf")
    assert config.deepspeed.config == json.loads(
        (ROOT / "conf/ds/zero2.json").read_text(encoding="utf-8")
    )
    (tmp_path / "job.json").write_text(config.model_dump_json(), encoding="utf-8")
    assert read_config(tmp_path / "job.json") == config
    (tmp_path / "conf" / "ds").mkdir(parents=True)
    (tmp_path / "conf" / "ds" / "zero2.json").write_text(
        '{"zero_optimization": {"stage": 1}}', encoding="utf-8"
    )
    assert load_config("gpt2-tiny", overrides, conf_dir=ROOT / "conf").deepspeed.config == nested(
        "zero_optimization.stage", 1
    )


def test_a_path_may_be_relative_to_the_yaml(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"steps_per_print": 5}', encoding="utf-8")
    text = (ROOT / "conf" / "gpt2-tiny.yaml").read_text(encoding="utf-8")
    (tmp_path / "run.yaml").write_text(
        f"{text}\nengine: deepspeed\ndeepspeed: {{config: mine.json}}\n", "utf-8"
    )
    assert load_config(str(tmp_path / "run.yaml")).deepspeed.config == {"steps_per_print": 5}
    with pytest.raises(
        ConfigError, match=r"deepspeed.config is 'none.json': there is no file none.json or .*"
    ):
        load_config(str(tmp_path / "run.yaml"), {"deepspeed.config": "none.json"})
    assert (
        load_config(str(tmp_path / "run.yaml"), {"engine": "native"}).deepspeed.config
        == "mine.json"
    )


def test_an_unread_path_is_refused() -> None:
    assert "deepspeed.config is the path 'ds.json', which was not read" in refusal("ds.json")
    assert asking("ds.json", engine="native").deepspeed.config == "ds.json"


def test_a_value_that_is_neither_path_nor_object_is_refused() -> None:
    assert "deepspeed.config is [1]: give a path, or the content of DeepSpeed's JSON" in refusal(
        [1]
    )


@pytest.mark.parametrize("name", PUBLIC)
def test_public_files_are_accepted_with_a_configuration_that_agrees(name: str) -> None:
    assert asking(public(name), **PUBLIC[name]).deepspeed.config == public(name)


@pytest.mark.parametrize("name", ["zero2", "zero3-offload"])
@pytest.mark.parametrize("precision", ["auto", "fp32", "bf16", "fp16"])
def test_shipped_files_are_accepted_with_any_configuration(name: str, precision: str) -> None:
    content = read_settings_json(ROOT / "conf" / "ds" / f"{name}.json")
    asking(content, train={"precision": precision}, optim={"adam_beta2": 0.95, "clip_grad": 0.5})


def test_zero_settings_are_read_from_the_json() -> None:
    assert zero_of(
        asking(public("accelerate-zero2"), **PUBLIC["accelerate-zero2"])
    ) == ZeroSettings(2)
    name = "accelerate-zero3-offload"
    assert zero_of(asking(public(name), **PUBLIC[name])) == ZeroSettings(3, "cpu", "cpu")
    disk = {"device": "nvme", "nvme_path": "/nvme"}
    content = {
        "zero_optimization": {
            "stage": "3",
            "offload_param": disk,
            "offload_optimizer": {"device": "none"},
        }
    }
    assert zero_of(asking(content)) == ZeroSettings(3, "none", "nvme", "/nvme")
    assert zero_of(asking({}, parallel={"data_parallel_sharding": "optimizer"})) == ZeroSettings(1)
    assert zero_of(asking(content, engine="native")) == ZeroSettings(0)


def test_zero_settings_are_read_from_the_section() -> None:
    section = {
        "zero_stage": 3,
        "offload_optimizer": "nvme",
        "offload_param": "cpu",
        "nvme_path": "/nvme",
    }
    assert zero_of(asking(deepspeed=section)) == ZeroSettings(3, "nvme", "cpu", "/nvme")
    assert zero_of(asking(parallel={"data_parallel_sharding": "optimizer"})) == ZeroSettings(1)
    assert zero_of(asking(deepspeed=section, engine="native")) == ZeroSettings(0)


@pytest.mark.parametrize(
    ("key", "written", "expected"),
    [
        ("fp16.enabled", "true", True),
        ("fp16.enabled", "False", False),
        ("zero_optimization.sub_group_size", "1e9", 10**9),
        ("zero_optimization.sub_group_size", 1e9, 10**9),
        ("zero_optimization.stage", "2", 2),
        ("gradient_clipping", "1.0", 1.0),
        ("optimizer.params.betas", ["0.9", 0.95], (0.9, 0.95)),
        ("flops_profiler.module_depth", -1, -1),
        ("zero_optimization.overlap_comm", "auto", "auto"),
    ],
)
def test_values_are_converted_to_their_types(key: str, written: Any, expected: Any) -> None:
    content = nested(key, written)
    if key.startswith("optimizer"):
        content["optimizer"]["type"] = "adam"
    value = dict(read_keys(content))[key]
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("fp16.enabled", 1, "fp16.enabled of deepspeed.config is 1: give true or false"),
        ("fp16.enabled", "yes", 'fp16.enabled of deepspeed.config is "yes": give true or false'),
        (
            "train_batch_size",
            0,
            "train_batch_size of deepspeed.config is 0: give an integer above 0",
        ),
        (
            "train_batch_size",
            2.5,
            "train_batch_size of deepspeed.config is 2.5: give an integer above 0",
        ),
        (
            "train_batch_size",
            True,
            "train_batch_size of deepspeed.config is true: give an integer above 0",
        ),
        ("zero_optimization.sub_group_size", -1, "is -1: give an integer that is not negative"),
        (
            "zero_optimization.stage",
            4,
            "zero_optimization.stage of deepspeed.config is 4: give one of 0, 1, 2, 3",
        ),
        (
            "gradient_clipping",
            "much",
            'gradient_clipping of deepspeed.config is "much": give a finite number',
        ),
        ("gradient_clipping", 1e999, "is Infinity: give a finite number"),
        ("wandb.project", 7, "wandb.project of deepspeed.config is 7: give text"),
        ("comms_logger.prof_ops", "all", 'is "all": give a list'),
        (
            "zero_optimization.offload_param",
            "cpu",
            'offload_param of deepspeed.config is "cpu": give an object',
        ),
        (
            "optimizer.type",
            "auto",
            'optimizer.type of deepspeed.config is "auto": say which, or remove it',
        ),
        ("optimizer.params.lr", 1, "optimizer.params without optimizer.type: say the type"),
        (
            "scheduler.params.warmup_num_steps",
            1,
            "scheduler.params without scheduler.type: say the type",
        ),
        (
            "scheduler",
            {"type": None, "params": {"warmup_num_steps": 1}},
            "without scheduler.type: say the type",
        ),
        (
            "optimizer.type",
            "Lamb",
            "optimizer.type of deepspeed.config is Lamb but megacore trains only with AdamW",
        ),
        (
            "scheduler.type",
            "OneCycle",
            "is OneCycle, and no optim.lr_decay_style is like it: use WarmupLR, ",
        ),
        ("scheduler.type", "LRRangeTest", "is LRRangeTest, and no optim.lr_decay_style is like it"),
        (
            "scheduler",
            {"params": {"cos_min_ratio": 0.1}, "type": "WarmupLR"},
            (
                "unknown key scheduler.params.cos_min_ratio in deepspeed.config: WarmupLR has "
                "warmup_min_lr,"
            ),
        ),
    ],
)
def test_a_value_of_another_type_is_refused(key: str, value: Any, sentence: str) -> None:
    assert sentence in refusal(nested(key, value))


def test_betas_must_be_two_numbers() -> None:
    content = {"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}
    assert (
        "optimizer.params.betas of deepspeed.config is [0.9]: give a list of two numbers"
        in refusal(content)
    )


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        (
            "zero_optimisation",
            "unknown key zero_optimisation in deepspeed.config (did you mean zero_optimization?)",
        ),
        ("zero_optimization.stages", "(did you mean zero_optimization.stage?)"),
        ("stage", "unknown key stage in deepspeed.config (did you mean zero_optimization.stage?)"),
        ("fp16.initial_scale", "(did you mean fp16.initial_scale_power?)"),
        (
            "zero_optimization.offload_optimizer.devise",
            "(did you mean zero_optimization.offload_optimizer.device?)",
        ),
        (
            "bf16.xyz",
            (
                "(known: bf16_master_weights_and_grads, bf16_optimizer_states, "
                "check_grad_overflow, enabled,"
            ),
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(key: str, hint: str) -> None:
    assert hint in refusal(nested(key, 1))


@pytest.mark.parametrize("key", REFUSED)
def test_each_refused_key_is_named_with_its_reason(key: str) -> None:
    content = nested(key, {"enabled": True} if "." not in key else 17)
    if key.startswith("optimizer.params."):
        content["optimizer"]["type"] = "AdamW"
    sentence = refusal(content)
    assert f"{key} of deepspeed.config is " in sentence
    assert f"which is refused: {REFUSED[key].reason}" in sentence


@pytest.mark.parametrize("key", REFUSED)
def test_a_refused_key_that_is_off_is_ignored(key: str) -> None:
    for value in (None, "auto", *(REFUSED[key].off or (False, "false", {"enabled": False}, {}))):
        content = nested(key, value)
        if key.startswith("optimizer.params."):
            content["optimizer"]["type"] = "AdamW"
        assert key not in user_settings_of(asking(content)).values
    if REFUSED[key].off and False not in REFUSED[key].off:
        assert f"{key} of deepspeed.config is false, which is refused" in refusal(
            {"optimizer": {"type": "AdamW", "params": {key.rsplit(".", 1)[1]: False}}}
            if key.startswith("optimizer.params.")
            else nested(key, False)
        )


@pytest.mark.parametrize("spelled", [key for key in DEFINITIONS.renamed if key != "bfloat16"])
def test_older_spellings_are_read(spelled: str) -> None:
    value = True if DEFINITIONS.keys[DEFINITIONS.renamed[spelled]].kind == "flag" else 8
    assert dict(read_keys(nested(spelled, value))) == {DEFINITIONS.renamed[spelled]: value}
    both = nested(spelled, value)
    *blocks, leaf = DEFINITIONS.renamed[spelled].split(".")
    target = both
    for block in blocks:
        target = target.setdefault(block, {})
    target[leaf] = value
    with pytest.raises(ValueError, match="which are the same: remove one"):
        dict(read_keys(both))


def test_older_blocks_and_flags_are_read() -> None:
    assert dict(read_keys({"bfloat16": {"enabled": "true"}})) == {"bf16.enabled": True}
    assert dict(read_keys({"zero_optimization": True})) == {"zero_optimization.stage": 1}
    for flag, device in DEFINITIONS.offload_flags.items():
        assert dict(read_keys(nested(flag, True))) == {device: "cpu"}
        assert dict(read_keys(nested(flag, "false"))) == {}


def test_null_values_are_ignored() -> None:
    assert (
        dict(read_keys({"steps_per_print": None, "zero_optimization": {"offload_param": None}}))
        == {}
    )


def test_auto_is_filled_from_the_section_and_the_hidden_size() -> None:
    zero = {"stage": "auto", "offload_optimizer": {"device": "auto"}, "overlap_comm": "auto"}
    sizes = (
        "reduce_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
    )
    zero |= dict.fromkeys((*sizes, "stage3_max_live_parameters"), "auto")
    section = {"config": {"zero_optimization": zero}, "zero_stage": 3, "offload_optimizer": "cpu"}
    assert user_settings_of(asking(deepspeed=section)).values == {
        "zero_optimization.stage": 3,
        "zero_optimization.offload_optimizer.device": "cpu",
        "zero_optimization.reduce_bucket_size": 32 * 32,
        "zero_optimization.stage3_prefetch_bucket_size": 921,
        "zero_optimization.stage3_param_persistence_threshold": 320,
    }
    without = user_settings_of(asking({"zero_optimization": zero}))
    assert without.values == {
        "zero_optimization.stage": 0,
        "zero_optimization.reduce_bucket_size": 1024,
    }


SECTION_VALUES: dict[str, Any] = {
    "zero_stage": 2,
    "offload_optimizer": "cpu",
    "offload_param": "cpu",
    "nvme_path": "/a",
    "pin_memory": False,
    "overlap_comm": True,
    "partition_activations": True,
    "cpu_checkpointing": True,
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_section_field_that_the_json_contradicts_is_refused(field: str) -> None:
    value = SECTION_VALUES.get(field, 8)
    json_value = {"zero_stage": 1, "pin_memory": True, "nvme_path": "/b"}.get(
        field, "none" if value == "cpu" else False
    )
    json_value = 16 if value == 8 else json_value
    section = {field: value, "config": nested(FIELDS[field][0], json_value)}
    shown, in_json = json.dumps(value), json.dumps(json_value)
    assert (
        f"deepspeed.{field} is {shown} but {FIELDS[field][0]} of deepspeed.config is {in_json}: "
        "remove one of them"
    ) in refusal(deepspeed=section)
    assert (
        f"deepspeed.{field} is {shown} but deepspeed.config takes its place and does not say"
        in refusal(deepspeed={field: value, "config": {}})
    )
    equal = {field: value, "config": nested(FIELDS[field][0], value)}
    assert (
        user_settings_of(asking(deepspeed=equal, engine="native")).values[FIELDS[field][0]] == value
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            {"fp16": {"loss_scale": -1}},
            "fp16.loss_scale of deepspeed.config is refused by DeepSpeed: fp16.loss_scale",
        ),
        (
            {"zero_optimization": {"cpu_offload": True, "stages": 1}},
            "unknown key zero_optimization.stages",
        ),
    ],
)
def test_deepspeeds_models_validate_each_block(content: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(content)


def test_a_json_is_refused_if_deepspeed_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    sentence = refusal({})
    assert "deepspeed.config is DeepSpeed's JSON, which DeepSpeed itself checks" in sentence
    assert sentence.endswith("pip install megacore[deepspeed]")
    assert asking(deepspeed={"zero_stage": 2}).deepspeed.zero_stage == 2


def run_python(script: str) -> str:
    # MLflow sets such a variable in the process that imports it and removes it in another one.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("_MLFLOW")
    }
    result = subprocess.run(
        [sys.executable, "-c", f"import os, sys; {script}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


@pytest.mark.slow
def test_deepspeed_is_imported_only_for_a_json_and_keeps_the_environment() -> None:
    load = (
        "from megacore.config import load_config; load_config('gpt2-tiny', {'engine': 'deepspeed'"
    )
    show = "print(*sorted({'torch', 'deepspeed', 'accelerate'} & set(sys.modules)))"
    assert run_python(f"{load}}}); {show}") == "\n"
    before = "before = dict(os.environ)"
    after = "assert dict(os.environ) == before; print('deepspeed' in sys.modules)"
    load_json = f"{load}, 'deepspeed.config': 'conf/ds/zero2.json', 'train.precision': 'fp32'}})"
    assert run_python(f"{before}; {load_json}; {after}") == "True\n"
