"""Nothing from a configuration, a hostfile, a path or the environment is read by a shell as more
than a word."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megacore.cluster.hosts.connection import agent_words
from megacore.cluster.hosts.ssh import Ssh
from megacore.config import load_config
from megacore.config.hostfile import read_hostfile
from megacore.errors import ConfigError
from megacore.launch.supervise import supervise
from tests.architecture._source import ROOT, python_files, tree

PLANTS = (
    "$(touch pwned)",
    "; touch pwned",
    "`touch pwned`",
    "a\ntouch pwned\n",
    "' ; touch pwned ; '",
    "%n && touch pwned",
)
ARGUMENTS = (
    "import json, os, sys; json.dump([sys.argv, os.environ.get('NCCL_PLANTED')], open(sys.argv[1], "
    "'w'))"
)


def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]


def test_no_code_asks_for_a_shell() -> None:
    for path in python_files("megacore", "tasks", "flows", "scripts", "benchmarks"):
        for call in calls(path):
            name = ast.unparse(call.func)
            where = f"{path}:{call.lineno}"
            assert name not in {
                "os.system",
                "os.popen",
                "subprocess.getoutput",
                "subprocess.getstatusoutput",
            }, where
            shell = [keyword for keyword in call.keywords if keyword.arg == "shell"]
            assert not shell or ast.unparse(shell[0].value) == "False", where


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for Python that notes how it was called."""
    programs = tmp_path / "bin"
    programs.mkdir()
    script = f"#!{sys.executable}\nimport json, os, sys\n"
    script += (
        "json.dump([sys.argv[1:], dict(os.environ), os.getcwd()], "
        f"open({str(tmp_path / 'said.json')!r}, 'w'))\n"
    )
    (programs / "python").write_text(script)
    (programs / "python").chmod(0o755)
    return programs / "python"


@pytest.mark.parametrize("plant", PLANTS)
def test_a_remote_command_line_has_only_words(
    plant: str, tmp_path: Path, recorder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = tmp_path / f"work {plant.replace('/', '')}"
    workspace.mkdir()
    monkeypatch.chdir(workspace)
    monkeypatch.setattr(sys, "executable", str(recorder))
    words = agent_words(plant, "one", 1, {"PYTHONPATH": plant, "NCCL_PLANTED": plant})
    command = Ssh(Path(f"/config{plant}")).command("one", [*words, plant])
    assert command[:3] == ["ssh", "-F", f"/config{plant}"]
    # What a shell of the other machine reads.
    assert command[-3:-1] == ["one", "--"]
    subprocess.run(["sh", "-c", command[-1]], check=True, timeout=30)
    arguments, environment, directory = json.loads((tmp_path / "said.json").read_text())
    assert arguments == ["-m", "megacore.cluster.hosts.agent", plant]
    assert environment["PYTHONPATH"] == plant
    assert environment["MEGACORE_JOB"] == f"{plant}.1"
    assert "NCCL_PLANTED" not in environment, "the others do not go through a command line"
    assert directory == str(workspace)
    assert list(tmp_path.rglob("pwned")) == []


def test_the_guard_passes_words_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / f"run {' '.join(PLANTS)}"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    said, planted = folder / "said.json", "".join(PLANTS)
    command = [sys.executable, "-c", ARGUMENTS, str(said), *PLANTS]
    supervise(
        command,
        log=folder / "log",
        exit_directory=folder / "exit",
        env={"NCCL_PLANTED": planted},
        timeout=60,
    )
    assert json.loads(said.read_text()) == [["-c", str(said), *PLANTS], planted]
    assert list(tmp_path.rglob("pwned")) == []


@pytest.mark.parametrize(
    "plant",
    [*PLANTS, "-oProxyCommand=sh", "-Fconfig", "a@-Fconfig", "host,other", "^file", "h[1-3]"],
)
def test_a_hostfile_names_machines_alone(plant: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"{plant} slots=1\n")
    with pytest.raises(ConfigError):
        read_hostfile(path)
    path.write_text(f"one slots={plant}\n")
    with pytest.raises(ConfigError):
        read_hostfile(path)


@pytest.mark.parametrize("plant", PLANTS)
def test_the_name_of_a_run_is_plain(plant: str) -> None:
    overrides: dict[str, Any] = {"name": plant}
    with pytest.raises(ConfigError, match="name is"):
        load_config("gpt2-tiny", overrides)
