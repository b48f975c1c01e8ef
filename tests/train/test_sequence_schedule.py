"""Training runs whose sequences grow, in several layouts and engines, resumed in each part."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.config.run import RunConfig
from megacore.observe.flops import TransformerShape, step_flops
from megacore.train.step import cut
from tests._dist import run_distributed, still_alive
from tests.train import _runs
from tests.train.test_loop import assert_same_run

PHASES = ((0, 4), (16, 8), (32, 16))
"""Lengths of two iterations of 8 samples each."""
ITERATIONS = 6
MODEL = {"position_embedding_type": "rope", "hidden_dropout": 0.1, "attention_dropout": 0.1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "dp2": {"data_parallel_sharding": "optimizer", "grad_reduce_bucket_mb": 0.01},
}
DEEPSPEED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "deepspeed dp2": ({"zero_stage": 2}, {}),
    "deepspeed pp2": ({"zero_stage": 1}, {"pipeline_model_parallel_size": 2}),
}


def until(
    train_iters: int,
    parallel: Mapping[str, Any] | None = None,
    engine: str = "native",
    **sections: dict[str, Any],
) -> RunConfig:
    """Return the configuration of a run of `train_iters` iterations with masks of documents."""
    schedule = [{"samples": first, "seq_length": length} for first, length in PHASES]
    data = {
        "seq_length_schedule": schedule,
        "reset_attention_mask": True,
        "reset_position_ids": True,
        "eod_mask_loss": True,
    }
    train = _runs.config().train.model_dump() | {"train_iters": train_iters, "eval_interval": 1}
    return _runs.config(
        engine,
        data=data | sections.pop("data", {}),
        model=MODEL | sections.pop("model", {}),
        train=train | sections.pop("train", {}),
        checkpoint={"save_interval": 1, "keep_last": 10},
        parallel=dict(parallel or {}),
        launch={"nproc_per_node": 1 if parallel is None else 2},
        **sections,
    )


def train_in_all_layouts(data: Path, root: Path) -> None:
    still = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    for name, layout in LAYOUTS.items():
        still_alive()
        _runs.train(until(ITERATIONS, layout, model=still), data, root / name)
    for number, name in enumerate(("tp2", "pp2", "dp2"), 1):
        still_alive()
        # One run continues in one layout after the other, with another length in each.
        run = until(2 * number, LAYOUTS[name], model=still)
        _runs.train(run, data, root / "changing", attempt=number)


def train_with_deepspeed(data: Path, root: Path) -> None:
    still = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    for name, (deepspeed, layout) in DEEPSPEED.items():
        still_alive()
        run = until(ITERATIONS, layout, "deepspeed", model=still, deepspeed=deepspeed)
        _runs.train(run, data, root / name)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    _runs.train(until(ITERATIONS), data, directory)
    return directory


@pytest.fixture(scope="module")
def serial(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Provide the losses of a run on one rank, without dropout."""
    directory = tmp_path_factory.mktemp("serial")
    still = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    _runs.train(until(ITERATIONS, model=still), data, directory)
    return list(_runs.losses(directory).values())


def loss_by_position(run_directory: Path) -> list[float]:
    """Return the last loss of each position, whose mean must be the validation loss."""
    *_, event = _runs.events(run_directory, "perplexity")
    rows = event["by_position"]
    assert [row["start"] for row in rows] == list(range(_runs.SEQ_LENGTH))
    mean = sum(row["loss"] * row["tokens"] for row in rows) / sum(row["tokens"] for row in rows)
    assert mean == pytest.approx(event["valid_loss"], abs=1e-6)
    return [row["loss"] for row in rows]


