"""Running out of memory, said in the words of a fine-tuning."""

from collections.abc import Iterator
from contextlib import contextmanager

from megacore.config.finetune import FinetuneConfig
from megacore.finetune.advice import memory_advice
from megacore.train.memory import in_use, reworded


@contextmanager
def finetune_memory_errors(config: FinetuneConfig, rank: int) -> Iterator[None]:
    """Turn an allocation that fails in the body into MemoryExhaustedError, which says what helps."""

    def message(reason: str) -> str:
        return f"rank {rank} ran out of memory ({reason}): {in_use()}; {memory_advice(config)}"

    with reworded(message):
        yield
