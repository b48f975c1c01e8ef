"""Stages `tokenizer`, `tokenize` and `blend`: a vocabulary, then each corpus as token files."""

import base64
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact

from megacore.artifact import Artifact, StageKey
from megacore.config import RunConfig
from megacore.config.data import holds_tokens
from megacore.config.keys import key_parameters
from megacore.token_files.indexed_dataset import token_prefixes
from tasks._cache import StageResult, artifact_directory, build, stage_task
from tasks._tokens import tokenize_key, tokenize_options, written_bytes
from tasks.shards import discard, needs_shards, tokenize_in_shards


def tokenizer_key(config: RunConfig, corpora: tuple[Artifact, ...]) -> StageKey:
    """Return the key of the tokenizer, which depends on the corpora only if it is trained."""
    from megacore.tokenizer.build import VERSION, fingerprint

    parameters = fingerprint(config.data.tokenizer)
    inputs = corpora if config.data.tokenizer.kind.startswith("train-") else ()
    roles = ["corpus", *(f"corpus_{number}" for number in range(1, len(inputs)))]
    return StageKey.of("tokenizer", VERSION, parameters, **dict(zip(roles, inputs, strict=False)))


@stage_task("tokenizer", tokenizer_key)
def make_tokenizer(config: RunConfig, corpora: tuple[Artifact, ...]) -> StageResult:
    """Train the tokenizer on all corpora, or use the given vocabulary."""
    from megacore.config.spec import SpecialTokens
    from megacore.tokenizer.build import build_tokenizer
    from megacore.tokenizer.vocabulary import check_roles

    def fill(directory: Path) -> dict[str, Any]:
        skip = config.data.on_bad_line == "skip"
        directories = [corpus.directory for corpus in corpora]
        return build_tokenizer(
            config.data.tokenizer,
            directories,
            directory,
            skip_bad_lines=skip,
            document_bytes=config.data.max_document_bytes,
        )

    result = build(config, tokenizer_key(config, corpora), fill)
    special = SpecialTokens.model_validate(result.artifact.counts["special_tokens"])
    check_roles(special, config.family, config.data)
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
        if holds_tokens(source) or artifact_directory(tokenize_key(config, *each)).exists()
        else each[0].counts["bytes"]
        for source, each in zip(data.sources, inputs, strict=True)
    ]
    total = max(1, sum(sizes))
    shares = [max(1, round(cores * size / total)) for size in sizes]
    return cores, [
        config.model_copy(update={"data": data.model_copy(update={"workers": share})})
        for share in shares
    ]


@stage_task("tokenize", tokenize_key)
def tokenize(
    config: RunConfig, corpus: Artifact, tokenizer: Artifact, punkt: Artifact | None = None
) -> StageResult:
    """Write a corpus as `.bin`/`.idx`; a corpus over `data.shard_mb` is merged from shards."""
    from megacore.tokenizer.tokenize import tokenize_corpus

    options = tokenize_options(config, punkt)
    shards: list[Artifact] = []
    sharded = needs_shards(config, corpus)

    def fill(directory: Path) -> dict[str, Any]:
        if sharded:
            return tokenize_in_shards(config, corpus, tokenizer, punkt, directory, shards)
        counts = tokenize_corpus(
            corpus.directory,
            tokenizer.directory,
            directory,
            options,
            workers=config.data.workers,
            document_bytes=config.data.max_document_bytes,
        )
        return dict(counts)

    key = tokenize_key(config, corpus, tokenizer, punkt)
    result = build(
        config,
        key,
        fill,
        writes=lambda: written_bytes(config, corpus, tokenizer, shards=sharded),
    )
    discard(shards)
    _show_lengths(config, result.artifact)
    return result


def _show_lengths(config: RunConfig, tokens: Artifact) -> None:
    """Plot the lengths of the documents next to the tokens, and show the plot with the task run.

    The plot is no part of the artifact, because its bytes depend on the plotting library.
    """
    from megacore.token_files.indexed_dataset import IndexedDataset
    from tasks._plots import LENGTHS_FILE, length_histogram

    (prefix,) = token_prefixes(tokens.directory)
    picture = tokens.directory / LENGTHS_FILE
    unit = "sentence" if config.data.split_sentences else "document"
    length_histogram(IndexedDataset(prefix).lengths, picture, f"{config.name}: tokens per {unit}")
    encoded = base64.b64encode(picture.read_bytes()).decode("ascii")
    # Stored as markdown, because Prefect prints an image artifact's address below it, and this
    # address contains the whole image.
    create_markdown_artifact(
        f"![tokens per {unit}](data:image/png;base64,{encoded})\n",
        key="token-lengths",
        description=f"tokens per {unit} of {tokens.key}",
    )


def blend_key(config: RunConfig, members: tuple[Artifact, ...]) -> StageKey:
    """Return the key of the joined token files of several sources, independent of their weights.

    The weights belong to the index maps.
    """
    from megacore.token_files.indexed_dataset import BLEND_VERSION

    inputs = {f"member_{number}": member for number, member in enumerate(members)}
    return StageKey.of("blend", BLEND_VERSION, key_parameters(config, "blend"), **inputs)


@stage_task("blend", blend_key)
def blend(config: RunConfig, members: tuple[Artifact, ...]) -> StageResult:
    """Collect the token files of all sources under one artifact."""
    from megacore.token_files.indexed_dataset import write_members

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
