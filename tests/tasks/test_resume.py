"""Runs resumed from another run's checkpoint: their keys, messages and refusals."""

import json
import logging
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megacore.artifact import Artifact, StageKey
from megacore.artifact.files import write_json
from megacore.checkpoint.format import Marker, complete_checkpoints
from megacore.config import RunConfig
from megacore.config.spec import ModelSpec
from megacore.errors import ConfigError
from megacore.jobs.finetune import FinetuneJob
from tasks import _resume, train
from tasks._resume import (
    check_resumed,
    warn_of_other_data,
    warn_of_other_runs,
    warn_of_unfinished,
)
from tasks.index import RunData
from tasks.train import run_key, train_key
from tests.finetune._tiny_models import tiny_config
from tests.tasks.conftest import make_config

INPUT = Artifact(stage="tokenize", key="ab" * 8, path="somewhere", digest="f" * 64, counts={})
DATA = RunData(INPUT, INPUT, INPUT)


def changed(**sections: dict[str, Any]) -> RunConfig:
    values = make_config().model_dump(mode="json")
    for name, changes in sections.items():
        values[name] |= changes
    return RunConfig.model_validate(values)


def checkpoint(path: Path, config: RunConfig, iteration: int) -> Path:
    """Write the metadata of a checkpoint, without weights."""
    path.mkdir(parents=True)
    state = {
        "model": ModelSpec.of(config, 500).model_dump(mode="json"),
        "config": config.model_dump(mode="json"),
    }
    write_json(path / "state.json", state)
    Marker(iteration, None, {}).write(path)
    return path


@pytest.fixture
def log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> pytest.LogCaptureFixture:
    """Provide the captured log, which replaces that of a flow run."""
    monkeypatch.setattr(_resume, "get_run_logger", lambda: logging.getLogger("resume"))
    caplog.set_level(logging.INFO, "resume")
    return caplog


@pytest.mark.parametrize(("decay", "warned"), [(None, True), (500, False)])
def test_extension_warns_of_another_learning_rate_schedule(
    decay: int | None,
    warned: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
) -> None:
    before, longer = (
        changed(train={"train_iters": iterations}, optim={"lr_decay_iters": decay})
        for iterations in (500, 900)
    )
    monkeypatch.setattr(train.TrainJob, "read", lambda path: SimpleNamespace(config=before))
    monkeypatch.setattr(train, "get_run_logger", lambda: logging.getLogger("resume"))
    train._warn_of_changed_schedule(longer, tmp_path)
    assert ("the learning rate schedule of this run changes" in log.text) is warned


def test_keys_depend_on_the_resumed_checkpoint_and_skipped_samples(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "iter_0000001", make_config(), 1)
    other = checkpoint(tmp_path / "iter_0000002", make_config(), 2)
    plain, one, two = (
        changed(resume={"checkpoint": path}) for path in (None, str(first), str(other))
    )
    assert len({run_key(config, INPUT, INPUT).key for config in (plain, one, two)}) == 3
    allowed = changed(resume={"checkpoint": str(first), "override": ["optim.lr"]})
    assert run_key(allowed, INPUT, INPUT) == run_key(one, INPUT, INPUT)
    skipping = changed(train={"skip_samples": ["8-15"]})
    # The same run is extended to another end.
    assert run_key(skipping, INPUT, INPUT) == run_key(plain, INPUT, INPUT)
    assert train_key(skipping, DATA) != train_key(plain, DATA)


def test_key_depends_on_which_bad_batches_are_skipped() -> None:
    def key(**train: Any) -> StageKey:
        return train_key(changed(train=train), DATA)

    assert key() == key(loss_spike_action="stop") == key(loss_spike_factor=4.0)
    assert key() != key(loss_spike_action="skip") != key(nonfinite_action="skip") != key()
    assert key(loss_spike_action="skip", loss_spike_factor=4.0) != key(loss_spike_action="skip")
    runs = [
        run_key(changed(train=train), INPUT, INPUT) for train in ({}, {"nonfinite_action": "skip"})
    ]
    assert runs[0] == runs[1]


