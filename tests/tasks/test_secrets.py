"""Absence of the configuration's secrets in MLflow and in Prefect's artifacts."""

from pathlib import Path
from typing import Any

import pytest

from megacore.config.data import HttpSource
from megacore.errors import ConfigError
from tasks import _pipeline
from tasks._cli import _refuse_secrets
from tasks._mlflow import RunFacts, Tracking, ensure_run
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
        _pipeline, "create_markdown_artifact", lambda text, **values: shown.append(text)
    )
    _pipeline.StageRunner.start(config_with_secrets())
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
