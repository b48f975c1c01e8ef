"""Section `data`: the sources of documents, the tokenizer, and the division into samples."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from megacore.config.base import Section, keyed, unkeyed
from megacore.config.curate import CurateExecutor, CurateStep, LocalExecutor
from megacore.paths import exists, is_dir

OnBadLine = Literal["stop", "skip"]
Splitter = Literal["punkt", "rules"]
Packing = Literal["packed", "best_fit", "pack_until_overflow", "unpacked"]
IndexStyle = Literal["megatron", "neox"]
NEOX_DEFAULTS = ("packing", "add_extra_token", "drop_last_partial")
"""Options that must have their defaults with the style neox."""
MASKED_LM_SPECIAL_TOKENS = 3
"""Number of special tokens of a BERT sample: [CLS] and two [SEP]."""
T5_SPECIAL_TOKENS = 2
"""Number of special tokens, a start and an end, for which Megatron core reserves room in a T5
sample."""
END_OF_TEXT = "<|endoftext|>"
"""End-of-document token of GPT-2 (Radford et al. 2019)."""
DEFAULT_SPLIT = "969,30,1"
DEFAULT_CURATE_SHARD_MB = 64
DEFAULT_MAX_DOCUMENT_MB = 100
"""Books, source files and web pages stay far below; `tokenizers` takes 12 GB for such a text."""


class SourceTreeSource(Section):
    """Text files in a directory and its subdirectories."""

    kind: Literal["source_tree"] = keyed()
    """Type of the source."""
    path: str | None = keyed(None, resolved="collect")
    """Path of the directory; null means the standard library of the running Python."""
    pattern: str | None = keyed(None, resolved="collect")
    """Glob that a file's name must match; a glob with a slash, such as `docs/**/*.md`, must match
    the path relative to the directory. Null means `*.py` without `path`, else every text file:
    files that are empty, hidden, not UTF-8, or contain NUL bytes are left out."""


class TextSource(Section):
    """Plain text files, each a document or cut into several."""

    kind: Literal["text"] = keyed()
    """Type of the source."""
    files: tuple[str, ...] = keyed(resolved="collect", min_length=1)
    """Paths or globs of files, or directories, of which all text files are read; their order is the
    order of the documents."""
    document_characters: int | None = keyed(None, ge=16)
    """Maximum number of characters of a document. A longer file is cut after the last blank line in
    the second half of this length, else after the last line end there, else exactly at this length.
    Null means one document per file."""


class JsonlSource(Section):
    """Local JSON Lines files, plain or compressed (.gz, .zst), one document per line."""

    kind: Literal["jsonl"] = keyed()
    """Type of the source."""
    files: tuple[str, ...] = keyed(resolved="collect", min_length=1)
    """Paths or globs of the files, such as `/data/*.jsonl`; their order is the order of the
    documents."""
    key: str = keyed("text")
    """Field of each line that contains the document."""


class ParquetSource(Section):
    """Local parquet files, one document per row."""

    kind: Literal["parquet"] = keyed()
    """Type of the source."""
    files: tuple[str, ...] = keyed(resolved="collect", min_length=1)
    """Paths or globs of the files, such as `/data/*.parquet`; their order is the order of the
    documents."""
    key: str = keyed("text")
    """Column that contains the document."""


class WarcSource(Section):
    """Web pages in local WARC files (.warc, .warc.gz), or their text in WET files.

    Successful responses with HTML are read. data.curate has to extract their text.
    """

    kind: Literal["warc"] = keyed()
    """Type of the source."""
    files: tuple[str, ...] = keyed(resolved="collect", min_length=1)
    """Paths or globs of the files, such as `/data/*.warc.gz`; their order is the order of the
    pages."""


class RemoteFile(Section):
    """File on a web server."""

    url: str = keyed(pattern=r"^https?://")
    """URL of the file."""
    sha256: str | None = keyed(None, pattern=r"^[0-9a-f]{64}$")
    """SHA-256 digest of the content in hexadecimal, checked after the download; null accepts any
    content and records its digest."""


class HttpSource(Section):
    """Files on web servers, downloaded once.

    Formats: .jsonl, .jsonl.gz, .jsonl.zst or .parquet, or a pair of token files .bin and .idx.
    """

    kind: Literal["http"] = keyed()
    """Type of the source."""
    files: tuple[RemoteFile, ...] = keyed(resolved="collect", min_length=1)
    """Files to download; their order is the order of the documents."""
    key: str = keyed("text")
    """Field or column that contains the document; not used for token files."""
    max_file_gb: float = unkeyed(1000.0, gt=0, le=1e6)
    """Largest size of one file in GB (10^9 bytes), by the length that the server announces and by
    the bytes that arrive; a larger file is refused."""


class HubSource(Section):
    """Data set of the Hugging Face hub, or a local copy of one, read with `datasets`."""

    kind: Literal["hub"] = keyed()
    """Type of the source."""
    dataset: str = keyed(min_length=1)
    """Name of the data set on the hub, or a local directory of parquet files."""
    config: str | None = keyed(None)
    """Configuration name of the data set, such as `wikitext-103-raw-v1`; null means its only or
    default one."""
    split: str = keyed("train")
    """Split of the data set to read."""
    revision: str | None = keyed(None)
    """Commit, tag or branch; null means the default branch. A commit makes the corpus
    reproducible."""
    key: str = keyed("text")
    """Column that contains the document, or a part of it."""
    document_start: str | None = keyed(None, omit_default=True, min_length=1)
    """Regular expression of Python's re that is searched in each row: a row that matches begins a
    document, and the rows up to the next match belong to it. Null means one document per row."""
    streaming: bool = unkeyed(True)
    """If true, rows are read while they arrive; if false, all files are downloaded first, and an
    interrupted download resumes."""

    @field_validator("document_start")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(
                f"{pattern!r} is no regular expression ({error}): correct it"
            ) from error
        return pattern


class PrefixSource(Section):
    """Existing token files PREFIX.bin and PREFIX.idx in Megatron-LM's format."""

    kind: Literal["prefix"] = keyed()
    """Type of the source."""
    prefix: str = keyed(resolved="collect", min_length=1)
    """Path of the two files without .bin and .idx, such as `/data/corpus_text_document`."""


