"""Training runs with DeepSpeed's engines.

They are resumed, disturbed, and continued in another stage, layout or engine.
"""

import math
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from megacore.config.run import RunConfig
from megacore.engine.base import Update
from megacore.observe.recorder import Recorder
from tests._dist import run_distributed, still_alive
from tests.train import _runs
from tests.train.test_loop import DROPOUT, assert_same_checkpoint, assert_same_run

Kind = tuple[str, dict[str, Any], dict[str, Any], str]
"""Engine, section deepspeed, section parallel, and precision."""

pytestmark = pytest.mark.slow
DIVIDE_ALL = {"zero_stage": 3, "stage3_param_persistence_threshold": 0}
KINDS: dict[str, Kind] = {
    "stage 0": ("deepspeed", {"zero_stage": 0}, {}, "fp32"),
    "stage 1": ("deepspeed", {"zero_stage": 1}, {}, "fp32"),
    "stage 2": ("deepspeed", {"zero_stage": 2}, {}, "fp32"),
    "stage 3": ("deepspeed", DIVIDE_ALL, {}, "fp32"),
    "stage 2, optimizer on the CPU": (
        "deepspeed",
        {"zero_stage": 2, "offload_optimizer": "cpu"},
        {},
        "fp32",
    ),
    "stage 3, everything on the CPU": (
        "deepspeed",
        DIVIDE_ALL | {"offload_optimizer": "cpu", "offload_param": "cpu"},
        {},
        "fp32",
    ),
    "tp2 stage 1": ("deepspeed", {"zero_stage": 1}, {"tensor_model_parallel_size": 2}, "fp32"),
    "pp2 stage 1": ("deepspeed", {"zero_stage": 1}, {"pipeline_model_parallel_size": 2}, "fp32"),
    "stage 0 bf16": ("deepspeed", {"zero_stage": 0}, {}, "bf16"),
    "stage 1 bf16": ("deepspeed", {"zero_stage": 1}, {}, "bf16"),
    "stage 3 bf16, weights in many groups": (
        "deepspeed",
        DIVIDE_ALL | {"sub_group_size": 1000},
        {},
        "bf16",
    ),
}
DISTURBED = (
    "stage 0",
    "stage 2, optimizer on the CPU",
    "pp2 stage 1",
    "stage 3 bf16, weights in many groups",
)
LONG = ("stage 1", "stage 2", "stage 0 bf16")
"""Kinds between others, which `make test-long` runs."""
SKIPPED = ("stage 0", "pp2 stage 1", "stage 3 bf16, weights in many groups")
"""Kinds that skip a batch with a NaN."""
NATIVE: Kind = ("native", {}, {}, "fp32")
ON_TWO: tuple[Kind, ...] = (KINDS["stage 2"], KINDS["pp2 stage 1"], KINDS["stage 3"])
ON_ONE: tuple[Kind, ...] = (KINDS["stage 3"], NATIVE, KINDS["stage 1"], KINDS["stage 0"])
"""Kinds with which one run is trained for two iterations each: on two ranks, then on one."""
ITERATIONS = 2 * (len(ON_TWO) + len(ON_ONE))


def until(
    train_iters: int,
    kind: Kind,
    ranks: int = 2,
    train: dict[str, Any] | None = None,
    **model: float,
) -> RunConfig:
    """Return the configuration of a run of `train_iters` iterations."""
    engine, deepspeed, parallel, precision = kind
    changes = {"train_iters": train_iters, "eval_interval": 100, "precision": precision}
    return _runs.config(
        engine,
        model=model,
        train=_runs.config().train.model_dump() | changes | (train or {}),
        checkpoint={"save_interval": 3},
        parallel=parallel,
        deepspeed=deepspeed,
        launch={"nproc_per_node": ranks},
    )


