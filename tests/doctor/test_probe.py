"""The probe on this machine, and what each check reads."""

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


def ask(request: bytes) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [sys.executable, "-m", "megacore.doctor.probe"],
        input=request,
        capture_output=True,
        timeout=60,
        check=False,
    )


@pytest.fixture(scope="module")
def this_machine(tmp_path_factory: pytest.TempPathFactory) -> HostProbe:
    workspace = tmp_path_factory.mktemp("workspace")
    request = Request("here", str(workspace), (*QUICK, "workspace", "network", *SLOW))
    done = ask(request.to_json())
    assert done.returncode == 0, done.stderr.decode()
    return read_answers("here", done.stdout, request.checks, None)


def test_every_check_of_this_machine_has_an_answer(this_machine: HostProbe) -> None:
    assert this_machine.problems == {}
    assert set(this_machine.values) == {*QUICK, *SLOW, "workspace", "network"}
    assert sum(this_machine.seconds.values()) < 45


def test_the_answers_are_those_of_this_machine(this_machine: HostProbe) -> None:
    import torch

    assert this_machine.get("packages", "versions")["torch"] == torch.__version__
    assert this_machine.get("torch", "cuda_works") is torch.cuda.is_available()
    assert set(this_machine.get("torch", "kernels")) >= {"attention", "optimizer", "cross_entropy"}
    assert this_machine.get("memory", "total") > 2**28
    assert this_machine.get("workspace") == {"exists": True, "writes": True, "sees_head": None}
    assert all(device["gflops"] > 0 for device in this_machine.get("speed", "devices"))
    first, second = this_machine.get("network", "ports")
    assert first != second


@pytest.mark.parametrize("module", ["probe", "peers", "machine", "network", "storage"])
def test_what_runs_on_a_host_is_imported_without_heavy_packages(module: str) -> None:
    """A host's packages may be broken or slow to read, and that must be found, not met."""
    heavy = "{'torch', 'numpy', 'rich'} & set(sys.modules)"
    script = f"import sys, megacore.doctor.{module}; print(*{heavy})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=60, check=True
    )
    assert done.stdout.split() == []


def test_a_request_of_another_version_is_refused() -> None:
    done = ask(b'{"host": "a", "surprise": 1}')
    assert done.returncode == LaunchError.exit_code
    assert b"install the same version" in done.stderr


def test_a_check_that_hangs_is_named_and_costs_no_other() -> None:
    started = time.monotonic()
    line = answer("disk", lambda: time.sleep(60), 0.2)
    assert time.monotonic() - started < 5
    assert line["problem"] == "no answer within 0.2 s"
    assert answer("disk", lambda: 3, 1.0)["value"] == 3


def test_a_file_share_that_hangs_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "proof").mkdir()
    # whoever opens it waits for ever, as on a dead file share
    os.mkfifo(tmp_path / "proof" / "head")
    request = Request(
        "b", str(tmp_path), ("limits", "workspace", "disk"), 1.5, token=str(tmp_path / "proof")
    )
    started = time.monotonic()
    done = ask(request.to_json())
    assert time.monotonic() - started < 10
    found = read_answers("b", done.stdout, request.checks, None)
    assert "limits" in found.values
    assert found.problems["workspace"].startswith("no answer within 1.")
    assert found.problems["disk"] == NOT_BEGUN


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ZeroDivisionError("x")])
def test_a_check_that_fails_says_why(error: Exception) -> None:
    def fail() -> None:
        raise error

    assert str(error) in answer("disk", fail, 1.0)["problem"]


def test_an_output_that_was_cut_off_names_the_checks_without_an_answer() -> None:
    limits = b'{"check": "limits", "value": {"nofile": 1}, "seconds": 0.1}'
    output = b"Welcome to node 7\n" + limits + b'\n{"check": "di'
    found = read_answers("a", output, ("limits", "disk", "torch"), "it did not answer in time")
    assert found.values == {"limits": {"nofile": 1}}
    assert found.problems == dict.fromkeys(
        ("disk", "torch"), "no answer (it did not answer in time)"
    )
    assert (
        read_answers("a", b"bash: python: not found\n", ("disk",), "code 127").failed == "code 127"
    )


@pytest.mark.parametrize(("left", "given"), [(25.0, 12.0), (7.0, 5.0)])
def test_tokens_are_read_in_the_time_that_is_left(
    left: float, given: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read by then is reported, not lost with the check's own limit."""
    monkeypatch.setattr(
        storage, "look_at_tokens", lambda prefixes, vocab_size, share, seconds: seconds
    )
    work, limit = work_of(
        "tokens", Request("a", "/w", ("tokens",), prefixes=("t",), vocab_size=2), left
    )
    assert answer("tokens", work, limit)["value"] == given
    assert given < min(limit, left)
