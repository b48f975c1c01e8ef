"""The labelled statements of scripts/code_pairs.py."""

import json
from pathlib import Path

from scripts import code_pairs


def test_files_are_reproducible_and_the_corpus_has_only_train_files(tmp_path: Path) -> None:
    for name in ("first", "second"):
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


def test_wrong_number_of_arguments_is_refused(tmp_path: Path) -> None:
    assert code_pairs.main([str(tmp_path), "more"]) == 2