def test_every_label_is_predicted_once_from_the_tokens_before_it() -> None:
    batch = torch.arange(2 * 13).reshape(2, 13)
    pieces = cut(batch, 4)
    assert pieces.tolist()[:3] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9, 10, 11, 12]]
    assert torch.equal(pieces[:, 1:].reshape(2, 12), batch[:, 1:])
    assert torch.equal(pieces[:, :-1].reshape(2, 12), batch[:, :-1])
    assert torch.equal(cut(batch, 12), batch)


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_a_run_that_stops_in_any_part_equals_one_that_never_stopped(
    stop: int, data: Path, whole: Path, tmp_path: Path
) -> None:
    _runs.train(until(stop), data, tmp_path)
    _runs.train(until(ITERATIONS), data, tmp_path, attempt=2)
    assert_same_run(whole, tmp_path, ITERATIONS)


def test_reports_have_the_real_length_and_count_its_operations(data: Path, tmp_path: Path) -> None:
    run = until(ITERATIONS, train={"log_interval": 3})
    _runs.train(run, data, tmp_path)
    steps = _runs.events(tmp_path, "step")
    assert [step["seq_length"] for step in steps] == [8, 16]
    assert [step["consumed_tokens"] for step in steps] == [24 * 16, 48 * 16]
    shape = TransformerShape.of(run, 64)
    for step, lengths in zip(steps, ((4, 4, 8), (8, 16, 16)), strict=True):
        operations = sum(
            step_flops(_with_length(shape, length), 8 * 16 // length, "none") for length in lengths
        )
        rate = operations / (3 * step["ms_per_iteration"] / 1e3) / 1e12
        assert step["model_tflops"] == pytest.approx(rate, rel=1e-9)


def _with_length(shape: TransformerShape, length: int) -> TransformerShape:
    from dataclasses import replace

    return replace(shape, seq_length=length)


def test_shorter_sequences_change_the_losses_and_not_the_last_validation_length(
    data: Path, whole: Path, tmp_path: Path
) -> None:
    _runs.train(until(2, data={"seq_length_schedule": None}), data, tmp_path)
    constant, growing = _runs.losses(tmp_path), _runs.losses(whole)
    assert constant[1] != growing[1]
    samples = {event["samples"] for event in _runs.events(whole, "perplexity")}
    assert samples == {event["samples"] for event in _runs.events(tmp_path, "perplexity")}


def test_every_layout_sees_the_same_sequences(
    data: Path, serial: list[float], tmp_path: Path
) -> None:
    run_distributed(2, train_in_all_layouts, data, tmp_path)
    positions = [loss_by_position(tmp_path / name) for name in LAYOUTS]
    assert positions[1] == pytest.approx(positions[0], rel=1e-5)
    assert positions[2] == pytest.approx(positions[0], rel=1e-5)
    for name in (*LAYOUTS, "changing"):
        assert list(_runs.losses(tmp_path / name).values()) == pytest.approx(serial, rel=1e-5), name


@pytest.mark.slow
def test_deepspeed_trains_the_same_sequences(
    data: Path, serial: list[float], tmp_path: Path
) -> None:
    run_distributed(2, train_with_deepspeed, data, tmp_path)
    for name in DEEPSPEED:
        loss_by_position(tmp_path / name)
        assert list(_runs.losses(tmp_path / name).values()) == pytest.approx(serial, rel=1e-5), name


@pytest.mark.long
@pytest.mark.usefixtures("compiler_cache")
def test_compiled_layers_give_the_same_bits_after_a_resume(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))
    last = 4
    schedule = [{"samples": first, "seq_length": length} for first, length in ((0, 8), (16, 16))]

    def train(train_iters: int, directory: Path, attempt: int = 1) -> None:
        torch._dynamo.reset()
        compiled = {"compile": "on", "eval_interval": last}
        run = until(train_iters, data={"seq_length_schedule": schedule}, train=compiled)
        _runs.train(run, data, directory, attempt=attempt)

    train(last, tmp_path / "whole")
    (start,) = _runs.events(tmp_path / "whole", "start")
    assert start["kernels"]["layers"] == "torch.compile of each layer"
    train(3, tmp_path / "resumed")
    train(last, tmp_path / "resumed", attempt=2)
    assert_same_run(tmp_path / "whole", tmp_path / "resumed", last)
