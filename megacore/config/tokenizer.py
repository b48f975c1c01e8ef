"""How text becomes tokens."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megacore.config.base import Section, keyed


class _Vocabulary(Section):
    """What every tokenizer may have."""

    vocab_extra_ids: int = keyed(0, omit_default=True, ge=0)
    """Sentinels <extra_id_0>, <extra_id_1>, … to add at the end of the vocabulary, as T5 needs them."""


class TrainBpeTokenizer(_Vocabulary):
    """A byte-level BPE trained on the corpus itself."""

    kind: Literal["train-bpe"] = keyed()
    """Which tokenizer this is."""
    vocab_size: int = keyed(8192, gt=256)
    """Entries of the vocabulary, special tokens included, sentinels not."""
    special_tokens: tuple[str, ...] = keyed((), omit_default=True)
    """Tokens beside <|endoftext|> that text is never divided into, as those of fill-in-the-middle."""


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
        """The file that `name` means on this machine, or None when it names a repository of the hub."""
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
