"""Collective actions on checkpoints: choosing and verifying one, and moving files between hosts."""

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.checkpoint import collective, save
from megacore.checkpoint.background import CheckpointSaver
from megacore.checkpoint.collective import (
    RankGroup,
    latest_complete_together,
    sees_first_directory,
    shares,
    transfer_files,
    verify_together,
    writable_directory,
)
from megacore.checkpoint.format import FileRecord, Marker, latest_complete, verify
from megacore.checkpoint.save import save_checkpoint
from megacore.checkpoint.shard import TensorShard
from megacore.errors import CheckpointError, FileAccessError, LaunchError, TransientFileError
from tests._dist import DistributedError, run_distributed
from tests._limits import HANG
from tests.checkpoint._read import read_tensors


def test_collective_functions_on_one_rank_equal_the_serial_ones(tmp_path: Path) -> None:
    good = save_checkpoint(tmp_path, 1, {"model.w": torch.ones(3)}, {})
    bad = save_checkpoint(tmp_path, 2, {"model.w": torch.ones(3)}, {})
    content = bytearray((bad / "__0_0.distcp").read_bytes())
    content[700] ^= 1
    (bad / "__0_0.distcp").write_bytes(content)
    (tmp_path / "iter_0000003").mkdir()
    ranks, warnings, serial = RankGroup(None), [], []
    assert latest_complete_together(tmp_path, ranks, log=warnings.append) == good
    assert latest_complete(tmp_path, log=serial.append) == good
    assert warnings == serial
    assert len(warnings) == 2
    assert verify_together(good, ranks) == verify(good)
    moved = good.rename(tmp_path / "iter_0000009")
    for check in (lambda: verify(moved), lambda: verify_together(moved, ranks)):
        with pytest.raises(CheckpointError, match="its marker is of iteration 1"):
            check()


def test_verification_reports_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megacore.artifact.manifest._CHUNK", 1000)
    path = save_checkpoint(tmp_path, 1, {"model.w": torch.ones(3000)}, {})
    calls: list[int] = []
    latest_complete_together(tmp_path, RankGroup(None), progress=lambda: calls.append(1))
    assert len(calls) >= (path / "__0_0.distcp").stat().st_size // 1000


def test_a_rank_that_waits_for_others_reports_it_until_they_have_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collective, "_WAITING_INTERVAL", 0.001)
    calls: list[int] = []
    reported = threading.Event()

    def gather(outcomes: list[Any], outcome: Any, group: Any) -> None:
        assert reported.wait(HANG)
        outcomes[:] = [outcome, outcome]

    def waiting() -> None:
        calls.append(1)
        reported.set()

    def action() -> int:
        time.sleep(0.01)
        assert not calls  # a rank that works reports its own progress
        return 3

    monkeypatch.setattr(collective.dist, "all_gather_object", gather)
    ranks = RankGroup(None)
    ranks.distributed, ranks.size = True, 2
    assert ranks.everywhere(action, waiting) == [3, 3]
    number = len(calls)
    time.sleep(0.02)
    assert len(calls) == number


def test_checkpoints_that_are_passed_over_are_collected(tmp_path: Path) -> None:
    good, newest = (save_checkpoint(tmp_path, n, {"w": torch.ones(3)}, {}) for n in (1, 2))
    (newest / "__0_0.distcp").write_bytes((newest / "__0_0.distcp").read_bytes()[::-1])
    damaged: set[Path] = set()
    assert latest_complete_together(tmp_path, RankGroup(None), damaged=damaged) == good
    assert damaged == {newest}


