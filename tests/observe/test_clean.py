"""Tests of cleaning: only what no run needs is removed."""

import fcntl
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from megacore.artifact import Artifact, StageKey, Workspace, build_artifact, lock
from megacore.artifact.manifest import MANIFEST_NAME
from megacore.artifact.workspace import DOWNLOADS
from megacore.checkpoint.format import FileRecord, Marker
from megacore.checkpoint.retain import unnamed_saves
from megacore.errors import WorkspaceError
from megacore.observe import clean
from megacore.observe.clean import old_artifacts, old_downloads, remove, stale_temporaries
from megacore.observe.heartbeat import ENDED, Heartbeat, beat_path
from megacore.paths import glob

DAY = 86400


def write_file(directory: Path) -> dict[str, int]:
    (directory / "file").write_text("x" * 100)
    return {}


def set_age(path: Path, days: float) -> None:
    changed = time.time() - days * DAY
    os.utime(path, (changed, changed))


def test_temporaries_are_removed_unless_their_artifact_is_locked(tmp_path: Path) -> None:
    workspace = Workspace.of(tmp_path)
    folder = workspace.folder("tokenize")
    folder.mkdir()
    dead, alive = folder / "aaaa.tmp-1", folder / "bbbb.tmp-2"
    dead.mkdir()
    alive.mkdir()
    saving = workspace.folder("train") / "cccc" / "checkpoints" / "iter_0000010.tmp-0"
    saving.mkdir(parents=True)
    with lock(folder / "bbbb"):
        items = stale_temporaries(workspace, unnamed_saves)
        assert [item.path for item in items] == [dead, saving]
        remove(items)
    assert alive.exists()
    assert not dead.exists()
    assert not saving.exists()
    assert saving.parent.exists()


@pytest.mark.parametrize("place", [("train", "checkpoints"), ("finetune", "best")])
def test_a_complete_save_that_the_next_start_names_is_retained(
    tmp_path: Path, place: tuple[str, str]
) -> None:
    workspace = Workspace.of(tmp_path)
    root = workspace.folder(place[0]) / "cccc" / place[1]
    complete, replaced = root / "iter_0000010.tmp-0000000f", root / "iter_0000010.tmp-1-replaced"
    for save in (complete, replaced):
        save.mkdir(parents=True)
        write_file(save)
        Marker(10, None, {"file": FileRecord.of(save / "file")}).write(save)
    items = stale_temporaries(workspace, unnamed_saves)
    assert [item.path for item in items] == [replaced]
    (complete / "file").unlink()
    assert len(stale_temporaries(workspace, unnamed_saves)) == 2


def test_shards_are_removed_once_their_token_files_are_complete(tmp_path: Path) -> None:
    workspace = Workspace.of(tmp_path)
    folder = workspace.folder("tokenize")
    corpus, _ = build_artifact(
        workspace.folder("collect"), StageKey.of("collect", 1, {}), write_file
    )
    shards = [
        build_artifact(
            folder,
            StageKey.of("tokenize-shard", 1, {"eod": eod, "segments": [part]}, corpus=corpus),
            write_file,
        )[0].directory
        for eod in (True, False)
        for part in (0, 1)
    ]
    assert stale_temporaries(workspace, unnamed_saves) == []
    build_artifact(folder, StageKey.of("tokenize", 1, {"eod": True}, corpus=corpus), write_file)
    with lock(shards[1]):  # a flow deletes it now
        assert [item.path for item in stale_temporaries(workspace, unnamed_saves)] == shards[:1]
    remove(stale_temporaries(workspace, unnamed_saves))
    assert [shard.exists() for shard in shards] == [False, False, True, True]


