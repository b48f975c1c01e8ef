"""A team's servers in a copy of the repository: `make server` on PostgreSQL, with passwords."""

import base64
import json
import secrets
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from tests._limits import HANG
from tests.deploy._postgres import Postgres
from tests.flows.conftest import tiny_config, write_corpus
from tests.scripts._clone import ROOT, Clone

NAME = "team-test"
"""Name of the configuration and its deployment."""


class Team:
    """One deployment, its servers' settings, and requests to them."""

    def __init__(self, root: Path, postgres: Postgres) -> None:
        self.clone = Clone(root / "clone")
        self.postgres = postgres
        self.artifacts = root / "share" / "artifacts"
        self.prefect_password = f"team:{secrets.token_hex(12)}"
        self.mlflow_password = secrets.token_hex(12)
        self._deploy_one_flow(root)
        users = (ROOT / "deploy" / "mlflow_users.ini").read_text(encoding="utf-8")
        self.users = root / "mlflow_users.ini"
        self.users.write_text(
            users.replace("127.0.0.1:5432", f"127.0.0.1:{postgres.port}"), encoding="utf-8"
        )

    def _deploy_one_flow(self, root: Path) -> None:
        write_corpus(root / "corpus")
        conf = root / f"{NAME}.yaml"
        conf.write_text(
            yaml.safe_dump({**tiny_config(root / "corpus"), "name": NAME}), encoding="utf-8"
        )
        path = self.clone.root / "prefect.yaml"
        deployments = yaml.safe_load(path.read_text(encoding="utf-8"))
        deployment = {
            "name": NAME,
            "entrypoint": "flows/pretrain.py:pretrain",
            "parameters": {"conf": str(conf)},
        }
        deployments["deployments"] = [{**deployments["definitions"]["base"], **deployment}]
        path.write_text(yaml.safe_dump(deployments), encoding="utf-8")

    @property
    def secrets(self) -> list[str]:
        """Secrets that must not be in any log or command line."""
        return [
            *self.postgres.passwords.values(),
            self.prefect_password.partition(":")[2],
            self.mlflow_password,
        ]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the administrator sets before `make server`.

        None is an argument of a command.
        """
        server = f"127.0.0.1:{self.postgres.port}"
        return {
            **self.postgres.environment,
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": (
                f"postgresql+asyncpg://prefect@{server}/prefect"
            ),
            "PREFECT_SERVER_API_AUTH_STRING": self.prefect_password,
            "MLFLOW_BACKEND_STORE_URI": f"postgresql+psycopg://mlflow@{server}/mlflow",
            "MLFLOW_ARTIFACTS_DESTINATION": str(self.artifacts),
            "MLFLOW_AUTH_CONFIG_PATH": str(self.users),
            "MLFLOW_AUTH_ADMIN_PASSWORD": self.mlflow_password,
            "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(32),
            "MLFLOW_TRACKING_USERNAME": "admin",
            "MLFLOW_TRACKING_PASSWORD": self.mlflow_password,
        }

    def start(self) -> None:
        """Run `make server`."""
        started = self.clone.servers("start", **self.environment)
        assert started.returncode == 0, started.stderr
        assert f"export MLFLOW_TRACKING_URI={self.mlflow}" in started.stdout

    @property
    def mlflow(self) -> str:
        """Address of MLflow's server."""
        return f"http://127.0.0.1:{self.clone.ports[1]}"

    @property
    def prefect(self) -> str:
        """Address of Prefect's server."""
        return f"http://127.0.0.1:{self.clone.ports[0]}"

    def deploy(self, password: str) -> subprocess.CompletedProcess[str]:
        """Run `make deploy` like a machine that trains."""
        return self.clone.servers(
            "deploy", PREFECT_API_URL=f"{self.prefect}/api", PREFECT_API_AUTH_STRING=password
        )

    def run(self) -> None:
        """Run the flow through the worker until it ends."""
        words = ("deployment", "run", f"pretrain/{NAME}", "--watch")
        result = self.clone.prefect(*words, PREFECT_API_AUTH_STRING=self.prefect_password)
        assert result.returncode == 0, result.stdout + result.stderr + self.logs()

    def logs(self) -> str:
        """Return the logs of the servers and the worker."""
        return "\n".join(
            path.read_text(errors="replace")
            for path in (self.clone.workspace / "servers").glob("*.log")
        )

    def script(self, name: str, directory: Path) -> subprocess.CompletedProcess[str]:
        """Run deploy/backup.sh or deploy/restore.sh as the administrator does."""
        variables = {
            **self.postgres.environment,
            "MLFLOW_ARTIFACTS_DESTINATION": str(self.artifacts),
        }
        return self.clone.command(str(ROOT / "deploy" / name), str(directory), **variables)

    def ask_mlflow(
        self, path: str, body: dict[str, Any] | None = None, *, user: str | None = "admin"
    ) -> Any:
        """Return an answer of MLflow's interface; raise HTTPError on refusal."""
        login = None if user is None else f"{user}:{self.mlflow_password}"
        return _ask(f"{self.mlflow}/api/2.0/{path}", body, login)

    def ask_prefect(
        self, path: str, body: dict[str, Any] | None = None, *, password: str | None = None
    ) -> Any:
        """Return an answer of Prefect's interface; raise HTTPError on refusal."""
        return _ask(
            f"{self.prefect}/api/{path}",
            body,
            self.prefect_password if password is None else password,
        )


def _ask(url: str, body: dict[str, Any] | None, login: str | None) -> Any:
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    if login:
        request.add_header("authorization", "Basic " + base64.b64encode(login.encode()).decode())
    with urllib.request.urlopen(request, timeout=HANG) as answer:
        return json.loads(answer.read() or "null")
