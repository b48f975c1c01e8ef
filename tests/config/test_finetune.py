"""Configuration of a fine-tuning: defaults, error messages and checks across sections."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megacore.config import load_config, load_finetune_config
from megacore.config.load import parse_finetune_config
from megacore.errors import ConfigError
from tests.config._finetune import Files, minimal, reread

ROOT = Path(__file__).resolve().parents[2]
CONF_DIR = ROOT / "conf"
CONFS = sorted(path.stem for path in (CONF_DIR / "finetune").glob("*.yaml"))
PAIRS = {"kind": "classification", "sentence1_column": "a", "sentence2_column": "b"}
TEXTS = {"kind": "seq2seq", "source_column": "a", "target_column": "b"}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_defaults_are_resolved(files: Files) -> None:
    config = files.load()
    assert (config.launch.distributed, config.launch.nproc_per_node, config.seed) == (
        "ddp",
        "auto",
        42,
    )
    assert config.tracking.experiment == "finetune"
    assert config.registered_model == "small"
    assert reread(config) == config


@pytest.mark.parametrize("conf", CONFS)
def test_every_conf_loads_and_survives_a_round_trip(
    conf: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # named files are found from any directory
    config = load_finetune_config(conf, conf_dir=CONF_DIR / "finetune")
    assert reread(config) == config
    assert not isinstance(config.launch.deepspeed_config, str)


def test_race_reads_its_test_split() -> None:
    race = load_finetune_config("race", conf_dir=CONF_DIR / "finetune")
    assert race.data.source.test == "test"


def test_confs_have_the_tutorials_settings() -> None:
    mrpc, seq2seq, gpt2 = (
        load_finetune_config(name, conf_dir=CONF_DIR / "finetune")
        for name in ("mrpc", "seq2seq", "gpt2-xl")
    )
    assert mrpc.launch.distributed == "zero2"
    assert (mrpc.train.precision, mrpc.train.micro_batch_size, mrpc.train.num_epochs) == (
        "fp16",
        40,
        3,
    )
    assert (mrpc.optim.lr, mrpc.task.max_length, mrpc.task.glue) == (2e-5, 128, "mrpc")  # type: ignore[union-attr]
    assert (seq2seq.launch.distributed, seq2seq.train.precision, seq2seq.seed) == (
        "zero2",
        "fp16",
        25,
    )
    assert (seq2seq.train.micro_batch_size, seq2seq.train.eval_batch_size) == (200, 100)
    assert (seq2seq.optim.lr, seq2seq.optim.warmup_steps, seq2seq.optim.lr_scheduler) == (
        1e-6,
        100,
        "linear",
    )
    task = seq2seq.task.model_dump()
    assert {
        name: task[name]
        for name in ("max_source_length", "max_target_length", "min_target_length", "num_beams")
    } == {
        "max_source_length": 128,
        "max_target_length": 64,
        "min_target_length": 20,
        "num_beams": 10,
    }
    assert (gpt2.launch.distributed, gpt2.train.micro_batch_size, gpt2.train.eval_batch_size) == (
        "zero3-offload",
        16,
        1,
    )
    assert (gpt2.optim.lr, gpt2.task.block_size, gpt2.train.num_epochs) == (5e-4, 128, 1)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"train.lr": 1}, "unknown key train.lr (did you mean optim.lr?)"),
        ({"train.num_epoch": 1}, "unknown key train.num_epoch (did you mean num_epochs?)"),
        ({"distributed": "zero2"}, "unknown key distributed (did you mean launch.distributed?)"),
        ({"task.blocksize": 8}, "unknown key task.blocksize (did you mean block_size?)"),
        (
            {"task.num_beams": 4},
            (
                "unknown key task.num_beams (it belongs to task.kind seq2seq, and task.kind is "
                "causal_lm)"
            ),
        ),
        (
            {"data.source.dataset": "glue"},
            (
                "unknown key data.source.dataset (it belongs to data.source.kind hub, and "
                "data.source.kind is files)"
            ),
        ),
        ({"data.source.trian": ["a"]}, "unknown key data.source.trian (did you mean train?)"),
        ({"data.workers": 0}, "data.workers is 0: give an integer above 0 or auto"),
        ({"data.workers": "all"}, "data.workers is 'all': give an integer above 0 or auto"),
        ({"task.kind": "translation"}, "'translation'"),
        ({"task.block_size": 1}, "task.block_size is 1"),
        ({"data.source.kind": "hub"}, "data.source.dataset is missing: give it a value"),
        ({"launch.distributed": "zero1"}, "launch.distributed is 'zero1'"),
        (
            {"launch.nproc_per_node": [1]},
            "launch.nproc_per_node is [1]: give an integer above 0 or auto",
        ),
        (
            {"launch.nnodes": [1]},
            "launch.nnodes is [1]: give a number of machines, such as 2, or a range",
        ),
        (
            {"launch.nproc_per_node": 0},
            "launch.nproc_per_node is 0: give the ranks of a host, at least 1 and at most 4,096",
        ),
        (
            {"launch.accelerate_config": 3},
            "launch.accelerate_config is 3: give a path, or the content of Accelerate's",
        ),
        (
            {"launch.deepspeed_config": [3]},
            "launch.deepspeed_config is [3]: give a path, or the content of DeepSpeed's",
        ),
        ({"launch": 3}, "launch is 3: give a mapping of its fields"),
        ({"optim": None}, "optim is None: give a mapping of its fields"),
    ],
)
def test_wrong_keys_and_values_are_named(
    files: Files, overrides: dict[str, Any], sentence: str
) -> None:
    assert sentence in files.refusal(
        **{name.replace(".", "__"): value for name, value in overrides.items()}
    )


def test_a_path_may_begin_with_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    overrides = {
        "data.source.dataset": "~/parquet",
        "launch": {"hostfile": "~/hosts"},
        "model.path": "~/model",
        "task.source_prefix": "~/a",
    }
    config = load_finetune_config("seq2seq", overrides)
    assert config.model.path == f"{tmp_path}/model"
    assert getattr(config.data.source, "dataset", None) == f"{tmp_path}/parquet"
    assert config.launch.hostfile == f"{tmp_path}/hosts"
    assert getattr(config.task, "source_prefix", None) == "~/a"


def test_a_wrong_list_element_is_reported_once(files: Files) -> None:
    message = files.refusal(task={**PAIRS, "metrics": ["accuracyy"]})
    assert "task.metrics[0] is 'accuracyy'" in message
    assert "at least" not in message, "the list is as long as it must be"
    assert "task.metrics is []" in files.refusal(task={**PAIRS, "metrics": []})


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            {"optim.lr_scheduler": "constant", "optim.warmup_steps": 5},
            "optim.warmup_steps is 5 but optim.lr_scheduler is constant",
        ),
        (
            {"optim.warmup_steps": 5, "train.max_steps": 5},
            "warmup_steps 5 does not end before train.max_steps 5",
        ),
        ({"tracking.tensorboard": True}, "tracking.tensorboard is true"),
        ({"launch.hostfile": "hosts", "launch.nnodes": "1:2"}, "launch.nnodes is 1:2, a range"),
        (
            {"launch.hostfile": "hosts", "launch.data_placement": "node_local"},
            "launch.data_placement is node_local",
        ),
        (
            {"data.max_test_samples": 3},
            "data.max_test_samples is 3 but data.source.test names no test split",
        ),
        (
            {"model.path": "models:/a@candidate", "model.revision": "x"},
            "model.revision is x but model.path is models:/a@candidate",
        ),
        ({"model.new_head": True}, "model.new_head is true but task.kind is causal_lm"),
        (
            {"model.new_head": True, "model.random_weights": True},
            "model.new_head and model.random_weights are both",
        ),
        (
            {"model.path": "models:/small/3"},
            "would be registered as small, the name of model.path models:/small/3",
        ),
        ({"model.pad_token": "<pad>"}, "model.pad_token is <pad> but task.kind is causal_lm"),
        ({"train.best_metric": "bleu"}, "train.best_metric is 'bleu'"),
        ({"task": PAIRS | {"regression": True, "metrics": ["f1"]}}, "task.metrics has f1"),
        ({"task": PAIRS | {"metrics": ["pearson"]}}, "task.metrics has pearson"),
        ({"task": PAIRS | {"metrics": ["f1", "f1"]}}, "task.metrics names f1 2 times"),
        ({"task": PAIRS | {"labels": ["yes", "yes"]}}, "task.labels names yes 2 times"),
        (
            {"task": PAIRS | {"glue": "mnli", "labels": ["yes", "no"]}},
            "task.labels names 2 classes (yes, no)",
        ),
        ({"task": PAIRS, "train.best_metric": "pearson"}, "train.best_metric is 'pearson'"),
        (
            {"task": TEXTS | {"sentence_splitter": "punkt"}},
            "task.sentence_splitter is punkt but task.metrics bleu",
        ),
        (
            {"task": TEXTS, "launch.distributed": "fsdp"},
            "launch.distributed is fsdp and task.kind seq2seq",
        ),
        ({"task": TEXTS, "train.best_metric": "rouge1"}, "train.best_metric is 'rouge1'"),
    ],
)
def test_contradicting_sections_are_refused_with_both_sides(
    files: Files, overrides: dict[str, Any], sentence: str
) -> None:
    message = files.refusal(**{name.replace(".", "__"): value for name, value in overrides.items()})
    assert sentence in message
    assert message.startswith("small.yaml: ")


@pytest.mark.parametrize(
    "overrides",
    [
        {
            "optim.lr_scheduler": "constant_with_warmup",
            "optim.warmup_steps": 5,
            "train.max_steps": 6,
        },
        {
            "task": PAIRS | {"regression": True, "metrics": ["pearson"]},
            "train.best_metric": "pearson",
        },
        {"task": {"kind": "classification", "glue": "stsb"}, "train.best_metric": "spearmanr"},
        {"task": TEXTS | {"sentence_splitter": "punkt", "metrics": ["rougeLsum"]}},
        {"train.best_metric": "loss"},
        {"model.path": "models:/other@candidate"},
    ],
)
def test_combinations_near_a_contradiction_are_accepted(
    files: Files, overrides: dict[str, Any]
) -> None:
    config = files.load(**{name.replace(".", "__"): value for name, value in overrides.items()})
    assert reread(config) == config


@pytest.mark.parametrize("name", ["accelerate_config", "deepspeed_config"])
def test_an_unread_path_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"launch.{name} is the path 'x', which was not read"):
        parse_finetune_config(minimal() | {"launch": {name: "x"}}, origin="test")


@pytest.mark.parametrize("name", ["accelerate_config", "deepspeed_config"])
def test_a_missing_file_is_refused_with_the_searched_paths(files: Files, name: str) -> None:
    message = files.refusal(**{f"launch__{name}": "nope"})
    assert f"launch.{name} is 'nope': there is no file nope or " in message


@pytest.mark.parametrize(
    ("content", "sentence"), [("a: [", "cannot be read as YAML"), ("- a\n", "holds list, not a")]
)
def test_a_malformed_accelerate_yaml_is_refused(files: Files, content: str, sentence: str) -> None:
    (files.directory / "accelerate.yaml").write_text(content)
    assert sentence in files.refusal(launch__accelerate_config="accelerate.yaml")


def test_a_malformed_deepspeed_json_is_refused(files: Files) -> None:
    (files.directory / "ds.json").write_text("{,}")
    assert "launch.deepspeed_config ds.json is not JSON" in files.refusal(
        launch__deepspeed_config="ds.json"
    )


def test_a_name_of_the_other_flow_is_refused_with_that_flow() -> None:
    with pytest.raises(
        ConfigError,
        match=r"no configuration named 'mrpc'.*finetune/mrpc.yaml is one of the flow finet",
    ):
        load_config("mrpc", conf_dir=CONF_DIR)
    with pytest.raises(
        ConfigError,
        match=r"no configuration named 'gpt2-345m'.*conf/gpt2-345m.yaml is one of the flow p",
    ):
        load_finetune_config("gpt2-345m", conf_dir=CONF_DIR / "finetune")


def test_an_unknown_name_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"no configuration named 'mrcp'.*did you mean mrpc\?"):
        load_finetune_config("mrcp", conf_dir=CONF_DIR / "finetune")


def test_a_file_of_the_other_flow_is_refused() -> None:
    pretraining, fine_tuning = CONF_DIR / "bert-tiny.yaml", CONF_DIR / "finetune" / "bert-tiny.yaml"
    with pytest.raises(
        ConfigError,
        match=re.escape(f"{fine_tuning} has task, a value of the flow finetune, not of pre"),
    ):
        load_config(str(fine_tuning))
    with pytest.raises(
        ConfigError,
        match=re.escape(f"{pretraining} has model.num_layers, a value of the flow pretrain"),
    ):
        load_finetune_config(str(pretraining))


def test_registered_names_of_models_are_unique() -> None:
    pretrained_names = {
        yaml.safe_load(path.read_text())["name"] for path in CONF_DIR.glob("*.yaml")
    }
    names = [
        load_finetune_config(conf, conf_dir=CONF_DIR / "finetune").registered_model
        for conf in CONFS
    ]
    assert len(set(names)) == len(names)
    assert not pretrained_names & set(names)
