"""Curation finds what datatrove's blocks find, for any number of processes and after any kill."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from tests._limits import HANG

pytest.importorskip("datatrove", reason="the extra curate is not installed")

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline import dedup, filters, readers, writers
from datatrove.pipeline.dedup.exact_dedup import ExactDedupConfig
from datatrove.utils.lid import FT176LID

from megacore.config.curate import CurateSteps
from megacore.config.data import JsonlSource
from megacore.config.validate import validated
from megacore.corpus import curate as stage
from megacore.corpus.blocks import read_blocks
from megacore.corpus.collect import collect
from megacore.corpus.curate import check_steps, curate_corpus, curate_segments
from megacore.corpus.curate_blocks import SeparatedWords, minhash_config
from megacore.corpus.curate_job import CurateOptions, Job, fingerprint, plan_phases
from megacore.corpus.curate_report import report_text
from megacore.corpus.segments import jsonl_segments, segments
from megacore.errors import (
    ConfigError,
    DataFormatError,
    DownloadError,
    WorkerLostError,
    WorkspaceError,
)

OPTIONS = CurateOptions(shard_bytes=100_000, workers=1)
NEAR = {"step": "minhash_dedup", "n_grams": 2, "num_buckets": 80, "hashes_per_bucket": 5}
"""Options that find copies of which a fifth of the words is changed."""


def steps_of(*values: dict[str, Any]) -> Any:
    return validated(CurateSteps, {"curate": list(values)}, "steps").curate


def passages(words: int = 150) -> list[str]:
    """Return real English text in documents of several lines."""
    # Topics repeat parts of each other.
    lines = dict.fromkeys(
        line.strip() for text in topics.values() for line in text.splitlines() if line.strip()
    )
    documents: list[str] = []
    part: list[str] = []
    for line in lines:
        part.append(line)
        if sum(len(each.split()) for each in part) >= words:
            documents.append("\n".join(part))
            part = []
    return documents


def special() -> list[str]:
    """Return documents that the rules on quality treat differently."""
    plain = "The people of this town have to go with that and be quick. " * 3
    return [
        "short",
        "",
        "   \n ",
        "# " * 40 + plain * 4,
        "\n".join(f"- the item {number} of that list" for number in range(60)),
        "\n".join(f"and the line {number} ends with that…" for number in range(60)),
        plain * 20,
        "\n".join(["the same line again and again."] * 30),
        "\n\n".join(["A paragraph of the text that we have.", plain] * 9),
        "\n".join([plain, "please enable Javascript to go on with that.", plain, plain]),
        plain + "\nlorem ipsum dolor sit amet.\n" + plain,
        plain + "\nint main() { return 0; } is the code.\n" + plain,
        plain
        + "\nThis site has a cookie policy that we like.\n"
        + plain
        + "[12] and [citation needed].",
        "\n".join(["word"] * 80),
        "supercalifragilisticexpialidocious " * 60,
        "a b c d e f g h " * 20,
        "1234 5678 90 12 " * 30,
        plain + "x" * 1100 + "\n" + plain,
        plain + "Ask me.you@mail.example.net, he@x.org or 8.8.4.4, not 10.0.0.1 or 1.1.1.1.",
    ]


def write(path: Path, documents: Iterable[str | dict[str, Any]]) -> Path:
    values = [{"text": each} if isinstance(each, str) else each for each in documents]
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def run(
    tmp_path: Path,
    file: Path,
    *steps: dict[str, Any],
    options: CurateOptions = OPTIONS,
    name: str = "out",
) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """Return the texts that are kept with the numbers of their lines, and the report."""
    output = tmp_path / name
    output.mkdir()
    parts = jsonl_segments([file], "text")
    counts = curate_segments(parts, output, tmp_path / f"{name}.work", steps_of(*steps), options)
    lines = [
        json.loads(line)
        for path in sorted(output.glob("documents-*.jsonl"))
        for line in path.read_bytes().splitlines()
    ]
    assert counts["documents"] == len(lines)
    kept = [(line["text"], int(line["source"].rpartition(":")[2])) for line in lines]
    assert all(line["source"].startswith(f"{file}:") for line in lines)
    return kept, json.loads((output / "report.json").read_bytes())


def direct(block: Any, texts: Iterable[str]) -> list[tuple[str, int]]:
    """Return what a block of datatrove keeps, with numbers from 1; empty texts are left out."""
    documents = [
        Document(text=text, id=str(number)) for number, text in enumerate(texts, 1) if text.strip()
    ]
    return [(each.text, int(each.id)) for each in block(documents) if each.text.strip()]


WORDS = SeparatedWords()
RULES: dict[str, tuple[dict[str, Any], Any]] = {
    "gopher_quality": ({}, lambda: filters.GopherQualityFilter(language=WORDS)),
    "gopher_quality-options": (
        {
            "step": "gopher_quality",
            "min_doc_words": 10,
            "stop_words": ["word"],
            "min_stop_words": 1,
        },
        lambda: filters.GopherQualityFilter(
            min_doc_words=10, stop_words=["word"], min_stop_words=1, language=WORDS
        ),
    ),
    "gopher_repetition": ({}, lambda: filters.GopherRepetitionFilter(language=WORDS)),
    "c4_quality": ({}, lambda: filters.C4QualityFilter(language=WORDS)),
    "c4_quality-sentences": (
        {"step": "c4_quality", "split_paragraph": False, "min_num_sentences": 2},
        lambda: filters.C4QualityFilter(split_paragraph=False, min_num_sentences=2, language=WORDS),
    ),
    "fineweb_quality": ({}, lambda: filters.FineWebQualityFilter(language=WORDS)),
}


@pytest.mark.parametrize("rule", RULES)
def test_rules_keep_what_datatroves_blocks_keep(rule: str, tmp_path: Path) -> None:
    texts = [*special(), *passages()[:200]]
    options, block = RULES[rule]
    kept, report = run(tmp_path, write(tmp_path / "in.jsonl", texts), {"step": rule} | options)
    assert kept == direct(block(), texts)
    assert 0 < len(kept) < len(texts) - 2
    (empty, row) = report["steps"]
    assert empty["removed"] == 2
    assert row["removed"] == len(texts) - 2 - len(kept) == sum(row["reasons"].values())
    assert len(row["reasons"]) > 1
    assert report["documents"] == {"read": len(texts), "kept": len(kept)}
    assert sum(bin["read"] for bin in report["words_per_document"]) == len(texts)
    for reason in row["reasons"]:
        line = int(row["examples"][reason][0]["source"].rpartition(":")[2])
        assert row["examples"][reason][0]["text"] == texts[line - 1][:200]
    assert f"| 1 {row['step'][2:]} | {row['removed']}" in report_text(report)


def test_addresses_are_masked_as_datatrove_masks_the_document_by_itself(tmp_path: Path) -> None:
    from datatrove.pipeline.formatters.pii import PIIFormatter

    texts = [special()[-1], "Nothing.", special()[-1]]
    kept, report = run(tmp_path, write(tmp_path / "in.jsonl", texts), {"step": "pii"})
    assert [text for text, _ in kept] == [PIIFormatter().format(text) for text in texts]
    assert "10.0.0.1" in kept[0][0]
    assert not any(private in kept[0][0] for private in ("mail.example.net", "8.8.4.4", "1.1.1.1"))
    assert report["steps"][0]["changed"] == 2
    texts = ["me@x.org"]
    kept, _ = run(
        tmp_path,
        write(tmp_path / "one.jsonl", texts),
        {"step": "pii", "email_replacement": ["<email>"]},
        name="one",
    )
    assert kept == [("<email>", 1)]


def edited(text: str, share: float, vocabulary: list[str], random_state: random.Random) -> str:
    """Return the text with a share of its words replaced, removed or followed by another one."""
    words = text.split()
    for place in random_state.sample(range(len(words)), round(share * len(words))):
        other = random_state.choice(vocabulary)
        words[place] = random_state.choice((other, other, "", f"{words[place]} {other}"))
    return " ".join(words)


def test_planted_duplicates_are_found_and_hardly_any_other(tmp_path: Path) -> None:
    random_state = random.Random(1)
    texts = passages(80)
    unique = len(texts)
    vocabulary = " ".join(texts).split()
    originals = random_state.sample(range(unique), 200)
    exact, near = originals[:100], originals[100:]
    texts += [texts[number] for number in exact]
    texts += [
        edited(texts[number], 0.05 + 0.15 * place / len(near), vocabulary, random_state)
        for place, number in enumerate(near)
    ]
    order = list(range(len(texts)))
    random_state.shuffle(order)
    file = write(tmp_path / "in.jsonl", [texts[number] for number in order])
    kept, report = run(tmp_path, file, {"step": "exact_dedup"}, NEAR)
    numbers = {order[line - 1] for _, line in kept}
    copies = {original: unique + place for place, original in enumerate(originals)}
    found = {original for original, copy in copies.items() if len({original, copy} & numbers) < 2}
    assert len(found.intersection(exact)) >= 0.99 * len(exact)
    assert len(found.intersection(near)) >= 0.95 * len(near)
    others = set(range(unique)) - set(originals)
    assert len(others - numbers) <= 0.01 * len(others)
    exact_row, near_row = report["steps"]
    assert exact_row["duplicates"] == {
        "clusters": 100,
        "documents": 200,
        "largest": 2,
        "sizes": {"2": 100},
    }
    duplicates = near_row["duplicates"]
    assert duplicates["documents"] - duplicates["clusters"] == near_row["removed"]
    assert 95 <= duplicates["clusters"] <= 105
    assert {"cluster", "source", "text"} == set(near_row["examples"]["duplicate"][0])


def by_hand(folder: Path, shards: Path, near: Any) -> tuple[list[str], list[str]]:
    """Return the texts that datatrove's own pipelines keep of exact and of near duplicates."""

    def text_of(document: Document) -> bytes:
        return document.text.encode()

    def work(name: str) -> str:
        return str(folder / name)

    def task(tasks: int, *blocks: Any) -> None:
        log = work(f"log-{len(list(folder.glob('log-*')))}")
        LocalPipelineExecutor(list(blocks), tasks=tasks, workers=1, logging_dir=log).run()

    def texts_in(name: str) -> list[str]:
        paths = sorted(Path(work(name)).iterdir())
        lines = [line for path in paths for line in path.read_bytes().splitlines()]
        return [json.loads(line)["text"] for line in lines]

    def read() -> Any:
        return readers.JsonlReader(str(shards))

    def write_to(name: str) -> Any:
        return writers.JsonlWriter(work(name), compression=None)

    tasks, exact = len(list(shards.iterdir())), ExactDedupConfig(text_of)
    task(tasks, read(), dedup.ExactDedupSignature(work("exact"), exact))
    task(1, dedup.ExactFindDedups(work("exact"), work("found"), exact))
    task(tasks, read(), dedup.ExactDedupFilter(work("found"), exact), write_to("exact-kept"))
    config = minhash_config(near)
    task(tasks, read(), dedup.MinhashDedupSignature(work("near"), config, SeparatedWords()))
    task(near.num_buckets, dedup.MinhashDedupBuckets(work("near"), work("pairs"), config=config))
    task(1, dedup.MinhashDedupCluster(work("pairs"), work("remove"), config))
    task(tasks, read(), dedup.MinhashDedupFilter(work("remove")), write_to("near-kept"))
    return texts_in("exact-kept"), texts_in("near-kept")