def test_old_artifacts_are_removed_unless_a_trained_model_needs_them(tmp_path: Path) -> None:
    workspace = Workspace.of(tmp_path)
    corpus, _ = build_artifact(
        workspace.folder("collect"), StageKey.of("collect", 1, {"n": 1}), write_file
    )
    used, _ = build_artifact(
        workspace.folder("tokenize"), StageKey.of("tokenize", 1, {}, corpus=corpus), write_file
    )
    unused, _ = build_artifact(
        workspace.folder("collect"), StageKey.of("collect", 1, {"n": 2}), write_file
    )
    trained, _ = build_artifact(
        workspace.folder("train"), StageKey.of("train", 1, {}, tokens=used), write_file
    )
    for artifact in (corpus, used, unused, trained):
        set_age(artifact.directory, 30)
    items = old_artifacts(workspace, 7)
    assert [item.path for item in items] == [unused.directory]
    assert items[0].size > 100
    remove(items)
    assert not unused.directory.exists()
    assert old_artifacts(workspace, 60) == []


def test_old_downloads_are_removed_unless_they_are_locked(tmp_path: Path) -> None:
    workspace = Workspace.of(tmp_path)
    places = [
        workspace.folder("collect") / DOWNLOADS / name for name in ("fresh", "old", "under-way")
    ]
    for place in places:
        place.mkdir(parents=True)
        for name in ("part.jsonl", ".part.jsonl.lock"):
            (place / name).write_text("x")
            set_age(place / name, 0 if place.name == "fresh" else 30)
    with open(places[2] / ".part.jsonl.lock") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        items = old_downloads(workspace, 7)
    assert [item.path for item in items] == [places[1]]
    remove(items)
    assert [place.exists() for place in places] == [True, False, True]


def test_old_downloads_of_fine_tuning_are_removed(tmp_path: Path) -> None:
    workspace = Workspace.of(tmp_path)
    models, rows = (workspace.folder(stage) / DOWNLOADS for stage in ("pretrained", "dataset"))
    old, fresh, locked = models / "models--some--bert", models / "bert-1-17", models / "bert-2-18"
    table = rows / "datasets" / "json" / "default-0123"
    for place in (old / "blobs", fresh, locked, table / "0.0.0"):
        place.mkdir(parents=True)
        (place / "file").write_text("xyz")
    (old / "link").symlink_to(old / "blobs" / "file")
    for path in (old, locked, table, *old.rglob("*"), *locked.rglob("*"), *table.rglob("*")):
        os.utime(path, (time.time() - 30 * 86400,) * 2, follow_symlinks=False)
    (locked.parent / f".{locked.name}.lock").touch()
    with open(locked.parent / f".{locked.name}.lock") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        items = old_downloads(workspace, 7)
    assert [item.path for item in items] == [old, table]
    assert items[1].size == 3
    assert {item.path for item in old_downloads(workspace, 0)} == {old, locked, table}, (
        "an hour is left to a download"
    )
    remove(items)
    assert [place.exists() for place in (old, fresh, locked, table)] == [False, True, True, False]


def test_inputs_of_an_unfinished_fine_tuning_are_retained(tmp_path: Path) -> None:
    workspace = Workspace.of(tmp_path)
    model, _ = build_artifact(
        workspace.folder("pretrained"), StageKey.of("pretrained", 1, {}), write_file
    )
    samples, _ = build_artifact(
        workspace.folder("examples"), StageKey.of("examples", 1, {}, pretrained=model), write_file
    )
    unread, _ = build_artifact(
        workspace.folder("examples"), StageKey.of("examples", 2, {}), write_file
    )
    directory = workspace.folder("finetune") / "abcd"
    directory.mkdir(parents=True)
    job = {"examples_directory": samples.path, "pretrained_directory": model.path}
    (directory / "run.json").write_text(json.dumps(job), encoding="utf-8")
    for artifact in (model, samples, unread):
        set_age(artifact.directory, 30)
    assert [item.path for item in old_artifacts(workspace, 7)] == [unread.directory]
    half = directory / "best" / "iter_0000010.tmp-0"
    half.mkdir(parents=True)
    assert [item.path for item in stale_temporaries(workspace, unnamed_saves)] == [half]


