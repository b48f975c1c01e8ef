"""Commands `make server`, `make stop`, `make status` and `make deploy`.

The first three manage Prefect, its worker and MLflow on this host, on loopback; `make deploy`
prepares a server on another host.

`start` starts all of them or leaves nothing running. The running servers are recorded in
`servers.json` in the workspace; `prefect.toml` in the repository lets a plain `prefect deployment
run pretrain/gpt2-tiny --watch` connect to them.
"""

import asyncio
import contextlib
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from _backends import (  # noqa: E402
    check_backends,
    environment_of,
    mlflow_command,
    protect,
    runs_use_server,
    write_private,
)
from _processes import Started, end, require_free_port, spawn  # noqa: E402

from megacore.artifact import Workspace, lock  # noqa: E402
from megacore.artifact.files import reason_of, write_json  # noqa: E402
from megacore.errors import ConfigError, LaunchError, MegacoreError  # noqa: E402
from megacore.redact import redact  # noqa: E402
from tasks._environment import (  # noqa: E402
    Login,
    check_proxies,
    password_file,
    prepare_environment,
    tracking_uri,
)
from tasks._mlflow import create_store, page_url  # noqa: E402

HOST = "127.0.0.1"
WORK_POOL = "local"
PREFECT_TOML = ROOT / "prefect.toml"
TOML_HEADER = "# Written by `make server`; `make stop` removes it."
START_TIMEOUT = 300.0
"""Maximum number of seconds until a server answers, or between two lines of a deployment's log."""
STOP_GRACE = {"deploy": 5.0, "worker": 28.0, "mlflow": 10.0, "prefect": 10.0}
"""Seconds of grace by process, in the order of stopping; the worker's runs need launch.stop_grace
to end their ranks."""
_DEPLOY_ALL = """
import functools, ssl
ssl.create_default_context = functools.cache(ssl.create_default_context)
from prefect.cli import app
app()
"""
"""Program of `prefect deploy --all` that reads the certificate authorities once.

Prefect reads them for each of four clients per deployment, which takes 30 ms each time.
"""
LEASES = "prefect.server.concurrency.lease_storage.filesystem"
"""Storage of the leases of concurrency limits, so that a restarted server still frees them."""
SILENT_RUN = timedelta(seconds=90)
"""Time without heartbeat after which a run counts as crashed."""


@dataclass
class Servers:
    """Started servers, as recorded in `servers.json`."""

    token: str
    prefect_url: str
    mlflow_url: str
    processes: dict[str, Started] = field(default_factory=dict)
    tracked: bool = False
    """True if runs write to MLflow's server instead of to its store."""
    generated: list[str] = field(default_factory=list)
    """Servers that ask for the workspace's generated password: Prefect, MLflow or both."""
    host: str = ""
    """Host of the processes; empty in records of earlier versions."""

    @classmethod
    def read(cls, path: Path) -> "Servers | None":
        """Read the record, or return None if nothing was started.

        Raises LaunchError if it is damaged, or of another host with the same workspace: from here
        its processes can be neither seen nor ended.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            values["processes"] = {
                name: Started(**entry) for name, entry in values["processes"].items()
            }
            servers = cls(**values)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise LaunchError(
                f"{path} is damaged ({reason_of(error)}): end the servers by hand if they run, "
                "then delete it"
            ) from error
        if servers.host not in ("", socket.gethostname()):
            raise LaunchError(
                f"the servers of this workspace run on {servers.host}: use or end them there (make "
                f"stop); if that host is gone, delete {path}"
            )
        return servers

    def write(self, path: Path) -> None:
        """Write the record."""
        write_json(path, asdict(self))

    @property
    def running(self) -> dict[str, bool]:
        """State of each of the three processes: True if it is alive."""
        return {
            name: name in self.processes and self.processes[name].process() is not None
            for name in ("prefect", "worker", "mlflow")
        }

    def describe(self, workspace: Workspace, *, show_password: bool = False) -> str:
        """Return the addresses and commands for a user, and where the password is, or itself."""
        tracked = f"track    export MLFLOW_TRACKING_URI={self.mlflow_url}\n" if self.tracked else ""
        login = ""
        if self.generated:
            command = f"cat {shlex.quote(str(password_file(workspace)))}"
            shown = f"{Login.read(workspace)} (again: {command})" if show_password else command
            login = f"login    {shown}\n         {_login_use(self.generated)}\n"
        return (
            f"Prefect  {self.prefect_url}\nMLflow   {page_url(self.mlflow_url)}\n{login}{tracked}"
            "run      .venv/bin/prefect deployment run pretrain/gpt2-tiny --watch\n"
            "end      make stop"
        )


def _login_use(servers: list[str]) -> str:
    uses = {
        "Prefect": "Prefect asks for all of it",
        "MLflow": "MLflow for the name before the colon and the password after it",
    }
    return "; ".join(uses[server] for server in servers)


def state_file(workspace: Workspace) -> Path:
    """Return the path of the servers' record."""
    return workspace.root / "servers.json"


