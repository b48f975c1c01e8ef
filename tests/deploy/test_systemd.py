"""Systemd units, their settings and those of nginx: existing files, no passwords, no open ports."""

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
SETTINGS = sorted((ROOT / "deploy" / "systemd").glob("*.env"))
INSTALLED = "/srv/megacore"
"""Path of the repository in the documentation."""


def service(path: Path) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    parser.read_string(path.read_text(encoding="utf-8"))
    return dict(parser["Service"])


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_unit_names_existing_files_and_runs_as_a_user(path: Path) -> None:
    values = service(path)
    assert values["User"] == "megacore"
    assert values["NoNewPrivileges"] == "yes"
    assert values["EnvironmentFile"] == f"/etc/megacore/{path.stem.removeprefix('megacore-')}.env"
    assert (path.parent / Path(values["EnvironmentFile"]).name).is_file()
    program, *arguments = values["ExecStart"].split()
    if program.startswith(f"{INSTALLED}/.venv/bin/"):
        assert Path(program).name in ("prefect", "mlflow")
    else:
        assert (ROOT / Path(program).relative_to(INSTALLED)).is_file()
    if "--host" in arguments:
        assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    assert {"--host"} <= set(arguments) or path.stem in ("megacore-worker", "megacore-backup")


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: path.stem)
def test_settings_contain_no_password(path: Path) -> None:
    lines = [
        line
        for line in path.read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    values = dict(line.split("=", 1) for line in lines)
    for name, value in values.items():
        if re.search(r"PASSWORD|AUTH_STRING|SECRET|USERNAME$", name):
            assert value == "", f"{name} has a default"
        if "://" in value:
            assert not re.search(r"//[^/@]*:[^/@]*@", value), f"{name} holds a password"
    assert "0600" in path.read_text(encoding="utf-8")


def test_server_settings_are_those_of_make_server() -> None:
    from scripts._backends import (
        MLFLOW_ARTIFACTS,
        MLFLOW_DATABASE,
        MLFLOW_USERS,
        PREFECT_DATABASE,
        PREFECT_PASSWORD,
    )

    texts = {path.stem: path.read_text(encoding="utf-8") for path in SETTINGS}
    for name in (PREFECT_DATABASE, PREFECT_PASSWORD):
        assert f"{name}=" in texts["prefect"]
    for name in (MLFLOW_DATABASE, MLFLOW_ARTIFACTS, MLFLOW_USERS):
        assert f"{name}=" in texts["mlflow"]
    assert not re.search("DATABASE|BACKEND|PGPASS", texts["worker"]), "a worker reaches no database"


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    copies = []
    for path in [*UNITS, *(ROOT / "deploy" / "systemd").glob("*.timer")]:
        text = path.read_text(encoding="utf-8")
        # Replace programs that are not installed.
        text = re.sub(
            rf"^ExecStart={INSTALLED}\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE
        )
        copies.append(tmp_path / path.name)
        copies[-1].write_text(text, encoding="utf-8")
    result = subprocess.run(
        ["systemd-analyze", "verify", *copies], capture_output=True, text=True, check=False
    )
    problems = [line for line in result.stderr.splitlines() if "megacore" in line]
    assert problems == []


def test_nginx_uses_tls_and_forwards_to_loopback() -> None:
    text = (ROOT / "deploy" / "nginx" / "megacore.conf").read_text(encoding="utf-8")
    assert set(re.findall(r"proxy_pass http://([\d.]+):(\d+);", text)) == {
        ("127.0.0.1", "4200"),
        ("127.0.0.1", "5000"),
    }
    assert re.findall(r"listen (.*);", text).count("443 ssl") == 2
    assert "return 308 https://" in text
    assert text.count("{") == text.count("}")
