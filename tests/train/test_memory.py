"""Out-of-memory errors: predicted memory, memory in use, and settings that help."""

import re
import resource
from pathlib import Path

import pytest
import torch

from megacore.config import load_config
from megacore.errors import MemoryExhaustedError
from megacore.hardware import Hardware
from megacore.launch.exit_reason import write_reason
from megacore.plan import advice
from megacore.ranks import stages
from megacore.train.memory import memory_errors, scoring_memory_errors
from megacore.train.state import TrainState
from tests._tiny import tiny_config
from tests.train import _runs


def test_training_error_states_prediction_usage_and_advice() -> None:
    attempt = memory_errors(tiny_config(), 0, TrainState(iteration=6), vocab_size=512)
    with pytest.raises(MemoryExhaustedError) as caught, attempt:
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes\nand more"
        )
    message = str(caught.value)
    assert message.startswith(
        "rank 0 ran out of memory at iteration 7 (DefaultCPUAllocator: can't allocate memory"
    )
    assert "\n" not in message
    number = r"\d+\.\d\d"
    assert re.search(
        rf": in use {number} GiB by this process, {number} of|: in use {number} GiB ", message
    )
    assert re.search(rf"; predicted for rank 0: {number} GiB \(weights {number}, ", message)
    assert (
        "; what helps most: train.micro_batch_size: 2 -> 1 (predicted " in message
        or "train.recompute" in message
    )
    assert 1 <= message.count(" (predicted ") <= 3


def test_advice_comes_from_the_preflight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "savings", lambda config, place, rank: [])
    attempt = memory_errors(tiny_config(), 0, TrainState(), vocab_size=512)
    with (
        pytest.raises(MemoryExhaustedError, match=r"no setting is known that would save any$"),
        attempt,
    ):
        raise MemoryError


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
def test_advice_without_a_gpu_omits_offloading() -> None:
    config = load_config(
        "gpt2-tiny", {"engine": "deepspeed", "deepspeed.zero_stage": 3, "launch.nproc_per_node": 1}
    )
    with (
        pytest.raises(MemoryExhaustedError) as caught,
        memory_errors(config, 0, TrainState(), vocab_size=8192),
    ):
        raise MemoryError
    assert "offload" not in str(caught.value)
    assert "by control groups" in str(caught.value)
    unlimited = resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    assert ("by ulimit -v" in str(caught.value)) is not unlimited


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_usage_on_a_gpu_is_its_memory() -> None:
    with (
        pytest.raises(MemoryExhaustedError) as caught,
        memory_errors(tiny_config(), 0, TrainState(), vocab_size=512),
    ):
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    message = str(caught.value)
    assert re.search(
        r"in use [\d.]+ GiB allocated and [\d.]+ GiB reserved by this process, [\d.]+ GiB by all "
        r"of ",
        message,
    )


@pytest.mark.parametrize("variable", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
def test_advice_is_for_a_rank_with_its_share_of_the_host(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv(variable, "2")
    monkeypatch.setattr(advice, "memory_advice", lambda config, place, rank: f"host {place.host}")
    attempt = memory_errors(tiny_config(), 0, TrainState(), vocab_size=512)
    with pytest.raises(MemoryExhaustedError) as caught, attempt:
        raise RuntimeError("CUDA error: out of memory")  # not of torch's allocator
    assert str(caught.value).endswith(f"; host {Hardware.detect().memory // 2}")


def test_failed_cpu_allocation_is_recognised() -> None:
    attempt = memory_errors(tiny_config(), 0, TrainState(), vocab_size=512)
    with pytest.raises(MemoryExhaustedError, match="tried to allocate"), attempt:
        torch.empty(2**60, dtype=torch.uint8)


def test_other_errors_are_unchanged() -> None:
    attempt = memory_errors(tiny_config(), 0, TrainState(), vocab_size=512)
    with pytest.raises(RuntimeError, match="shape mismatch"), attempt:
        raise RuntimeError("shape mismatch")


def test_scoring_error_names_its_micro_batch_size() -> None:
    message = (
        r"rank 1 ran out of memory while it evaluated .*in use .*; lower "
        r"evaluate\.micro_batch_size \(now 16"
    )
    with (
        pytest.raises(MemoryExhaustedError, match=message),
        scoring_memory_errors(tiny_config().evaluate.micro_batch_size, 1),
    ):
        raise MemoryError
    with (
        pytest.raises(MemoryExhaustedError, match=r"parallel\.tensor_model_parallel_size, now 2\)"),
        scoring_memory_errors(16, 1, 2),
    ):
        raise MemoryError


@pytest.mark.parametrize("rank_reported", [True, False])
def test_stage_adds_advice_for_a_rank_killed_by_the_kernel(
    rank_reported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = _runs.job(_runs.config(), tmp_path, tmp_path)
    error = "rank 0 was ended by SIGKILL: the kernel ran out of memory"

    def killed(*arguments: object, **options: object) -> None:
        if rank_reported:
            write_reason(Path(job.exit_directory), 0, MemoryExhaustedError(error))
        raise MemoryExhaustedError(error)

    monkeypatch.setattr(stages, "supervise", killed)
    with pytest.raises(MemoryExhaustedError) as caught:
        stages.train(job)
    message = str(caught.value)
    assert message.startswith(error)
    assert ("; predicted for the rank that needs most: " in message) is not rank_reported
    assert ("of host memory on this machine)" in message) is not rank_reported
