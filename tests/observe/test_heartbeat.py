"""Tests of the heartbeat file that a rank writes and the parent process reads."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megacore.observe import heartbeat
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
    beat = read_heartbeat(beat_path(directory, rank))
    assert beat is not None
    return beat


def test_a_new_heartbeat_names_rank_process_and_host(tmp_path: Path) -> None:
    heartbeat = Heartbeat(beat_path(tmp_path / "exit", 3))
    beat = read(tmp_path / "exit")
    assert (beat.rank, beat.pid, beat.host) == (3, os.getpid(), os.uname().nodename)
    assert (beat.phase, beat.iteration, beat.collectives, beat.collective) == (
        "start",
        None,
        0,
        "",
    )
    assert beat.here
    assert beat.alive
    assert heartbeat.phase == "start"
    assert [path.name for path in (tmp_path / "exit").iterdir()] == ["rank_00003.beat"]


def test_a_beat_updates_phase_and_time_and_keeps_the_iteration(tmp_path: Path) -> None:
    heartbeat = Heartbeat(beat_path(tmp_path, 3))
    before, began = read(tmp_path), time.time()
    heartbeat.beat("data", 0)
    heartbeat.beat("save")
    beat = read(tmp_path)
    assert (beat.phase, beat.iteration, beat.changes) == ("save", 0, before.changes + 2)
    assert began <= beat.time <= time.time()


def test_collectives_are_counted_and_the_last_one_is_remembered(tmp_path: Path) -> None:
    heartbeat = Heartbeat(beat_path(tmp_path, 3))
    heartbeat.beat("world wait")
    assert read(tmp_path).waits
    heartbeat.beat("data-parallel wait")
    heartbeat.beat("optimizer")
    beat = read(tmp_path)
    assert (beat.phase, beat.collectives, beat.collective) == (
        "optimizer",
        2,
        "data-parallel wait",
    )
    assert not beat.waits
    heartbeat.leave_phase("world wait")  # the phase around it, which is counted already
    assert read(tmp_path).collectives == 2


def test_a_process_is_here_on_its_host_and_in_its_namespace(tmp_path: Path) -> None:
    Heartbeat(beat_path(tmp_path, 3))
    beat = read(tmp_path)
    assert beat.here
    assert not replace(beat, host="another").here
    assert not replace(beat, namespace=beat.namespace + 1).here


def test_a_state_that_is_not_completely_written_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = Heartbeat(beat_path(tmp_path, 3))
    beats.beat("forward-compute", 1)
    with monkeypatch.context() as patch:
        patch.setattr(heartbeat, "_NUMBER", SimpleNamespace(size=heartbeat._NUMBER.size))
        with pytest.raises(AttributeError):
            beats.beat("backward-compute", 2)  # ends before it writes the number
    assert (read(tmp_path).phase, read(tmp_path).iteration) == ("forward-compute", 1)


def test_a_long_phase_name_is_truncated(tmp_path: Path) -> None:
    heartbeat = Heartbeat(beat_path(tmp_path, 3))
    heartbeat.beat("x" * 500, 2**40)
    beat = read(tmp_path)
    assert beat.phase == "x" * 64
    assert beat.iteration == 2**40
    assert beat.collectives == 0


def test_timers_beat_each_phase_and_restore_the_outer_one(tmp_path: Path) -> None:
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
    beat = read(tmp_path)
    assert (beat.phase, beat.iteration, beat.collectives) == ("iteration", 4, 2)
    assert timers.take(1).keys() == {"forward-compute", "tensor-parallel wait"}


def test_a_phase_that_raises_restores_the_outer_one(tmp_path: Path) -> None:
    timers = Timers(torch.device("cpu"), Heartbeat(beat_path(tmp_path, 3)))
    with pytest.raises(ZeroDivisionError), timers("backward-compute"):
        raise ZeroDivisionError
    assert read(tmp_path).phase == "start"


def test_a_mesh_without_a_heartbeat_accepts_beats() -> None:
    for mesh in (ProcessMesh(), ProcessMesh(timers=Timers(torch.device("cpu")))):
        mesh.beat("data", 1)
        with mesh.time("world wait"):
            pass


def test_a_killed_process_leaves_its_last_beat_and_is_not_alive(tmp_path: Path) -> None:
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
    beat = read(tmp_path)
    assert (beat.phase, beat.iteration, beat.here, beat.alive) == (
        "backward-compute",
        12,
        True,
        False,
    )
    assert process_state(child.pid) == ""


def test_damaged_heartbeat_files_are_ignored(tmp_path: Path) -> None:
    heartbeats = [Heartbeat(beat_path(tmp_path, rank)) for rank in (10, 2)]
    heartbeats[0].beat("data")
    complete = beat_path(tmp_path, 2).read_bytes()
    for rank, data in enumerate([b"", complete[:-1], b"X" * len(complete)], start=20):
        beat_path(tmp_path, rank).write_bytes(data)
    beat_path(tmp_path, 30).mkdir()
    assert [beat.rank for beat in read_heartbeats(tmp_path)] == [2, 10]
    assert read_heartbeat(beat_path(tmp_path, 99)) is None
    assert read_heartbeats(tmp_path / "nowhere") == []


def test_a_rank_stopped_during_a_write_has_a_consistent_heartbeat(tmp_path: Path) -> None:
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
            beat = read(tmp_path)
            assert (beat.phase, beat.collective) == ("data-parallel wait", "data-parallel wait")
            assert beat.changes >= newest
            assert beat.iteration is not None
            assert beat.iteration >= 1000
            newest = beat.changes
            child.send_signal(signal.SIGCONT)
            time.sleep(0.001)
    finally:
        child.kill()
        child.wait()
