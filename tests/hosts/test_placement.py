"""Files of a job on each host, over real ssh and rsync between simulated hosts."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from megacore.checkpoint.save import save_checkpoint
from tests._limits import HANG
from tests.hosts import _jobs
from tests.hosts._rig import Rig

if shutil.which("rsync") is None:
    pytest.skip("files are copied by rsync, which is not installed", allow_module_level=True)


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(rig: Rig) -> Rig:
    """Prepare the hosts for one job and return them.

    Host a had the data in its workspace, and all hosts have it in the shared directory.
    """
    _jobs.write_data(rig.disk("a"))
    _jobs.write_data(rig.shared)
    (rig.disk("a") / "corpora").mkdir()
    (rig.disk("a") / "corpora" / "large.txt").write_text("not read by any rank")
    assert _jobs.prepare(rig, _jobs.job(rig, _jobs.config(rig), "first")) == ""
    return rig


def test_host_gets_only_the_missing_files(data: Rig) -> None:
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


def test_only_damaged_files_are_replaced(data: Rig) -> None:
    job = _jobs.job(data, _jobs.config(data), "again")
    tokens, index = (
        data.disk("b") / name for name in ("data/tokens_text_document.bin", "index/maps")
    )
    inodes = {path: path.stat().st_ino for path in index.iterdir()}
    content = bytearray(tokens.read_bytes())
    content[100] ^= 1
    tokens.write_bytes(content)  # keeps the size
    removed_file = sorted(inodes)[0]
    removed_file.unlink()
    assert _jobs.prepare(data, job) == ""
    for name in ("data", "index"):
        assert _jobs.digests(data.disk("b") / name) == _jobs.digests(data.disk("a") / name)
    unchanged = [
        path
        for path, inode in inodes.items()
        if path != removed_file and path.stat().st_ino == inode
    ]
    assert sorted(unchanged) == sorted(set(inodes) - {removed_file}), "linked, not copied again"
    tokens.write_bytes(content)
    entry = (data.disk("a") / "data/tokens_text_document.bin").stat()
    # only the hash shows this damage
    os.utime(tokens, ns=(entry.st_atime_ns, entry.st_mtime_ns))
    assert (
        _jobs.prepare(
            data,
            job.model_copy(update={"config": job.config.model_copy(update={"verify": "full"})}),
        )
        == ""
    )
    assert tokens.read_bytes() == (data.disk("a") / "data/tokens_text_document.bin").read_bytes()


def test_files_without_a_manifest_are_copied_separately(data: Rig) -> None:
    plain = data.disk("a") / "plain"
    shutil.copytree(data.disk("a") / "data", plain)
    (plain / "manifest.json").unlink()
    (plain / "other.txt").write_text("no part of the job")
    prefix = str(data.workspace / "plain" / "tokens_text_document")
    job = _jobs.job(data, _jobs.config(data), "plain", token_prefixes=[prefix])
    assert _jobs.prepare(data, job) == ""
    names = ["tokens_text_document.bin", "tokens_text_document.idx"]
    assert sorted(path.name for path in (data.disk("b") / "plain").iterdir()) == names
    (data.disk("b") / "plain" / names[0]).write_bytes(b"other")
    assert _jobs.prepare(data, job) == ""
    assert (data.disk("b") / "plain" / names[0]).read_bytes() == (plain / names[0]).read_bytes()


def test_host_gets_only_the_checkpoint_to_resume_from(data: Rig) -> None:
    job = _jobs.job(data, _jobs.config(data), "resumed")
    local, remote = (data.disk(host) / "runs" / "resumed" / "checkpoints" for host in "ab")
    for iteration in (1, 2):
        save_checkpoint(local, iteration, {"model.a": torch.full((4,), float(iteration))}, {})
    assert _jobs.prepare(data, job) == ""
    assert [path.name for path in remote.iterdir()] == ["iter_0000002"]
    assert _jobs.digests(remote / "iter_0000002") == _jobs.digests(local / "iter_0000002")
    # The run continued, a crash left half a save, and b once started this run itself.
    save_checkpoint(local, 3, {"model.a": torch.full((4,), 3.0)}, {})
    save_checkpoint(remote, 3, {"model.a": torch.full((4,), -3.0)}, {})
    save_checkpoint(remote, 9, {"model.a": torch.full((4,), 9.0)}, {})
    (remote / "iter_0000004.tmp-0123-rank1").mkdir()
    (remote.parent / "exit").mkdir()
    (remote.parent / "exit" / "rank_00001.json").write_text("{}")
    assert _jobs.prepare(data, job) == ""
    assert [path.name for path in remote.iterdir()] == ["iter_0000003"]
    assert _jobs.digests(remote / "iter_0000003") == _jobs.digests(local / "iter_0000003")
    assert sorted(path.name for path in (remote.parent / "set-aside").iterdir()) == [
        "iter_0000003",
        "iter_0000009",
    ]
    assert not (remote.parent / "exit").exists()
    # A damaged local checkpoint is not copied.
    (local / "iter_0000003" / "state.json").write_text("[]")
    assert _jobs.prepare(data, job) == ""
    assert [path.name for path in remote.iterdir()] == ["iter_0000002"]


def test_obstacles_to_copying_are_named(data: Rig, tmp_path: Path) -> None:
    job = _jobs.job(data, _jobs.config(data), "refused")
    (data.disk("b") / "tokenizer").rename(data.disk("b") / "tokenizer-before")
    obstacle = data.hosts["b"].directory / "workspace" / "tokenizer"
    obstacle.write_text("a file in the way")
    assert (
        f"host b: {data.workspace / 'tokenizer'} is no directory (tokenizer): move it away"
        in _jobs.prepare(data, job)
    )
    obstacle.unlink()
    backwards = _jobs.config(data, launch={"hostfile": str(data.hostfile(names=["b", "a"]))})
    error = _jobs.prepare(data, job.model_copy(update={"config": backwards}))
    assert "the first host is b, not this machine (a)" in error
    maps = data.disk("a") / "index" / "maps"
    maps.rename(maps.with_name("away"))
    assert "index maps" in _jobs.prepare(data, job)
    maps.with_name("away").rename(maps)


def test_full_disk_is_refused_before_copying(data: Rig) -> None:
    large = data.disk("a") / "large"
    shutil.copytree(data.disk("a") / "data", large)
    (large / "manifest.json").unlink()
    prefix = str(data.workspace / "large" / "tokens_text_document")
    job = _jobs.job(data, _jobs.config(data), "large", token_prefixes=[prefix])
    target = str(data.workspace / "large")
    (data.disk("b") / "large").mkdir()
    mounted = data.run("b", ["mount", "-t", "tmpfs", "-o", "size=4k", "none", target])
    assert mounted.returncode == 0, mounted.stderr
    error = _jobs.prepare(data, job)
    assert data.run("b", ["ls", "-A", target]).stdout == ""
    assert data.run("b", ["umount", target]).returncode == 0
    assert f"host b: {target} has 0.00 GiB free and" in error


def test_missing_rsync_on_a_host_is_named(data: Rig) -> None:
    job = _jobs.job(data, _jobs.config(data), "without-rsync")
    hidden = data.run("b", ["mount", "--bind", "/dev/null", shutil.which("rsync") or ""])
    assert hidden.returncode == 0, hidden.stderr
    error = _jobs.prepare(data, job)
    assert data.run("b", ["umount", shutil.which("rsync") or ""]).returncode == 0
    assert "LaunchError: host b has no rsync" in error
    assert not list(data.disk("b").rglob("*.tmp-copy-*"))


def test_shared_paths_are_checked_in_both_directions(data: Rig) -> None:
    shared = _jobs.config(data, launch={"data_placement": "shared"})
    job = _jobs.job(data, shared, "shared", data.shared)
    assert _jobs.prepare(data, job) == ""
    assert [path.name for path in (data.shared / "runs" / "shared").iterdir()] == ["run.json"]
    maps = str(data.workspace / "elsewhere" / "maps")
    shutil.copytree(data.disk("a") / "index", data.disk("a") / "elsewhere")
    error = _jobs.prepare(
        data, _jobs.job(data, shared, "shared", data.shared, index_directory=maps)
    )
    assert error.startswith(
        f"LaunchError: host b: index maps: {maps} is not there, though launch.data_placement is "
        "shar"
    )
    separate = str(data.workspace / "runs" / "own")
    for host in "ab":
        (data.disk(host) / "runs" / "own").mkdir(parents=True, exist_ok=True)
    error = _jobs.prepare(data, _jobs.job(data, shared, "x", data.shared, run_directory=separate))
    assert (
        f"host b: {separate} is another directory than on the machine that starts the run" in error
    )
    assert not [path for host in "ab" for path in data.disk(host).rglob(".placement-*")]
    assert not list(data.shared.rglob(".placement-*"))


def test_unreachable_host_is_named(data: Rig) -> None:
    job = _jobs.job(data, _jobs.config(data), "first")
    data.kill("b")
    first_attempt = _jobs.prepare(data, job)
    second_attempt = _jobs.prepare(data, job.model_copy(update={"attempt": 2}))
    data.restore("b")
    assert first_attempt.startswith(
        "LaunchError: host b does not say which files it has: ssh cannot reach it"
    )
    assert second_attempt.startswith(
        "HostLostError: host b does not say which files it has: ssh cannot reach it"
    )


def test_copying_ends_with_its_process(data: Rig, tmp_path: Path) -> None:
    """After a kill of the copying process, rsync ends and leaves no partial file."""
    big = data.disk("a") / "big"
    shutil.copytree(data.disk("a") / "data", big)
    (big / "manifest.json").unlink()
    with open(big / "tokens_text_document.bin", "ab") as file:
        file.truncate(3 << 30)
    prefix = str(data.workspace / "big" / "tokens_text_document")
    job = _jobs.job(data, _jobs.config(data), "big", token_prefixes=[prefix])
    path = _jobs.write_job(data, job)
    started = data.start("a", [sys.executable, "-c", _jobs.PREPARE, str(path)], tmp_path / "log")
    _jobs.wait_for(
        lambda: any("rsync" in line for line in data.processes("b").values()), HANG, "copying"
    )
    for pid in [pid for pid, line in data.processes("a").items() if _jobs.PREPARE[:40] in line]:
        os.kill(pid, 9)
    started.wait(timeout=HANG)
    _jobs.wait_for(
        lambda: not any("rsync" in line for h in "ab" for line in data.processes(h).values()),
        HANG,
        "its end",
    )
    assert not (data.disk("b") / "big" / "tokens_text_document.bin").exists()
    shutil.rmtree(big)
    shutil.rmtree(data.disk("b") / "big")
