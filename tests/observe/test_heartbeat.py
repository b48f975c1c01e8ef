"""What a rank tells of itself, and what a reader makes of the file."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megacore.observe.heartbeat import (
    Beat,
    Heartbeat,
    beat_path,
    process_state,
    read_heartbeat,
    read_heartbeats,
)
from megacore.observe.timers import Timers
from megacore.parallel.mesh import ProcessMesh


def read(directory: Path, rank: int = 3) -> Beat:
    found = read_heartbeat(beat_path(directory, rank))
    assert found is not None
    return found


def test_a_new_heartbeat_says_whose_it_is(tmp_path: Path) -> None:
    heartbeat = Heartbeat(beat_path(tmp_path / "exit", 3))
    found = read(tmp_path / "exit")
    assert (found.rank, found.pid, found.host) == (3, os.getpid(), os.uname().nodename)
    assert (found.phase, found.iteration, found.collectives, found.collective) == (
        "start",
        None,
        0,
        "",
    )
    assert found.here
    assert found.alive
    assert heartbeat.phase == "start"
    assert [path.name for path in (tmp_path / "exit").iterdir()] == ["rank_00003.beat"]


def test_a_beat_tells_phase_iteration_and_time(tmp_path: Path) -> None:
    heartbeat = Heartbeat(beat_path(tmp_path, 3))
    before = read(tmp_path)
    heartbeat.beat("data", 0)
    heartbeat.beat("save")
    found = read(tmp_path)
    assert (found.phase, found.iteration, found.changes) == ("save", 0, before.changes + 2)
    assert abs(found.time - time.time()) < 5.0


def test_waits_are_counted_and_the_last_one_stays_known(tmp_path: Path) -> None:
    heartbeat = Heartbeat(beat_path(tmp_path, 3))
    heartbeat.beat("world wait")
    assert read(tmp_path).waits
    heartbeat.beat("data-parallel wait")
    heartbeat.beat("optimizer")
    found = read(tmp_path)
    assert (found.phase, found.collectives, found.collective) == (
        "optimizer",
        2,
        "data-parallel wait",
    )
    assert not found.waits


def test_names_that_are_too_long_are_cut(tmp_path: Path) -> None:
    heartbeat = Heartbeat(beat_path(tmp_path, 3))
    heartbeat.beat("x" * 500, 2**40)
    found = read(tmp_path)
    assert found.phase == "x" * 64
    assert found.iteration == 2**40
    assert found.collectives == 0


def test_the_timers_tell_each_phase_and_return_to_the_outer_one(tmp_path: Path) -> None:
    timers = Timers(torch.device("cpu"), Heartbeat(beat_path(tmp_path, 3)))
    mesh = ProcessMesh(timers=timers)
    mesh.beat("iteration", 4)
    with mesh.time("forward-compute"):
        with mesh.time("tensor-parallel wait"):
            assert read(tmp_path).phase == "tensor-parallel wait"
        inner = read(tmp_path)
        with timers.paused(), mesh.time("world wait"):
            assert read(tmp_path).phase == "world wait"
        assert read(tmp_path).changes == inner.changes + 2
    found = read(tmp_path)
    assert (found.phase, found.iteration, found.collectives) == ("iteration", 4, 2)
    assert timers.take(1).keys() == {"forward-compute", "tensor-parallel wait"}


def test_a_phase_that_fails_is_left(tmp_path: Path) -> None:
    timers = Timers(torch.device("cpu"), Heartbeat(beat_path(tmp_path, 3)))
    with pytest.raises(ZeroDivisionError), timers("backward-compute"):
        raise ZeroDivisionError
    assert read(tmp_path).phase == "start"


def test_without_a_heartbeat_a_beat_tells_nobody() -> None:
    for mesh in (ProcessMesh(), ProcessMesh(timers=Timers(torch.device("cpu")))):
        mesh.beat("data", 1)
        with mesh.time("world wait"):
            pass


def test_a_killed_process_leaves_what_it_said_and_is_not_alive(tmp_path: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from megacore.observe.heartbeat import Heartbeat, beat_path
Heartbeat(beat_path(Path({str(tmp_path)!r}), 3)).beat("backward-compute", 12)
os.kill(os.getpid(), signal.SIGKILL)
"""
    child = subprocess.Popen([sys.executable, "-c", script])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(child.pid) == "Z"
    assert not read(tmp_path).alive, "a zombie is gone"
    child.wait()
    found = read(tmp_path)
    assert (found.phase, found.iteration, found.here, found.alive) == (
        "backward-compute",
        12,
        True,
        False,
    )
    assert process_state(child.pid) == ""


def test_what_is_no_heartbeat_is_passed_over(tmp_path: Path) -> None:
    heartbeats = [Heartbeat(beat_path(tmp_path, rank)) for rank in (10, 2)]
    heartbeats[0].beat("data")
    whole = beat_path(tmp_path, 2).read_bytes()
    for rank, data in enumerate([b"", whole[:-1], b"X" * len(whole)], start=20):
        beat_path(tmp_path, rank).write_bytes(data)
    beat_path(tmp_path, 30).mkdir()
    assert [beat.rank for beat in read_heartbeats(tmp_path)] == [2, 10]
    assert read_heartbeat(beat_path(tmp_path, 99)) is None
    assert read_heartbeats(tmp_path / "nowhere") == []


def test_a_rank_that_is_stopped_while_it_writes_has_a_whole_heartbeat(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from megacore.observe.heartbeat import Heartbeat, beat_path
heartbeat = Heartbeat(beat_path(Path({str(tmp_path)!r}), 3))
while True:
    for iteration in range(1000):
        heartbeat.beat("data-parallel wait", 1000 + iteration)
"""
    child = subprocess.Popen([sys.executable, "-c", script])
    try:
        while read_heartbeat(beat_path(tmp_path, 3)) is None or read(tmp_path).iteration is None:
            assert child.poll() is None
            time.sleep(0.01)
        newest = 0
        for _ in range(400):
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            found = read(tmp_path)
            assert (found.phase, found.collective) == ("data-parallel wait", "data-parallel wait")
            assert found.changes >= newest
            assert found.iteration is not None
            assert found.iteration >= 1000
            newest = found.changes
            child.send_signal(signal.SIGCONT)
            time.sleep(0.001)
    finally:
        child.kill()
        child.wait()