Source = Annotated[
    SourceTreeSource
    | TextSource
    | JsonlSource
    | ParquetSource
    | WarcSource
    | HttpSource
    | HubSource
    | PrefixSource,
    Field(discriminator="kind"),
]


def holds_tokens(source: Source) -> bool:
    """Return True if a source consists of token files instead of text."""
    if isinstance(source, HttpSource):
        return any(file.url.partition("?")[0].endswith((".bin", ".idx")) for file in source.files)
    return isinstance(source, PrefixSource)


class WeightedSource(Section):
    """Source of a blend with its weight."""

    weight: float | None = keyed(None, resolved=("index", "run"), ge=0)
    """Relative share of the samples; the weights of a blend need not sum to 1. Null only with
    data.blend_temperature, 0 only if data.blend_schedule gives a weight later."""
    source: Source = keyed()
    """Source of the documents."""
    name: str | None = unkeyed(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=80)
    """Name in the losses by source; null derives one from the source."""
    max_epochs: float | None = unkeyed(None, gt=0)
    """Epochs of the source in the train split above which the run is refused; null means no
    limit."""


Blend = Annotated[tuple[WeightedSource, ...], Field(min_length=1)]


class SplitBlends(Section):
    """Separate blends for the splits; each member belongs to one split entirely."""

    train: Blend = keyed()
    """Blend for training."""
    valid: Blend = keyed()
    """Blend for validation."""
    test: Blend = keyed()
    """Blend for the test."""


class _Vocabulary(Section):
    """Options that all tokenizers share."""

    vocab_extra_ids: int = keyed(0, omit_default=True, ge=0, le=2**20)
    """Number of sentinels `<extra_id_0>`, `<extra_id_1>`, … added at the end of the vocabulary; T5
    needs them."""