def start(workspace: Workspace) -> None:
    """Start the servers that are not running yet.

    If it raises LaunchError, no server is left running.
    """
    servers_before = Servers.read(state_file(workspace))
    if servers_before and all(servers_before.running.values()):
        print(f"already running:\n{servers_before.describe(workspace)}")
        return
    if servers_before:
        stop(workspace)
    if PREFECT_TOML.exists() and not PREFECT_TOML.read_text(encoding="utf-8").startswith(
        TOML_HEADER
    ):
        raise LaunchError(
            f"{PREFECT_TOML} was not written by make server: move it away, then start again"
        )
    check_proxies()
    check_backends()
    prefect_port, mlflow_port = _port("PREFECT_PORT", 4200), _port("MLFLOW_PORT", 5000)
    if prefect_port == mlflow_port:
        raise ConfigError(
            f"PREFECT_PORT and MLFLOW_PORT are both {prefect_port}: give each server its own port"
        )
    require_free_port(prefect_port, "the Prefect server", "PREFECT_PORT")
    require_free_port(mlflow_port, "the MLflow server", "MLFLOW_PORT")
    urls = f"http://{HOST}:{prefect_port}", f"http://{HOST}:{mlflow_port}"
    servers = Servers(
        secrets.token_hex(8), *urls, tracked=runs_use_server(), host=socket.gethostname()
    )
    servers.write(state_file(workspace))
    try:
        if servers.tracked and os.environ.get("MLFLOW_TRACKING_URI") == tracking_uri(workspace):
            os.environ["MLFLOW_TRACKING_URI"] = servers.mlflow_url
        servers.generated, created = protect(workspace, *urls)
        _start_all(servers, workspace, prefect_port, mlflow_port)
    except BaseException:
        stop(workspace)
        raise
    print(servers.describe(workspace, show_password=created))


def _start_all(servers: Servers, workspace: Workspace, prefect_port: int, mlflow_port: int) -> None:
    os.environ.update(
        PREFECT_API_URL=f"{servers.prefect_url}/api",
        PREFECT_SERVER_UI_API_URL=f"{servers.prefect_url}/api",
        PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE=LEASES,
        PREFECT_SERVER_LOGS_STREAM_OUT_ENABLED="true",  # --watch shows the log
        PREFECT_SERVER_LOGS_STREAM_PUBLISHING_ENABLED="true",
        PREFECT_WORKER_QUERY_SECONDS="2",
        MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false",
        PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        PYTHONUNBUFFERED="1",
        PWD=str(ROOT),
    )
    prefect = [sys.executable, "-m", "prefect"]
    _launch(
        servers,
        workspace,
        "prefect",
        [*prefect, "server", "start", "--host", HOST, "--port", str(prefect_port)],
    )
    if not servers.tracked:
        create_store(tracking_uri(workspace))
    _launch(servers, workspace, "mlflow", _mlflow_command(workspace, mlflow_port))
    _wait_healthy(servers, "prefect", f"{servers.prefect_url}/api/health")
    asyncio.run(_prepare_server())
    _launch(servers, workspace, "deploy", _deploy_command())
    _wait_ended(servers.processes["deploy"])
    _launch(servers, workspace, "worker", [*prefect, *_WORKER])
    asyncio.run(_worker_online(servers))
    _wait_healthy(servers, "mlflow", f"{servers.mlflow_url}/health")
    _write_prefect_toml(servers, workspace)


_WORKER = (
    "worker",
    "start",
    "--pool",
    WORK_POOL,
    "--type",
    "process",
    "--name",
    "local",
    "--install-policy",
    "never",
)


def _deploy_command() -> list[str]:
    return [sys.executable, "-c", _DEPLOY_ALL, "--no-prompt", "deploy", "--all"]


