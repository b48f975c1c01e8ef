"""Secrets appear in no message, log or file, and downloads that need them succeed."""

import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megacore.artifact import StageKey, build_artifact
from megacore.config.data import HttpSource
from megacore.config.difference import compare_configurations
from megacore.corpus.collect import collect, fingerprint
from megacore.errors import ConfigError, MegacoreError
from megacore.jobs.run import ConvertJob, RankJob, TrainJob
from megacore.launch.exit_reason import ExitReason
from megacore.observe.events import EventReader, EventWriter
from megacore.redact import address_identity, redact, redact_log, redact_values
from tests._tiny import tiny_config
from tests.train import _runs

CANARY = "c4n4ry-0123456789"
CORPUS = b'{"text": "def f(): pass"}\n' * 20


class ProtectedFileHandler(BaseHTTPRequestHandler):
    """A server that returns its file only for a user, a password and a token."""

    def do_GET(self) -> None:
        allowed = f"token={CANARY}" in self.path and self.headers.get(
            "Authorization", ""
        ).startswith("Basic ")
        self.send_response(200 if allowed else 403)
        self.send_header("Content-Length", str(len(CORPUS) if allowed else 0))
        self.end_headers()
        self.wfile.write(CORPUS if allowed else b"")

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), ProtectedFileHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def source(port: int, token: str = CANARY) -> HttpSource:
    url = f"http://me:{CANARY}@127.0.0.1:{port}/a.jsonl?token={token}"
    return HttpSource.model_validate({"kind": "http", "files": [{"url": url}]})


def files_with_secret(directory: Path) -> list[str]:
    """Return the files in `directory` that contain the canary."""
    return [
        str(path)
        for path in directory.rglob("*")
        if path.is_file() and CANARY.encode() in path.read_bytes()
    ]


@pytest.mark.parametrize(
    "text",
    [
        f"https://me:{CANARY}@host/a.jsonl",
        f"https://me:a@{CANARY}@host/a.jsonl",
        f"https://me:a'{CANARY}@host/a.jsonl",
        f"https://host/a?sv=1&sig={CANARY}&x=2",
        f"https://host/a?X-Amz-Signature={CANARY}",
        f"https://host/a?access_token={CANARY}#part",
        f"{{'Authorization': 'Bearer {CANARY}'}}",
        f"postgresql://mlflow:{CANARY}@db:5432/mlflow could not be opened",
    ],
)
def test_secrets_in_text_are_redacted(text: str) -> None:
    assert CANARY in text
    assert CANARY not in redact(text)
    assert CANARY not in str(MegacoreError(text))
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "https://host/a.jsonl?part=3",
        "train.micro_batch_size=2",
        "me@host and you@host",
        "a token=b",
        "s3://bucket/key=1/a",
        "Basic programming in Python, and basic arithmetic",
    ],
)
def test_text_without_secrets_is_unchanged(text: str) -> None:
    assert redact(text) == text


def test_secret_environment_variables_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        "HF_TOKEN",
        "MLFLOW_TRACKING_PASSWORD",
        "PREFECT_API_KEY",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
    )
    for number, name in enumerate(names):
        monkeypatch.setenv(name, f"{CANARY}{number}")
        assert redact(f"the server refused {CANARY}{number}.") == "the server refused ***."
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_TOKEN", "text")
    assert redact("a text") == "a text", "values this short are not treated as secrets"


def test_values_are_redacted_by_their_keys() -> None:
    values = {
        "wandb": {"api_key": CANARY, "project": "p"},
        "storage_options": [{"secret": CANARY, "client_secret": CANARY}],
        "token": CANARY,
        "hf_token": CANARY,
    }
    assert CANARY not in json.dumps(redact_values(values))
    harmless = {
        "eod_token": "<|endoftext|>",
        "key": "text",
        "tokens": 5,
        "prefix_token": "<fim_prefix>",
        "password": "",
    }
    assert redact_values(harmless) == harmless


def test_address_identity_depends_on_content_and_not_on_credentials() -> None:
    plain = "https://host/a.jsonl"
    assert address_identity(plain) == plain
    assert address_identity(f"https://me:{CANARY}@host/a.jsonl") == plain
    assert address_identity(f"{plain}?token={CANARY}") == address_identity(f"{plain}?token=renewed")
    first, second = (address_identity(f"{plain}?key={content}") for content in (CANARY, "another"))
    assert first != second, "the parameter `key` may select the content"
    assert CANARY not in first