def _training(workspace: Workspace, reached: Path) -> dict[str, Artifact]:
    """Build old inputs of a training that is under way, and the job file with their paths."""
    artifacts = {
        stage: build_artifact(workspace.folder(stage), StageKey.of(stage, 1, {}), write_file)[0]
        for stage in ("tokenizer", "tokenize", "index")
    }
    for artifact in artifacts.values():
        set_age(artifact.directory, 30)
    run = workspace.folder("train") / "feed"
    run.mkdir(parents=True)
    paths = {
        stage: reached / artifact.directory.relative_to(workspace.root)
        for stage, artifact in artifacts.items()
    }
    job = {
        "token_prefixes": [str(paths["tokenize"] / "tokens_text_document")],
        "index_directory": str(paths["index"]),
        "tokenizer_directory": str(paths["tokenizer"]),
    }
    (run / "run.json").write_text(json.dumps(job))
    return artifacts


def test_inputs_are_retained_by_whatever_path_the_run_names_them(tmp_path: Path) -> None:
    workspace = Workspace.of(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    _training(workspace, tmp_path / "link")
    shutil.copytree(workspace.root, tmp_path / "copy", copy_function=shutil.copy2)
    for root in ("real", "link", "copy"):
        assert old_artifacts(Workspace.of(tmp_path / root), 7) == []
    (workspace.folder("train") / "feed" / "run.json").unlink()
    assert len(old_artifacts(workspace, 7)) == 3


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", r"cannot be read \("),
        (b"{", r"cannot be read \("),
        (b"\xff", r"cannot be read \("),
        (b"[]", "was not written by this version of megacore,"),
        (b"{}", "was not written by this version of megacore,"),
        (b'{"token_prefixes": 3}', "was not written by this version of megacore,"),
    ],
)
def test_a_damaged_job_file_stops_the_cleaning(tmp_path: Path, content: bytes, reason: str) -> None:
    workspace = Workspace.of(tmp_path)
    _training(workspace, tmp_path)
    job = workspace.folder("train") / "feed" / "run.json"
    job.write_bytes(content)
    with pytest.raises(WorkspaceError, match=rf"{job} {reason}.*nothing was removed"):
        old_artifacts(workspace, 7)


def test_a_damaged_manifest_stops_the_cleaning(tmp_path: Path) -> None:
    workspace = Workspace.of(tmp_path)
    artifacts = _training(workspace, tmp_path)
    manifest = artifacts["index"].directory / MANIFEST_NAME
    manifest.write_text(manifest.read_text()[:-20])
    with pytest.raises(WorkspaceError, match=rf"nothing was removed.*{manifest} is damaged"):
        old_artifacts(workspace, 7)


def test_links_are_not_followed(tmp_path: Path) -> None:
    workspace = Workspace.of(tmp_path / "mine")
    other = Workspace.of(tmp_path / "other")
    kept = []
    for stage in ("tokenize", "index"):
        artifact, _ = build_artifact(other.folder(stage), StageKey.of(stage, 1, {}), write_file)
        (other.folder(stage) / "aaaa.tmp-1").mkdir()
        set_age(artifact.directory, 30)
        kept.append(artifact.directory)
    workspace.folder("tokenize").symlink_to(other.folder("tokenize"))
    workspace.folder("index").mkdir()
    for path in other.folder("index").iterdir():
        (workspace.folder("index") / path.name).symlink_to(path)
    downloads = other.folder("collect") / DOWNLOADS
    (downloads / "old").mkdir(parents=True)
    (downloads / "old" / "part.jsonl").write_text("x")
    set_age(downloads / "old" / "part.jsonl", 30)
    workspace.folder("collect").symlink_to(other.folder("collect"))
    assert old_artifacts(workspace, 7) == []
    assert old_downloads(workspace, 7) == []
    assert stale_temporaries(workspace, unnamed_saves) == []
    assert [item.path for item in old_artifacts(other, 7)] == sorted(kept)