def _mlflow_command(workspace: Workspace, port: int) -> list[str]:
    return mlflow_command(workspace, HOST, port)


def _launch(servers: Servers, workspace: Workspace, name: str, command: list[str]) -> None:
    logs = workspace.root / "servers"
    logs.mkdir(exist_ok=True)
    log = logs / f"{name}.log"
    log.unlink(missing_ok=True)
    env = dict(environment_of(name, workspace))
    servers.processes[name] = spawn(name, command, token=servers.token, env=env, cwd=ROOT, log=log)
    servers.write(state_file(workspace))


def _wait_healthy(servers: Servers, name: str, url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=30) as answer:
            if answer.status == 200:
                return
        _require_alive(servers.processes[name], deadline, "does not answer")
        time.sleep(0.3)


def _wait_ended(started: Started) -> None:
    """Wait until a command has finished its work, however slow, as long as its log grows."""
    written, deadline = -1, 0.0
    while True:
        pid, status = os.waitpid(started.pid, os.WNOHANG)
        if pid:
            break
        size = Path(started.log).stat().st_size
        if size != written:
            written, deadline = size, time.monotonic() + START_TIMEOUT
        _require_alive(
            started, deadline, "is not finished and has printed nothing new", ended_is_fine=True
        )
        time.sleep(0.2)
    if status:
        raise LaunchError(
            f"{started.name} failed with exit code "
            f"{os.waitstatus_to_exitcode(status)}{_last_log_line(started)}"
        )


def _require_alive(
    started: Started, deadline: float, problem: str, *, ended_is_fine: bool = False
) -> None:
    if not ended_is_fine and started.process() is None:
        raise LaunchError(f"{started.name} ended while it was starting{_last_log_line(started)}")
    if time.monotonic() > deadline:
        raise LaunchError(
            f"{started.name} {problem} after {START_TIMEOUT:.0f} s{_last_log_line(started)}"
        )


def _last_log_line(started: Started) -> str:
    lines = Path(started.log).read_text(encoding="utf-8", errors="replace").split("\n")
    messages = [line.strip(" │╭╮╰╯─") for line in lines if line.strip(" │╭╮╰╯─")]
    return (
        f": {redact(messages[-1])[:200]} (log: {started.log})"
        if messages
        else f" without a word (log: {started.log})"
    )


async def _prepare_server() -> None:
    """Create the work pool, this host's limits, and the automation that ends silent runs.

    What exists already stays as it is, with the user's changes.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
    from prefect.workers.process import ProcessWorker

    from tasks._devices import limit_names

    template = ProcessWorker.get_default_base_job_template()
    automation = _crash_silent_runs()
    async with get_client() as client:
        with contextlib.suppress(ObjectAlreadyExists):
            await client.create_work_pool(
                WorkPoolCreate(name=WORK_POOL, type="process", base_job_template=template)
            )
        for name in limit_names():
            try:
                await client.read_global_concurrency_limit_by_name(name)
            except ObjectNotFound:
                await client.create_global_concurrency_limit(
                    GlobalConcurrencyLimitCreate(name=name, limit=1, active=True)
                )
        if not await client.read_automations_by_name(automation.name):
            await client.create_automation(automation)


def _crash_silent_runs() -> Any:
    """Return the automation that marks a run as crashed if its heartbeats stop.

    Otherwise a run that is killed together with its worker would stay Running forever.
    """
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

    ended = ("Completed", "Failed", "Cancelled", "Crashed", "Paused", "Suspended")
    return AutomationCore(
        name="crash-silent-runs",
        description=(
            f"A flow run without heartbeat for {SILENT_RUN.seconds} s has lost its process."
        ),
        trigger=EventTrigger(
            match={"prefect.resource.id": "prefect.flow-run.*"},
            after={"prefect.flow-run.heartbeat"},
            expect={
                "prefect.flow-run.heartbeat",
                *(f"prefect.flow-run.{state}" for state in ended),
            },
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=SILENT_RUN,
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED, message=f"no heartbeat for {SILENT_RUN.seconds} s"
            ),
        ],
    )


async def _worker_online(servers: Servers) -> None:
    from prefect.client.orchestration import get_client

    deadline = time.monotonic() + START_TIMEOUT
    async with get_client() as client:
        while not any(
            worker.status == "ONLINE"
            for worker in await client.read_workers_for_work_pool(WORK_POOL)
        ):
            _require_alive(servers.processes["worker"], deadline, "is not online")
            await asyncio.sleep(0.5)


def _toml(text: str) -> str:
    """Return `text` as a string of TOML, which has no surrogate pairs as JSON's escapes have."""
    return json.dumps(text, ensure_ascii=False)


