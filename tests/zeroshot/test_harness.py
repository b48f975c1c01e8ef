"""Scores of an export by lm-evaluation-harness: values, names, refusals and keys."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megacore.config.train import LmEvalConfig
from megacore.errors import (
    ConfigError,
    DataFormatError,
    DownloadError,
    TransientFileError,
    WorkspaceError,
)
from megacore.zeroshot import harness
from megacore.zeroshot.harness import check_tasks, metrics_of, score_model, task_files
from tests._listing import refuse_listing

pytest.importorskip("lm_eval")


def write_task(directory: Path, name: str = "colours", **changes: Any) -> Path:
    """Write a multiple-choice task of three questions with its data, and return its YAML file."""
    directory.mkdir(parents=True, exist_ok=True)
    data = directory / f"{name}.jsonl"
    rows = [
        {"question": f"number {number} has the colour", "choices": ["red", "blue"], "answer": 1}
        for number in range(3)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "question",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        **changes,
    }
    path = directory / f"{name}.yaml"
    path.write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
    return path


def write_model(directory: Path) -> Path:
    """Write a GPT-2 of random weights with a byte-level tokenizer, and return its directory."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0} | {letter: number for number, letter in enumerate(alphabet, 1)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(
        directory
    )
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=len(vocab), n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(directory)
    return directory


@pytest.mark.slow
def test_scores_are_those_of_lm_evals_own_command(tmp_path: Path) -> None:
    model, tasks = write_model(tmp_path / "model"), tmp_path / "tasks"
    write_task(tasks)
    scores = score_model(
        model,
        ["colours"],
        include_path=str(tasks),
        num_fewshot=None,
        limit=2,
        batch_size=2,
        device="cpu",
    )
    words = scores["command"].split()
    assert words[:2] == ["lm_eval", "run"]
    command = [sys.executable, "-m", *words, "--output_path", str(tmp_path / "own")]
    subprocess.run(command, check=True, capture_output=True)
    (own,) = (tmp_path / "own").rglob("results_*.json")
    theirs = json.loads(own.read_text(encoding="utf-8"))
    assert scores["results"] == theirs["results"]
    assert scores["n-samples"]["colours"] == {"original": 3, "effective": 2}
    assert set(metrics_of(scores)) == {"lm_eval/colours/acc", "lm_eval/colours/acc_norm"}


def test_metrics_leave_out_errors_and_values_that_are_not_numbers() -> None:
    values = {
        "alias": "a",
        "acc,none": 0.25,
        "acc_stderr,none": 0.1,
        "exact_match,strict": 1,
        "exact_match_stderr,strict": "N/A",
        "word_perplexity,none": float("inf"),
        "sample_len": 3,
    }
    assert metrics_of({"results": {"a": values}}) == {
        "lm_eval/a/acc": 0.25,
        "lm_eval/a/exact_match/strict": 1.0,
    }


def test_key_has_the_content_of_tasks_and_of_their_data(tmp_path: Path) -> None:
    write_task(tmp_path / "one" / "below")
    first = task_files(str(tmp_path / "one"))
    assert first is not None
    data = str(tmp_path / "one" / "below" / "colours.jsonl")
    assert list(first) == ["below/colours.jsonl", "below/colours.yaml", data]
    outside = tmp_path / "outside.jsonl"
    outside.write_text("{}\n", encoding="utf-8")
    path = write_task(tmp_path / "two", dataset_kwargs={"data_files": [str(outside)]})
    path.write_text(f"{path.read_text()[:-1]}, doc_to_text: !function utils.text}}")
    before = task_files(str(tmp_path / "two"))
    outside.write_text("{ }\n", encoding="utf-8")
    after = task_files(str(tmp_path / "two"))
    assert before is not None
    assert after is not None
    assert {name for name in before if before[name] != after[name]} == {str(outside)}
    assert task_files(None) is None


def changed_digests(tasks: Path, data: Path) -> set[str]:
    """Return the names whose digest differs after a change of a file of data."""
    before = task_files(str(tasks))
    data.write_text(f"{data.read_text(encoding='utf-8')}#\n", encoding="utf-8")
    after = task_files(str(tasks))
    assert before is not None
    assert after is not None
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


