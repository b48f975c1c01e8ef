"""The labelled statements of scripts/code_pairs.py."""

import json
from pathlib import Path

import pytest

from scripts import code_pairs


def test_files_are_reproducible_and_the_corpus_has_only_train_files(tmp_path: Path) -> None:
    for name in ("first", "second", "second"):  # its own files are replaced
        assert code_pairs.main([str(tmp_path / name)]) == 0
    written = {path.name: path.read_bytes() for path in (tmp_path / "first").glob("*.jsonl")}
    assert written == {
        path.name: path.read_bytes() for path in (tmp_path / "second").glob("*.jsonl")
    }
    assert not list(tmp_path.rglob("*.tmp-*"))
    rows = [json.loads(line) for line in written["train.jsonl"].splitlines()]
    assert len(rows) == code_pairs.COUNTS["train"]
    assert {row["keyword"] for row in rows} == set(code_pairs.KEYWORDS)
    assert all(row["statement"].startswith("[MASK] ") for row in rows)
    names = [path.name for path in (tmp_path / "first" / "corpus").iterdir()]
    assert len(names) > 100
    assert "argparse.py" in names or code_pairs.split_of("argparse.py") != "train"
    assert all(code_pairs.split_of(name) == "train" for name in names if "_" not in name)


@pytest.mark.parametrize("name", ["corpus", "train.jsonl"])
def test_files_of_others_are_never_replaced(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine.txt").write_text("mine")
    assert code_pairs.main([str(tmp_path)]) == 2
    assert f"{tmp_path} has {name}, which this script did not write" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == [name, "mine.txt"]


def test_wrong_number_of_arguments_is_refused(tmp_path: Path) -> None:
    assert code_pairs.main([str(tmp_path), "more"]) == 2