def test_deduplication_keeps_what_datatrove_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datatrove.utils.hashes import xxhash as hashes

    # datatrove gives text to xxhash, which takes bytes only from version 4.
    original = hashes.xxhash.xxh64_intdigest
    monkeypatch.setattr(
        hashes, "xxhash64", lambda data: original(data.encode() if isinstance(data, str) else data)
    )
    random_state = random.Random(2)
    texts = passages(60)[:250]
    texts += texts[:40] + [edited(text, 0.05, ["a", "the"], random_state) for text in texts[:90]]
    random_state.shuffle(texts)
    near = {"step": "minhash_dedup", "n_grams": 3, "num_buckets": 6, "hashes_per_bucket": 4}
    file = write(tmp_path / "in.jsonl", texts)
    exact_kept, _ = run(tmp_path, file, {"step": "exact_dedup"}, name="exact")
    kept, report = run(tmp_path, file, near)
    assert report["steps"][0]["removed"] > 70
    # The same division, so that both see the same pairs in the same order.
    job = json.loads((tmp_path / "out.work/job.json").read_bytes())
    starts = [shard[0][1] - 1 for shard in job["shards"]]
    assert len(starts) > 1
    shards, hand = tmp_path / "shards", tmp_path / "hand"
    shards.mkdir()
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], len(texts)], strict=True)):
        write(shards / f"{number:05d}.jsonl", texts[start:stop])
    hand_exact, hand_near = by_hand(hand, shards, steps_of(near)[0])
    assert [text for text, _ in kept] == hand_near
    assert sorted(text for text, _ in exact_kept) == sorted(hand_exact)


