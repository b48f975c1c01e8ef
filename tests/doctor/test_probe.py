"""The probe on this host: its checks, limits and output."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megacore.doctor import storage
from megacore.doctor.probe import QUICK, SLOW, work_of
from megacore.doctor.protocol import NOT_BEGUN, HostProbe, Request, answer, read_answers
from megacore.errors import LaunchError
from tests._limits import HANG

PROBE = """
from megacore.doctor import machine, probe, storage

probe.QUICK_LIMIT = {limit}
probe._LIMITS = dict.fromkeys(probe._LIMITS, {limit})
probe.main()
"""
"""The probe with enough time for each check, and with the modules of quick checks imported."""


def ask(request: bytes, *program: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [sys.executable, *(program or ("-c", PROBE.format(limit=HANG)))],
        input=request,
        capture_output=True,
        timeout=2 * HANG,
        check=False,
    )


@pytest.fixture(scope="module")
def local_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[HostProbe, float]:
    """Return the answers on this host, and the CPU time that they took, in seconds."""
    workspace, before = tmp_path_factory.mktemp("workspace"), os.times()
    request = Request("here", str(workspace), (*QUICK, "workspace", "network", *SLOW), HANG)
    result = ask(request.to_json())
    assert result.returncode == 0, result.stderr.decode()
    after = os.times()
    used = sum(after[2:4]) - sum(before[2:4])
    return read_answers("here", result.stdout, request.checks, None), used


@pytest.fixture
def local_probe(local_run: tuple[HostProbe, float]) -> HostProbe:
    return local_run[0]


def test_every_check_answers_on_this_host(local_run: tuple[HostProbe, float]) -> None:
    probe, used = local_run
    assert probe.problems == {}
    assert set(probe.values) == {*QUICK, *SLOW, "workspace", "network"}
    assert used < 45


def test_answers_describe_this_host(local_probe: HostProbe) -> None:
    import torch

    version = local_probe.get("packages", "versions")["torch"]
    # a wheel's metadata may lack the +cu130 of the build
    assert version.partition("+")[0] == torch.__version__.partition("+")[0]
    assert local_probe.get("torch", "cuda_works") is torch.cuda.is_available()
    assert set(local_probe.get("torch", "kernels")) >= {"attention", "optimizer", "cross_entropy"}
    assert local_probe.get("memory", "total") > 2**28
    assert local_probe.get("workspace") == {"exists": True, "writes": True, "sees_head": None}
    assert all(device["gflops"] > 0 for device in local_probe.get("speed", "devices"))
    first, second = local_probe.get("network", "ports")
    assert first != second


@pytest.mark.parametrize("module", ["probe", "peers", "machine", "network", "storage", "toolchain"])
def test_modules_of_the_probe_import_no_heavy_packages(module: str) -> None:
    """The probe must run on a host where these packages are broken or slow to read."""
    heavy = "{'torch', 'numpy', 'rich'} & set(sys.modules)"
    script = f"import sys, megacore.doctor.{module}; print(*{heavy})"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=HANG, check=True
    )
    assert result.stdout.split() == []


def test_request_of_another_version_is_refused() -> None:
    result = ask(b'{"host": "a", "surprise": 1}', "-m", "megacore.doctor.probe")
    assert result.returncode == LaunchError.exit_code
    assert b"install the same version" in result.stderr


def test_hanging_check_is_ended_and_reported() -> None:
    started = time.monotonic()
    line = answer("disk", lambda: time.sleep(600), 0.2)
    assert time.monotonic() - started < HANG
    assert line["problem"] == "no answer within 0.2 s"
    assert answer("disk", lambda: 3, HANG)["value"] == 3


def test_hanging_file_share_delays_only_the_checks_that_read_it(tmp_path: Path) -> None:
    (tmp_path / "proof").mkdir()
    # Opening a fifo blocks, like opening a file of a dead file share.
    os.mkfifo(tmp_path / "proof" / "head")
    request = Request(
        "b", str(tmp_path), ("limits", "workspace", "disk"), 1.5, token=str(tmp_path / "proof")
    )
    started = time.monotonic()
    result = ask(request.to_json())
    assert time.monotonic() - started < HANG
    host_probe = read_answers("b", result.stdout, request.checks, None)
    assert "limits" in host_probe.values
    assert host_probe.problems["workspace"].startswith("no answer within ")
    assert host_probe.problems["disk"] == NOT_BEGUN


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ZeroDivisionError("x")])
def test_failing_check_reports_its_error(error: Exception) -> None:
    def fail() -> None:
        raise error

    assert str(error) in answer("disk", fail, HANG)["problem"]


def test_checks_missing_from_a_truncated_output_have_a_problem() -> None:
    limits = b'{"check": "limits", "value": {"nofile": 1}, "seconds": 0.1}'
    output = b"Welcome to node 7\n" + limits + b'\n{"check": "di'
    host_probe = read_answers("a", output, ("limits", "disk", "torch"), "it did not answer in time")
    assert host_probe.values == {"limits": {"nofile": 1}}
    assert host_probe.problems == dict.fromkeys(
        ("disk", "torch"), "no answer (it did not answer in time)"
    )
    assert (
        read_answers("a", b"bash: python: not found\n", ("disk",), "code 127").failed == "code 127"
    )


@pytest.mark.parametrize(("left", "expected"), [(25.0, 12.0), (7.0, 5.0)])
def test_tokens_are_read_within_the_remaining_time(
    left: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check ends before its limit, so that the tokens read until then are reported."""
    monkeypatch.setattr(
        storage, "look_at_tokens", lambda prefixes, vocab_size, share, seconds: seconds
    )
    work, limit = work_of(
        "tokens", Request("a", "/w", ("tokens",), prefixes=("t",), vocab_size=2), left
    )
    assert answer("tokens", work, limit)["value"] == expected
    assert expected < min(limit, left)