def test_a_checkpoint_missing_on_another_host_is_refused_unless_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = save_checkpoint(tmp_path, 1, {"model.w": torch.ones(3)}, {})
    newest = save_checkpoint(tmp_path, 2, {"model.w": torch.ones(3)}, {})
    monkeypatch.setattr(
        collective, "_without", lambda directory: None if directory == good else "b"
    )
    with pytest.raises(
        LaunchError, match=r"iter_0000002 is not on host b, though the first rank's host has it"
    ):
        latest_complete_together(tmp_path, RankGroup(None))
    content = bytearray((newest / "__0_0.distcp").read_bytes())
    content[700] ^= 1
    (newest / "__0_0.distcp").write_bytes(content)
    warnings: list[str] = []
    assert latest_complete_together(tmp_path, RankGroup(None), log=warnings.append) == good
    assert len(warnings) == 1


class Ranks(RankGroup):
    """Three ranks, of which the others compare their files with the given outcomes."""

    def __init__(self, *others: tuple[dict[str, str], str]) -> None:
        super().__init__(None)
        self.size, self._others = 3, others

    def everywhere(
        self, action: Callable[[], Any], waiting: Callable[[], None] | None = None
    ) -> list[Any]:
        value = action()
        return [value, *self._others] if isinstance(value, tuple) else [value]

    def on_first(self, action: Callable[[], Any], waiting: Callable[[], None] | None = None) -> Any:
        return action()


