"""The section `data`: where documents come from, how text becomes tokens, and tokens samples."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megacore.config.base import Section, keyed, unkeyed

DEFAULT_SPLIT = "969,30,1"


class SourceTreeSource(Section):
    """The text files below a directory."""

    kind: Literal["source_tree"] = keyed()
    """Which source this is."""
    path: str | None = keyed(None, resolved="collect")
    """The directory; null means the running Python's standard library."""
    pattern: str = keyed("*.py", resolved="collect")
    """Glob that a file's name must match, or, with a slash in it, its path below the directory, as
    in docs/**/*.md."""


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
    """Hex digest of its content, checked after the download; null takes what comes and records its
    digest."""


class HttpSource(Section):
    """Files on web servers, downloaded once.

    Formats: .jsonl, .jsonl.gz, .jsonl.zst or .parquet, or a pair .bin and .idx.
    """

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
    """Whether rows are read as they arrive; else all files are downloaded first, and a broken
    download resumes."""


class PrefixSource(Section):
    """Ready-made token files PREFIX.bin and PREFIX.idx, as Megatron-LM writes them."""

    kind: Literal["prefix"] = keyed()
    """Which source this is."""
    prefix: str = keyed(resolved="collect", min_length=1)
    """Path without .bin/.idx."""


Source = Annotated[
    SourceTreeSource | JsonlSource | ParquetSource | HttpSource | HubSource | PrefixSource,
    Field(discriminator="kind"),
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


class _Vocabulary(Section):
    """What every tokenizer may have."""

    vocab_extra_ids: int = keyed(0, omit_default=True, ge=0)
    """Sentinels <extra_id_0>, <extra_id_1>, … to add at the end of the vocabulary, as T5 needs
    them."""


class TrainBpeTokenizer(_Vocabulary):
    """A byte-level BPE trained on the corpus itself."""

    kind: Literal["train-bpe"] = keyed()
    """Which tokenizer this is."""
    vocab_size: int = keyed(8192, gt=256)
    """Entries of the vocabulary, special tokens included, sentinels not."""
    special_tokens: tuple[str, ...] = keyed((), omit_default=True)
    """Tokens beside <|endoftext|> that text is never divided into, as those of
    fill-in-the-middle."""


class Gpt2BpeTokenizer(_Vocabulary):
    """GPT-2's byte-level BPE from its two files."""

    kind: Literal["gpt2-bpe"] = keyed()
    """Which tokenizer this is."""
    vocab_file: str = keyed(resolved="tokenizer", min_length=1)
    """Path of vocab.json; its content, not its name, is part of the key."""
    merge_file: str = keyed(resolved="tokenizer", min_length=1)
    """Path of merges.txt; its content, not its name, is part of the key."""


class BertWordPieceTokenizer(_Vocabulary):
    """BERT's WordPiece from its vocabulary."""

    kind: Literal["bert-wordpiece"] = keyed()
    """Which tokenizer this is."""
    vocab_file: str = keyed(resolved="tokenizer", min_length=1)
    """Path of vocab.txt; its content, not its name, is part of the key."""
    lower_case: bool = keyed(True)
    """Whether text is lower-cased and stripped of accents, as for the uncased vocabularies."""


class TrainWordPieceTokenizer(_Vocabulary):
    """A WordPiece vocabulary trained on the corpus itself, with BERT's special tokens."""

    kind: Literal["train-wordpiece"] = keyed()
    """Which tokenizer this is."""
    vocab_size: int = keyed(8192, gt=256)
    """Entries of the vocabulary, special tokens included, sentinels not."""
    lower_case: bool = keyed(True)
    """Whether text is lower-cased and stripped of accents."""


class SentencePieceTokenizer(_Vocabulary):
    """A SentencePiece model."""

    kind: Literal["sentencepiece"] = keyed()
    """Which tokenizer this is."""
    model_file: str = keyed(resolved="tokenizer", min_length=1)
    """Path of the .model; its content, not its name, is part of the key."""


class HfTokenizer(_Vocabulary):
    """A `tokenizer.json`, from a file or from the Hugging Face hub."""

    kind: Literal["hf"] = keyed()
    """Which tokenizer this is."""
    name: str = keyed(resolved="tokenizer", min_length=1)
    """Path of a tokenizer.json (or of its directory), or a repository name on the hub."""
    revision: str | None = keyed(None, resolved="tokenizer")
    """Commit, tag or branch on the hub."""
    eod_token: str = keyed("<|endoftext|>")
    """The token that ends a document; it must be in the vocabulary."""

    @property
    def local_file(self) -> Path | None:
        """The file that `name` means on this machine; None for a repository of the hub."""
        path = Path(self.name)
        if path.is_dir():
            return path / "tokenizer.json"
        return path if path.exists() or path.suffix == ".json" or path.is_absolute() else None


TokenizerChoice = Annotated[
    TrainBpeTokenizer
    | TrainWordPieceTokenizer
    | Gpt2BpeTokenizer
    | BertWordPieceTokenizer
    | SentencePieceTokenizer
    | HfTokenizer,
    Field(discriminator="kind"),
]


class FimConfig(Section):
    """Fill-in-the-middle (Bavarian et al. 2022, arXiv:2207.14255).

    Parts of documents change places.
    """

    rate: float = keyed(0.5, gt=0, le=1)
    """Probability that a document is rearranged."""
    spm_rate: float = keyed(0.5, ge=0, le=1)
    """Probability that a rearranged document has the suffix first, instead of the prefix."""
    prefix_token: str = keyed("<fim_prefix>")
    """Stands before the prefix; like the next two it must be in the vocabulary."""
    middle_token: str = keyed("<fim_middle>")
    """Stands before the middle."""
    suffix_token: str = keyed("<fim_suffix>")
    """Stands before the suffix."""


class MaskedLmConfig(Section):
    """BERT's samples (Devlin et al. 2018).

    Two segments of whole sentences, some tokens of which are predicted.
    """

    masked_lm_prob: float = keyed(0.15, gt=0, lt=1)
    """Share of the tokens that are predicted; of these 80 % become [MASK], 10 % another token, 10 %
    stay."""
    whole_word_masking: bool = keyed(True)
    """Whether the pieces of a word are predicted together."""
    max_ngram: int = keyed(3, ge=1, le=10)
    """Most consecutive words that are drawn together, each number n as likely as 1 / n
    (Megatron-LM); 1 draws single words (Devlin et al. 2018)."""
    short_seq_prob: float = keyed(0.1, ge=0, le=1)
    """Share of samples with a shorter target length."""
    sentence_task: Literal["sop", "nsp"] = keyed("sop")
    """What the binary head predicts: whether the two segments have changed places (Lan et al.
    2019), or whether the second comes from another document (Devlin et al. 2018)."""


class SpanCorruptionConfig(Section):
    """T5's samples (Raffel et al. 2019).

    Spans of whole sentences are replaced by sentinels and are to be written.
    """

    noise_density: float = keyed(0.15, gt=0, lt=1)
    """Share of the tokens that are replaced."""
    mean_span_length: float | None = keyed(3.0, ge=1)
    """Tokens of a replaced span, on average; null draws spans of 1 to 10 whole words as Megatron-LM
    does, by a geometric distribution with p = 0.2 (Joshi et al. 2019)."""
    short_seq_prob: float = keyed(0.1, ge=0, le=1)
    """Share of samples with a shorter target length."""
    decoder_seq_length: int = keyed(128, gt=1)
    """Tokens of the decoder's sequence; a span that finds no room there stays in the text."""


class DataConfig(Section):
    """From documents to samples.

    One of `source`, `blend` and `split_blends` says where the documents come from.
    """

    source: Source | None = keyed(None, key="collect")
    """A single source."""
    blend: tuple[WeightedSource, ...] | None = keyed(None, key="collect", min_length=1)
    """Several sources with weights; each is divided by `split`."""
    split_blends: SplitBlends | None = keyed(None, key="collect")
    """Sources for each split by itself."""
    tokenizer: TokenizerChoice = keyed(key="tokenizer")
    """How text becomes tokens."""
    split: str | None = keyed(None, resolved=("index", "run"))
    """Weights of the train, validation and test split; null means 969,30,1, or no division with
    `split_blends`."""
    seq_length: int = keyed(key=("index", "run", "zeroshot"), gt=0)
    """Tokens per sample (s); of T5, the encoder's."""
    masked_lm: MaskedLmConfig = keyed(MaskedLmConfig(), key=("index", "run"))
    """How BERT's samples are made; used with family bert only."""
    span_corruption: SpanCorruptionConfig = keyed(SpanCorruptionConfig(), key=("index", "run"))
    """How T5's samples are made; used with family t5 only."""
    append_eod: bool = keyed(True, key="tokenize")
    """Whether <|endoftext|> is added after each document."""
    shuffle_documents: bool = keyed(True, resolved="tokenize")
    """Whether documents are permuted by the seed once they are tokenized: splits are contiguous."""
    on_bad_line: Literal["stop", "skip"] = keyed("stop", key="tokenize")
    """What a line does that holds no document (blank, not JSON, without the key): end the stage, or
    be counted."""
    split_sentences: bool = keyed(False, resolved="tokenize")
    """Whether each sentence becomes a sequence of its own, as BERT's sentence pairs need."""
    keep_newlines: bool = keyed(False, key="tokenize")
    """Whether sentences keep the line breaks between them."""
    sentence_splitter: Literal["punkt", "rules"] = keyed("punkt", key="tokenize")
    """nltk's Punkt model of `language`, downloaded once, or plain rules that need no download."""
    language: str = keyed("english", key="punkt", pattern=r"^[a-z_]+$")
    """Whose Punkt model divides sentences."""
    packing: Literal["packed", "pack_until_overflow", "unpacked"] = keyed(
        "packed", key=("index", "run")
    )
    """Samples cut from documents end to end; of whole documents as long as they fit; or of one
    document each."""
    index_style: Literal["megatron", "neox"] = keyed("megatron", key=("index", "run"))
    """Whose order of samples: GPT-NeoX has no separate final epoch, so that a run of it can be
    continued."""
    add_extra_token: bool = keyed(True, key=("index", "run"))
    """Whether a sample reads one token beyond seq_length as its last label."""
    drop_last_partial: bool = keyed(True, key=("index", "run"))
    """Whether the validation split loses its last sample when that is shorter than the others."""
    reset_position_ids: bool = keyed(False, key="run")
    """Whether positions count from 0 again after each <|endoftext|>."""
    reset_attention_mask: bool = keyed(False, key="run")
    """Whether a token sees only its own document."""
    eod_mask_loss: bool = keyed(False, key="run")
    """Whether what follows an <|endoftext|> is not learnt."""
    fim: FimConfig | None = keyed(None, key="run")
    """Fill-in-the-middle of the training split; null leaves documents as they are."""
    workers: int | None = unkeyed(None, gt=0)
    """Threads that tokenize one shard; null means one per core."""
    shard_mb: int | None = unkeyed(None, gt=0)
    """Cut a corpus beyond this many MB into shards of about this size, each a task of its own; null
    cuts nothing."""
    shard_runner: Literal["threads", "processes", "dask"] = unkeyed("threads")
    """Where the tasks of the shards run: in threads or processes of this machine, or on a Dask
    cluster."""
    shard_workers: int = unkeyed(2, gt=0)
    """Shards at a time on this machine."""
    dask_address: str | None = unkeyed(None)
    """Scheduler of the Dask cluster, as in tcp://host:8786; null starts one of shard_workers on
    this machine."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """Every source once, in the order in which it is first named."""
        if self.source is not None:
            return (self.source,)
        members = self.blend or ()
        if self.split_blends is not None:
            members = (*self.split_blends.train, *self.split_blends.valid, *self.split_blends.test)
        return tuple(dict.fromkeys(member.source for member in members))

    @property
    def split_weights(self) -> str:
        """The weights of the splits, resolved."""
        return self.split or DEFAULT_SPLIT