def write_yaml(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values), encoding="utf-8")


def test_key_has_the_data_that_an_included_file_names(tmp_path: Path) -> None:
    tasks, data = tmp_path / "tasks", tmp_path / "local.jsonl"
    data.write_text("{}\n", encoding="utf-8")
    files = {"dataset_path": "json", "dataset_kwargs": {"data_files": str(data)}}
    write_yaml(tasks / "_base_yaml", files)
    write_yaml(tasks / "_middle", {"include": ["_base_yaml"], "doc_to_text": "a"})
    write_yaml(tasks / "one.yaml", {"task": "one", "include": "_middle"})
    assert changed_digests(tasks, data) == {str(data)}


def test_key_has_included_files_of_other_directories_and_their_functions(tmp_path: Path) -> None:
    tasks, data = tmp_path / "tasks", tmp_path / "local.jsonl"
    for path in (data, tmp_path / "utils.py"):
        path.write_text("", encoding="utf-8")
    base = tmp_path / "_base_yaml"
    base.write_text("include: _base_yaml\ndoc_to_text: !function utils.text\n", encoding="utf-8")
    write_yaml(tasks / "one.yaml", {"task": "one", "include": "../_base_yaml"})
    assert changed_digests(tasks, base) == {str(base)}
    assert changed_digests(tasks, tmp_path / "utils.py") == {str(tmp_path / "utils.py")}


def test_a_folder_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").mkdir()
    refuse_listing(monkeypatch, "secret")
    with pytest.raises(ConfigError, match=r"secret cannot be read: Permission denied"):
        task_files(str(tmp_path))


def test_an_included_file_that_is_missing_is_named(tmp_path: Path) -> None:
    write_yaml(tmp_path / "one.yaml", {"task": "one", "include": "_base_yaml"})
    with pytest.raises(ConfigError, match=r"one\.yaml includes _base_yaml, but there is no file"):
        task_files(str(tmp_path))


@pytest.mark.parametrize(
    ("values", "digested"),
    [
        ({"dataset_path": "DATA"}, ""),
        ({"dataset_path": "json", "dataset_kwargs": {"data_dir": "DATA"}}, ""),
        ({"dataset_path": "json", "dataset_kwargs": {"data_dir": "DATA/below"}}, "below"),
        (
            {
                "dataset_path": "json",
                "dataset_kwargs": {"data_dir": "DATA", "data_files": ["**/*.jsonl"]},
            },
            "below/a.jsonl",
        ),
        ({"group": "g", "task": [{"task": "b", "dataset_path": "DATA"}]}, ""),
    ],
)
def test_key_has_local_directories_of_data(
    tmp_path: Path, values: dict[str, Any], digested: str
) -> None:
    data = tmp_path / "data"
    (data / "below").mkdir(parents=True)
    (data / "below" / "a.jsonl").write_text("", encoding="utf-8")
    (data / "below" / "up").symlink_to(data)
    (data / ".hidden").write_text("", encoding="utf-8")
    text = json.dumps({"task": "one"} | values).replace("DATA", str(data))
    write_yaml(tmp_path / "tasks" / "one.yaml", json.loads(text))
    changed = changed_digests(tmp_path / "tasks", data / "below" / "a.jsonl")
    assert str(data / digested) in changed
    assert changed_digests(tmp_path / "tasks", data / ".hidden") == set()


def test_a_large_directory_of_data_is_compared_by_sizes_and_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.jsonl").write_text("{}\n", encoding="utf-8")
    write_yaml(tmp_path / "tasks" / "one.yaml", {"task": "one", "dataset_path": str(data)})
    monkeypatch.setattr(harness, "_MOST_BYTES", 2)
    monkeypatch.setattr(harness, "file_digest", lambda path: refuse_data(path, data))
    assert changed_digests(tmp_path / "tasks", data / "a.jsonl") == {str(data)}


def refuse_data(path: Path, data: Path) -> str:
    assert not path.is_relative_to(data)
    return "digest"


