"""Tests of the list of runs that is read from the workspace."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megacore.artifact import StageKey, Workspace, build_artifact, lock
from megacore.artifact.build import seal
from megacore.errors import ConfigError
from megacore.observe import events
from megacore.observe.events import EventWriter
from megacore.observe.runs import find_run, named_directory, runs
from megacore.paths import glob


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Return a workspace with one run that stopped at iteration 20 of 50."""
    workspace = Workspace(tmp_path)
    directory = workspace.folder("train") / "aaaa"
    (directory / "checkpoints").mkdir(parents=True)
    (directory / "run.json").write_text(
        json.dumps({"config": {"name": "gpt2-test", "train": {"train_iters": 50}}})
    )
    (directory / "checkpoints" / "shard").write_bytes(b"x" * 5000)
    with EventWriter(directory / "events.jsonl", attempt=1) as log:
        for iteration in (10, 20):
            log.write("step", iteration=iteration, consumed_tokens=iteration * 32, lm_loss=4.0)
            log.write("evaluation", iteration=iteration, lm_loss=1.0)
            log.write("perplexity", iteration=iteration, valid_ppl=100.0 / iteration)
    return workspace


def test_a_stopped_run_is_listed_with_its_progress(workspace: Workspace) -> None:
    (run,) = runs(workspace)
    assert run["size_bytes"] > 5000
    assert run["updated"] > 1.7e9
    del run["size_bytes"], run["updated"]
    assert run == {
        "name": "gpt2-test",
        "key": "aaaa",
        "state": "incomplete",
        "iteration": 20,
        "train_iters": 50,
        "consumed_tokens": 640,
        "valid_ppl": 5.0,
        "test_ppl": None,
        "metric": None,
        "path": str(workspace.folder("train") / "aaaa"),
    }


def test_a_run_that_stopped_between_two_log_intervals_is_listed_with_its_last_iteration(
    workspace: Workspace,
) -> None:
    with EventWriter(workspace.folder("train") / "aaaa" / "events.jsonl", attempt=1) as log:
        log.write("exit", reason="stop_file", iteration=23)
    (run,) = runs(workspace)
    assert (run["iteration"], run["consumed_tokens"]) == (23, 640)


