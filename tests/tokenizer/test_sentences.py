"""Tests of splitting texts into sentences with rules and with Punkt."""

import os
import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacore.errors import DataFormatError, DownloadError, WorkerLostError
from megacore.tokenizer import sentences
from megacore.tokenizer.sentences import (
    SentenceSplitter,
    SplitterChoice,
    download_punkt,
    find_punkt,
    make_splitter,
)
from tests._limits import HANG
from tests.tokenizer._corpora import STORY, train_punkt

RULES = SplitterChoice("rules")


@pytest.fixture(scope="module")
def punkt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_punkt(tmp_path_factory.mktemp("punkt"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? Four… Five", ["One.", "Two!", "Three?", "Four…", "Five"]),
        (
            "Dr. No met Mrs. Yes at 5 p.m. on Main St. today. Then",
            ["Dr. No met Mrs. Yes at 5 p.m. on Main St. today.", "Then"],
        ),
        ("J. R. R. Tolkien wrote it. True.", ["J. R. R. Tolkien wrote it.", "True."]),
        (
            "It cost 3.50 dollars vs. 4.00 e.g. here. Yes",
            ["It cost 3.50 dollars vs. 4.00 e.g. here.", "Yes"],
        ),
        ('He said "Stop." Then he left.', ['He said "Stop."', "Then he left."]),
        ("(Really!) Yes.", ["(Really!)", "Yes."]),
        ("The end... and more. And... More", ["The end... and more.", "And...", "More"]),
        ("1. Buy milk. 2. Go home.", ["1. Buy milk.", "2.", "Go home."]),
        ("In 1999. Next", ["In 1999.", "Next"]),
        ("A title\n\nA text. More\n  text", ["A title", "A text.", "More\n  text"]),
        ("a.b.c is one. (See Fig. 3.) Two", ["a.b.c is one.", "(See Fig. 3.)", "Two"]),
        ("", []),
        (" \n ", []),
        ("Ends.  \n\n", ["Ends."]),
    ],
)
def test_rules_split_text_into_sentences(text: str, expected: list[str]) -> None:
    assert make_splitter(RULES)(text) == expected


@given(text=st.text(st.sampled_from("aB1 .!?\n\"(')…"), max_size=80))
def test_rules_keep_every_character(text: str) -> None:
    pieces = make_splitter(SplitterChoice("rules", keep_newlines=True))(text)
    assert "".join(pieces) == text
    assert [piece.strip() for piece in pieces if piece.strip()] == make_splitter(RULES)(text)


def test_long_words_and_gaps_take_linear_time(punkt: Path) -> None:
    started = time.process_time()
    for text in (
        "a" * 400_000,
        "." * 400_000 + "x",
        "\n" * 400_000,
        ' ."' * 130_000,
        "a.b" * 130_000,
    ):
        make_splitter(RULES)(text)
    make_splitter(SplitterChoice("punkt", keep_newlines=True, data=str(punkt)))("a" * 400_000)
    assert time.process_time() - started < 20


def test_long_texts_are_cut_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentences, "PIECE_CHARACTERS", 4)
    assert make_splitter(RULES)("abcdefghij") == ["abcd", "efgh", "ij"]


def test_punkt_splits_by_its_model_and_keeps_newlines_on_request(punkt: Path) -> None:
    split = make_splitter(SplitterChoice("punkt", data=str(punkt)))
    assert split("Mr. Smith left. He was late.\n\nWhy? ") == [
        "Mr. Smith left.",
        "He was late.",
        "Why?",
    ]
    keep = make_splitter(SplitterChoice("punkt", keep_newlines=True, data=str(punkt)))
    assert keep("Mr. Smith left. He was late.\n\nWhy? ") == [
        "Mr. Smith left. ",
        "He was late.\n\n",
        "Why?",
    ]


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.sampled_from("aB1 .!?\n\"(',;)"), max_size=60))
def test_faster_pattern_finds_the_same_sentences_as_nltks(punkt: Path, text: str) -> None:
    # Megatron-LM's pattern may begin to match anywhere in a word.
    import re

    from nltk.tokenize.punkt import PunktLanguageVars, PunktSentenceTokenizer

    variables = PunktLanguageVars()
    variables._re_period_context = re.compile(
        rf"\S*{variables._re_sent_end_chars}\s*(?=(?P<after_tok>{variables._re_non_word_chars}|"
        r"(?P<next_tok>\S+)))"
    )
    slow = PunktSentenceTokenizer(sentences._read_punkt(punkt, "english"), lang_vars=variables)
    assert make_splitter(SplitterChoice("punkt", keep_newlines=True, data=str(punkt)))(
        text
    ) == slow.tokenize(text)


