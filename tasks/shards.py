"""Stage `tokenize-shard`: a large corpus in parts, merged into one pair of files.

Each part is a separate task.
"""

import os
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from prefect import get_run_logger
from prefect.futures import PrefectFuture
from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner, ThreadPoolTaskRunner

from megacore.artifact import Artifact, StageKey, lock
from megacore.artifact.build import remove_tree
from megacore.config import RunConfig
from megacore.config.data import DataConfig
from megacore.errors import ConfigError, WorkerLostError
from megacore.launch.workers import WorkerPool
from tasks._cache import StageResult, build, stage_task
from tasks._retry import retry_delays
from tasks._tokens import tokenize_key, tokenize_options

if TYPE_CHECKING:
    from megacore.corpus.segments import Segment

MB = 1_000_000


def shard_key(
    config: RunConfig,
    corpus: Artifact,
    tokenizer: Artifact,
    punkt: Artifact | None,
    shard: "tuple[Segment, ...]",
) -> StageKey:
    """Return the key of one shard: the corpus's key with the file segments that the shard reads."""
    corpus_key = tokenize_key(config, corpus, tokenizer, punkt)
    parts = [[os.path.relpath(part.path, corpus.path), part.start, part.stop] for part in shard]
    # All parameters of the corpus's key: its shards are deleted after the merge, so no other
    # artifact may share them.
    return StageKey(
        "tokenize-shard",
        corpus_key.version,
        corpus_key.parameters | {"segments": parts},
        corpus_key.inputs,
    )


@stage_task("tokenize-shard", shard_key)
def tokenize_shard(
    config: RunConfig,
    corpus: Artifact,
    tokenizer: Artifact,
    punkt: Artifact | None,
    shard: "tuple[Segment, ...]",
) -> StageResult:
    """Write a part of a corpus as `.bin`/`.idx`."""
    from megacore.corpus.documents import read_sources
    from megacore.tokenizer import tokenize as shards

    options = tokenize_options(config, punkt)
    paths = {part.path for part in shard}

    def fill(directory: Path) -> dict[str, Any]:
        read_sources(corpus.directory, paths)
        counts = dict(
            shards.tokenize_shard(
                shard,
                tokenizer.directory,
                directory,
                options,
                workers=_threads(config.data),
                document_bytes=config.data.max_document_bytes,
            )
        )
        read_sources(corpus.directory, paths)  # a file may have changed while it was read
        return counts

    return build(config, shard_key(config, corpus, tokenizer, punkt, shard), fill)


def needs_shards(config: RunConfig, corpus: Artifact) -> bool:
    """Return True if the corpus is text and larger than `data.shard_mb`."""
    from megacore.corpus.documents import read_sources

    limit = config.data.shard_mb
    if limit is None or corpus.counts["bytes"] <= limit * MB:
        return False
    sources = read_sources(corpus.directory)
    return sources is None or sources[0]["kind"] != "prefix"


def tokenize_in_shards(
    config: RunConfig,
    corpus: Artifact,
    tokenizer: Artifact,
    punkt: Artifact | None,
    directory: Path,
    shards: list[Artifact],
) -> dict[str, Any]:
    """Run a task for each shard on `data.shard_runner`, and merge the results into `directory`.

    The artifacts of the shards are added to `shards`. When shards fail, the others are finished
    first, and the next run reuses them. Raises the first failed shard's error.
    """
    from megacore.corpus.documents import read_sources
    from megacore.corpus.segments import divide, segments
    from megacore.tokenizer.tokenize import merge_shards

    assert config.data.shard_mb is not None
    parts = divide(segments(corpus.directory), config.data.shard_mb * MB)
    launch = config.launch
    task = tokenize_shard.with_options(
        retries=launch.retries, retry_delay_seconds=retry_delays(launch)
    )
    get_run_logger().info("tokenizing %d shards in %s", len(parts), config.data.shard_runner)
    with shard_runner(config.data) as runner:
        inputs = {"config": config, "corpus": corpus, "tokenizer": tokenizer, "punkt": punkt}
        futures = [runner.submit(task, {**inputs, "shard": shard}) for shard in parts]
        outcomes = [
            _outcome(future, number, len(parts)) for number, future in enumerate(futures, 1)
        ]
    failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if failures:
        raise failures[0]
    shards += [outcome.artifact for outcome in outcomes if isinstance(outcome, StageResult)]
    options = tokenize_options(config, punkt)
    counts = dict(
        merge_shards([shard.directory for shard in shards], directory, tokenizer.directory, options)
    )
    read_sources(corpus.directory)  # a file may have changed after its shard was read
    return counts


def _outcome(
    future: PrefectFuture[StageResult], number: int, count: int
) -> StageResult | Exception:
    """Return the result or the exception of a shard's task; a dead worker is a WorkerLostError."""
    try:
        return future.result()
    except Exception as error:
        if isinstance(error, BrokenExecutor) or type(error).__name__ in (
            "KilledWorker",
            "CommClosedError",
        ):
            return WorkerLostError(
                f"the worker of shard {number} of {count} died ({type(error).__name__}: {error}): "
                "the shards that are done are kept; give it more memory (a smaller data.shard_mb "
                "or data.shard_workers) and run it again"
            )
        return error


class _ProcessRunner(ProcessPoolTaskRunner):
    """Prefect's runner on a WorkerPool, whose processes end with the flow.

    Prefect's own pool does not see the end of the newest process until another one has a result.
    """

    _executor: WorkerPool | None

    def __enter__(self) -> Self:
        super().__enter__()
        pool: Any = self._executor  # no process has started yet
        self._executor = WorkerPool(self._max_workers, pool._initializer, pool._initargs)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and self._executor is not None:
            self._executor.kill()  # a cancelled flow does not wait for the end of the shards
        super().__exit__(kind, error, trace)


def shard_runner(data: DataConfig) -> "TaskRunner[Any]":
    """Return the runner of the shards. Raises ConfigError if it is Dask but not installed."""
    if data.shard_runner == "threads":
        return ThreadPoolTaskRunner(max_workers=data.shard_workers)
    if data.shard_runner == "processes":
        return _ProcessRunner(max_workers=data.shard_workers)
    try:
        from prefect_dask import DaskTaskRunner  # type: ignore[attr-defined]
    except ImportError as error:
        raise ConfigError(
            f"data.shard_runner is dask, but {error.name} is not installed: install "
            "megacore[dask], or choose threads"
        ) from error
    if data.dask_address is not None:
        return DaskTaskRunner(address=data.dask_address)
    cluster = {
        "n_workers": data.shard_workers,
        "threads_per_worker": 1,
        "host": "127.0.0.1",
        "dashboard_address": None,
    }
    return DaskTaskRunner(cluster_kwargs=cluster)


def discard(shards: Sequence[Artifact]) -> None:
    """Delete the shards of a merged corpus."""
    for shard in shards:
        with lock(shard.directory):
            remove_tree(shard.directory)


def _threads(data: DataConfig) -> int | None:
    """Return the threads of one shard: concurrent shards on this host share its cores."""
    if data.workers is not None or data.dask_address is not None:
        return data.workers
    return max(1, len(os.sched_getaffinity(0)) // data.shard_workers)
