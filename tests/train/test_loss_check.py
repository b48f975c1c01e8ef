"""Checks of losses for NaN, infinity and spikes."""

import math
from collections.abc import Sequence

import pytest

from megacore.engine.base import Update
from megacore.errors import LossError, TrainingError
from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.rank_layout import RankLayout
from megacore.train.loss_check import BadBatch, LossCheck, MicroBatch
from megacore.train.state import TrainState
from tests.train import _runs

MESH = ProcessMesh(layout=RankLayout(data=2, pipeline=2, tensor=2))
"""Mesh whose last stage has ranks 4, 5 (first replica) and 6, 7 (second replica)."""


def check(warnings: list[str] | None = None, **train: object) -> LossCheck:
    run = _runs.config(train=_runs.config().train.model_dump() | train)
    return LossCheck(run, MESH, (warnings if warnings is not None else []).append)


def update(
    losses: tuple[float, ...],
    grad_norm: float,
    applied: bool,
    fatal: bool = False,
    withheld: bool = False,
) -> Update:
    mean = sum(losses) / len(losses)
    return Update(losses, {"lm_loss": mean}, grad_norm, applied, fatal, withheld)


def test_origin_is_the_replicas_last_stage_and_consecutive_samples() -> None:
    state = TrainState(iteration=5, consumed_samples=40)
    origins = [check().origin(index, state) for index in range(4)]
    assert origins == [
        MicroBatch(4, (40, 41)),
        MicroBatch(6, (42, 43)),
        MicroBatch(4, (44, 45)),
        MicroBatch(6, (46, 47)),
    ]


def test_applied_iteration_updates_the_recent_loss() -> None:
    state, loss_check = TrainState(), check()
    loss_check.count_iteration(update((4.0, 2.0), 1.0, True), state)
    assert (state.applied_iterations, state.interval.losses, state.recent_loss) == (
        1,
        {"lm_loss": [3.0]},
        3.0,
    )
    loss_check.count_iteration(update((1.0, 1.0), 1.0, True), state)
    assert state.recent_loss == pytest.approx(0.98 * 3.0 + 0.02 * 1.0)


def test_spike_warning_names_rank_iteration_and_samples() -> None:
    warnings: list[str] = []
    loss_check, state = check(warnings, loss_spike_factor=3.0), TrainState(9, 72, 9, 2.0)
    loss_check.count_iteration(update((2.0, 5.9, 2.0, 2.0), 1.0, True), state)
    assert warnings == []
    state.recent_loss = 2.0
    loss_check.count_iteration(update((2.0, 6.1, 2.0, 7.0), 1.0, True), state)
    assert len(warnings) == 1
    assert (
        "the loss jumped to 7 on rank 6 at iteration 10 (samples 78, 79), 3.5 times the recent "
        "mean 2"
    ) in warnings[0]
    assert state.applied_iterations == 11


def test_spike_can_stop_the_run_or_be_ignored() -> None:
    spike = update((7.0, 2.0), 1.0, True)
    with pytest.raises(
        TrainingError,
        match=r"jumped to 7 on rank 4 at iteration 1 .samples 0, 1.*action to warn or skip$",
    ):
        check(loss_spike_action="stop").count_iteration(spike, TrainState(recent_loss=2.0))
    run = _runs.config("deepspeed", train={"loss_spike_action": "stop"})  # it cannot withhold one
    with pytest.raises(LossError, match=r"set train.loss_spike_action to warn$"):
        LossCheck(run, MESH, pytest.fail).count_iteration(spike, TrainState(recent_loss=2.0))
    warnings: list[str] = []
    check(warnings, loss_spike_factor=None).count_iteration(spike, TrainState(recent_loss=2.0))
    check(warnings).count_iteration(spike, TrainState())  # nothing to compare the first loss with
    assert warnings == []


def test_applied_loss_that_is_not_finite_is_a_spike_and_leaves_the_recent_loss() -> None:
    for worst in (math.inf, math.nan):
        warnings: list[str] = []
        loss_check, state = check(warnings), TrainState(recent_loss=2.0)
        loss_check.count_iteration(update((7.0, worst), 1.0, True), state)
        assert f"the loss jumped to {worst} on rank 6" in warnings[0]
        assert (state.applied_iterations, state.recent_loss) == (1, 2.0)
        loss_check.count_iteration(update((2.0, 7.0), 1.0, True), state)
        assert "the loss jumped to 7 " in warnings[1]


def test_nan_does_not_hide_a_spike() -> None:
    assert check().is_spike((math.nan, 50.0), TrainState(recent_loss=2.0))
    assert check().is_spike((2.0, math.nan), TrainState(recent_loss=2.0))
    assert not check().is_spike((2.0, 6.0), TrainState(recent_loss=2.0))


SPIKE = update((7.0, 2.0, 2.0, 2.0), 1.0, False, withheld=True)
NOT_FINITE = update((math.nan, 2.0, 2.0, 2.0), math.nan, False, fatal=True)