def test_a_data_set_of_the_hub_is_not_read_from_a_directory_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("json", "en"):
        (tmp_path / name).mkdir()
    hub = {"task": "hub", "dataset_path": "owner/name", "dataset_kwargs": {"data_dir": "en"}}
    write_yaml(tmp_path / "tasks" / "hub.yaml", hub)
    write_yaml(tmp_path / "tasks" / "one.yaml", {"task": "one", "dataset_path": "json"})
    assert set(task_files(str(tmp_path / "tasks")) or {}) == {"hub.yaml", "one.yaml"}


def test_unknown_task_is_refused_with_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = SimpleNamespace(cfg={"task": "", "output_type": "multiple_choice"})
    names = ("arc_easy", "hellaswag")  # to read lm_eval's takes seconds
    own = SimpleNamespace(task_index=dict.fromkeys(names, entry))
    write_task(tmp_path)
    check_tasks(LmEvalConfig(tasks=("colours",), include_path=str(tmp_path)), 64)
    monkeypatch.setattr(harness, "_manager", lambda tasks, directory: own)
    check_tasks(LmEvalConfig(tasks=("arc_easy",)), 64)
    check_tasks(LmEvalConfig(), 64)
    with pytest.raises(ConfigError, match=r"names hellaswg, .* do not have; near are hellaswag"):
        check_tasks(LmEvalConfig(tasks=("hellaswg",)), 64)
    with pytest.raises(ConfigError, match=r"nowhere, which is not a directory"):
        check_tasks(LmEvalConfig(tasks=("a",), include_path=str(tmp_path / "nowhere")), 64)


@pytest.mark.parametrize(
    ("kwargs", "tokens"),
    [
        (None, 256),
        ({"until": ["."]}, 256),
        ({"max_gen_toks": 70}, 70),
        ({"max_new_tokens": 64}, 64),
    ],
)
def test_answers_that_the_model_has_no_positions_for_are_refused(
    kwargs: dict[str, Any] | None, tokens: int, tmp_path: Path
) -> None:
    changes = {} if kwargs is None else {"generation_kwargs": kwargs}
    write_task(tmp_path, "sums", output_type="generate_until", doc_to_choice=None, **changes)
    config = LmEvalConfig(tasks=("sums",), include_path=str(tmp_path))
    check_tasks(config, tokens + 1)
    message = (
        rf"names sums, and lm_eval generates {tokens} tokens for each question of sums, but the "
        rf"model has {tokens} positions .*\.max_gen_toks below {tokens}, or remove sums$"
    )
    with pytest.raises(ConfigError, match=message):
        check_tasks(config, tokens)


def test_tasks_of_groups_are_checked_with_the_values_of_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.tasks import TaskManager

    short = {"generation_kwargs": {"max_gen_toks": 8}}
    write_task(tmp_path, "sums", output_type="generate_until", tag="tagged", **short)
    write_task(tmp_path)
    long = {"generation_kwargs": {"max_gen_toks": 64}}
    groups: list[dict[str, Any]] = [
        {"group": "short", "task": ["sums", "colours"]},
        {"group": "inner", "task": ["colours", {"task": "sums", **long}]},
        {"group": "outer", "task": [{"group": "short", **long}]},
        {"group": "inline", "task": [{"group": "new", "task": ["sums"], **long}]},
        {"group": "generates", "task": ["colours"], "output_type": "generate_until"},
    ]
    for group in groups:
        write_yaml(tmp_path / f"{group['group']}.yaml", group)
    local = TaskManager(include_path=str(tmp_path), include_defaults=False)
    monkeypatch.setattr(harness, "_manager", lambda tasks, directory: local)
    check_tasks(LmEvalConfig(tasks=("short", "tagged")), 9)
    for name in ("short", "tagged"):
        with pytest.raises(ConfigError, match=rf"names {name}, .* 8 tokens .* question of sums"):
            check_tasks(LmEvalConfig(tasks=(name,)), 8)
    for name in ("inner", "outer", "inline", "generates"):
        with pytest.raises(ConfigError, match=rf"names {name}, and lm_eval generates"):
            check_tasks(LmEvalConfig(tasks=(name,)), 64)


def test_values_of_generation_that_lm_eval_cannot_read_are_one_sentence(tmp_path: Path) -> None:
    changes = {"output_type": "generate_until", "generation_kwargs": {"max_gen_toks": "many"}}
    write_task(tmp_path, "sums", **changes)
    with pytest.raises(DataFormatError, match=r"could not read sums: ValueError: .*'many'"):
        check_tasks(LmEvalConfig(tasks=("sums",), include_path=str(tmp_path)), 64)


