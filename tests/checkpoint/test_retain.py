import os
import shutil
from pathlib import Path

import pytest

from megacore.checkpoint.format import FileRecord, Marker, checkpoint_directories, directory_name, iteration_of
from megacore.checkpoint.retain import apply_retention, remove_directory, remove_stale


def make(root: Path, losses: dict[int, float | None]) -> None:
    for iteration, loss in losses.items():
        directory = root / directory_name(iteration)
        directory.mkdir(parents=True)
        (directory / "state.json").write_text("{}")
        Marker(iteration, loss, {"state.json": FileRecord.of(directory / "state.json")}).write(directory)


def left(root: Path) -> list[int | None]:
    return [iteration_of(path) for path in checkpoint_directories(root)]


LOSSES = {100: 3.0, 200: 2.0, 300: 2.5, 400: 2.0, 500: None, 600: 4.0}


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"keep_last": 2, "keep_best": False}, [500, 600]),
        ({"keep_last": 1, "keep_best": True}, [200, 600]),  # the older of two equal losses
        ({"keep_last": 1, "keep_best": False, "keep_every": 300}, [300, 600]),
        ({"keep_last": 1, "keep_best": True, "keep_every": 200}, [200, 400, 600]),
        ({"keep_last": 9, "keep_best": False}, [100, 200, 300, 400, 500, 600]),
        ({"keep_last": 1, "keep_best": False, "in_use": Path("elsewhere/iter_0000100")}, [100, 600]),
    ],
)
def test_rules(tmp_path: Path, rules: dict[str, object], expected: list[int]) -> None:
    make(tmp_path, LOSSES)
    deleted = apply_retention(tmp_path, **rules)  # type: ignore[arg-type]
    assert left(tmp_path) == expected
    assert [iteration_of(path) for path in deleted] == [i for i in LOSSES if i not in expected]
    assert not list(tmp_path.glob("*.tmp-*"))


def test_the_only_complete_one_stays_though_newer_ones_are_damaged(tmp_path: Path) -> None:
    make(tmp_path, {100: None, 200: None, 300: None})
    for iteration in (200, 300):
        (tmp_path / directory_name(iteration) / "state.json").write_text("damaged")
    assert apply_retention(tmp_path, keep_last=1, keep_best=False) == []
    assert 100 in left(tmp_path)


def test_nothing_to_keep_is_no_error(tmp_path: Path) -> None:
    assert apply_retention(tmp_path / "absent", keep_last=1) == []


def test_deletion_that_is_interrupted_leaves_nothing_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, {100: None, 200: None})

    def killed(path: Path) -> None:
        os.unlink(Path(path) / "state.json")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove_directory(tmp_path / directory_name(100))
    assert left(tmp_path) == [200]
    (removed,) = remove_stale(tmp_path)
    assert removed.name.startswith("iter_0000100.tmp-")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000200"]