def test_download_leaves_no_secret_in_logs_and_files(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))
    caplog.set_level(logging.DEBUG)
    key = StageKey.of("collect", 1, {"source": fingerprint(source(port))})
    artifact, _ = build_artifact(
        tmp_path / "corpora", key, lambda directory: collect(source(port), directory)
    )
    assert artifact.counts["documents"] == 20
    with pytest.raises(MegacoreError, match=r"answered 403"):
        collect(source(port, token="wrong-" + CANARY), tmp_path / "other")
    assert "HTTP Request: GET" in caplog.text, "the client logs its requests"
    assert CANARY not in caplog.text
    assert files_with_secret(tmp_path) == []


def job_with_secret(port: int, directory: Path) -> TrainJob:
    """Return a job whose data source has the canary in its URL."""
    config = _runs.config()
    data = config.data.model_copy(update={"source": source(port)})
    return _runs.job(config.model_copy(update={"data": data}), directory, directory)


def test_job_file_of_a_training_contains_no_secret_and_is_readable(
    port: int, tmp_path: Path
) -> None:
    job = job_with_secret(port, tmp_path)
    path = tmp_path / "run.json"
    job.write(path)
    assert files_with_secret(tmp_path) == []
    read_config = TrainJob.read(path).config
    assert (
        compare_configurations(json.loads(path.read_text())["config"], job.config, another_run=True)
        == []
    )
    assert isinstance(read_config.data.source, HttpSource)
    assert isinstance(job, RankJob)


def test_job_file_of_a_conversion_contains_no_secret(port: int, tmp_path: Path) -> None:
    job = job_with_secret(port, tmp_path)
    path = tmp_path / "run.json"
    published = {"source": source(port).model_dump_json()}
    values = job.model_dump(exclude={"planned_samples"}) | {
        "checkpoint": "iter_0000001",
        "output_directory": "out",
        "card": published,
    }
    ConvertJob.model_validate(values).write(path)
    assert files_with_secret(tmp_path) == []
    assert (
        ConvertJob.read(path)
        .card["source"]
        .startswith('{"kind":"http","files":[{"url":"http://***@127.0.0.1')
    )


def test_paths_that_equal_a_secret_are_unchanged_in_jobs_and_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "megacore"
    job = _runs.job(_runs.config(), directory, directory)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "megacore")
    job.write(tmp_path / "run.json")
    assert TrainJob.read(tmp_path / "run.json") == job
    with EventWriter(tmp_path / "events.jsonl", 1) as events:
        events.write(
            "checkpoint", iteration=1, path=str(directory), message="the password is megacore"
        )
    ((event, _),) = EventReader(tmp_path / "events.jsonl")
    assert (event["path"], event["message"]) == (str(directory), "the password is ***")


def test_manifest_contains_no_secret(tmp_path: Path) -> None:
    key = StageKey.of(
        "collect", 1, {"source": {"url": f"https://me:{CANARY}@host/a", "secret": CANARY}}
    )
    artifact, _ = build_artifact(tmp_path, key, lambda directory: {"documents": 1})
    assert artifact.key == key.key
    assert files_with_secret(tmp_path) == []


def test_errors_events_and_exit_reasons_contain_no_secret(tmp_path: Path) -> None:
    url = f"https://me:{CANARY}@host/a"
    reason = ExitReason.of(3, RuntimeError(f"cannot read {url}"))
    assert CANARY not in json.dumps(asdict(reason))
    assert CANARY not in str(reason.exception())
    with EventWriter(tmp_path / "events.jsonl", 1) as events:
        events.write("warning", message=f"cannot read {url}")
    assert files_with_secret(tmp_path) == []
    with pytest.raises(ConfigError) as caught:
        tiny_config(train={"train_iters": url})
    assert CANARY not in str(caught.value)


def test_tracebacks_in_a_log_contain_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("megacore.test_secrets")
    redact_log(log)
    redact_log(log)
    assert len(log.filters) == 1
    try:
        raise ValueError(f"https://host/a?token={CANARY}")
    except ValueError:
        log.exception("failed at %s", f"https://me:{CANARY}@host")
    assert "failed at https://***@host" in caplog.text
    assert "ValueError: https://host/a?***" in caplog.text
    assert CANARY not in caplog.text
