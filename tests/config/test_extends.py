"""Configurations that extend others: merging, paths relative to a file, and errors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megacore.config import RunConfig, load_config, load_finetune_config
from megacore.config.hostfile import hosts_of
from megacore.errors import ConfigError
from megacore.foreign.files import read_yaml
from tests.config._finetune import minimal as finetuning
from tests.config.test_load import minimal

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes values to conf/NAME.yaml and returns that path."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, values: Any, **sections: Any) -> str:
        path = Path("conf", f"{name}.yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump({**values, **sections}), encoding="utf-8")
        return str(path)

    return write


def refusal(path: str, overrides: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_mappings_merge_and_other_values_replace(write: Write) -> None:
    write("base", minimal(), export={"sample_prompt": "x"}, family="gpt")
    path = write("other", {"extends": "base"}, optim={"min_lr": 1e-4}, train={"train_iters": 20})
    expected: dict[str, Any] = minimal() | {"name": "other", "export": {"sample_prompt": "x"}}
    expected["optim"]["min_lr"] = 1e-4
    expected["train"]["train_iters"] = 20
    assert load_config(path) == RunConfig.model_validate(expected)
    # an override replaces what the files give, mappings too
    overridden = load_config(path, {"train.train_iters": 30, "optim": {"lr": 2e-3}})
    assert (overridden.train.train_iters, overridden.optim.lr) == (30, 2e-3)
    assert overridden.optim.min_lr == 0.0


def test_a_list_is_replaced_and_null_removes_a_value(write: Write) -> None:
    source = {"kind": "jsonl", "files": ["a.jsonl", "b.jsonl"], "key": "body"}
    write("base", minimal(), data={"source": source}, optim={"lr": 1.0, "lr_warmup_fraction": 0.1})
    path = write(
        "other",
        {"extends": "base"},
        data={"source": {"files": ["c.jsonl"]}},
        optim={"lr_warmup_fraction": None, "lr_warmup_iters": 2},
    )
    config = load_config(path)
    assert config.data.source is not None
    assert config.data.source.model_dump(mode="json") == source | {"files": ["c.jsonl"]}
    assert config.lr_warmup_iters == 2


def test_a_mapping_with_its_kind_replaces_the_whole_mapping(write: Write) -> None:
    tokenizer = {"kind": "train-bpe", "vocab_size": 4096}
    source = {"kind": "jsonl", "files": ["a.jsonl"], "key": "body"}
    write(
        "base",
        minimal(),
        data={"source": source, "tokenizer": tokenizer},
        launch={"kind": "torchrun", "nproc_per_node": 2},
    )
    path = write(
        "other",
        {"extends": "base"},
        data={"source": {"kind": "text", "files": ["a.txt"]}, "tokenizer": {"vocab_size": 512}},
        launch={"kind": "slurm"},  # all kinds of launch share their fields
    )
    config = load_config(path)
    assert config.data.source is not None
    assert config.data.source.model_dump(exclude_unset=True) == {
        "kind": "text",
        "files": ("a.txt",),
    }
    assert config.data.tokenizer.model_dump(exclude_unset=True) == {
        "kind": "train-bpe",
        "vocab_size": 512,
    }
    assert (config.launch.kind, config.launch.nproc_per_node) == ("slurm", 2)
    same = {"source": {"kind": "jsonl", "files": ["b.jsonl"]}}
    source = load_config(write("same", {"extends": "base"}, data=same)).data.source
    assert source is not None
    assert source.model_dump(exclude_unset=True) == {"kind": "jsonl", "files": ("b.jsonl",)}


def test_the_last_of_several_bases_wins_and_names_are_not_inherited(write: Write) -> None:
    write("base", minimal())
    write("one", {"name": "first", "extends": "base"}, optim={"lr": 0.1, "min_lr": 5e-4}, seed=1)
    write("two", {"extends": "base"}, optim={"weight_decay": 0.3})
    config = load_config(write("Both_Of.them", {"extends": ["one", "two"]}))
    assert (config.name, config.seed, config.optim.min_lr) == ("both-of.them", 1, 5e-4)
    # what `two` extends is part of it
    assert (config.optim.lr, config.optim.weight_decay) == (minimal()["optim"]["lr"], 0.3)
    assert load_config(write("three", {"extends": "one", "name": "mine"})).name == "mine"


def test_a_file_that_several_bases_extend_is_read_once(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 15 levels with two files each, which both extend the two of the level below."""
    write("a0", minimal(), optim={"lr": 0.5, "weight_decay": 0.0})
    write("b0", minimal(), optim={"lr": 0.25, "weight_decay": 0.0})
    for level in range(1, 15):
        bases = {"extends": [f"a{level - 1}", f"b{level - 1}"]}
        write(f"a{level}", bases, optim={"weight_decay": level / 100})
        write(f"b{level}", bases, seed=level)
    path = write("top", {"extends": ["b14", "a14"]})
    read: list[Path] = []

    def counted(file: Path) -> Any:
        read.append(file)
        return read_yaml(file)

    monkeypatch.setattr("megacore.config.load.read_yaml", counted)
    config = load_config(path)
    assert (config.seed, config.optim.lr, config.optim.weight_decay) == (13, 0.25, 0.14)
    assert len(read) == len(set(read)) == 31
    write("b0", minimal(), optim={"lr": "fast"})
    assert refusal(path).count("conf/b0.yaml") == 2  # in the list of files, and as the value's


