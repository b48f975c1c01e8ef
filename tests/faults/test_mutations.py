"""Files of every kind, cut off and with flipped bits: the right value, a valid one, or one sentence
of our own."""

from pathlib import Path

import pytest

from tests.faults._cases import Bench
from tests.faults._mutations import run_forms

FORMS = "tests.faults._forms:FORMS"
LEAST = 2000


@pytest.mark.timeout(300)
def test_damaged_files(bench: Bench, tmp_path: Path) -> None:
    progress = tmp_path / "progress"
    child = bench.nursery.start(run_forms, FORMS, tmp_path / "forms", 0, 1.0, progress)
    answer = child.finish(240)
    at = progress.read_text(encoding="utf-8").strip() if progress.exists() else "the begin"
    assert "value" in answer, (
        f"the process ended at {at}: {answer.get('error')}: {answer.get('message')}"
    )
    reports = answer["value"]
    findings = [finding for report in reports for finding in report["findings"]]
    assert not findings, "\n".join(findings)
    counts = [
        count for report in reports for what, count in report["counts"].items() if what != "same"
    ]
    assert sum(counts) >= LEAST
