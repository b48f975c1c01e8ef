"""Failed system calls that write: a seeded tenth of the sweep of `make faults`.

A failed case is repeated by its id: `python -m tests.faults.sweep --case save-17-eio`.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.faults import sweep
from tests.faults._processes import ROOT

STAGES = ("collect", "tokenize", "index", "save-async", "import", "clean")
"""Stages whose runs take a tenth of a second; `make faults` runs all."""


@pytest.mark.slow
@pytest.mark.timeout(300)
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
