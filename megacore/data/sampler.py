"""Assignment of samples to ranks and micro batches, and prefetching of batches.

The assignment is a pure function of the number of samples consumed so far.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import Self

import numpy as np

from megacore.config.batch_schedule import BatchSchedule
from megacore.data.samples import Batch, Indices


def micro_batch_indices(
    consumed_samples: int, micro_step: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> range:
    """Return the samples of one rank's micro batch in the global batch at `consumed_samples`.

    As in Megatron, micro batches are assigned to the data-parallel ranks in turn, so the samples of
    a global batch do not depend on the number of ranks. The indices do not wrap around: the maps
    contain enough samples for the run.
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
    """Yield one rank's micro batches of `steps` global batches from `consumed_samples` on.

    Global batches that contain one of the `skipped` samples count as steps but are not read.
    """
    for _ in range(steps):
        size = schedule.at(consumed_samples)
        if not is_skipped(range(consumed_samples, consumed_samples + size), skipped):
            for micro_step in range(size // (micro_batch_size * dp_size)):
                yield micro_batch_indices(
                    consumed_samples, micro_step, micro_batch_size, dp_rank, dp_size
                )
        consumed_samples += size


def is_skipped(global_batch: range, skipped: Sequence[range]) -> bool:
    """Return True if a global batch contains one of the samples to skip."""
    return any(
        samples.start < global_batch.stop and global_batch.start < samples.stop
        for samples in skipped
    )


class PrefetchingIterator(Iterator[Batch]):
    """Iterator over batches [b, s + 1], which one background thread reads ahead.

    At most `depth` batches are queued. An error of the thread is raised in place of its batch. Use
    the iterator as a context manager or call `close`; otherwise the thread ends only after the last
    batch.
    """

    def __init__(
        self, gather: Callable[[Indices], Batch], batches: Iterable[Indices], *, depth: int = 4
    ) -> None:
        """Start the thread.

        `gather` is the method of a data set, `batches` are the sample indices of each batch.
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
        except BaseException as error:  # raised again in the consumer
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
        """End the thread and discard its batches. Safe to call twice."""
        self._finished = True
        self._stopped.set()
        self._free.release()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