def test_a_task_that_is_not_yaml_is_named(tmp_path: Path) -> None:
    write_task(tmp_path)
    (tmp_path / "broken.yaml").write_text("task: [\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"broken\.yaml, which is not YAML \(while parsing"):
        check_tasks(LmEvalConfig(tasks=("colours",), include_path=str(tmp_path)), 64)


def test_missing_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match=r"pip install megacore\[lm-eval\]"):
        check_tasks(LmEvalConfig(tasks=("arc_easy",)), 64)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ConnectionError("no route\nto the hub"), DownloadError, "ConnectionError: no route: conn"),
        (ValueError(), DataFormatError, "could not score a, b: ValueError: ValueError: correct"),
    ],
)
def test_errors_of_lm_eval_are_one_sentence(
    error: Exception, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message), harness._typed_errors(["a", "b"]):
        raise error


@pytest.mark.parametrize(
    ("code", "kind", "remedy"),
    [
        (errno.ENOSPC, WorkspaceError, "free some space .* or set HF_HOME to"),
        (errno.EDQUOT, WorkspaceError, "raise the quota or set HF_HOME to"),
        (errno.EROFS, WorkspaceError, "set HF_HOME to"),
        (errno.EACCES, WorkspaceError, "make it writable or set HF_HOME to"),
        (errno.EIO, TransientFileError, "the disk or its connection fails"),
    ],
)
def test_a_disk_without_room_for_the_data_is_no_fault_of_the_task(
    code: int,
    kind: type[Exception],
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    path = str(tmp_path / "datasets" / "json.lock")
    message = f"write {path}.*{os.strerror(code)}.*: {remedy}"
    with pytest.raises(kind, match=message), harness._typed_errors(["a"]):
        raise ValueError("no data set") from OSError(code, os.strerror(code), path)


def test_data_that_may_not_be_read_are_a_fault_of_the_task() -> None:
    error = PermissionError(errno.EACCES, "Permission denied", "/data/colours.jsonl")
    message = "PermissionError: .*colours.jsonl'?: correct the task or its data"
    with pytest.raises(DataFormatError, match=message), harness._typed_errors(["a"]):
        raise error


def test_items_are_questions_with_their_right_answers(tmp_path: Path) -> None:
    write_task(tmp_path)
    write_task(tmp_path, "sums", doc_to_choice=None, output_type="generate_until")
    rows = [{"question": "one and one is", "answer": "two"}, {"question": "", "answer": "three"}]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    group = {"group": "both", "task": ["colours", "sums"]}
    (tmp_path / "both.yaml").write_text(json.dumps(group))
    items, groups = harness.task_items(["both"], str(tmp_path), 2)
    assert items == {
        "colours": tuple(f"number {number} has the colour blue" for number in range(2)),
        "sums": ("one and one is two", "three"),
    }
    assert groups == {"both": ("colours", "sums")}


@pytest.mark.parametrize(
    ("target", "choices", "text"),
    [
        (3.5, None, "q 3.5"),
        (7, None, "q 7"),
        (True, None, "q True"),
        (None, None, "q"),
        ([1, 0], ["red", "blue"], "q blue red"),
        ((), None, "q"),
        (7, ["red", "blue"], "q"),
        ({"text": ["green", None, "sea"], "unit": 2.5}, None, "q green sea 2.5"),
    ],
)
def test_answers_of_every_type_are_searched(target: Any, choices: Any, text: str) -> None:
    task = SimpleNamespace(
        config=SimpleNamespace(doc_to_choice=choices),
        doc_to_choice=lambda row: choices,
        doc_to_text=lambda row: "q",
        doc_to_target=lambda row: target,
    )
    assert harness._item_text(task, {}) == text


def test_a_search_says_that_a_task_cannot_be_read(tmp_path: Path) -> None:
    write_task(tmp_path, doc_to_target="{{ no_such_column.text }}")
    with pytest.raises(DataFormatError, match="could not read colours: UndefinedError: 'no_such"):
        harness.task_items(["colours"], str(tmp_path), None)
