"""A page that cannot be extracted is removed with its reason, and the next ones are extracted."""

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trafilatura", reason="the extra web is not installed")

from megacore.config.curate import ExtractTextStep
from megacore.corpus import extract
from megacore.corpus.curate_report import Tally
from megacore.corpus.extract import ExtractText

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


def test_a_page_that_ends_the_process_is_removed() -> None:
    step = ExtractTextStep(step="extract_text")
    block = extract._Extractor(step)
    with closing(block) as extractor:
        assert extractor.main_text(PAGE) == (TEXT.strip(), "")
        assert block._process is not None
        block._process.kill()
        block._process.join()
        assert extractor.main_text(PAGE) == (None, "extraction failed")
        assert extractor.main_text(PAGE) == (TEXT.strip(), "")
        process = block._process
    assert not process.is_alive()