@pytest.mark.parametrize(
    ("bad", "option"),
    [(SPIKE, "loss_spike_action"), (NOT_FINITE, "nonfinite_action")],
    ids=["spike", "not-finite"],
)
def test_bad_batches_are_skipped_up_to_five_in_a_row(bad: Update, option: str) -> None:
    warnings: list[str] = []
    loss_check = check(warnings, **{option: "skip", "skip_samples": ["15-15"]})
    state = TrainState(recent_loss=2.0, consumed_samples=16, passed_over=[(0, 7), (8, 15)])

    def count(result: Update) -> None:
        loss_check.count_iteration(result, state, result)
        state.consumed_samples += 8

    for number in range(1, 6):
        count(bad)
        assert warnings[-1].endswith(f"the batch is skipped, number {number} in a row of at most 5")
    assert (state.applied_iterations, state.recent_loss) == (0, 2.0)
    assert state.interval.skipped_iterations == 5
    assert state.passed_over[2:] == [(first, first + 7) for first in range(16, 56, 8)]
    with pytest.raises(
        LossError, match=r"the 5 batches before it were bad and skipped: .*diverged"
    ):
        loss_check.count_iteration(bad, state, bad)
    state.passed_over.pop()
    count(bad)
    assert warnings[-1].endswith("number 1 in a row of at most 5"), "the batch before it was good"


def test_skipped_iteration_is_counted_and_leaves_the_recent_loss() -> None:
    state, loss_check = TrainState(recent_loss=2.0), check()
    loss_check.count_iteration(update((2.0, math.inf), math.inf, False), state)
    assert state.interval.nan_iterations == 1
    loss_check.count_iteration(update((2.0, 2.0), math.inf, False), state)
    assert (state.applied_iterations, state.recent_loss, state.interval.losses) == (0, 2.0, {})
    assert (state.interval.skipped_iterations, state.interval.nan_iterations) == (2, 1)
    assert state.passed_over == [], "a lower loss scale helps: the batches are not bad"


def test_error_distinguishes_bad_gradients_from_bad_losses() -> None:
    with pytest.raises(
        TrainingError,
        match=r"the loss is nan on rank 6 at iteration 1 .samples 2, 3; 2 micro batches",
    ):
        check().count_iteration(
            update((2.0, math.nan, 2.0, math.inf), math.nan, False, fatal=True), TrainState()
        )
    with pytest.raises(
        TrainingError,
        match=r"norm is inf at iteration 1 .samples 0 to 7. on all 8 ranks though every",
    ):
        check().count_iteration(update((2.0,) * 4, math.inf, False, fatal=True), TrainState())


def test_error_names_the_documents_of_the_bad_samples() -> None:
    run, asked = _runs.config(), list[list[int]]()

    def origins(samples: Sequence[int]) -> str:
        asked.append(list(samples))
        return "they are from document 7"

    loss_check = LossCheck(run, MESH, print, origins=origins)
    for losses in ((2.0, math.nan, 2.0, 2.0), (2.0,) * 4):
        with pytest.raises(
            TrainingError, match=r"\); they are from document 7; it was|finite; they"
        ):
            loss_check.count_iteration(update(losses, math.nan, False, fatal=True), TrainState())
    assert asked == [[2, 3], list(range(8))]


def test_bad_batch_is_recorded_with_its_host_and_whether_it_was_reproduced() -> None:
    run = _runs.config(train=_runs.config().train.model_dump() | {"nonfinite_action": "skip"})
    for hosts, place in (
        ([f"node-{rank // 4}" for rank in range(8)], "rank 4 of node-1 at"),
        (["node-1"] * 8, "rank 4 at"),
    ):
        warnings, batches = list[str](), list[BadBatch]()
        loss_check = LossCheck(run, MESH, warnings.append, batches.append, hosts)
        loss_check.count_iteration(NOT_FINITE, TrainState())
        loss_check.count_iteration(NOT_FINITE, TrainState(), NOT_FINITE)
        assert [(batch.host, batch.reproduced) for batch in batches] == [
            ("node-1", None),
            ("node-1", True),
        ]
        assert f"the loss is nan on {place} iteration 1" in warnings[0]


def test_warning_of_a_skipped_spike_names_its_documents() -> None:
    run = _runs.config(train=_runs.config().train.model_dump() | {"loss_spike_action": "skip"})
    warnings: list[str] = []
    loss_check = LossCheck(run, MESH, warnings.append, origins=lambda samples: "from document 7")
    loss_check.count_iteration(SPIKE, TrainState(recent_loss=2.0), SPIKE)
    assert "; from document 7; computed again" in warnings[0]


def test_fp16_error_reports_the_exhausted_loss_scale() -> None:
    loss_check = check(precision="fp16")
    with pytest.raises(
        TrainingError,
        match=(
            r"10 iterations in a row overflowed with the loss scale at its minimum 1: lower "
            r"optim.lr .now 5.000E-03 at this iteration"
        ),
    ):
        loss_check.count_iteration(update((2.0,) * 4, math.inf, False, fatal=True), TrainState())
