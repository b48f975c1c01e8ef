"""Values of `model.rope_scaling`: changes of the rotary frequencies for longer sequences.

The definitions are those of transformers 5 (`transformers/modeling_rope_utils.py`).
"""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from megacore.config.base import Section, keyed

MOST_POSITIONS = 2**30
"""Most positions of a sequence; published models have up to 2**24."""


class LinearRope(Section):
    """Division of all positions by a factor (Chen et al. 2023, arXiv:2306.15595)."""

    kind: Literal["linear"] = keyed()
    """Selects this kind."""
    factor: float = keyed(ge=1.0)
    """Number by which positions are divided."""


class DynamicRope(Section):
    """Base that grows with the sequence ("dynamic NTK", as in transformers).

    The frequencies of a sequence of up to original_max_position_embeddings tokens are those without
    scaling. Those of a longer one depend on its length. model.max_position_embeddings is the
    longest sequence.
    """

    kind: Literal["dynamic"] = keyed()
    """Selects this kind."""
    factor: float = keyed(ge=1.0)
    """Strength of the growth; each further original_max_position_embeddings tokens multiply the
    base by about this number."""
    original_max_position_embeddings: int = keyed(gt=0, le=MOST_POSITIONS)
    """Longest sequence without scaling, in tokens; transformers calls it
    max_position_embeddings."""


class YarnRope(Section):
    """YaRN (Peng et al. 2023, arXiv:2309.00071).

    Low frequencies are divided by the factor and high ones kept, with a linear ramp in between.
    Cosines and sines are multiplied by the attention factor.
    """

    kind: Literal["yarn"] = keyed()
    """Selects this kind."""
    factor: float = keyed(ge=1.0)
    """Number by which low frequencies are divided."""
    original_max_position_embeddings: int = keyed(gt=0, le=MOST_POSITIONS)
    """Longest sequence before the extension, in tokens."""
    beta_fast: float = keyed(32.0, gt=0.0)
    """Rotations over the original length from which a frequency is kept."""
    beta_slow: float = keyed(1.0, gt=0.0)
    """Rotations over the original length up to which a frequency is divided by the factor."""
    attention_factor: float | None = keyed(None, gt=0.0)
    """Factor on cosines and sines; null means 0.1 x ln(factor) + 1, or the value that follows from
    mscale and mscale_all_dim."""
    mscale: float | None = keyed(None, gt=0.0)
    """Multiplier of ln(factor) in the numerator of the attention factor, with mscale_all_dim
    only."""
    mscale_all_dim: float | None = keyed(None, gt=0.0)
    """Multiplier of ln(factor) in the denominator of the attention factor, with mscale only."""
    truncate: bool = keyed(True)
    """If true, the ends of the ramp are rounded to whole frequencies."""

    @property
    def scale(self) -> float:
        """Factor on cosines and sines, with the default filled in."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    def _mscale(self, multiplier: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * multiplier * math.log(self.factor) + 1.0

    @model_validator(mode="after")
    def _ramp_ascends(self) -> Self:
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"beta_fast {self.beta_fast} is less than beta_slow {self.beta_slow}: exchange them"
            )
        return self


class Llama3Rope(Section):
    """Scaling of Llama 3.1 (Dubey et al. 2024, arXiv:2407.21783).

    Long waves are divided by the factor and short ones kept, with an interpolation in between.
    """

    kind: Literal["llama3"] = keyed()
    """Selects this kind."""
    factor: float = keyed(ge=1.0)
    """Number by which low frequencies are divided; 8 in Llama 3.1, 32 in Llama 3.2."""
    low_freq_factor: float = keyed(1.0, gt=0.0)
    """Waves longer than original_max_position_embeddings over this number are divided by the
    factor."""
    high_freq_factor: float = keyed(4.0, gt=0.0)
    """Waves shorter than original_max_position_embeddings over this number are kept."""
    original_max_position_embeddings: int = keyed(8192, gt=0, le=MOST_POSITIONS)
    """Longest sequence before the extension, in tokens."""

    @model_validator(mode="after")
    def _factors_ascend(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} is not less than high_freq_factor "
                f"{self.high_freq_factor}: give a smaller one"
            )
        return self


class LongRope(Section):
    """LongRoPE of Phi-3 (Ding et al. 2024, arXiv:2402.13753).

    Each frequency is divided by its own number. Sequences longer than
    original_max_position_embeddings have another list of numbers. Cosines and sines are multiplied
    by the attention factor.
    """

    kind: Literal["longrope"] = keyed()
    """Selects this kind."""
    factor: float = keyed(ge=1.0)
    """Ratio of the longest sequences after and before the extension, from which the attention
    factor follows."""
    original_max_position_embeddings: int = keyed(gt=1, le=MOST_POSITIONS)
    """Longest sequence with the short factors, in tokens."""
    short_factor: tuple[Annotated[float, Field(gt=0)], ...] = keyed()
    """Numbers that divide the frequencies of short sequences, one for each frequency."""
    long_factor: tuple[Annotated[float, Field(gt=0)], ...] = keyed()
    """Numbers that divide the frequencies of long sequences, one for each frequency."""
    attention_factor: float | None = keyed(None, gt=0.0)
    """Factor on cosines and sines; null means
    sqrt(1 + ln(factor) / ln(original_max_position_embeddings))."""

    @property
    def scale(self) -> float:
        """Factor on cosines and sines, with the default filled in."""
        if self.attention_factor is not None:
            return self.attention_factor
        original = self.original_max_position_embeddings
        return math.sqrt(1 + math.log(self.factor) / math.log(original))


RopeScaling = Annotated[
    LinearRope | DynamicRope | YarnRope | Llama3Rope | LongRope, Field(discriminator="kind")
]
"""Kinds of scaled rotary positions."""


def same_up_to(scaling: RopeScaling | None) -> int | None:
    """Return the length, in tokens, up to which a sequence's length does not change its rotations.

    None means that they never depend on the length.
    """
    if isinstance(scaling, DynamicRope | LongRope):
        return scaling.original_max_position_embeddings
    return None


def check_scaling(scaling: RopeScaling, rotary_dim: int) -> None:
    """Raise ValueError if `scaling` cannot change the frequencies of `rotary_dim` elements."""
    if isinstance(scaling, LongRope):
        for name in ("short_factor", "long_factor"):
            count = len(getattr(scaling, name))
            if count != rotary_dim // 2:
                raise ValueError(
                    f"model.rope_scaling.{name} has {count} numbers, and {rotary_dim} rotated "
                    f"elements of a head have {rotary_dim // 2} frequencies: give one for each"
                )
    if isinstance(scaling, DynamicRope) and rotary_dim == 2:
        raise ValueError(
            "model.rope_scaling is of kind dynamic, which is not defined for 2 rotated elements of "
            "a head: rotate at least 4, or choose linear"
        )
