"""PostgreSQL for a test: a separate cluster on loopback, with passwords."""

import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests._limits import HANG
from tests.scripts._clone import ROOT, free_ports

SUPERUSER = "admin"


def binaries() -> Path:
    """Return the directory of PostgreSQL's programs; skip the test if they are not installed."""
    initdb_paths = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3])
    )
    directory = initdb_paths[-1].parent if initdb_paths else None
    if directory is None and (initdb := shutil.which("initdb")) is not None:
        directory = Path(initdb).resolve().parent
    if directory is None or shutil.which("psql") is None or shutil.which("rsync") is None:
        pytest.skip("PostgreSQL or rsync is not installed: apt-get install postgresql rsync")
    return directory


def _server_user() -> str | None:
    """Return the user that runs the server, since PostgreSQL refuses root."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres").pw_name
    except KeyError:
        pytest.skip("there is no user postgres, and PostgreSQL refuses to run as root")


@dataclass
class Postgres:
    """A running cluster with the databases of deploy/postgres/databases.sql."""

    port: int
    directory: Path
    superuser_password: str = field(default_factory=lambda: secrets.token_hex(12))
    passwords: dict[str, str] = field(
        default_factory=lambda: {"prefect": secrets.token_hex(12), "mlflow": secrets.token_hex(12)}
    )

    @property
    def passfile(self) -> Path:
        """Path of the file for PGPASSFILE: the passwords of Prefect's and MLflow's users."""
        path = self.directory / "pgpass"
        if not path.exists():
            lines = [
                f"127.0.0.1:{self.port}:*:{user}:{password}\n"
                for user, password in self.passwords.items()
            ]
            path.touch(mode=0o600)
            path.write_text("".join(lines), encoding="utf-8")
        return path

    @property
    def environment(self) -> dict[str, str]:
        """Environment in which a client connects as the servers' users."""
        return {"PGHOST": "127.0.0.1", "PGPORT": str(self.port), "PGPASSFILE": str(self.passfile)}

    def superuser(
        self, *arguments: str, stdin: str = "", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run psql as the superuser."""
        command = [
            "psql",
            "--no-psqlrc",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--username",
            SUPERUSER,
        ]
        env = {"PATH": os.environ["PATH"], "PGPASSWORD": self.superuser_password, **variables}
        words = [*command, "--dbname", "postgres", *arguments]
        return subprocess.run(
            words, input=stdin, env=env, capture_output=True, text=True, timeout=HANG
        )

    def create_databases(self) -> None:
        """Create the databases as the documentation describes."""
        variables = {
            f"{user.upper()}_DATABASE_PASSWORD": password
            for user, password in self.passwords.items()
        }
        result = self.superuser(
            "--file", str(ROOT / "deploy" / "postgres" / "databases.sql"), **variables
        )
        assert result.returncode == 0, result.stderr

    def drop_databases(self) -> None:
        """Drop databases and users, like a disaster."""
        lines = [
            f"DROP DATABASE {name} WITH (FORCE);" for name in ("prefect", "mlflow", "mlflow_users")
        ]
        result = self.superuser(
            "--set", "ON_ERROR_STOP=1", stdin="\n".join([*lines, "DROP ROLE prefect, mlflow;"])
        )
        assert result.returncode == 0, result.stderr

    def log(self) -> str:
        """Return the server's log."""
        return (self.directory / "postgres.log").read_text(encoding="utf-8", errors="replace")


@contextmanager
def running(directory: Path) -> Iterator[Postgres]:
    """Run a cluster during the block.

    Its files are where the server's user may write, and are removed.
    """
    programs, user = binaries(), _server_user()
    data = Path(tempfile.mkdtemp(prefix="megacore-postgres-"))
    (port,) = free_ports(1)
    postgres = Postgres(port, directory)
    secret = data / "password"
    secret.touch(mode=0o600)
    secret.write_text(postgres.superuser_password, encoding="utf-8")
    if user is not None:
        shutil.chown(data, user)
        shutil.chown(secret, user)
    identity = (
        {}
        if user is None
        else {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": ()}
    )
    env = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
    cluster = data / "cluster"
    server = None
    try:
        options = [
            "--auth=scram-sha-256",
            f"--pwfile={secret}",
            f"--username={SUPERUSER}",
            "--no-sync",
        ]
        words = [str(programs / "initdb"), f"--pgdata={cluster}", "--encoding=UTF8", *options]
        created = subprocess.run(
            words, env=env, cwd=data, capture_output=True, text=True, timeout=HANG, **identity
        )  # type: ignore[call-overload]
        assert created.returncode == 0, created.stderr
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": port,
            "unix_socket_directories": "",
            "fsync": "off",
        }
        words = [
            str(programs / "postgres"),
            "-D",
            str(cluster),
            *(f"--{key}={value}" for key, value in settings.items()),
        ]
        with open(directory / "postgres.log", "wb") as log:
            server = subprocess.Popen(words, env=env, cwd=data, stdout=log, stderr=log, **identity)  # type: ignore[call-overload]
        _wait(server, postgres)
        yield postgres
    finally:
        if server is not None:
            _end(server)
        shutil.rmtree(data)


def _wait(server: "subprocess.Popen[bytes]", postgres: Postgres) -> None:
    deadline = time.monotonic() + HANG
    while postgres.superuser("--command", "SELECT 1").returncode != 0:
        assert server.poll() is None, postgres.log()
        assert time.monotonic() < deadline, postgres.log()
        time.sleep(0.1)


def _end(server: "subprocess.Popen[bytes]") -> None:
    server.send_signal(2)  # PostgreSQL's fast shutdown ends connections and leaves complete files
    try:
        server.wait(HANG)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
