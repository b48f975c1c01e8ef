"""The search of evaluation sets finds what a naive search and datatrove's filter find."""

import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("datatrove", reason="the extra curate is not installed")

from datatrove.data import Document
from datatrove.pipeline.decont import n_grams
from datatrove.utils.hashing import HashConfig
from datatrove.utils.text import simplify_text

from megacore.artifact.files import read_json
from megacore.corpus import contamination
from megacore.corpus.contamination import (
    HASHES_NAME,
    SEARCH_NAME,
    Benchmark,
    Index,
    remove_documents,
    search_corpus,
    shares,
    words_of,
)
from megacore.corpus.curate_job import CurateOptions
from megacore.corpus.documents import CorpusWriter, SourceFile, names_sources, write_sources
from megacore.data.copies import split_copies
from megacore.data.index_options import IndexOptions, Mixture
from megacore.errors import DataFormatError
from tests.data._sentences import write_lengths

ITEM = (
    "The old lighthouse-keeper counted 1,250 ships that year, and wrote each of their names into a "
    "book that nobody else was ever allowed to read."
)
OTHER = "Every morning the baker's café opened at 6.30 before anyone else on the long street woke."
SHORT = "A question of eight words has no n-gram."
SETS = (Benchmark("wikitext", (ITEM, SHORT)), Benchmark("lm_eval/a", (OTHER, ITEM)))
PLAIN = ["the value of the sum", "a text of other words that is not in any set at all"]


def write_corpus(directory: Path, texts: Sequence[str], name: str = "rows") -> Path:
    """Write a corpus directory that refers to one JSON Lines file."""
    directory.mkdir(parents=True)
    path = directory / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    write_sources(directory, "jsonl", [SourceFile.of(path)], key="text")
    return directory


def searched(
    corpus: Path, directory: Path, *, shard_bytes: int = 10**6, workers: int = 1
) -> dict[str, Any]:
    directory.mkdir()
    options = CurateOptions(shard_bytes=shard_bytes, workers=workers)
    work = directory.with_name(f"{directory.name}.work")
    return search_corpus(corpus, directory, work, SETS, 13, options)


def test_documents_that_collect_or_curation_wrote_name_their_sources(tmp_path: Path) -> None:
    read = write_corpus(tmp_path / "read", ["one"])
    assert not names_sources(read)
    write_sources(read, "jsonl", [SourceFile.of(read / "rows.jsonl")], key="text", written=True)
    assert names_sources(read)
    (tmp_path / "collected").mkdir()
    with CorpusWriter(tmp_path / "collected") as writer:
        writer.add("one", "a.txt")
    assert names_sources(tmp_path / "collected")


def naive(text: str, item: str, ngram: int = 13) -> bool:
    """Return True if the words of an item share an n-gram with a text, by the definition."""

    def grams(words: list[str]) -> set[tuple[str, ...]]:
        return {tuple(words[at : at + ngram]) for at in range(len(words) - ngram + 1)}

    return bool(grams(simplify_text(text).split()) & grams(simplify_text(item).split()))


def test_planted_items_are_found_as_defined() -> None:
    index = Index(SETS, 13)

    def find(text: str) -> dict[int, str]:
        (found,) = index.find([text])
        return found

    words = ITEM.split()
    quote = " ".join(words[3:20])
    assert set(find(f"before. {ITEM} after")) == {0, 3}
    assert set(find(f"x {quote.upper().replace(',', ' --')}!")) == {0, 3}
    assert set(find(ITEM.replace("1,250", "77").replace("-", " "))) == {0, 3}
    assert set(find(OTHER.replace("é", "e"))) == {2}
    assert find(" ".join(words[3:12])) == {}  # a half sentence of fewer than 13 words
    assert find(quote.replace("year", "decade")) == {}
    assert find(SHORT) == {}
    assert find("") == {}
    assert find(ITEM)[0] == " ".join(words_of(ITEM)[:13])


def test_words_of_parts_are_those_of_the_text() -> None:
    texts = [ITEM, OTHER, "ΟΔΟΣ 1.5 1 . 5 e\u0301 x\u0301\u3000\u201cY\u201d\x1cz\x85\u2028w ١٫٢ ½"]
    texts.append("".join(map(chr, (*range(1, 0xD800), *range(0xE000, 0x10000)))))
    texts.append("".join(map(chr, range(128))) + " 1,5 1.A_b-C")  # has rules of its own
    for text in texts:
        assert words_of(text) == simplify_text(text).split()
        assert [word for part in text.split() for word in words_of(part)] == words_of(text)