def train_disturbed(
    config: RunConfig, data: Path, directory: Path, *, disturbed: tuple[int, ...]
) -> None:
    """Train, with NaN from every norm on rank 1 in the computations with these numbers, from 1."""
    mesh = _runs.mesh(config)
    with Recorder(directory, attempt=1, rank=mesh.rank, tensorboard=False) as recorder:
        trainer = _runs.trainer(config, data, directory, mesh, recorder)
        engine: Any = trainer._engine
        update, computed, bad = engine.update, iter(range(1, 100)), [False]

        def poison(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            return output * math.nan if bad[0] else output

        for module in engine._stage.chunks[0].modules():
            if type(module).__name__.endswith("Norm"):
                module.register_forward_hook(poison)
        forward_backward = engine.forward_backward

        def compute(*arguments: Any, **options: Any) -> None:
            bad[0] = next(computed) in disturbed and mesh.rank == 1
            forward_backward(*arguments, **options)

        def end(*arguments: Any, **options: Any) -> Update:
            # with pipeline stages DeepSpeed computes here
            outcome: Update = update(*arguments, **options)
            bad[0] = False
            return outcome

        engine.forward_backward, engine.update = compute, end
        trainer.run()


def train_whole_and_resumed(kinds: set[str], data: Path, root: Path) -> None:
    """Train the kinds with dropout for 6 iterations, unbroken and resumed after 3.

    Train one run that changes its kind.
    """
    for name, kind in KINDS.items():
        if name not in kinds:
            continue
        still_alive()
        _runs.train(until(6, kind, **DROPOUT), data, root / name / "whole")
        _runs.train(until(3, kind, **DROPOUT), data, root / name / "resumed")
        _runs.train(until(6, kind, **DROPOUT), data, root / name / "resumed", attempt=2)
        if name in DISTURBED:
            config = until(6, kind, **DROPOUT)
            train_disturbed(config, data, root / name / "disturbed", disturbed=(4,))
        if name in SKIPPED:
            skipping = until(6, kind, train={"nonfinite_action": "skip"}, **DROPOUT)
            train_disturbed(skipping, data, root / name / "found", disturbed=(4, 5))
            known = until(6, kind, train={"skip_samples": ["24"]}, **DROPOUT)
            _runs.train(known, data, root / name / "known")
    for number, kind in enumerate(ON_TWO, 1):
        still_alive()
        _runs.train(until(2 * number, kind), data, root / "changing", attempt=number)


def continue_on_one_rank(data: Path, root: Path) -> None:
    for number, kind in enumerate(ON_ONE, 1 + len(ON_TWO)):
        _runs.train(until(2 * number, kind, ranks=1), data, root / "changing", attempt=number)


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Train the kinds whose tests run in this session."""
    root = tmp_path_factory.mktemp("deepspeed")
    kinds = {
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and hasattr(item, "callspec")
    }
    run_distributed(2, train_whole_and_resumed, kinds, data, root)
    return root


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in KINDS],
)
def test_resumed_run_is_bit_identical(name: str, runs: Path) -> None:
    assert_same_run(runs / name / "whole", runs / name / "resumed", 6)


@pytest.mark.parametrize("name", DISTURBED)
def test_recomputed_iteration_leaves_the_run_bit_identical(name: str, runs: Path) -> None:
    (bad,) = _runs.events(runs / name / "disturbed", "bad_batch")
    assert (bad["cause"], bad["iteration"], bad["reproduced"]) == ("loss_not_finite", 4, False)
    assert_same_run(runs / name / "whole", runs / name / "disturbed", 6)


@pytest.mark.parametrize("name", SKIPPED)
def test_reproduced_nan_can_be_skipped_as_if_it_had_been_known(name: str, runs: Path) -> None:
    (bad,) = _runs.events(runs / name / "found", "bad_batch")
    assert (bad["iteration"], bad["reproduced"]) == (4, True)
    assert_same_checkpoint(runs / name / "known", runs / name / "found", 6)


def test_resumed_run_may_change_stage_ranks_and_engine(
    runs: Path, data: Path, tmp_path: Path
) -> None:
    run_distributed(1, continue_on_one_rank, data, runs)
    starts = _runs.events(runs / "changing", "start")
    assert [event["resumed_from"] for event in starts] == [None, *range(2, ITERATIONS, 2)]
    assert [event["ranks"] for event in starts] == [2] * len(ON_TWO) + [1] * len(ON_ONE)
    assert sum("deepspeed" in event["kernels"]["optimizer"] for event in starts) == len(starts) - 1
    serial = tmp_path / "serial"
    _runs.train(until(ITERATIONS, NATIVE, ranks=1), data, serial)
    expected = _runs.losses(serial)
    assert list(_runs.losses(runs / "changing").values()) == pytest.approx(
        list(expected.values()), rel=1e-5
    )
    validation = [
        _runs.events(path, "evaluation")[-1]["lm_loss"] for path in (runs / "changing", serial)
    ]
    assert validation[0] == pytest.approx(validation[1], rel=1e-5)


def evaluate_unevenly(data: Path, root: Path) -> None:
    """Train with weights that are gathered for each layer, and evaluate 3 micro batches on 2 ranks.

    Models of more than `stage3_max_live_parameters` are gathered so by default.
    """
    at_once = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    run = until(2, ("deepspeed", DIVIDE_ALL | at_once, {}, "fp32"))
    run = run.model_copy(update={"evaluate": run.evaluate.model_copy(update={"max_samples": 6})})
    _runs.train(run, data, root)


def test_ranks_that_have_fewer_micro_batches_to_evaluate_gather_weights_with_the_others(
    data: Path, tmp_path: Path
) -> None:
    run_distributed(2, evaluate_unevenly, data, tmp_path / "divided")
    run = until(2, NATIVE, ranks=1)
    run = run.model_copy(update={"evaluate": run.evaluate.model_copy(update={"max_samples": 6})})
    _runs.train(run, data, tmp_path / "serial")
    (divided,), (serial,) = (
        _runs.events(tmp_path / name, "perplexity") for name in ("divided", "serial")
    )
    assert divided["samples"] == serial["samples"] == 6
    assert divided["valid_loss"] == pytest.approx(serial["valid_loss"], rel=1e-5)
