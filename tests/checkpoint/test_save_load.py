"""Tests of saving and loading checkpoints."""

import errno
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megacore.checkpoint.format import Marker, latest_complete, read_tracker, verify
from megacore.checkpoint.load import load_checkpoint, names_of_all
from megacore.checkpoint.save import CheckpointWriter, save_checkpoint
from megacore.checkpoint.shard import TensorShard
from megacore.errors import CheckpointError, FileAccessError, WorkspaceError
from tests._dist import run_distributed
from tests._limits import HANG
from tests.checkpoint._read import read_tensors

STATE = {"iteration": 7, "nested": {"loss_scale": 65536.0, "names": ["a", "b"], "none": None}}


def example() -> dict[str, Tensor]:
    """Return small tensors of several shapes and types."""
    return {
        "model.weight": torch.arange(24.0).reshape(6, 4),
        "model.bias": 100 + torch.arange(6.0),
        "optimizer.exp_avg.weight": -torch.arange(24.0).reshape(6, 4),
        "optimizer.step": torch.tensor(7, dtype=torch.int64),
        "model.half": torch.arange(5.0).to(torch.bfloat16),
    }


def zeros_like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=0, atol=0)


def test_every_file_is_synced_with_its_whole_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[str, int] = {}
    sync = os.fsync

    def record(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        synced[name] = os.fstat(descriptor).st_size
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    marker = Marker.read(save_checkpoint(tmp_path, 400, example(), STATE))
    assert {name: synced.get(name) for name in marker.files} == {
        name: file.size for name, file in marker.files.items()
    }


def test_loading_fills_the_saved_tensors_in_place(tmp_path: Path) -> None:
    tensors = example()
    path = save_checkpoint(tmp_path, 400, tensors, STATE, validation_loss=2.5)
    assert path == tmp_path / "iter_0000400"
    target = zeros_like(tensors)
    addresses = {name: tensor.data_ptr() for name, tensor in target.items()}
    assert load_checkpoint(path, target) == STATE
    assert_equal(target, tensors)
    assert addresses == {name: tensor.data_ptr() for name, tensor in target.items()}
    assert verify(path).validation_loss == 2.5
    assert read_tracker(tmp_path) == 400
    assert latest_complete(tmp_path) == path


def test_loading_reports_its_progress(tmp_path: Path) -> None:
    path, calls = save_checkpoint(tmp_path, 1, example(), STATE), []
    load_checkpoint(path, zeros_like(example()), progress=lambda: calls.append(1))
    assert len(calls) >= len(example())


def test_parameters_that_require_gradients_are_filled(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {"model.w": torch.ones(3)}, {})
    parameter = torch.nn.Parameter(torch.zeros(3))
    load_checkpoint(path, {"model.w": parameter})
    assert parameter.tolist() == [1.0, 1.0, 1.0]


def test_the_marker_lists_every_file_and_no_temporary_remains(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, example(), STATE)
    assert set(Marker.read(path).files) == {".metadata", "__0_0.distcp", "state.json"}
    assert {file.name for file in path.iterdir()} == {*Marker.read(path).files, "complete.json"}
    assert [entry.name for entry in tmp_path.iterdir() if ".tmp-" in entry.name] == []


def test_a_checkpoint_contains_no_absolute_path_and_can_be_moved(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "here", 1, example(), STATE)
    assert str(tmp_path).encode() not in b"".join(file.read_bytes() for file in path.iterdir())
    moved = tmp_path / "elsewhere"
    path.rename(moved)
    assert_equal(read_tensors(moved), example())


@pytest.mark.parametrize("loss", [math.nan, math.inf, None])
def test_a_non_finite_validation_loss_is_stored_as_missing(
    tmp_path: Path, loss: float | None
) -> None:
    path = save_checkpoint(tmp_path, 1, example(), STATE, validation_loss=loss)
    assert Marker.read(path).validation_loss is None


def test_saving_an_iteration_again_replaces_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, {"model.w": torch.zeros(3)}, {})
    path = save_checkpoint(tmp_path, 1, {"model.w": torch.ones(3)}, {})
    assert read_tensors(path)["model.w"].tolist() == [1, 1, 1]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "iter_0000001",
        "latest_checkpointed_iteration.txt",
    ]