def test_difference_is_logged_and_must_be_allowed(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    path = str(checkpoint(tmp_path / "iter_0000001", make_config(), 1))
    with pytest.raises(ConfigError, match=r"optim.lr: .* -> 0.5.*override: \[optim.lr\]"):
        check_resumed(changed(resume={"checkpoint": path}, optim={"lr": 0.5}))
    assert f"resuming from {path}; changed since: optim.lr:" in log.text
    check_resumed(changed(resume={"checkpoint": path, "override": ["optim.lr"]}, optim={"lr": 0.5}))


def test_checkpoint_without_training_is_refused(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        ConfigError, match=r"resume.checkpoint is .*nowhere, which has no complete\.json: give"
    ):
        check_resumed(changed(resume={"checkpoint": str(tmp_path / "nowhere")}))
    path = checkpoint(tmp_path / "iter_0000001", make_config(), 1)
    state = json.loads((path / "state.json").read_text())
    del state["config"]
    write_json(path / "state.json", state)
    with pytest.raises(
        ConfigError, match=r"which holds no configuration.*train.pretrained_checkpoint"
    ):
        check_resumed(changed(resume={"checkpoint": str(path)}))


def test_new_run_logs_the_differing_run_and_how_to_resume_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))
    run = tmp_path / "runs" / "0123456789abcdef"
    path = checkpoint(run / "checkpoints/iter_0000004", make_config(), 4)
    write_json(run / "run.json", {"config": make_config().model_dump(mode="json")})
    warn_of_other_runs(make_config())
    warn_of_other_runs(changed(train={"train_iters": 50}, checkpoint={"save_interval": 3}))
    assert log.text == ""  # the same run, extended
    warn_of_other_runs(changed(optim={"lr": 0.5}))
    assert "this is a new run: it differs from the last one of the same name (optim.lr:" in log.text
    assert f"set resume.checkpoint to {path} and resume.override to [optim.lr]" in log.text
    log.clear()
    warn_of_other_runs(changed(optim={"name": "muon"}))
    assert "(optim.name: adam -> muon), whose optimizer is another" in log.text
    log.clear()
    wider = 2 * make_config().model.hidden_size
    warn_of_other_runs(changed(model={"hidden_size": wider}))
    assert "whose checkpoints are of another model" in log.text
    assert "resume.checkpoint" not in log.text, "it would be refused"
    log.clear()
    warn_of_other_runs(changed(optim={"lr": 0.5}).model_copy(update={"name": "another"}))
    warn_of_other_runs(changed(optim={"lr": 0.5}, resume={"checkpoint": str(path)}))
    assert log.text == ""


def test_run_that_is_deleted_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))
    run = tmp_path / "runs" / "0123456789abcdef"
    checkpoint(run / "checkpoints/iter_0000004", make_config(), 4)
    write_json(run / "run.json", {"config": make_config().model_dump(mode="json")})

    def list_then_delete(root: Path) -> dict[Path, Marker]:
        listed = complete_checkpoints(root)
        shutil.rmtree(run)
        return listed

    monkeypatch.setattr(_resume, "complete_checkpoints", list_then_delete)
    warn_of_other_runs(changed(optim={"lr": 0.5}))
    assert "this is a new run" in log.text


def test_restart_of_a_resumed_run_logs_how_to_resume_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))
    first = str(checkpoint(tmp_path / "iter_0000004", make_config(), 4))
    run = tmp_path / "runs" / "0123456789abcdef"
    checkpoint(run / "checkpoints/iter_0000008", make_config(), 8)
    write_json(
        run / "run.json", {"config": changed(resume={"checkpoint": first}).model_dump(mode="json")}
    )
    warn_of_other_runs(make_config())
    assert f"resumed from {first}; to continue it, set resume.checkpoint to that" in log.text


def test_new_run_with_the_same_configuration_on_other_data_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))
    runs = tmp_path / "runs"
    path = checkpoint(runs / "old" / "checkpoints" / "iter_0000009", make_config(), 9)
    write_json(runs / "old" / "run.json", {"config": make_config().model_dump(mode="json")})
    warn_of_other_data(make_config(), runs / "old")
    warn_of_other_data(changed(optim={"lr": 0.5}), runs / "new")
    assert log.text == ""
    longer = changed(train={"train_iters": 50})
    warn_of_other_data(longer, runs / "new")
    assert f"this is a new run, although {path} has the same configuration" in log.text
    log.clear()
    checkpoint(runs / "new" / "checkpoints" / "iter_0000001", longer, 1)
    warn_of_other_data(longer, runs / "new")
    assert log.text == ""


@pytest.mark.parametrize(
    ("changes", "ranks", "expected"),
    [
        ({}, 1, "ranks: 2 -> 1"),
        ({"optim": {"lr": 0.5}}, 2, "optim.lr: .* -> 0.5"),
        ({"tracking": {"experiment": "other"}}, 2, "has the same configuration, but another"),
    ],
)
def test_a_new_fine_tuning_names_the_unfinished_one(
    changes: dict[str, Any],
    ranks: int,
    expected: str,
    tmp_path: Path,
    log: pytest.LogCaptureFixture,
) -> None:
    def job(name: str, ranks: int, **sections: Any) -> FinetuneJob:
        return FinetuneJob(
            config=tiny_config("model", Path("data"), "classification", **sections),
            pretrained_directory="",
            examples_directory="",
            run_directory=str(tmp_path / name),
            exit_directory="",
            ranks=ranks,
            threads_per_rank=1,
            precision="fp32",
        )

    earlier, new = job("earlier", 2), job("new", ranks, **changes)
    (tmp_path / "earlier").mkdir()
    earlier.write(tmp_path / "earlier" / "run.json")
    warn_of_unfinished(new)
    assert log.text == "", "it has no checkpoint"
    saved = tmp_path / "earlier" / "checkpoints" / "iter_0000005"
    saved.mkdir(parents=True)
    Marker(5, None, {}).write(saved)
    warn_of_unfinished(earlier)
    assert log.text == "", "it resumes"
    warn_of_unfinished(new)
    assert re.search(f"this is a new run: .*{saved}, which has not ended.*{expected}", log.text)
    log.clear()
    (tmp_path / "earlier" / "manifest.json").write_text("{}", encoding="utf-8")
    warn_of_unfinished(new)
    assert log.text == "", "the earlier one has ended"
