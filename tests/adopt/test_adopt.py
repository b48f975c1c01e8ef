"""Files of other programs become configurations that say where each value comes from."""

import contextlib
from pathlib import Path

import pytest
import yaml

from megacore.adopt.adopt import adopt
from megacore.adopt.megatron_flags import MEGATRON
from megacore.adopt.neox_keys import NEOX
from megacore.adopt.read import BOOLEANS
from megacore.adopt.rules import names
from megacore.config import RunConfig
from megacore.errors import ConfigError
from tests.adopt._samples import (
    BERT,
    FILES,
    GPT,
    NANOTRON,
    NEOX_MODEL,
    NEOX_PATHS,
    adopted,
    config_of,
    gpt,
    refusals,
)
from tests.adopt._samples import MEGATRON as SCRIPT

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", FILES)
def test_samples_become_the_golden_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(FILES[name])
    paths = [path]
    if name == "neox.yml":
        paths.append(tmp_path / "paths.yml")
        paths[1].write_text(NEOX_PATHS)
    result = adopt(paths)
    assert result.outcome == "adopted"
    assert result.text == (GOLDEN / f"{path.stem}.yaml").read_text()
    assert config_of(tmp_path, result).model.num_layers > 0
    assert result.comparison is not None
    assert result.comparison.agrees


@pytest.mark.parametrize("name", FILES)
def test_each_value_names_its_origin_and_no_setting_is_dropped(tmp_path: Path, name: str) -> None:
    more = (NEOX_PATHS,) if name == "neox.yml" else ()
    result = adopted(tmp_path, name, FILES[name], *more, partial=True)
    values = [line for line in result.text.splitlines() if not line.startswith("#")]
    leaves = [line for line in values if line.strip() and not line.rstrip().endswith(":")]
    assert all("  # " in line for line in leaves)
    assert result.settings is not None
    for setting in result.settings:
        assert names(result.text, setting.name), f"{setting} is nowhere"


def test_unknown_and_absent_flags_are_refused_by_name_with_place_and_nearest(
    tmp_path: Path,
) -> None:
    result = gpt(tmp_path, "\\\n --num-layerz 3 --num-experts 8 \\\n --fp8-format hybrid --bf16")
    assert result.outcome == "refused"
    assert result.text == ""
    assert refusals(result) == [
        "--num-layerz 3 (gpt.sh:2): unknown here; nearest: did you mean --num-layers",
        "--num-experts 8 (gpt.sh:2): mixture of experts; nearest: a dense model: leave out the "
        "flags of experts",
        "--fp8-format hybrid (gpt.sh:3): fp8; nearest: train.precision bf16",
    ]


def test_partial_writes_the_rest_with_the_refused_flags_at_the_top(tmp_path: Path) -> None:
    result = gpt(tmp_path, "--num-experts 8 --bf16", partial=True)
    assert result.outcome == "refused"
    assert "#   --num-experts 8 (gpt.sh:1): mixture of experts" in result.text
    assert config_of(tmp_path, result).train.precision == "bf16"


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("a.sh", "python tools/preprocess_data.py --input x", "data preparation"),
        ("a.sh", "python tools/run_text_generation_server.py --load x", "generation or inference"),
        ("a.sh", "python tasks/main.py --task RACE", "fine-tuning"),
        ("a.sh", "python pretrain_vlm.py --num-layers 2", "multimodal"),
        ("a.sh", "echo hello", "starts no Python program"),
        ("a.yaml", "foo: 1\n", "settings of none of"),
        ("olmo.yaml", "model: {}\noptimizer: {name: adamw, lr: 1}\n", "settings of none of"),
        ("lora.yaml", "base_model: a\noptimizer: adamw\nbf16: true\n", "settings of none of"),
        ("a.toml", "[model]\nname = 'a'\n", "settings of none of"),
        (
            "clm.sh",
            "torchrun run_clm.py --lr 1\n",
            "it starts run_clm.py, which is no pretrain_gpt.py",
        ),
        ("a.yml", "data_path: x\nvocab_file: y\n", "a part of a GPT-NeoX configuration"),
    ],
)
def test_what_trains_no_language_model_is_named(
    tmp_path: Path, name: str, text: str, what: str
) -> None:
    result = adopted(tmp_path, name, text)
    assert result.outcome == "other"
    assert what in result.other


@pytest.mark.parametrize("value", ["x", "{a: 1}", "[2]", "1.0e+400", "-3"])
@pytest.mark.parametrize("key", ['"hidden-size": 768', '"num-layers": 12'])
def test_sizes_of_the_wrong_kind_are_one_sentence(tmp_path: Path, key: str, value: str) -> None:
    text = NEOX_MODEL.replace(key, f"{key.partition(':')[0]}: {value}")
    with contextlib.suppress(ConfigError):
        assert adopted(tmp_path, "a.yml", text, NEOX_PATHS).outcome == "refused"


def test_null_requests_nothing(tmp_path: Path) -> None:
    text = NANOTRON.replace("num_key_value_heads: 4", "num_key_value_heads: null")
    result = adopted(tmp_path, "a.yaml", text)
    assert config_of(tmp_path, result).model.query_groups == 8
    text = NEOX_MODEL.replace('"seq-length": 2048', '"seq-length": 2048, "z-loss": null')
    result = adopted(tmp_path, "a.yml", text, NEOX_PATHS)
    assert config_of(tmp_path, result).train.z_loss == 0
    assert "#   z_loss: None (a.yml:5): it requests nothing" in result.text


