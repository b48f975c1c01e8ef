"""DeepSpeed's engines: non-finite gradients, the loss scale, clipping and reports.

tests/parity compares the training itself.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.checkpoint.shard import TensorShard
from megacore.config.optim import LossScaleConfig
from megacore.config.run import RunConfig
from megacore.engine.base import Engine, Update
from megacore.engine.build import build_engine
from megacore.engine.deepspeed.operators import load_operators, operator_is_built
from megacore.models.base import LossTotals
from megacore.observe.timers import Timers
from megacore.optim.grad_scaler import DynamicLossScaler
from tests._dist import run_distributed, still_alive
from tests.train import _runs

BATCHES = torch.arange(4 * 2 * (_runs.SEQ_LENGTH + 1)).view(4, 2, -1) % _runs.VOCAB_SIZE
NORM = "model.encoder.final_layernorm.weight"
SHARD_ALL = {"zero_stage": 3, "stage3_param_persistence_threshold": 0}
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "stage 0": ({"zero_stage": 0}, "fp32"),
    "stage 1": ({"zero_stage": 1}, "fp32"),
    "stage 2": ({"zero_stage": 2, "offload_optimizer": "cpu"}, "fp32"),
    "stage 3": (SHARD_ALL, "fp32"),
    "stage 0 bf16": ({"zero_stage": 0}, "bf16"),
    "stage 1 bf16": ({"zero_stage": 1}, "bf16"),
    "stage 2 bf16": ({"zero_stage": 2}, "bf16"),
    "stage 3 bf16": (SHARD_ALL, "bf16"),
}
CLIPPING = {"clip": 0.05, "no clipping": 0.0}


def config(
    deepspeed: dict[str, Any], precision: str = "fp32", **sections: dict[str, Any]
) -> RunConfig:
    train = _runs.config().train.model_dump() | {"precision": precision}
    return _runs.config("deepspeed", deepspeed=deepspeed, train=train, **sections)


def build(run: RunConfig) -> Engine:
    return build_engine(
        run,
        _runs.VOCAB_SIZE,
        _runs.mesh(run),
        special_tokens=_runs.TOKENS,
        device=torch.device("cpu"),
        precision=run.train.precision,
    )


def step(engine: Engine, lr: float = 1e-2) -> Update:
    engine.forward_backward(iter(BATCHES), range(len(BATCHES)))
    return engine.update(lr, 0.1)


def values(engine: Engine) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, shard in engine.tensors().items():
        assert isinstance(shard, TensorShard)
        tensors[name] = torch.cat([piece.flatten() for piece in shard.pieces.values()])
    return tensors


def insert_nan(engine: Engine) -> None:
    """Make one weight NaN, in the main weights and in the model."""
    tensors = engine.tensors()
    shard = tensors[NORM]
    assert isinstance(shard, TensorShard)
    next(iter(shard.pieces.values()))[0] = float("nan")
    engine.load_state(engine.state(), {NORM: shard})


def not_finite() -> dict[str, tuple[Update, bool, int]]:
    """Return the outcome of a step with non-finite gradients for each kind of engine.

    Each outcome is the update, True if nothing changed, and the number of counted steps.
    """
    outcomes = {}
    for name, (deepspeed, precision) in KINDS.items():
        still_alive()
        engine = build(config(deepspeed, precision))
        assert step(engine).applied
        insert_nan(engine)
        before = values(engine)
        update = step(engine)
        after = values(engine)
        unchanged = all(
            torch.equal(before[each].nan_to_num(), after[each].nan_to_num()) for each in before
        )
        outcomes[name] = (update, unchanged, engine.state()["optimizer_steps"])
    return outcomes


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[Update, bool, int]]:
    results: dict[str, tuple[Update, bool, int]] = run_distributed(1, not_finite)[0]
    return results


@pytest.mark.parametrize("name", KINDS)
def test_a_gradient_that_is_not_finite_changes_nothing(
    name: str, outcomes: dict[str, tuple[Update, bool, int]]
) -> None:
    update, unchanged, steps = outcomes[name]
    assert not math.isfinite(update.grad_norm)
    assert math.isnan(update.loss)
    assert (update.applied, update.fatal, unchanged, steps) == (False, True, True, 1)


def cases_of_one_rank(root: Path) -> dict[str, Any]:
    """Return the results of the other cases that one process can run."""
    results: dict[str, Any] = {}
    for name, clip in CLIPPING.items():
        norms = []
        for stage in (0, 1):
            engine = build(
                config({"zero_stage": stage}, optim={"clip_grad": clip, "adam_eps": 1.0})
            )
            updates = [step(engine, lr=0.5) for _ in range(3)]
            norms.append(([update.grad_norm for update in updates], values(engine)))
        results[name] = norms
        still_alive()
    results["kernels"] = engine.kernels
    results["first"], results["second"] = (
        engine.loss_sum(
            iter(BATCHES), [2] * 4, LossTotals(len(engine.loss_names), None, engine.device)
        )
        for _ in range(2)
    )
    results["reports"] = [
        engine.reads_tokens,
        engine.loss_scale,
        engine.loss_names,
        engine.parameters,
        engine.padded_vocab_size,
    ]
    results["scales"] = scales()
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    first_rank: dict[str, Any] = run_distributed(
        1, cases_of_one_rank, tmp_path_factory.mktemp("one")
    )[0]
    return first_rank


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIPPING)
def test_clipping_without_zero_equals_clipping_with_zero(
    name: str, results: dict[str, Any]
) -> None:
    # With an epsilon of 1 Adam's updates grow with the gradients.
    (norms, weights), (expected_norms, expected) = results[name]
    assert norms == pytest.approx(expected_norms, rel=1e-6)
    for each in expected:
        assert weights[each] == pytest.approx(expected[each], rel=1e-4, abs=1e-6)
    clipped, free = (
        results[kind][1][1]["optimizer.exp_avg.embedding.word_embeddings.weight"]
        for kind in CLIPPING
    )
    assert clipped.norm() < free.norm() / 2


def test_evaluation_is_repeatable_and_counts_every_token(results: dict[str, Any]) -> None:
    first, second = results["first"], results["second"]
    assert first.dtype == torch.float64
    assert first[0, 1] == first[1:, 1].sum()
    assert first[0, 1] == BATCHES[..., 1:].numel()
    assert torch.equal(first, second)


def test_the_engine_reports_its_kernels_and_sizes(results: dict[str, Any]) -> None:
    assert results["kernels"]["optimizer"] == "deepspeed DeepSpeedZeroOptimizer over AdamW"
    native = build_engine(
        _runs.config(),
        _runs.VOCAB_SIZE,
        _runs.mesh(),
        special_tokens=_runs.TOKENS,
        device=torch.device("cpu"),
        precision="fp32",
    )
    expected = [
        native.reads_tokens,
        1.0,
        native.loss_names,
        native.parameters,
        native.padded_vocab_size,
    ]
    assert results["reports"] == expected


SCALING = LossScaleConfig(initial=64.0, window=3, hysteresis=2, minimum=2.0, patience=3)
OVERFLOWS = [
    1,
    0,
    1,
    1,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    1,
    0,
    1,
    0,
    0,
    0,
    0,
    1,
    1,
    1,
    1,
    1,
    1,
    1,
    1,
    1,
    1,
    0,
    0,
    0,
    0,
]


def scales() -> dict[str, Any]:
    """Return the course of DeepSpeed's loss scale over OVERFLOWS.

    Includes the course of scalers that are restored from it at each point.
    """
    from megacore.engine.deepspeed.join import join_ranks
    from megacore.engine.deepspeed.optimizer import DeepSpeedLossScale

    join_ranks()
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler as Theirs

    def fresh() -> tuple[Any, DeepSpeedLossScale]:
        theirs = Theirs(SCALING.initial, SCALING.window, SCALING.minimum, SCALING.hysteresis, False)
        return theirs, DeepSpeedLossScale(theirs, SCALING)

    def advance(
        theirs: Any, ours: DeepSpeedLossScale, overflows: list[int]
    ) -> list[tuple[float, bool]]:
        course = []
        for overflow in overflows:
            before = theirs.cur_scale
            theirs.update_scale(bool(overflow))  # DeepSpeed calls this within a step
            assert theirs.cur_scale == before
            ours.update(overflow=bool(overflow))
            course.append((ours.scale, ours.exhausted))
        return course

    uninterrupted = advance(*fresh(), OVERFLOWS)
    resumed, states = [], []
    for stop in range(len(OVERFLOWS)):
        first, second = fresh(), fresh()
        advance(*first, OVERFLOWS[:stop])
        states.append(first[1].state())
        second[1].load_state(states[-1])
        resumed.append(advance(*second, OVERFLOWS[stop:]))
    return {"uninterrupted": uninterrupted, "resumed": resumed, "states": states}


def test_a_restored_loss_scale_takes_the_same_course(results: dict[str, Any]) -> None:
    uninterrupted, resumed = results["scales"]["uninterrupted"], results["scales"]["resumed"]
    assert max(scale for scale, _ in uninterrupted) > SCALING.initial / 2
    assert min(scale for scale, _ in uninterrupted) == SCALING.minimum
    assert any(exhausted for _, exhausted in uninterrupted)
    for stop, course in enumerate(resumed):
        assert course == uninterrupted[stop:], f"restored after {stop} iterations"


def test_the_native_scaler_continues_from_deepspeeds_state(results: dict[str, Any]) -> None:
    # DeepSpeed's scale grows one good iteration later than megacore's: only overflows are compared.
    uninterrupted, states = results["scales"]["uninterrupted"], results["scales"]["states"]
    for stop, state in enumerate(states):
        if not OVERFLOWS[stop]:
            continue
        native = DynamicLossScaler(SCALING)
        native.load_state(state)
        native.update(overflow=True)
        assert (native.scale, native.exhausted) == uninterrupted[stop], f"after {stop} iterations"


def train_on_nvme(directory: Path) -> tuple[list[list[Update]], bool]:
    """Return the updates of engines on NVMe and in memory, and True if a restore is exact."""
    model = {"hidden_size": 256}  # DeepSpeed leaves small tensors in host memory
    offloading = {
        "offload_optimizer": "nvme",
        "offload_param": "nvme",
        "nvme_path": str(directory),
        "cpu_adam": "torch",
    }
    run = config(SHARD_ALL | offloading, model=model)
    load_operators(run)
    first, plain = build(run), build(config(SHARD_ALL, model=model))
    updates = [[step(engine) for _ in range(2)] for engine in (first, plain)]
    expected, state, tensors = values(first), first.state(), first.tensors()
    second = build(run)
    second.tensors()
    second.load_state(state, tensors)
    restored = values(second)
    same = all(torch.equal(restored[name], value) for name, value in expected.items())
    return updates, same and step(second) == step(first)


def test_an_engine_on_nvme_trains_and_is_restored(tmp_path: Path) -> None:
    if not operator_is_built("async_io"):
        pytest.skip(
            "DeepSpeed's operator async_io is not built: python -m megacore.ranks.operators"
        )
    ((on_nvme, plain), restored) = run_distributed(1, train_on_nvme, tmp_path)[0]
    assert [update.loss for update in on_nvme] == pytest.approx(
        [update.loss for update in plain], rel=1e-5
    )
    assert restored


def phases_of_a_pipeline() -> set[str]:
    """Return the phases of one iteration of a stage, out of two."""
    run = config(
        {"zero_stage": 1},
        parallel={"pipeline_model_parallel_size": 2},
        launch={"nproc_per_node": 2},
    )
    mesh = _runs.mesh(run)
    timers = Timers(torch.device("cpu"))
    pipeline = replace(mesh.pipeline_parallel, timers=timers)
    engine = build_engine(
        run,
        _runs.VOCAB_SIZE,
        replace(mesh, pipeline_parallel=pipeline, timers=timers),
        special_tokens=_runs.TOKENS,
        device=torch.device("cpu"),
        precision="fp32",
    )
    assert step(engine).applied
    return set(timers.take(1))


def test_passes_and_waits_of_a_pipeline_are_phases() -> None:
    expected = {"forward-compute", "backward-compute", "pipeline-parallel wait", "optimizer"}
    for phases in run_distributed(2, phases_of_a_pipeline):
        assert expected <= phases
