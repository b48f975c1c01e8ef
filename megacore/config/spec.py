"""A model by itself, apart from the run that trained it: what a checkpoint says of its weights."""

from typing import Self

from pydantic import Field

from megacore.config.base import Section
from megacore.config.model import Family, ModelConfig
from megacore.config.run import RunConfig


class SpecialTokens(Section):
    """Ids of the tokens that have a role; null where the vocabulary has none for it."""

    eod: int | None = Field(None, ge=0)
    """Ends a document."""
    pad: int | None = Field(None, ge=0)
    """Fills what is left of a sequence; T5's decoder begins with it."""
    cls: int | None = Field(None, ge=0)
    """Begins BERT's sequence."""
    sep: int | None = Field(None, ge=0)
    """Ends a segment of BERT's sequence, or a sequence of T5's."""
    mask: int | None = Field(None, ge=0)
    """Stands for a token that BERT predicts."""
    unk: int | None = Field(None, ge=0)
    """Stands for what the vocabulary cannot spell."""
    sentinels: tuple[int, ...] = ()
    """Stand for T5's spans, the first span's first."""


class ModelSpec(Section):
    """All that building a model and reading its weights from a checkpoint needs.

    The checkpoint may be of any layout.
    """

    family: Family
    """Kind of model."""
    model: ModelConfig
    """The architecture; max_position_embeddings is given."""
    vocab_size: int = Field(gt=0)
    """Entries of the vocabulary, before padding."""
    special_tokens: SpecialTokens = SpecialTokens()
    """Ids of the tokens that have a role."""
    tokenizer_directory: str | None = None
    """Where the tokenizer was when the checkpoint was written; null where it came without one."""

    @classmethod
    def of(
        cls,
        config: RunConfig,
        vocab_size: int,
        special_tokens: SpecialTokens | None = None,
        tokenizer_directory: str | None = None,
    ) -> Self:
        """The model that a run trains."""
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
        """Rows of the embedding (v)."""
        return self.model.padded_vocab_size(self.vocab_size)
