"""Stages `tokenizer`, `tokenize`, `tokenize-shard` and `blend`: a vocabulary, then token files.

A corpus over `data.shard_mb` is tokenized in parts, each in a task of its own, which are merged.
"""

import base64
import os
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.futures import PrefectFuture
from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner, ThreadPoolTaskRunner

from megacore.artifact import Artifact, Manifest, StageKey, lock
from megacore.artifact.build import remove_tree
from megacore.config import RunConfig
from megacore.config.data import DataConfig, TrainedTokenizer, holds_tokens
from megacore.config.keys import key_parameters
from megacore.config.spec import SpecialTokens
from megacore.corpus.documents import read_sources
from megacore.corpus.segments import Segment, divide, segments
from megacore.errors import ConfigError, WorkerLostError
from megacore.launch.workers import WorkerPool
from megacore.paths import exists
from megacore.plan.epochs import BYTES_PER_TOKEN
from megacore.token_files.indexed_dataset import (
    BLEND_VERSION,
    UINT16_LIMIT,
    IndexedDataset,
    token_prefixes,
    write_members,
)
from megacore.tokenizer.vocabulary import check_roles
from tasks._cache import StageResult, artifact_directory, build, stage_task
from tasks._logging import shown_in_prefect
from tasks._plots import LENGTHS_FILE
from tasks._retry import retry_delays

if TYPE_CHECKING:
    from megacore.tokenizer.tokenize import TokenizeOptions

MB = 1_000_000
_TEXT_KINDS = ("source_tree", "text", "hub")
"""Kinds of sources whose `bytes` are those of their text."""


def tokenizer_key(config: RunConfig, corpora: tuple[Artifact, ...]) -> StageKey:
    """Return the key of the tokenizer, which depends on the corpora only if it is trained."""
    from megacore.tokenizer.build import VERSION, fingerprint

    parameters = fingerprint(config.data.tokenizer)
    inputs = corpora if isinstance(config.data.tokenizer, TrainedTokenizer) else ()
    roles = ["corpus", *(f"corpus_{number}" for number in range(1, len(inputs)))]
    return StageKey.of("tokenizer", VERSION, parameters, **dict(zip(roles, inputs, strict=False)))


@stage_task("tokenizer", tokenizer_key)
def make_tokenizer(config: RunConfig, corpora: tuple[Artifact, ...]) -> StageResult:
    """Train the tokenizer on all corpora, or use the given vocabulary.

    Raises ConfigError if it lacks a token that the samples need.
    """
    from megacore.data.fim import special_ids
    from megacore.tokenizer import load_tokenizer
    from megacore.tokenizer.build import build_tokenizer

    def fill(directory: Path) -> dict[str, Any]:
        directories = [corpus.directory for corpus in corpora]
        return build_tokenizer(
            config.data.tokenizer,
            directories,
            directory,
            on_bad_line=config.data.on_bad_line,
            document_bytes=config.data.max_document_bytes,
        )

    result = build(config, tokenizer_key(config, corpora), fill)
    special = SpecialTokens.model_validate(result.artifact.counts["special_tokens"])
    check_roles(special, config.family, config.data)
    if config.data.fim is not None:
        special_ids(load_tokenizer(result.artifact.directory), config.data.fim)
    return result


