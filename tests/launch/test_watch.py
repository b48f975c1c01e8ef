"""Detection of stalled and lost ranks, and the table of ranks that is written for them."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megacore.cluster.start import local_torchrun_command, rank_environment
from megacore.errors import (
    DataFormatError,
    LossError,
    MegacoreError,
    MemoryExhaustedError,
    RankLostError,
    RankStalledError,
    TransientFileError,
)
from megacore.launch import watch
from megacore.launch.exit_reason import write_reason
from megacore.launch.failure import RESUMES, Attempt
from megacore.launch.guard import descendants
from megacore.launch.rank_table import RankState, furthest_behind, rank_states, table
from megacore.launch.supervise import supervise
from megacore.launch.watch import (
    LOST_LIMIT,
    REMOTE_DELAY,
    STANDSTILL,
    START_DELAY,
    KillCounter,
    RankWatch,
    Trouble,
    forget_launcher_state,
    launcher_state_path,
    read_launcher_state,
    write_launcher_state,
)
from megacore.observe.heartbeat import ENDED, Beat, Heartbeat, beat_path, read_heartbeat
from tests._limits import HANG
from tests.launch._processes import environment, fake_ranks, wait_until


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def first_trouble(watched: RankWatch, clock: Clock, seconds: float) -> Trouble | None:
    """Look once a second for some time and return the first trouble."""
    for _ in range(int(seconds)):
        clock.now += 1.0
        if trouble := watched.look():
            return trouble
    return None


def run_to_failure(
    tmp_path: Path, command: list[str], **options: Any
) -> tuple[MegacoreError, str, str]:
    """Run a job that fails; return its error, its table of ranks and its log."""
    before, started = set(descendants(os.getpid())), time.monotonic()
    log = tmp_path / "logs" / "attempt-003.log"
    with pytest.raises(MegacoreError) as caught:
        supervise(
            command,
            log=log,
            exit_directory=tmp_path / "exit",
            stop_grace=2 * HANG,
            poll_interval=0.05,
            ranks=2,
            **options,
        )
    assert time.monotonic() - started < HANG, "stuck ranks get no grace"
    assert set(descendants(os.getpid())) <= before
    return caught.value, (tmp_path / "logs" / "attempt-003-ranks.txt").read_text(), log.read_text()


def row(text: str, rank: int) -> str:
    """Return the line of a rank in the table."""
    (line,) = [
        line for line in text.splitlines() if line.removeprefix("->").split()[:1] == [str(rank)]
    ]
    return line


def test_stalled_rank_ends_the_job_and_its_stack_is_reported(tmp_path: Path) -> None:
    config = tmp_path / "job.json"
    config.write_text(json.dumps({"exit_directory": str(tmp_path / "exit")}))
    command = local_torchrun_command("tests.launch._stuck_rank", config, 2)
    env = {**environment(), **rank_environment(1)}
    error, text, log = run_to_failure(tmp_path, command, env=env, stall_limit=2.5)
    assert isinstance(error, RankStalledError)
    host = os.uname().nodename
    expected = (
        f"furthest behind is rank 1 on {host} in phase forward-compute of iteration 2, at "
        "launch/_stuck_rank.py:"
    )
    assert expected in str(error)
    assert "(hang_in_forward) < launch/_stuck_rank.py:" in str(error)
    assert "\n" not in str(error)
    assert str(tmp_path / "logs" / "attempt-003-ranks.txt") in str(error)
    assert row(text, 1).startswith("->")
    assert row(text, 1).split()[4:-1] == [
        "running",
        "2",
        "forward-compute",
        "data-parallel",
        "wait",
        "1",
    ]
    assert row(text, 0).split()[3:-1] == ["running", "2", *["data-parallel", "wait"] * 2, "2"]
    stuck, others = text.index("Python stacks of rank 1"), text.index("Python stacks of rank 0")
    assert "in hang_in_forward" in text[stuck:others]
    assert "in all_reduce" in text[others:]
    assert text in log


def test_stopped_rank_is_named_without_a_stack(tmp_path: Path) -> None:
    error, text, _ = run_to_failure(
        tmp_path,
        fake_ranks(tmp_path, "stubborn-stopped-watched"),
        env=environment(),
        stall_limit=1.5,
    )
    assert isinstance(error, RankStalledError)
    assert "furthest behind is rank 1" in str(error)
    assert "stopped" in row(text, 1)
    assert (
        "Python stacks of rank 1:\n"
        "no stack: the process is stopped (SIGSTOP), so it cannot write one"
    ) in text
    assert "in wait_in_a_collective" in text


def test_killed_rank_ends_a_hanging_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOST_LIMIT", 1.0)
    error, text, _ = run_to_failure(
        tmp_path, fake_ranks(tmp_path, "stubborn-killed-watched"), env=environment()
    )
    assert type(error) is RankLostError
    assert "in phase forward-compute of iteration 7 is gone without giving a reason" in str(error)
    assert row(text, 1).startswith("->")
    assert "dead" in row(text, 1)
    assert "running" in row(text, 0)
    assert "in wait_in_a_collective" in text


@pytest.mark.parametrize("rises", [True, False])
def test_lost_rank_with_a_counted_oom_kill_is_memory_exhaustion(
    tmp_path: Path, rises: bool
) -> None:
    write_beat_of_a_dead_process(tmp_path / "exit")
    error = Attempt.troubled(*trouble_of_a_lost_rank(tmp_path, [4, 5 if rises else 4]))
    assert type(error) is (MemoryExhaustedError if rises else RankLostError)
    assert error.retryable is not rises
    assert "rank 0 ran out of host memory: the kernel" in str(error) or not rises
    assert row((tmp_path / "log-ranks.txt").read_text(), 0).startswith("->")


def test_reason_of_a_failed_rank_is_raised_for_a_hanging_job(tmp_path: Path) -> None:
    write_beat_of_a_dead_process(tmp_path / "exit")
    write_reason(tmp_path / "exit", 0, DataFormatError("tokens.bin is damaged"))
    error = Attempt.troubled(*trouble_of_a_lost_rank(tmp_path, [4, 5]))
    assert isinstance(error, DataFormatError)
    assert str(error).startswith("rank 0: tokens.bin is damaged; the table of ranks is ")


def test_reason_of_a_rank_precedes_a_silent_peer_that_lost_it(tmp_path: Path) -> None:
    write_beat_of_a_dead_process(tmp_path / "exit")
    write_reason(tmp_path / "exit", 1, LossError("the loss is nan"))
    error = Attempt.troubled(*trouble_of_a_lost_rank(tmp_path, [4, 4]))
    assert isinstance(error, LossError)
    assert str(error).startswith("rank 1: the loss is nan; the table of ranks is ")


def trouble_of_a_lost_rank(
    tmp_path: Path, counts: list[int]
) -> tuple[Attempt, Trouble, list[RankState]]:
    kills = KillCounter(iter(counts).__next__)
    attempt = Attempt("torchrun", tmp_path / "log", 0, tmp_path / "exit", 1, kills)
    return attempt, Trouble(lost=(0,)), attempt.states(stacks=True)


def test_only_an_unchanged_heartbeat_of_an_active_rank_is_a_stall(tmp_path: Path) -> None:
    clock = Clock()
    watched = RankWatch(tmp_path, stall_limit=10.0, clock=clock)
    assert first_trouble(watched, clock, 20) is None, "no rank has started"
    first, second = (Heartbeat(beat_path(tmp_path, rank)) for rank in (0, 1))
    for _ in range(5):
        first.beat("data")
        second.beat("data")
        assert first_trouble(watched, clock, 8) is None
    write_beat_of_a_dead_process(tmp_path, ENDED)
    assert first_trouble(watched, clock, 20) == Trouble(stalled=(1,)), (
        "a rank that has ended does not stall"
    )
    second.beat("data")
    assert first_trouble(watched, clock, 8) is None


def test_process_that_stays_after_its_work_is_stalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    watched = RankWatch(tmp_path, stall_limit=10.0, clock=clock)
    Heartbeat(beat_path(tmp_path, 0)).beat(ENDED)
    assert first_trouble(watched, clock, 10) is None
    assert first_trouble(watched, clock, 2) == Trouble(stalled=(0,))
    (lingering,) = rank_states(tmp_path, None, stacks=False)
    assert (lingering.state, furthest_behind([lingering])) == ("running", lingering)
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert first_trouble(watched, clock, REMOTE_DELAY + 20) is None, "its host watches it"


def test_checks_that_take_long_find_a_stall_too(tmp_path: Path) -> None:
    clock = Clock()
    watched = RankWatch(tmp_path, stall_limit=10.0, clock=clock)
    heartbeat = Heartbeat(beat_path(tmp_path, 0))
    troubles = []
    for _ in range(20):
        clock.now += STANDSTILL + 1.0
        troubles.append(watched.look())
    assert troubles.index(Trouble(stalled=(0,))) == 11
    assert heartbeat.phase == "start"


def test_rank_that_never_starts_is_stalled(tmp_path: Path) -> None:
    clock = Clock()
    watched = RankWatch(tmp_path, stall_limit=10.0, ranks=2, clock=clock)
    assert first_trouble(watched, clock, 10 + START_DELAY) is None
    trouble = first_trouble(watched, clock, 2)
    assert trouble == Trouble(stalled=(0, 1))
    kills = KillCounter(lambda: 0)
    attempt = Attempt(
        "torchrun", tmp_path / "log", 0, tmp_path / "exit", 2, kills, stall_limit=10.0
    )
    error = attempt.troubled(trouble, attempt.states(stacks=True))
    assert isinstance(error, RankStalledError)
    assert "ranks 0, 1 made no progress" in str(error)
    assert "furthest behind is rank 0 which has not begun its work" in str(error)
    assert row((tmp_path / "log-ranks.txt").read_text(), 1).split() == ["1", "absent"]
    assert "; a retry starts from the beginning; the table" in str(error)
    training = replace(attempt, again=RESUMES)
    error = training.troubled(trouble, attempt.states(stacks=True))
    assert "; a retry resumes from the last complete checkpoint; the table" in str(error)


def test_no_rank_stalls_without_a_limit(tmp_path: Path) -> None:
    clock = Clock()
    watched = RankWatch(tmp_path, stall_limit=None, clock=clock)
    heartbeat = Heartbeat(beat_path(tmp_path, 0))
    assert first_trouble(watched, clock, 2000) is None
    assert heartbeat.phase == "start"


def test_time_without_looks_does_not_count_towards_a_stall(tmp_path: Path) -> None:
    clock = Clock()
    watched = RankWatch(tmp_path, stall_limit=10.0, clock=clock)
    heartbeat = Heartbeat(beat_path(tmp_path, 0))
    assert first_trouble(watched, clock, 8) is None
    clock.now += 3600.0
    assert watched.look() is None
    assert first_trouble(watched, clock, 20) == Trouble(stalled=(0,))
    assert heartbeat.phase == "start"


def test_a_lost_rank_and_the_absence_of_one_do_not_count_time_without_looks(
    tmp_path: Path,
) -> None:
    clock = Clock()
    absent = RankWatch(tmp_path / "absent", stall_limit=10.0, ranks=1, clock=clock)
    write_beat_of_a_dead_process(tmp_path / "dead")
    dead = RankWatch(tmp_path / "dead", stall_limit=600.0, clock=clock)
    for watched, limit, trouble in (
        (absent, 10 + START_DELAY, Trouble(stalled=(0,))),
        (dead, LOST_LIMIT, Trouble(lost=(0,))),
    ):
        watched.hold()
        assert first_trouble(watched, clock, limit - 2) is None
        clock.now += 3600.0
        assert watched.look() is None
        assert first_trouble(watched, clock, 4) == trouble


def test_all_limits_restart_when_a_job_gets_its_hosts(tmp_path: Path) -> None:
    clock = Clock()
    write_beat_of_a_dead_process(tmp_path / "dead")
    heartbeat = Heartbeat(beat_path(tmp_path / "stuck", 0))
    for name, stall_limit, seconds, trouble in (
        ("dead", 600.0, LOST_LIMIT, Trouble(lost=(0,))),
        ("stuck", 10.0, 10, Trouble(stalled=(0,))),
        ("absent", 10.0, 10 + START_DELAY, Trouble(stalled=(0,))),
    ):
        watched = RankWatch(tmp_path / name, stall_limit=stall_limit, ranks=1, clock=clock)
        assert first_trouble(watched, clock, seconds - 2) is None
        clock.now += 3600.0  # in the queue
        watched.hold()
        assert first_trouble(watched, clock, seconds - 2) is None
        assert first_trouble(watched, clock, 4) == trouble
    assert heartbeat.phase == "start"


def test_a_rank_that_starts_again_is_not_lost(tmp_path: Path) -> None:
    write_beat_of_a_dead_process(tmp_path)
    clock = Clock()
    watched = RankWatch(tmp_path, stall_limit=600.0, clock=clock)
    assert first_trouble(watched, clock, 5) is None
    heartbeat = Heartbeat(beat_path(tmp_path, 0))
    assert first_trouble(watched, clock, 2 * LOST_LIMIT) is None
    assert heartbeat.phase == "start"


def test_a_lost_rank_precedes_those_that_stall_for_it(tmp_path: Path) -> None:
    write_beat_of_a_dead_process(tmp_path)
    heartbeat = Heartbeat(beat_path(tmp_path, 1))
    clock = Clock()
    watched = RankWatch(tmp_path, stall_limit=LOST_LIMIT, clock=clock)
    assert first_trouble(watched, clock, 20) == Trouble(lost=(0,))
    assert heartbeat.phase == "start"


def test_agents_report_a_dead_rank_of_this_host_first(tmp_path: Path) -> None:
    write_beat_of_a_dead_process(tmp_path)
    clock = Clock()
    watched = RankWatch(tmp_path, stall_limit=5.0, elsewhere=True, clock=clock)
    assert first_trouble(watched, clock, REMOTE_DELAY) is None
    assert first_trouble(watched, clock, 10) == Trouble(stalled=(0,))


def test_rank_of_another_host_has_an_extra_delay_and_is_not_reported_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_beat_of_a_dead_process(tmp_path)
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    clock = Clock()
    watched = RankWatch(tmp_path, stall_limit=5.0, clock=clock)
    assert first_trouble(watched, clock, REMOTE_DELAY) is None
    assert first_trouble(watched, clock, 10) == Trouble(stalled=(0,))
    (state,) = rank_states(tmp_path, None, stacks=True)
    assert state.state == "on another host"


def test_dead_process_is_lost_after_the_limit(tmp_path: Path) -> None:
    write_beat_of_a_dead_process(tmp_path)
    clock = Clock()
    watched = RankWatch(tmp_path, stall_limit=600.0, clock=clock)
    assert first_trouble(watched, clock, LOST_LIMIT) is None
    assert first_trouble(watched, clock, 2) == Trouble(lost=(0,))


def test_process_with_a_reused_id_is_not_the_rank(tmp_path: Path) -> None:
    heartbeat = Heartbeat(beat_path(tmp_path, 0))
    data = beat_path(tmp_path, 0).read_bytes()
    beat = read_heartbeat(beat_path(tmp_path, 0))
    assert beat is not None
    assert beat.alive
    start = beat.process_start.to_bytes(8, "little")
    beat_path(tmp_path, 0).write_bytes(
        data.replace(start, (beat.process_start - 1).to_bytes(8, "little"))
    )
    clock = Clock()
    assert first_trouble(RankWatch(tmp_path, stall_limit=None, clock=clock), clock, 15) == Trouble(
        lost=(0,)
    )
    assert heartbeat.phase == "start"


def write_beat_of_a_dead_process(directory: Path, phase: str = "forward-compute") -> None:
    script = f"""
