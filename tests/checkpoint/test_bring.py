"""Ranks of several machines save together, each into a directory of its own, and the first has it
all."""

import errno
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.checkpoint import bring, save
from megacore.checkpoint.background import CheckpointSaver
from megacore.checkpoint.bring import bring_files, sees_first
from megacore.checkpoint.collective import RankGroup, latest_complete_together
from megacore.checkpoint.format import FileRecord, latest_complete, verify
from megacore.checkpoint.load import read_tensors
from megacore.checkpoint.shard import TensorShard
from megacore.errors import LaunchError
from tests._dist import DistributedError, run_distributed

ROWS = 40_000


def separate(own: Path) -> None:
    """Give this rank a machine of its own.

    It does not see what the first makes, and writes below `own`.
    """

    def elsewhere(first: Path, ranks: RankGroup) -> Path:
        if ranks.rank == 0:
            return first
        place = own / f"{first.name}-rank{ranks.rank}"
        place.mkdir(parents=True)
        return place

    save.own_directory = elsewhere  # type: ignore[assignment]
    bring.CHUNK = 1 << 16


def shard(rank: int, size: int, value: float = 0.0) -> dict[str, TensorShard]:
    """A tensor of which each rank holds some rows, every number its position."""
    rows = torch.arange(float(ROWS * size)).view(ROWS * size, 1) + value
    first = torch.Size((rank * ROWS, 0))
    return {
        "model.rows": TensorShard(
            rows.shape, rows.dtype, {first: rows[rank * ROWS : (rank + 1) * ROWS].clone()}
        )
    }


def save_twice(root: Path, machines: Path) -> list[str]:
    """Two checkpoints, the second beside the caller; what is left on this rank's own machine."""
    ranks = RankGroup(None)
    own = machines / str(ranks.rank)
    separate(own)
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
    return [str(path) for path in own.rglob("*")]


def test_the_first_machine_has_every_file_and_the_others_none(tmp_path: Path) -> None:
    left = run_distributed(3, save_twice, tmp_path / "root", tmp_path / "machines")
    assert left == [[], [], []]
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


def save_with(
    root: Path, machines: Path, *breaks: Callable[[RankGroup], Callable[[], None]]
) -> list[str]:
    """The error of each save in which one of `breaks` has broken something, after one that went
    well."""
    ranks = RankGroup(None)
    separate(machines / str(ranks.rank))
    saver = CheckpointSaver(root, asynchronous=True, keep_last=2)
    saver.save(1, shard(ranks.rank, ranks.size), {}, validation_loss=None)
    saver.wait()
    errors = []
    for one in breaks:
        mend = one(ranks)
        saver.save(2, shard(ranks.rank, ranks.size), {}, validation_loss=None)
        try:
            saver.wait()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        mend()
    saver.close()
    return errors


def fill_the_first_disk(ranks: RankGroup) -> Callable[[], None]:
    """The second chunk finds no room."""
    original, written = bring._write_all, 0

    def write(descriptor: int, data: memoryview) -> None:
        nonlocal written
        written += 1
        if written > 1:
            full()
        original(descriptor, data)

    return replace(bring, "_write_all", write)


def fill_the_other_disk(ranks: RankGroup) -> Callable[[], None]:
    return replace(save.CheckpointWriter, "write_data", full) if ranks.rank == 1 else lambda: None


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "__1_0.distcp")


def damage_on_the_way(ranks: RankGroup) -> Callable[[], None]:
    original = bring._read_all

    def flip(descriptor: int, data: memoryview, path: Path) -> None:
        original(descriptor, data, path)
        data[7] ^= 1

    return replace(bring, "_read_all", flip)


def lose_the_file(ranks: RankGroup) -> Callable[[], None]:
    """The other machine's file is gone before it is sent."""
    original = save._write_tensors

    def written(own: Path, *rest: Any) -> dict[str, FileRecord]:
        records = original(own, *rest)
        if ranks.rank == 1:
            (own / "__1_0.distcp").unlink()
        return records

    return replace(save, "_write_tensors", written)


def replace(place: Any, name: str, value: Any) -> Callable[[], None]:
    """Put a value there; what puts the old one back."""
    before = getattr(place, name)
    setattr(place, name, value)
    return lambda: setattr(place, name, before)


def test_a_failure_on_either_side_is_everyones_and_leaves_nothing(tmp_path: Path) -> None:
    root, machines = tmp_path / "root", tmp_path / "machines"
    breaks = (fill_the_first_disk, fill_the_other_disk, damage_on_the_way, lose_the_file)
    for said in run_distributed(2, save_with, root, machines, *breaks):
        expected = (
            "WorkspaceError: cannot write __1_0.distcp: No space left on device",
            "WorkspaceError: cannot write __1_0.distcp: No space left on device",
            "CheckpointError: .*__1_0.distcp came from rank 1 with another content",
            r"(CheckpointError: rank 1 failed: )?FileNotFoundError.*__1_0.distcp",
        )
        for error, pattern in zip(said, expected, strict=True):
            assert re.match(pattern, error), error
    newest = latest_complete(root)
    assert newest is not None
    assert newest.name == "iter_0000001"
    assert [path.name for path in sorted(root.iterdir())] == [
        "iter_0000001",
        "latest_checkpointed_iteration.txt",
    ]
    assert not list(machines.rglob("*.distcp"))


def die_in_the_middle(root: Path, machines: Path) -> None:
    ranks = RankGroup(None)

    def die(_: RankGroup) -> Callable[[], None]:
        if ranks.rank == 1:
            replace(bring, "_read_all", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        return lambda: None

    save_with(root, machines, die)


def test_a_rank_that_dies_while_it_sends_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    with pytest.raises(DistributedError):
        run_distributed(2, die_in_the_middle, tmp_path / "root", tmp_path / "machines")
    newest = latest_complete(tmp_path / "root")
    assert newest is not None
    assert newest.name == "iter_0000001"


def look_around(root: Path, machines: Path) -> list[str]:
    ranks = RankGroup(None)
    own = root if ranks.rank == 0 else machines / str(ranks.rank)
    found = [str(sees_first(root, ranks))]
    own.mkdir(parents=True, exist_ok=True)
    path = own / f"rank_{ranks.rank}.json"
    path.write_bytes(b"x" * ranks.rank)  # an empty one is sent too
    bring_files(root, None if own == root else own, {path.name: FileRecord.of(path)}, ranks)
    return found


def test_any_files_are_brought(tmp_path: Path) -> None:
    for said in run_distributed(2, look_around, tmp_path / "root", tmp_path / "machines"):
        assert said == ["True"]
    assert (tmp_path / "root" / "rank_1.json").read_bytes() == b"x"
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == [
        "rank_0.json",
        "rank_1.json",
    ]


def resume_from(root: Path) -> str:
    """Rank 1 is on a machine that has nothing of it."""
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


def test_a_checkpoint_that_another_machine_lacks_is_not_passed_over(tmp_path: Path) -> None:
    save.save_checkpoint(tmp_path, 1, {"a": torch.ones(3)}, {})
    for said in run_distributed(2, resume_from, tmp_path):
        assert "iter_0000001" in said
        assert "is not on host" in said