def test_of_exact_duplicates_the_first_is_kept(tmp_path: Path) -> None:
    texts = [f"document {number % 300}, which is {'long ' * 100}" for number in range(900)]
    file = write(tmp_path / "in.jsonl", texts)
    kept, _ = run(tmp_path, file, {"step": "exact_dedup"})
    assert [line for _, line in kept] == list(range(1, 301))
    again, _ = run(
        tmp_path,
        file,
        {"step": "exact_dedup"},
        name="whole",
        options=replace(OPTIONS, shard_bytes=10**9),
    )
    assert again == kept


@pytest.mark.parametrize("name", ["exp[1]", "what*?", "a::b{c}"])
def test_deduplication_works_in_a_directory_of_any_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    file = write(
        folder / "in.jsonl", [f"document {number % 5} of a few words" for number in range(40)]
    )
    options = replace(OPTIONS, shard_bytes=500)
    kept, report = run(folder, file, {"step": "exact_dedup"}, name="exact", options=options)
    assert [line for _, line in kept] == [1, 2, 3, 4, 5]
    assert report["steps"][0]["duplicates"]["clusters"] == 5
    near = {"step": "minhash_dedup", "n_grams": 2, "num_buckets": 4}
    kept, report = run(folder, file, near, name="near", options=options)
    assert len(kept) == 1
    assert report["steps"][0]["duplicates"]["largest"] == 40


