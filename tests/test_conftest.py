"""Limits of a test session: a hang that pytest-timeout cannot end shows its stacks."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from tests._limits import HANG

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests.conftest import pytest_configure, pytest_runtest_setup, pytest_runtest_teardown
"""
HANGS = {
    "native": """
import ctypes
from tests import conftest
def test_passes():
    conftest.HANG_LIMIT = 2  # of the next test
def test_hangs():
    ctypes.PyDLL(None).sleep(600)  # holds the GIL
def test_passes_later(): pass
""",
    "fixture": """
import pytest, time
from tests import conftest
@pytest.fixture
def never_ends():
    yield
    time.sleep(600)
def test_hangs(never_ends):
    conftest.HANG_LIMIT = 2  # of the fixture's end
    assert 1 + 1 == 3
def test_passes_later(): pass
""",
}
STOPS = """
import os, signal, time
def test_stops():
    open("begun", "w").write(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP) or time.sleep(600)  # it is continued to show its stacks
def test_passes(): pass
"""


def test_a_hang_ends_the_session_with_stacks(tmp_path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (options,) = re.findall(r"^PYTEST = \$\(PY\) -m pytest (.*)$", makefile, re.MULTILINE)
    command = [sys.executable, "-m", "pytest", "--numprocesses", "1", *shlex.split(options)]
    sessions = []
    for name, tests in HANGS.items():
        directory = tmp_path / name
        directory.mkdir()
        (directory / "conftest.py").write_text(CONFTEST)
        (directory / "test_hang.py").write_text(tests)
        session = subprocess.Popen(
            command,
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        sessions.append((session, "test_hangs" if name == "native" else "never_ends"))
    try:
        for session, function in sessions:
            output, stacks = session.communicate(timeout=HANG)
            assert session.returncode == 1
            assert "worker 'gw0' crashed while running 'test_hang.py::test_hangs'" in output
            assert re.search(rf'test_hang\.py", line \d+ in {function}', stacks)
    finally:
        for session, _ in sessions:
            session.kill()


def test_an_ended_session_names_its_running_tests_and_shows_their_stacks(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_hang.py").write_text(STOPS)
    session = subprocess.Popen(
        [sys.executable, "-m", "pytest", "--numprocesses", "1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    while not is_stopped(tmp_path / "begun"):
        assert session.poll() is None
        time.sleep(0.1)
    session.terminate()
    _, stacks = session.communicate(timeout=HANG)
    assert "running: test_hang.py::test_stops" in stacks
    assert "State:\tT (stopped)" in stacks
    assert 'test_hang.py", line 5 in test_stops' in stacks


def is_stopped(pid_file: Path) -> bool:
    """Return True if the process whose id is in the file is stopped."""
    pid = pid_file.read_text() if pid_file.exists() else ""
    return bool(pid) and "State:\tT" in Path("/proc", pid, "status").read_text()