def test_temporaries_of_a_crash_are_removed_by_the_next_save(tmp_path: Path) -> None:
    for name in ("iter_0000001.tmp-0123abcd", "iter_0000001.tmp-0123abcd-deleted"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "latest_checkpointed_iteration.txt.tmp-12").write_text("1")
    (tmp_path / "notes").mkdir()
    save_checkpoint(tmp_path, 2, example(), STATE)
    names = {entry.name for entry in tmp_path.iterdir()}
    assert names == {"iter_0000002", "notes", "latest_checkpointed_iteration.txt"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.bias"), r"lacks none of .* and has model\.bias"),
        (lambda t: t.update({"model.new": torch.zeros(2)}), r"lacks model\.new of the 6"),
        (
            lambda t: t.update({"model.bias": torch.zeros(7)}),
            r"model\.bias is \[6\] float32 there and \[7\] float32 here",
        ),
        (
            lambda t: t.update({"model.bias": torch.zeros(6, dtype=torch.float64)}),
            r"model\.bias is \[6\] float32 there and \[6\] float64 here",
        ),
    ],
)
def test_tensors_of_another_model_are_refused_and_unchanged(
    tmp_path: Path, change: Any, message: str
) -> None:
    path = save_checkpoint(tmp_path, 1, example(), STATE)
    target = zeros_like(example())
    change(target)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, target)
    assert all(not tensor.any() for tensor in target.values())


def test_tensors_can_be_loaded_by_prefix(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, example(), STATE)
    expected = {name: tensor for name, tensor in example().items() if name.startswith("model.")}
    target = zeros_like(expected)
    assert load_checkpoint(path, target, prefix="model.") == STATE
    assert_equal(target, expected)


def test_state_may_contain_numbers_that_are_not_finite(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {}, {"losses": [math.inf, -math.inf, math.nan]})
    losses = load_checkpoint(path, {})["losses"]
    assert losses[:2] == [math.inf, -math.inf]
    assert math.isnan(losses[2])


def test_state_other_than_json_and_values_other_than_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not JSON"):
        save_checkpoint(tmp_path, 1, example(), {"x": object()})
    with pytest.raises(CheckpointError, match=r"model\.w is int, not a tensor"):
        save_checkpoint(tmp_path, 1, {"model.w": 3}, {})  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []


def full_disk(self: CheckpointWriter, *args: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "__0_0.distcp")


def test_a_full_disk_raises_a_workspace_error_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, 1, example(), STATE)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(CheckpointWriter, "write_data", full_disk)
    with pytest.raises(WorkspaceError, match="No space left on device: free some space"):
        save_checkpoint(tmp_path, 2, example(), STATE)
    assert sorted(tmp_path.rglob("*")) == before
    assert read_tracker(tmp_path) == 1


