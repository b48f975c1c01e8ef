"""Tests of sources that are existing token files."""

from pathlib import Path

import pytest

from megacore.config.data import PrefixSource
from megacore.corpus.collect import collect, fingerprint
from megacore.corpus.segments import segments
from megacore.errors import DataFormatError
from tests.data._files import write_tokens


def test_token_files_are_checked_and_referenced(tmp_path: Path) -> None:
    source = PrefixSource(kind="prefix", prefix=write_tokens(tmp_path / "a", [3, 0, 4]))
    (tmp_path / "out").mkdir()
    assert collect(source, tmp_path / "out") == {
        "documents": 3,
        "files": 2,
        "skipped_files": 0,
        "bytes": 14 + 90,
    }
    before = fingerprint(source)
    write_tokens(tmp_path / "a", [4, 0, 3])
    assert fingerprint(source)["idx_sha256"] != before["idx_sha256"]
    with pytest.raises(DataFormatError, match="has changed since it was collected"):
        segments(tmp_path / "out")


def test_token_files_have_no_text_segments(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    collect(PrefixSource(kind="prefix", prefix=write_tokens(tmp_path / "a", [3])), tmp_path / "out")
    with pytest.raises(
        DataFormatError, match=r"has no text: give data\.tokenizer a tokenizer that exists"
    ):
        segments(tmp_path / "out")


def test_moved_token_files_have_another_fingerprint(tmp_path: Path) -> None:
    before = fingerprint(PrefixSource(kind="prefix", prefix=write_tokens(tmp_path / "a", [3])))
    for suffix in (".bin", ".idx"):
        (tmp_path / f"a{suffix}").rename(tmp_path / f"b{suffix}")
    assert fingerprint(PrefixSource(kind="prefix", prefix=str(tmp_path / "b"))) != before


@pytest.mark.parametrize("missing", [".bin", ".idx"])
def test_a_missing_file_is_refused_with_its_name(tmp_path: Path, missing: str) -> None:
    prefix = write_tokens(tmp_path / "a", [3])
    Path(prefix + missing).unlink()
    with pytest.raises(DataFormatError, match=f"a{missing} cannot be read"):
        fingerprint(PrefixSource(kind="prefix", prefix=prefix))


def test_empty_and_damaged_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(DataFormatError, match="the corpus is empty"):
        collect(
            PrefixSource(kind="prefix", prefix=write_tokens(tmp_path / "a", [0, 0])),
            tmp_path / "out",
        )
    prefix = write_tokens(tmp_path / "b", [3])
    Path(f"{prefix}.bin").write_bytes(b"\x00")
    with pytest.raises(DataFormatError, match="do not belong together"):
        collect(PrefixSource(kind="prefix", prefix=prefix), tmp_path / "out")
