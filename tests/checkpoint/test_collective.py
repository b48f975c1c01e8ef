from pathlib import Path

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
from megacore.errors import CheckpointError, LaunchError


def test_one_rank_says_what_the_serial_functions_say(tmp_path: Path) -> None:
    good = save_checkpoint(tmp_path, 1, {"model.w": torch.ones(3)}, {})
    bad = save_checkpoint(tmp_path, 2, {"model.w": torch.ones(3)}, {})
    content = bytearray((bad / "__0_0.distcp").read_bytes())
    content[700] ^= 1
    (bad / "__0_0.distcp").write_bytes(content)
    (tmp_path / "iter_0000003").mkdir()
    good.joinpath("complete.json").read_text()
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


def test_one_that_other_machines_lack_is_passed_over_only_where_it_is_damaged(
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


def test_each_rank_hashes_a_share() -> None:
    files = {f"__{n}_0.distcp": FileRecord(100 + n, "") for n in range(7)}
    divided = shares(Marker(1, None, files), 3)
    assert sorted(name for names in divided for name in names) == sorted(files)
    assert {len(names) for names in divided} == {2, 3}
