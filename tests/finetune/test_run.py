"""The fine-tuning loop on one rank."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from megacore.config.finetune import FinetuneTrainConfig
from megacore.errors import LossError, MemoryExhaustedError
from megacore.finetune.resolve import Schedule
from tests.finetune._tiny_task import LENGTH, Run, TinyTask, config, run

BATCH_OF_EIGHT = {"micro_batch_size": 8}
RANK_CASES = {"fast": ("ddp",)}


@pytest.fixture(scope="module")
def complete_run(tiny_root: Path) -> Run:
    return run(
        config(train=BATCH_OF_EIGHT),
        TinyTask(tiny_root / "model", train=24),
        tiny_root / "one-rank",
    )


def test_training_improves_the_loss(complete_run: Run) -> None:
    start, *_, end = complete_run.of("evaluation")
    assert (start["iteration"], end["iteration"]) == (0, 6)
    assert end["loss"] < start["loss"] - 0.1
    assert [event["epoch"] for event in complete_run.of("evaluation")] == [0, 1, 2]
    assert all(event["metrics"]["samples"] == 7 for event in complete_run.of("evaluation"))
    assert complete_run.events[-1]["reason"] == "finished"


def test_two_ranks_train_like_one_with_twice_the_micro_batch(
    complete_run: Run, rank_results: list[dict[str, Any]]
) -> None:
    # The batches have the same samples: each rank takes four of eight.
    assert rank_results[0]["ddp"]["losses"] == pytest.approx(complete_run.losses, rel=1e-6)
    assert rank_results[0]["ddp"]["metrics"] == pytest.approx(
        complete_run.of("evaluation")[-1]["metrics"], rel=1e-6
    )


def test_result_describes_the_best_model(complete_run: Run) -> None:
    result = json.loads((complete_run.directory / "result.json").read_text())
    best = min(complete_run.of("evaluation")[1:], key=lambda event: event["loss"])
    assert result["best"] == f"best/iter_{best['iteration']:07d}"
    assert (result["metric"], result["value"]) == ("loss", best["loss"])
    assert result["start_metrics"] == complete_run.of("evaluation")[0]["metrics"]
    assert (result["iterations"], result["epochs"]) == (6, 2.0)
    assert result["train_seconds_per_epoch"] > 0
    assert [each["path"] for each in result["checkpoints"]] == ["checkpoints/iter_0000006"]
    assert (complete_run.directory / result["best"] / "complete.json").is_file()


def test_best_model_is_scored_on_the_test_split(
    complete_run: Run, tiny_root: Path, tmp_path: Path
) -> None:
    tested = run(
        config(train=BATCH_OF_EIGHT), TinyTask(tiny_root / "model", train=24, test=5), tmp_path
    )
    assert tested.losses == complete_run.losses  # the test split changes nothing
    result = json.loads((tmp_path / "result.json").read_text())
    best, scored = tested.of("best")[-1], tested.of("test")
    assert [event["iteration"] for event in scored] == [
        event["iteration"] for event in tested.of("best")
    ]
    assert result["test_metrics"] == scored[-1]["metrics"]
    assert result["test_metrics"]["samples"] == 5
    assert result["test_metrics"]["loss"] != result["metrics"]["loss"]
    assert (
        json.loads((tmp_path / best["path"] / "metrics.json").read_text())["test_metrics"]
        == scored[-1]["metrics"]
    )
    assert json.loads((complete_run.directory / "result.json").read_text())["test_metrics"] is None
    assert complete_run.of("test") == []


def test_events_count_samples_tokens_and_epochs(complete_run: Run) -> None:
    last = complete_run.of("step")[-1]
    assert (last["consumed_samples"], last["consumed_tokens"]) == (48, 48 * LENGTH)
    assert last["epoch"] == 2.0
    assert [event["lr"] for event in complete_run.of("step")] == pytest.approx(
        [0, 5e-3, 4e-3, 3e-3, 2e-3, 1e-3]
    )
    assert [event["epoch"] for event in complete_run.of("epoch")] == [1, 2]


def test_finished_run_exits_without_training(complete_run: Run, tiny_root: Path) -> None:
    second_attempt = run(
        config(train=BATCH_OF_EIGHT),
        TinyTask(tiny_root / "model", train=24),
        complete_run.directory,
        attempt=2,
    )
    assert [event["kind"] for event in second_attempt.events if event["attempt"] == 2] == [
        "start",
        "exit",
    ]


def test_max_steps_ends_within_an_epoch_and_evaluates(
    tiny_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configuration = config(
        train=BATCH_OF_EIGHT | {"max_steps": 4, "gradient_accumulation_steps": 2}
    )
    with caplog.at_level(logging.INFO, "megacore"):
        logging.getLogger("megacore").addHandler(caplog.handler)
        result = run(configuration, TinyTask(tiny_root / "model", train=40), tmp_path)
    assert len(result.losses) == 4, "steps of 2, 2 and 1 batches, and one more"
    assert [event["iteration"] for event in result.of("evaluation")] == [0, 3, 4]
    assert result.of("step")[-1]["epoch"] == 1.4
    assert result.of("checkpoint")[-1]["iteration"] == 4
    lines = [record.getMessage() for record in caplog.records]
    assert any(
        line.startswith("epoch 2/2 | step 4/4 | loss 3.") and " | ETA 0 s" in line for line in lines
    )
    logging.getLogger("megacore").removeHandler(caplog.handler)


def test_nan_loss_ends_the_run(tiny_root: Path, tmp_path: Path) -> None:
    with pytest.raises(
        LossError, match=r"the loss is nan at step 4 .* the last good checkpoint is .*iter_0000003"
    ):
        run(
            config(train=BATCH_OF_EIGHT),
            TinyTask(tiny_root / "model", train=24, poison=4),
            tmp_path,
        )


def test_out_of_memory_error_names_the_settings_that_help(
    tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(self: TinyTask, rows: Any) -> Any:
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"
        )

    monkeypatch.setattr(TinyTask, "collate", exhausted)
    with pytest.raises(MemoryExhaustedError) as caught:
        run(config(train=BATCH_OF_EIGHT), TinyTask(tiny_root / "model"), tmp_path)
    for part in (
        "train.micro_batch_size (now 8; 4 with train.gradient_accumulation_steps 2",
        "train.gradient_checkpointing to true",
        "launch.distributed (now ddp) to zero2 or zero3 or zero3-offload",
        "--find-batch-size",
    ):
        assert part in str(caught.value)


def test_recomputed_activations_do_not_change_the_losses(
    complete_run: Run, tiny_root: Path, tmp_path: Path
) -> None:
    configuration = config(train=BATCH_OF_EIGHT | {"gradient_checkpointing": True, "max_steps": 3})
    result = run(configuration, TinyTask(tiny_root / "model", train=24), tmp_path)
    assert result.losses[:2] == pytest.approx(complete_run.losses[:2], rel=1e-6)


@pytest.mark.parametrize(
    ("samples", "ranks", "accumulated", "max_steps", "expected"),
    [
        (22, 1, 1, None, (6, 6, 18, 3)),
        (22, 2, 1, None, (3, 3, 9, 3)),
        (22, 2, 2, None, (3, 2, 6, 3)),
        (22, 2, 2, 5, (3, 2, 5, 3)),
        (1, 4, 8, None, (1, 1, 3, 3)),
        (22, 1, 1, 20, (6, 6, 20, 4)),
    ],
)
def test_schedule_follows_from_samples_ranks_and_accumulation(
    samples: int, ranks: int, accumulated: int, max_steps: int | None, expected: tuple[int, ...]
) -> None:
    train = FinetuneTrainConfig(
        num_epochs=3,
        micro_batch_size=4,
        gradient_accumulation_steps=accumulated,
        max_steps=max_steps,
    )
    schedule = Schedule.of(train, samples, ranks)
    assert (
        schedule.batches_per_epoch,
        schedule.steps_per_epoch,
        schedule.total_steps,
        schedule.epochs,
    ) == expected
