"""Pool of worker processes that end when their parent ends, and at once when it gives up."""

import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import parent_process
from multiprocessing.context import SpawnContext, SpawnProcess
from threading import Thread
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")


class WorkerPool(ProcessPoolExecutor):
    """A pool of spawned processes; an error in its `with` block kills them."""

    def __init__(
        self,
        processes: int,
        initializer: Callable[..., object] | None = None,
        arguments: tuple[Any, ...] = (),
    ) -> None:
        """Create the pool; its processes start with the first tasks.

        `initializer` is called in each process, with `arguments`.
        """
        self._recorder = _RecordingContext()
        super().__init__(
            processes,
            mp_context=self._recorder,
            initializer=_begin,
            initargs=(initializer, arguments),
        )

    def submit(
        self, fn: Callable[P, Result], /, *args: P.args, **kwargs: P.kwargs
    ) -> "Future[Result]":
        """Schedule a call. Raises BrokenProcessPool, also if the pool breaks in the meantime.

        A broken pool closes its queue, whose descriptors a process that this call just starts then
        lacks: OSError or, if another thread has taken their numbers, ValueError.
        """
        try:
            future = super().submit(fn, *args, **kwargs)
        except (OSError, ValueError) as error:
            if self._broken:
                raise BrokenProcessPool("a process ended while another one was started") from error
            raise
        # Python's pool begins to wait before it has started the process. It then does not see that
        # process's end until something else wakes it, and a lock that the process held may prevent
        # that for ever.
        with self._shutdown_lock:
            if self._executor_manager_thread_wakeup is not None:
                self._executor_manager_thread_wakeup.wakeup()
        return future

    def kill(self) -> None:
        """Kill the processes and wait for the end of the pool.

        A broken pool terminates its processes, but not one that was just started for another
        thread. That process waits for tasks on the open pipe, and the pool waits for it forever.
        """
        ending = Thread(
            target=self.shutdown, kwargs={"cancel_futures": True}, name="end-of-pool", daemon=True
        )
        ending.start()
        while ending.is_alive():
            for process in self._recorder.started:
                if process.is_alive():
                    process.kill()
            ending.join(0.05)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.shutdown()
        else:
            self.kill()


class _RecordingContext(SpawnContext):
    """A spawn context that records the processes it starts."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[SpawnProcess] = []

    def Process(self, *values: Any, **named: Any) -> SpawnProcess:  # type: ignore[override]  # noqa: N802
        """Return a new process for the pool and record it."""
        process = _Worker(*values, **named)
        self.started.append(process)
        return process


class _Worker(SpawnProcess):
    """A process to which Ctrl-C is blocked until it ignores it."""

    def start(self) -> None:
        """Start the process, which inherits this thread's signal mask.

        An interrupt while it imports modules would end it with a traceback.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(initializer: Callable[..., object] | None, arguments: tuple[Any, ...]) -> None:
    _end_with_parent()
    if initializer is not None:
        initializer(*arguments)


def _end_with_parent() -> None:
    """Ignore interrupts, which the parent handles, and exit when the parent ends.

    The kernel's PR_SET_PDEATHSIG would watch the thread that started this process, which may end
    before the pool does.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    Thread(target=wait, daemon=True).start()
