"""Stages `tokenizer`, `tokenize` and `blend`: a vocabulary, then each corpus as tokens on disk."""

import base64
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact

from megacore.artifact import Artifact, StageKey
from megacore.config import RunConfig
from megacore.config.keys import key_parameters
from megacore.token_files.indexed_dataset import token_prefixes
from tasks._cache import StageResult, build, stage_task
from tasks._tokens import tokenize_key, tokenize_options
from tasks.shards import discard, needs_shards, tokenize_in_shards


def tokenizer_key(config: RunConfig, corpora: tuple[Artifact, ...]) -> StageKey:
    """The key of the tokenizer; only one that is trained depends on the corpora."""
    from megacore.tokenizer.build import VERSION, fingerprint

    parameters = fingerprint(config.data.tokenizer)
    inputs = corpora if config.data.tokenizer.kind.startswith("train-") else ()
    roles = ["corpus", *(f"corpus_{number}" for number in range(1, len(inputs)))]
    return StageKey.of("tokenizer", VERSION, parameters, **dict(zip(roles, inputs, strict=False)))


@stage_task("tokenizer", tokenizer_key)
def make_tokenizer(config: RunConfig, corpora: tuple[Artifact, ...]) -> StageResult:
    """Train the tokenizer on all corpora, or take the given vocabulary."""
    from megacore.config.spec import SpecialTokens
    from megacore.tokenizer.build import build_tokenizer
    from megacore.tokenizer.vocabulary import check_roles

    def fill(directory: Path) -> dict[str, Any]:
        skip = config.data.on_bad_line == "skip"
        directories = [corpus.directory for corpus in corpora]
        return build_tokenizer(config.data.tokenizer, directories, directory, skip_bad_lines=skip)

    result = build(config, tokenizer_key(config, corpora), fill)
    special = SpecialTokens.model_validate(result.artifact.counts["special_tokens"])
    check_roles(special, config.family, config.data)
    return result


@stage_task("tokenize", tokenize_key)
def tokenize(
    config: RunConfig, corpus: Artifact, tokenizer: Artifact, punkt: Artifact | None = None
) -> StageResult:
    """Write a corpus as `.bin`/`.idx`; beyond `data.shard_mb` as shards, which are merged."""
    from megacore.tokenizer.tokenize import tokenize_corpus

    options = tokenize_options(config, punkt)
    shards: list[Artifact] = []

    def fill(directory: Path) -> dict[str, Any]:
        if needs_shards(config, corpus):
            return tokenize_in_shards(config, corpus, tokenizer, punkt, directory, shards)
        counts = tokenize_corpus(
            corpus.directory, tokenizer.directory, directory, options, workers=config.data.workers
        )
        return dict(counts)

    result = build(config, tokenize_key(config, corpus, tokenizer, punkt), fill)
    discard(shards)
    _show_lengths(config, result.artifact)
    return result


def _show_lengths(config: RunConfig, tokens: Artifact) -> None:
    """Draw how long the documents are, beside the tokens, and show it with the task run.

    The picture is no part of the artifact: its bytes depend on who draws it.
    """
    from megacore.token_files.indexed_dataset import IndexedDataset
    from tasks._plots import LENGTHS_FILE, length_histogram

    (prefix,) = token_prefixes(tokens.directory)
    picture = tokens.directory / LENGTHS_FILE
    what = "sentence" if config.data.split_sentences else "document"
    length_histogram(IndexedDataset(prefix).lengths, picture, f"{config.name}: tokens per {what}")
    encoded = base64.b64encode(picture.read_bytes()).decode("ascii")
    # As markdown: Prefect shows an image artifact's whole address below it, and this address is the
    # image.
    create_markdown_artifact(
        f"![tokens per {what}](data:image/png;base64,{encoded})\n",
        key="token-lengths",
        description=f"tokens per {what} of {tokens.key}",
    )


def blend_key(config: RunConfig, members: tuple[Artifact, ...]) -> StageKey:
    """The key of several sources' token files taken together; weights belong to the index maps."""
    from megacore.token_files.indexed_dataset import BLEND_VERSION

    inputs = {f"member_{number}": one for number, one in enumerate(members)}
    return StageKey.of("blend", BLEND_VERSION, key_parameters(config, "blend"), **inputs)


@stage_task("blend", blend_key)
def blend(config: RunConfig, members: tuple[Artifact, ...]) -> StageResult:
    """Name the token files of all sources in one place."""
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
