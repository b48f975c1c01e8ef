"""Absence of the configuration's secrets in MLflow and in Prefect's artifacts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megacore.artifact import Workspace
from megacore.config.data import HttpSource
from megacore.errors import ConfigError, LaunchError
from tasks import _cli, _stage_runner
from tasks._cli import _refuse_secrets
from tasks._mlflow import RunFacts, Tracking, ensure_run
from tasks._publication import mlflow_lines
from tests.tasks.conftest import make_config

CANARY = "c4n4ry-0123456789"


def config_with_secrets() -> Any:
    url = f"https://me:{CANARY}@host/a.jsonl?token={CANARY}"
    source = HttpSource.model_validate({"kind": "http", "files": [{"url": url}]})
    config = make_config()
    deepspeed = config.deepspeed.model_copy(
        update={"config": {"wandb": {"enabled": False, "api_key": CANARY}}}
    )
    data = config.data.model_copy(update={"source": source})
    return config.model_copy(update={"data": data, "deepspeed": deepspeed})


def test_mlflow_contains_no_secret(
    tracking: Tracking,
    run_directory: Path,
    facts: RunFacts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    tags = RunFacts(facts.key, facts.datasets, {"note": f"https://host/?token={CANARY}"})
    ensure_run(tracking, run_directory, config_with_secrets(), tags)
    files_with_secret = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and CANARY.encode() in path.read_bytes()
    ]
    assert files_with_secret == []
    assert list(tmp_path.rglob("config.yaml")), "the configuration is there"


def test_prefect_artifacts_contain_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(
        _stage_runner, "create_markdown_artifact", lambda text, **values: shown.append(text)
    )
    _stage_runner.StageRunner.start(config_with_secrets())
    assert "***@host/a.jsonl" in shown[0]
    assert CANARY not in shown[0]


def test_override_with_a_credential_is_refused() -> None:
    plain = {
        "train.train_iters": 50,
        "data.source": {"kind": "jsonl", "files": ["a.jsonl"], "key": "text"},
        "x": [1, None],
    }
    _refuse_secrets(plain)
    for secret in (
        {"data.source": {"kind": "http", "files": [{"url": f"https://me:{CANARY}@host/a.jsonl"}]}},
        {"deepspeed.config.wandb.api_key": CANARY},
    ):
        with pytest.raises(ConfigError, match="holds a credential") as caught:
            _refuse_secrets(secret)
        assert CANARY not in str(caught.value)


def test_links_to_a_server_hold_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:{CANARY}@host:5000")
    monkeypatch.setattr("tasks._publication.standing", lambda *names: "alias candidate")
    monkeypatch.setattr("tasks._publication.run_url", lambda _, server, run: f"{server}/{run}")
    tracking = Tracking(Workspace(tmp_path), "pretrain")
    monkeypatch.setitem(vars(tracking), "experiment_id", "7")
    receipt = {"uri": "models:/m/1", "model_name": "m", "version": "1", "run_id": "abc"}
    lines = mlflow_lines(tracking, receipt)
    assert "all runs by PPL: [pretrain](http://host:5000/#/experiments/7/runs" in lines[2]
    assert CANARY not in "".join(lines)


def test_the_refusal_of_a_server_hides_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://me:{CANARY}@host:4200/api"
    monkeypatch.setattr(_cli, "PREFECT_API_URL", SimpleNamespace(value=lambda: url))
    monkeypatch.setattr(_cli, "answers", lambda url: False)
    with pytest.raises(LaunchError, match=r"http://\*\*\*@host:4200/api") as caught:
        _cli.require_server()
    assert CANARY not in str(caught.value)
