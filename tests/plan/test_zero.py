"""ZeRO's formula for memory, compared with the paper's numbers."""

from itertools import product

import pytest

from megacore.plan.zero import ModelState, zero_bytes


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_bytes_equal_the_papers_figure(stage: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 B parameters on 64 GPUs."""
    assert zero_bytes(7_500_000_000, stage, 64, "fp16").device.total / 1e9 == pytest.approx(
        gigabytes, abs=0.05
    )


def test_each_stage_divides_one_more_part_of_the_state() -> None:
    states = [zero_bytes(1000, stage, 4, "bf16").device for stage in range(4)]
    assert states == [
        ModelState(2000, 2000, 4000, 8000),
        ModelState(2000, 2000, 1000, 2000),
        ModelState(2000, 500, 1000, 2000),
        ModelState(500, 500, 1000, 2000),
    ]
    assert [state.optimizer for state in states] == [12_000, 3_000, 3_000, 3_000]


def test_fp32_weights_are_the_main_weights() -> None:
    assert zero_bytes(1000, 1, 2, "fp32").device == ModelState(4000, 4000, 0, 4000)
    assert zero_bytes(1000, 1, 2, "fp32", main_weights=True).device == ModelState(
        4000, 4000, 2000, 4000
    )


def test_gradients_may_accumulate_in_another_type() -> None:
    assert zero_bytes(1000, 2, 4, "fp16", gradient_bytes=4).gradients == 1000


def test_a_share_is_rounded_up() -> None:
    assert zero_bytes(10, 3, 4, "fp16").device == ModelState(6, 6, 12, 24)


@pytest.mark.parametrize(
    ("stage", "optimizer", "param", "device", "cpu", "nvme"),
    [
        (1, "cpu", "none", ModelState(20, 20), ModelState(0, 0, 20, 40), ModelState()),
        (2, "cpu", "none", ModelState(20), ModelState(0, 10, 20, 40), ModelState()),
        (3, "cpu", "none", ModelState(10), ModelState(0, 10, 20, 40), ModelState()),
        (3, "cpu", "cpu", ModelState(), ModelState(10, 10, 20, 40), ModelState()),
        (3, "nvme", "cpu", ModelState(), ModelState(10, 10), ModelState(0, 0, 20, 40)),
        (3, "nvme", "nvme", ModelState(), ModelState(0, 10), ModelState(10, 0, 20, 40)),
        (3, "none", "cpu", ModelState(0, 10, 20, 40), ModelState(10), ModelState()),
    ],
)
def test_offloading_moves_parts_of_the_state(
    stage: int, optimizer: str, param: str, device: ModelState, cpu: ModelState, nvme: ModelState
) -> None:
    state = zero_bytes(10, stage, 2, "fp16", offload_optimizer=optimizer, offload_param=param)  # type: ignore[arg-type]
    assert (state.device, state.cpu, state.nvme) == (device, cpu, nvme)


def test_offloading_keeps_the_totals() -> None:
    for stage, optimizer in product((2, 3), ("none", "cpu", "nvme")):
        state = zero_bytes(999, stage, 4, "bf16", offload_optimizer=optimizer)  # type: ignore[arg-type]
        resident = zero_bytes(999, stage, 4, "bf16")
        assert (state.parameters, state.gradients, state.optimizer) == (
            resident.parameters,
            resident.gradients,
            resident.optimizer,
        )
