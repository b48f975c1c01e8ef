"""Number of ranks and threads of a fine-tuning."""

import pytest

from megacore.config.load import parse_finetune_config
from megacore.errors import ConfigError, ParallelLayoutError
from megacore.finetune.resolve import memory_advice, resolve_ranks
from megacore.hardware import Gpu, Hardware
from tests.config._finetune import minimal


def machine(gpus: int) -> Hardware:
    """Return a machine with 8 cores and some GPUs."""
    return Hardware(8, 2**34, tuple(Gpu("GPU", 2**35) for _ in range(gpus)))


@pytest.mark.parametrize(
    ("nproc", "gpus", "expected"),
    [("auto", 0, (1, 8)), ("auto", 4, (4, 2)), (2, 0, (2, 4)), (2, 4, (2, 4))],
)
def test_ranks_and_threads_follow_from_the_hardware(
    nproc: int | str, gpus: int, expected: tuple[int, int]
) -> None:
    config = parse_finetune_config(minimal() | {"launch": {"nproc_per_node": nproc}}, origin="test")
    assert resolve_ranks(config, machine(gpus)) == expected


def test_more_ranks_than_gpus_are_refused() -> None:
    config = parse_finetune_config(minimal() | {"launch": {"nproc_per_node": 3}}, origin="test")
    with pytest.raises(
        ParallelLayoutError, match=r"launch.nproc_per_node is 3 and this machine has 2 visible GPUs"
    ):
        resolve_ranks(config, machine(2))


@pytest.mark.parametrize(("size", "equal"), [(1, None), (3, False), (4, True)])
def test_advice_names_the_half_only_of_an_even_batch(size: int, equal: bool | None) -> None:
    config = parse_finetune_config(minimal() | {"train": {"micro_batch_size": size}}, origin="test")
    advice = memory_advice(config)
    assert (f"(now {size}" in advice) == (equal is not None)
    assert ("2 with train.gradient_accumulation_steps 2 learns as much" in advice) == bool(equal)


@pytest.mark.parametrize(
    "accelerate_config",
    [
        {"distributed_type": "MULTI_CPU"},
        {"distributed_type": "NO", "use_cpu": True, "num_processes": 1},
    ],
)
def test_accelerate_config_for_cpus_is_refused_with_gpus(
    accelerate_config: dict[str, object],
) -> None:
    config = parse_finetune_config(
        minimal() | {"launch": {"accelerate_config": accelerate_config}}, origin="test"
    )
    resolve_ranks(config, machine(0))
    with pytest.raises(
        ConfigError, match=r"launch.accelerate_config asks for CPUs, and ranks take the 2 GPUs"
    ):
        resolve_ranks(config, machine(2))
