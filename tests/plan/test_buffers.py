"""Buffers that DeepSpeed allocates in addition to the state of the model."""

import pytest

from megacore.config import RunConfig
from megacore.engine.deepspeed.settings import deepspeed_settings
from megacore.plan.zero import Buffers, DeepSpeedMemory
from tests.plan._deepspeed import deepspeed

SIZES = (1000, 6, 3000, 10)
SHARE = 4016 // 4
BUCKET = 500
CPU = {"offload_optimizer": "cpu"}


def memory(config: RunConfig, precision: str) -> DeepSpeedMemory:
    settings = deepspeed_settings(
        config, precision=precision, device_type="cuda", data_parallel_size=1
    )
    return DeepSpeedMemory(settings, precision)


def buffers(stage: int, precision: str, **overrides: object) -> Buffers:
    bucket = {"reduce_bucket_size": BUCKET} if stage else {}
    return memory(deepspeed(stage, **bucket, **overrides), precision).buffers(SIZES, 4)


@pytest.mark.parametrize(
    ("stage", "precision", "overrides", "expected"),
    [
        # Stages 1 and 2: a bucket in the type that is sent, two if they overlap; a flat gradient
        # for the step.
        (1, "fp32", {}, Buffers(4 * BUCKET, 4 * SHARE)),
        (1, "fp16", {"parallel.grad_reduce_dtype": "bf16"}, Buffers(2 * BUCKET, 4 * SHARE)),
        (1, "fp16", {"overlap_comm": True}, Buffers(2 * 4 * BUCKET, 4 * SHARE)),
        (2, "fp32", {}, Buffers(4 * BUCKET, 4 * SHARE)),
        (2, "bf16", {}, Buffers(4 * BUCKET)),
        # bf16 with fp32 gradients has a permanent flat buffer, which the formula counts, and keeps
        # the bf16 gradients.
        (1, "bf16", {}, Buffers(4 * BUCKET + 2 * 4016)),
        # Offloaded: the largest gradient in transit, and what is copied back.
        (1, "fp32", CPU, Buffers(4 * BUCKET + 4 * 3000, 0, 4 * 3000 + 4 * SHARE + 4 * SHARE)),
        (2, "fp32", CPU, Buffers(4 * BUCKET + 4 * 3000, 0, 4 * 3000 + 4 * SHARE + 4 * SHARE)),
        (2, "fp16", CPU, Buffers(4 * BUCKET + 2 * 3000 + 4 * SHARE, 0, 2 * 3000 + 2 * SHARE)),
        # Stage 3: everything gathered, or the largest parameter and those that are not divided.
        (3, "fp16", {}, Buffers(4 * BUCKET + 2 * 4016, 4 * SHARE)),
        (3, "fp16", {"sub_group_size": 100}, Buffers(4 * BUCKET + 2 * 4016, 4 * 100)),
        (
            3,
            "bf16",
            {"stage3_max_live_parameters": 0, "stage3_param_persistence_threshold": 10},
            Buffers(4 * BUCKET + 2 * (3000 + 6 + 10), 4 * SHARE),
        ),
        (3, "fp16", CPU, Buffers(4 * BUCKET + 2 * 4016, 0, 4 * SHARE)),
        (
            3,
            "fp16",
            {
                "offload_optimizer": "nvme",
                "offload_param": "nvme",
                "nvme_path": "/nvme",
                "sub_group_size": 100,
            },
            Buffers(4 * BUCKET + 2 * 4016, 0, 4 * 4 * 100 + 5 * 2 * 100_000_000),
        ),
    ],
)
def test_buffers_have_the_expected_sizes(
    stage: int, precision: str, overrides: dict[str, object], expected: Buffers
) -> None:
    assert buffers(stage, precision, **overrides) == expected


def test_the_step_without_zero_allocates_fp32_gradients() -> None:
    assert buffers(0, "fp16").step == 4 * 4016
    assert buffers(0, "fp32").step == 0
    assert buffers(0, "fp32").device == 4 * 4016
    assert memory(deepspeed(0), "fp32").buffers([10**9], 4).device == 4 * 500_000_000


@pytest.mark.parametrize(
    ("stage", "precision", "overrides", "copies", "gradient_bytes"),
    [
        (0, "fp32", {}, False, 4),
        (0, "bf16", {}, True, 2),
        (1, "fp32", {}, True, 4),
        (2, "bf16", {}, True, 4),
        (3, "fp32", {}, True, 4),
        (3, "fp32", CPU, True, 4),
        (3, "fp16", {}, True, 4),
    ],
)
def test_main_weights_and_gradient_bytes_follow_from_the_stage(
    stage: int, precision: str, overrides: dict[str, object], copies: bool, gradient_bytes: int
) -> None:
    estimate = memory(deepspeed(stage, **overrides), precision)
    assert (
        estimate.stage,
        estimate.main_weights,
        estimate.gradient_bytes,
    ) == (stage, copies, gradient_bytes)
