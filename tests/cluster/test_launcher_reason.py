"""Reports and reasons that a launcher with other hosts writes, and the errors that follow."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megacore.errors import (
    DataFormatError,
    HostLostError,
    MemoryExhaustedError,
    PreemptedError,
    RankLostError,
    RankStalledError,
    StageTimeoutError,
)
from megacore.launch.exit_reason import (
    LAUNCHER_REASON,
    read_launcher_reason,
    write_launcher_reason,
    write_reason,
)
from megacore.launch.failure import Attempt
from megacore.launch.rank_table import (
    LauncherReport,
    StateReport,
    rank_states,
    read_report,
    write_report,
)
from megacore.launch.supervise import _Limit, supervise
from megacore.launch.watch import (
    REMOTE_DELAY,
    KillCounter,
    RankWatch,
    State,
    Trouble,
    write_launcher_state,
)
from megacore.observe.heartbeat import Heartbeat, beat_path
from tests._limits import HANG
from tests.launch._processes import environment
from tests.launch.test_watch import Clock, first_trouble

SCRIPT_HEADER = """
import pathlib, sys
from megacore import errors
from megacore.launch.exit_reason import write_launcher_reason, write_reason
from megacore.launch.rank_table import LauncherReport, write_report
from megacore.launch.rank_table import StateReport
from megacore.launch.watch import Trouble
from megacore.launch.watch import write_launcher_state
directory = pathlib.Path(sys.argv[1])
"""


def run(tmp_path: Path, script: str, **options: Any) -> None:
    settings: dict[str, Any] = {"stop_grace": 1.0, "poll_interval": 0.05, **options}
    supervise(
        [sys.executable, "-c", SCRIPT_HEADER + script, str(tmp_path / "exit")],
        log=tmp_path / "log",
        exit_directory=tmp_path / "exit",
        env=environment(),
        **settings,
    )


def run_in_state(tmp_path: Path, state: State, seconds: float) -> None:
    """Run a job that its scheduler says to be in a state for some seconds, and for 0.5 s at most.

    The state is known at the first look, however long the job takes to start.
    """
    show = lambda: write_launcher_state(tmp_path / "exit", state, "S")  # noqa: E731
    waits = f"import time; time.sleep({seconds})"
    run(tmp_path, waits, timeout=0.5, stall_limit=0.1, ranks=1, on_poll=show)


def attempt(directory: Path) -> Attempt:
    """Return an attempt of a batch job whose log and reasons are in `directory`."""
    kills = KillCounter(lambda: None)
    return Attempt("follow", directory / "log", 0, directory, ranks=24, kills=kills)


def test_later_launcher_reason_does_not_replace_the_first(tmp_path: Path) -> None:
    assert read_launcher_reason(tmp_path) is None
    write_launcher_reason(tmp_path, HostLostError("lost host b: it is gone"))
    write_launcher_reason(tmp_path, RankLostError("something that followed"))
    reason = read_launcher_reason(tmp_path)
    assert type(reason) is HostLostError
    assert reason.retryable
    assert str(reason) == "lost host b: it is gone"


def test_torn_launcher_reason_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "launcher_reason.json").write_text('{"error": "HostLo')
    assert read_launcher_reason(tmp_path) is None


@pytest.mark.parametrize("code", [0, 1, 143])
def test_launcher_reason_is_raised_for_any_exit_code(tmp_path: Path, code: int) -> None:
    with pytest.raises(HostLostError, match="lost host b"):
        run(
            tmp_path,
            "write_launcher_reason(directory, errors.HostLostError('lost host b')); "
            f"sys.exit({code})",
        )


def test_secondary_reason_of_a_rank_does_not_hide_the_launcher_reason(tmp_path: Path) -> None:
    with pytest.raises(HostLostError, match="lost host b"):
        run(
            tmp_path,
            """
write_launcher_reason(directory, errors.HostLostError('lost host b'))
write_reason(directory, 0, ConnectionResetError("connection reset by peer"))
sys.exit(1)
""",
        )


@pytest.mark.parametrize(
    ("error", "kind"), [("DataFormatError", DataFormatError), ("PreemptedError", PreemptedError)]
)
def test_primary_reason_of_a_rank_precedes_the_launcher_reason(
    tmp_path: Path, error: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match="said by a rank"):
        run(
            tmp_path,
            f"""