def test_two_processes_split_equal_to_one(punkt: Path) -> None:
    texts = [STORY, "", "Alone", STORY * 3] * 3
    choice = SplitterChoice("punkt", data=str(punkt))
    with SentenceSplitter(choice, 1) as serial, SentenceSplitter(choice, 2) as parallel:
        sentences, counts = serial.split(texts)
        parallel_sentences, parallel_counts = parallel.split(texts)
    assert sentences == parallel_sentences
    assert counts.tolist() == parallel_counts.tolist()
    assert counts.tolist()[1] == 0
    assert sum(counts) == len(sentences)


def test_a_killed_worker_raises_at_once() -> None:
    def work(splitter: SentenceSplitter) -> None:
        while time.monotonic() - started < HANG:
            splitter.split(["One. Two."])

    with SentenceSplitter(RULES, 2) as splitter:
        assert splitter._pool is not None
        splitter.split(["One. Two."])
        processes = list(splitter._pool._processes)
        started = time.monotonic()
        threading.Timer(
            0.3, lambda: [os.kill(process, signal.SIGKILL) for process in processes]
        ).start()
        with pytest.raises(WorkerLostError, match="was killed, perhaps because memory ran out"):
            work(splitter)


def test_an_error_cancels_the_queued_work() -> None:
    queued: list[Future[Any]] = []

    def work() -> None:
        with SentenceSplitter(RULES, 2) as splitter:
            assert splitter._pool is not None
            queued.extend(splitter._pool.submit(time.sleep, 0.5) for _ in range(400))
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert queued[-1].cancelled()


@pytest.mark.parametrize("name", ["collocations.tab", "ortho_context.tab"])
def test_a_damaged_punkt_model_is_refused(tmp_path: Path, name: str) -> None:
    folder = train_punkt(tmp_path) / "tokenizers" / "punkt_tab" / "english"
    (folder / name).write_bytes(b"\xff\n")
    with pytest.raises(DataFormatError, match=r"the Punkt model in .* is damaged"):
        SentenceSplitter(SplitterChoice("punkt", data=str(tmp_path)), 1)


def test_a_language_without_a_model_is_refused(punkt: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataFormatError, match=r"no Punkt model of 'klingon' \(it has: english\).* rules"
    ):
        SentenceSplitter(SplitterChoice("punkt", "klingon", data=str(punkt)), 1)
    with pytest.raises(DataFormatError, match="it has: none"):
        SentenceSplitter(SplitterChoice("punkt", data=str(tmp_path)), 1)


def test_download_stores_the_model_in_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nltk.downloader import Downloader

    def fetch(self: object, package: str, download_dir: str, **options: Any) -> bool:
        assert (package, options["raise_on_error"]) == ("punkt_tab", True)
        train_punkt(Path(download_dir))
        return True

    monkeypatch.setattr(Downloader, "download", fetch)
    counts = download_punkt(tmp_path, "english")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert counts == {"bytes": sum(path.stat().st_size for path in files)}
    monkeypatch.setattr("nltk.data.path", [str(tmp_path)])
    assert find_punkt("english") == tmp_path
    assert find_punkt("german") is None
    with pytest.raises(DataFormatError, match="no Punkt model of 'german'"):
        download_punkt(tmp_path / "again", "german")


def test_the_error_of_an_offline_download_suggests_the_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No server listens at this address, therefore nltk itself raises the error.
    from nltk.downloader import Downloader

    monkeypatch.setattr(Downloader, "DEFAULT_URL", "http://127.0.0.1:9/index.xml")
    with pytest.raises(
        DownloadError,
        match=r"cannot be downloaded .* or set data\.sentence_splitter to rules, which",
    ):
        download_punkt(tmp_path, "english")
