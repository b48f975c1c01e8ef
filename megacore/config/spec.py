"""Description of a model's weights in a checkpoint, independent of the run that trained it."""

from collections.abc import Iterable
from typing import Self

from pydantic import Field

from megacore.config.base import Section
from megacore.config.model import Family, ModelConfig
from megacore.config.run import RunConfig


class SpecialTokens(Section):
    """Ids of the tokens with a special role; null where the vocabulary has no such token."""

    eod: int | None = Field(None, ge=0)
    """Token at the end of a document."""
    pad: int | None = Field(None, ge=0)
    """Token that fills the rest of a sequence; T5's decoder input begins with it."""
    cls: int | None = Field(None, ge=0)
    """Token at the start of BERT's sequence."""
    sep: int | None = Field(None, ge=0)
    """Token at the end of a segment of BERT's sequence, or of a sequence of T5's."""
    mask: int | None = Field(None, ge=0)
    """Token that replaces a token that BERT must predict."""
    unk: int | None = Field(None, ge=0)
    """Token for text that the vocabulary cannot represent."""
    sentinels: tuple[int, ...] = ()
    """Tokens that replace T5's spans, in the order of the spans."""
    bos: int | None = Field(None, ge=0)
    """Token at the start of a text in the programs that the model came from, if it is not eod.
    Training does not add it; exports name it."""
    ends: tuple[int, ...] = ()
    """Tokens besides eod that end a generated text. Exports name them."""

    @property
    def begin(self) -> int | None:
        """Token that an export names as the first of a text: bos, else eod."""
        return self.eod if self.bos is None else self.bos

    def all_ends(self, first: int | None) -> int | list[int] | None:
        """Return the tokens that end a text, `first` of them first, in transformers' form."""
        ends = [each for each in dict.fromkeys((first, *self.ends)) if each is not None]
        return ends if len(ends) > 1 else next(iter(ends), None)

    def with_ends(self, ids: Iterable[int], vocab_size: int) -> Self:
        """Return the tokens with those of `ids` that the vocabulary has as further ends."""
        ends = [each for each in (*self.ends, *ids) if each < vocab_size and each != self.eod]
        return self.model_copy(update={"ends": tuple(dict.fromkeys(ends))})

    def continuing(self, earlier: Self, vocab_size: int) -> Self:
        """Return the tokens of a run that continues a model.

        Its begin and ends are kept, and its padding if the vocabulary spells none.
        """
        bos, pad = earlier.bos, earlier.pad if self.pad is None else self.pad
        ends = earlier.ends if earlier.eod is None else (earlier.eod, *earlier.ends)
        known = bos is not None and bos < vocab_size and bos != self.eod
        if pad is not None and pad >= vocab_size:
            pad = None
        kept = {"bos": bos if known else None, "pad": pad}
        return self.model_copy(update=kept).with_ends(ends, vocab_size)


class ModelSpec(Section):
    """Description needed to build a model and read its weights from a checkpoint of any layout."""

    family: Family
    """Family of the model."""
    model: ModelConfig
    """Architecture, with max_position_embeddings set."""
    vocab_size: int = Field(gt=0, lt=2**31)
    """Number of vocabulary entries before padding; token files hold ids of 32 bits."""
    special_tokens: SpecialTokens = SpecialTokens()
    """Ids of the tokens with a special role."""
    tokenizer_directory: str | None = None
    """Path of the tokenizer when the checkpoint was written; null for a checkpoint without a
    tokenizer."""

    @classmethod
    def of(
        cls,
        config: RunConfig,
        vocab_size: int,
        special_tokens: SpecialTokens | None = None,
        tokenizer_directory: str | None = None,
    ) -> Self:
        """Return the description of the model that a run trains."""
        model = config.model.model_copy(
            update={"max_position_embeddings": config.max_position_embeddings}
        )
        return cls(
            family=config.family,
            model=model,
            vocab_size=vocab_size,
            special_tokens=special_tokens or SpecialTokens(),
            tokenizer_directory=tokenizer_directory,
        )

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence in tokens."""
        assert self.model.max_position_embeddings is not None
        return self.model.max_position_embeddings

    @property
    def padded_vocab_size(self) -> int:
        """Number of embedding rows (v), padding included."""
        return self.model.padded_vocab_size(self.vocab_size)
