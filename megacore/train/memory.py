"""Running out of memory, said as what to change."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megacore.config.deepspeed_json import asked_of
from megacore.config.run import RunConfig
from megacore.errors import TrainingError
from megacore.train.state import TrainState

_CPU_PHRASES = ("can't allocate memory", "not enough memory")


@contextmanager
def memory_errors(config: RunConfig, rank: int, state: TrainState) -> Iterator[None]:
    """Turn an allocation that fails in the body into TrainingError with the settings that help training most.

    Args:
        config: the run.
        rank: this process.
        state: where the run stands when it happens.
    """

    def message(reason: str) -> str:
        train, parallel = config.train, config.parallel
        further = _divide_further(config)
        return (
            f"rank {rank} ran out of memory at iteration {state.iteration + 1} ({reason}): lower "
            f"train.micro_batch_size (now {train.micro_batch_size}; with the same train.global_batch_size the results "
            f"stay the same), set train.recompute to full (now {train.recompute}), {further}raise "
            f"parallel.tensor_model_parallel_size (now {parallel.tensor_model_parallel_size}) or "
            f"parallel.pipeline_model_parallel_size (now {parallel.pipeline_model_parallel_size}), or lower "
            f"data.seq_length (now {config.data.seq_length})"
        )

    with _reworded(message):
        yield


@contextmanager
def scoring_memory_errors(config: RunConfig, rank: int) -> Iterator[None]:
    """The same for the evaluation of checkpoints, where only the batch can be changed."""

    def message(reason: str) -> str:
        return (
            f"rank {rank} ran out of memory while it evaluated ({reason}): lower evaluate.micro_batch_size "
            f"(now {config.evaluate.micro_batch_size}; the results stay the same)"
        )

    with _reworded(message):
        yield


def _divide_further(config: RunConfig) -> str:
    """What of ZeRO is left to use, with a comma behind; nothing where all of it is used."""
    stages = config.parallel.pipeline_model_parallel_size
    if config.engine == "native":
        if not config.parallel.use_distributed_optimizer:
            return "set parallel.use_distributed_optimizer to true, "
        return "set engine to deepspeed with deepspeed.zero_stage 2 or 3, " if stages == 1 else ""
    asked = asked_of(config)
    if asked.stage < (3 if stages == 1 else 1):
        return f"raise {asked.named('zero_optimization.stage')} (now {asked.stage}), "
    for what in ("offload_optimizer", "offload_param") if asked.stage == 3 else ("offload_optimizer",):
        if asked.device(what) == "none" and torch.cuda.is_available():
            return f"set {asked.named(f'zero_optimization.{what}.device')} to cpu (now none), "
    return ""


@contextmanager
def _reworded(message: Callable[[str], str]) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        lines = str(error).splitlines()
        raise TrainingError(message(lines[0] if lines else type(error).__name__)) from error


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(phrase in str(error).lower() for phrase in _CPU_PHRASES)