def test_a_base_that_was_read_counts_in_a_longer_chain(write: Write) -> None:
    write("f0", minimal())
    for number in range(1, 40):
        write(f"f{number}", {"extends": f"f{number - 1}"})
    assert load_config("conf/f31.yaml").name == "f31"
    write("g0", {"extends": "f30"})
    path = write("wide", {"extends": ["f30", "g0"]})
    assert "conf/wide.yaml extends conf/g0.yaml, and so on through more than 32 files" in refusal(
        path
    )


def test_a_hostfile_replaces_an_inherited_number_of_ranks(write: Write) -> None:
    def ranks(path: str, overrides: dict[str, Any] | None = None) -> dict[str, int]:
        return hosts_of(load_config(path, overrides).launch)

    Path("hosts").write_text("a slots=1\nb slots=1\n", encoding="utf-8")
    over = {"launch.hostfile": "hosts"}
    hosts = {"a": 1, "b": 1}
    base = write("base", minimal(), launch={"nproc_per_node": 2})
    extends = {"extends": "base"}
    assert ranks(base, over) == hosts
    assert ranks(write("one", extends, launch={"hostfile": "hosts"})) == hosts
    assert ranks(write("two", {"extends": "one"})) == hosts
    assert ranks(write("three", {"extends": ["base", "one"]})) == hosts
    # a number that is given with the hostfile, or over it, is compared with the slots
    for path, overrides in (
        (base, {**over, "launch.nproc_per_node": 2}),
        (base, {"launch": {"nproc_per_node": 2}, **over}),
        (write("four", extends, launch={"hostfile": "hosts", "nproc_per_node": 2}), None),
        (write("five", {"extends": "one"}, launch={"nproc_per_node": 2}), None),
    ):
        with pytest.raises(ConfigError, match=r"is 2 and a has 1 slots .*: leave launch\.nproc"):
            ranks(path, overrides)
    assert load_config(base, {"launch.hostfile": None}).launch.nproc_per_node == 2


def test_a_base_is_found_beside_the_file_before_conf(write: Write, tmp_path: Path) -> None:
    write("base", minimal(), seed=1)
    write("base-of-conf", minimal(), seed=3)
    mine = tmp_path / "elsewhere"
    mine.mkdir()
    (mine / "base.yaml").write_text(yaml.safe_dump(minimal() | {"seed": 2}), encoding="utf-8")
    for base, seed in (
        ("base", 2),
        ("../conf/base", 1),
        ("base-of-conf", 3),
        (str(tmp_path / "conf" / "base.yaml"), 1),
    ):
        (mine / "mine.yaml").write_text(f"extends: {base}\n", encoding="utf-8")
        assert load_config(str(mine / "mine.yaml")).seed == seed


