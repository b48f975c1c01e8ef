"""DeepSpeed's engines beyond what parity shows.

Gradients that are not finite, the loss scale, what is reported.
"""

import math
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
from megacore.optim.grad_scaler import DynamicLossScaler
from tests._dist import run_distributed, still_alive
from tests.train import _runs

BATCHES = torch.arange(4 * 2 * (_runs.SEQ_LENGTH + 1)).view(4, 2, -1) % _runs.VOCAB_SIZE
NORM = "model.encoder.final_layernorm.weight"
DIVIDE_ALL = {"zero_stage": 3, "stage3_param_persistence_threshold": 0}
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "stage 0": ({"zero_stage": 0}, "fp32"),
    "stage 1": ({"zero_stage": 1}, "fp32"),
    "stage 2": ({"zero_stage": 2, "offload_optimizer": "cpu"}, "fp32"),
    "stage 3": (DIVIDE_ALL, "fp32"),
    "stage 0 bf16": ({"zero_stage": 0}, "bf16"),
    "stage 1 bf16": ({"zero_stage": 1}, "bf16"),
    "stage 2 bf16": ({"zero_stage": 2}, "bf16"),
    "stage 3 bf16": (DIVIDE_ALL, "bf16"),
}
CLIPPING = {"clip": 0.05, "no clipping": 0.0}


def config(
    deepspeed: dict[str, Any], precision: str = "fp32", **sections: dict[str, Any]
) -> RunConfig:
    train = _runs.config().train.model_dump() | {"precision": precision}
    return _runs.config("deepspeed", deepspeed=deepspeed, train=train, **sections)


def engine(run: RunConfig) -> Engine:
    return build_engine(
        run,
        _runs.VOCAB_SIZE,
        _runs.mesh(run),
        special_tokens=_runs.TOKENS,
        device=torch.device("cpu"),
        precision=run.train.precision,
    )


def step(own: Engine, lr: float = 1e-2) -> Update:
    own.forward_backward(iter(BATCHES), range(len(BATCHES)))
    return own.update(lr, 0.1)


def values(own: Engine) -> dict[str, torch.Tensor]:
    found = {}
    for name, shard in own.tensors().items():
        assert isinstance(shard, TensorShard)
        found[name] = torch.cat([piece.flatten() for piece in shard.pieces.values()])
    return found


def spoil(own: Engine) -> None:
    """Make one weight NaN, in the main weights and in the model."""
    tensors = own.tensors()
    shard = tensors[NORM]
    assert isinstance(shard, TensorShard)
    next(iter(shard.pieces.values()))[0] = float("nan")
    own.load_state(own.state(), {NORM: shard})


def not_finite() -> dict[str, tuple[Update, bool, int]]:
    """Of each kind a step without finite gradients: its outcome, whether anything changed, and the
    steps counted."""
    outcomes = {}
    for name, (deepspeed, precision) in KINDS.items():
        still_alive()
        own = engine(config(deepspeed, precision))
        assert step(own).applied
        spoil(own)
        before = values(own)
        update = step(own)
        after = values(own)
        same = all(
            torch.equal(before[each].nan_to_num(), after[each].nan_to_num()) for each in before
        )
        outcomes[name] = (update, same, own.state()["optimizer_steps"])
    return outcomes


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[Update, bool, int]]:
    found: dict[str, tuple[Update, bool, int]] = run_distributed(1, not_finite, timeout=60)[0]
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_gradient_that_is_not_finite_changes_nothing(
    name: str, outcomes: dict[str, tuple[Update, bool, int]]
) -> None:
    update, same, steps = outcomes[name]
    assert not math.isfinite(update.grad_norm)
    assert math.isnan(update.loss)
    assert (update.applied, update.fatal, same, steps) == (False, True, True, 1)


def cases_of_one_rank(root: Path) -> dict[str, Any]:
    """Everything else that one process can show."""
    found: dict[str, Any] = {}
    for name, clip in CLIPPING.items():
        norms = []
        for stage in (0, 1):
            own = engine(config({"zero_stage": stage}, optim={"clip_grad": clip, "adam_eps": 1.0}))
            updates = [step(own, lr=0.5) for _ in range(3)]
            norms.append(([update.grad_norm for update in updates], values(own)))
        found[name] = norms
        still_alive()
    found["kernels"] = own.kernels
    found["first"], found["second"] = (own.loss_sum(iter(BATCHES), [2] * 4) for _ in range(2))
    found["reports"] = [
        own.reads_tokens,
        own.loss_scale,
        own.loss_names,
        own.parameters,
        own.padded_vocab_size,
    ]
    found["scales"] = scales()
    return found


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = run_distributed(
        1, cases_of_one_rank, tmp_path_factory.mktemp("one"), timeout=60
    )[0]
    return found


