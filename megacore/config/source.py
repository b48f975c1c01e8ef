"""Where documents come from."""

from typing import Annotated, Literal

from pydantic import Field

from megacore.config.base import Section, keyed, unkeyed


class SourceTreeSource(Section):
    """The text files below a directory."""

    kind: Literal["source_tree"] = keyed()
    """Which source this is."""
    path: str | None = keyed(None, resolved="collect")
    """The directory; null means the running Python's standard library."""
    pattern: str = keyed("*.py", resolved="collect")
    """Glob that a file's name must match, or, with a slash in it, its path below the directory, as in docs/**/*.md."""


class JsonlSource(Section):
    """Local JSON Lines files, plain or compressed (.gz, .zst), one document per line."""

    kind: Literal["jsonl"] = keyed()
    """Which source this is."""
    files: tuple[str, ...] = keyed(resolved="collect", min_length=1)
    """Paths or globs, taken in this order."""
    key: str = keyed("text")
    """The field of each line that holds the document."""


class ParquetSource(Section):
    """Local parquet files, one document per row."""

    kind: Literal["parquet"] = keyed()
    """Which source this is."""
    files: tuple[str, ...] = keyed(resolved="collect", min_length=1)
    """Paths or globs, taken in this order."""
    key: str = keyed("text")
    """The column that holds the document."""


class RemoteFile(Section):
    """One file on a web server."""

    url: str = keyed(pattern=r"^https?://")
    """Its address."""
    sha256: str | None = keyed(None, pattern=r"^[0-9a-f]{64}$")
    """Hex digest of its content, checked after the download; null takes what comes and records its digest."""


class HttpSource(Section):
    """Files on web servers, downloaded once: .jsonl, .jsonl.gz, .jsonl.zst or .parquet, or a pair .bin and .idx."""

    kind: Literal["http"] = keyed()
    """Which source this is."""
    files: tuple[RemoteFile, ...] = keyed(resolved="collect", min_length=1)
    """What to download, in the order of the documents."""
    key: str = keyed("text")
    """The field or column that holds the document; token files have none."""


class HubSource(Section):
    """A data set of the Hugging Face hub (or a local copy of one), read by `datasets`."""

    kind: Literal["hub"] = keyed()
    """Which source this is."""
    dataset: str = keyed(min_length=1)
    """Name on the hub, or a local directory of parquet files."""
    config: str | None = keyed(None)
    """Configuration name of the data set."""
    split: str = keyed("train")
    """Split of the data set to read."""
    revision: str | None = keyed(None)
    """Commit, tag or branch; pin a commit to make the corpus reproducible."""
    key: str = keyed("text")
    """The column that holds the document."""
    streaming: bool = unkeyed(True)
    """Whether rows are read as they arrive; else all files are downloaded first, and a broken download resumes."""


class PrefixSource(Section):
    """Ready-made token files PREFIX.bin and PREFIX.idx, as Megatron-LM writes them."""

    kind: Literal["prefix"] = keyed()
    """Which source this is."""
    prefix: str = keyed(resolved="collect", min_length=1)
    """Path without .bin/.idx."""


Source = Annotated[
    SourceTreeSource | JsonlSource | ParquetSource | HttpSource | HubSource | PrefixSource, Field(discriminator="kind")
]


def holds_tokens(source: Source) -> bool:
    """Whether a source is a pair of ready-made token files instead of text."""
    if isinstance(source, HttpSource):
        return any(file.url.partition("?")[0].endswith((".bin", ".idx")) for file in source.files)
    return isinstance(source, PrefixSource)


class WeightedSource(Section):
    """A member of a blend."""

    weight: float = keyed(resolved=("index", "run"), gt=0)
    """Share of the samples; the weights of a blend need not add up to anything."""
    source: Source = keyed()
    """Where its documents come from."""


Blend = Annotated[tuple[WeightedSource, ...], Field(min_length=1)]


class SplitBlends(Section):
    """A blend for each split, whose members belong to it whole."""

    train: Blend = keyed()
    """What training draws from."""
    valid: Blend = keyed()
    """What validation draws from."""
    test: Blend = keyed()
    """What the test draws from."""
