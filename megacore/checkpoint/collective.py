"""Actions that all ranks take together: an error on one of them is raised on all."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from megacore.errors import ERROR_TYPES, CheckpointError, MegacoreError

T = TypeVar("T")


class RankGroup:
    """The ranks that save together; one rank alone when torch.distributed is not initialised.

    Objects are exchanged through `group` (None: the default group). A group that has only the NCCL back end
    moves them through the current CUDA device, which each rank must have set; a gloo group needs none.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.distributed = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank(group) if self.distributed else 0
        self.size: int = dist.get_world_size(group) if self.distributed else 1

    def everywhere(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank and return the results in rank order, on every rank.

        Where it raised, the error itself is raised there; on the others the first failing rank's, as the same
        MegacoreError or as CheckpointError. Results must be picklable.
        """
        value: T | None = None
        failure: Exception | None = None
        try:
            value = action()
        except Exception as error:
            failure = error
        outcome = (value, _describe(failure))
        outcomes: list[Any] = [outcome]
        if self.distributed:
            outcomes = [None] * self.size
            dist.all_gather_object(outcomes, outcome, group=self.group)
        if failure is not None:
            raise failure
        for rank, (_, description) in enumerate(outcomes):
            if description is not None:
                raise _restored(rank, *description)
        return [result for result, _ in outcomes]

    def on_first(self, action: Callable[[], T]) -> T:
        """Run `action` on the first rank and return its result on every rank; an error is raised on all."""
        results: list[Any] = self.everywhere(action if self.rank == 0 else _nothing)
        return results[0]  # type: ignore[no-any-return]


def _nothing() -> Any:
    return None


def _describe(error: Exception | None) -> tuple[str, str] | None:
    """Class name (of the nearest error of ours, if it is one) and message."""
    if error is None:
        return None
    names = [base.__name__ for base in type(error).__mro__]
    return next((name for name in names if name in ERROR_TYPES), names[0]), str(error)


def _restored(rank: int, name: str, message: str) -> MegacoreError:
    """The error of another rank, from its class name and message."""
    if name in ERROR_TYPES:
        return ERROR_TYPES[name](message)
    return CheckpointError(f"rank {rank} failed: {name}: {message}")