class TrainBpeTokenizer(_Vocabulary):
    """Byte-level BPE trained on the corpus."""

    kind: Literal["train-bpe"] = keyed()
    """Type of the tokenizer."""
    vocab_size: int = keyed(8192, gt=256, le=2**30)
    """Number of vocabulary entries, including special tokens but not sentinels."""
    special_tokens: tuple[str, ...] = keyed((), omit_default=True)
    """Special tokens in addition to `<|endoftext|>`, such as those of fill-in-the-middle; text is
    never split inside them."""


class Gpt2BpeTokenizer(_Vocabulary):
    """GPT-2's byte-level BPE, read from its two files."""

    kind: Literal["gpt2-bpe"] = keyed()
    """Type of the tokenizer."""
    vocab_file: str = keyed(resolved="tokenizer", min_length=1)
    """Path of vocab.json. The key contains its content, not its name."""
    merge_file: str = keyed(resolved="tokenizer", min_length=1)
    """Path of merges.txt. The key contains its content, not its name."""


class BertWordPieceTokenizer(_Vocabulary):
    """BERT's WordPiece, read from its vocabulary file."""

    kind: Literal["bert-wordpiece"] = keyed()
    """Type of the tokenizer."""
    vocab_file: str = keyed(resolved="tokenizer", min_length=1)
    """Path of vocab.txt. The key contains its content, not its name."""
    lower_case: bool = keyed(True)
    """If true, text is lower-cased and accents are removed; BERT's uncased vocabularies need it."""


class TrainWordPieceTokenizer(_Vocabulary):
    """WordPiece vocabulary trained on the corpus, with BERT's special tokens."""

    kind: Literal["train-wordpiece"] = keyed()
    """Type of the tokenizer."""
    vocab_size: int = keyed(8192, gt=256, le=2**30)
    """Number of vocabulary entries, including special tokens but not sentinels."""
    lower_case: bool = keyed(True)
    """If true, text is lower-cased and accents are removed."""


class SentencePieceTokenizer(_Vocabulary):
    """SentencePiece model."""

    kind: Literal["sentencepiece"] = keyed()
    """Type of the tokenizer."""
    model_file: str = keyed(resolved="tokenizer", min_length=1)
    """Path of the .model file. The key contains its content, not its name."""


class HfTokenizer(_Vocabulary):
    """Tokenizer from a `tokenizer.json`, in a file or on the Hugging Face hub."""

    kind: Literal["hf"] = keyed()
    """Type of the tokenizer."""
    name: str = keyed(resolved="tokenizer", min_length=1)
    """Path of a tokenizer.json or of its directory, or name of a repository on the hub."""
    revision: str | None = keyed(None, resolved="tokenizer")
    """Commit, tag or branch on the hub; null means the default branch."""
    eod_token: str = keyed(END_OF_TEXT)
    """Token that ends a document; the vocabulary must contain it."""

    @property
    def local_file(self) -> Path | None:
        """Path of the local file that `name` refers to; None for a repository of the hub."""
        path = Path(self.name)
        if is_dir(path):
            return path / "tokenizer.json"
        return path if exists(path) or path.suffix == ".json" or path.is_absolute() else None