def share_cores(
    config: RunConfig, inputs: Sequence[tuple[Artifact, Artifact, Artifact | None]]
) -> tuple[int, list[RunConfig]]:
    """Return how many corpora are tokenized at the same time, and the configuration of each.

    `inputs` are those of `tokenize`. Corpora that are not tokenized yet share the cores in
    proportion to their bytes, so that they end at the same time, each with at least one thread.
    With `data.workers`, as many are tokenized at the same time as have cores. With `data.shard_mb`
    it is one: its shards are tokenized side by side.
    """
    data, cores = config.data, len(os.sched_getaffinity(0))
    if data.shard_mb is not None or data.workers is not None:
        at_once = 1 if data.shard_mb is not None else max(1, cores // (data.workers or 1))
        return at_once, [config] * len(inputs)
    # Ready-made token files are linked, without work.
    sizes = [
        0
        if holds_tokens(source) or exists(artifact_directory(tokenize_key(config, *each)))
        else each[0].counts["bytes"]
        for source, each in zip(data.sources, inputs, strict=True)
    ]
    total = max(1, sum(sizes))
    shares = [max(1, round(cores * size / total)) for size in sizes]
    return cores, [
        config.model_copy(update={"data": data.model_copy(update={"workers": share})})
        for share in shares
    ]


def tokenize_key(
    config: RunConfig, corpus: Artifact, tokenizer: Artifact, punkt: Artifact | None = None
) -> StageKey:
    """Return the key of one source's token files, which does not depend on the use of shards."""
    from megacore.tokenizer.tokenize import VERSION

    resolved = {"shuffle_seed": config.seed if config.data.shuffle_documents else None}
    parameters = key_parameters(config, "tokenize", resolved)
    if not config.data.split_sentences:
        del parameters["sentences"]
    inputs = {"corpus": corpus, "tokenizer": tokenizer} | (
        {} if punkt is None else {"punkt": punkt}
    )
    return StageKey.of("tokenize", VERSION, parameters, **inputs)


def _options(config: RunConfig, punkt: Artifact | None) -> "TokenizeOptions":
    """Return the options that determine the tokens, in addition to corpus and tokenizer."""
    from megacore.tokenizer.tokenize import TokenizeOptions

    data = config.data
    return TokenizeOptions(
        append_eod=data.append_eod,
        shuffle_seed=config.seed if data.shuffle_documents else None,
        split_sentences=data.split_sentences,
        keep_newlines=data.keep_newlines,
        sentence_splitter=data.sentence_splitter,
        language=data.language,
        on_bad_line=data.on_bad_line,
        sentence_data=None if punkt is None else punkt.directory,
    )


@stage_task("tokenize", tokenize_key)
def tokenize(
    config: RunConfig, corpus: Artifact, tokenizer: Artifact, punkt: Artifact | None = None
) -> StageResult:
    """Write a corpus as `.bin`/`.idx`; a corpus over `data.shard_mb` is merged from shards."""
    from megacore.tokenizer.tokenize import tokenize_corpus

    shards: list[Artifact] = []
    sharded = _needs_shards(config, corpus)

    def fill(directory: Path) -> dict[str, Any]:
        if sharded:
            return tokenize_in_shards(config, corpus, tokenizer, punkt, directory, shards)
        counts = tokenize_corpus(
            corpus.directory,
            tokenizer.directory,
            directory,
            _options(config, punkt),
            workers=config.data.workers,
            document_bytes=config.data.max_document_bytes,
        )
        return dict(counts)

    key = tokenize_key(config, corpus, tokenizer, punkt)
    result = build(
        config,
        key,
        fill,
        writes=lambda: _written_bytes(config, corpus, tokenizer, shards=sharded),
    )
    for shard in shards:  # merged, and complete only now
        with lock(shard.directory):
            remove_tree(shard.directory)
    _show_lengths(config, result.artifact)
    return result


def _needs_shards(config: RunConfig, corpus: Artifact) -> bool:
    """Return True if the corpus is text and larger than `data.shard_mb`."""
    limit = config.data.shard_mb
    if limit is None or corpus.counts["bytes"] <= limit * MB:
        return False
    sources = read_sources(corpus.directory)
    return sources is None or sources[0]["kind"] != "prefix"


def _written_bytes(
    config: RunConfig, corpus: Artifact, tokenizer: Artifact, *, shards: bool
) -> int:
    """Return about how many bytes are written for the tokens, or 0 if the text is not measured.

    Files that the corpus only refers to may be compressed, or hold more than the text. The tokens
    are there up to three times at once: in shards, joined, and shuffled.
    """
    kind = Manifest.read(corpus.directory).parameters.get("kind")
    if corpus.stage not in ("curate", "decontaminate") and kind not in _TEXT_KINDS:
        return 0
    wide = tokenizer.counts["vocab_size"] >= UINT16_LIMIT
    copies = 1 + config.data.shuffle_documents + shards
    tokens = int(corpus.counts["bytes"] // BYTES_PER_TOKEN)
    return copies * tokens * (4 if wide else 2)


def _show_lengths(config: RunConfig, tokens: Artifact) -> None:
    """Plot the lengths of the documents next to the tokens, and show the plot with the task run.

    The plot is no part of the artifact, because its bytes depend on the plotting library.
    """
    from megacore.inspect.tokens import draw_lengths

    (prefix,) = token_prefixes(tokens.directory)
    picture = tokens.directory / LENGTHS_FILE
    unit = "sentence" if config.data.split_sentences else "document"
    draw_lengths(IndexedDataset(prefix).lengths, picture, f"{config.name}: tokens per {unit}")
    encoded = base64.b64encode(picture.read_bytes()).decode("ascii")
    # Stored as markdown, because Prefect prints an image artifact's address below it, and this
    # address contains the whole image.
    with shown_in_prefect("the plot of the lengths"):
        create_markdown_artifact(
            f"![tokens per {unit}](data:image/png;base64,{encoded})\n",
            key="token-lengths",
            description=f"tokens per {unit} of {tokens.key}",
        )


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
    counts = merge_shards(
        [shard.directory for shard in shards],
        directory,
        tokenizer.directory,
        _options(config, punkt),
    )
    read_sources(corpus.directory)  # a file may have changed after its shard was read
    return dict(counts)


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


def shard_key(
    config: RunConfig,
    corpus: Artifact,
    tokenizer: Artifact,
    punkt: Artifact | None,
    shard: tuple[Segment, ...],
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
    shard: tuple[Segment, ...],
) -> StageResult:
    """Write a part of a corpus as `.bin`/`.idx`."""
    from megacore.tokenizer import tokenize as tokens

    paths = {part.path for part in shard}

    def fill(directory: Path) -> dict[str, Any]:
        read_sources(corpus.directory, paths)
        counts = dict(
            tokens.tokenize_shard(
                shard,
                tokenizer.directory,
                directory,
                _options(config, punkt),
                workers=_threads(config.data),
                document_bytes=config.data.max_document_bytes,
            )
        )
        read_sources(corpus.directory, paths)  # a file may have changed while it was read
        return counts

    return build(config, shard_key(config, corpus, tokenizer, punkt, shard), fill)


def _threads(data: DataConfig) -> int | None:
    """Return the threads of one shard: concurrent shards on this host share its cores."""
    if data.workers is not None or data.dask_address is not None:
        return data.workers
    return max(1, len(os.sched_getaffinity(0)) // data.shard_workers)


def blend_key(config: RunConfig, members: tuple[Artifact, ...]) -> StageKey:
    """Return the key of the joined token files of several sources, independent of their weights.

    The weights belong to the index maps.
    """
    inputs = {f"member_{number}": member for number, member in enumerate(members)}
    return StageKey.of("blend", BLEND_VERSION, key_parameters(config, "blend"), **inputs)


@stage_task("blend", blend_key)
def blend(config: RunConfig, members: tuple[Artifact, ...]) -> StageResult:
    """Collect the token files of all sources under one artifact."""
    key = blend_key(config, members)

    def fill(directory: Path) -> dict[str, Any]:
        write_members(directory, [member.directory for member in members])
        return {
            "members": len(members),
            **{
                name: sum(member.counts[name] for member in members)
                for name in ("documents", "empty_documents", "sequences", "tokens")
            },
            "vocab_size": members[0].counts["vocab_size"],
        }

    return build(config, key, fill)
