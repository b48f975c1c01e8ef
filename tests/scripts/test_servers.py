"""`make server` and `make stop` in a copy of the repository, on free ports."""

import json
import os
import socket
import stat
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError

import psutil
import pytest
import yaml
from websockets import ConnectionClosed, Subprotocol
from websockets.sync.client import connect

from tests._limits import HANG
from tests.scripts._clone import Clone, ask, get


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    clone = Clone(tmp_path_factory.mktemp("clone"))
    yield clone
    clone.servers("stop")


@pytest.fixture
def idle(tmp_path: Path) -> Clone:
    """Provide a clone whose servers never start."""
    return Clone(tmp_path / "idle")


def test_port_in_use_is_refused_and_leaves_no_files(idle: Clone) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        result = idle.servers("start", MLFLOW_PORT=str(port))
    assert result.returncode == 8
    assert result.stderr.startswith(f"error: port {port} for the MLflow server cannot be used")
    assert f"process {os.getpid()}" in result.stderr
    assert f"make server MLFLOW_PORT={port + 1}" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (idle.workspace / "servers.json").exists()
    assert not (idle.root / "prefect.toml").exists()


@pytest.mark.parametrize("port", ["many", "0", "70000", "-1"])
def test_invalid_port_is_refused(idle: Clone, port: str) -> None:
    result = idle.servers("start", PREFECT_PORT=port)
    assert result.returncode == 2
    assert f"PREFECT_PORT is {port!r}" in result.stderr


def test_one_port_for_both_servers_is_refused(idle: Clone) -> None:
    port = str(idle.ports[0])
    result = idle.servers("start", PREFECT_PORT=port, MLFLOW_PORT=port)
    assert result.returncode == 2
    assert f"PREFECT_PORT and MLFLOW_PORT are both {port}" in result.stderr
    assert not (idle.workspace / "servers.json").exists()


@pytest.mark.parametrize("own", [True, False])
def test_stop_removes_only_the_prefect_toml_of_its_servers(idle: Clone, own: bool) -> None:
    urls = [f"http://127.0.0.1:{port}" for port in idle.ports]
    idle.workspace.mkdir()
    state = {"token": "0" * 16, "prefect_url": urls[0], "mlflow_url": urls[1], "processes": {}}
    (idle.workspace / "servers.json").write_text(json.dumps(state))
    toml = idle.root / "prefect.toml"
    address = f"{urls[0] if own else 'http://127.0.0.1:1'}/api"
    toml.write_text(
        f'# Written by `make server`; `make stop` removes it.\napi = {{ url = "{address}" }}\n'
    )
    assert idle.servers("stop").returncode == 0
    assert not (idle.workspace / "servers.json").exists()
    assert toml.exists() is not own


def test_servers_of_another_host_with_this_workspace_are_left_to_it(idle: Clone) -> None:
    """A second start would let two servers write one database, a stop would forget the first."""
    idle.workspace.mkdir()
    state = {"token": "0" * 16, "prefect_url": "p", "mlflow_url": "m", "processes": {}}
    record = json.dumps({**state, "host": "login-1"})
    (idle.workspace / "servers.json").write_text(record)
    for command in ("start", "stop"):
        result = idle.servers(command)
        assert result.returncode == 8
        assert "the servers of this workspace run on login-1: use or end them" in result.stderr
        assert (idle.workspace / "servers.json").read_text() == record


def test_prefect_toml_of_the_user_is_not_overwritten(idle: Clone) -> None:
    (idle.root / "prefect.toml").write_text("debug_mode = true\n")
    result = idle.servers("start")
    assert result.returncode == 8
    assert "was not written by make server" in result.stderr
    assert (idle.root / "prefect.toml").read_text() == "debug_mode = true\n"


def test_stop_succeeds_and_status_fails_without_servers(idle: Clone) -> None:
    stopped, status = idle.servers("stop"), idle.servers("status")
    assert stopped.returncode == 0
    assert "nothing to stop" in stopped.stdout
    assert status.returncode == 8
    assert "make server starts them" in status.stderr


def test_deploy_without_a_server_is_refused(idle: Clone) -> None:
    result = idle.servers("deploy")
    assert result.returncode == 2
    assert result.stderr == (
        "error: PREFECT_API_URL is not set: name the server, such as https://prefect.example.org/api\n"
    )