def test_a_comparison_that_does_not_see_all_signatures_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datatrove.io import DataFolder

    original = DataFolder.list_files
    monkeypatch.setattr(
        DataFolder,
        "list_files",
        lambda folder, *args, **options: original(folder, *args, **options)[1:],
    )
    file = write(tmp_path / "in.jsonl", passages(40)[:20])
    for step in ("exact_dedup", "minhash_dedup"):
        with pytest.raises(WorkspaceError, match=r"signatures shows 0 of 1 files"):
            run(tmp_path, file, {"step": step}, name=step)


def test_a_task_may_open_a_file_of_each_shard(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft // 2, hard))
    try:
        run(tmp_path, write(tmp_path / "in.jsonl", ["text"]), {"step": "pii"})
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def write_model(path: Path) -> Path:
    """Write a fastText model by its layout, because training it ends with NaN at times."""
    words = {"the": "en", "of": "en", "with": "en", "die": "de", "der": "de", "leute": "de"}
    labels = ("en", "de")
    magic, version, supervised, softmax, size = 793_712_314, 12, 3, 3, len(labels)
    # dim, ws, epoch, minCount, neg, wordNgrams, loss, model, bucket, minn, maxn, lrUpdateRate, t
    content = struct.pack("<2i", magic, version)
    content += struct.pack("<12id", size, 5, 1, 1, 5, 1, softmax, supervised, 0, 0, 0, 100, 1e-4)
    content += struct.pack("<3i2q", len(words) + size, len(words), size, len(words), -1)
    for kind, names in enumerate((words, [f"__label__{label}" for label in labels])):
        content += b"".join(name.encode() + struct.pack("<xqb", 10, kind) for name in names)
    vectors = [[float(label == each) for each in labels] for label in words.values()]
    for matrix in (vectors, [[8.0, 0.0], [0.0, 8.0]]):
        content += struct.pack("<?2q", False, len(matrix), size)
        content += b"".join(struct.pack(f"<{size}f", *row) for row in matrix)
    path.write_bytes(content)
    return path


def test_languages_are_identified_with_the_given_model(tmp_path: Path) -> None:
    pytest.importorskip("fasttext", reason="it has no wheel for this Python")
    model = write_model(tmp_path / "lid.bin")
    texts = ["the people of that town\nhave been with us", "die leute der stadt"] * 3
    step = {"step": "language_id", "model": str(model), "languages": ["en"]}
    kept, report = run(tmp_path, write(tmp_path / "in.jsonl", texts), step)
    block = filters.LanguageFilter(["en"])
    block.model = lid = FT176LID(["en"])
    from fasttext.FastText import _FastText

    lid._model = _FastText(str(model))
    assert kept == direct(block, texts)
    assert [line for _, line in kept] == [1, 3, 5]
    assert report["languages"] == {"read": {"de": 3, "en": 3}, "kept": {"en": 3}}
    assert report["steps"][0]["reasons"] == {"de": 3}
    assert "| de | 3 | 0 |" in report_text(report)
    before = fingerprint(steps_of(step))
    model.write_bytes(b"another")
    assert fingerprint(steps_of(step)) != before
    with pytest.raises(DataFormatError, match=r"lid\.bin is no fastText model"):
        check_steps(steps_of(step))


def test_languages_are_counted_over_a_deduplication(tmp_path: Path) -> None:
    pytest.importorskip("fasttext", reason="it has no wheel for this Python")
    model = write_model(tmp_path / "lid.bin")
    step = {"step": "language_id", "model": str(model), "languages": ["en", "de"]}
    texts = ["the people of that town\nhave been with us", "die leute der stadt"] * 3
    file = write(tmp_path / "in.jsonl", [{"text": text, "language": "x"} for text in texts])
    _, report = run(tmp_path, file, step, {"step": "exact_dedup"})
    assert report["languages"] == {"read": {"de": 3, "en": 3}, "kept": {"en": 1, "de": 1}}
    path = functions(tmp_path)
    path.write_text("def every(document): return True")
    _, report = run(tmp_path, file, {"step": "python", "function": f"{path}:every"}, name="none")
    assert report["languages"] == {"read": {}, "kept": {}}


def test_a_model_that_cannot_be_downloaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FT176LID, "MODEL_URL", str(tmp_path / "missing.bin"))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(DownloadError, match=r"downloaded from .*missing\.bin .* as model"):
        stage.find_models(steps_of({"step": "language_id"}))


