"""Files of every kind, truncated and with flipped bits.

A reader returns the right value or another valid one, or raises a MegacoreError.
"""

from pathlib import Path

import pytest

from tests._limits import HANG
from tests.faults._cases import Bench
from tests.faults._mutations import run_forms

FORMS = "tests.faults._forms:FORMS"
MINIMUM_MUTATIONS = 1000


@pytest.mark.slow
def test_damaged_files_are_read_or_refused(bench: Bench, tmp_path: Path) -> None:
    progress = tmp_path / "progress"
    child = bench.nursery.start(run_forms, FORMS, tmp_path / "forms", 0, 0.5, progress)
    answer = child.finish(2 * HANG)
    current = progress.read_text(encoding="utf-8").strip() if progress.exists() else "the start"
    assert "value" in answer, (
        f"the process ended at {current}: {answer.get('error')}: {answer.get('message')}"
    )
    reports = answer["value"]
    findings = [finding for report in reports for finding in report["findings"]]
    assert not findings, "\n".join(findings)
    counts = [
        count
        for report in reports
        for result, count in report["counts"].items()
        if result != "same"
    ]
    assert sum(counts) >= MINIMUM_MUTATIONS
