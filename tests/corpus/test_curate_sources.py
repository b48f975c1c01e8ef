"""Of documents that several sources of a blend have, the first source keeps its own."""

import errno
import json
import os
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datatrove", reason="the extra curate is not installed")

from megacore.config.curate import CurateSteps
from megacore.config.validate import validated
from megacore.corpus import curate as stage
from megacore.corpus import curate_sources
from megacore.corpus.curate import curate_segments
from megacore.corpus.curate_report import report_text
from megacore.corpus.segments import Segment, jsonl_segments, segments
from megacore.errors import ConfigError
from megacore.paths import exists
from tests.corpus.test_curate import OPTIONS, edited, passages, write

Lines = list[int]


def curated(
    tmp_path: Path,
    texts: list[str],
    earlier: list[Path],
    *steps: dict[str, Any],
    name: str,
    shard_bytes: int = 15_000,
    workers: int = 1,
) -> tuple[Lines, dict[str, Any]]:
    """Return the numbers of the lines that are kept, from 0, and the report."""
    file = tmp_path / f"{name}.jsonl"
    if not file.exists():
        write(file, texts)
    output = tmp_path / name
    output.mkdir()
    curate_segments(
        jsonl_segments([file], "text"),
        output,
        tmp_path / f"{name}.work",
        validated(CurateSteps, {"curate": list(steps)}, "steps").curate,
        replace(OPTIONS, shard_bytes=shard_bytes, workers=workers),
        earlier=[segments(each) for each in earlier],
    )
    lines = [
        int(json.loads(line)["source"].rpartition(":")[2]) - 1
        for path in sorted(output.glob("documents-*.jsonl"))
        for line in path.read_bytes().splitlines()
    ]
    return lines, json.loads((output / "report.json").read_bytes())


def test_exact_duplicates_fall_to_the_first_source(tmp_path: Path) -> None:
    texts = passages(40)[:400]
    step = {"step": "exact_dedup", "across_sources": True}
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    kept, report = curated(tmp_path, texts[:200] + texts[:20], [], step, name="a")
    assert kept == list(range(200))
    # b has 50 documents of a, its own ones, and 10 of these again.
    in_b = texts[150:300] + texts[290:300]
    kept, report = curated(tmp_path, in_b, [a], step, name="b")
    assert kept == list(range(50, 150))
    assert report["steps"][0]["reasons"] == {"duplicate": 10, "duplicate of source 1": 50}
    # c has documents of both; of those that both kept before, the first source counts.
    in_c = texts[190:210] + texts[280:340] + texts[:5] * 2
    kept, report = curated(tmp_path, in_c, [a, b], step, name="c")
    assert kept == list(range(40, 80))
    row = report["steps"][0]
    assert row["reasons"] == {"duplicate of source 1": 20, "duplicate of source 2": 30}
    assert report["documents"] == {"read": 90, "kept": 40}
    assert "20 duplicate of source 1, 30 duplicate of source 2" in report_text(report)
    for size, workers in ((10**9, 1), (10_000, 2)):
        name = f"c-{workers}"
        again, other = curated(
            tmp_path, in_c, [a, b], step, name=name, shard_bytes=size, workers=workers
        )
        assert again == kept
        assert other["steps"][0]["reasons"] == row["reasons"]
    assert [len(list(each.glob("documents-*"))) > 1 for each in (a, b, c)] == [True] * 3


