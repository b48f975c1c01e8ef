"""Loading of YAML and overrides: a frozen configuration, or an error of one line."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megacore.config import RunConfig, load_config, parse_overrides, read_config
from megacore.config.data import TextSource
from megacore.config.load import conf_path, load_finetune_config, parse_config
from megacore.config.train import KernelsConfig
from megacore.errors import ConfigError

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"


def minimal() -> dict[str, Any]:
    return {
        "name": "small",
        "data": {
            "source": {"kind": "source_tree"},
            "tokenizer": {"kind": "train-bpe"},
            "seq_length": 64,
        },
        "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4},
        "optim": {"lr": 1e-3},
        "train": {"micro_batch_size": 2, "global_batch_size": 8, "train_iters": 10},
        "checkpoint": {"save_interval": 5},
    }


@pytest.fixture
def conf(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes the minimal configuration with changes.

    Keywords are dotted keys with `__` for the dots; a value of None removes the key.
    """

    def write(**changes: Any) -> str:
        values = minimal()
        for key, value in changes.items():
            *parents, leaf = key.split("__")
            section = values
            for parent in parents:
                section = section[parent]
            if value is None:
                del section[leaf]
            else:
                section[leaf] = value
        path = tmp_path / "small.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return str(path)

    return write


def refusal(path: str, overrides: dict[str, Any] | None = None) -> str:
    """Return the message with which a configuration is refused.

    It is one line and names the file.
    """
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert message.startswith(path)
    assert "\n" not in message
    return message


def test_defaults_are_resolved(conf: Callable[..., str]) -> None:
    config = load_config(conf())
    assert config.max_position_embeddings == 64
    assert config.model.head_dim == 8
    assert config.model.ffn_size == 128
    assert config.lr_decay_iters == 10
    assert config.lr_warmup_iters == 0
    assert config.registered_model == "small"


@pytest.mark.parametrize(
    "tracking",
    [
        {"experiment": ""},
        *({"registered_model": name} for name in ("team/small", "a:b", "it's")),
    ],
)
def test_names_that_mlflow_refuses_are_refused_before_the_training(
    tracking: dict[str, str], conf: Callable[..., str]
) -> None:
    assert f"tracking.{next(iter(tracking))}" in refusal(conf(tracking=tracking))


@pytest.mark.parametrize("place", ["file", "override"])
def test_the_former_name_of_the_sharding_is_refused_with_the_new_one(
    place: str, conf: Callable[..., str]
) -> None:
    if place == "file":
        message = refusal(conf(parallel={"use_distributed_optimizer": True}))
    else:
        message = refusal(conf(), parse_overrides(["parallel.use_distributed_optimizer=true"]))
    assert message.endswith(
        "parallel.use_distributed_optimizer is called parallel.data_parallel_sharding: write "
        "optimizer there for true, and none for false"
    )


def test_configuration_is_frozen(conf: Callable[..., str]) -> None:
    config = load_config(conf())
    with pytest.raises(ValidationError):
        config.train.train_iters = 1  # type: ignore[misc]


def test_overrides_change_only_the_named_values(conf: Callable[..., str]) -> None:
    path = conf()
    config = load_config(
        path,
        {"train.train_iters": 50, "data.tokenizer.vocab_size": 512, "launch.nproc_per_node": 2},
    )
    assert config.train.train_iters == 50
    assert config.data.tokenizer.vocab_size == 512  # type: ignore[union-attr]
    assert config.launch.nproc_per_node == 2
    assert config.model == load_config(path).model


def test_an_override_may_replace_a_whole_section(conf: Callable[..., str]) -> None:
    config = load_config(
        conf(), {"data.source": {"kind": "prefix", "prefix": "corpus_text_document"}}
    )
    assert config.data.source.kind == "prefix"


