"""What a launcher that reaches other machines, or waits for them, says of a job's end, and what
becomes of it."""

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
)
from megacore.launch.exit_reason import read_launcher_reason, write_launcher_reason, write_reason
from megacore.launch.launcher_state import write_launcher_state
from megacore.launch.rank_table import (
    LauncherReport,
    StateReport,
    rank_states,
    read_report,
    write_report,
)
from megacore.launch.supervise import supervise
from megacore.launch.watch import REMOTE_DELAY, Trouble
from megacore.observe.heartbeat import Heartbeat, beat_path
from tests.launch._processes import environment
from tests.launch.test_watch import Clock, look

SAYS = """
import pathlib, sys
from megacore import errors
from megacore.launch.exit_reason import write_launcher_reason, write_reason
from megacore.launch.rank_table import LauncherReport, write_report
from megacore.launch.rank_table import StateReport
from megacore.launch.watch import Trouble
from megacore.launch.launcher_state import write_launcher_state
directory = pathlib.Path(sys.argv[1])
"""


def run(tmp_path: Path, script: str, **options: Any) -> None:
    supervise(
        [sys.executable, "-c", SAYS + script, str(tmp_path / "exit")],
        log=tmp_path / "log",
        exit_directory=tmp_path / "exit",
        env=environment(),
        stop_grace=1.0,
        poll_interval=0.05,
        **options,
    )


def test_the_first_reason_stays(tmp_path: Path) -> None:
    assert read_launcher_reason(tmp_path) is None
    write_launcher_reason(tmp_path, HostLostError("lost host b: it is gone"))
    write_launcher_reason(tmp_path, RankLostError("something that followed"))
    found = read_launcher_reason(tmp_path)
    assert type(found) is HostLostError
    assert found.retryable
    assert str(found) == "lost host b: it is gone"
    (tmp_path / "launcher_reason.json").write_text('{"error": "HostLo')
    assert read_launcher_reason(tmp_path) is None, "torn by the same crash"


@pytest.mark.parametrize("code", [0, 1, 143])
def test_the_launchers_reason_is_raised(tmp_path: Path, code: int) -> None:
    with pytest.raises(HostLostError, match="lost host b"):
        run(
            tmp_path,
            "write_launcher_reason(directory, errors.HostLostError('lost host b')); "
            f"sys.exit({code})",
        )


def test_ranks_that_only_noticed_do_not_hide_it(tmp_path: Path) -> None:
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
def test_what_a_rank_did_by_itself_goes_before_it(
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


def test_what_an_earlier_attempt_left_is_not_believed(tmp_path: Path) -> None:
    write_launcher_reason(tmp_path / "exit", HostLostError("old"))
    write_report(tmp_path / "exit", LauncherReport(Trouble(stalled=(0,)), {}))
    write_launcher_state(tmp_path / "exit", "queued", "old")
    run(tmp_path, "", hosts=("a", "b"))


def test_a_job_that_is_queued_is_not_late(tmp_path: Path) -> None:
    queued = "import time; write_launcher_state(directory, 'queued', 'PENDING'); time.sleep(2.5)"
    run(tmp_path, queued, timeout=2.0, stall_limit=0.5, ranks=1)
    running = queued.replace("'queued'", "'running'")
    with pytest.raises(Exception, match=r"ran longer than launch\.timeout_minutes"):
        run(tmp_path, running, timeout=2.0, stall_limit=0.5, ranks=1)


def test_a_report_of_the_agents_ends_the_job_with_its_table(tmp_path: Path) -> None:
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
            stall_limit=2.0,
            ranks=2,
        )
    assert time.monotonic() - started < 10
    text = (tmp_path / "log-ranks.txt").read_text()
    assert "Python stacks of rank 1:\nno stack: it is stopped" in text
    assert "Python stacks of rank 0:\nFile of rank 0" in text


def test_a_report_without_any_rank_is_told_too(tmp_path: Path) -> None:
    with pytest.raises(
        RankStalledError, match=r"ranks 0, 1 made no progress .* which has not begun its work"
    ):
        run(
            tmp_path,
            "write_report(directory, LauncherReport(Trouble(stalled=(0, 1)), {}))",
            hosts=("a", "b"),
            stall_limit=2.0,
            ranks=2,
        )


def test_a_report_is_read_back(tmp_path: Path) -> None:
    report = LauncherReport(Trouble((), (3,)), {3: StateReport("dead", 1.5, "gone")})
    assert read_report(tmp_path) is None
    write_report(tmp_path, report)
    assert read_report(tmp_path) == report


def test_a_signal_on_one_machine_goes_before_codes_of_others(tmp_path: Path) -> None:
    lines = (
        "Root Cause (first observed failure):",
        "[0]:",
        "  rank      : {rank} (local)",
        "  exitcode  : {code} (p)",
    )
    cause = "\n{host}: ".join(lines)
    said = "\n".join(
        f"{host}: {cause.format(host=host, rank=rank, code=code)}"
        for host, rank, code in (("a", 0, 8), ("b", 1, -9))
    )
    peer = "write_reason(directory, 0, ConnectionResetError('connection reset by peer'))"
    with pytest.raises(RankLostError, match="rank 1 was ended by SIGKILL"):
        run(tmp_path, f"{peer}\nprint({said!r})\nsys.exit(1)", hosts=("a", "b"), ranks=2)


def test_a_launchers_word_on_memory_counts(tmp_path: Path) -> None:
    with pytest.raises(MemoryExhaustedError, match="a rank on b ran out"):
        run(
            tmp_path,
            """
write_launcher_reason(directory, errors.MemoryExhaustedError("a rank on b ran out of main memory"))
write_reason(directory, 0, ConnectionResetError("connection reset by peer"))
sys.exit(137)
""",
        )


def test_ranks_that_others_watch_are_looked_at_last(tmp_path: Path) -> None:
    from megacore.launch.watch import RankWatch

    clock = Clock()
    Heartbeat(beat_path(tmp_path, 0))
    Heartbeat(beat_path(tmp_path, 1))
    far = RankWatch(tmp_path, stall_limit=5.0, ranks=2, elsewhere=True, clock=clock)
    assert look(far, clock, REMOTE_DELAY) is None
    assert look(far, clock, 10) == Trouble(stalled=(0, 1))
    mine = RankWatch(tmp_path, stall_limit=5.0, only=range(1, 2), clock=clock)
    assert look(mine, clock, 10) == Trouble(stalled=(1,))
    held = RankWatch(tmp_path, stall_limit=5.0, ranks=2, clock=clock)
    for _ in range(10):
        assert look(held, clock, 4) is None
        held.hold()
    assert look(held, clock, 10) == Trouble(stalled=(0, 1))


def test_only_the_ranks_of_a_machine_are_asked(tmp_path: Path) -> None:
    write_reason(tmp_path, 0, RankLostError("x"))
    Heartbeat(beat_path(tmp_path, 0))
    Heartbeat(beat_path(tmp_path, 2))
    states = rank_states(tmp_path, None, stacks=True, only=range(2, 4))
    assert [(state.rank, state.state) for state in states] == [(2, "running"), (3, "absent")]
