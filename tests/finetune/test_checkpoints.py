"""Checkpoints of fine-tuning: resuming, interruptions and damage."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.artifact.workspace import STOP_FILE
from megacore.checkpoint.format import Marker, verify
from megacore.errors import CheckpointError, WorkspaceError
from megacore.finetune.checkpoints import Progress, writing
from tests.finetune._tiny_task import Run, TinyTask, config, run, weights

TRAIN = {"micro_batch_size": 8}
SLOW = pytest.mark.slow
RANK_CASES = {
    "fast": ("ddp", "ddp resumed"),
    "slow": ("zero2 resumed", "zero3 resumed", "fsdp resumed"),
}


@pytest.mark.parametrize(
    "kind",
    ["ddp", *(pytest.param(kind, marks=SLOW) for kind in ("zero2", "zero3", "fsdp"))],
)
def test_resumed_run_of_two_ranks_is_bit_identical(
    rank_results: list[dict[str, Any]], kind: str
) -> None:
    """With dropout, within an epoch; only one rank gets the signal."""
    for rank in rank_results:
        results = rank[f"{kind} resumed"]
        assert results["stopped"].startswith("PreemptedError: training stopped at iteration 5 of 6")
        assert results["stopped at"] == results["from"] == 5
        unbroken_losses, resumed_losses = results["losses"]
        assert resumed_losses == unbroken_losses
        assert results["metrics"][0] == results["metrics"][1]
        before, after = results["weights"]
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.fixture(scope="module")
def unbroken(tiny_root: Path) -> Run:
    """Provide an uninterrupted run with dropout."""
    return run(config(train=TRAIN), TinyTask(tiny_root / "dropout"), tiny_root / "dropped")


def same_run(first: Run, second: Run) -> bool:
    one, other = weights(first.directory), weights(second.directory)
    return first.losses == second.losses and all(
        torch.equal(one[name], other[name]) for name in one
    )


def test_run_stopped_by_a_file_within_an_epoch_is_resumed_exactly(
    unbroken: Run, tiny_root: Path, tmp_path: Path
) -> None:
    (tmp_path / STOP_FILE).touch()
    stopped = run(config(train=TRAIN), TinyTask(tiny_root / "dropout"), tmp_path)
    assert stopped.stopped is not None
    assert stopped.stopped.startswith("TrainingStoppedError: training stopped at iteration 1 of 6")
    assert not (tmp_path / STOP_FILE).exists()
    resumed = run(config(train=TRAIN), TinyTask(tiny_root / "dropout"), tmp_path, attempt=2)
    assert resumed.of("start")[-1]["resumed_from"] == 1
    assert same_run(unbroken, resumed)


def test_run_resumed_within_a_log_interval_logs_the_mean_of_the_whole_interval(
    unbroken: Run, tiny_root: Path, tmp_path: Path
) -> None:
    configuration = config(train=TRAIN | {"log_interval": 4})
    run(configuration, TinyTask(tiny_root / "dropout", signal_at=2), tmp_path)
    resumed = run(configuration, TinyTask(tiny_root / "dropout"), tmp_path, attempt=2)
    assert resumed.of("start")[-1]["resumed_from"] == 2
    first, rest = unbroken.losses[:4], unbroken.losses[4:]
    assert [event["iteration"] for event in resumed.of("step")] == [4, 6]
    assert resumed.losses == [sum(first) / 4, sum(rest) / 2]
    assert [event["interval_iterations"] for event in resumed.of("step")] == [4, 2]


def test_resumed_run_does_the_evaluation_a_signal_prevented(
    unbroken: Run, tiny_root: Path, tmp_path: Path
) -> None:
    stopped = run(config(train=TRAIN), TinyTask(tiny_root / "dropout", signal_at=3), tmp_path)
    assert stopped.stopped is not None
    assert [event["iteration"] for event in stopped.of("evaluation")] == [0]
    assert stopped.of("checkpoint")[-1]["validation_loss"] is None
    resumed = run(config(train=TRAIN), TinyTask(tiny_root / "dropout"), tmp_path, attempt=2)
    assert [event["iteration"] for event in resumed.of("evaluation")] == [0, 3, 6]
    assert same_run(unbroken, resumed)


@pytest.mark.parametrize(
    ("moment", "iteration"),
    [(1, 0), pytest.param(3, 3, marks=SLOW), pytest.param(12, 6, marks=SLOW)],
)
def test_evaluation_interrupted_by_a_signal_is_repeated(
    unbroken: Run, tiny_root: Path, tmp_path: Path, moment: int, iteration: int
) -> None:
    """Interrupted before the first step, after an epoch and after the last step.

    Losses of seven samples follow the evaluation after an epoch.
    """
    stopped = run(
        config(train=TRAIN), TinyTask(tiny_root / "dropout", signal_in_evaluation=moment), tmp_path
    )
    assert stopped.stopped is not None
    assert f"training stopped at iteration {iteration} of 6" in stopped.stopped
    assert iteration not in [event["iteration"] for event in stopped.of("evaluation")]
    resumed = run(config(train=TRAIN), TinyTask(tiny_root / "dropout"), tmp_path, attempt=2)
    assert resumed.of("start")[-1]["resumed_from"] == iteration
    assert [event["iteration"] for event in resumed.of("evaluation")] == [0, 3, 6]
    assert same_run(unbroken, resumed)


def test_test_split_interrupted_by_a_signal_is_repeated(
    unbroken: Run, tiny_root: Path, tmp_path: Path
) -> None:
    """A signal in the last batch of the validation is seen before the first of the test."""
    stopped = run(
        config(train=TRAIN),
        TinyTask(tiny_root / "dropout", test=5, signal_in_evaluation=4),
        tmp_path,
    )
    assert stopped.stopped is not None
    assert (stopped.of("test"), stopped.of("best")) == ([], [])
    resumed = run(config(train=TRAIN), TinyTask(tiny_root / "dropout", test=5), tmp_path, attempt=2)
    assert [event["iteration"] for event in resumed.of("evaluation")] == [0, 3, 3, 6]
    assert [event["iteration"] for event in resumed.of("test")] == [3, 6]
    assert all(
        torch.equal(tensor, weights(tmp_path)[name])
        for name, tensor in weights(unbroken.directory).items()
    )


def test_damaged_and_incomplete_checkpoints_are_skipped(
    unbroken: Run, tiny_root: Path, tmp_path: Path
) -> None:
    configuration = config(train=TRAIN, checkpoint={"save_interval": 1, "keep_last": 3})
    run(configuration, TinyTask(tiny_root / "dropout", signal_at=5), tmp_path)
    root = tmp_path / "checkpoints"
    assert sorted(path.name for path in root.iterdir()) == [
        "iter_0000003",
        "iter_0000004",
        "iter_0000005",
    ]
    # Only the model of iteration 3 was evaluated.
    assert [Marker.read(path).validation_loss is None for path in sorted(root.iterdir())] == [
        False,
        True,
        True,
    ]
    weights_file = root / "iter_0000005" / "checkpoint-5" / "model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:-1] + b"!")
    (root / "iter_0000004" / "complete.json").unlink()
    shutil.copytree(root / "iter_0000003", root / "iter_0000009.tmp-1234")
    resumed = run(configuration, TinyTask(tiny_root / "dropout"), tmp_path, attempt=2)
    assert resumed.of("start")[-1]["resumed_from"] == 3
    warnings = [event["message"] for event in resumed.of("warning")]
    assert (
        "model.safetensors has other content than when it was written; using the one before it"
        in warnings[0].replace(": use another checkpoint", "")
    )
    assert "iter_0000004 has no complete.json" in warnings[1]
    assert [loss for loss in resumed.losses if loss not in unbroken.losses] == []
    assert all(
        torch.equal(tensor, weights(tmp_path)[name])
        for name, tensor in weights(unbroken.directory).items()
    )
    assert sorted(path.name for path in root.iterdir()) == [
        "iter_0000004",
        "iter_0000005",
        "iter_0000006",
    ]
    assert verify(root / "iter_0000005").iteration == 5, "what was damaged was written again"


def test_checkpoint_contains_all_files(unbroken: Run) -> None:
    path = unbroken.directory / "checkpoints" / "iter_0000006"
    marker = Marker.read(path)
    assert marker.files.keys() == {
        "progress.json",
        *(
            f"checkpoint-6/{name}"
            for name in ("config.json", "generation_config.json", "model.safetensors")
        ),
        *(f"checkpoint-6/{name}" for name in ("optimizer.pt", "rng_state.pth", "scheduler.pt")),
        *(f"checkpoint-6/{name}" for name in ("trainer_state.json", "training_args.bin")),
    }
    assert marker.problem(path, "full") is None


@pytest.mark.parametrize(
    "moment",
    [
        "mark",
        "publish",
        "rename",
        *(pytest.param(at, marks=SLOW) for at in ("stage", "state", "measure", "retain")),
    ],
)
def test_crash_while_saving_leaves_a_checkpoint_to_resume_from(
    unbroken: Run, tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    from megacore.checkpoint import retain
    from megacore.finetune import checkpoints
    from megacore.finetune.trainer import StepTrainer

    class CrashError(Exception):
        pass

    targets: dict[str, tuple[Any, str]] = {
        "stage": (checkpoints.secrets, "token_hex"),
        "state": (StepTrainer, "write_state"),
        "measure": (checkpoints, "sync_file"),
        "mark": (Marker, "write"),
        "publish": (checkpoints, "publish"),
        "rename": (retain, "sync_directory"),
        "retain": (checkpoints, "apply_retention"),
    }
    configuration = config(train=TRAIN | {"max_steps": 6}, checkpoint={"save_interval": 1})
    target, name = targets[moment]
    original, calls = getattr(target, name), 0

    def crash(*arguments: Any, **values: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 12 if moment == "measure" else calls == 2:
            raise CrashError
        return original(*arguments, **values)

    with monkeypatch.context() as patched:
        patched.setattr(target, name, crash)
        with pytest.raises(CrashError):
            run(configuration, TinyTask(tiny_root / "dropout"), tmp_path)
    resumed = run(configuration, TinyTask(tiny_root / "dropout"), tmp_path, attempt=2)
    complete = moment in ("publish", "rename", "retain")
    assert resumed.of("start")[-1]["resumed_from"] == (2 if complete else 1)
    assert all(
        torch.equal(tensor, weights(tmp_path)[name])
        for name, tensor in weights(unbroken.directory).items()
    )
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["iter_0000006"]


def test_checkpoint_of_another_number_of_ranks_is_refused(
    tiny_root: Path, rank_root: Path, rank_results: list[dict[str, Any]], tmp_path: Path
) -> None:
    shutil.copytree(rank_root / "ddp", tmp_path / "ddp")
    with pytest.raises(CheckpointError, match="is of 2 ranks and the job has 1"):
        run(config(), TinyTask(tiny_root / "model", train=24), tmp_path / "ddp")


def test_best_model_is_replaced_once_a_better_one_is_complete(
    unbroken: Run, tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megacore.finetune import best

    calls = 0
    original = best.write_model

    def crash(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        original(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(best, "write_model", crash)
        with pytest.raises(KeyboardInterrupt):
            run(config(train=TRAIN), TinyTask(tiny_root / "dropout"), tmp_path)
    complete = [path.name for path in (tmp_path / "best").iterdir() if ".tmp-" not in path.name]
    assert complete == ["iter_0000003"]
    resumed = run(config(train=TRAIN), TinyTask(tiny_root / "dropout"), tmp_path, attempt=2)
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["iter_0000006"]
    assert all(
        torch.equal(tensor, weights(tmp_path)[name])
        for name, tensor in weights(unbroken.directory).items()
    )
    assert resumed.of("best")[-1]["iteration"] == 6


def test_a_full_disk_under_a_small_file_is_a_workspace_error() -> None:
    full = Path("/dev/full")
    message = r"cannot write /dev/full: .*: free some space"
    with pytest.raises(WorkspaceError, match=message), writing(full):
        torch.save({"seed": 1}, full)


def test_progress_of_another_version_is_refused() -> None:
    assert Progress.from_json(Progress(iteration=3).to_json()).iteration == 3
    with pytest.raises(CheckpointError, match="has version 99"):
        Progress.from_json(Progress().to_json() | {"version": 99})


def test_progress_without_the_losses_of_its_interval_is_read() -> None:
    values = Progress(iteration=3).to_json() | {"version": 2}
    del values["interval_losses"]
    assert Progress.from_json(values) == Progress(iteration=3)