def test_kernels_are_one_word_or_a_mapping(conf: Callable[..., str]) -> None:
    def kernels(**overrides: Any) -> KernelsConfig:
        named = {f"train.kernels{name}": value for name, value in overrides.items()}
        return load_config(conf(), named).train.kernels

    assert kernels().written == "auto"
    assert kernels(**{"": "plain"}).written == "plain"
    assert kernels(**{".norm": "plain"}).written == {"norm": "plain"}
    assert kernels(**{"": {"norm": "cpp", "adamw": "auto"}}).written == {"norm": "cpp"}
    mixed = kernels(**{"": "plain", ".norm": "auto"})
    assert (mixed.norm, mixed.attention, mixed.adamw) == ("auto", "plain", "plain")
    for config in (mixed, kernels()):
        assert KernelsConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            {"train.kernels.softmax": "plain"},
            "train.kernels has no operation softmax: the operations are attention, norm, "
            "activation, rope, dropout, cross_entropy, weight_gradient, adamw, sum_of_squares",
        ),
        (
            {"train.kernels.norm": "triton"},
            "train.kernels.norm is 'triton': input should be 'auto', 'apex', 'cpp' or 'plain'",
        ),
        ({"train.kernels": "fast"}, "train.kernels is 'fast': give auto, plain, or a mapping"),
        ({"train.kernels": 3}, "train.kernels is 3: give auto, plain, or a mapping"),
        (
            {"train.kernels.adamw": "cpp", "engine": "deepspeed"},
            "train.kernels.adamw is cpp, which has no effect with engine deepspeed",
        ),
    ],
)
def test_kernels_that_do_not_exist_are_refused_with_the_list(
    conf: Callable[..., str], override: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load_config(conf(), override)


def test_an_override_below_a_plain_value_is_refused(conf: Callable[..., str]) -> None:
    with pytest.raises(
        ConfigError, match=r"override 'name\.first': name holds 'small', not a section"
    ):
        load_config(conf(), {"name.first": 1})


@pytest.mark.parametrize("key", ["data__source", "data"])
def test_a_missing_source_is_named(conf: Callable[..., str], key: str) -> None:
    assert "data.source is missing: give it a value" in refusal(conf(**{key: None}))


def test_every_value_but_the_source_has_a_default(tmp_path: Path) -> None:
    path = tmp_path / "My Text_1.yaml"
    path.write_text("data: {source: {kind: text, files: [a.txt]}}\n", encoding="utf-8")
    config = load_config(str(path))
    assert config.name == "my-text-1"
    assert load_config(str(path), {"name": "other"}).name == "other"
    assert config.data.tokenizer.kind == "train-bpe"
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("overrides", "numbers", "advice"),
    [
        ({"train.global_batch_size": 9}, ("9", "2"), "use 10"),
        ({"launch.nproc_per_node": 3}, ("8", "2 x 3 data-parallel ranks = 6"), "use 12"),
        ({"launch.nproc_per_node": 0}, ("launch.nproc_per_node is 0",), "at least 1 and"),
        ({"launch.nproc_per_node": -1}, ("launch.nproc_per_node is -1",), "at least 1 and"),
        ({"train.skip_samples": ["5-2"]}, ("train.skip_samples has '5-2'",), "first and last"),
        (
            {"train.loss_spike_action": "skip", "engine": "deepspeed"},
            ("train.loss_spike_action is skip and engine is deepspeed",),
            "set train.loss_spike_action to warn or stop",
        ),
        ({"model.num_attention_heads": 5}, ("32", "5"), "choose heads that divide it"),
        ({"model.max_position_embeddings": 32}, ("64", "32"), "at least 64"),
        ({"optim.min_lr": 0.1}, ("0.1", "0.001"), "lower it"),
        (
            {"optim.lr_warmup_iters": 2, "optim.lr_warmup_fraction": 0.1},
            ("2", "0.1"),
            "keep one of them",
        ),
        ({"optim.lr_warmup_iters": 10}, ("10",), "set it below 10"),
    ],
)
def test_impossible_combinations_are_refused_with_numbers_and_advice(
    conf: Callable[..., str], overrides: dict[str, Any], numbers: tuple[str, ...], advice: str
) -> None:
    message = refusal(conf(), overrides)
    for number in numbers:
        assert number in message
    assert advice in message


