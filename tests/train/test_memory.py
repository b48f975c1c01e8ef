"""Running out of memory is said as what to change."""

import pytest

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


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(RuntimeError, match="shape mismatch"), memory_errors(tiny_config(), 0, TrainState()):
        raise RuntimeError("shape mismatch")


def test_scoring_names_its_batch() -> None:
    message = r"rank 1 ran out of memory while it evaluated .* lower evaluate\.micro_batch_size \(now 16"
    with pytest.raises(TrainingError, match=message), scoring_memory_errors(tiny_config(), 1):
        raise MemoryError