def test_urls_are_compared_with_the_lists(tmp_path: Path) -> None:
    domains, words = tmp_path / "domains.txt", tmp_path / "words.txt"
    entries = "bad.org\n# also bad\n\nsub.fine.org\n"
    domains.write_text(entries, encoding="utf-8-sig")  # as Windows' editor saves it
    words.write_text("casino\n", encoding="utf-8")
    urls = [
        "https://www.bad.org/x",
        "https://fine.org/",
        "https://sub.fine.org/",
        "https://b.co.uk/casino/1",
        "https://b.co.uk/cas",
    ]
    step = {
        "step": "url",
        "use_integrated_lists": False,
        "extra_domains": str(domains),
        "banned_words": str(words),
    }
    rows = [{"text": f"text {url}", "url": url} for url in urls]
    kept, report = run(tmp_path, write(tmp_path / "in.jsonl", rows), step)
    assert [line for _, line in kept] == [2, 5]
    assert report["steps"][0]["reasons"] == {"domain": 1, "subdomain": 1, "hard_blacklisted": 1}
    key = fingerprint(steps_of(step))
    domains.write_text(entries, encoding="utf-8")
    assert fingerprint(steps_of(step)) == key
    with pytest.raises(DataFormatError, match="no URL under 'address'; its other fields are url"):
        run(tmp_path, tmp_path / "in.jsonl", step | {"field": "address"}, name="other")
    for content, message in {
        "casino\nказино\n": "words.txt, banned_words .* 'казино', of which no letter a-z or digit",
        b"\xff": "words.txt, banned_words of the step url in data.curate, is not UTF-8",
    }.items():
        words.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(DataFormatError, match=message):
            check_steps(steps_of(step))


FUNCTIONS = """
import os, signal
from functools import cache
from pathlib import Path
HERE = Path(__file__).parent

def choose(document):
    if document["n"] % 3 == 0:
        return False
    return {**document, "text": document["text"].upper()} if document["n"] % 3 == 1 else True

def bad(document):
    return None

def fails(document):
    return document["missing"]

def leaves(document):
    raise SystemExit(0)

@cache
def decorated(document):
    return True

def deadly(document):
    for name, victim in (("worker", os.getpid()), ("parent", os.getppid())):
        if document["n"] == 700 and (HERE / name).exists():
            (HERE / name).unlink()
            os.kill(victim, signal.SIGKILL)
            signal.pause()
    return document["n"] % 2 == 0
"""


def functions(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS, encoding="utf-8")
    return path