@given(micro=st.integers(1, 64), ranks=st.integers(1, 16), total=st.integers(1, 2048))
def test_a_batch_is_accepted_exactly_if_the_ranks_can_share_it(
    micro: int, ranks: int, total: int
) -> None:

    values = minimal()
    values["train"] |= {"micro_batch_size": micro, "global_batch_size": total}
    values["launch"] = {"nproc_per_node": ranks}
    if total % (micro * ranks) == 0:
        assert parse_config(values, origin="x").train.global_batch_size == total
        return
    with pytest.raises(ConfigError) as caught:
        parse_config(values, origin="x")
    suggested = re.search(r": use (\d+)", str(caught.value))
    assert suggested
    assert int(suggested[1]) % (micro * ranks) == 0


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("name: [unclosed", "cannot be read as YAML"),
        ("- a\n- b\n", "holds list, not a mapping"),
        ("", "is empty: give it sections, as conf/gpt2-tiny.yaml has"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(content, encoding="utf-8")
    assert sentence in refusal(str(path))


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as YAML" in refusal(str(path))


@pytest.mark.parametrize("load", [load_config, load_finetune_config])
@pytest.mark.parametrize("name", ["a" * 300, "a" * 5000, "a/" * 3000])
def test_a_name_too_long_for_a_file_is_refused_in_short(
    load: Callable[[str], object], name: str
) -> None:
    with pytest.raises(ConfigError, match="no configuration named 'a") as caught:
        load(name)
    assert len(str(caught.value)) < 1500


def test_the_path_below_conf_of_a_configuration_of_this_flow_is_no_hint_at_the_other_flow() -> None:
    with pytest.raises(ConfigError, match=r"named 'finetune/mrpc'.*\(known: .*mrpc"):
        load_finetune_config("finetune/mrpc")


def test_an_unknown_name_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        ConfigError, match=r"no configuration named 'gpt2-tyni'.*did you mean gpt2-tiny\?"
    ):
        conf_path("gpt2-tyni", CONF_DIR)


def test_a_name_far_from_all_is_refused_with_the_known_names(tmp_path: Path) -> None:
    (tmp_path / "aaa.yaml").touch()
    with pytest.raises(ConfigError, match=r"known: aaa"):
        conf_path("zzzzzz", tmp_path)


def test_overrides_are_parsed_as_yaml() -> None:
    pairs = [
        "train.train_iters=50",
        "optim.lr=1.0e-3",
        "name=a=b",
        "tracking.tensorboard=true",
        "launch.x=null",
    ]
    assert parse_overrides(pairs) == {
        "train.train_iters": 50,
        "optim.lr": 1e-3,
        "name": "a=b",
        "tracking.tensorboard": True,
        "launch.x": None,
    }


def test_spaces_around_the_key_of_an_override_are_ignored() -> None:
    assert parse_overrides(["train.train_iters = 50", " seed=1"]) == {
        "train.train_iters": 50,
        "seed": 1,
    }


def test_a_wrong_override_is_not_blamed_on_the_file(conf: Callable[..., str]) -> None:
    path = conf(optim={"lr": -1})
    message = refusal(path, {"train.train_iter": 10, "data.source": {"kind": "text"}})
    assert "unknown key train.train_iter (did you mean train_iters?) (in an override)" in message
    assert "data.source.files is missing: give it a value (in an override)" in message
    assert "optim.lr is -1: input should be greater than 0;" in f"{message};"


def test_numbers_with_colons_are_strings(conf: Callable[..., str]) -> None:
    assert parse_overrides(["launch.nnodes=1:2", "launch.nproc_per_node=10"]) == {
        "launch.nnodes": "1:2",
        "launch.nproc_per_node": 10,
    }
    path = Path(conf())
    path.write_text(
        path.read_text() + "launch: {kind: slurm, nnodes: 2:4, slurm: {time_limit: 12:00:00}}\n"
    )
    launch = load_config(str(path)).launch
    assert (launch.node_range, launch.slurm.time_limit) == ((2, 4), "12:00:00")


@pytest.mark.parametrize(
    ("written", "expected"), [("on", "on"), ("off", "off"), ("auto", "auto"), ("'on'", "on")]
)
def test_on_and_off_stay_strings(conf: Callable[..., str], written: str, expected: str) -> None:
    assert (
        load_config(conf(), parse_overrides([f"train.compile={written}"])).train.compile == expected
    )