@pytest.mark.slow
def test_failed_start_is_rolled_back(idle: Clone) -> None:
    # A directory where Prefect's database must be.
    (idle.workspace / "prefect" / "prefect.db").mkdir(parents=True)
    before = set(psutil.pids())
    result = idle.servers("start")
    assert result.returncode == 8, result.stderr
    assert "prefect ended while it was starting" in result.stderr
    assert "prefect.log" in result.stderr
    assert not (idle.workspace / "servers.json").exists()
    for pid in set(psutil.pids()) - before:
        with suppress(psutil.Error):
            assert str(idle.workspace) not in " ".join(psutil.Process(pid).cmdline())


@pytest.mark.slow
def test_servers_start_run_a_deployment_and_stop(clone: Clone) -> None:
    started = clone.servers("start")
    assert started.returncode == 0, started.stderr
    prefect_url, mlflow_url = (f"http://127.0.0.1:{port}" for port in clone.ports)
    assert prefect_url in started.stdout
    assert mlflow_url in started.stdout
    token = clone.state()["token"]
    assert len(clone.left_over(token)) >= 3
    assert clone.login in started.stdout

    check_deployments(clone, prefect_url)
    assert "MLflow" in get(mlflow_url, clone.login)
    assert f"{prefect_url}/api" in get(f"{prefect_url}/ui-settings")
    again = clone.servers("start").stdout
    assert "already running" in again
    assert f"cat {clone.password_file}" in again
    assert clone.login not in again
    assert clone.servers("status").returncode == 0
    check_outsiders_are_refused(clone, prefect_url, mlflow_url)
    check_password_is_in_no_argument_or_log(clone, token)

    check_limit_keeps_the_users_value(clone, prefect_url)
    check_deployment_run(clone)
    check_stop_ends_a_run_and_its_children(clone, prefect_url)
    assert clone.left_over(token) == []
    assert not (clone.root / "prefect.toml").exists()
    assert not (clone.workspace / "servers.json").exists()
    assert not (clone.root / "home").exists(), "files were written outside the workspace"


def check_deployments(clone: Clone, prefect_url: str) -> None:
    status, text = ask(f"{prefect_url}/api/deployments/filter", {}, clone.login)
    assert status == 200
    deployed = json.loads(text)
    expected = yaml.safe_load((clone.root / "prefect.yaml").read_text())["deployments"]
    assert sorted((item["entrypoint"], item["name"]) for item in deployed) == sorted(
        (item["entrypoint"], item["name"]) for item in expected
    )
    for item in deployed:
        assert item["work_pool_name"] == "local"
        assert item["pull_steps"] == [
            {"prefect.deployments.steps.set_working_directory": {"directory": str(clone.root)}}
        ]


def check_outsiders_are_refused(clone: Clone, prefect_url: str, mlflow_url: str) -> None:
    """Try what another local user, a web page and a rebound host name would."""
    deployment = {"name": "run-my-code", "flow_id": "00000000-0000-0000-0000-000000000000"}
    evil = {"Origin": "http://evil.example"}
    rebound = {"Host": "10.evil.example"}  # MLflow's default hosts include 10.*
    prefect, mlflow = f"{prefect_url}/api", f"{mlflow_url}/api/2.0/mlflow/experiments"
    for login in (None, "megacore:wrong", "megacore:"):
        for headers in ({}, evil, rebound):
            assert ask(f"{prefect}/deployments/", deployment, login, **headers)[0] == 401
            assert ask(f"{prefect}/admin/settings", None, login, **headers)[0] == 401
        for headers in ({}, evil):
            assert ask(f"{mlflow}/create", {"name": "evil"}, login, **headers)[0] in (401, 403)
            assert ask(f"{mlflow}/search?max_results=1", None, login)[0] == 401
    for path in ("", "/ajax-api/3.0/mlflow/assistant/config", "/graphql"):
        assert ask(f"{mlflow_url}{path}")[0] == 401
    assert ask(f"{mlflow}/search?max_results=1", None, clone.login)[0] == 200
    assert ask(f"{mlflow}/search?max_results=1", None, clone.login, **rebound)[0] == 403
    assert ask(f"{mlflow}/create", {"name": "evil"}, clone.login, **evil)[0] == 403
    check_origins(prefect_url)
    check_websocket_needs_the_password(clone)