def test_a_long_run_is_listed_from_the_end_of_its_events(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EventWriter(workspace.folder("train") / "aaaa" / "events.jsonl", attempt=2) as log:
        for iteration in range(21, 2001):
            log.write("step", iteration=iteration, consumed_tokens=iteration * 32, lm_loss=4.0)
    lines: list[bytes] = []
    parse = events._parse
    monkeypatch.setattr(events, "_parse", lambda *line: lines.append(line[0]) or parse(*line))
    (run,) = runs(workspace)
    assert (run["iteration"], run["consumed_tokens"], run["valid_ppl"]) == (2000, 64_000, 5.0)
    assert len(lines) == 3


def test_a_locked_run_is_running_and_a_sealed_one_finished(workspace: Workspace) -> None:
    directory = workspace.folder("train") / "aaaa"
    with lock(directory):
        assert runs(workspace)[0]["state"] == "running"
    seal(directory, StageKey("train", 1, {}, {}), {}, 1.0)
    assert runs(workspace)[0]["state"] == "finished"


def test_a_run_with_a_broken_run_json_is_damaged(workspace: Workspace) -> None:
    directory = workspace.folder("train") / "aaaa"
    seal(directory, StageKey("train", 1, {}, {}), {}, 1.0)
    (directory / "run.json").write_text("{")
    (run,) = runs(workspace)
    assert (run["state"], run["key"]) == ("damaged", "aaaa")


def test_perplexity_of_the_test_split_is_that_of_the_evaluated_run(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = workspace.folder("train") / "aaaa"
    manifest = seal(directory, StageKey("train", 1, {}, {}), {}, 1.0)
    for digest, ppl in ((manifest.digest, 80.0), ("0" * 64, 70.0)):
        key = StageKey("evaluate", 1, {}, {"trained": digest})
        build_artifact(workspace.folder("evaluate"), key, lambda _, ppl=ppl: {"test_ppl": ppl})
    assert runs(workspace)[0]["test_ppl"] == 80.0

    def with_a_removed_one(folder: Path, pattern: str) -> list[Path]:
        return [*glob(folder, pattern), folder / "removed" / "manifest.json"]

    monkeypatch.setattr("megacore.observe.runs.glob", with_a_removed_one)
    assert runs(workspace)[0]["test_ppl"] == 80.0


def test_the_newest_run_is_first_and_folders_without_run_json_are_ignored(
    workspace: Workspace,
) -> None:
    other = workspace.folder("train") / "bbbb"
    other.mkdir()
    assert len(runs(workspace)) == 1
    (other / "run.json").write_text(
        json.dumps({"config": {"name": "later", "train": {"train_iters": 5}}})
    )
    with EventWriter(other / "events.jsonl", attempt=1) as log:
        log.write("start", ranks=1)
    assert [run["name"] for run in runs(workspace)] == ["later", "gpt2-test"]
    assert runs(workspace)[0]["iteration"] is None


def test_a_run_is_found_by_key_prefix_or_name(workspace: Workspace) -> None:
    directory = workspace.folder("train") / "aaaa"
    for name in ("aaaa", "aa", "gpt2-test"):
        assert find_run(workspace, name, state="incomplete") == directory
    with pytest.raises(
        ConfigError,
        match=r"^aaaa \(gpt2-test, incomplete\) in .* is not running$",
    ):
        find_run(workspace, "aaaa", state="running")
    with pytest.raises(ConfigError, match=r"no run is 'b' in .* there are aaaa .*: give one key"):
        find_run(workspace, "b", state="incomplete")


def test_a_workspace_without_runs_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run is 'b' in .*, which has no runs: name another"):
        find_run(Workspace.of(tmp_path), "b", state="running")


def test_the_message_for_an_unknown_run_lists_matching_or_a_few_runs(workspace: Workspace) -> None:
    for number in range(20):
        other = workspace.folder("train") / f"b{number:03}"
        other.mkdir()
        (other / "run.json").write_text(
            json.dumps({"config": {"name": "later", "train": {"train_iters": 5}}})
        )
    with pytest.raises(
        ConfigError, match=r"later, incomplete\).* and 12 more in .* are not running"
    ):
        find_run(workspace, "later", state="running")
    for name in ("", "c"):
        with pytest.raises(ConfigError, match="and 13 more: give") as caught:
            find_run(workspace, name, state="incomplete")
        assert str(caught.value).count(", incomplete)") == 8


def test_a_name_is_that_of_a_run_or_the_key_of_an_artifact(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(workspace.root))
    monkeypatch.chdir(workspace.root)
    run, export = workspace.folder("train") / "aaaa", workspace.folder("convert") / "abcd"
    (export / "model").mkdir(parents=True)
    (workspace.folder("convert") / "abcd.tmp-1").mkdir()
    for name in ("gpt2-test", "aaaa", "aa"):
        assert named_directory(name) == run
    for name in ("abcd", "ab"):
        assert named_directory(Path(name)) == export
    for name in ("other", "b", "abcd.tmp-1", "exports/abcd", "runs", "models:/a/1"):
        assert named_directory(name) == Path(name)
    with pytest.raises(ConfigError, match=r"2 .* are called a \(runs/aaaa, exports/abcd\): give a"):
        named_directory("a")
    (workspace.folder("train") / "abcdef").mkdir()
    assert named_directory("abcd") == export
    assert named_directory("abcd", workspace.root / "none") == Path("abcd")
    (workspace.root / "gpt2-test.idx").touch()
    assert named_directory("gpt2-test") == Path("gpt2-test")


def test_an_empty_workspace_has_no_runs(tmp_path: Path) -> None:
    assert runs(Workspace(tmp_path)) == []


def test_importing_the_list_of_runs_imports_no_heavy_package() -> None:
    code = (
        "import sys, megacore.observe.runs\n"
        "assert not {'torch', 'mlflow', 'prefect', 'transformers'} & set(sys.modules), 'imported "
        "too early'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_a_fine_tuning_run_is_listed_with_its_best_metric(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    directory = workspace.folder("finetune") / "bbbb"
    directory.mkdir(parents=True)
    config = {"name": "bert-mrpc", "train": {"num_epochs": 3, "max_steps": None}}
    (directory / "run.json").write_text(json.dumps({"config": config}))
    with EventWriter(directory / "events.jsonl", attempt=1) as log:
        log.write("start", iteration=0, total_iterations=12)
        assert runs(workspace)[0]["train_iters"] == 12
        log.write("evaluation", iteration=0, consumed_tokens=0, loss=0.7, metrics={"f1": 0.5})
        log.write("step", iteration=4, total_iterations=12, consumed_tokens=64, loss=0.6)
        log.write("best", iteration=4, path="best/iter_0000004", metric="f1", value=0.75)
    (run,) = runs(workspace)
    assert (run["name"], run["iteration"], run["train_iters"]) == ("bert-mrpc", 4, 12)
    assert (run["metric"], run["valid_ppl"], run["state"]) == ("f1 0.7500", None, "incomplete")
    assert find_run(workspace, "bert-mrpc", state="incomplete") == directory
    with EventWriter(directory / "events.jsonl", attempt=1) as log:
        log.write(
            "evaluation",
            iteration=4,
            consumed_tokens=64,
            loss=0.7,
            metrics={"loss": 0.7, "ppl": 2.01},
        )
    assert runs(workspace)[0]["valid_ppl"] == 2.01
