"""Stages `collect` and `punkt`: documents of a source, and a model that splits sentences."""

from pathlib import Path
from typing import Any

from megacore.artifact import StageKey
from megacore.config import RunConfig
from megacore.config.data import Source, holds_tokens
from megacore.config.keys import key_parameters
from megacore.errors import DataFormatError
from tasks._cache import StageResult, build, stage_task

COLLECTED_AT_ONCE = 4
"""Number of sources that are collected at the same time; servers and disks limit their rate."""


def collect_key(config: RunConfig, source: Source) -> StageKey:
    """Return the key of a corpus, determined by the content of its source."""
    from megacore.corpus.collect import VERSION, fingerprint

    return StageKey.of("collect", VERSION, fingerprint(source))


@stage_task("collect", collect_key)
def collect(config: RunConfig, source: Source) -> StageResult:
    """Collect the documents of one of `data.sources`."""
    from megacore.corpus.collect import collect as collect_documents

    key = collect_key(config, source)

    def fill(directory: Path) -> dict[str, Any]:
        counts = collect_documents(source, directory, document_bytes=config.data.max_document_bytes)
        if collect_key(config, source) != key:
            raise DataFormatError(
                "data.source changed while it was read: start again when nobody writes to it"
            )
        return counts

    return build(config, key, fill)


def needs_punkt(config: RunConfig) -> bool:
    """Return True if sentences are split by a model that must be downloaded."""
    data = config.data
    has_text = not all(map(holds_tokens, data.sources))
    return has_text and data.split_sentences and data.sentence_splitter == "punkt"


def punkt_key(config: RunConfig) -> StageKey:
    """Return the key of a language's Punkt model."""
    from megacore.tokenizer.sentences import VERSION

    return StageKey.of("punkt", VERSION, key_parameters(config, "punkt"))


@stage_task("punkt", punkt_key)
def punkt(config: RunConfig) -> StageResult:
    """Download nltk's Punkt model of `data.language`."""
    from megacore.tokenizer.sentences import download_punkt

    return build(
        config,
        punkt_key(config),
        lambda directory: download_punkt(directory, config.data.language),
    )
