"""Comparison of the foreign program's formulas with ours: parameters and operations."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megacore.config.run import RunConfig

OTHER_VOCABULARY = 50257
"""Number of entries that both sides assume for other tokenizers."""


@dataclass(frozen=True)
class ForeignModel:
    """Sizes of a model as another program's settings give them, in that program's terms."""

    family: str
    layers: int
    hidden: int
    heads: int
    head_size: int
    groups: int
    inner: int
    """Width of the MLP after its activation."""
    gated: bool
    attention_bias: bool
    mlp_bias: bool
    norm_bias: bool
    untied: bool
    positions: int
    """Rows of the learned position table; 0 without one."""
    sequence: int
    vocabulary: int
    """Entries before padding."""
    multiple: int
    """Number to whose multiple the vocabulary is padded."""
    batch: int
    """Samples of the first step."""
    qk_norm: bool = False
    qkv_bias: bool = False
    """Biases of queries, keys and values, also without `attention_bias`."""
    binary_head: bool = False

    @property
    def padded(self) -> int:
        """Entries with padding."""
        return -(-self.vocabulary // self.multiple) * self.multiple

    @property
    def parameters(self) -> int:
        """Number of parameters: tables, then layers matrix by matrix, then the head."""
        h, q, kv = self.hidden, self.heads * self.head_size, self.groups * self.head_size
        norm = h * (2 if self.norm_bias else 1)
        up = 2 if self.gated else 1
        attention = h * (q + 2 * kv) + q * h
        attention += (q + 2 * kv) * (self.attention_bias or self.qkv_bias)
        attention += h * self.attention_bias
        if self.qk_norm:
            attention += 2 * self.head_size * (2 if self.norm_bias else 1)
        mlp = h * up * self.inner + self.inner * h + (up * self.inner + h) * self.mlp_bias
        layers = self.layers * (attention + mlp + 2 * norm)
        tables = self.padded * h * (2 if self.untied else 1) + self.positions * h
        total = tables + layers + norm
        if self.family == "bert":  # token types, head with dense layer, norm and bias, pooler
            total += 2 * h + (h * h + h) + norm + self.padded
            total += (h * h + h + 2 * h + 2) * self.binary_head
        return total

    @property
    def operations(self) -> int:
        """Operations of the first step, forward and backward, scores not halved by the mask."""
        h, q, kv = self.hidden, self.heads * self.head_size, self.groups * self.head_size
        weights = self.layers * (
            h * (q + 2 * kv) + q * h + (3 if self.gated else 2) * h * self.inner
        )
        weights += h * self.padded + (h * h if self.family == "bert" else 0)
        scores = 2 * self.layers * self.sequence * q
        return 6 * self.batch * self.sequence * (weights + scores)


@dataclass(frozen=True)
class Comparison:
    """Numbers of both sides."""

    parameters: tuple[int, int]
    """Parameters by the other program's formula and by ours."""
    operations: tuple[int, int]
    """Operations of the first step by the other program's formula and by ours."""
    vocabulary: int

    @property
    def agrees(self) -> bool:
        """True if both pairs are equal."""
        return len({*self.parameters}) == 1 and len({*self.operations}) == 1

    @property
    def text(self) -> str:
        """Lines for the user."""
        return (
            f"parameters: {self.parameters[0]:,} by its formula, {self.parameters[1]:,} by ours "
            f"(vocabulary of {self.vocabulary:,})\n"
            f"operations of the first step: {self.operations[0]:.6g} by its formula, "
            f"{self.operations[1]:.6g} by ours"
        )


def compare(foreign: ForeignModel, config: "RunConfig") -> Comparison:
    """Return parameters and operations of both sides for the same vocabulary."""
    from megacore.config.batch_schedule import BatchSchedule
    from megacore.config.spec import ModelSpec
    from megacore.models.parameters import parameter_count
    from megacore.observe.flops import TransformerShape, step_flops

    spec = ModelSpec.of(config, foreign.vocabulary)
    shape = TransformerShape.of(config, spec.padded_vocab_size)
    samples = BatchSchedule.of(config.train).at(0)
    return Comparison(
        (foreign.parameters, parameter_count(spec)),
        (foreign.operations, step_flops(shape, samples, "none")),
        foreign.vocabulary,
    )
