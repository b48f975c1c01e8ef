"""Running out of memory is said as what to change."""

import pytest

from megacore.config import load_config
from megacore.errors import TrainingError
from megacore.train.memory import memory_errors, scoring_memory_errors
from megacore.train.state import TrainState
from tests._tiny import tiny_config


def test_training_names_every_setting_that_helps() -> None:
    with pytest.raises(TrainingError) as caught, memory_errors(tiny_config(), 3, TrainState(iteration=6)):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes\nand more")
    message = str(caught.value)
    assert message.startswith("rank 3 ran out of memory at iteration 7 (DefaultCPUAllocator: can't allocate memory")
    assert "\n" not in message
    for setting in (
        "train.micro_batch_size (now 2",
        "train.recompute to full (now none)",
        "parallel.use_distributed_optimizer to true",
        "parallel.tensor_model_parallel_size (now 1)",
        "parallel.pipeline_model_parallel_size (now 1)",
        "data.seq_length (now 16)",
    ):
        assert setting in message


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        ({"parallel.use_distributed_optimizer": True}, "set engine to deepspeed with deepspeed.zero_stage 2 or 3, "),
        ({"parallel.use_distributed_optimizer": True, "parallel.pipeline_model_parallel_size": 2}, ""),
        ({"engine": "deepspeed", "deepspeed.zero_stage": 2}, "raise deepspeed.zero_stage (now 2), "),
        (
            {"engine": "deepspeed", "deepspeed.config": {"zero_optimization": {"stage": 1}}},
            "raise zero_optimization.stage of deepspeed.config (now 1), ",
        ),
        (
            {"engine": "deepspeed", "parallel.pipeline_model_parallel_size": 2},
            "raise deepspeed.zero_stage (now 0), ",
        ),
        (
            {"engine": "deepspeed", "deepspeed.zero_stage": 3},
            "set deepspeed.offload_optimizer to cpu (now none), ",
        ),
        (
            {"engine": "deepspeed", "deepspeed.zero_stage": 3, "deepspeed.offload_optimizer": "cpu"},
            "set deepspeed.offload_param to cpu (now none), ",
        ),
        (
            {
                "engine": "deepspeed",
                "deepspeed.zero_stage": 3,
                "deepspeed.offload_optimizer": "cpu",
                "deepspeed.offload_param": "cpu",
            },
            "",
        ),
    ],
)
def test_what_is_left_of_zero_is_named(
    overrides: dict[str, object], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    config = load_config("gpt2-tiny", overrides | {"launch.nproc_per_node": "auto"})
    with pytest.raises(TrainingError) as caught, memory_errors(config, 0, TrainState()):
        raise MemoryError
    assert f"(now none), {advice}raise parallel.tensor_model_parallel_size" in str(caught.value)


def test_without_a_gpu_there_is_nowhere_to_offload_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = load_config("gpt2-tiny", {"engine": "deepspeed", "deepspeed.zero_stage": 3})
    with pytest.raises(TrainingError) as caught, memory_errors(config, 0, TrainState()):
        raise MemoryError
    assert "offload" not in str(caught.value)


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(RuntimeError, match="shape mismatch"), memory_errors(tiny_config(), 0, TrainState()):
        raise RuntimeError("shape mismatch")


def test_scoring_names_its_batch() -> None:
    message = r"rank 1 ran out of memory while it evaluated .* lower evaluate\.micro_batch_size \(now 16"
    with pytest.raises(TrainingError, match=message), scoring_memory_errors(tiny_config(), 1):
        raise MemoryError