def test_a_function_keeps_removes_and_changes_documents(tmp_path: Path) -> None:
    path = functions(tmp_path)
    rows = [{"text": f"text {number}", "n": number} for number in range(9)]
    file = write(tmp_path / "in.jsonl", rows)
    with file.open("a", encoding="utf-8") as lines:
        lines.write('{"text": "text 10", "n": 10, "x": NaN}\n')  # only Python's json reads it
    kept, report = run(tmp_path, file, {"step": "python", "function": f"{path}:choose"})
    changed = [1, 4, 7, 10]
    assert [text for text, _ in kept] == [
        f"TEXT {number}" if number in changed else f"text {number}"
        for number in (1, 2, 4, 5, 7, 8, 10)
    ]
    assert [line for _, line in kept] == [2, 3, 5, 6, 8, 9, 10]
    assert (report["steps"][0]["removed"], report["steps"][0]["changed"]) == (3, 4)
    for name, message in {
        "bad": "returned None for .*in.jsonl:1: return True, False, or a dictionary",
        "fails": "fails failed for .*in.jsonl:1 with KeyError",
        "leaves": "leaves failed for .*in.jsonl:1 with SystemExit",
        "missing": "missing cannot be loaded",
    }.items():
        with pytest.raises((DataFormatError, ConfigError), match=message):
            run(tmp_path, file, {"step": "python", "function": f"{path}:{name}"}, name=name)
    steps = [
        steps_of({"step": "python", "function": f"{path}:{name}"})
        for name in ("choose", "decorated")
    ]
    before = [fingerprint(step) for step in steps]
    path.write_text(FUNCTIONS + "\n", encoding="utf-8")
    for step, keys in zip(steps, before, strict=True):
        assert fingerprint(step) != keys


def test_bad_lines_stop_the_stage_or_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"text": "one"}\nnonsense\n{"text": "two", "x": NaN}\n', encoding="utf-8")
    with pytest.raises(DataFormatError, match=r"in\.jsonl:2 is not JSON"):
        run(tmp_path, file, {"step": "pii"})
    options = replace(OPTIONS, on_bad_line="skip")
    kept, report = run(tmp_path, file, {"step": "pii"}, name="skip", options=options)
    assert kept == [("one", 1), ("two", 3)]
    assert report["skipped_lines"] == 1


def test_a_field_with_half_a_surrogate_pair_is_kept_between_phases(tmp_path: Path) -> None:
    rows = [{"text": text, "url": "http://a.org/1", "title": "\ud83d"} for text in ("a", "b", "a")]
    url = {"step": "url", "use_integrated_lists": False}
    kept, _ = run(tmp_path, write(tmp_path / "in.jsonl", rows), url, {"step": "exact_dedup"})
    assert kept == [("a", 1), ("b", 2)]


