import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megacore.artifact import lock
from megacore.artifact.build import is_locked
from megacore.errors import (
    ConfigError,
    LaunchError,
    MemoryExhaustedError,
    PreemptedError,
    RankLostError,
    StageTimeoutError,
    TrainingError,
    TrainingStoppedError,
    WorkspaceError,
)
from megacore.launch.failure import Attempt
from megacore.launch.guard import REASON_MARK, descendants
from megacore.launch.supervise import _poll, _Signals, _take_printed, supervise
from megacore.launch.watch import KillCounter
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


class Cancelled(BaseException):
    """Cancellation by an orchestrator, which is no subclass of Exception."""


def test_a_log_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "train.log"
    log.mkdir(parents=True)
    with pytest.raises(WorkspaceError, match=f"cannot write {log}: Is a directory: move"):
        run(tmp_path, ["true"])


def run(tmp_path: Path, command: list[str], **options: Any) -> None:
    settings: dict[str, Any] = {
        "stop_grace": GRACE,
        "poll_interval": 0.05,
        "env": environment(),
        **options,
    }
    supervise(
        command, log=tmp_path / "logs" / "train.log", exit_directory=tmp_path / "exit", **settings
    )


def test_successful_job_is_polled_and_leaves_no_process(tmp_path: Path) -> None:
    polls: list[float] = []
    before, files = set(descendants(os.getpid())), os.listdir("/proc/self/fd")
    run(tmp_path, fake_ranks(tmp_path, "quick"), on_poll=lambda: polls.append(time.monotonic()))
    assert polls
    assert (tmp_path / "logs" / "train.log").read_text().count("is here") == 2
    assert set(descendants(os.getpid())) <= before
    assert set(os.listdir("/proc/self/fd")) <= set(files)


def test_last_poll_follows_the_end_of_the_command(tmp_path: Path) -> None:
    seen: list[str] = []
    log = tmp_path / "logs" / "train.log"
    command = [sys.executable, "-c", "print('the last line')"]
    run(tmp_path, command, on_poll=lambda: seen.append(log.read_text()), poll_interval=600)
    assert seen == ["the last line\n"]


