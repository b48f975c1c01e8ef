"""Values of configurations, hostfiles, paths and the environment cannot inject shell code."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megacore.cluster.hosts.connection import agent_words, mark_on
from megacore.cluster.hosts.ssh import Ssh
from megacore.config import load_config
from megacore.config.hostfile import read_hostfile
from megacore.errors import ConfigError
from megacore.launch.supervise import supervise
from tests._limits import HANG
from tests.architecture._source import ROOT, python_files, tree

INJECTIONS = (
    "$(touch pwned)",
    "; touch pwned",
    "`touch pwned`",
    "a\ntouch pwned\n",
    "' ; touch pwned ; '",
    "%n && touch pwned",
)
RECORD_ARGUMENTS = (
    "import json, os, sys; json.dump([sys.argv, os.environ.get('NCCL_PLANTED')], open(sys.argv[1], "
    "'w'))"
)


def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]


def test_no_code_starts_a_shell() -> None:
    for path in python_files("megacore", "tasks", "flows", "scripts", "benchmarks"):
        for call in calls(path):
            name = ast.unparse(call.func)
            location = f"{path}:{call.lineno}"
            assert name not in {
                "os.system",
                "os.popen",
                "subprocess.getoutput",
                "subprocess.getstatusoutput",
            }, location
            shell = [keyword for keyword in call.keywords if keyword.arg == "shell"]
            assert not shell or ast.unparse(shell[0].value) == "False", location


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a stand-in for Python that records its arguments and environment."""
    programs = tmp_path / "bin"
    programs.mkdir()
    script = f"#!{sys.executable}\nimport json, os, sys\n"
    script += (
        "json.dump([sys.argv[1:], dict(os.environ), os.getcwd()], "
        f"open({str(tmp_path / 'record.json')!r}, 'w'))\n"
    )
    (programs / "python").write_text(script)
    (programs / "python").chmod(0o755)
    return programs / "python"


@pytest.mark.parametrize("injection", INJECTIONS)
def test_remote_command_line_cannot_inject_shell_code(
    injection: str, tmp_path: Path, recorder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = tmp_path / f"work {injection.replace('/', '')}"
    workspace.mkdir()
    monkeypatch.chdir(workspace)
    monkeypatch.setattr(sys, "executable", str(recorder))
    arguments_of_agent = agent_words(
        mark_on("one", 1, injection), {"PYTHONPATH": injection, "NCCL_PLANTED": injection}
    )
    command = Ssh(Path(f"/config{injection}")).command("one", [*arguments_of_agent, injection])
    assert command[:3] == ["ssh", "-F", f"/config{injection}"]
    # The shell of the other host reads the last word.
    assert command[-3:-1] == ["one", "--"]
    subprocess.run(["sh", "-c", command[-1]], check=True, timeout=HANG)
    arguments, environment, directory = json.loads((tmp_path / "record.json").read_text())
    assert arguments == ["-m", "megacore.cluster.hosts.agent", injection]
    assert environment["PYTHONPATH"] == injection
    assert environment["MEGACORE_JOB"] == f"{injection}.1"
    assert "NCCL_PLANTED" not in environment, "other variables are not on the command line"
    assert directory == str(workspace)
    assert list(tmp_path.rglob("pwned")) == []


def test_guard_passes_arguments_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / f"run {' '.join(INJECTIONS)}"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    record, planted = folder / "record.json", "".join(INJECTIONS)
    command = [sys.executable, "-c", RECORD_ARGUMENTS, str(record), *INJECTIONS]
    supervise(
        command,
        log=folder / "log",
        exit_directory=folder / "exit",
        env={"NCCL_PLANTED": planted},
        timeout=HANG,
    )
    assert json.loads(record.read_text()) == [["-c", str(record), *INJECTIONS], planted]
    assert list(tmp_path.rglob("pwned")) == []


@pytest.mark.parametrize(
    "injection",
    [*INJECTIONS, "-oProxyCommand=sh", "-Fconfig", "a@-Fconfig", "host,other", "^file", "h[1-3]"],
)
def test_invalid_names_and_slots_in_a_hostfile_are_refused(injection: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"{injection} slots=1\n")
    with pytest.raises(ConfigError):
        read_hostfile(path)
    path.write_text(f"one slots={injection}\n")
    with pytest.raises(ConfigError):
        read_hostfile(path)


@pytest.mark.parametrize("injection", INJECTIONS)
def test_name_of_a_run_with_special_characters_is_refused(injection: str) -> None:
    overrides: dict[str, Any] = {"name": injection}
    with pytest.raises(ConfigError, match="name is"):
        load_config("gpt2-tiny", overrides)