def test_off_stays_a_string_where_on_is_no_value(conf: Callable[..., str]) -> None:
    overrides = parse_overrides(["launch.preflight=off"])
    assert load_config(conf(), overrides).launch.preflight == "off"
    with pytest.raises(ConfigError, match="preflight is true: give a value of its type"):
        load_config(conf(), parse_overrides(["launch.preflight=on"]))


@pytest.mark.parametrize("pair", ["train.train_iters", "=5", "a=[", ""])
def test_a_malformed_override_is_refused_and_shown(pair: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(pair))):
        parse_overrides([pair])


@pytest.mark.parametrize("text", [r"a\0b", r"\ud800x"])
def test_text_that_no_file_can_hold_is_refused(conf: Callable[..., str], text: str) -> None:
    overrides = parse_overrides([f'export.sample_prompt="{text}"'])
    message = refusal(conf(), overrides)
    assert "export.sample_prompt has the character" in message
    assert message.endswith("remove it (in an override)")
    source = parse_overrides([f'data.source={{kind: text, files: ["{text}"]}}'])
    assert "data.source.files[0] has the character" in refusal(conf(), source)


def test_an_override_that_a_later_section_would_undo_is_refused(conf: Callable[..., str]) -> None:
    pairs = ["train.log_interval=3", "train={micro_batch_size: 2, global_batch_size: 8}"]
    message = "override train replaces the whole section, with train.log_interval"
    with pytest.raises(ConfigError, match=message):
        load_config(conf(), parse_overrides(pairs))
    assert load_config(conf(), parse_overrides(pairs[::-1])).train.log_interval == 3


def test_a_configuration_survives_a_round_trip(conf: Callable[..., str], tmp_path: Path) -> None:
    config = load_config(conf(), {"launch.nproc_per_node": 2, "optim.lr_warmup_fraction": 0.1})
    path = tmp_path / "run.json"
    path.write_text(config.model_dump_json(), encoding="utf-8")
    assert read_config(path) == config


@pytest.mark.parametrize("content", ["{", "[]", '{"name": "x"}'])
def test_a_damaged_run_json_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        read_config(path)


def test_a_missing_run_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "run.json"))):
        read_config(tmp_path / "run.json")


def test_the_workspace_is_a_placeholder_in_files_and_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path / "elsewhere"))
    path = tmp_path / "own.yaml"
    path.write_text('data: {source: {kind: text, files: ["${workspace}/texts/*.txt", other.txt]}}')
    overrides = {"train.pretrained_checkpoint": "${workspace}/runs/abcd/checkpoints/iter_0000010"}
    config = load_config(str(path), overrides)
    assert isinstance(config.data.source, TextSource)
    assert config.data.source.files == (f"{tmp_path}/elsewhere/texts/*.txt", "other.txt")
    assert config.train.pretrained_checkpoint == (
        f"{tmp_path}/elsewhere/runs/abcd/checkpoints/iter_0000010"
    )


def test_a_path_may_begin_with_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    path = tmp_path / "own.yaml"
    path.write_text('data: {source: {kind: text, files: ["~/texts/*.txt", "a/~/b.txt", "~x.txt"]}}')
    overrides = {
        "train.pretrained_checkpoint": "~/iter_0000010",
        "evaluate.lm_eval": {"tasks": ["a"], "include_path": "~/tasks"},
        "export.sample_prompt": "~/bin is",
        "engine": "deepspeed",
        "deepspeed.config": "~/ds.json",
    }
    config = load_config(str(path), overrides)
    assert isinstance(config.data.source, TextSource)
    assert config.data.source.files == (f"{tmp_path}/texts/*.txt", "a/~/b.txt", "~x.txt")
    assert config.train.pretrained_checkpoint == f"{tmp_path}/iter_0000010"
    assert config.evaluate.lm_eval.include_path == f"{tmp_path}/tasks"
    assert config.export.sample_prompt == "~/bin is"
    assert config.deepspeed.config is not None


def test_an_integer_with_leading_zeros_is_decimal() -> None:
    assert parse_overrides(["seed=0123", "a=-010", "b=00", "c=0x1F", "d=0b11", "e=089"]) == {
        **{"seed": 123, "a": -10, "b": 0, "c": 31, "d": 3},
        "e": "089",  # text, which a field of numbers reads as 89
    }