def _write_prefect_toml(servers: Servers, workspace: Workspace) -> None:
    home = workspace.prefect_home
    results = os.environ["PREFECT_RESULTS_LOCAL_STORAGE_PATH"]
    api = {"url": f"{servers.prefect_url}/api"}
    if "Prefect" in servers.generated:
        api["auth_string"] = str(Login.read(workspace))
    lines = [
        TOML_HEADER,
        f"home = {_toml(str(home))}",
        f"profiles_path = {_toml(str(home / 'profiles.toml'))}",
        f"api = {{ {', '.join(f'{name} = {_toml(value)}' for name, value in api.items())} }}",
        f"results = {{ local_storage_path = {_toml(results)} }}",
        "server = { analytics_enabled = false }",
    ]
    write_private(PREFECT_TOML, "\n".join(lines) + "\n")


def deploy(workspace: Workspace) -> None:
    """Create the work pool, automation and deployments on a server that was started elsewhere.

    Raises LaunchError.
    """
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        raise ConfigError(
            "PREFECT_API_URL is not set: name the server, such as https://prefect.example.org/api"
        )
    check_proxies()
    from httpx import HTTPError
    from prefect.exceptions import PrefectHTTPStatusError

    os.environ["PWD"] = str(ROOT)
    try:
        asyncio.run(_prepare_server())
    except (HTTPError, PrefectHTTPStatusError) as error:
        reason = redact(str(error).splitlines()[0] if str(error) else type(error).__name__)[:200]
        raise LaunchError(
            f"the Prefect server at {redact(url)} did not take it: {reason}: check PREFECT_API_URL "
            "and PREFECT_API_AUTH_STRING"
        ) from error
    result = subprocess.run(_deploy_command(), cwd=ROOT, check=False)
    if result.returncode:
        raise LaunchError(
            f"prefect deploy failed with exit code {result.returncode} (its message is above)"
        )


def stop(workspace: Workspace) -> None:
    """End all processes that `start` has started, including runs, and delete the record."""
    servers = Servers.read(state_file(workspace))
    if servers is None:
        print(f"nothing to stop: no servers were started in {workspace.root}")
        return
    for name, grace in STOP_GRACE.items():
        ended = end(servers.token, name, servers.processes.get(name), grace)
        if ended:
            print(f"stopped {name} ({ended} process{'es' if ended > 1 else ''})")
    if _names_server(servers):
        PREFECT_TOML.unlink()
    state_file(workspace).unlink()


def _names_server(servers: Servers) -> bool:
    """Return True if prefect.toml was written for these servers, not for another workspace's."""
    if not PREFECT_TOML.exists():
        return False
    text = PREFECT_TOML.read_text(encoding="utf-8")
    return text.startswith(TOML_HEADER) and _toml(f"{servers.prefect_url}/api") in text


def status(workspace: Workspace) -> None:
    """Print the state of each server. Raises LaunchError when one is not running."""
    servers = Servers.read(state_file(workspace))
    if servers is None:
        raise LaunchError(f"no servers were started in {workspace.root}: make server starts them")
    for name, alive in servers.running.items():
        print(f"{name:8} {'running' if alive else 'not running'}")
    if not all(servers.running.values()):
        raise LaunchError("not everything runs: make stop, then make server")
    print(servers.describe(workspace))


def _port(variable: str, default: int) -> int:
    value = os.environ.get(variable) or str(default)
    if not value.isdecimal() or not 0 < int(value) < 65536:
        raise ConfigError(f"{variable} is {value!r}: give a port from 1 to 65535")
    return int(value)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(f"signal {number}")


def main(arguments: list[str]) -> int:
    """Run one command; a user error prints one sentence and returns the exit code."""
    commands = {"start": start, "stop": stop, "status": status, "deploy": deploy}
    if len(arguments) != 1 or arguments[0] not in commands:
        print(f"usage: servers.py {'|'.join(commands)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _interrupt)
    os.chdir(ROOT)
    try:
        workspace = prepare_environment()
        with lock(workspace.root / "servers.json"):
            commands[arguments[0]](workspace)
    except MegacoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(
            f"interrupted: `make stop` ends what `make {arguments[0]}` may have left",
            file=sys.stderr,
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
