"""Checks of cached artifacts, whose files are compared before a cache hit counts."""

import errno
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.serializers import JSONSerializer
from prefect.settings import PREFECT_LOCAL_STORAGE_PATH, temporary_settings
from prefect.states import Failed
from prefect.task_engine import SyncTaskRunEngine
from pydantic import ValidationError

from megacore.artifact import Artifact, StageKey, Workspace, build_artifact, open_artifact
from megacore.config import RunConfig, load_config
from megacore.errors import ConfigError, DataFormatError, RankLostError
from tasks._cache import (
    ArtifactPolicy,
    StageResult,
    artifact_directory,
    artifact_problem,
    should_retry,
    summarize,
)
from tasks._logging import RUN_LOGGERS, shorten_user_errors

KEY = StageKey.of("collect", 1, {"source": "test"})


@pytest.fixture
def config() -> RunConfig:
    return load_config("gpt2-tiny", conf_dir=Path(__file__).parents[2] / "conf")


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Artifact:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))

    def fill(directory: Path) -> dict[str, int]:
        (directory / "corpus.jsonl").write_text("{}")
        return {}

    return build_artifact(Workspace.of().folder("collect"), KEY, fill)[0]


def key_of(config: RunConfig) -> StageKey:
    return KEY


def policy_and_record(tmp_path: Path) -> tuple[ArtifactPolicy, Path]:
    policy = ArtifactPolicy(key_of, lambda config: artifact_problem(KEY, config))
    record = tmp_path / "results" / f"collect-{KEY.key}"
    record.parent.mkdir()
    record.write_text("{}")
    return policy, record


def compute(policy: ArtifactPolicy, tmp_path: Path, config: RunConfig) -> str | None:
    context: Any = SimpleNamespace(task=SimpleNamespace(name="collect"))
    with temporary_settings({PREFECT_LOCAL_STORAGE_PATH: tmp_path / "results"}):
        return policy.compute_key(context, {"config": config}, {})


def test_record_of_a_complete_artifact_remains(
    tmp_path: Path, config: RunConfig, artifact: Artifact
) -> None:
    policy, record = policy_and_record(tmp_path)
    assert compute(policy, tmp_path, config) == record.name
    assert record.exists()


@pytest.mark.parametrize("damage", ["artifact", "file", "content"])
def test_record_of_a_damaged_artifact_is_removed(
    tmp_path: Path, config: RunConfig, artifact: Artifact, damage: str
) -> None:
    policy, record = policy_and_record(tmp_path)
    victim = artifact.directory / "corpus.jsonl"
    if damage == "artifact":
        artifact.directory.rename(tmp_path / "elsewhere")
    elif damage == "file":
        victim.unlink()
    else:
        victim.write_text("[]")
    assert artifact_problem(KEY, config) is not None
    assert compute(policy, tmp_path, config) == record.name
    assert not record.exists()


def test_record_of_a_moved_workspace_refers_to_its_new_place(
    tmp_path: Path, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = JSONSerializer().dumps(StageResult(artifact=artifact, ran=True))
    moved = tmp_path / "moved"
    moved.mkdir()
    (tmp_path / "corpora").rename(moved / "corpora")
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(moved))
    result = JSONSerializer().loads(record)
    assert isinstance(result, StageResult)
    assert result.artifact == open_artifact(moved / "corpora" / KEY.key)


@pytest.mark.parametrize("lost", ["stage", "path"])
def test_damaged_record_is_a_validation_error(artifact: Artifact, lost: str) -> None:
    values = StageResult(artifact=artifact, ran=True).model_dump()
    del values["artifact"][lost]
    with pytest.raises(ValidationError, match=rf"artifact\.{lost}\n +Field required"):
        StageResult.model_validate(values)


def test_artifact_with_another_key_is_refused(config: RunConfig, artifact: Artifact) -> None:
    other = StageKey.of("collect", 2, {})
    assert artifact_problem(other, config, artifact.directory) == f"it was built with key {KEY.key}"
    assert artifact_directory(KEY) == artifact.directory


def test_error_while_computing_a_key_is_raised(
    tmp_path: Path, config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(config: RunConfig) -> StageKey:
        raise ConfigError("no such file")

    policy = ArtifactPolicy(broken, lambda config: None)
    with pytest.raises(ConfigError):
        compute(policy, tmp_path, config)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RankLostError("rank 1"), True),
        (ConfigError("lr"), False),
        (ConnectionError(), True),
        (OSError(errno.EIO, "Input/output error", "a.bin"), True),
        (OSError(errno.ENOSPC, "No space left on device", "a.bin"), False),
        (ValueError(), False),
    ],
)
def test_only_transient_errors_are_retried(error: Exception, expected: bool) -> None:
    assert should_retry(None, None, Failed(data=error)) is expected


def test_counts_are_summarized_in_words() -> None:
    counts = {
        "documents": 1786,
        "vocab_size": 8192,
        "valid_ppl": 98.7654,
        "best": "iter_0000700",
        "checkpoints": [1, 2],
        "detail": {},
    }
    assert summarize(counts) == (
        "1,786 documents, vocab size 8,192, valid ppl 98.77, best iter_0000700, 2 checkpoints"
    )
    one = {"documents": 1, "removed_copies": 1, "checkpoints": [1], "test": {"samples": 1}}
    assert summarize(one) == "1 document, 1 removed copy, 1 checkpoint, 1 test sample"


def test_error_of_a_key_is_only_reported_by_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> StageKey:
        raise DataFormatError("no file matches '*.txt'")

    shown: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: shown.append(record.getMessage()))
    log = logging.getLogger("prefect.task_runs")
    context = SimpleNamespace(task=SimpleNamespace(name="collect"))
    monkeypatch.setattr("prefect.task_engine.TaskRunContext.get", lambda: context)
    engine: Any = SimpleNamespace(
        task=SimpleNamespace(cache_policy=ArtifactPolicy(fail)), parameters={}, logger=log
    )
    shorten_user_errors()
    for name in RUN_LOGGERS:
        logging.getLogger(name).addHandler(handler)
    try:
        assert SyncTaskRunEngine.compute_transaction_key(engine) is None
    finally:
        for name in RUN_LOGGERS:
            logging.getLogger(name).removeHandler(handler)
    assert shown == []
