"""Training runs that are resumed in the same layout and in other layouts."""

from pathlib import Path
from typing import Any

import pytest

from megacore.config.run import RunConfig
from tests._dist import run_distributed, still_alive
from tests.train import _runs
from tests.train.test_loop import assert_same_run

pytestmark = pytest.mark.slow
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2, "pipeline_partition": "uniform"},
    "cp2": {"context_parallel_size": 2, "data_parallel_sharding": "optimizer"},
    "dp2": {"data_parallel_sharding": "optimizer", "grad_reduce_bucket_mb": 0.01},
    "dp2 parameters": {"data_parallel_sharding": "parameters"},
}
WHOLE, GRADIENTS = {"data_parallel_sharding": "none"}, {"data_parallel_sharding": "gradients"}
CHANGES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "adam": ("adam", [LAYOUTS[name] for name in ("tp2", "cp2", "dp2")]),
    "muon": ("muon", [LAYOUTS[name] for name in ("tp2", "pp2", "dp2")]),
    "sharding": ("adam", [WHOLE, LAYOUTS["dp2 parameters"], LAYOUTS["dp2"], GRADIENTS]),
}
"""Optimizer of a run, and its layouts, each for two iterations."""
ITERATIONS = 6


def until(
    train_iters: int, parallel: dict[str, Any], optimizer: str = "adam", **model: float
) -> RunConfig:
    """Return the configuration of a run of `train_iters` iterations in a layout."""
    train = _runs.config().train.model_dump() | {"train_iters": train_iters, "eval_interval": 100}
    ranks = 2 if parallel else 1
    return _runs.config(
        model=model,
        optim={"name": optimizer},
        train=train,
        checkpoint={"save_interval": 3},
        parallel=parallel,
        launch={"nproc_per_node": ranks},
    )


def train_whole_and_resumed(data: Path, root: Path) -> None:
    """Train each layout with dropout for 6 iterations, unbroken and resumed after 3."""
    for name, layout in LAYOUTS.items():
        still_alive()
        _runs.train(until(6, layout, **DROPOUT), data, root / name / "whole")
        _runs.train(until(3, layout, **DROPOUT), data, root / name / "resumed")
        _runs.train(until(6, layout, **DROPOUT), data, root / name / "resumed", attempt=2)
    still_alive()
    for name, (optimizer, layouts) in CHANGES.items():
        for number, layout in enumerate(layouts, 1):
            changing = until(2 * number, layout, optimizer)
            _runs.train(changing, data, root / "changing" / name, attempt=number)
            still_alive()
    for iterations, attempt, directory in ((6, 1, "whole"), (3, 1, "resumed"), (6, 2, "resumed")):
        config = until(iterations, LAYOUTS["dp2"], "muon")
        _runs.train(config, data, root / "muon" / directory, attempt=attempt)


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layouts")
    run_distributed(2, train_whole_and_resumed, data, root)
    return root


@pytest.mark.parametrize("name", [*LAYOUTS, "muon"])
def test_resumed_run_in_the_same_layout_is_bit_identical(name: str, runs: Path) -> None:
    assert_same_run(runs / name / "whole", runs / name / "resumed", ITERATIONS)


@pytest.mark.parametrize("name", ["pp2", "cp2", "dp2", "dp2 parameters"])
def test_dropout_is_the_same_in_every_layout_without_tensor_parallelism(
    name: str, runs: Path, data: Path, tmp_path: Path
) -> None:
    _runs.train(until(ITERATIONS, {}, **DROPOUT), data, tmp_path)
    serial, parallel = _runs.losses(tmp_path), _runs.losses(runs / name / "whole")
    assert list(serial) == [1, 2, 3, 4, 5, 6]
    assert [parallel[i] for i in serial] == pytest.approx(list(serial.values()), rel=1e-5)


@pytest.mark.parametrize("name", CHANGES)
def test_resumed_run_may_change_its_layout(
    name: str, runs: Path, data: Path, tmp_path: Path
) -> None:
    changing = runs / "changing" / name
    optimizer, layouts = CHANGES[name]
    starts = _runs.events(changing, "start")
    assert [event["resumed_from"] for event in starts] == [None, 2, 4, 6][: len(layouts)]
    assert len({event["parameters"] for event in starts}) == 1
    serial = tmp_path / "serial"
    _runs.train(until(2 * len(layouts), {}, optimizer), data, serial)
    expected = _runs.losses(serial)
    assert list(_runs.losses(changing).values()) == pytest.approx(list(expected.values()), rel=1e-5)
    validation = [_runs.events(path, "evaluation")[-1]["lm_loss"] for path in (changing, serial)]
    assert validation[0] == pytest.approx(validation[1], rel=1e-5)


def test_one_rank_resumes_checkpoints_of_two_ranks(runs: Path, data: Path, tmp_path: Path) -> None:
    import shutil

    for name in LAYOUTS:
        shutil.copytree(runs / name / "whole", tmp_path / name)
        _runs.train(until(ITERATIONS + 1, {}, **DROPOUT), data, tmp_path / name, attempt=2)
        assert _runs.events(tmp_path / name, "start")[-1]["resumed_from"] == ITERATIONS


PACKED = {"packing": "best_fit", "reset_attention_mask": True, "reset_position_ids": True}


def packed_by_best_fit(parallel: dict[str, Any]) -> RunConfig:
    run = until(ITERATIONS, parallel)
    return run.model_copy(update={"data": run.data.model_copy(update=PACKED)})


def train_packed(data: Path, root: Path) -> None:
    """Train on documents packed by best fit in each layout."""
    for name, layout in LAYOUTS.items():
        _runs.train(packed_by_best_fit(layout), data, root / name)
        still_alive()


def test_documents_packed_by_best_fit_give_the_serial_losses_in_each_layout(tmp_path: Path) -> None:
    serial = packed_by_best_fit({})
    data = tmp_path / "data"
    _runs.write_data(data, serial)
    _runs.train(serial, data, tmp_path / "serial")
    run_distributed(2, train_packed, data, tmp_path)
    expected = _runs.losses(tmp_path / "serial")
    for name in LAYOUTS:
        assert _runs.losses(tmp_path / name) == pytest.approx(expected, abs=1e-5)