def test_rows_of_parquet_files_have_their_fields_and_numbers(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = functions(tmp_path)
    table = pa.table({"text": [f"text {number}" for number in range(40)], "n": list(range(40))})
    file = tmp_path / "in.parquet"
    parquet.write_table(table, file, row_group_size=7)
    options = replace(OPTIONS, shard_bytes=100)
    chosen = [number for number in range(40) if number % 3]
    function = {"step": "python", "function": f"{path}:choose"}
    kept, _ = run(tmp_path, file, {"step": "exact_dedup"}, function, options=options)
    assert [line - 1 for _, line in kept] == chosen
    kept, _ = run(tmp_path, file, {"step": "exact_dedup"}, name="text", options=options)
    assert [line for _, line in kept] == list(range(1, 41))


def test_rows_that_are_null_or_not_utf_8_are_bad_lines(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    def column(*values: bytes | None) -> Any:
        return pa.Array.from_buffers(pa.string(), len(values), pa.array(values).buffers())

    texts = column(b"one", b"\xff", None, b"four", b"five")
    others = column(None, b"b", b"c", b"\xe4", b"e")
    file = tmp_path / "in.parquet"
    parquet.write_table(pa.table({"other": others, "text": texts}), file)
    every = functions(tmp_path)
    every.write_text("def every(document): return True")
    for steps, kept_rows in (
        ([{"step": "pii"}], [("one", 1), ("four", 4), ("five", 5)]),
        ([{"step": "python", "function": f"{every}:every"}], [("one", 1), ("five", 5)]),
    ):
        name = steps[0]["step"]
        with pytest.raises(DataFormatError, match=r"parquet row 2 is not UTF-8 under 'text' \("):
            run(tmp_path, file, *steps, name=name)
        options = replace(OPTIONS, on_bad_line="skip")
        kept, report = run(tmp_path, file, *steps, name=f"skip-{name}", options=options)
        assert kept == kept_rows
        assert report["skipped_lines"] == 5 - len(kept_rows)


def test_fields_of_the_source_do_not_replace_reasons(tmp_path: Path) -> None:
    path = functions(tmp_path)
    rows = [{"text": "text", "n": number, "filter_reason": "mine"} for number in range(3)]
    file = write(tmp_path / "in.jsonl", [*rows, {"text": "a", "n": 7, "filter_reason": "mine"}])
    function = {"step": "python", "function": f"{path}:choose"}
    _, report = run(tmp_path, file, {"step": "exact_dedup"}, function)
    assert [row["reasons"] for row in report["steps"]] == [{"duplicate": 2}, {"false": 1}]


def test_a_document_of_the_limit_is_kept_and_read_again(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    file = tmp_path / "in.parquet"
    parquet.write_table(pa.table({"text": ["\x01" * 999 + "a", "b"]}), file)
    options = replace(OPTIONS, document_bytes=1000)
    kept, _ = run(tmp_path, file, {"step": "pii"}, options=options)
    again = [
        text
        for block in read_blocks(segments(tmp_path / "out"), 100, 1000)
        for text in block.texts()[0]
    ]
    assert again == [text for text, _ in kept] == ["\x01" * 999 + "a", "b"]
    with pytest.raises(DataFormatError, match=r"jsonl:1 is a document of 1,000 bytes, over the"):
        list(read_blocks(segments(tmp_path / "out"), 100, 999))
    path = functions(tmp_path)
    path.write_text("def longer(document): return {'text': document['text'] + 'c'}")
    step = {"step": "python", "function": f"{path}:longer"}
    with pytest.raises(DataFormatError, match=r"parquet:1 is a document of 1,001 bytes, over the"):
        run(tmp_path, file, step, name="longer", options=options)


def test_a_corpus_of_which_nothing_is_kept_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", ["short", "also short"])
    with pytest.raises(DataFormatError, match="keeps none of 2 documents; 1 gopher_quality remo"):
        run(tmp_path, file, {"step": "gopher_quality"})
    for step in ("pii", "exact_dedup", "minhash_dedup"):
        with pytest.raises(DataFormatError, match=r"in\.jsonl has no documents to curate"):
            run(tmp_path, write(file, []), {"step": step}, name=step)
    file.write_text("no JSON\n" * 3, encoding="utf-8")
    options = replace(OPTIONS, on_bad_line="skip")
    with pytest.raises(DataFormatError, match="no documents to curate: all 3 lines were skipped: "):
        run(tmp_path, file, {"step": "pii"}, name="skipped", options=options)


def test_a_curation_that_an_earlier_version_began_continues(tmp_path: Path) -> None:
    parts = jsonl_segments([write(tmp_path / "in.jsonl", ["one", "two"])], "text")
    options, work = replace(OPTIONS, on_bad_line="skip"), tmp_path / "work"
    work.mkdir()

    def prepared() -> Job:
        return Job.prepare(work, parts, steps_of({"step": "exact_dedup"}), {}, options, named=False)

    prepared()
    job = json.loads((work / "job.json").read_bytes())
    del job["on_bad_line"]
    (work / "job.json").write_text(json.dumps(job | {"skip_bad_lines": True}))
    (work / "phases").mkdir()
    assert prepared().on_bad_line == "skip"
    assert (work / "phases").exists()


def test_killed_anywhere_the_stage_continues_with_the_shards_that_are_done(
    tmp_path: Path,
) -> None:
    path = functions(tmp_path)
    texts = passages(40)[:300]
    rows = [{"text": f"{text} {n % 50}", "n": n} for n, text in enumerate((texts * 3)[:900])]
    file = write(tmp_path / "in.jsonl", rows)
    steps = (
        {"step": "python", "function": f"{path}:deadly"},
        {"step": "exact_dedup"},
        {"step": "minhash_dedup", "num_buckets": 4},
        {"step": "pii"},
    )
    expected = run(
        tmp_path, file, *steps, name="whole", options=replace(OPTIONS, shard_bytes=60000)
    )

    (tmp_path / "steps.yaml").write_text(json.dumps(steps), encoding="utf-8")
    (tmp_path / "parent").touch()
    program = (
        "import sys; from pathlib import Path; from tests.corpus import test_curate as t; "
        "t.run_again(Path(sys.argv[1]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], timeout=HANG, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    receipts = {
        receipt: receipt.stat().st_mtime_ns
        for receipt in (tmp_path / "out.work/phases/pass-0").glob("0*.json")
    }
    assert receipts
    assert not (tmp_path / "out/report.json").exists()

    (tmp_path / "worker").touch()
    with pytest.raises(WorkerLostError, match="the tasks that are done are kept"):
        run_again(tmp_path)
    assert run_again(tmp_path) == expected
    assert all(receipt.stat().st_mtime_ns == time for receipt, time in receipts.items())


def run_again(tmp_path: Path) -> Any:
    """Run the steps of a directory with two processes, continuing earlier attempts."""
    if (tmp_path / "out").exists():
        os.rmdir(tmp_path / "out")
    steps = json.loads((tmp_path / "steps.yaml").read_text(encoding="utf-8"))
    options = replace(OPTIONS, shard_bytes=60_000, workers=2)
    return run(tmp_path, tmp_path / "in.jsonl", *steps, options=options)


def test_a_receipt_whose_file_is_damaged_does_not_count(tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", passages(40)[:100])
    kept, _ = run(tmp_path, file, {"step": "pii"})
    (tmp_path / "out.work/documents/documents-00000.jsonl").write_bytes(b"cut")
    (tmp_path / "out.work/phases/pass-0/done.json").unlink()
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    os.rmdir(tmp_path / "out")
    assert run(tmp_path, file, {"step": "pii"})[0] == kept


def test_an_attempt_that_is_discarded_loses_its_job_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "in.jsonl", ["one", "two"])
    run(tmp_path, file, {"step": "pii"})
    work = tmp_path / "out.work"
    left: list[bool] = []

    def killed(path: Path) -> None:
        left.append((work / "job.json").exists())
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    glob = Path.glob  # in the worst order, job.json last
    monkeypatch.setattr(Path, "glob", lambda *values: sorted(glob(*values), key=Path.is_file))
    steps = steps_of({"step": "exact_dedup"})
    with pytest.raises(KeyboardInterrupt):
        Job.prepare(work, jsonl_segments([file], "text"), steps, {}, OPTIONS, named=False)
    assert left == [False]


def test_a_file_that_changes_while_it_is_curated_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "in.jsonl", ["one", "two"])
    for name in ("corpus", "out"):
        (tmp_path / name).mkdir()
    collect(JsonlSource(kind="jsonl", files=(str(file),)), tmp_path / "corpus")
    original = stage.curate_segments

    def curate_and_overwrite(*arguments: Any, **options: Any) -> dict[str, Any]:
        counts = original(*arguments, **options)
        write(file, ["two", "one"])
        os.utime(file, (1, 1))
        return counts

    monkeypatch.setattr(stage, "curate_segments", curate_and_overwrite)
    work = tmp_path / "work"
    with pytest.raises(DataFormatError, match=r"in\.jsonl has changed since it was collected"):
        curate_corpus(
            tmp_path / "corpus", tmp_path / "out", work, steps_of({"step": "pii"}), OPTIONS
        )
    assert not (work / "job.json").exists()


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV])
def test_documents_are_copied_where_they_cannot_be_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code), str(source), None, str(target))

    monkeypatch.setattr(os, "link", refuse)
    file = write(tmp_path / "in.jsonl", ["one", "two"])
    kept, _ = run(tmp_path, file, {"step": "pii"})
    assert [text for text, _ in kept] == ["one", "two"]


def test_phases_end_at_deduplications() -> None:
    steps = steps_of(
        {"step": "exact_dedup"}, {"step": "pii"}, {"step": "minhash_dedup", "num_buckets": 3}
    )
    phases = plan_phases(steps, 5)
    assert [(phase.name, phase.tasks) for phase in phases] == [
        ("pass-0", 5),
        ("find-0", 5),
        ("pass-1", 5),
        ("buckets-2", 3),
        ("cluster-2", 1),
        ("pass-2", 5),
    ]
    assert [phase.writes for phase in phases if phase.kind == "documents"] == [
        None,
        "documents-before-2",
        "documents",
    ]
