"""Results that `make bench` writes, and text that it leaves unchanged."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import bench, is_result, run, write
from benchmarks._entries import ENTRIES, Entry, block, chosen, commit, with_block
from benchmarks._turns import Contestant
from benchmarks._verdict import Check, table, verdict

TEXT = "# Benchmarks\n\nBefore.\n\n<!-- bench:step -->\nold\n<!-- /bench:step -->\n\nAfter.\n"


def test_a_block_is_replaced_and_everything_else_stays() -> None:
    text = with_block(TEXT, "step", "Step", "new\n\n| a |\n")
    assert text == TEXT.replace("old", "new\n\n| a |")
    assert with_block(text, "step", "Step", "old") == TEXT


def test_a_new_block_is_appended_under_its_title() -> None:
    text = with_block(TEXT, "zero", "ZeRO", "rows")
    assert text == f"{TEXT}\n## ZeRO\n\n<!-- bench:zero -->\nrows\n<!-- /bench:zero -->\n"


@pytest.mark.parametrize("damaged", [TEXT.replace("<!-- /bench:step -->", ""), TEXT + TEXT])
def test_damaged_markers_are_refused(damaged: str) -> None:
    with pytest.raises(ValueError, match="leave one of each"):
        with_block(damaged, "step", "Step", "new")


def test_a_block_states_command_commit_host_and_versions() -> None:
    entry = Entry(
        ("benchmarks.step", "--case", "tiny-bf16"), "Step", packages=("torch", "no-such-package")
    )
    written = block(entry, "| a |\n\nPASS x\n", "commit abc1234 with uncommitted changes", 90.0)
    head, *rest = written.split("\n\n")
    assert head.startswith(
        "`python -m benchmarks.step --case tiny-bf16`, commit abc1234 with uncommitted changes, "
        "1.5 min:"
    )
    assert "cores of" in head
    assert "torch 2" in head
    assert "no-such-package not installed" in head
    assert rest == ["| a |", "PASS x"]


def test_only_changes_outside_the_results_are_uncommitted_changes(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True
        )

    (tmp_path / "docs").mkdir()
    for name in ("docs/benchmarks.md", "code.py"):
        (tmp_path / name).write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    (tmp_path / "docs" / "benchmarks.md").write_text("2")
    assert commit(tmp_path).startswith("commit ")
    assert "uncommitted" not in commit(tmp_path)
    (tmp_path / "code.py").write_text("2")
    assert commit(tmp_path).endswith("with uncommitted changes")


def test_entries_are_chosen_by_name_speed_and_gpu() -> None:
    quick = chosen([], everything=False, has_gpu=False)
    assert "step-tiny-bf16" in quick
    assert not any(entry.slow or entry.gpu for entry in quick.values())
    assert chosen([], everything=True, has_gpu=True) == ENTRIES
    assert set(chosen(["step", "zero"], everything=False, has_gpu=False)) == {
        "step-tiny-bf16", "step-tiny-fp32", "step-124m-bf16", "step-losses", "zero",
    }  # fmt: skip
    with pytest.raises(SystemExit, match="no benchmark 'stop'"):
        chosen(["stop"], everything=False, has_gpu=False)


def test_the_modules_of_all_entries_exist() -> None:
    root = Path(__file__).parents[2]
    for entry in ENTRIES.values():
        assert root.joinpath(*entry.arguments[0].split(".")).with_suffix(".py").is_file()


def test_a_benchmark_that_hangs_is_ended(tmp_path: Path) -> None:
    assert run(Entry(("http.server", "--bind", "127.0.0.1", "0"), "Hangs"), limit=1.0) == (None, "")


def test_a_failure_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "benchmarks.md"
    write(path, TEXT)
    assert not bench("step", Entry(("no_such_module",), "Step"), path)
    assert path.read_text() == TEXT
    assert bench("step", Entry(("platform",), "Step"), path)
    assert "python -m platform" in path.read_text()
    assert path.read_text().endswith("\nAfter.\n")


def test_a_missed_goal_is_a_result_and_a_crash_is_not() -> None:
    assert is_result(1, "rows\nMISS step: 1.3 x (goal >= 1.4) MISSED\n")
    assert not is_result(1, "rows\n")
    assert not is_result(None, "")


def test_the_verdict_names_missed_goals(capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = (
        Check("to compiled", 1.41, 1.4),
        Check("wait", 0.02, 0.01, at_most=True, unit="of the time"),
    )
    assert verdict("step", [good]) == 0
    assert capsys.readouterr().out == "\nPASS step: to compiled 1.41 x (goal >= 1.4)\n"
    assert verdict("step", [good, bad]) == 1
    last = (
        "MISS step: to compiled 1.41 x (goal >= 1.4); wait 0.02 of the time (goal <= 0.01) MISSED\n"
    )
    assert capsys.readouterr().out.endswith(last)


def test_a_check_of_nan_is_not_met() -> None:
    assert not Check("nothing", math.nan, 0.0).met
    assert not Check("nothing", math.nan, 0.0, at_most=True).met


def test_tables_are_markdown() -> None:
    assert table(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |\n"


def test_ratios_are_taken_within_rounds() -> None:
    fast, slow = Contestant("fast", []), Contestant("slow", [])
    # the host was slow in the second round
    fast.seconds, slow.seconds = [1.0, 10.0, 1.0], [2.0, 20.0, 1.5]
    assert fast.speedup_over(slow) == 2.0
    assert slow.quartiles == (1.75, 11.0)


def test_contestants_answer_in_turn() -> None:
    contestant = Contestant.start(
        "echo", ["tests.benchmarks._echo"], [{"PYTHONPATH": ":".join(sys.path)}] * 2
    )
    try:
        assert contestant.run(3) == 3.0
        assert contestant.run(5) == 5.0
        with pytest.raises(SystemExit, match="contestant 'echo' ended"):
            contestant.ask("end 0")
    finally:
        contestant.end()
    assert all(process.returncode is not None for process in contestant.processes)
