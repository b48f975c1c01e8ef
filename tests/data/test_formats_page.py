"""Tests of docs/formats.md: its Python code, bytes and JSON agree with the example files."""

import doctest
import json
import re
from pathlib import Path

import pytest

from megacore.inspect.index import describe_index
from megacore.inspect.provenance import Origins

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run the page's code in a temporary directory and return the directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "documents.json").write_text(blocks("json")[1])
    code = "\n".join(blocks("python"))
    test = doctest.DocTestParser().get_doctest(code, {}, "formats.md", "formats.md", 0)
    report: list[str] = []
    results = doctest.DocTestRunner().run(test, out=report.append)
    assert not results.failed, "".join(report)
    assert results.attempted > 30
    return tmp_path


def test_documented_bytes_equal_the_idx_file(example: Path) -> None:
    table = PAGE.split("| offset | type |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| ([\d SD+]+) \| [^|]+ \| `?([\da-f ]*)`? \|", table, re.MULTILINE)
    content = (example / "tiny_text_document.idx").read_bytes()
    position = 0
    for offset, field in rows:
        assert eval(re.sub(r"(\d) ([SD])", r"\1*\2", offset), {"S": 3, "D": 5}) == position
        position += len(bytes.fromhex(field))
    assert bytes.fromhex("".join(field for _, field in rows)) == content


def test_documented_index_json_equals_the_file(example: Path) -> None:
    assert json.loads(blocks("json")[0]) == json.loads((example / "index.json").read_text())
    assert describe_index(example).samples["train"] == 10


def test_documented_sample_index_equals_the_file(example: Path) -> None:
    import numpy as np

    from megacore.token_files.indexed_dataset import IndexedDataset

    rows = re.findall(r"^\| (\d) \| (\d) \| ([\d ]+) \| (.*) \|$", PAGE, re.MULTILINE)
    tokens = IndexedDataset(example / "tiny_text_document")
    document, sample = (
        np.load(example / f"train_{name}_index.npy") for name in ("document", "sample")
    )
    assert [int(sequence) for _, sequence, _, _ in rows] == document.tolist()
    for position, sequence, ids, starts in rows:
        assert [int(token) for token in ids.split()] == tokens[int(sequence)].tolist()
        for number, offset, token in re.findall(r"(\d+): offset (\d+) \((\d+)\)", starts):
            assert sample[int(number)].tolist() == [int(position), int(offset)]
            assert tokens[int(sequence)][int(offset)] == int(token)
    assert len(re.findall(r"\d+: offset \d+ \(\d+\)", PAGE)) == len(sample) - 1


def test_documented_documents_json_is_readable(tmp_path: Path) -> None:
    (tmp_path / "documents.json").write_text(blocks("json")[1])
    assert Origins.read(tmp_path / "documents.json").documents == 6