def test_an_artifact_that_is_used_after_the_listing_is_retained(tmp_path: Path) -> None:
    workspace = Workspace.of(tmp_path)
    keys = [StageKey.of("tokenize", 1, {"n": n}) for n in range(3)]
    folder = workspace.folder("tokenize")
    locked, used, unused = (build_artifact(folder, key, write_file)[0].directory for key in keys)
    for directory in (locked, used, unused):
        set_age(directory, 30)
    items = old_artifacts(workspace, 7)
    assert len(items) == 3
    build_artifact(folder, keys[1], write_file)  # a run finds it
    with lock(locked):
        removed = remove(items)
    assert [item.path for item in removed] == [unused]
    assert [directory.exists() for directory in (locked, used, unused)] == [True, True, False]


def test_what_another_process_removes_during_the_listing_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace.of(tmp_path)
    folder = workspace.folder("tokenize")
    first, second = (
        build_artifact(folder, StageKey.of("tokenize", 1, {"n": n}), write_file)[0].directory
        for n in range(2)
    )
    write_test = workspace.root / ".write-test-1"
    write_test.touch()
    for path in (first, second, write_test):
        set_age(path, 30)

    def remove_first(directory: Path, pattern: str) -> list[Path]:
        shutil.rmtree(first, ignore_errors=True)
        return list(directory.iterdir()) if directory != first else []

    def remove_temporary(directory: Path, pattern: str) -> list[Path]:
        paths = list(glob(directory, pattern))
        write_test.unlink(missing_ok=True)
        return paths

    monkeypatch.setattr(clean, "rglob", remove_first)
    assert [item.path for item in old_artifacts(workspace, 7)] == [second]
    monkeypatch.setattr(clean, "glob", remove_temporary)
    assert stale_temporaries(workspace, unnamed_saves) == []


def test_temporaries_of_a_rank_without_a_task_are_retained(tmp_path: Path) -> None:
    workspace = Workspace.of(tmp_path)
    run = workspace.folder("train") / "feed"
    saving = run / "checkpoints" / "iter_0000010.tmp-0"
    saving.mkdir(parents=True)
    (run / "exit").mkdir()
    heartbeat = Heartbeat(beat_path(run / "exit", 0))
    heartbeat.beat("step")
    assert stale_temporaries(workspace, unnamed_saves) == []
    heartbeat.beat(ENDED)
    assert [item.path for item in stale_temporaries(workspace, unnamed_saves)] == [saving]


def test_nothing_is_removed_while_an_artifact_is_built(tmp_path: Path) -> None:
    workspace = Workspace.of(tmp_path)
    corpus, _ = build_artifact(
        workspace.folder("collect"), StageKey.of("collect", 1, {}), write_file
    )
    set_age(corpus.directory, 30)
    folder, key = workspace.folder("tokenize"), StageKey.of("tokenize", 1, {}, corpus=corpus)

    def build(directory: Path) -> dict[str, int]:
        with pytest.raises(WorkspaceError, match=rf"{folder / key.key} is being built"):
            old_artifacts(workspace, 7)
        return write_file(directory)

    build_artifact(folder, key, build)
    assert old_artifacts(workspace, 7) == []


@pytest.mark.parametrize("extended", [False, True])
def test_nothing_is_removed_while_a_run_waits_for_its_start(tmp_path: Path, extended: bool) -> None:
    workspace = Workspace.of(tmp_path)
    _training(workspace, tmp_path)
    later, _ = build_artifact(workspace.folder("index"), StageKey.of("index", 2, {}), write_file)
    set_age(later.directory, 30)
    run = workspace.folder("train") / "feed"
    if extended:  # the job file is that of the earlier length
        (run / MANIFEST_NAME).write_text(json.dumps(_MANIFEST))
    else:
        (run / "run.json").unlink()
    refused = pytest.raises(WorkspaceError, match=rf"{run} waits for its start.*nothing was")
    with lock(run), refused:  # held while the run waits for the host's devices
        old_artifacts(workspace, 7)
    assert later.directory in [item.path for item in old_artifacts(workspace, 7)]


_MANIFEST = {
    "stage": "train",
    "version": 1,
    "key": "feed",
    "parameters": {},
    "inputs": {},
    "files": {},
    "counts": {},
    "duration": 1.0,
}
