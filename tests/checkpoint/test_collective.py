"""Tests of choosing and checking checkpoints with all ranks together."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.checkpoint import collective
from megacore.checkpoint.collective import (
    RankGroup,
    latest_complete_together,
    shares,
    verify_together,
)
from megacore.checkpoint.format import FileRecord, Marker, latest_complete, verify
from megacore.checkpoint.save import save_checkpoint
from megacore.errors import CheckpointError, FileAccessError, LaunchError


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

    def everywhere(self, action: Callable[[], Any]) -> list[Any]:
        value = action()
        return [value, *self._others] if isinstance(value, tuple) else [value]

    def on_first(self, action: Callable[[], Any]) -> Any:
        return action()


def test_every_rank_stops_if_one_cannot_read_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, 1, {"model.w": torch.ones(3)}, {})
    newest = save_checkpoint(tmp_path, 2, {"model.w": torch.ones(3)}, {})
    damage = {"state.json": "state.json is missing"}
    ranks = Ranks((damage, ""), ({}, "cannot read __0_0.distcp (Stale file handle)"))
    with pytest.raises(FileAccessError, match=r"__0_0\.distcp \(Stale file handle\)"):
        latest_complete_together(tmp_path, ranks)

    def fail(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(Path, "stat", fail)  # not "is not on host"
    with pytest.raises(FileAccessError, match="Stale file handle"):
        collective._without(newest)


def test_shares_divide_the_files_evenly_among_the_ranks() -> None:
    files = {f"__{n}_0.distcp": FileRecord(100 + n, "") for n in range(7)}
    names_by_rank = shares(Marker(1, None, files), 3)
    assert sorted(name for names in names_by_rank for name in names) == sorted(files)
    assert {len(names) for names in names_by_rank} == {2, 3}