def test_sizes_that_no_key_says_are_missing(tmp_path: Path) -> None:
    result = adopted(tmp_path, "a.yaml", NANOTRON.replace("    hidden_size: 512\n", ""))
    assert result.draft is not None
    assert (result.outcome, result.text) == ("incomplete", "")
    assert [name for _, name in result.draft.missing] == ["model.hidden_size"]
    result = adopted(tmp_path, "a.yml", NEOX_MODEL.replace('"hidden-size": 768,', ""), NEOX_PATHS)
    assert result.draft is not None
    assert [name for _, name in result.draft.missing] == ["model.hidden_size"]
    text = NEOX_MODEL.replace("max-position-embeddings", "max_position_embeddings")
    text = text.replace('"max_position_embeddings": 2048', '"max_position_embeddings": null')
    result = adopted(tmp_path, "a.yml", text, NEOX_PATHS)
    assert result.draft is not None
    assert [name for _, name in result.draft.missing] == ["model.max_position_embeddings"]


def test_flags_that_wait_for_a_missing_value_are_in_the_remarks(tmp_path: Path) -> None:
    text = GPT.replace("--global-batch-size 16", "--global-batch-size $GBS")
    result = adopted(tmp_path, "gpt.sh", text + "--lr-warmup-iters 5 --bf16")
    assert result.outcome == "incomplete"
    assert result.draft is not None
    assert result.settings is not None
    for flag in ("--train-iters 100", "--lr-warmup-iters 5"):
        (remark,) = [each for each in result.draft.remarks if flag in each]
        assert remark.endswith("once the missing values are given")


def test_files_of_several_programs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two scripts"):
        adopted(tmp_path, "a.sh", GPT, GPT)
    with pytest.raises(ConfigError, match="belong to nanotron, neox"):
        adopted(tmp_path, "a.yaml", NANOTRON, NEOX_MODEL)


@pytest.mark.parametrize(
    ("name", "text", "program", "sentence"),
    [
        ("a.yaml", NANOTRON, "megatron", "settings are in a shell script, and there is none"),
        ("a.sh", GPT, "deepspeed", "settings are in YAML or JSON files"),
    ],
)
def test_a_program_of_other_files_is_refused(
    tmp_path: Path, name: str, text: str, program: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=f"--program is {program}, whose {sentence}: give its"):
        adopted(tmp_path, name, text, program=program)


@pytest.mark.parametrize(
    ("flag", "contents", "problem"),
    [
        ("", ["{}"], "a0.json belongs to no flag of .*, which has no --deepspeed_config"),
        ("--deepspeed_config a.json", ["[1]"], "a0.json holds no settings, and --deepspeed_config"),
        ("--deepspeed_config a.json", ["{}", "{}"], "a0.json and .*a1.json are two files for one"),
    ],
)
def test_a_file_that_a_script_does_not_read_is_refused(
    tmp_path: Path, flag: str, contents: list[str], problem: str
) -> None:
    paths = [tmp_path / "gpt.sh", *(tmp_path / f"a{n}.json" for n in range(len(contents)))]
    for path, text in zip(paths, [GPT + flag, *contents], strict=True):
        path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        adopt(paths)


def test_a_binary_file_is_no_script(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_bytes(b"\x1b[2J\0python pretrain_gpt.py")
    with pytest.raises(ConfigError, match=r"it is no text: give another file$"):
        adopt([tmp_path / "a.sh"])


def test_a_fragment_of_flags_is_adopted_with_questions(tmp_path: Path) -> None:
    flags = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --bf16 --swiglu"
    )
    result = adopted(tmp_path, "model.sh", f'MODEL_ARGS=" \\\n {flags} \\\n"\n')
    assert result.outcome == "adopted"
    names = [name for name, _ in result.draft.questions]  # type: ignore[union-attr]
    assert {"train.train_iters", "train.global_batch_size", "data.source.prefix"} <= set(names)


def test_the_count_of_parameters_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megacore.models.parameters.parameter_count", lambda spec: 7)
    result = gpt(tmp_path, "")
    assert result.outcome == "refused"
    assert "7 by ours" in refusals(result)[0]


def test_tables_name_fields_that_exist(tmp_path: Path) -> None:
    fields: set[str] = set()

    def walk(prefix: str, section: object) -> None:
        for name, info in section.model_fields.items():  # type: ignore[attr-defined]
            inner = [info.annotation, *getattr(info.annotation, "__args__", ())]
            fields.add(f"{prefix}{name}")
            for kind in inner:
                if hasattr(kind, "model_fields"):
                    walk(f"{prefix}{name}.", kind)

    walk("", RunConfig)
    for rules in (MEGATRON, NEOX):
        for name, rule in rules.exact.items():
            field = getattr(rule, "field", None)
            assert field is None or field in fields, f"{name} -> {field}"
    assert {name for name in BOOLEANS if MEGATRON.rule(name) is None} == set()


def test_yaml_values_survive_the_comments(tmp_path: Path) -> None:
    result = adopted(tmp_path, "megatron.sh", SCRIPT)
    assert yaml.safe_load(result.text)["optim"]["min_lr"] == 3e-5
    assert adopted(tmp_path, "bert.sh", BERT).outcome == "adopted"
