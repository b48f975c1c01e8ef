"""What every engine says of the stage that it trains."""

from megacore.models.stage import Stage


class StageEngine:
    """The part of `megacore.engine.base.Engine` that is the stage's to answer."""

    _stage: Stage

    @property
    def parameters(self) -> int:
        """Number of the whole model's parameters."""
        return self._stage.parameter_count

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""
        return self._stage.padded_vocab_size

    @property
    def reads_tokens(self) -> bool:
        """Whether this rank needs the samples: pipeline stages in between do for masks alone."""
        return self._stage.reads_tokens

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Names of the losses whose sum is minimised, `lm_loss` first."""
        return self._stage.loss_names
