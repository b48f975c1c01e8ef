"""What each host has or sees of a job's files, over real ssh and rsync between stand-ins for
machines."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from megacore.checkpoint.save import save_checkpoint
from tests.hosts import _jobs
from tests.hosts._rig import Rig

if shutil.which("rsync") is None:
    pytest.skip("files are copied by rsync, which is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def data(rig: Rig) -> Rig:
    """The hosts, prepared for one job.

    A had the data in its workspace, and all have it in the shared directory.
    """
    _jobs.write_data(rig.disk("a"))
    _jobs.write_data(rig.shared)
    (rig.disk("a") / "corpora").mkdir()
    (rig.disk("a") / "corpora" / "large.txt").write_text("not read by any rank")
    assert _jobs.prepare(rig, _jobs.job(rig, _jobs.config(rig), "first")) == ""
    return rig


def test_a_host_gets_what_it_lacks_and_nothing_else(data: Rig) -> None:
    for name in ("data", "index", "tokenizer"):
        assert _jobs.digests(data.disk("b") / name) == _jobs.digests(data.disk("a") / name)
    assert sorted(path.name for path in data.disk("b").iterdir()) == [
        "data",
        "index",
        "runs",
        "tokenizer",
    ]
    assert [path.name for path in (data.disk("b") / "runs" / "first").iterdir()] == ["run.json"]
    assert [path.name for path in (data.disk("a") / "runs" / "first").iterdir()] == ["run.json"]


def test_what_is_right_stays_and_what_is_damaged_is_replaced(data: Rig) -> None:
    made = _jobs.job(data, _jobs.config(data), "again")
    tokens, index = (
        data.disk("b") / name for name in ("data/tokens_text_document.bin", "index/maps")
    )
    kept = {path: path.stat().st_ino for path in index.iterdir()}
    content = bytearray(tokens.read_bytes())
    content[100] ^= 1
    tokens.write_bytes(content)  # the same size
    victim = sorted(kept)[0]
    victim.unlink()
    assert _jobs.prepare(data, made) == ""
    for name in ("data", "index"):
        assert _jobs.digests(data.disk("b") / name) == _jobs.digests(data.disk("a") / name)
    same = [path for path, inode in kept.items() if path != victim and path.stat().st_ino == inode]
    assert sorted(same) == sorted(set(kept) - {victim}), "linked, not copied again"
    tokens.write_bytes(content)
    entry = (data.disk("a") / "data/tokens_text_document.bin").stat()
    # damaged in a way that only its hash shows
    os.utime(tokens, ns=(entry.st_atime_ns, entry.st_mtime_ns))
    assert (
        _jobs.prepare(
            data,
            made.model_copy(update={"config": made.config.model_copy(update={"verify": "full"})}),
        )
        == ""
    )
    assert tokens.read_bytes() == (data.disk("a") / "data/tokens_text_document.bin").read_bytes()


def test_files_without_a_manifest_are_copied_one_by_one(data: Rig) -> None:
    plain = data.disk("a") / "plain"
    shutil.copytree(data.disk("a") / "data", plain)
    (plain / "manifest.json").unlink()
    (plain / "other.txt").write_text("no part of the job")
    prefix = str(data.workspace / "plain" / "tokens_text_document")
    made = _jobs.job(data, _jobs.config(data), "plain", token_prefixes=[prefix])
    assert _jobs.prepare(data, made) == ""
    names = ["tokens_text_document.bin", "tokens_text_document.idx"]
    assert sorted(path.name for path in (data.disk("b") / "plain").iterdir()) == names
    (data.disk("b") / "plain" / names[0]).write_bytes(b"other")
    assert _jobs.prepare(data, made) == ""
    assert (data.disk("b") / "plain" / names[0]).read_bytes() == (plain / names[0]).read_bytes()


def test_a_host_has_the_checkpoint_to_resume_from_and_no_other(data: Rig) -> None:
    made = _jobs.job(data, _jobs.config(data), "resumed")
    here, there = (data.disk(host) / "runs" / "resumed" / "checkpoints" for host in "ab")
    for iteration in (1, 2):
        save_checkpoint(here, iteration, {"model.a": torch.full((4,), float(iteration))}, {})
    assert _jobs.prepare(data, made) == ""
    assert [path.name for path in there.iterdir()] == ["iter_0000002"]
    assert _jobs.digests(there / "iter_0000002") == _jobs.digests(here / "iter_0000002")
    # The run went on; a crash left half a save; and b has started this run by itself once.
    save_checkpoint(here, 3, {"model.a": torch.full((4,), 3.0)}, {})
    save_checkpoint(there, 3, {"model.a": torch.full((4,), -3.0)}, {})
    save_checkpoint(there, 9, {"model.a": torch.full((4,), 9.0)}, {})
    (there / "iter_0000004.tmp-0123-rank1").mkdir()
    (there.parent / "exit").mkdir()
    (there.parent / "exit" / "rank_00001.json").write_text("{}")
    assert _jobs.prepare(data, made) == ""
    assert [path.name for path in there.iterdir()] == ["iter_0000003"]
    assert _jobs.digests(there / "iter_0000003") == _jobs.digests(here / "iter_0000003")
    assert sorted(path.name for path in (there.parent / "set-aside").iterdir()) == [
        "iter_0000003",
        "iter_0000009",
    ]
    assert not (there.parent / "exit").exists()
    # A damaged one here is no candidate.
    (here / "iter_0000003" / "state.json").write_text("[]")
    assert _jobs.prepare(data, made) == ""
    assert [path.name for path in there.iterdir()] == ["iter_0000002"]


def test_what_cannot_be_copied_is_said(data: Rig, tmp_path: Path) -> None:
    made = _jobs.job(data, _jobs.config(data), "refused")
    (data.disk("b") / "tokenizer").rename(data.disk("b") / "tokenizer-before")
    small = data.hosts["b"].directory / "workspace" / "tokenizer"
    small.write_text("a file in the way")
    assert (
        f"host b: {data.workspace / 'tokenizer'} is no directory (tokenizer): move it away"
        in _jobs.prepare(data, made)
    )
    small.unlink()
    backwards = _jobs.config(data, launch={"hostfile": str(data.hostfile(names=["b", "a"]))})
    said = _jobs.prepare(data, made.model_copy(update={"config": backwards}))
    assert "the first host is b, not this machine (a)" in said
    maps = data.disk("a") / "index" / "maps"
    maps.rename(maps.with_name("away"))
    assert "index maps" in _jobs.prepare(data, made)
    maps.with_name("away").rename(maps)


def test_a_full_disk_is_seen_before_anything_is_copied(data: Rig) -> None:
    large = data.disk("a") / "large"
    shutil.copytree(data.disk("a") / "data", large)
    (large / "manifest.json").unlink()
    prefix = str(data.workspace / "large" / "tokens_text_document")
    made = _jobs.job(data, _jobs.config(data), "large", token_prefixes=[prefix])
    target = str(data.workspace / "large")
    (data.disk("b") / "large").mkdir()
    mounted = data.run("b", ["mount", "-t", "tmpfs", "-o", "size=4k", "none", target])
    assert mounted.returncode == 0, mounted.stderr
    said = _jobs.prepare(data, made)
    assert data.run("b", ["ls", "-A", target]).stdout == ""
    assert data.run("b", ["umount", target]).returncode == 0
    assert f"host b: {target} has 0.00 GiB free and" in said


def test_rsync_that_is_missing_there_is_named(data: Rig) -> None:
    made = _jobs.job(data, _jobs.config(data), "without-rsync")
    hidden = data.run("b", ["mount", "--bind", "/dev/null", shutil.which("rsync") or ""])
    assert hidden.returncode == 0, hidden.stderr
    said = _jobs.prepare(data, made)
    assert data.run("b", ["umount", shutil.which("rsync") or ""]).returncode == 0
    assert "LaunchError: host b has no rsync" in said
    assert not list(data.disk("b").rglob("*.tmp-copy-*"))


def test_a_shared_path_is_proven_in_both_directions(data: Rig) -> None:
    shared = _jobs.config(data, launch={"data_placement": "shared"})
    made = _jobs.job(data, shared, "shared", data.shared)
    assert _jobs.prepare(data, made) == ""
    assert [path.name for path in (data.shared / "runs" / "shared").iterdir()] == ["run.json"]
    maps = str(data.workspace / "elsewhere" / "maps")
    shutil.copytree(data.disk("a") / "index", data.disk("a") / "elsewhere")
    said = _jobs.prepare(data, _jobs.job(data, shared, "shared", data.shared, index_directory=maps))
    assert said.startswith(
        f"LaunchError: host b: index maps: {maps} is not there, though launch.data_placement is "
        "shar"
    )
    own = str(data.workspace / "runs" / "own")
    for host in "ab":
        (data.disk(host) / "runs" / "own").mkdir(parents=True, exist_ok=True)
    said = _jobs.prepare(data, _jobs.job(data, shared, "x", data.shared, run_directory=own))
    assert f"host b: {own} is another directory than on the machine that starts the run" in said
    assert not [path for host in "ab" for path in data.disk(host).rglob(".placement-*")]
    assert not list(data.shared.rglob(".placement-*"))


def test_a_host_that_does_not_answer_is_named(data: Rig) -> None:
    made = _jobs.job(data, _jobs.config(data), "first")
    data.kill("b")
    never = _jobs.prepare(data, made)
    any_more = _jobs.prepare(data, made.model_copy(update={"attempt": 2}))
    data.restore("b")
    assert never.startswith(
        "LaunchError: host b does not say which files it has: ssh cannot reach it"
    )
    assert any_more.startswith(
        "HostLostError: host b does not say which files it has: ssh cannot reach it"
    )


def test_nothing_of_the_copying_outlives_the_process(data: Rig, tmp_path: Path) -> None:
    """Whoever copies is killed in the middle: rsync ends, and the next preparation begins anew."""
    big = data.disk("a") / "big"
    shutil.copytree(data.disk("a") / "data", big)
    (big / "manifest.json").unlink()
    with open(big / "tokens_text_document.bin", "ab") as file:
        file.truncate(3 << 30)
    prefix = str(data.workspace / "big" / "tokens_text_document")
    made = _jobs.job(data, _jobs.config(data), "big", token_prefixes=[prefix])
    path = _jobs.write_job(data, made)
    started = data.start("a", [sys.executable, "-c", _jobs.PREPARE, str(path)], tmp_path / "log")
    _jobs.wait_for(
        lambda: any("rsync" in line for line in data.processes("b").values()), 60, "copying"
    )
    for pid in [pid for pid, line in data.processes("a").items() if _jobs.PREPARE[:40] in line]:
        os.kill(pid, 9)
    started.wait(timeout=20)
    _jobs.wait_for(
        lambda: not any("rsync" in line for h in "ab" for line in data.processes(h).values()),
        20,
        "its end",
    )
    assert not (data.disk("b") / "big" / "tokens_text_document.bin").exists()
    shutil.rmtree(big)
    shutil.rmtree(data.disk("b") / "big")
