"""Lines and tables of the terminal."""

import sys

import pytest
from rich.table import Table

from megacore.cli import app
from megacore.cli._terminal import write_line, write_table

PLACE = "/data/ws [bold] :x: ü/runs/0123456789abcdef"


def test_paths_are_written_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    write_line(f"wrote {PLACE}")
    write_line(f"note: {PLACE}", stderr=True)
    table = Table("path")
    table.add_row(PLACE)
    write_table(table)
    output = capsys.readouterr()
    assert output.out.count(PLACE) == 2
    assert output.err == f"note: {PLACE}\n"


def test_a_narrow_terminal_cuts_no_digits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        "name": "gpt2-345m",
        "state": "incomplete",
        "iteration": 120_000,
        "train_iters": 500_000,
        "valid_ppl": 1915.30,
        "test_ppl": 1955.06,
        "metric": None,
        "size_bytes": 43 << 20,
        "updated": 1.7e9,
        "path": PLACE,
    }
    monkeypatch.setattr("megacore.observe.runs.runs", lambda workspace: [row])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for columns in ("40", "80"):
        monkeypatch.setenv("COLUMNS", columns)
        app(["runs"], standalone_mode=False)
        output = capsys.readouterr().out
        cells = "gpt2-345m", "incomplete", "120,000/500,000", "1915.30", "1955.06", "43.0 MiB"
        assert all(cell in output for cell in cells)
        assert PLACE in output