def test_near_duplicates_fall_to_earlier_sources_and_no_other_document_does(
    tmp_path: Path,
) -> None:
    random_state = random.Random(3)
    texts = passages(60)[:300]
    vocabulary = " ".join(texts).split()
    step = {"step": "minhash_dedup", "n_grams": 2, "num_buckets": 16, "hashes_per_bucket": 5}
    step |= {"across_sources": True}
    first, own = texts[:150], texts[150:]
    kept_in_a, _ = curated(tmp_path, first, [], step, name="a")
    planted = [edited(first[number], 0.03, vocabulary, random_state) for number in kept_in_a[:100]]
    alone, alone_report = curated(tmp_path, own, [], step, name="alone")
    kept, report = curated(tmp_path, own + planted, [tmp_path / "a"], step, name="b")
    reasons = report["steps"][0]["reasons"]
    found = 100 - sum(number >= len(own) for number in kept)
    assert found >= 95
    # Nothing else falls than what is like a document of a: of the own ones, hardly any.
    assert found <= reasons["duplicate of source 1"] <= found + 0.02 * len(own)
    missing = set(alone) - set(kept)
    assert len(missing) <= 0.02 * len(own)
    assert report["documents"]["read"] - report["documents"]["kept"] == sum(reasons.values())
    assert alone_report["steps"][0]["reasons"].keys() <= {"duplicate"}
    # All documents of a cluster with one of the first source fall, whichever datatrove would keep.
    copies = [edited(first[kept_in_a[0]], 0.01, ["a"], random_state) for _ in range(5)]
    kept, report = curated(tmp_path, [*copies, own[0]], [tmp_path / "a"], step, name="c")
    assert kept == [5]
    assert report["steps"][0]["reasons"] == {"duplicate of source 1": 5}


def test_a_comparison_continues_after_an_end_at_each_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = passages(60)[:120]
    steps = (
        {"step": "exact_dedup", "across_sources": True},
        {"step": "minhash_dedup", "num_buckets": 2, "across_sources": True},
    )
    curated(tmp_path, texts[:60], [], *steps, name="a")
    expected = curated(tmp_path, texts[40:], [tmp_path / "a"], *steps, name="whole")
    original, tasks = stage.run_task, list[str]()

    def once(work: Path, phase: str, rank: int) -> None:
        """Run a task, whose process ends behind it."""
        original(work, phase, rank)
        tasks.append(f"{phase} {rank}")
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, "run_task", once)
    result = None
    while result is None and len(tasks) < 100:
        with suppress(KeyboardInterrupt):
            result = curated(tmp_path, texts[40:], [tmp_path / "a"], *steps, name="again")
        if result is None:
            os.rmdir(tmp_path / "again")
    assert result is not None
    assert len(tasks) == len(set(tasks)) > 10
    assert sum(task.startswith("earlier-") for task in tasks) >= 2
    assert result[0] == expected[0]
    reasons = [row["reasons"] for row in result[1]["steps"]]
    assert reasons == [row["reasons"] for row in expected[1]["steps"]]
    assert reasons[0] == {"duplicate of source 1": 20}


@pytest.mark.parametrize("later", ["pii", "c4_quality"])
def test_text_must_not_change_after_a_comparison_with_other_sources(later: str) -> None:
    steps = [{"step": "exact_dedup", "across_sources": True}, {"step": later}]
    with pytest.raises(ConfigError, match=f"changes text by {later} after exact_dedup .* before"):
        validated(CurateSteps, {"curate": steps}, "steps")


def test_an_earlier_source_that_changes_starts_the_comparison_again(tmp_path: Path) -> None:
    from megacore.corpus.curate_job import Job

    parts = jsonl_segments([write(tmp_path / "in.jsonl", ["one", "two"])], "text")
    other = write(tmp_path / "other.jsonl", ["one"])
    steps = validated(
        CurateSteps, {"curate": [{"step": "exact_dedup", "across_sources": True}]}, "steps"
    ).curate

    def digest(*earlier: list[Segment]) -> str:
        work = tmp_path / "work"
        work.mkdir(exist_ok=True)
        Job.prepare(work, parts, steps, {}, OPTIONS, named=False, earlier=earlier)
        return str(json.loads((work / "job.json").read_bytes())["digest"])

    alone, with_other = digest(), digest([Segment(str(other), "text")])
    write(other, ["two"])
    os.utime(other, (1, 1))
    assert len({alone, with_other, digest([Segment(str(other), "text")])}) == 3


@pytest.mark.skipif(not exists("/dev/full"), reason="the system has no full device")
def test_a_disk_that_is_full_when_few_duplicates_are_written_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "00000.fallen").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as raised:
        curate_sources._write(tmp_path / "00000.c4_dup", [(3, 1)])
    assert raised.value.errno == errno.ENOSPC
