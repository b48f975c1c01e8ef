"""The labelled statements: the same each time, and no file in two splits."""

import json
from pathlib import Path

from scripts import code_pairs


def test_the_same_files_each_time_and_no_statement_of_one_split_in_another(tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert code_pairs.main([str(tmp_path / name)]) == 0
    written = {path.name: path.read_bytes() for path in (tmp_path / "one").glob("*.jsonl")}
    assert written == {path.name: path.read_bytes() for path in (tmp_path / "two").glob("*.jsonl")}
    assert not list(tmp_path.rglob("*.tmp-*"))
    rows = [json.loads(line) for line in written["train.jsonl"].splitlines()]
    assert len(rows) == code_pairs.COUNTS["train"]
    assert {row["keyword"] for row in rows} == set(code_pairs.KEYWORDS)
    assert all(row["statement"].startswith("[MASK] ") for row in rows)
    names = [path.name for path in (tmp_path / "one" / "corpus").iterdir()]
    assert len(names) > 100
    assert "argparse.py" in names or code_pairs.split_of("argparse.py") != "train"
    assert all(code_pairs.split_of(name) == "train" for name in names if "_" not in name)


def test_usage(tmp_path: Path) -> None:
    assert code_pairs.main([str(tmp_path), "more"]) == 2