def test_log_of_an_earlier_attempt_is_kept_and_not_reported(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "train.log"
    log.parent.mkdir()
    log.write_text("of an earlier attempt\n")
    with pytest.raises(RankLostError, match=r"train\.log: loading") as caught:
        run(tmp_path, [sys.executable, "-c", "print('loading'); exit(5)"])
    assert "earlier attempt" not in str(caught.value)
    assert log.read_text() == "of an earlier attempt\nloading\n"


@pytest.mark.parametrize(
    ("behaviour", "error"), [("polite", KeyboardInterrupt), ("stubborn", Cancelled)]
)
def test_exception_of_the_poll_is_raised_after_the_end_of_all_ranks(
    tmp_path: Path, behaviour: str, error: type[BaseException]
) -> None:
    pids: list[int] = []
    raised_at = 0.0

    def cancel() -> None:
        nonlocal raised_at
        pids.extend(rank_pids(tmp_path))
        raised_at = time.monotonic()
        raise error("stop")

    with pytest.raises(error):
        run(tmp_path, fake_ranks(tmp_path, behaviour), on_poll=cancel)
    assert pids
    assert not any(alive(pid) for pid in pids)
    assert time.monotonic() - raised_at < HANG


def test_interrupted_wait_of_subprocess_does_not_hang_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception of a signal handler right after `Popen.wait` took its lock leaves it taken."""
    started: list[Any] = []

    class Recorded(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    def interrupt() -> None:
        started[0]._waitpid_lock.acquire()
        raise Cancelled("stop")

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    begun = time.monotonic()
    with pytest.raises(Cancelled):
        run(tmp_path, fake_ranks(tmp_path, "polite"), on_poll=interrupt)
    assert time.monotonic() - begun < HANG
    assert not alive(started[0].pid)


def test_exception_while_the_guard_starts_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self.pid)
            raise Cancelled("stop")

    def read(path: Path) -> bytes:
        """Show no environment of the guard at first, as the kernel may just after exec."""
        if started and path == Path("/proc", str(started[0]), "environ"):
            looks.append(path)
            return b"" if len(looks) < 3 else read_bytes(path)
        return read_bytes(path)

    looks: list[Path] = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    monkeypatch.setattr(Path, "read_bytes", read)
    with pytest.raises(Cancelled):
        run(tmp_path, fake_ranks(tmp_path, "polite"))
    assert not alive(started[0])


def test_swallowed_signal_ends_the_job(tmp_path: Path) -> None:
    """Pydantic turns the exception of a signal handler that runs in a serializer into its own."""

    def cancel(number: int, frame: Any) -> None:
        raise Cancelled("stop")

    def swallow() -> None:
        with contextlib.suppress(Cancelled):
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, cancel)
    try:
        with pytest.raises(Cancelled):
            run(tmp_path, fake_ranks(tmp_path, "polite"), on_poll=swallow, timeout=HANG)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signal.set_wakeup_fd(-1) == -1


def test_only_lost_signals_that_end_the_job_are_handled_again() -> None:
    handled: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGWINCH)
    before = {
        number: signal.signal(number, lambda received, _: handled.append(received))
        for number in numbers
    }
    try:
        with _Signals() as signals:
            for number in numbers:
                os.kill(os.getpid(), number)
            signals.handle_again()
            signals.handle_again()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert handled == [signal.SIGTERM, signal.SIGWINCH, signal.SIGTERM]


def test_sigusr1_is_passed_on_once_and_not_before_the_guard_has_a_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[int, int]] = []
    catches = [False, False, True, True]
    monkeypatch.setattr("megacore.launch.supervise.catches", lambda pid, number: catches.pop(0))
    with _Signals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
        for expected in (0, 0, 1, 1):
            signals.pass_on(7)
            assert sent == [(7, signal.SIGUSR1)] * expected


def test_a_guard_that_something_else_reaps_is_no_success() -> None:
    guard = subprocess.Popen(["true"])
    os.waitpid(guard.pid, 0)
    assert _poll(guard, HANG) == 255


def test_wakeup_descriptor_of_the_caller_is_kept(tmp_path: Path) -> None:
    """An event loop of the main thread is woken by it."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    try:
        run(tmp_path, [sys.executable, "-c", ""])
    finally:
        kept = signal.set_wakeup_fd(-1)
        os.close(reader)
        os.close(writer)
    assert kept == writer


def test_timeout_is_reported_with_minutes_and_setting(tmp_path: Path) -> None:
    before = set(descendants(os.getpid()))
    with pytest.raises(StageTimeoutError, match=r"launch\.timeout_minutes = 0\.02 minutes"):
        run(tmp_path, [sys.executable, "-c", "import time; time.sleep(600)"], timeout=1.2)
    assert set(descendants(os.getpid())) <= before


def test_reason_of_a_rank_is_raised_as_its_own_type(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rank 0: train\.lr is 7: lower it"):
        run(tmp_path, fake_ranks(tmp_path, "config-error"))


PRINTED = (
    b'{"rank": 3, "error": "WorkspaceError", "message": "full", "time": 1, "secondary": false}'
)


@pytest.mark.parametrize("poll_interval", [0.05, 30.0])
def test_unwritable_workspace_is_told_without_a_file(tmp_path: Path, poll_interval: float) -> None:
    code = f"import os; print({(REASON_MARK + PRINTED).decode()!r}, flush=True); os._exit(4)"
    with pytest.raises(WorkspaceError, match=r"^rank 3: full$"):
        run(tmp_path, [sys.executable, "-c", code], poll_interval=poll_interval)


def attempt_in(directory: Path) -> Attempt:
    """Return an attempt without ranks and with an empty log."""
    (directory / "log").touch()
    return Attempt("train", directory / "log", 0, directory, None, KillCounter(lambda: None))


def test_printed_reason_that_arrives_in_pieces_is_whole(tmp_path: Path) -> None:
    attempt = attempt_in(tmp_path)
    for piece in (b"\n" + PRINTED[:40], PRINTED[40:] + b"\n", b'\n{"rank": 1, "err'):
        guard: Any = SimpleNamespace(stdout=io.BytesIO(piece))
        _take_printed(guard, attempt)
    assert str(attempt.failed(1)) == "rank 3: full"


@pytest.mark.parametrize(
    ("free", "advice"), [(5 << 20, "; 5.0 MiB are free in .*: free some space, .*"), (1 << 30, "")]
)
def test_lost_reason_of_code_4_names_the_space_only_if_little_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, advice: str
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    error = attempt_in(tmp_path).failed(4)
    assert isinstance(error, WorkspaceError)
    assert re.fullmatch(
        rf"the job exited with code 4, .* could not use the workspace, and its reason is lost "
        rf"too{advice}; last lines of .*log: none",
        str(error),
    )


def test_loss_of_the_log_hides_no_reason(tmp_path: Path) -> None:
    attempt = attempt_in(tmp_path)
    attempt.log.unlink()
    assert "the job was ended by SIGKILL" in str(attempt.failed(137))
    attempt.printed.extend(PRINTED)
    assert str(attempt.failed(1)) == "rank 3: full"


def test_reason_of_an_earlier_attempt_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "exit").mkdir()
    old = {"rank": 0, "error": "ConfigError", "message": "old", "time": 1.0, "secondary": False}
    (tmp_path / "exit" / "rank_0.json").write_text(json.dumps(old))
    with pytest.raises(RankLostError):
        run(tmp_path, [sys.executable, "-c", "exit(5)"])


FOREIGN_SCRIPT = """
import os, pathlib, signal, sys
from megacore.launch.exit_reason import write_reason
from megacore.launch.guard import JOB_VARIABLE
own, code = os.environ[JOB_VARIABLE], int(sys.argv[2])
os.environ[JOB_VARIABLE] = "0" * 32 + ".1"
write_reason(pathlib.Path(sys.argv[1]), 0, FileNotFoundError("iter_0000010.tmp-1"))
if len(sys.argv) > 3:
    os.environ[JOB_VARIABLE] = own + sys.argv[3]
    write_reason(pathlib.Path(sys.argv[1]), 1, ValueError("of this attempt"))
os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""


def run_with_a_foreign_reason(tmp_path: Path, *arguments: str) -> None:
    run(tmp_path, [sys.executable, "-c", FOREIGN_SCRIPT, str(tmp_path / "exit"), *arguments])


def test_reason_that_an_earlier_attempt_writes_late_is_ignored(tmp_path: Path) -> None:
    run_with_a_foreign_reason(tmp_path, "0")
    with pytest.raises(RankLostError, match="was ended by SIGKILL"):
        run_with_a_foreign_reason(tmp_path, "-9")


@pytest.mark.parametrize("host", ["", ".head", ".1"])
def test_reason_of_this_attempt_counts_on_every_host(tmp_path: Path, host: str) -> None:
    with pytest.raises(TrainingError, match="rank 1: ValueError: of this attempt"):
        run_with_a_foreign_reason(tmp_path, "1", host)


def test_secondary_reason_does_not_hide_the_primary_reason(tmp_path: Path) -> None:
    reasons = [
        {
            "rank": 1,
            "error": "RankLostError",
            "message": "lost a peer",
            "time": 10.0,
            "secondary": True,
        },
        {
            "rank": 0,
            "error": "DataFormatError",
            "message": "x.bin is damaged",
            "time": 11.0,
            "secondary": False,
        },
    ]
    script = f"""
import json, pathlib
for reason in {reasons!r}:
    path = pathlib.Path({str(tmp_path / "exit")!r}, f"rank_{{reason['rank']}}.json")
    path.write_text(json.dumps(reason))
exit(1)
"""
    with pytest.raises(Exception, match=r"rank 0: x\.bin is damaged") as caught:
        run(tmp_path, [sys.executable, "-c", script])
    assert type(caught.value).__name__ == "DataFormatError"


def test_signal_is_reported_with_the_last_log_lines(tmp_path: Path) -> None:
    script = "import os; print('loading', flush=True); os.kill(os.getpid(), 11)"
    with pytest.raises(RankLostError, match=r"SIGSEGV.*last lines of .*train\.log: loading"):
        run(tmp_path, [sys.executable, "-c", script])


def test_lost_rank_reported_by_torchrun_precedes_errors_of_its_peers(tmp_path: Path) -> None:
    peer = {
        "rank": 0,
        "error": "TrainingError",
        "message": "odd network",
        "time": 1.0,
        "secondary": False,
    }
    script = f"""
import json, pathlib
pathlib.Path({str(tmp_path / "exit")!r}, "rank_0.json").write_text({json.dumps(peer)!r})
print({TORCHRUN_REPORT!r})
exit(1)
"""
    with pytest.raises(RankLostError, match="rank 1 was ended by SIGKILL"):
        run(tmp_path, [sys.executable, "-c", script])


def test_rank_that_was_aborted_first_is_named_among_those_of_several_hosts(tmp_path: Path) -> None:
    def report(host: str, rank: int, second: int) -> str:
        text = (
            "Root Cause (first observed failure):\n[0]:\n"
            f"  time      : 2026-11-28_15:00:{second:02}\n  host      : {host}\n"
            f"  rank      : {rank} (local_rank: 0)\n  exitcode  : -6 (pid: 7)\n"
        )
        return "".join(f"{host}: {line}\n" for line in text.splitlines())

    log = report("node-1", 0, 4) + report("node-2", 8, 3) + report("node-3", 16, 5)
    script = f"print({log!r}); exit(1)"
    hosts = ("node-1", "node-2", "node-3")
    with pytest.raises(RankLostError, match="rank 8 was ended by SIGABRT"):
        run(tmp_path, [sys.executable, "-c", script], hosts=hosts)


def test_reason_of_a_rank_precedes_the_abort_of_a_peer_that_lost_it(tmp_path: Path) -> None:
    reason = {
        "rank": 0,
        "error": "MemoryExhaustedError",
        "message": "out of memory (CUDA out of memory)",
        "time": 1.0,
        "secondary": False,
    }
    report = TORCHRUN_REPORT.replace("-9", "-6")
    script = f"""
import json, pathlib
pathlib.Path({str(tmp_path / "exit")!r}, "rank_0.json").write_text({json.dumps(reason)!r})
print({report!r})
exit(1)
"""
    with pytest.raises(MemoryExhaustedError, match=r"rank 0: out of memory \(CUDA out of memory\)"):
        run(tmp_path, [sys.executable, "-c", script])


NCCL_WATCHDOG = """\
[rank1]:[E1128 15:00:00.123456789 ProcessGroupNCCL.cpp:2064] [PG ID 0 PG GUID 0 Rank 1] \
Process group watchdog thread terminated with exception: CUDA error: uncorrectable ECC error
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.

Exception raised from c10_cuda_check_implementation at CUDAException.cpp:44 (most recent first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f3 in /libc10.so)
frame #1: c10d::ProcessGroupNCCL::WorkNCCL::finishedGPUExecutionInternal() const + 0x56 (0x7f3 in)
frame #2: c10d::ProcessGroupNCCL::watchdogHandler() + 0x8c (0x7f3 in /libtorch_cuda.so)
frame #3: <unknown function> + 0xd3e (0x7f3 in /libstdc++.so.6)
frame #4: clone + 0x44 (0x7f3 in /lib/x86_64-linux-gnu/libc.so.6)

terminate called after throwing an instance of 'c10::DistBackendError'
[rank0]:[E1128 15:00:01.123456789 ProcessGroupNCCL.cpp:749] [Rank 0] Some NCCL operations failed
[rank0]:[E1128 15:00:01.123456789 ProcessGroupNCCL.cpp:763] [Rank 0] To avoid data inconsistency,
[rank0]:[E1128 15:00:01.123456789 ProcessGroupNCCL.cpp:735] [Rank 0] Stack trace of the collective:
[rank0]:[E1128 15:00:01.123456789 ProcessGroupNCCL.cpp:735] [Rank 0] FlightRecorder is disabled
[rank0]:[E1128 15:00:01.123456789 ProcessGroupNCCL.cpp:735] [Rank 0] entire process down
"""


def test_message_of_an_aborted_rank_is_shown_without_cpp_stacks_and_other_ranks(
    tmp_path: Path,
) -> None:
    report = TORCHRUN_REPORT.replace("-9", "-6")
    script = f"print({NCCL_WATCHDOG!r}); print({report!r}); exit(1)"
    with pytest.raises(RankLostError, match=r"rank 1 was ended by SIGABRT") as caught:
        run(tmp_path, [sys.executable, "-c", script])
    lines = str(caught.value).partition("train.log: ")[2].partition("; the table")[0]
    assert lines.endswith("terminated with exception: CUDA error: uncorrectable ECC error")
    assert lines.startswith("[rank1]:[E1128")


STOP_SCRIPT = """
import pathlib, sys
from megacore.errors import PreemptedError, TrainingStoppedError
from megacore.launch.exit_reason import write_reason
kind = PreemptedError if sys.argv[1] == "signal" else TrainingStoppedError
for rank in (0, 1):
    write_reason(pathlib.Path(sys.argv[2]), rank, kind("training stopped after iteration 8"))
print(sys.argv[4])
sys.exit(int(sys.argv[3]))
"""
TORCHRUN_REPORT = (
    "Root Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n"
    "  exitcode  : -9 (pid: 7)\n"
)


@pytest.mark.parametrize(
    ("cause", "code", "log_text", "kind"),
    [
        ("signal", 0, "", PreemptedError),
        ("stop_file", 0, "", TrainingStoppedError),
        ("signal", 138, "torchrun was ended by SIGUSR1", PreemptedError),
        ("signal", 1, TORCHRUN_REPORT, PreemptedError),
    ],
)
def test_requested_stop_precedes_the_report_of_the_launcher(
    tmp_path: Path, cause: str, code: int, log_text: str, kind: type[TrainingStoppedError]
) -> None:
    command = [
        sys.executable,
        "-c",
        STOP_SCRIPT,
        cause,
        str(tmp_path / "exit"),
        str(code),
        log_text,
    ]
    with pytest.raises(TrainingStoppedError) as caught:
        run(tmp_path, command)
    assert type(caught.value) is kind
    assert str(caught.value) == "training stopped after iteration 8"


@pytest.mark.parametrize(
    ("counts", "number", "error", "message"),
    [
        (
            (7, 8),
            9,
            MemoryExhaustedError,
            "the job ran out of host memory: the kernel's .* ended it, with .* GiB of",
        ),
        ((7, 7), 9, RankLostError, r"the job was ended by SIGKILL without"),
        ((7, 8), 11, RankLostError, "the job was ended by SIGSEGV without"),
        (
            (None, None),
            9,
            RankLostError,
            r"the job was ended by SIGKILL \(as the kernel does when memory runs out\)",
        ),
    ],
)
def test_sigkill_with_a_counted_oom_kill_is_memory_exhaustion(
    tmp_path: Path,
    counts: tuple[int | None, int | None],
    number: int,
    error: type[LaunchError],
    message: str,
) -> None:
    command = [sys.executable, "-c", f"import os; os.kill(os.getpid(), {number})"]
    with pytest.raises(error, match=message):
        run(tmp_path, command, count_oom_kills=chain(counts, repeat(counts[-1])).__next__)


def loses_peer(directory: Path) -> str:
    """Return Python code of a rank 0 that has lost another rank."""
    peer = {
        "rank": 0,
        "error": "RankLostError",
        "message": "lost a peer",
        "time": 1.0,
        "secondary": True,
    }
    return f"""
import json, pathlib
pathlib.Path({str(directory / "exit")!r}, "rank_0.json").write_text({json.dumps(peer)!r})
"""


def test_secondary_reason_does_not_hide_a_counted_oom_kill(
    tmp_path: Path,
) -> None:
    script = f"{loses_peer(tmp_path)}exit(1)"
    with pytest.raises(MemoryExhaustedError):
        run(
            tmp_path, [sys.executable, "-c", script], count_oom_kills=chain([1], repeat(2)).__next__
        )


def test_rank_without_a_reason_is_named_if_the_launcher_names_none(
    tmp_path: Path,
) -> None:
    report = 'print("main: 7 exits with return code = -9")'
    script = f"{loses_peer(tmp_path)}{report}\nexit(1)"
    with pytest.raises(RankLostError, match="rank 1 was ended by SIGKILL"):
        run(tmp_path, [sys.executable, "-c", script], ranks=2)


def test_lost_rank_leaves_a_table_of_all_started_ranks(tmp_path: Path) -> None:
    script = f"""
import os, pathlib
from megacore.observe.heartbeat import Heartbeat, beat_path
for rank in (0, 1):
    Heartbeat(beat_path(pathlib.Path({str(tmp_path / "exit")!r}), rank)).beat("backward-compute", 5)
print({TORCHRUN_REPORT!r})
exit(1)
"""
    with pytest.raises(RankLostError, match=r"the table of ranks is .*train-ranks\.txt"):
        run(tmp_path, [sys.executable, "-c", script])
    table = (tmp_path / "logs" / "train-ranks.txt").read_text()
    assert "Python stacks" not in table, "dead ranks write no stacks"
    (line,) = [line for line in table.splitlines() if line.startswith("->")]
    assert line.split()[1:2] + line.split()[4:] == [
        "1",
        "dead",
        "5",
        "backward-compute",
        "0",
        line.split()[-1],
    ]


def test_sigusr1_to_the_flow_process_reaches_the_ranks(tmp_path: Path) -> None:
    driver = start_driver(tmp_path, "notified")
    wait_until((tmp_path / "rank_0.catches").exists, HANG, "handler of rank 0 installed")
    driver.send_signal(signal.SIGUSR1)
    _, errors = driver.communicate(timeout=HANG)
    assert (driver.returncode, errors) == (0, b"")


def until_polled(tmp_path: Path) -> tuple[list[str], Callable[[], None]]:
    """Return a command, and the callback of the poll that ends it."""
    polled = tmp_path / "polled"
    script = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]):\n    time.sleep(0.01)"
    return [sys.executable, "-c", script, str(polled)], polled.touch


def test_handler_of_the_caller_is_restored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    inside: list[Any] = []
    command, end = until_polled(tmp_path)

    def record_handler() -> None:
        inside.append(signal.getsignal(signal.SIGUSR1))
        end()

    try:
        run(tmp_path, command, on_poll=record_handler)
        assert callable(inside[0])
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_supervise_in_another_thread_changes_no_handler(tmp_path: Path) -> None:
    before, inside = signal.getsignal(signal.SIGUSR1), []
    command, end = until_polled(tmp_path)

    def record_handler() -> None:
        inside.append(signal.getsignal(signal.SIGUSR1))
        end()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(run, tmp_path, command, on_poll=record_handler).result()
    assert set(inside) == {before}


def test_missing_executable_is_reported(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot start no-such-launcher"):
        run(tmp_path, ["no-such-launcher"])
    assert not (tmp_path / "exit").exists()


def test_port_in_use_is_reported(tmp_path: Path) -> None:
    script = "print('failed to bind to port: 29500, address already in use'); exit(1)"
    with pytest.raises(LaunchError, match="port 29500 is in use"):
        run(tmp_path, [sys.executable, "-c", script])


DRIVER = """
import pathlib, sys
from megacore.artifact import lock
from megacore.launch.supervise import supervise
directory = pathlib.Path(sys.argv[1])
with lock(directory / "run", holder="flow run 'first'") as held:
    supervise(
        sys.argv[2:],
        log=directory / "log",
        exit_directory=directory / "exit",
        stop_grace=1.0,
        inherited=[held],
    )
"""


def start_driver(tmp_path: Path, behaviour: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path), *fake_ranks(tmp_path, behaviour)],
        env=environment(),
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize(
    ("behaviour", "number"),
    [
        ("polite", signal.SIGKILL),
        ("stubborn", signal.SIGKILL),
        ("orphaned-waiting", signal.SIGKILL),
        ("stubborn", signal.SIGTERM),
        ("polite", signal.SIGINT),
    ],
)
def test_death_of_the_flow_process_ends_all_ranks(
    tmp_path: Path, behaviour: str, number: signal.Signals
) -> None:
    driver = start_driver(tmp_path, behaviour)
    pids = rank_pids(tmp_path)
    driver.send_signal(number)
    none_alive(pids, HANG)
    driver.communicate(timeout=HANG)


@pytest.mark.parametrize("behaviour", ["stubborn", "orphaned-waiting"])
def test_lock_of_a_killed_flow_is_held_until_all_ranks_have_ended(
    tmp_path: Path, behaviour: str
) -> None:
    driver = start_driver(tmp_path, behaviour)
    pids, guard, shown = rank_pids(tmp_path), guard_of(driver), list[str]()
    os.kill(guard, signal.SIGSTOP)  # until the lock is waited for
    driver.kill()
    driver.wait()

    def show(text: str) -> None:
        shown.append(text)
        os.kill(guard, signal.SIGCONT)

    with lock(tmp_path / "run", on_wait=show):
        assert not any(alive(pid) for pid in pids)
    assert len(shown) == 1
    assert re.fullmatch(
        rf"waits for {tmp_path}/run, which a process that flow run 'first' "
        rf"\(process {driver.pid} on .*, since .*\) started before it was killed uses",
        shown[0],
    )
    driver.communicate(timeout=HANG)


def test_ranks_do_not_inherit_the_lock(tmp_path: Path) -> None:
    script = """
import os, pathlib
links = pathlib.Path("/proc/self/fd").iterdir()
print("open:", [os.readlink(link) for link in links if os.path.lexists(link)])
"""
    with lock(tmp_path / "run") as held:
        run(tmp_path, [sys.executable, "-c", script], inherited=[held])
    text = (tmp_path / "logs" / "train.log").read_text()
    assert "open:" in text
    assert ".run.lock" not in text
    assert not is_locked(tmp_path / "run")


def guard_of(driver: "subprocess.Popen[bytes]") -> int:
    pids = descendants(driver.pid)
    (guard,) = [
        pid for pid in pids if b"megacore.launch.guard" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return guard


def test_sigkill_of_the_guard_is_a_lost_rank_and_ends_all_marked_processes(tmp_path: Path) -> None:
    # These ranks do not die with their parent: the job's mark in their environment identifies them.
    driver = start_driver(tmp_path, "stubborn")
    pids = rank_pids(tmp_path)
    os.kill(guard_of(driver), signal.SIGKILL)
    none_alive(pids, HANG)
    _, errors = driver.communicate(timeout=HANG)
    assert b"RankLostError" in errors


def test_sigkill_of_guard_and_flow_together_ends_ranks_that_die_with_their_parent(
    tmp_path: Path,
) -> None:
    driver = start_driver(tmp_path, "stubborn-chained")
    pids = rank_pids(tmp_path)
    guard = guard_of(driver)
    os.kill(driver.pid, signal.SIGKILL)
    os.kill(guard, signal.SIGKILL)
    none_alive(pids, HANG)
    driver.communicate(timeout=HANG)


def test_killed_rank_is_no_success_if_sigchld_is_ignored(tmp_path: Path) -> None:
    """The kernel then drops the exit codes of all processes."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(RankLostError, match="SIGKILL"):
            run(tmp_path, [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    finally:
        signal.signal(signal.SIGCHLD, before)