SPELLINGS = {
    "pad": ("[PAD]", "<pad>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "unk": ("[UNK]", "<unk>"),
}
"""Spellings of each role's token in BERT's and SentencePiece's style; the first in the vocabulary
is used."""
TrainedTokenizer = TrainBpeTokenizer | TrainWordPieceTokenizer
"""Tokenizers that are trained on the corpus."""
ExistingTokenizer = Gpt2BpeTokenizer | BertWordPieceTokenizer | SentencePieceTokenizer | HfTokenizer
"""Tokenizers that are read from files or the hub."""
TokenizerChoice = Annotated[TrainedTokenizer | ExistingTokenizer, Field(discriminator="kind")]


class FimConfig(Section):
    """Options of fill-in-the-middle (Bavarian et al. 2022, arXiv:2207.14255).

    Documents are divided into prefix, middle and suffix, and the parts are rearranged.
    """

    rate: float = keyed(0.5, gt=0, le=1)
    """Probability that a document is rearranged."""
    spm_rate: float = keyed(0.5, ge=0, le=1)
    """Probability that a rearranged document begins with the suffix instead of the prefix."""
    prefix_token: str = keyed("<fim_prefix>")
    """Token before the prefix. The vocabulary must contain it, like the next two tokens."""
    middle_token: str = keyed("<fim_middle>")
    """Token before the middle."""
    suffix_token: str = keyed("<fim_suffix>")
    """Token before the suffix."""


class MaskedLmConfig(Section):
    """Options of BERT's samples (Devlin et al. 2018).

    A sample consists of two segments of complete sentences, in which some tokens are predicted.
    """

    masked_lm_prob: float = keyed(0.15, gt=0, lt=1)
    """Fraction of the tokens that are predicted; 80 % of them are replaced by [MASK], 10 % by a
    random token, and 10 % are unchanged."""
    whole_word_masking: bool = keyed(True)
    """If true, all pieces of a word are predicted together."""
    max_ngram: int = keyed(3, ge=1, le=10)
    """Maximum number of consecutive words that are selected together; a length n has a probability
    proportional to 1 / n (Megatron-LM). 1 selects single words (Devlin et al. 2018)."""
    use_geometric_distribution: bool = keyed(False, omit_default=True)
    """If true, the number of words that are selected together is instead drawn from a geometric
    distribution with p = 0.2, at most `max_ngram` (Joshi et al. 2019; Megatron-LM's
    masking_use_geometric_distribution)."""
    short_seq_prob: float = keyed(0.1, ge=0, le=1)
    """Fraction of samples with a shorter target length, drawn evenly from 2 tokens to the
    maximum."""
    sentence_task: Literal["sop", "nsp"] = keyed("sop")
    """Task of the binary head: sop, detect whether the two segments are swapped (Lan et al. 2019);
    nsp, detect whether the second segment comes from another document (Devlin et al. 2018)."""


class SpanCorruptionConfig(Section):
    """Options of T5's samples (Raffel et al. 2019).

    Spans in complete sentences are replaced by sentinels, and the decoder predicts the spans.
    """

    noise_density: float = keyed(0.15, gt=0, lt=1)
    """Fraction of the tokens that are replaced."""
    mean_span_length: float | None = keyed(3.0, ge=1)
    """Mean length of a replaced span in tokens; null draws spans of 1 to 10 whole words from a
    geometric distribution with p = 0.2 (Joshi et al. 2019), like Megatron-LM."""
    short_seq_prob: float = keyed(0.1, ge=0, le=1)
    """Fraction of samples with a shorter target length, drawn evenly from 2 tokens to the
    maximum."""
    decoder_seq_length: int = keyed(128, gt=1)
    """Length of the decoder's sequence in tokens; a span for which no space is left there is not
    replaced."""


class BlendStep(Section):
    """Change of the weights of the train split at a sample of the training."""

    samples: int | None = keyed(None, gt=0)
    """Consumed samples from which the weights apply. Give either samples or tokens."""
    tokens: int | None = keyed(None, gt=0)
    """Consumed tokens from which the weights apply: from the first sample that begins at or after
    them, of data.seq_length tokens each."""
    weights: tuple[Annotated[float, Field(ge=0)], ...] = keyed(min_length=1)
    """Weight of each source in the order of the blend; 0 draws nothing from it."""

    def first_sample(self, seq_length: int) -> int:
        """Return the first sample with these weights."""
        if self.samples is not None:
            return self.samples
        return -(-(self.tokens or 0) // seq_length)


class SequencePhase(Section):
    """Part of a training with one sequence length."""

    samples: int = keyed(ge=0)
    """Consumed samples at which the part begins; 0 in the first part. A global batch has one
    length, that at its first sample."""
    seq_length: int = keyed(gt=0)
    """Length of the sequences in tokens; it divides data.seq_length. A sample is cut into
    data.seq_length / seq_length sequences."""


class DataConfig(Section):
    """Options of the data: the sources, the tokenizer and the samples.

    Exactly one of `source`, `blend` and `split_blends` gives the documents.
    """

    source: Source | None = keyed(None, key="collect")
    """Single source of documents. Give exactly one of source, blend and split_blends."""
    blend: tuple[WeightedSource, ...] | None = keyed(None, key="collect", min_length=1)
    """Several sources with weights, instead of source; each of them is divided by `split`."""
    split_blends: SplitBlends | None = keyed(None, key="collect")
    """Separate sources with weights for each split, instead of source."""
    blend_schedule: tuple[BlendStep, ...] | None = keyed(
        None, resolved=("index", "train"), min_length=1
    )
    """Later weights of blend, or of split_blends.train. All samples before a step stay the same, so
    a step may be added to a run that has not reached it."""
    blend_temperature: float | None = keyed(None, key=("index", "run"), omit_default=True, gt=0)
    """Temperature T of weights proportional to the tokens of each source to the power 1/T, for
    sources without a weight: 1 is proportional to the sizes, more raises small sources."""
    curate: tuple[CurateStep, ...] = keyed((), key="curate", omit_default=True)
    """Steps that remove or change documents between collection and tokenization, in this order;
    each source is curated by itself, except for deduplications across sources. No steps, no
    stage."""
    curate_shard_mb: int = keyed(DEFAULT_CURATE_SHARD_MB, key="curate", gt=0, le=100_000)
    """Size of the shards in MB (10^6 bytes) that one process curates at a time, and of the files
    with the documents that are kept."""
    curate_executor: CurateExecutor = unkeyed(LocalExecutor(kind="local"))
    """Executor of the tasks that curate shards; the documents that are kept do not depend on it."""
    curate_workers: int | None = unkeyed(None, gt=0)
    """Number of processes that curate shards at the same time; null means one per core, for Slurm
    an element of the array per task, at most 1000, and on a Ray cluster one per free CPU."""
    tokenizer: TokenizerChoice = keyed(TrainBpeTokenizer(kind="train-bpe"), key="tokenizer")
    """Tokenizer that converts text into tokens."""
    split: str | None = keyed(None, resolved=("index", "run"))
    """Relative sizes of the train, validation and test split in documents, such as `90,5,5`; null
    means 969,30,1, or no division with `split_blends`."""
    seq_length: int = keyed(256, key=("index", "run", "zeroshot"), gt=0)
    """Length of a sample in tokens (s); for T5, of the encoder's sequence."""
    seq_length_schedule: tuple[SequencePhase, ...] | None = keyed(
        None, key="run", omit_default=True, min_length=1
    )
    """Sequence length of the training as a function of consumed samples; null means seq_length. A
    micro batch [b, s] is cut into [b x s / l, l], so no token is lost. Validation keeps seq_length.
    GPT with packing packed only."""
    masked_lm: MaskedLmConfig = keyed(MaskedLmConfig(), key=("index", "run"))
    """Options of BERT's samples; used with family bert only."""
    span_corruption: SpanCorruptionConfig = keyed(SpanCorruptionConfig(), key=("index", "run"))
    """Options of T5's samples; used with family t5 only."""
    append_eod: bool = keyed(True, key="tokenize")
    """If true, the token `<|endoftext|>` is added after each document."""
    shuffle_documents: bool = keyed(True, resolved="tokenize")
    """If true, documents are shuffled with the seed after they are tokenized. Splits are contiguous
    ranges of documents, so the order decides which split a document belongs to."""
    on_bad_line: OnBadLine = keyed("stop", key=("curate", "search", "tokenize"))
    """Treatment of lines without a document (blank, not JSON, or without the key): stop ends the
    stage, skip only counts them."""
    split_sentences: bool = keyed(False, resolved="tokenize")
    """If true, each sentence becomes a separate sequence, which BERT's sentence pairs need."""
    keep_newlines: bool = keyed(False, key="tokenize")
    """If true, sentences keep the line breaks between them."""
    sentence_splitter: Splitter = keyed("punkt", key="tokenize")
    """Sentence splitter: nltk's Punkt model of `language`, which is downloaded once, or simple
    rules that need no download."""
    language: str = keyed("english", key="punkt", pattern=r"^[a-z_]+$")
    """Language of the Punkt model: its English name in lower case, such as `german`."""
    packing: Packing = keyed("packed", key=("index", "run"))
    """Division of documents into samples: packed cuts the concatenated documents at equal lengths;
    best_fit divides only documents longer than a sample, and combines pieces so that they fill
    samples best (Ding et al. 2024, arXiv:2404.10830); pack_until_overflow fills a sample with
    complete documents in their order as long as they fit; unpacked takes one document per
    sample."""
    index_style: IndexStyle = keyed("megatron", key=("index", "run"))
    """Order of the samples: megatron, or neox, which has no separate final epoch and therefore
    allows a run to be extended."""
    add_extra_token: bool = keyed(True, key=("index", "run"))
    """If true, a sample reads one token more than seq_length: the label of its last position."""
    drop_last_partial: bool = keyed(True, key=("index", "run"))
    """If true, the last sample of the validation split is dropped if it is shorter than the
    others."""
    reset_position_ids: bool = keyed(False, key="run")
    """If true, positions restart at 0 after each `<|endoftext|>`."""
    reset_attention_mask: bool = keyed(False, key="run")
    """If true, a token attends only to tokens of the same document."""
    eod_mask_loss: bool = keyed(False, key="run")
    """If true, the prediction of the token after an `<|endoftext|>` does not contribute to the
    loss."""
    fim: FimConfig | None = keyed(None, key="run")
    """Fill-in-the-middle of the training split; null leaves documents unchanged."""
    max_document_mb: int = unkeyed(DEFAULT_MAX_DOCUMENT_MB, gt=0, le=2000)
    """Maximum size of a document in MB (10^6 bytes): of its line of JSON Lines with all fields, or
    of a row's text. A larger one ends the stage with its place, also if `on_bad_line` is skip, and
    is not read completely. gigatoken takes twice its size of memory, `tokenizers` 120 times."""
    workers: int | None = unkeyed(None, gt=0)
    """Threads that tokenize one source or shard; null means one per core, which several sources
    share by size."""
    shard_mb: int | None = unkeyed(None, gt=0)
    """Size of the shards in MB (10^6 bytes) into which a larger corpus is divided, each tokenized
    by a separate task; null does not divide the corpus."""
    shard_runner: Literal["threads", "processes", "dask"] = unkeyed("threads")
    """Executor of the shards' tasks: threads or processes of this host, or a Dask cluster."""
    shard_workers: int = unkeyed(2, gt=0)
    """Number of shards that are tokenized at the same time on this host."""
    dask_address: str | None = unkeyed(None)
    """Address of the Dask cluster's scheduler, such as `tcp://host:8786`; null starts a cluster
    with shard_workers workers on this host."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """All distinct sources, in the order of their first appearance."""
        if self.source is not None:
            return (self.source,)
        members = (member for blend in self.blends.values() for member in blend)
        return tuple(dict.fromkeys(member.source for member in members))

    @property
    def blends(self) -> dict[str, tuple[WeightedSource, ...]]:
        """Members of each blend by its name in this section; none for a single source."""
        if self.split_blends is None:
            return {} if self.blend is None else {"blend": self.blend}
        names = ("train", "valid", "test")
        return {f"split_blends.{name}": getattr(self.split_blends, name) for name in names}

    @property
    def train_blend(self) -> tuple[WeightedSource, ...]:
        """Members of the train split; empty for a single source."""
        return self.blend or (() if self.split_blends is None else self.split_blends.train)

    @property
    def max_document_bytes(self) -> int:
        """Maximum size of a document in bytes."""
        return self.max_document_mb * 10**6

    @property
    def split_weights(self) -> str:
        """Relative sizes of the splits, with the default filled in."""
        return self.split or DEFAULT_SPLIT