def test_every_rank_stops_if_one_cannot_read_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, 1, {"model.w": torch.ones(3)}, {})
    newest = save_checkpoint(tmp_path, 2, {"model.w": torch.ones(3)}, {})
    damage = {"state.json": "state.json is missing"}
    fault = ("TransientFileError", "cannot read __0_0.distcp (Stale file handle)")
    ranks = Ranks((damage, None), ({}, fault))
    with pytest.raises(TransientFileError, match=r"__0_0\.distcp \(Stale file handle\)"):
        latest_complete_together(tmp_path, ranks)

    def fail(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(Path, "stat", fail)  # not "is not on host"
    with pytest.raises(FileAccessError, match="Stale file handle"):
        collective._without(newest)


def test_an_error_of_the_disk_reaches_the_other_ranks_with_its_type() -> None:
    for code, kind in (
        (errno.EIO, TransientFileError),
        (errno.EMFILE, FileAccessError),
        (errno.ENOENT, CheckpointError),
    ):
        description = collective._describe(OSError(code, os.strerror(code), "x"))
        assert description is not None
        assert type(collective._restored(1, *description)) is kind


def test_shares_divide_the_files_evenly_among_the_ranks() -> None:
    files = {f"__{n}_0.distcp": FileRecord(100 + n, "") for n in range(7)}
    names_by_rank = shares(Marker(1, None, files), 3)
    assert sorted(name for names in names_by_rank for name in names) == sorted(files)
    assert {len(names) for names in names_by_rank} == {2, 3}


ROWS = 40_000


def simulate_separate_host(directory: Path) -> None:
    """Let this rank act as if on a separate host: unless it is rank 0, it writes to `directory`."""

    def rank_directory(first: Path, ranks: RankGroup) -> Path:
        if ranks.rank == 0:
            return first
        place = directory / f"{first.name}-rank{ranks.rank}"
        place.mkdir(parents=True)
        return place

    save.writable_directory = rank_directory  # type: ignore[assignment]
    collective.CHUNK = 1 << 16


def test_a_host_without_the_first_directory_deletes_the_remains_of_crashes(tmp_path: Path) -> None:
    checkpoint = tmp_path / "iter_0000002"
    remains = [
        tmp_path / name for name in ("iter_0000003.tmp-aa-rank1", "iter_0000003.tmp-aa-rank2")
    ]
    neighbour = tmp_path / "iter_0000003.tmp-bb-rank2"
    for directory in (checkpoint, neighbour, *remains):
        directory.mkdir()
        (directory / "__2_0.distcp").touch()
    ranks = RankGroup(None)
    ranks.rank = 1
    created = writable_directory(tmp_path / "iter_0000003.tmp-bb", ranks)
    assert created == tmp_path / "iter_0000003.tmp-bb-rank1"
    assert sorted(tmp_path.iterdir()) == [checkpoint, created, neighbour]
    assert all(list(directory.iterdir()) for directory in (checkpoint, neighbour))


def shard(rank: int, size: int, value: float = 0.0) -> dict[str, TensorShard]:
    """Return this rank's rows of a tensor with distinct elements."""
    rows = torch.arange(float(ROWS * size)).view(ROWS * size, 1) + value
    first = torch.Size((rank * ROWS, 0))
    return {
        "model.rows": TensorShard(
            rows.shape, rows.dtype, {first: rows[rank * ROWS : (rank + 1) * ROWS].clone()}
        )
    }


def save_twice(root: Path, hosts: Path) -> list[str]:
    """Save two checkpoints, the second in the background; return files left on this rank's host."""
    ranks = RankGroup(None)
    directory = hosts / str(ranks.rank)
    simulate_separate_host(directory)
    for iteration in (1, 2):
        saver = CheckpointSaver(root, asynchronous=iteration == 2, keep_last=2)
        saver.save(
            iteration,
            shard(ranks.rank, ranks.size, iteration),
            {"n": iteration},
            validation_loss=None,
        )
        assert saver.wait() is not None
        saver.close()
    return [str(path) for path in directory.rglob("*")]


def test_only_the_host_of_rank_0_has_the_files_after_a_save(tmp_path: Path) -> None:
    remaining = run_distributed(3, save_twice, tmp_path / "root", tmp_path / "hosts")
    assert remaining == [[], [], []]
    for iteration in (1, 2):
        path = tmp_path / "root" / f"iter_000000{iteration}"
        assert sorted(verify(path).files) == [
            ".metadata",
            "__0_0.distcp",
            "__1_0.distcp",
            "__2_0.distcp",
            "state.json",
        ]
        expected = torch.arange(float(ROWS * 3)).view(-1, 1) + iteration
        torch.testing.assert_close(read_tensors(path)["model.rows"], expected, rtol=0, atol=0)


def save_with_faults(
    root: Path, hosts: Path, *faults: Callable[[RankGroup], Callable[[], None]]
) -> list[str]:
    """Save once without and once with each of `faults`, and return the errors."""
    ranks = RankGroup(None)
    simulate_separate_host(hosts / str(ranks.rank))
    saver = CheckpointSaver(root, asynchronous=True, keep_last=2)
    saver.save(1, shard(ranks.rank, ranks.size), {}, validation_loss=None)
    saver.wait()
    errors = []
    for cause_fault in faults:
        undo = cause_fault(ranks)
        saver.save(2, shard(ranks.rank, ranks.size), {}, validation_loss=None)
        try:
            saver.wait()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        undo()
    saver.close()
    return errors


def fill_disk_of_rank_0(ranks: RankGroup) -> Callable[[], None]:
    """Let writing the second chunk fail."""
    original, written = collective._write_all, 0

    def write(descriptor: int, data: memoryview) -> None:
        nonlocal written
        written += 1
        if written > 1:
            raise_full_disk()
        original(descriptor, data)

    return replace(collective, "_write_all", write)


def fill_disk_of_rank_1(ranks: RankGroup) -> Callable[[], None]:
    if ranks.rank != 1:
        return lambda: None
    return replace(save.CheckpointWriter, "write_data", raise_full_disk)


def raise_full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "__1_0.distcp")


def damage_during_transfer(ranks: RankGroup) -> Callable[[], None]:
    original = collective._read_all

    def flip(descriptor: int, data: memoryview, path: Path) -> None:
        original(descriptor, data, path)
        data[7] ^= 1

    return replace(collective, "_read_all", flip)


def delete_file_before_transfer(ranks: RankGroup) -> Callable[[], None]:
    """Delete the file of rank 1 before it is sent."""
    original = save._write_tensors

    def write_and_delete(directory: Path, *rest: Any) -> dict[str, FileRecord]:
        records = original(directory, *rest)
        if ranks.rank == 1:
            (directory / "__1_0.distcp").unlink()
        return records

    return replace(save, "_write_tensors", write_and_delete)


