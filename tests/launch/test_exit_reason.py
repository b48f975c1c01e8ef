import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megacore.errors import (
    ConfigError,
    DataFormatError,
    GpuFailedError,
    PreemptedError,
    RankLostError,
    TrainingError,
    TrainingStoppedError,
    WorkspaceError,
)
from megacore.launch.exit_reason import (
    ExitReason,
    printed_reasons,
    read_reasons,
    reported_exit,
    write_reason,
)
from megacore.launch.guard import REASON_MARK
from tests._limits import HANG
from tests.launch._processes import environment, none_alive, wait_until


class OddDataError(DataFormatError):
    """A subclass that is not in the table of errors."""


@pytest.mark.parametrize(
    ("error", "name", "message", "code"),
    [
        (ConfigError("lr is 7: lower it"), "ConfigError", "lr is 7: lower it", 2),
        (OddDataError("x.bin is odd"), "DataFormatError", "x.bin is odd", 3),
        (
            OSError(28, "No space left on device", "f"),
            "WorkspaceError",
            "cannot write f: No space left",
            4,
        ),
        (
            OSError(5, "Input/output error", "f"),
            "TransientFileError",
            "cannot read or write f (Input/output error)",
            4,
        ),
        (
            OSError(24, "Too many open files", "f"),
            "FileAccessError",
            "cannot read or write f (Too many open files)",
            4,
        ),
        (MemoryError(), "MemoryExhaustedError", "out of memory", 7),
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            "MemoryExhaustedError",
            "CUDA out of memory",
            7,
        ),
        (
            torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be"),
            "MemoryExhaustedError",
            "out of memory (CUDA error: out of memory CUDA kernel errors might be): lower",
            7,
        ),
        (
            RuntimeError("Triton Error [CUDA]: out of memory"),
            "MemoryExhaustedError",
            "Triton Error [CUDA]: out of memory",
            7,
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(h)`"),
            "MemoryExhaustedError",
            "CUBLAS_STATUS_ALLOC_FAILED",
            7,
        ),
        (
            dist.DistBackendError(
                "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO "
                "for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function "
                "failed.\nLast error:\nCuda failure 2 'out of memory'"
            ),
            "MemoryExhaustedError",
            "Cuda failure 2 'out of memory'",
            7,
        ),
        (
            torch.AcceleratorError("CUDA error: device-side assert triggered\nCompile with"),
            "TrainingError",
            "device-side assert triggered",
            7,
        ),
        (ZeroDivisionError("by zero"), "TrainingError", "ZeroDivisionError: by zero", 7),
        (FileNotFoundError(2, "No such file", "f"), "TrainingError", "FileNotFoundError", 7),
        (  # an index that was removed is read, and not written
            FileNotFoundError(2, "No such file", "/nowhere/index/train.idx"),
            "TrainingError",
            "FileNotFoundError",
            7,
        ),
    ],
)
def test_reported_exit_writes_the_reason_and_exits_with_its_code(
    tmp_path: Path, error: Exception, name: str, message: str, code: int
) -> None:
    began = time.time()
    with pytest.raises(SystemExit) as caught, reported_exit(tmp_path / "exit", 3):
        raise error
    assert caught.value.code == code
    (reason,) = read_reasons(tmp_path / "exit")
    assert (reason.rank, reason.error, reason.secondary) == (3, name, False)
    assert message in reason.message
    assert began <= reason.time <= time.time()
    assert str(reason.exception()).startswith("rank 3: ")


def test_traceback_is_written_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), reported_exit(tmp_path, 0):
        raise ConfigError("bad")
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [TrainingStoppedError, PreemptedError])
def test_requested_stop_is_reported_without_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: type[TrainingStoppedError]
) -> None:
    with reported_exit(tmp_path / "exit", 3):
        raise kind("SIGTERM came: training stopped after iteration 8")
    assert capsys.readouterr().err == "SIGTERM came: training stopped after iteration 8\n"
    (reason,) = read_reasons(tmp_path / "exit")
    assert reason.stopped
    assert type(reason.exception()) is kind
    assert str(reason.exception()) == "SIGTERM came: training stopped after iteration 8"


def test_requested_stop_is_reported_although_stderr_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w", buffering=1) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with reported_exit(tmp_path, 3):
            raise PreemptedError("stopped")
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            stderr.close()
    assert [reason.rank for reason in read_reasons(tmp_path)] == [3]


def test_requested_stop_that_cannot_be_reported_exits_with_75(tmp_path: Path) -> None:
    (tmp_path / "exit").write_text("a file")
    with pytest.raises(SystemExit) as caught, reported_exit(tmp_path / "exit", 0):
        raise PreemptedError("stopped")
    assert caught.value.code == 75


def test_write_reason_does_not_exit(tmp_path: Path) -> None:
    write_reason(tmp_path / "exit", 5, PreemptedError("stopped"))
    assert [reason.rank for reason in read_reasons(tmp_path / "exit")] == [5]


def test_write_reason_raises_if_the_directory_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WorkspaceError):
        write_reason(tmp_path / "file" / "exit", 5, PreemptedError("stopped"))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(0), SystemExit(5)])
def test_interrupts_and_exits_propagate_without_a_reason(
    tmp_path: Path, error: BaseException
) -> None:
    with pytest.raises(type(error)), reported_exit(tmp_path, 0):
        raise error
    assert read_reasons(tmp_path) == []


def test_success_writes_no_reason(tmp_path: Path) -> None:
    with reported_exit(tmp_path / "exit", 0):
        pass
    assert not (tmp_path / "exit").exists()


def test_exit_code_is_unchanged_if_the_reason_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "exit").write_text("a file")
    with pytest.raises(SystemExit) as caught, reported_exit(tmp_path / "exit", 0):
        raise ConfigError("bad")
    assert caught.value.code == 2


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[gloo/transport/tcp/pair.cc:532] Connection closed by peer [127.0.0.1]:1234"),
        RuntimeError("Read error [127.0.0.1]: Connection reset by peer"),
        RuntimeError("[gloo/transport/tcp/pair.cc:534] Read error [10.0.0.2]: No route to host"),
        RuntimeError("[gloo/transport/tcp/pair.cc:299] writev [10.0.0.2]: Connection timed out"),
        RuntimeError("[gloo/transport/tcp/pair.cc:299] writev [10.0.0.2]: Network is unreachable"),
        RuntimeError(
            "[gloo/transport/tcp/pair.cc:144] timed out connecting: SO_ERROR: Host is down, "
            "remote=[10.0.0.2]:1234"
        ),
        RuntimeError("Application timeout caused pair closure"),
        ConnectionResetError(104, "Connection reset by peer"),
        dist.DistNetworkError("The client socket has failed"),
        dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
    ],
)
def test_lost_peer_is_a_secondary_retryable_reason(error: Exception) -> None:
    reason = ExitReason.of(0, error)
    assert reason.secondary
    assert isinstance(reason.exception(), RankLostError)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (
            torch.AcceleratorError(
                "CUDA error: uncorrectable ECC error encountered\nSearch for "
                "`cudaErrorECCUncorrectable' in https://docs.nvidia.com/cuda/\nCUDA kernel errors "
                "might be asynchronously reported at some other API call"
            ),
            "CUDA error: uncorrectable ECC error encountered",
        ),
        (
            torch.AcceleratorError("CUDA error: unspecified launch failure\nCompile with"),
            "CUDA error: unspecified launch failure",
        ),
        (
            RuntimeError(
                "CUDA error: an illegal memory access was encountered\nFor debugging consider "
                "passing CUDA_LAUNCH_BLOCKING=1"
            ),
            "CUDA error: an illegal memory access was encountered",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(`"),
            "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(`",
        ),
        (
            dist.DistBackendError(
                "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.27.5\n"
                "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure "
                "214 'uncorrectable ECC error encountered'"
            ),
            "Cuda failure 214 'uncorrectable ECC error encountered'",
        ),
    ],
)
def test_failed_gpu_is_named_and_retryable(
    error: Exception, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node-5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    reason = ExitReason.of(43, error)
    assert isinstance(reason.exception(), GpuFailedError)
    assert reason.exception().retryable
    assert not reason.secondary  # the other ranks lost this one
    assert str(reason.exception()).startswith(
        f"rank 43: GPU 1 of host node-5 failed ({failure}); see the Xid messages"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-8f6c")
    assert "GPU GPU-8f6c of host node-5 failed" in ExitReason.of(43, error).message


def test_reasons_are_sorted_by_failure_stop_secondary_and_time(tmp_path: Path) -> None:
    reasons = [
        (1.0, True, "RankLostError"),
        (5.0, False, "ConfigError"),
        (3.0, False, "ConfigError"),
        (2.0, False, "PreemptedError"),
    ]
    for rank, (moment, secondary, error) in enumerate(reasons):
        reason = {
            "rank": rank,
            "error": error,
            "message": "m",
            "time": moment,
            "secondary": secondary,
        }
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(reason))
    (tmp_path / "rank_4.json").write_text('{"rank": 4')
    (tmp_path / "rank_5.json").write_text('{"another": "form"}')
    assert [reason.rank for reason in read_reasons(tmp_path)] == [2, 1, 3, 0]


def test_unknown_error_name_gives_an_exception() -> None:
    error = ExitReason(1, "NoSuchError", "what", 0.0, False).exception()
    assert str(error) == "rank 1: what"
    assert not isinstance(error, TrainingError | WorkspaceError)


def test_process_dies_with_its_parent(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    child = f"""
import os, pathlib, time
from megacore.launch.exit_reason import die_with_parent
die_with_parent()
pathlib.Path({str(pid_file)!r} + ".tmp").write_text(str(os.getpid()))
os.rename({str(pid_file)!r} + ".tmp", {str(pid_file)!r})
time.sleep({2 * HANG})
"""
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])",
        ],
        env=environment(),
    )
    wait_until(pid_file.exists, HANG, "child started")
    parent.kill()
    parent.wait()
    none_alive([int(pid_file.read_text())], HANG)


def test_reason_that_no_file_takes_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "exit").write_text("a file where the directory must be")
    full = OSError(28, "No space left on device", "iter_1")
    with pytest.raises(SystemExit) as caught, reported_exit(tmp_path / "exit", 3):
        raise full
    assert caught.value.code == WorkspaceError.exit_code
    text = capfd.readouterr().err
    assert "Traceback" not in text
    (line,) = [line for line in text.encode().splitlines() if line.startswith(REASON_MARK)]
    printed = printed_reasons([line.removeprefix(REASON_MARK), b'{"rank": 0, "err'])
    (reason,) = read_reasons(tmp_path / "nowhere", printed)
    assert (reason.rank, reason.error) == (3, "WorkspaceError")
    assert "iter_1: No space left on device" in reason.message
