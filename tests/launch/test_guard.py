import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megacore.launch.guard import REASON_MARK, _Output, descendants, end_all
from tests._limits import HANG
from tests.launch._processes import (
    alive,
    environment,
    fake_ranks,
    none_alive,
    rank_pids,
    wait_until,
)

GRACE = 1.0


@contextmanager
def guarded(
    command: list[str], log: Path, grace: float = GRACE
) -> Iterator["subprocess.Popen[bytes]"]:
    guard = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "megacore.launch.guard",
            "--log",
            str(log),
            "--grace",
            str(grace),
            "--",
            *command,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment(),
    )
    assert guard.stdin is not None
    try:
        yield guard
    finally:
        guard.stdin.close()
        guard.wait(timeout=HANG)


@pytest.mark.parametrize(
    ("script", "code"), [("exit(0)", 0), ("exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)]
)
def test_guard_exits_with_the_code_of_the_command_and_appends_its_output(
    tmp_path: Path, script: str, code: int
) -> None:
    log = tmp_path / "log"
    log.write_text("earlier\n")
    with guarded(
        [sys.executable, "-c", f"import os; print('said', flush=True); {script}"], log
    ) as guard:
        assert guard.wait(timeout=HANG) == code
    assert log.read_text() == "earlier\nsaid\n"


def test_missing_executable_is_reported_in_the_log(tmp_path: Path) -> None:
    with guarded(["/no/such/program"], tmp_path / "log") as guard:
        assert guard.wait(timeout=HANG) == 127
    assert "cannot start /no/such/program: No such file" in (tmp_path / "log").read_text()


def test_reasons_that_nobody_reads_block_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    with open(writer, "wb") as stdout, open(reader, "rb") as supervisor:
        monkeypatch.setattr(sys, "stdout", stdout)
        output = _Output(str(tmp_path / "log"))
        lines = b"".join(
            REASON_MARK + f'{{"rank": {rank}, "message": "{"x" * 1000}"}}\n'.encode()
            for rank in range(100)
            for _ in range(2)
        )
        with output, open(os.dup(output.descriptor), "wb") as ranks:
            output.copy()
            ranks.write(lines)
        assert not output._copier.is_alive()
        stdout.close()
        passed_on = supervisor.read().split()
    assert (tmp_path / "log").read_bytes() == lines
    assert passed_on.count(b"0,") == 1
    assert 10 < passed_on.count(b'{"rank":') < 100


@pytest.mark.parametrize(
    ("behaviour", "stop"),
    [
        ("polite", signal.SIGTERM),
        ("stubborn", signal.SIGTERM),
        ("orphaned-waiting", "end of stdin"),
        ("stubborn", "end of stdin"),
        ("polite", signal.SIGINT),
    ],
)
def test_signal_or_end_of_stdin_ends_all_ranks(
    tmp_path: Path, behaviour: str, stop: signal.Signals | str
) -> None:
    # With the long grace, ranks that end within HANG got no SIGKILL.
    grace = GRACE if behaviour == "stubborn" else 2 * HANG
    with guarded(fake_ranks(tmp_path, behaviour), tmp_path / "log", grace) as guard:
        pids = rank_pids(tmp_path)
        started = time.monotonic()
        if isinstance(stop, signal.Signals):
            guard.send_signal(stop)
        else:
            assert guard.stdin is not None
            guard.stdin.close()
        none_alive(pids, HANG)
        took = time.monotonic() - started
        assert guard.wait(timeout=HANG) != 0
    if behaviour == "stubborn":
        assert took >= GRACE, "a rank that ignores SIGTERM gets its grace"


def test_sigusr1_reaches_all_ranks_even_with_late_handlers(tmp_path: Path) -> None:
    # Rank 1 installs its handler after rank 0 got the signal from the guard.
    # The launcher has no handler.
    with guarded(fake_ranks(tmp_path, "notified"), tmp_path / "log") as guard:
        wait_until((tmp_path / "rank_0.catches").exists, HANG, "handler of rank 0 installed")
        assert not (tmp_path / "rank_1.catches").exists()
        guard.send_signal(signal.SIGUSR1)
        assert guard.wait(timeout=HANG) == 0, "the launcher survives and its ranks exit with 0"
    assert (tmp_path / "rank_1.catches").exists()


def test_sigusr1_is_sent_once_and_does_not_end_the_command(tmp_path: Path) -> None:
    script = f"""
import pathlib, signal, time
seen = []
signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
pathlib.Path({str(tmp_path / "ready")!r}).touch()
while not seen:
    time.sleep(0.01)
time.sleep(1.2)
print(len(seen))
"""
    with guarded([sys.executable, "-c", script], tmp_path / "log") as guard:
        wait_until((tmp_path / "ready").exists, HANG, "handler installed")
        guard.send_signal(signal.SIGUSR1)
        assert guard.wait(timeout=HANG) == 0
    assert (tmp_path / "log").read_text() == "1\n"


def test_processes_left_by_the_command_are_ended(tmp_path: Path) -> None:
    # The launcher exits immediately. Each rank forks and exits, and its child remains.
    with guarded(fake_ranks(tmp_path, "orphaned"), tmp_path / "log") as guard:
        assert guard.wait(timeout=HANG) == 0
        assert not any(map(alive, rank_pids(tmp_path)))


def test_sigkill_of_the_guard_ends_ranks_that_die_with_their_parent(tmp_path: Path) -> None:
    with guarded(fake_ranks(tmp_path, "stubborn-chained"), tmp_path / "log") as guard:
        pids = rank_pids(tmp_path)
        launcher = int((tmp_path / "launcher.pid").read_text())
        guard.kill()
        none_alive([*pids, launcher], HANG)


def test_death_of_the_parent_ends_the_ranks_despite_an_open_pipe(
    tmp_path: Path,
) -> None:
    # A fork of the parent survives and keeps the other end of the pipe open.
    parent = f"""
import os, subprocess, sys, time
guard = subprocess.Popen([sys.executable, "-m", "megacore.launch.guard",
    "--log", {str(tmp_path / "log")!r}, "--grace", "{GRACE}",
    "--", *{fake_ranks(tmp_path, "polite")!r}], stdin=subprocess.PIPE)
if os.fork() == 0:
    time.sleep({2 * HANG})
    os._exit(0)
time.sleep({2 * HANG})
"""
    driver = subprocess.Popen(
        [sys.executable, "-c", parent], env=environment(), start_new_session=True
    )
    try:
        pids = rank_pids(tmp_path)
        driver.kill()
        driver.wait()
        none_alive(pids, HANG)
    finally:
        os.killpg(driver.pid, signal.SIGKILL)


def test_a_process_of_another_user_does_not_keep_the_others_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kill(pid: int, number: int) -> None:
        if pid == 1:
            raise PermissionError
        living.remove(pid)

    living = [1, 2]
    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr("megacore.launch.guard.KILL_LIMIT", 0.1)
    assert end_all(lambda: list(living), 0.0, reap=lambda: None) == [1]


def test_descendants_include_grandchildren_without_zombies() -> None:
    script = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; "
        f"time.sleep({2 * HANG})'])"
    )
    child = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_until(lambda: len(descendants(child.pid)) == 1, HANG, "grandchild started")
        (grandchild,) = descendants(child.pid)
        assert {child.pid, grandchild} <= set(descendants(os.getpid()))
        child.kill()
        wait_until(lambda: child.pid not in descendants(os.getpid()), HANG, "zombie left out")
        os.kill(grandchild, signal.SIGKILL)
    finally:
        child.kill()
        child.wait()


def test_command_without_a_handler_survives_sigusr1(tmp_path: Path) -> None:
    script = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); print('alive', flush=True)"
    with guarded([sys.executable, "-c", script], tmp_path / "log") as guard:
        assert guard.wait(timeout=HANG) == 0, "Slurm sends SIGUSR1 to all processes of a step"
    assert (tmp_path / "log").read_text() == "alive\n"
