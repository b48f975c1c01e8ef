"""Which samples a rank reads, and reading them ahead of time.

They are a pure function of the samples consumed so far.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import numpy as np

from megacore.config.batch_schedule import BatchSchedule
from megacore.data.samples import Batch, Indices


def micro_batch_indices(
    consumed_samples: int, micro_step: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> range:
    """The samples of one rank's micro batch in the global batch at `consumed_samples`.

    Megatron's order: micro batches go round the data-parallel ranks, so the samples of a global
    batch do not depend on how many ranks share it. Nothing wraps: the maps hold as many samples as
    the run was planned for.
    """
    first = consumed_samples + (micro_step * dp_size + dp_rank) * micro_batch_size
    return range(first, first + micro_batch_size)


def micro_batches(
    consumed_samples: int,
    *,
    micro_batch_size: int,
    schedule: BatchSchedule,
    dp_rank: int,
    dp_size: int,
    steps: int,
    skipped: Sequence[range] = (),
) -> Iterator[range]:
    """One rank's micro batches of `steps` global batches, in the order they are read.

    They begin at `consumed_samples`.

    Global batches that are passed over for one of the `skipped` samples are among the steps and are
    not read.
    """
    for _ in range(steps):
        size = schedule.at(consumed_samples)
        if not is_passed_over(range(consumed_samples, consumed_samples + size), skipped):
            for micro_step in range(size // (micro_batch_size * dp_size)):
                yield micro_batch_indices(
                    consumed_samples, micro_step, micro_batch_size, dp_rank, dp_size
                )
        consumed_samples += size


def is_passed_over(global_batch: range, skipped: Sequence[range]) -> bool:
    """Whether a global batch holds one of the samples that are to be skipped."""
    return any(
        samples.start < global_batch.stop and global_batch.start < samples.stop
        for samples in skipped
    )


class PrefetchingIterator(Iterator[Batch]):
    """Batches [b, s + 1] in the order of `batches`, gathered ahead by one background thread.

    At most `depth` batches wait. An error of the thread is raised where its batch would have come.
    Use it as a context manager, or close it: the thread ends with the last batch otherwise.
    """

    def __init__(
        self, gather: Callable[[Indices], Batch], batches: Iterable[Indices], *, depth: int = 4
    ) -> None:
        """Start reading.

        `gather` is a data set's method, `batches` the sample indices of each batch.
        """
        self._queue: SimpleQueue[Batch | BaseException | None] = SimpleQueue()
        self._free = threading.Semaphore(depth)
        self._stopped = threading.Event()
        self._finished = False
        self._thread = threading.Thread(
            target=self._read, args=(gather, batches), name="megacore-prefetch", daemon=True
        )
        self._thread.start()

    def _read(self, gather: Callable[[Indices], Batch], batches: Iterable[Indices]) -> None:
        try:
            for indices in batches:
                self._free.acquire()
                if self._stopped.is_set():
                    return
                self._queue.put(gather(indices))
        except BaseException as error:  # it is the consumer's to see, whatever it is
            self._queue.put(error)
        else:
            self._queue.put(None)

    def __next__(self) -> Batch:
        if self._finished:
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, np.ndarray):
            self._free.release()
            return item
        self._finished = True
        self._thread.join()
        if item is None:
            raise StopIteration
        raise item

    def close(self) -> None:
        """End the thread and drop what it read. Safe to call twice."""
        self._finished = True
        self._stopped.set()
        self._free.release()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
