"""Cleaning removes what nobody needs, and nothing else."""

import fcntl
import json
import os
import time
from pathlib import Path

from megacore.artifact import StageKey, Workspace, build_artifact, lock
from megacore.artifact.clean import old_artifacts, old_downloads, remove, stale_temporaries
from megacore.artifact.workspace import DOWNLOADS

DAY = 86400


def write_one(directory: Path) -> dict[str, int]:
    (directory / "file").write_text("x" * 100)
    return {}


def age(path: Path, days: float) -> None:
    then = time.time() - days * DAY
    os.utime(path, (then, then))


def test_temporaries_of_the_dead_go_and_locked_ones_stay(tmp_path: Path) -> None:
    workspace = Workspace.of(tmp_path)
    folder = workspace.folder("tokenize")
    folder.mkdir()
    dead, alive = folder / "aaaa.tmp-1", folder / "bbbb.tmp-2"
    dead.mkdir()
    alive.mkdir()
    saving = workspace.folder("train") / "cccc" / "checkpoints" / "iter_0000010.tmp-0"
    saving.mkdir(parents=True)
    with lock(folder / "bbbb"):
        items = stale_temporaries(workspace)
        assert [item.path for item in items] == [dead, saving]
        remove(items)
    assert alive.exists()
    assert not dead.exists()
    assert not saving.exists()
    assert saving.parent.exists()


def test_old_artifacts_go_unless_something_newer_or_trained_needs_them(tmp_path: Path) -> None:
    workspace = Workspace.of(tmp_path)
    corpus, _ = build_artifact(
        workspace.folder("collect"), StageKey.of("collect", 1, {"n": 1}), write_one
    )
    used, _ = build_artifact(
        workspace.folder("tokenize"), StageKey.of("tokenize", 1, {}, corpus=corpus), write_one
    )
    unused, _ = build_artifact(
        workspace.folder("collect"), StageKey.of("collect", 1, {"n": 2}), write_one
    )
    trained, _ = build_artifact(
        workspace.folder("train"), StageKey.of("train", 1, {}, tokens=used), write_one
    )
    for artifact in (corpus, used, unused, trained):
        age(artifact.directory, 30)
    items = old_artifacts(workspace, 7)
    assert [item.path for item in items] == [unused.directory]
    assert items[0].size > 100
    remove(items)
    assert not unused.directory.exists()
    assert old_artifacts(workspace, 60) == []


def test_what_an_unfinished_training_reads_stays(tmp_path: Path) -> None:
    workspace = Workspace.of(tmp_path)
    made = {
        stage: build_artifact(workspace.folder(stage), StageKey.of(stage, 1, {}), write_one)[0]
        for stage in ("tokenizer", "tokenize", "index")
    }
    for artifact in made.values():
        age(artifact.directory, 30)
    run = workspace.folder("train") / "feed"
    run.mkdir(parents=True)
    job = {
        "token_prefixes": [str(made["tokenize"].directory / "tokens_text_document")],
        "index_directory": made["index"].path,
        "tokenizer_directory": made["tokenizer"].path,
    }
    (run / "run.json").write_text(json.dumps(job))
    assert old_artifacts(workspace, 7) == []
    (run / "run.json").unlink()
    assert len(old_artifacts(workspace, 7)) == 3


def test_old_downloads_go_unless_one_is_under_way(tmp_path: Path) -> None:
    workspace = Workspace.of(tmp_path)
    places = [
        workspace.folder("collect") / DOWNLOADS / name for name in ("fresh", "old", "under-way")
    ]
    for place in places:
        place.mkdir(parents=True)
        for name in ("part.jsonl", ".part.jsonl.lock"):
            (place / name).write_text("x")
            age(place / name, 0 if place.name == "fresh" else 30)
    with open(places[2] / ".part.jsonl.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        items = old_downloads(workspace, 7)
    assert [item.path for item in items] == [places[1]]
    remove(items)
    assert [place.exists() for place in places] == [True, False, True]


def test_old_downloads_of_fine_tunings_go(tmp_path: Path) -> None:
    workspace = Workspace.of(tmp_path)
    models, rows = (workspace.folder(stage) / DOWNLOADS for stage in ("pretrained", "dataset"))
    old, fresh, held = models / "models--some--bert", models / "bert-1-17", models / "bert-2-18"
    table = rows / "datasets" / "json" / "default-0123"
    for place in (old / "blobs", fresh, held, table / "0.0.0"):
        place.mkdir(parents=True)
        (place / "file").write_text("xyz")
    (old / "link").symlink_to(old / "blobs" / "file")
    for path in (old, held, table, *old.rglob("*"), *held.rglob("*"), *table.rglob("*")):
        os.utime(path, (time.time() - 30 * 86400,) * 2, follow_symlinks=False)
    (held.parent / f".{held.name}.lock").touch()
    with open(held.parent / f".{held.name}.lock") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        items = old_downloads(workspace, 7)
    assert [item.path for item in items] == [old, table]
    assert items[1].size == 3
    assert {item.path for item in old_downloads(workspace, 0)} == {old, held, table}, (
        "an hour is left to a download"
    )
    remove(items)
    assert [place.exists() for place in (old, fresh, held, table)] == [False, True, True, False]


def test_what_an_unfinished_fine_tuning_reads_stays(tmp_path: Path) -> None:
    workspace = Workspace.of(tmp_path)
    model, _ = build_artifact(
        workspace.folder("pretrained"), StageKey.of("pretrained", 1, {}), write_one
    )
    samples, _ = build_artifact(
        workspace.folder("examples"), StageKey.of("examples", 1, {}, pretrained=model), write_one
    )
    unread, _ = build_artifact(
        workspace.folder("examples"), StageKey.of("examples", 2, {}), write_one
    )
    directory = workspace.folder("finetune") / "abcd"
    directory.mkdir(parents=True)
    job = {"examples_directory": samples.path, "pretrained_directory": model.path}
    (directory / "run.json").write_text(json.dumps(job), encoding="utf-8")
    for artifact in (model, samples, unread):
        age(artifact.directory, 30)
    assert [item.path for item in old_artifacts(workspace, 7)] == [unread.directory]
    half = directory / "best" / "iter_0000010.tmp-0"
    half.mkdir(parents=True)
    assert [item.path for item in stale_temporaries(workspace)] == [half]
