"""A page that cannot be extracted is removed with its reason, and the next ones are extracted."""

import os
import signal
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trafilatura", reason="the extra web is not installed")

from megacore.config.curate import ExtractTextStep
from megacore.corpus import extract
from megacore.corpus.curate_report import Tally
from megacore.corpus.extract import PLAIN, ExtractText
from megacore.errors import WorkerLostError

TEXT = "A sentence of some length that a reader would go on with. " * 5
PAGE = f"<html><body><nav>Menu</nav><article><p>{TEXT}</p></article></body></html>"


def documents(*texts: str) -> list[Any]:
    return [
        SimpleNamespace(text=text, metadata={}, id=str(number)) for number, text in enumerate(texts)
    ]


def extracted(step: ExtractTextStep, *texts: str) -> tuple[list[Any], Tally]:
    tally = Tally()
    return list(ExtractText(tally, "1 extract_text", step)(documents(*texts))), tally


def test_a_page_over_the_time_limit_is_removed() -> None:
    step = ExtractTextStep(step="extract_text", seconds=0.5)
    huge = "<article>" + "<p>Words and more of them.</p>" * 300_000
    kept, tally = extracted(step, PAGE, huge, PAGE, "<html></html>")
    assert [(document.id, document.text) for document in kept] == [
        ("0", TEXT.strip()),
        ("2", TEXT.strip()),
    ]
    assert tally.removed == {"1 extract_text": {"time limit": 1, "no text": 1}}
    assert tally.changed == {"1 extract_text": 2}


def test_a_page_that_crashes_the_process_is_removed() -> None:
    step = ExtractTextStep(step="extract_text")
    block = extract._Extractor(step)
    with closing(block) as extractor:
        assert extractor.main_text(PAGE, "a") == (TEXT.strip(), "")
        assert block._process is not None
        end(block._process, signal.SIGSEGV)
        assert extractor.main_text(PAGE, "a") == (None, "extraction failed")
        assert extractor.main_text(PAGE, "a") == (TEXT.strip(), "")
        process = block._process
    assert not process.is_alive()


def test_a_field_of_the_source_named_plain_has_no_effect() -> None:
    page, text = documents(PAGE, "no <b>HTML</b>")
    page.metadata["plain"] = True
    text.metadata[PLAIN] = True
    block = ExtractText(Tally(), "1 extract_text", ExtractTextStep(step="extract_text"))
    kept = [(each.text, each.metadata) for each in block([page, text])]
    assert kept == [(TEXT.strip(), {"plain": True}), ("no <b>HTML</b>", {})]


def end(process: Any, number: int) -> None:
    os.kill(process.pid, number)
    process.join()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_is_not_the_fault_of_a_page(number: int) -> None:
    block = extract._Extractor(ExtractTextStep(step="extract_text"))
    with closing(block) as extractor:
        assert extractor.main_text(PAGE, "a") == (TEXT.strip(), "")
        end(block._process, number)
        with pytest.raises(WorkerLostError, match=f"text of page 7 ended with signal {number:d} "):
            extractor.main_text(PAGE, "page 7")
        assert extractor.main_text(PAGE, "a") == (TEXT.strip(), "")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("raise ImportError", "exit code 1 while it imported trafilatura"),
        ("def extract(*_, **options): raise MemoryError", "text of 0 ended with exit code 1"),
    ],
)
def test_a_process_that_cannot_start_or_lacks_memory_ends_the_stage(
    module: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trafilatura.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))  # spawned processes take this path
    with pytest.raises(WorkerLostError, match=message):
        extracted(ExtractTextStep(step="extract_text"), PAGE)
