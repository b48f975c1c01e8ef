"""Requirements that `make venv` checks, and the order of its installations."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests._limits import HANG

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "dirname", "touch", "mkdir", "cp", "cat", "rm", "make", "find", "env")

FAKE_PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case "$*" in
    --version) echo "Python ${VERSION:-3.12.1}" ;;
    *version_info*) [ "${VERSION:-3.12.1}" != 3.9.2 ] ;;
    *ensurepip*) [ -z "${NO_ENSUREPIP:-}" ] ;;
    *Python.h*) [ -z "${NO_HEADERS:-}" ] ;;
    "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    "-m pip install"*) exit "${PIP_EXIT:-0}" ;;
    "- "*) exec "$REAL_PYTHON" "$@" ;;
esac
"""


class Machine:
    """A clone with its install script and a PATH that contains only the test's programs."""

    def __init__(self, root: Path) -> None:
        self.root = root / "clone"
        self.bin = root / "bin"
        self.calls = root / "calls"
        self.bin.mkdir()
        self.calls.touch()
        shutil.copytree(
            ROOT / "scripts", self.root / "scripts", ignore=shutil.ignore_patterns("__pycache__")
        )
        for name in ("Makefile", "pyproject.toml", "constraints.txt", "setup.py"):
            shutil.copy(ROOT / name, self.root)
        (self.root / "megacore").mkdir()
        (self.root / "megacore" / "helpers.cpp").touch()
        for tool in TOOLS:
            path = shutil.which(tool)
            assert path
            (self.bin / tool).symlink_to(path)
        self.add("python3", FAKE_PYTHON)
        self.add("g++", "#!/usr/bin/env bash\n")

    def add(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(script, encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {
            "PATH": str(self.bin),
            "CALLS": str(self.calls),
            "HOME": str(self.root),
            "REAL_PYTHON": sys.executable,
            **variables,
        }
        return subprocess.run(
            command or ("scripts/venv.sh",),
            cwd=self.root,
            env=env,
            capture_output=True,
            text=True,
            timeout=HANG,
        )

    @property
    def installed(self) -> bool:
        return (self.root / ".venv" / ".installed").exists()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def refusal(machine: Machine, **variables: str) -> str:
    result = machine.run(**variables)
    assert result.returncode == 1
    assert not machine.installed
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("make venv: ")
    return result.stderr


def test_old_python_is_refused_with_advice(machine: Machine) -> None:
    message = refusal(machine, VERSION="3.9.2")
    assert f"{machine.bin}/python3 is Python 3.9.2" in message
    assert "Python 3.11 or newer" in message
    assert "make PYTHON=" in message


def test_installed_newer_python_is_suggested(machine: Machine) -> None:
    machine.add("python3.12", "#!/usr/bin/env bash\nexit 0\n")
    assert "make PYTHON=python3.12 venv" in refusal(machine, VERSION="3.9.2")


def test_missing_python_is_refused(machine: Machine) -> None:
    assert "no interpreter 'python3.77'" in refusal(machine, PYTHON="python3.77")


def test_missing_compiler_is_refused(machine: Machine) -> None:
    (machine.bin / "g++").unlink()
    assert "no C++ compiler" in refusal(machine)
    assert "CXX is 'my-c++ -O1'" in refusal(machine, CXX="my-c++ -O1")


def test_missing_headers_are_refused(machine: Machine) -> None:
    assert "without Python.h" in refusal(machine, NO_HEADERS="1")


def test_python_without_ensurepip_is_refused(machine: Machine) -> None:
    assert "no ensurepip" in refusal(machine, NO_ENSUREPIP="1")


def test_failed_installation_leaves_no_stamp(machine: Machine) -> None:
    assert "pip could not install everything" in refusal(machine, PIP_EXIT="1")


def test_torch_is_installed_first_and_all_packages_are_constrained(machine: Machine) -> None:
    assert machine.run().returncode == 0
    assert machine.installed
    installs = [
        line for line in machine.calls.read_text().splitlines() if line.startswith("-m pip install")
    ]
    assert len(installs) == 2
    assert all("-c constraints.txt" in line for line in installs)
    assert "torch" in installs[0].split()
    assert installs[1].endswith("-e .[dev,deepspeed]")
    assert "--no-build-isolation" in installs[1]


def test_environment_of_another_clone_is_not_taken_over(machine: Machine, tmp_path: Path) -> None:
    other = tmp_path / "other clone"
    record = other / ".venv/lib/python3.12/site-packages/megacore-1.dist-info/direct_url.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"url": other.as_uri(), "dir_info": {"editable": True}}))
    (machine.root / ".venv").symlink_to(other / ".venv")
    assert f".venv is shared with {other}, whose megacore is" in refusal(machine)
    assert "-m pip install" not in machine.calls.read_text()
    record.write_text(json.dumps({"url": machine.root.as_uri()}))
    assert machine.run().returncode == 0
    (machine.root / ".venv").unlink()  # a copy is not shared
    record.write_text(json.dumps({"url": other.as_uri()}))
    shutil.copytree(other / ".venv", machine.root / ".venv")
    assert machine.run().returncode == 0


def test_make_installs_again_only_if_an_input_changes(machine: Machine) -> None:
    assert machine.run("make", "venv").returncode == 0
    before = machine.calls.read_text()
    assert machine.run("make", "venv").returncode == 0
    assert machine.calls.read_text() == before
    stamp = (machine.root / ".venv" / ".installed").stat().st_mtime
    for changed in ("pyproject.toml", "constraints.txt", "setup.py", "megacore/helpers.cpp"):
        os.utime(machine.root / changed, (stamp + 10, stamp + 10))
        assert machine.run("make", "-q", "venv").returncode == 1, changed
        os.utime(machine.root / changed, (stamp - 10, stamp - 10))
        assert machine.run("make", "-q", "venv").returncode == 0, changed


def test_status_reports_without_installing(machine: Machine) -> None:
    status = machine.run("make", "status")
    assert status.returncode
    assert "no servers run: there is no .venv" in status.stdout
    assert not machine.installed
    assert not machine.calls.read_text()


def test_another_torch_replaces_the_pin_until_another_is_named(machine: Machine) -> None:
    assert machine.run("make", "venv", "TORCH=torch==2.12.*").returncode == 0
    constraints = (machine.root / ".venv/constraints.txt").read_text().splitlines()
    assert [line for line in constraints if line.startswith("torch")] == ["torch==2.12.*"]
    # torch 2.12 needs an older setuptools than the pinned one, megacore a newer one than a venv's.
    assert "setuptools>=77" in constraints
    pinned = (machine.root / "constraints.txt").read_text().splitlines()
    left_out = {line.split("==")[0] for line in {*pinned} - {*constraints}}
    assert left_out == {"torch", "setuptools"}
    for command in (("make", "venv"), ("make", "venv", "TORCH=torch==2.12.*")):
        before = machine.calls.read_text()
        assert machine.run(*command).returncode == 0
        assert machine.calls.read_text() == before
    os.utime(machine.root / "constraints.txt")
    stamp = machine.root / ".venv" / ".installed"
    os.utime(stamp, (stamp.stat().st_mtime - 10,) * 2)
    machine.calls.write_text("")
    assert "'torch==2.12.*' instead of the pinned" in machine.run("make", "venv").stdout
    install = next(line for line in machine.calls.read_text().splitlines() if "pip install" in line)
    assert "-c .venv/constraints.txt" in install
    assert install.endswith(" torch==2.12.*")
    assert machine.run("make", "venv", "TORCH=torch>=2.13").returncode == 0
    assert (machine.root / ".venv/torch-requirement").read_text() == "torch>=2.13\n"


def test_torch_outside_the_range_is_refused(machine: Machine) -> None:
    assert "TORCH is 'torch==2.8.*', and megacore needs torch>=2.9" in refusal(
        machine, TORCH="torch==2.8.*"
    )
    assert "is not a range of versions of torch" in refusal(machine, TORCH="numpy>=2")
    assert "which pip cannot read" in refusal(machine, TORCH="torch 2.10")
    assert machine.run(TORCH="torch==2.10.0+cu126").returncode == 0


def test_failed_installation_of_another_torch_is_not_recorded(machine: Machine) -> None:
    assert machine.run().returncode == 0
    assert "pip could not" in refusal(machine, TORCH="torch==2.10.*", PIP_EXIT="1")
    assert not (machine.root / ".venv/torch-requirement").exists()