def test_the_cause_of_a_failed_write_is_reported(tmp_path: Path) -> None:
    # A limit on file sizes fails inside torch's zip writer, like a full disk. torch wraps the
    # error in a RuntimeError.
    script = f"""
import pathlib, resource, signal, torch
from megacore.checkpoint.save import save_checkpoint
from megacore.errors import WorkspaceError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
try:
    save_checkpoint(pathlib.Path({str(tmp_path)!r}), 1, {{"model.w": torch.ones(100_000)}}, {{}})
except WorkspaceError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG
    )
    assert ": File too large: raise the limit on file sizes" in result.stdout, result.stderr
    assert list(tmp_path.iterdir()) == []


def run_two_rank_cases(root: str) -> dict[str, Any]:
    """Run all cases of one rank of two in a single process group and return their results."""
    rank, folder = dist.get_rank(), Path(root)
    results: dict[str, Any] = {}
    tensors = example()
    path = save_checkpoint(
        folder / "replicated", 3, tensors, {**STATE, "rank": rank}, validation_loss=1.0
    )
    target = zeros_like(tensors)
    results["state"] = load_checkpoint(path, target)
    assert_equal(target, tensors)

    large = {f"model.{i}": torch.full((64, 1024), float(i)) for i in range(8)}
    save_checkpoint(folder / "large", 1, large, {})

    values = torch.arange(40.0).reshape(8, 5)
    sharded = {
        "model.rows": half(values, rank),
        "model.pairs": half(values.view(20, 2), rank),
        "model.full": TensorShard.of_runs([(0, values.view(-1))], (8, 5), torch.float32),
        "model.plain": values.clone(),
        f"model.rank.{rank}": values + rank,
    }
    path = save_checkpoint(folder / "sharded", 3, sharded, STATE)
    assert_equal(read_tensors(path, "model.rows"), {"model.rows": values})
    swapped = {
        "model.rows": torch.zeros(8, 5),
        "model.pairs": torch.zeros(20, 2),
        "model.full": half(torch.zeros(8, 5), rank),
        "model.plain": half(torch.zeros(8, 5), 1 - rank),
        f"model.rank.{1 - rank}": torch.zeros(8, 5),
    }
    load_checkpoint(path, swapped, expected=names_of_all(swapped))
    results["swapped"] = {name: list(rectangles(tensor)) for name, tensor in swapped.items()}

    results["one rank's full disk"] = failing_save(
        folder / "full", full_disk if rank == 1 else None
    )
    results["one rank's wrong type"] = failing_save(
        folder / "wrong", None, {"model.w": 3} if rank == 1 else None
    )
    results["root is a file"] = failing_save(folder / "file", None)
    return results


def half(tensor: Tensor, rank: int) -> TensorShard:
    """Return a copy of one half of the elements."""
    size = tensor.numel() // 2
    run = tensor.flatten()[rank * size : (rank + 1) * size].clone()
    return TensorShard.of_runs([(rank * size, run)], tensor.shape, tensor.dtype)


def rectangles(tensor: Tensor | TensorShard) -> list[tuple[tuple[int, ...], Tensor]]:
    pieces = tensor.pieces if isinstance(tensor, TensorShard) else {torch.Size((0, 0)): tensor}
    return [(tuple(offsets), piece) for offsets, piece in pieces.items()]


def failing_save(root: Path, write: Any, tensors: dict[str, Any] | None = None) -> tuple[str, str]:
    """Save with `write` as the writer and return type and message of the error."""
    original = CheckpointWriter.write_data
    if write is not None:
        CheckpointWriter.write_data = write  # type: ignore[method-assign]
    try:
        save_checkpoint(root, 3, tensors or example(), STATE)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        CheckpointWriter.write_data = original  # type: ignore[method-assign]
    return "nothing", ""


TwoRankResults = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def two_rank_results(tmp_path_factory: pytest.TempPathFactory) -> TwoRankResults:
    """Provide the directory of the checkpoints of two ranks and the results of each rank."""
    root = tmp_path_factory.mktemp("two-ranks")
    (root / "file").write_text("in the way")
    return root, run_distributed(2, run_two_rank_cases, str(root))


def test_every_rank_loads_the_state_of_rank_0(two_rank_results: TwoRankResults) -> None:
    root, results = two_rank_results
    assert all(result["state"] == {**STATE, "rank": 0} for result in results)
    replicated = root / "replicated" / "iter_0000003"
    assert json.loads((replicated / "state.json").read_text())["rank"] == 0


def test_two_ranks_write_a_file_each(two_rank_results: TwoRankResults) -> None:
    root, _ = two_rank_results
    replicated = root / "replicated" / "iter_0000003"
    files = Marker.read(replicated).files
    assert set(files) == {".metadata", "__0_0.distcp", "__1_0.distcp", "state.json"}
    assert_equal(read_tensors(replicated), example())


def test_sharded_tensors_are_loaded_into_other_shards(two_rank_results: TwoRankResults) -> None:
    root, results = two_rank_results
    assert set(read_tensors(root / "sharded" / "iter_0000003")) == {
        f"model.{name}" for name in ("rows", "pairs", "full", "plain", "rank.0", "rank.1")
    }
    values = torch.arange(40.0).reshape(8, 5)
    for rank, result in enumerate(results):
        swapped = result["swapped"]
        assert_equal(
            {
                name: swapped[name][0][1]
                for name in ("model.rows", "model.pairs", f"model.rank.{1 - rank}")
            },
            {
                "model.rows": values,
                "model.pairs": values.view(20, 2),
                f"model.rank.{1 - rank}": values + (1 - rank),
            },
        )
        for name, part in (("model.full", rank), ("model.plain", 1 - rank)):
            ((offsets, piece),) = swapped[name]
            assert offsets == (4 * part, 0)
            assert torch.equal(piece, values[4 * part : 4 * part + 4])


def test_a_failure_of_one_rank_fails_the_save_on_both(two_rank_results: TwoRankResults) -> None:
    root, results = two_rank_results
    for result in results:
        assert result["one rank's full disk"][0] == "WorkspaceError"
        assert "No space left" in result["one rank's full disk"][1]
        assert result["one rank's wrong type"][0] == "CheckpointError"
        assert result["root is a file"][0] == "WorkspaceError"
        assert "a file is in the way" in result["root is a file"][1]
    assert list((root / "full").iterdir()) == []
    assert not (root / "wrong").exists()


def test_replicated_tensors_are_written_once_in_about_equal_shares(
    two_rank_results: TwoRankResults,
) -> None:
    root, _ = two_rank_results
    files = Marker.read(root / "large" / "iter_0000001").files
    sizes = [files[f"__{rank}_0.distcp"].size for rank in range(2)]
    one_copy = 8 * 64 * 1024 * 4
    assert one_copy <= sum(sizes) < 1.1 * one_copy
    assert min(sizes) > 0.4 * one_copy


def test_the_previous_checkpoint_remains_if_the_new_one_cannot_take_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_checkpoint(tmp_path, 3, {"model.w": torch.zeros(2)}, {})
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if target == path and "-replaced" not in source.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(FileAccessError, match="Input/output error"):
        save_checkpoint(tmp_path, 3, {"model.w": torch.ones(2)}, {})
    assert [each.name for each in tmp_path.glob("iter_*")] == [path.name]
    assert latest_complete(tmp_path) == path
    assert_equal(read_tensors(path), {"model.w": torch.zeros(2)})


def test_a_replaced_checkpoint_is_deleted_after_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process that is killed during the slow deletion must not lose the new checkpoint.
    save_checkpoint(tmp_path, 3, {"model.w": torch.zeros(2)}, {})

    def killed(path: Path, **_: object) -> None:
        if path.name.endswith("-replaced"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, 3, {"model.w": torch.ones(2)}, {})
    newest = latest_complete(tmp_path)
    assert newest is not None
    assert_equal(read_tensors(newest), {"model.w": torch.ones(2)})
    save_checkpoint(tmp_path, 4, {"model.w": torch.ones(2)}, {})
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000003", "iter_0000004"]


def test_a_replaced_checkpoint_survives_a_disk_that_keeps_failing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_checkpoint(tmp_path, 3, {"model.w": torch.zeros(2)}, {})
    rename = os.rename

    def fail(source: Path, target: Path) -> None:
        if target != path:
            return rename(source, target)
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(source))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(FileAccessError, match="Input/output error"):
            save_checkpoint(tmp_path, 3, {"model.w": torch.ones(2)}, {})
    assert latest_complete(tmp_path) is None
    save_checkpoint(tmp_path, 4, {"model.w": torch.ones(2)}, {})
    assert_equal(read_tensors(path), {"model.w": torch.zeros(2)})
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000003", "iter_0000004"]