def test_finds_what_a_naive_search_and_datatrove_find(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    draws = random.Random(5)
    vocabulary = ["red", "Blue,", "3.5", "(sun)", "it's", "x"]
    items = [" ".join(draws.choices(vocabulary, k=draws.randint(2, 30))) for _ in range(40)]
    texts = [" ".join(draws.choices(vocabulary, k=60)) for _ in range(300)]

    class Words:
        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

    monkeypatch.setattr(n_grams, "load_word_tokenizer", lambda language: Words())
    config = n_grams.NGramsDecontConfig(n_grams=6, hash_config=HashConfig(hash_fc="sha1"))
    indexer = object.__new__(n_grams.NGramsDecontIndexer)
    indexer.config, indexer.tokenizer = config, Words()
    indexer.hash_func = n_grams.create_hash_func(config.hash_config)
    hashes = {value for item in items for value in indexer.compute_hashes(item)}
    np.array(sorted(hashes), config.hash_config.np_descr).tofile(tmp_path / "a.index.hashes")
    theirs = n_grams.NGramsDecontFilter(str(tmp_path), config)
    index = Index((Benchmark("a", tuple(items)),), 6)
    found = index.find(texts)
    assert found == [each for text in texts for each in index.find([text])]
    with monkeypatch.context() as patch:
        for name in ("_BATCH_CHARACTERS", "_CACHED_PARTS", "_CACHED_CHARACTERS"):
            patch.setattr(contamination, name, 4)
        assert found == Index((Benchmark("a", tuple(items)),), 6).find(texts)
    for text, items_of_text in zip(texts, found, strict=True):
        expected = {number for number, item in enumerate(items) if naive(text, item, 6)}
        assert set(items_of_text) == expected
        assert (theirs.filter(Document(text=text, id="")) is True) == (not expected)
    assert 0 < sum(map(bool, found)) < len(texts)


def test_result_does_not_depend_on_shards_processes_or_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [*PLAIN * 20, f"a {ITEM}", "", *PLAIN * 20, OTHER.lower()]
    corpus = write_corpus(tmp_path / "corpus", texts)
    counts = searched(corpus, tmp_path / "one")
    assert counts == {
        "documents": 82,
        "hits": 2,
        "items": 4,
        "contaminated_items": 3,
        "ngram": 13,
    }
    assert searched(corpus, tmp_path / "two", shard_bytes=1500, workers=2) == counts
    real, calls = contamination._search_shard, []

    def dies(work: Path, rank: int) -> None:
        if rank == 1 and len(calls) == 1:
            raise KeyboardInterrupt
        calls.append(rank)
        real(work, rank)

    monkeypatch.setattr(contamination, "_search_shard", dies)
    with pytest.raises(KeyboardInterrupt):
        searched(corpus, tmp_path / "three", shard_bytes=1500)
    calls.append(-1)
    (tmp_path / "three").rmdir()
    assert searched(corpus, tmp_path / "three", shard_bytes=1500) == counts
    assert calls.count(0) == 1
    assert len(calls) > 3
    rows = [shares([tmp_path / name]) for name in ("one", "two", "three")]
    assert rows[0] == rows[1] == rows[2]
    assert {name: (row["searched"], row["share"]) for name, row in rows[0].items()} == {
        "wikitext": (1, 1.0),
        "lm_eval/a": (2, 1.0),
    }
    (example,) = rows[0]["wikitext"]["examples"]
    assert example["document"] == f"{corpus / 'rows.jsonl'}:41"
    assert np.array_equal(
        np.load(tmp_path / "one" / HASHES_NAME), np.load(tmp_path / "two" / HASHES_NAME)
    )


def test_the_json_files_of_a_shard_do_not_grow_with_its_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All documents of a compressed file are one shard, however many they are."""
    corpus = write_corpus(tmp_path / "corpus", PLAIN * 400)
    monkeypatch.setattr(contamination, "read_json", partial(read_json, limit=5_000))
    assert searched(corpus, tmp_path / "found")["documents"] == 800
    (tmp_path / "kept").mkdir()
    counts = remove_documents(
        corpus,
        [tmp_path / "found"],
        0,
        tmp_path / "kept",
        tmp_path / "kept.work",
        CurateOptions(workers=1),
    )
    assert (counts["documents"], counts["removed_copies"]) == (2, 798)


def test_a_file_that_changes_while_it_is_searched_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_corpus(tmp_path / "corpus", PLAIN)
    searched(corpus, tmp_path / "found")
    run_shards = contamination._run_shards

    def run_and_overwrite(*arguments: Any) -> None:
        run_shards(*arguments)
        (corpus / "rows.jsonl").touch()

    monkeypatch.setattr(contamination, "_run_shards", run_and_overwrite)
    options, message = CurateOptions(workers=1), r"rows\.jsonl has changed since it was collected"
    (tmp_path / "kept").mkdir()
    with pytest.raises(DataFormatError, match=message):
        remove_documents(
            corpus,
            [tmp_path / "found"],
            0,
            tmp_path / "kept",
            tmp_path / "kept.work",
            options,
        )
    assert not (tmp_path / "kept.work" / "job.json").exists()
    write_sources(corpus, "jsonl", [SourceFile.of(corpus / "rows.jsonl")], key="text")
    with pytest.raises(DataFormatError, match=message):
        searched(corpus, tmp_path / "other")
    assert not (tmp_path / "other.work" / "job.json").exists()


def test_removal_leaves_out_hits_and_copies_of_all_sources(tmp_path: Path) -> None:
    texts = (["one", f"a {ITEM}", "two", "TWO "], ["two", "three", OTHER, "  "])
    corpora = [write_corpus(tmp_path / f"c{n}", rows) for n, rows in enumerate(texts)]
    for number, corpus in enumerate(corpora):
        searched(corpus, tmp_path / f"s{number}", shard_bytes=40)
    searches = [tmp_path / "s0", tmp_path / "s1"]
    kept = []
    for number, corpus in enumerate(corpora):
        directory = tmp_path / f"d{number}"
        directory.mkdir()
        counts = remove_documents(
            corpus,
            searches,
            number,
            directory,
            tmp_path / f"w{number}",
            CurateOptions(shard_bytes=40, workers=1),
        )
        rows = [
            json.loads(line)
            for path in sorted(directory.glob("*.jsonl"))
            for line in path.read_text().splitlines()
        ]
        kept.append([(row["text"], row["source"].rpartition(":")[2]) for row in rows])
        assert (counts["removed"], counts["removed_copies"]) == (2, 1)
    assert kept == [[("one", "1"), ("two", "3")], [("three", "2")]]
    report = json.loads((tmp_path / "d1" / "report.json").read_text())
    assert [each["reason"] for each in report["examples"]] == ["copy", "n-gram"]
    content = json.loads((tmp_path / "s0" / SEARCH_NAME).read_text())
    first, *others = content["shards"]
    changed = {**first, "documents": first["documents"] + 1}
    for shards_of_search, reason in (
        ([changed, *others], "documents, and had"),
        (others, "shards"),
    ):
        (tmp_path / "s0" / SEARCH_NAME).write_text(
            json.dumps({**content, "shards": shards_of_search})
        )
        with pytest.raises(DataFormatError, match=f"{reason}.* leave the source unchanged"):
            remove_documents(
                corpora[0],
                searches,
                0,
                tmp_path,
                tmp_path / f"w-{reason[:6]}",
                CurateOptions(shard_bytes=40, workers=1),
            )


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["  "], "c1 has no documents in which .*: give another data.source"),
        (["two", "ONE "], "none of 2 documents .* all are copies .*: remove this source"),
        (["two", ITEM], "none of 2 .* 1 share an n-gram .* 1 are copies .*: raise evaluate"),
    ],
)
def test_the_reason_for_which_no_document_stays_is_named(
    texts: list[str], message: str, tmp_path: Path
) -> None:
    searches = [tmp_path / "s0", tmp_path / "s1"]
    for number, rows in enumerate((["one", "two"], texts)):
        searched(write_corpus(tmp_path / f"c{number}", rows), searches[number])
    options = CurateOptions(workers=1)
    with pytest.raises(DataFormatError, match=message):
        remove_documents(tmp_path / "c1", searches, 1, tmp_path, tmp_path / "w", options)


def test_sets_of_several_sources_are_joined(tmp_path: Path) -> None:
    for number, text in enumerate((ITEM, OTHER)):
        searched(write_corpus(tmp_path / f"c{number}", [text]), tmp_path / f"s{number}")
    rows = shares([tmp_path / "s0", tmp_path / "s1"])
    assert rows["wikitext"]["contaminated"] == 1
    assert rows["wikitext"]["items"] == 2
    assert (rows["lm_eval/a"]["contaminated"], rows["lm_eval/a"]["share"]) == (2, 1.0)


def test_copies_of_training_documents_in_held_out_splits_are_counted(tmp_path: Path) -> None:
    prefix = tmp_path / "tokens"
    # Tokens of a document are determined by its place; two are then made equal.
    write_lengths(prefix, [[4], [5], [3], [4], [5], [1]])
    dataset = np.memmap(f"{prefix}.bin", mode="r+", dtype=np.uint8)
    size = len(dataset) // 22
    dataset[: 4 * size] = dataset[12 * size : 16 * size]
    dataset.flush()
    options = IndexOptions(split="3,2,1", seq_length=4, seed=1)
    rows = split_copies(Mixture.single(str(prefix)), options, ("valid", "test"))
    assert (rows["valid"]["items"], rows["valid"]["contaminated"]) == (2, 1)
    assert rows["valid"]["examples"] == [{"item": 3, "tokens": str(prefix)}]
    assert rows["test"]["share"] is None  # an empty document has one token
