"""Stage `tokenize-shard`: a large corpus in parts, merged into one pair of files.

Each part is a task of its own.
"""

import os
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import get_run_logger
from prefect.futures import PrefectFuture
from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner, ThreadPoolTaskRunner

from megacore.artifact import Artifact, StageKey, lock
from megacore.artifact.build import remove_tree
from megacore.config import RunConfig
from megacore.config.data import DataConfig
from megacore.errors import ConfigError, WorkerLostError
from megacore.launch.exit_reason import die_with_parent
from tasks._cache import StageResult, build, stage_task
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
    """The key of one shard: as of the whole, with the parts of the corpus's files that it reads."""
    whole = tokenize_key(config, corpus, tokenizer, punkt)
    parts = [[os.path.relpath(part.path, corpus.path), part.start, part.stop] for part in shard]
    # All of the whole's parameters: no other whole shares its shards, which are deleted with it.
    return StageKey(
        "tokenize-shard", whole.version, whole.parameters | {"segments": parts}, whole.inputs
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
    from megacore.tokenizer import tokenize as shards

    options = tokenize_options(config, punkt)

    def fill(directory: Path) -> dict[str, Any]:
        return dict(
            shards.tokenize_shard(
                shard, tokenizer.directory, directory, options, workers=_threads(config.data)
            )
        )

    return build(config, shard_key(config, corpus, tokenizer, punkt, shard), fill)


def needs_shards(config: RunConfig, corpus: Artifact) -> bool:
    """Whether the corpus is text, and more of it than `data.shard_mb`."""
    from megacore.corpus.documents import read_sources

    limit = config.data.shard_mb
    if limit is None or corpus.counts["bytes"] <= limit * MB:
        return False
    found = read_sources(corpus.directory)
    return found is None or found[0]["kind"] != "prefix"


def tokenize_in_shards(
    config: RunConfig,
    corpus: Artifact,
    tokenizer: Artifact,
    punkt: Artifact | None,
    directory: Path,
    done: list[Artifact],
) -> dict[str, Any]:
    """Run a task for each shard where `data.shard_runner` says.

    What they wrote is merged into `directory`.

    The artifacts of the shards are added to `done`. When shards fail, the others are finished
    first: the next run takes them as they are. Raises the first failed shard's error.
    """
    from megacore.corpus.segments import divide, segments
    from megacore.tokenizer.tokenize import merge_shards

    assert config.data.shard_mb is not None
    parts = divide(segments(corpus.directory), config.data.shard_mb * MB)
    launch = config.launch
    task = tokenize_shard.with_options(
        retries=launch.retries, retry_delay_seconds=launch.retry_delay
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
    done += [outcome.artifact for outcome in outcomes if isinstance(outcome, StageResult)]
    options = tokenize_options(config, punkt)
    return dict(
        merge_shards([shard.directory for shard in done], directory, tokenizer.directory, options)
    )


def _outcome(
    future: PrefectFuture[StageResult], number: int, count: int
) -> StageResult | Exception:
    """What the shard's task returned or raised; a worker's death is told as such."""
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


def shard_runner(data: DataConfig) -> "TaskRunner[Any]":
    """Where shards are tokenized. Raises ConfigError when it is Dask and that is not installed."""
    if data.shard_runner == "threads":
        return ThreadPoolTaskRunner(max_workers=data.shard_workers)
    if data.shard_runner == "processes":
        # A pool's processes would outlive a flow that is killed.
        return ProcessPoolTaskRunner(max_workers=data.shard_workers, initializer=die_with_parent)
    try:
        from prefect_dask import DaskTaskRunner
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
    """Delete the shards of a merged whole."""
    for shard in shards:
        with lock(shard.directory):
            remove_tree(shard.directory)


def _threads(data: DataConfig) -> int | None:
    """Threads of one shard: on this machine those that run beside it share the cores."""
    if data.workers is not None or data.dask_address is not None:
        return data.workers
    return max(1, len(os.sched_getaffinity(0)) // data.shard_workers)
