"""Upload of an export to a stand-in for the Hugging Face hub, with the hub's own client."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from prefect.logging import disable_run_logger

from megacore.artifact import Artifact, StageKey, Workspace, build_artifact
from megacore.artifact.files import write_json
from megacore.config.train import HubConfig
from megacore.errors import ConfigError, HubError
from tasks import push as stage
from tasks._mlflow import RunFacts, Tracking
from tasks._run_page import HUB_TAG, NOTE, describe_model
from tests.tasks.conftest import make_config
from tests.tasks.test_run_page import receipt, run_id

__all__ = ["receipt", "run_id"]
TOKEN = "hf_c4n4ry0123456789"
REPOSITORY = "my-team/my-model"


@dataclass
class Hub:
    """Repositories of the stand-in, its faults, and the requests that it received."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    commits: list[dict[str, Any]] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=dict)
    """Status of the next requests by the last part of their path."""
    large_files: bool = False
    """True if weights are sent to a store of large files, which the stand-in refuses."""
    tokens: set[str | None] = field(default_factory=set)

    @property
    def head(self) -> str:
        return hashlib.sha1(str(len(self.commits)).encode()).hexdigest()

    def answer(self, path: str, body: bytes) -> Any:
        match path.removeprefix("/api/").split("/"):
            case ["validate-yaml"]:
                return {"errors": [], "warnings": []}
            case ["repos", "create"]:
                values = json.loads(body)
                name = f"{values['organization']}/{values['name']}"
                self.files.setdefault(name, {})
                self.private.setdefault(name, values["visibility"] == "private")
                return {"url": f"{self.url}/{name}"}
            case ["models", owner, name, "preupload", "main"]:
                stored = self.files[f"{owner}/{name}"]
                return {"files": [self._mode(stored, row) for row in json.loads(body)["files"]]}
            case ["models", owner, name, "commit", "main"]:
                return self._commit(f"{owner}/{name}", body)
            case ["", owner, name, "info", "lfs", "objects", "batch"]:
                place = {"upload": {"href": f"{self.url}/store", "header": {}}}
                rows = json.loads(body)["objects"]
                return {"transfer": "basic", "objects": [row | {"actions": place} for row in rows]}
            case ["models", owner, name, "tree", "main"]:
                stored = self.files[f"{owner}/{name}"]
                return [{"type": "file", "path": path, "oid": "", "size": 1} for path in stored]
            case ["models", owner, name, *_] if f"{owner}/{name}" in self.private:
                values = {"id": f"{owner}/{name}", "sha": self.head, "siblings": []}
                return values | {"private": self.private[f"{owner}/{name}"]}
        return None  # the client also asks for what a hub need not have

    def _mode(self, stored: dict[str, bytes], row: dict[str, Any]) -> dict[str, Any]:
        content = stored.get(row["path"])
        oid = None if content is None else blob(content)
        large = self.large_files and row["path"].endswith(".safetensors")
        mode = "lfs" if large else "regular"
        return {"path": row["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def _commit(self, repository: str, body: bytes) -> dict[str, Any]:
        stored, rows = self.files[repository], [json.loads(line) for line in body.splitlines()]
        for row in rows[1:]:
            if row["key"] == "file":
                stored[row["value"]["path"]] = base64.b64decode(row["value"]["content"])
            else:
                del stored[row["value"]["path"]]
        self.commits.append(rows[0]["value"] | {"sent": [row["value"]["path"] for row in rows[1:]]})
        return {
            "commitUrl": f"{self.url}/{repository}/commit/{self.head}",
            "commitOid": self.head,
        }


def blob(content: bytes) -> str:
    """Return git's object id of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(("/api/models", "/api/repos")):
            self.hub.tokens.add(self.headers.get("Authorization"))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status = self.hub.statuses.get(path.split("/")[-1], 200)
        answer = self.hub.answer(path, body) if status == 200 else None
        status = 404 if answer is None and status == 200 else status
        answer = {"error": "no, sorry."} if answer is None else answer
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self.do_POST()

    def do_PUT(self) -> None:
        self.do_POST()

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Provide a server that the hub's client in this process talks to, and a token."""
    handler = type("Handler", (_Handler,), {"hub": Hub()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", handler.hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield handler.hub
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "source" / "model"
    directory.mkdir(parents=True)
    (directory / "README.md").write_text("---\nlicense: mit\n---\nA model.\n")
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def send(directory: Path, *, private: bool = True) -> dict[str, str]:
    return stage.upload(directory, REPOSITORY, private=private, message="Upload it")


def test_upload_is_private_and_repeating_it_commits_nothing(hub: Hub, model: Path) -> None:
    first = send(model)
    assert hub.files[REPOSITORY].keys() == {"README.md", "config.json", "model.safetensors"}
    assert hub.private[REPOSITORY]
    assert first == {
        "repository": REPOSITORY,
        "url": f"{hub.url}/{REPOSITORY}",
        "commit": hub.head,
        "address": f"{hub.url}/{REPOSITORY}/tree/{hub.head}",
    }
    assert send(model) == first
    assert [commit["summary"] for commit in hub.commits] == ["Upload it"]
    assert hub.tokens == {f"Bearer {TOKEN}"}


def test_changed_files_are_sent_and_weights_of_other_names_deleted(hub: Hub, model: Path) -> None:
    send(model)
    hub.files[REPOSITORY] |= {"picture.png": b"p", ".gitattributes": b"a"}
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    send(model)
    assert sorted(hub.commits[1]["sent"]) == [
        "model-00001-of-00001.safetensors",
        "model.safetensors",
    ]
    assert "model.safetensors" not in hub.files[REPOSITORY]
    assert "picture.png" in hub.files[REPOSITORY]


def test_private_upload_to_a_public_repository_is_refused(hub: Hub, model: Path) -> None:
    send(model, private=False)
    assert hub.private[REPOSITORY] is False
    with pytest.raises(ConfigError, match=r"is public and export\.hub_private is true"):
        send(model)
    assert len(hub.commits) == 1


@pytest.mark.parametrize(
    ("part", "status", "error", "message"),
    [
        ("create", 401, ConfigError, "the token is invalid"),
        ("main", 403, ConfigError, r"refused the upload with 403 \(.*no, sorry\): the token has"),
        ("create", 429, HubError, r"answered 429 \(.*no, sorry\): start again later"),
    ],
)
def test_refusals_are_final_and_failures_retryable(
    hub: Hub, model: Path, part: str, status: int, error: type[Exception], message: str
) -> None:
    hub.statuses[part] = status
    with pytest.raises(error, match=message) as raised:
        send(model)
    assert str(raised.value).startswith("export.push_to_hub is my-team/my-model, but the hub at")
    assert "\n" not in str(raised.value)
    assert not hub.commits


def test_unreachable_hub_is_a_retryable_failure(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="cannot be reached") as raised:
        send(model)
    assert raised.value.retryable


def test_broken_upload_of_a_large_file_is_a_retryable_failure(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    hub.large_files = True
    hub.statuses["store"] = 400
    with pytest.raises(HubError, match=r"did not take the weights \(.*no, sorry") as raised:
        send(model)
    assert raised.value.retryable
    assert not hub.commits


def test_missing_token_and_offline_mode_are_refused_at_the_start(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    section = HubConfig(push_to_hub=REPOSITORY)
    stage.check_push(section)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    stage.check_push(HubConfig())
    with pytest.raises(ConfigError, match=r"there is no token for http.*: set HF_TOKEN"):
        stage.check_push(section)
    (tmp_path / "token").write_text(TOKEN)
    stage.check_push(section)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"):
        stage.check_push(section)
    assert hub.tokens == set()


@pytest.mark.parametrize("name", ["my-model", "a/b/c", "a/", "a/b--c", "https://hub/a/b", "a/b c"])
def test_name_without_owner_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="give the owner and the name of a repository"):
        HubConfig(push_to_hub=name)


def artifact(kind: str, source: Path, **counts: Any) -> Artifact:
    """Seal a copy of the files in `source` as an artifact."""

    def fill(directory: Path) -> dict[str, Any]:
        for path in source.rglob("*"):
            if path.is_file():
                copy = directory / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(path.read_bytes())
        return counts

    built, _ = build_artifact(Workspace.of().folder(kind), StageKey(kind, 1, {}, {}), fill)
    return built


def test_stage_records_the_commit_in_mlflow_and_uploads_once(
    hub: Hub,
    tracking: Tracking,
    model: Path,
    facts: RunFacts,
    receipt: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tracking.workspace.root))
    results = describe_model(tracking, facts, receipt)
    client = tracking.client
    config = make_config()
    export = config.export.model_copy(update={"push_to_hub": REPOSITORY})
    config = config.model_copy(update={"export": export})
    published = model.parent.parent / "published-source"
    published.mkdir()
    write_json(published / "receipt.json", receipt)
    inputs = (
        artifact("train", published),
        artifact("convert", model.parent, iteration=20),
        artifact("publish", published),
    )
    with disable_run_logger():
        pushed = stage.push.fn(config, *inputs)
        assert pushed.ran
        assert not stage.push.fn(config, *inputs).ran
    (commit,) = hub.commits
    assert commit["summary"] == f"Upload {config.name}: run {inputs[0].key}, iteration 20"
    address = f"{hub.url}/{REPOSITORY}/tree/{hub.head}"
    line = f"- Hugging Face hub: {address}"
    version = client.get_model_version("m", "1")
    logged = client.get_logged_model(receipt["model_id"])
    assert version.tags[HUB_TAG] == logged.tags[HUB_TAG] == address
    assert client.get_run(receipt["run_id"]).data.tags[HUB_TAG] == address
    assert version.description.split("\n")[3] == logged.tags[NOTE].split("\n")[3] == line
    assert describe_model(tracking, facts, receipt) == [*results, line]
    assert client.get_model_version("m", "1").description == version.description
    secret = [
        path
        for path in tracking.workspace.root.rglob("*")
        if path.is_file() and TOKEN.encode() in path.read_bytes()
    ]
    assert secret == []