write_launcher_reason(directory, errors.HostLostError('lost host b'))
write_reason(directory, 1, errors.{error}("said by a rank"))
sys.exit(1)
""",
        )


def test_files_of_an_earlier_attempt_are_ignored(tmp_path: Path) -> None:
    write_launcher_reason(tmp_path / "exit", HostLostError("old"))
    write_report(tmp_path / "exit", LauncherReport(Trouble(stalled=(0,)), {}))
    write_launcher_state(tmp_path / "exit", "queued", "old")
    run(tmp_path, "", hosts=("a", "b"))


@pytest.mark.parametrize("state", ["queued", "ending"])
def test_queued_and_ending_time_does_not_count_towards_the_timeout(
    tmp_path: Path, state: State
) -> None:
    run_in_state(tmp_path, state, 1.0)


def test_time_before_a_preemption_counts_towards_the_timeout(tmp_path: Path) -> None:
    clock = Clock()
    limit = _Limit(60.0, "the job ran longer than", tmp_path / "log", clock)
    clock.now += 40.0
    limit.check()
    clock.now += 3600.0
    limit.check(counts=False)  # queued again
    clock.now += 40.0
    with pytest.raises(StageTimeoutError, match="timeout_minutes = 1 minutes"):
        limit.check()


def test_running_time_counts_towards_the_timeout(tmp_path: Path) -> None:
    with pytest.raises(StageTimeoutError, match=r"ran longer than launch\.timeout_minutes"):
        run_in_state(tmp_path, "running", 2 * HANG)


def test_follower_of_a_stalled_batch_job_can_cancel_the_job(tmp_path: Path) -> None:
    follows = """
import signal, time
from megacore.observe.heartbeat import Heartbeat, beat_path

def cancel(number, frame):
    (directory / "cancelled").touch()
    sys.exit(143)

signal.signal(signal.SIGTERM, cancel)
write_launcher_state(directory, "running", "RUNNING")
Heartbeat(beat_path(directory, 0)).beat("forward-compute", 3)
time.sleep(600)
"""
    with pytest.raises(RankStalledError, match="rank 0 made no progress"):
        run(tmp_path, follows, stall_limit=0.5, ranks=1, stop_grace=HANG)
    assert (tmp_path / "exit" / "cancelled").exists()


def test_report_of_the_agents_ends_the_job_with_a_rank_table(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(
        RankStalledError, match=r"rank 1 made no progress .*furthest behind is rank 1 on"
    ):
        run(
            tmp_path,
            """
from megacore.observe.heartbeat import Heartbeat, beat_path
for rank, phase in enumerate(("data-parallel wait", "forward-compute")):
    Heartbeat(beat_path(directory, rank)).beat(phase, 3)
