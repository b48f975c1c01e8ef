"""Where documents come from, how they become tokens, and how tokens become samples."""

from typing import Annotated, Literal

from pydantic import Field

from megacore.config.base import Section, keyed, unkeyed


class SourceTreeSource(Section):
    """The text files below a directory."""

    kind: Literal["source_tree"] = keyed()
    """Which source this is."""
    path: str | None = keyed(None)
    """The directory; null means the running Python's standard library."""
    pattern: str = keyed("*.py")
    """Glob that a file's name must match."""


class JsonlSource(Section):
    """Local JSON Lines files, one document per line."""

    kind: Literal["jsonl"] = keyed()
    """Which source this is."""
    files: tuple[str, ...] = keyed(min_length=1)
    """Paths or globs, taken in this order."""
    key: str = keyed("text")
    """The field of each line that holds the document."""


class HubSource(Section):
    """A parquet data set of the Hugging Face hub (or a local copy of one), read by `datasets`."""

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


class PrefixSource(Section):
    """Ready-made token files PREFIX.bin and PREFIX.idx, as Megatron-LM writes them."""

    kind: Literal["prefix"] = keyed()
    """Which source this is."""
    prefix: str = keyed(min_length=1)
    """Path without .bin/.idx."""


Source = Annotated[SourceTreeSource | JsonlSource | HubSource | PrefixSource, Field(discriminator="kind")]


class TrainBpeTokenizer(Section):
    """A byte-level BPE trained on the corpus itself."""

    kind: Literal["train-bpe"] = keyed()
    """Which tokenizer this is."""
    vocab_size: int = keyed(8192, gt=256)
    """Entries of the vocabulary, <|endoftext|> included."""


class Gpt2BpeTokenizer(Section):
    """GPT-2's byte-level BPE from its two files."""

    kind: Literal["gpt2-bpe"] = keyed()
    """Which tokenizer this is."""
    vocab_file: str = keyed(min_length=1)
    """Path of vocab.json; its content, not its name, is part of the key."""
    merge_file: str = keyed(min_length=1)
    """Path of merges.txt; its content, not its name, is part of the key."""


class HfTokenizer(Section):
    """A `tokenizer.json`, from a file or from the Hugging Face hub."""

    kind: Literal["hf"] = keyed()
    """Which tokenizer this is."""
    name: str = keyed(min_length=1)
    """Path of a tokenizer.json (or of its directory), or a repository name on the hub."""
    revision: str | None = keyed(None)
    """Commit, tag or branch on the hub."""
    eod_token: str = keyed("<|endoftext|>")
    """The token that ends a document; it must be in the vocabulary."""


TokenizerChoice = Annotated[TrainBpeTokenizer | Gpt2BpeTokenizer | HfTokenizer, Field(discriminator="kind")]


class DataConfig(Section):
    """From documents to samples."""

    source: Source = keyed()
    """Where the documents come from."""
    tokenizer: TokenizerChoice = keyed()
    """How text becomes tokens."""
    split: str = keyed("969,30,1")
    """Weights of the train, validation and test split, by sequences; they need not add up to anything."""
    seq_length: int = keyed(gt=0)
    """Tokens per sample (s)."""
    append_eod: bool = keyed(True)
    """Whether <|endoftext|> is added after each document."""
    shuffle_documents: bool = keyed(True)
    """Whether documents are permuted by the seed before they are tokenized: splits are contiguous."""
    workers: int | None = unkeyed(None, gt=0)
    """Threads that tokenize; null means one per core."""