def test_a_path_is_relative_to_the_file_that_contains_it(write: Write, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "ds.json").write_text("{", encoding="utf-8")  # refused when it is read
    values = minimal() | {"engine": "deepspeed", "deepspeed": {"config": "ds.json"}}
    (base / "base.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    extends = {"extends": "../base/base"}
    assert "deepspeed.config conf/../base/ds.json is not JSON" in refusal(write("mine", extends))
    path = write("mine", extends, deepspeed={"config": "none.json"})
    assert "there is no file none.json or conf/none.json" in refusal(path)

    values = finetuning() | {"launch": {"deepspeed_config": "ds.json"}}
    (base / "base.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"conf/finetune/\.\./\.\./base/ds\.json is not JSON"):
        load_finetune_config(write("finetune/mine", {"extends": "../../base/base"}))
    write("finetune/base", finetuning())
    assert load_finetune_config(write("finetune/Mine", {"extends": "base"})).name == "mine"


def test_an_error_names_the_file_of_the_value(write: Write) -> None:
    write("base", minimal(), optim={"lr": "high"})
    path = write("mine", {"extends": "base"}, train={"train_iters": "many"})
    message = refusal(path)
    assert message.startswith("conf/mine.yaml (extends conf/base.yaml): ")
    assert "optim.lr is 'high': give a number (in conf/base.yaml)" in message
    assert message.endswith("train.train_iters is 'many': give an integer")
    overridden = refusal(path, {"optim.lr": "low"})
    assert "optim.lr is 'low': give a number (in an override); train" in overridden


def test_a_chain_of_many_files_is_refused(write: Write) -> None:
    write("file-0", minimal())
    for number in range(1, 33):
        path = write(f"file-{number}", {"extends": f"file-{number - 1}"})
        if number < 32:
            assert load_config(path).name == f"file-{number}"
    assert "extends conf/file-31.yaml, and so on through more than 32 files" in refusal(path)


@pytest.mark.parametrize(
    ("extends", "sentence"),
    [
        ("bose", r"conf/mine.yaml extends 'bose': no configuration named 'bose'"),
        ("mine", "conf/mine.yaml extends itself: conf/mine.yaml extends conf/mine.yaml"),
        ("loop", "conf/mine.yaml extends conf/loop.yaml extends conf/mine.yaml: remove one"),
        (3, "conf/mine.yaml: extends is 3: give the name or path of a configuration"),
        (None, "conf/mine.yaml: extends is None: give the name or path of a configuration"),
        (["base", 1], "conf/mine.yaml: extends is ['base', 1]: give"),
        (["base", "base"], "conf/mine.yaml: extends names 'base' more than once: name it once"),
        ("task", "conf/task.yaml has task, a value of the flow finetune, not of pretrain"),
    ],
)
def test_bases_that_cannot_be_used_are_refused(write: Write, extends: Any, sentence: str) -> None:
    write("base", minimal())
    write("loop", {"extends": "mine"})
    write("task", finetuning())
    assert sentence in refusal(write("mine", {"extends": extends}))


def test_an_override_extends_nothing(write: Write) -> None:
    assert "only a file extends others" in refusal(write("mine", minimal()), {"extends": "base"})


def test_kernels_merge_with_one_word_for_all(write: Write) -> None:
    write("base", minimal(), train={"kernels": "plain"})
    config = load_config(write("own", {"extends": "base"}, train={"kernels": {"norm": "auto"}}))
    assert (config.train.kernels.norm, config.train.kernels.adamw) == ("auto", "plain")


def test_a_file_may_extend_one_of_its_own_name_elsewhere(write: Write) -> None:
    write("base", minimal(), seed=3)
    Path("mine").mkdir()
    Path("mine/base.yaml").write_text("extends: base\noptim: {min_lr: 0.00005}\n")
    config = load_config("mine/base.yaml")
    assert (config.seed, config.optim.min_lr) == (3, 5e-5)