states = {
    0: StateReport("running", 0.1, "File of rank 0"),
    1: StateReport("stopped", 9.0, "no stack: it is stopped"),
}
write_report(directory, LauncherReport(Trouble(stalled=(1,)), states))
""",
            hosts=("a", "b"),
            stall_limit=2 * HANG,
            ranks=2,
        )
    assert time.monotonic() - started < HANG
    text = (tmp_path / "log-ranks.txt").read_text()
    assert "Python stacks of rank 1:\nno stack: it is stopped" in text
    assert "Python stacks of rank 0:\nFile of rank 0" in text


def test_report_without_rank_states_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(
        RankStalledError, match=r"ranks 0, 1 made no progress .* which has not begun its work"
    ):
        run(
            tmp_path,
            "write_report(directory, LauncherReport(Trouble(stalled=(0, 1)), {}))",
            hosts=("a", "b"),
            stall_limit=2 * HANG,
            ranks=2,
        )


def test_launcher_report_round_trips(tmp_path: Path) -> None:
    report = LauncherReport(Trouble((), (3,)), {3: StateReport("dead", 1.5, "gone")})
    assert read_report(tmp_path) is None
    write_report(tmp_path, report)
    assert read_report(tmp_path) == report


def test_signal_on_one_host_precedes_exit_codes_of_others(tmp_path: Path) -> None:
    lines = (
        "Root Cause (first observed failure):",
        "[0]:",
        "  rank      : {rank} (local)",
        "  exitcode  : {code} (p)",
    )
    cause = "\n{host}: ".join(lines)
    log_text = "\n".join(
        f"{host}: {cause.format(host=host, rank=rank, code=code)}"
        for host, rank, code in (("a", 0, 8), ("b", 1, -9))
    )
    peer = "write_reason(directory, 0, ConnectionResetError('connection reset by peer'))"
    with pytest.raises(RankLostError, match="rank 1 was ended by SIGKILL"):
        run(tmp_path, f"{peer}\nprint({log_text!r})\nsys.exit(1)", hosts=("a", "b"), ranks=2)


def reports(*failures: tuple[int, int]) -> str:
    """Return the reports of torchrun on several nodes, of ranks with their exit codes."""
    return "".join(
        f"Root Cause (first observed failure):\n[0]:\n  time      : 2026-11-28_15:00:{second:02}\n"
        f"  rank      : {rank} (local_rank: 0)\n  exitcode  : {code} (pid: 7)\n"
        for second, (rank, code) in enumerate(failures)
    )


@pytest.mark.parametrize(
    ("failures", "who"),
    [
        (((0, 8), (8, -9), (16, -6)), "rank 8 was ended by SIGKILL"),
        (((8, -9), (0, -15)), "rank 8 was ended by SIGKILL"),
        (((8, -15),), "rank 8 was ended by SIGTERM"),
    ],
)
def test_rank_that_a_signal_ended_is_named_among_the_nodes_of_a_batch_job(
    tmp_path: Path, failures: tuple[tuple[int, int], ...], who: str
) -> None:
    write_reason(tmp_path, 0, ConnectionResetError("connection reset by peer"))
    (tmp_path / "log").write_text(reports(*failures))
    assert who in str(attempt(tmp_path).failed(1))


def test_first_rank_is_named_despite_the_output_of_many_that_lost_it(tmp_path: Path) -> None:
    write_reason(tmp_path, 0, ConnectionResetError("connection reset by peer"))
    aborted = f"frame #1: {'c10d::ProcessGroupNCCL::Watchdog' * 3}\n" * 100
    first, last = reports((8, -9)), reports((0, 8), (16, -6))
    (tmp_path / "log").write_text(f"{first}{aborted * 300}{last}")
    assert "rank 8 was ended by SIGKILL" in str(attempt(tmp_path).failed(1))


def test_ranks_that_the_scheduler_ended_do_not_hide_the_reason_of_a_rank(tmp_path: Path) -> None:
    write_reason(tmp_path, 8, DataFormatError("the shard is damaged"))
    (tmp_path / "log").write_text(reports((8, 3), (0, -15)))
    error = attempt(tmp_path).failed(1)
    assert type(error) is DataFormatError, error


def test_two_hosts_may_give_a_reason_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def late(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        # On another host, in a container in which the process has the same id.
        write_launcher_reason(tmp_path, HostLostError("node-2 did not begin, says node-1"))
        replace(source, target)

    monkeypatch.setattr(os, "replace", late)
    write_launcher_reason(tmp_path, HostLostError("node-2 did not begin, says node-3"))
    assert str(read_launcher_reason(tmp_path)) == "node-2 did not begin, says node-3"
    assert [path.name for path in tmp_path.iterdir()] == [LAUNCHER_REASON]


def test_memory_exhaustion_reported_by_the_launcher_is_raised(tmp_path: Path) -> None:
    with pytest.raises(MemoryExhaustedError, match="a rank on b ran out"):
        run(
            tmp_path,
            """
write_launcher_reason(directory, errors.MemoryExhaustedError("a rank on b ran out of host memory"))
write_reason(directory, 0, ConnectionResetError("connection reset by peer"))
sys.exit(137)
""",
        )


@pytest.fixture
def two_beats(tmp_path: Path) -> Path:
    """Return a directory with the first heartbeats of two ranks."""
    Heartbeat(beat_path(tmp_path, 0))
    Heartbeat(beat_path(tmp_path, 1))
    return tmp_path


def test_remote_ranks_stall_only_after_an_extra_delay(two_beats: Path) -> None:
    clock = Clock()
    watch = RankWatch(two_beats, stall_limit=5.0, ranks=2, elsewhere=True, clock=clock)
    assert first_trouble(watch, clock, REMOTE_DELAY) is None
    assert first_trouble(watch, clock, 10) == Trouble(stalled=(0, 1))


def test_watch_reports_only_the_ranks_that_it_watches(two_beats: Path) -> None:
    clock = Clock()
    watch = RankWatch(two_beats, stall_limit=5.0, only=range(1, 2), clock=clock)
    assert first_trouble(watch, clock, 10) == Trouble(stalled=(1,))


def test_hold_restarts_the_stall_limit(two_beats: Path) -> None:
    clock = Clock()
    watch = RankWatch(two_beats, stall_limit=5.0, ranks=2, clock=clock)
    for _ in range(10):
        assert first_trouble(watch, clock, 4) is None
        watch.hold()
    assert first_trouble(watch, clock, 10) == Trouble(stalled=(0, 1))


def test_rank_states_cover_only_the_requested_ranks(tmp_path: Path) -> None:
    write_reason(tmp_path, 0, RankLostError("x"))
    Heartbeat(beat_path(tmp_path, 0))
    Heartbeat(beat_path(tmp_path, 2))
    states = rank_states(tmp_path, None, stacks=True, only=range(2, 4))
    assert [(state.rank, state.state) for state in states] == [(2, "running"), (3, "absent")]