def check_origins(prefect_url: str) -> None:
    """Check that browsers let only the pages of Prefect itself read answers and send JSON."""
    page = f"http://localhost:{prefect_url.rpartition(':')[2]}"
    for origin, allowed in (
        (prefect_url, prefect_url),
        (page, page),
        ("http://evil.example", None),
        ("null", None),
    ):
        preflight = urllib.request.Request(f"{prefect_url}/api/deployments/", method="OPTIONS")
        preflight.add_header("Origin", origin)
        preflight.add_header("Access-Control-Request-Method", "POST")
        try:
            with urllib.request.urlopen(preflight, timeout=HANG) as answer:
                headers = answer.headers
        except HTTPError as refused:
            headers = refused.headers
        assert headers.get("access-control-allow-origin") == allowed


def check_websocket_needs_the_password(clone: Clone) -> None:
    address = f"ws://127.0.0.1:{clone.ports[0]}/api/events/in"
    for token, kind in (("wrong", None), (clone.login, "auth_success")):
        with connect(address, subprotocols=[Subprotocol("prefect")]) as events:
            events.send(json.dumps({"type": "auth", "token": token}))
            if kind is None:
                with pytest.raises(ConnectionClosed, match="Invalid token"):
                    events.recv(timeout=HANG)
            else:
                assert json.loads(events.recv(timeout=HANG))["type"] == kind


def check_password_is_in_no_argument_or_log(clone: Clone, token: str) -> None:
    password = clone.login.partition(":")[2]
    commands = [psutil.Process(pid).cmdline() for pid in clone.left_over(token)]
    assert len(commands) >= 3
    assert password not in str(commands)
    holding = {
        path.relative_to(clone.root)
        for path in clone.root.rglob("*")
        if path.is_file() and password.encode() in path.read_bytes()
    }
    expected = {Path("prefect.toml"), Path("workspace/servers.password")}
    assert holding == expected
    assert {stat.S_IMODE((clone.root / path).stat().st_mode) for path in expected} == {0o600}


def check_limit_keeps_the_users_value(clone: Clone, prefect_url: str) -> None:
    from tasks._devices import limit_name

    name = limit_name("cpu")
    page = f"{prefect_url}/api/v2/concurrency_limits/{name}"
    assert json.loads(get(page, clone.login))["limit"] == 1
    assert ask(page, {"limit": 3}, clone.login, method="PATCH")[0] == 204
    assert json.loads(get(page, clone.login))["limit"] == 3
    clone.deploy_only("env")
    assert clone.servers("deploy", PREFECT_API_URL=f"{prefect_url}/api").returncode == 0
    assert json.loads(get(page, clone.login))["limit"] == 3


def check_deployment_run(clone: Clone) -> None:
    run = clone.prefect("deployment", "run", "probe/env", "--watch")
    assert run.returncode == 0, run.stdout + run.stderr
    facts = json.loads((clone.workspace / "probe.json").read_text())
    assert facts["cwd"] == str(clone.root)
    assert facts["env"]["MEGACORE_WORKSPACE"] == str(clone.workspace)
    assert facts["env"]["PREFECT_RESULTS_LOCAL_STORAGE_PATH"].startswith(str(clone.workspace))
    assert facts["env"]["MLFLOW_TRACKING_URI"] == f"sqlite:///{clone.workspace / 'mlflow.db'}"
    assert facts["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"


def check_stop_ends_a_run_and_its_children(clone: Clone, prefect_url: str) -> None:
    (clone.workspace / "probe.json").unlink()
    deployment = json.loads(get(f"{prefect_url}/api/deployments/name/probe/env", clone.login))
    page = f"{prefect_url}/api/deployments/{deployment['id']}/create_flow_run"
    deadline = time.monotonic() + HANG
    status, text = ask(page, {"parameters": {"wait": True}}, clone.login)
    assert status == 201, text
    while not (clone.workspace / "probe.json").exists():
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.5)
    child = psutil.Process(json.loads((clone.workspace / "probe.json").read_text())["child"])
    stopped = clone.servers("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