from pathlib import Path
from megacore.observe.heartbeat import *
Heartbeat(beat_path(Path({str(directory)!r}), 0)).beat({phase!r}, 3)
"""
    subprocess.run([sys.executable, "-c", script], env=environment(), check=True)


def state(
    rank: int,
    phase: str = "forward-compute",
    iteration: int = 3,
    collectives: int = 9,
    idle: float = 5.0,
) -> RankState:
    beat = Beat(rank, "host", 1, 1, 0, 1, iteration, phase, collectives, "x wait", 0.0)
    return RankState(rank, beat, "running", idle, "no stack")


@pytest.mark.parametrize(
    ("states", "behind"),
    [
        ([state(0, "world wait"), state(1), state(2, "world wait", 2)], 1),
        ([state(0, "world wait"), state(1, "world wait", collectives=8)], 1),
        ([state(0, "world wait", 4, 1), state(1, "world wait", 3, 9)], 1),
        ([state(0), state(1, idle=9.0)], 1),
        ([state(0), RankState(1, None, "absent", 0.0, "")], 1),
    ],
)
def test_furthest_behind_is_the_rank_that_the_others_wait_for(
    states: list[RankState], behind: int
) -> None:
    assert furthest_behind(states).rank == behind


def test_table_lists_a_rank_that_never_started(tmp_path: Path) -> None:
    heartbeat = Heartbeat(beat_path(tmp_path, 0))
    heartbeat.beat("rendezvous")
    assert rank_states(tmp_path / "nowhere", 2, stacks=False) == []
    states = rank_states(tmp_path, 2, stacks=False)
    text = table(states, furthest_behind(states), "a sentence")
    assert row(text, 1).split() == ["->", "1", "absent"]
    assert "rendezvous" in row(text, 0)
    assert furthest_behind(states).where == "which has not begun its work"
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL, (
        "without a handler, a request for stacks would end this process"
    )
    wait_until(lambda: rank_states(tmp_path, 2, stacks=True) != [], HANG, "looked")


def test_launcher_state_round_trips_until_it_is_forgotten(tmp_path: Path) -> None:
    directory = tmp_path / "exit"
    assert read_launcher_state(directory) is None
    write_launcher_state(directory, "queued", "PENDING (Resources)")
    write_launcher_state(directory, "running", "RUNNING on node-1")
    state = read_launcher_state(directory)
    assert state is not None
    assert (state.state, state.detail) == ("running", "RUNNING on node-1")
    assert not list(directory.glob("rank_*"))
    forget_launcher_state(directory)
    forget_launcher_state(directory)
    assert read_launcher_state(directory) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"state": "lost", "detail": "", "time": 0}', '{"state": "queued"}']
)
def test_torn_launcher_state_is_ignored(text: str, tmp_path: Path) -> None:
    launcher_state_path(tmp_path).write_text(text)
    assert read_launcher_state(tmp_path) is None


def test_heartbeat_that_cannot_be_read_for_a_moment_is_no_stall(tmp_path: Path) -> None:
    clock = Clock()
    watched = RankWatch(tmp_path, stall_limit=10.0, ranks=1, clock=clock)
    path, aside = beat_path(tmp_path, 0), tmp_path / "aside"
    heartbeat = Heartbeat(path)
    for _ in range(int(START_DELAY) + 60):
        heartbeat.beat("forward")
        assert first_trouble(watched, clock, 1) is None
    path.rename(aside)
    assert first_trouble(watched, clock, 5) is None
    aside.rename(path)
    heartbeat.beat("forward")
    assert first_trouble(watched, clock, 1) is None
    path.rename(aside)
    assert first_trouble(watched, clock, START_DELAY + 20) == Trouble(stalled=(0,))


def test_failing_read_of_the_launcher_state_ends_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, kind: type) -> None:
        raise TransientFileError(f"cannot read {path}")

    monkeypatch.setattr(watch, "read_record", fail)
    assert read_launcher_state(tmp_path) is None
