"""Stages `tokenizer` and `tokenize`: a vocabulary, then the corpus as tokens on disk."""

from pathlib import Path
from typing import Any

from megacore.artifact import Artifact, StageKey
from megacore.config import RunConfig
from tasks._cache import StageResult, build, stage_task


def tokenizer_key(config: RunConfig, corpus: Artifact) -> StageKey:
    """The key of the tokenizer; only one that is trained depends on the corpus."""
    from megacore.tokenizer.build import VERSION, fingerprint

    parameters = fingerprint(config.data.tokenizer)
    if config.data.tokenizer.kind == "train-bpe":
        return StageKey.of("tokenizer", VERSION, parameters, corpus=corpus)
    return StageKey.of("tokenizer", VERSION, parameters)


@stage_task("tokenizer", tokenizer_key)
def make_tokenizer(config: RunConfig, corpus: Artifact) -> StageResult:
    """Train the tokenizer on the corpus, or take the given vocabulary."""
    from megacore.tokenizer.build import build_tokenizer

    def fill(directory: Path) -> dict[str, Any]:
        return build_tokenizer(config.data.tokenizer, corpus.directory, directory)

    return build(config, tokenizer_key(config, corpus), fill)


def tokenize_key(config: RunConfig, corpus: Artifact, tokenizer: Artifact) -> StageKey:
    """The key of the token files."""
    from megacore.tokenizer.tokenize import VERSION

    data = config.data
    shuffle_seed = config.seed if data.shuffle_documents else None
    parameters = {"append_eod": data.append_eod, "shuffle_seed": shuffle_seed}
    return StageKey.of("tokenize", VERSION, parameters, corpus=corpus, tokenizer=tokenizer)


@stage_task("tokenize", tokenize_key)
def tokenize(config: RunConfig, corpus: Artifact, tokenizer: Artifact) -> StageResult:
    """Write the corpus as `.bin`/`.idx`."""
    from megacore.tokenizer.tokenize import tokenize_corpus

    key = tokenize_key(config, corpus, tokenizer)

    def fill(directory: Path) -> dict[str, Any]:
        return tokenize_corpus(
            corpus.directory,
            tokenizer.directory,
            directory,
            append_eod=config.data.append_eod,
            shuffle_seed=key.parameters["shuffle_seed"],
            workers=config.data.workers,
        )

    return build(config, key, fill)
