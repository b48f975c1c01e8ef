"""Failed system calls that write: a seeded part of the sweep of `make faults`.

A failed case is repeated by its id: `python -m tests.faults.sweep --case save-17-eio`.
"""

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.faults import sweep
from tests.faults._processes import ROOT

STAGES = (
    "collect",
    "compare-files",
    "tokenize",
    "tokenize-overwrite",
    "index",
    "save-async",
    "save-again",
    "import",
    "clean",
)
"""Stages whose runs take a tenth of a second; `make faults` runs all."""


@pytest.mark.slow
def test_a_failed_call_is_reported_and_the_stage_can_be_repeated(tmp_path: Path) -> None:
    if sweep.compile_library(tmp_path) is None:
        pytest.skip("needs a C compiler (cc or gcc) on Linux")
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.faults.sweep", "--share", "0.1", "--out", str(report)]
    for stage in STAGES:
        command += ["--stage", stage]
    swept = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert swept.returncode == 0, swept.stdout[-8000:] + swept.stderr[-4000:]
    cases = json.loads(report.read_text(encoding="utf-8"))
    outcomes = Counter(case["outcome"] for case in cases)
    assert {case["stage"] for case in cases} == set(STAGES)
    assert outcomes["WorkspaceError"] >= 10, outcomes
    assert outcomes["died"] >= 3, outcomes
    assert outcomes["not reached"] <= len(cases) / 20, outcomes


def _write_and_swallow(inputs: Path, place: Path) -> None:
    for name in ("first", "second"):
        with suppress(OSError), open(place / name, "wb", buffering=0) as file:
            file.write(name.encode())  # a buffer would be written again when it is closed
    with suppress(OSError), open(place / "first", "rb") as file:
        os.fsync(file.fileno())


def _work_only_once(inputs: Path, place: Path) -> None:
    if (inputs / "ran").exists():
        raise RuntimeError("before any call")
    (inputs / "ran").touch()
    (place / "first").touch()


def sweep_faulty_stages() -> None:
    """Print the cases of stages with faults, in a process with the library."""
    stages = [
        sweep.Stage(
            name,
            lambda inputs: None,
            run,
            lambda inputs, place: sorted((path.name, path.read_text()) for path in place.iterdir()),
            lambda inputs, place: [],
        )
        for name, run in (("swallow", _write_and_swallow), ("once", _work_only_once))
    ]
    runner = sweep.Sweep(Path(os.environ[sweep.CONTROL_VARIABLE]).parent, stages)
    ran = [
        runner.run(sweep.Case(stage.name, number, "eio"))
        for stage in stages
        for number in range(len(runner.calls(stage.name)))
    ]
    print(json.dumps([asdict(case) for case in ran]))  # noqa: T201 - read by the test


def test_a_swallowed_and_an_early_error_are_faults(tmp_path: Path) -> None:
    library = sweep.compile_library(tmp_path)
    if library is None:
        pytest.skip("needs a C compiler (cc or gcc) on Linux")
    program = "from tests.faults import test_calls; test_calls.sweep_faulty_stages()"
    swept = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=sweep.environment(tmp_path, library),
        capture_output=True,
        text=True,
    )
    assert swept.returncode == 0, swept.stderr[-4000:]
    *cases, early, _ = json.loads(swept.stdout)
    calls = ["open", "write", "close", "open", "write", "close", "fsync"]
    assert [case["call"] for case in cases] == calls
    assert {case["outcome"] for case in cases} == {"absorbed"}
    assert all("the failure was swallowed" in case["faults"] for case in cases)
    lost = [any("after success" in fault for fault in case["faults"]) for case in cases]
    # Here neither a failed sync nor a failed close changes a file.
    assert lost == [call in ("open", "write") for call in calls]
    assert early["outcome"] == "RuntimeError"
    assert early["faults"][0].startswith("RuntimeError before any call failed")


def test_cases_are_found_by_their_ids_and_others_refused() -> None:
    names = ("save", "save-async")
    for case in (
        sweep.Case("save", 17, "eio"),
        sweep.Case("save-async", 3, "dies"),
        sweep.Case("save", 0, "umask"),
        sweep.Case("save-async", 0, "memory-2"),
    ):
        assert sweep.parse_case(case.name, names) == case
    for options, words in (
        (Namespace(stage=["sav"], case=None), "sav is no stage; use one of save, save-async"),
        (Namespace(stage=None, case="save-0-umask"), "save-0-umask is no case; use STAGE-NUMBER"),
    ):
        assert words in str(sweep.problem_of(options, names))
    assert sweep.problem_of(Namespace(stage=["save"], case="save-1-full"), names) is None