def replace(place: Any, name: str, value: Any) -> Callable[[], None]:
    """Replace an attribute and return a function that restores it."""
    before = getattr(place, name)
    setattr(place, name, value)
    return lambda: setattr(place, name, before)


def test_a_failure_of_one_rank_fails_all_and_leaves_no_files(tmp_path: Path) -> None:
    root, hosts = tmp_path / "root", tmp_path / "hosts"
    faults = (
        fill_disk_of_rank_0,
        fill_disk_of_rank_1,
        damage_during_transfer,
        delete_file_before_transfer,
    )
    for errors in run_distributed(2, save_with_faults, root, hosts, *faults):
        expected = (
            "WorkspaceError: cannot write __1_0.distcp in .*: No space left on device",
            "WorkspaceError: cannot write __1_0.distcp in .*: No space left on device",
            "CheckpointError: .*__1_0.distcp came from rank 1 with other content",
            r"(CheckpointError: rank 1 failed: )?FileNotFoundError.*__1_0.distcp",
        )
        for error, pattern in zip(errors, expected, strict=True):
            assert re.match(pattern, error), error
    newest = latest_complete(root)
    assert newest is not None
    assert newest.name == "iter_0000001"
    assert [path.name for path in sorted(root.iterdir())] == [
        "iter_0000001",
        "latest_checkpointed_iteration.txt",
    ]
    assert not list(hosts.rglob("*.distcp"))


def die_during_transfer(root: Path, hosts: Path) -> None:
    ranks = RankGroup(None)

    def die(_: RankGroup) -> Callable[[], None]:
        if ranks.rank == 1:
            replace(collective, "_read_all", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        return lambda: None

    save_with_faults(root, hosts, die)


def test_the_previous_checkpoint_remains_if_a_rank_dies_during_the_transfer(tmp_path: Path) -> None:
    with pytest.raises(DistributedError):
        run_distributed(2, die_during_transfer, tmp_path / "root", tmp_path / "hosts")
    newest = latest_complete(tmp_path / "root")
    assert newest is not None
    assert newest.name == "iter_0000001"


def bring_one_file_each(root: Path, hosts: Path) -> bool:
    """Bring one file of each rank to `root` and return True if this rank saw `root` before."""
    ranks = RankGroup(None)
    directory = root if ranks.rank == 0 else hosts / str(ranks.rank)
    sees_root = sees_first_directory(root, ranks)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"rank_{ranks.rank}.json"
    path.write_bytes(b"x" * ranks.rank)  # the file of rank 0 is empty
    transfer_files(
        root, None if directory == root else directory, {path.name: FileRecord.of(path)}, ranks
    )
    return sees_root


def test_files_of_all_ranks_are_brought_to_one_directory(tmp_path: Path) -> None:
    results = run_distributed(2, bring_one_file_each, tmp_path / "root", tmp_path / "hosts")
    assert results == [True, True]
    assert (tmp_path / "root" / "rank_1.json").read_bytes() == b"x"
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == [
        "rank_0.json",
        "rank_1.json",
    ]


def resume_from(root: Path) -> str:
    """Choose a checkpoint while the host of rank 1 has none, and return the error."""
    from megacore.checkpoint import collective

    ranks = RankGroup(None)
    without = collective._without
    if ranks.rank == 1:
        collective._without = lambda directory: without(directory / "elsewhere")
    try:
        latest_complete_together(root, ranks)
    except LaunchError as error:
        return str(error)
    return "nothing"


def test_a_checkpoint_missing_on_another_host_is_refused(tmp_path: Path) -> None:
    save.save_checkpoint(tmp_path, 1, {"a": torch.ones(3)}, {})
    for error in run_distributed(2, resume_from, tmp_path):
        assert "iter_0000001" in error
        assert "is not on host" in error