@pytest.mark.parametrize("name", CLIPPING)
def test_without_zero_gradients_are_clipped_as_with_it(name: str, shown: dict[str, Any]) -> None:
    # With an epsilon of 1 Adam's updates grow with the gradients.
    (norms, weights), (expected_norms, expected) = shown[name]
    assert norms == pytest.approx(expected_norms, rel=1e-6)
    for each in expected:
        assert weights[each] == pytest.approx(expected[each], rel=1e-4, abs=1e-6)
    clipped, free = (
        shown[kind][1][1]["optimizer.exp_avg.embedding.word_embeddings.weight"] for kind in CLIPPING
    )
    assert clipped.norm() < free.norm() / 2


def test_evaluation_is_repeatable_and_counts_every_token(shown: dict[str, Any]) -> None:
    first, second = shown["first"], shown["second"]
    assert (first.shape, first.dtype) == ((1, 2), torch.float64)
    assert first[0, 1] == BATCHES[..., 1:].numel()
    assert torch.equal(first, second)


def test_the_engine_says_what_it_is(shown: dict[str, Any]) -> None:
    assert shown["kernels"]["optimizer"] == "deepspeed DeepSpeedZeroOptimizer over AdamW"
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
    assert shown["reports"] == expected


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
    """What DeepSpeed's scaler does with OVERFLOWS.

    What one does that is restored from it at each point.
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
            theirs.update_scale(bool(overflow))  # as DeepSpeed does within a step
            assert theirs.cur_scale == before
            ours.update(overflow=bool(overflow))
            course.append((ours.scale, ours.exhausted))
        return course

    whole = advance(*fresh(), OVERFLOWS)
    resumed, states = [], []
    for stop in range(len(OVERFLOWS)):
        first, second = fresh(), fresh()
        advance(*first, OVERFLOWS[:stop])
        states.append(first[1].state())
        second[1].load_state(states[-1])
        resumed.append(advance(*second, OVERFLOWS[stop:]))
    return {"whole": whole, "resumed": resumed, "states": states}


def test_a_restored_loss_scale_takes_the_same_course(shown: dict[str, Any]) -> None:
    whole, resumed = shown["scales"]["whole"], shown["scales"]["resumed"]
    assert max(scale for scale, _ in whole) > SCALING.initial / 2
    assert min(scale for scale, _ in whole) == SCALING.minimum
    assert any(exhausted for _, exhausted in whole)
    for stop, course in enumerate(resumed):
        assert course == whole[stop:], f"restored after {stop} iterations"


def test_the_native_scaler_goes_on_from_deepspeeds_state(shown: dict[str, Any]) -> None:
    # DeepSpeed's grows one good iteration later than ours, so only overflows are compared.
    whole, states = shown["scales"]["whole"], shown["scales"]["states"]
    for stop, state in enumerate(states):
        if not OVERFLOWS[stop]:
            continue
        native = DynamicLossScaler(SCALING)
        native.load_state(state)
        native.update(overflow=True)
        assert (native.scale, native.exhausted) == whole[stop], f"after {stop} iterations"


def everything_on_nvme(directory: Path) -> tuple[list[list[Update]], bool]:
    """Steps of two engines, the first on NVMe.

    And whether another one is the first when it has read its state.
    """
    model = {"hidden_size": 256}  # DeepSpeed leaves what is small in main memory
    there = {
        "offload_optimizer": "nvme",
        "offload_param": "nvme",
        "nvme_path": str(directory),
        "cpu_adam": "torch",
    }
    run = config(DIVIDE_ALL | there, model=model)
    load_operators(run)
    first, plain = engine(run), engine(config(DIVIDE_ALL, model=model))
    updates = [[step(own) for _ in range(2)] for own in (first, plain)]
    expected, state, tensors = values(first), first.state(), first.tensors()
    second = engine(run)
    second.tensors()
    second.load_state(state, tensors)
    found = values(second)
    same = all(torch.equal(found[name], value) for name, value in expected.items())
    return updates, same and step(second) == step(first)


def test_what_lies_on_nvme_is_trained_and_restored(tmp_path: Path) -> None:
    if not operator_is_built("async_io"):
        pytest.skip(
            "DeepSpeed's operator async_io is not built: python -m megacore.ranks.operators"
        )
    ((on_nvme, plain), restored) = run_distributed(1, everything_on_nvme, tmp_path, timeout=60)[0]
    assert [update.loss for update in on_nvme] == pytest.approx(
        [update.loss for update in plain], rel=1e-5
    )
    assert restored
