"""Choice of the executor that runs tasks of a curation, and the one for Ray."""

import importlib.util
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.cluster.batch.slurm import SlurmJob, check_argument
from megacore.config.curate import CurateExecutor, RayExecutor, SlurmExecutor
from megacore.corpus.curate import Executor
from megacore.corpus.curate_job import Job, Phase
from megacore.corpus.curate_task import run_task
from megacore.errors import ConfigError, LaunchError, WorkerLostError, one_line

if TYPE_CHECKING:
    from ray import ObjectRef

_SETTING = "data.curate_executor"
_QUEUED = 4
"""Tasks that are submitted to Ray per worker: one runs, and the others wait for it."""


def check_executor(choice: CurateExecutor) -> None:
    """Check the options, programs and packages of an executor, before anything runs.

    Raises:
        ConfigError: an option cannot be used, or a package is not installed.
        LaunchError: Slurm's programs are not installed.
    """
    if isinstance(choice, SlurmExecutor):
        for word in choice.arguments:
            check_argument(word, f"{_SETTING}.arguments")
        for program in SlurmJob.programs:
            if shutil.which(program) is None:
                raise LaunchError(
                    f"{_SETTING} is slurm and {program} is not installed here: run this where it "
                    "is, or choose local"
                )
    if isinstance(choice, RayExecutor):
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                f"{_SETTING} is ray, which is not installed: install megacore[ray], or choose local"
            )
        if choice.address is not None and choice.address.startswith("ray://"):
            raise ConfigError(
                f"{_SETTING}.address is {choice.address}, of Ray's client, whose tasks outlive "
                "this process: give the address of the head, such as host:6379, or auto"
            )


def executor_of(
    choice: CurateExecutor, workers: int | None, say: Callable[[str], None]
) -> Executor | None:
    """Return the executor of a choice; None means processes of this host.

    `workers` tasks run at the same time, None means the executor's default; `say` shows one
    sentence on their course. Raises the errors of `check_executor`.
    """
    check_executor(choice)
    if isinstance(choice, SlurmExecutor):
        from megacore.cluster.batch.array import SlurmArrays

        return SlurmArrays(choice, workers, say)
    return RayTasks(choice, workers, say) if isinstance(choice, RayExecutor) else None


class RayTasks:
    """Executor that runs each task as a remote function on a Ray cluster."""

    def __init__(
        self, options: RayExecutor, workers: int | None, say: Callable[[str], None]
    ) -> None:
        """Keep the options; Ray is started or reached with the first tasks."""
        self._options, self._workers, self._say = options, workers, say

    @contextmanager
    def __call__(self, work: Path) -> Iterator[Callable[[Job, Phase, Sequence[int]], None]]:
        """Yield the function that runs tasks of a phase; the end of the block ends the others."""
        # Ray sends statistics of its use to its makers unless told otherwise.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        starts_ray = self._options.address is None
        try:
            ray.init(
                address="local" if starts_ray else self._options.address,
                num_cpus=(self._workers or len(os.sched_getaffinity(0))) if starts_ray else None,
                include_dashboard=False if starts_ray else None,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}},
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise LaunchError(
                f"Ray does not start or answer at {self._options.address or 'this host'} "
                f"({_line(error)}): correct {_SETTING}.address, or choose local"
            ) from error
        try:
            yield self._run
        finally:
            ray.shutdown()  # ends the tasks of this process

    def _run(self, job: Job, phase: Phase, ranks: Sequence[int]) -> None:
        import ray

        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call, unused-ignore]
        cpus = int(resources.get("CPU", 0))
        if cpus < 1:
            self._say(
                f"ray: {phase.name}: the cluster has no CPU for a task; the tasks wait for a host "
                "with one"
            )
        # A head without CPUs may start hosts for the tasks that wait.
        limit = _QUEUED * max(1, cpus) if self._workers is None else self._workers
        function = ray.remote(num_cpus=1, max_retries=self._options.retries)(_remote_task)
        waiting, running, done = list(reversed(ranks)), list["ObjectRef[None]"](), 0
        try:
            while waiting or running:
                while waiting and len(running) < limit:
                    rank = waiting.pop()
                    running.append(function.remote(os.getcwd(), str(job.work), phase.name, rank))
                ended, running = ray.wait(running, timeout=10)
                for reference in ended:
                    ray.get(reference)
                done += len(ended)
                if running and not ended:
                    self._say(f"ray: {phase.name}: {done:,} of {len(ranks):,} tasks")
        except ray.exceptions.RayError as error:
            raise _typed(error) from error


def _remote_task(directory: str, work: str, phase: str, rank: int) -> None:
    """Run one task in the working directory of the submitting process."""
    os.chdir(directory)
    run_task(Path(work), phase, rank)


def _typed(error: Any) -> BaseException:
    """Return the error of a task, or the typed error for a task that Ray lost or did not run."""
    from ray import exceptions

    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception) and not isinstance(cause, exceptions.RayError):
        return cause
    lost = (
        exceptions.WorkerCrashedError,
        exceptions.OutOfMemoryError,
        exceptions.NodeDiedError,
        exceptions.LocalRayletDiedError,
    )
    reason = f"({type(error).__name__}: {_line(error)[:500]})"
    if isinstance(error, lost):
        return WorkerLostError(
            f"Ray lost a task of data.curate {reason}: the tasks that are done are kept; give it "
            "more memory or smaller shards (data.curate_shard_mb), and run it again"
        )
    return LaunchError(
        f"Ray did not run a task of data.curate to its end {reason}: correct what the reason "
        "names, and start the same command again to continue with the tasks that are done"
    )


def _line(error: BaseException) -> str:
    return one_line(error) or type(error).__name__
