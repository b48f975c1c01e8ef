"""Report of the gate's measurements, written to `parity.json`."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class ParityReport:
    """Results of one comparison between an export and our model."""

    tolerance: float
    """Largest absolute difference of fp32 logits that passes."""
    dtype: str = "float32"
    """Type of the exported weights; our model's weights were rounded to it."""
    samples: int = 0
    """Number of validation samples whose logits were compared."""
    tokens: int = 0
    """Number of positions whose logits were compared."""
    max_abs_logit_difference: float = 0.0
    """Largest absolute difference of a logit over all samples, positions and vocabulary entries."""
    max_abs_answer_difference: float | None = None
    """Largest absolute difference of a logit of BERT's binary head; None without that head."""
    perplexity_split: str = "test"
    """Split on which perplexities were measured."""
    perplexity_samples: int = 0
    """Number of scored samples of that split."""
    perplexity_tokens: int = 0
    """Number of predicted tokens in them."""
    perplexity_ours: float = 0.0
    """Perplexity of our model over the vocabulary without padding."""
    perplexity_exported: float = 0.0
    """Perplexity of the exported model."""
    perplexity_with_padding: float = 0.0
    """Perplexity of our model with the padding rows in the softmax, as in training."""
    perplexity_trained: float | None = None
    """Perplexity of our model before rounding of its weights; only for a bfloat16 export."""
    perplexity_native: float | None = None
    """Perplexity of the export computing in bfloat16; only for a bfloat16 export."""
    greedy_tokens: int = 0
    """Number of equal greedy tokens (BERT: masked positions), over all samples."""
    greedy_undecided: int = 0
    """Samples whose comparison stopped (BERT: positions left out) because the two best logits were
    closer than twice the tolerance."""
    differing_weights: list[str] = field(default_factory=list)
    """Parameters whose exported values are not bitwise equal to ours."""
    first_differing_layer: str | None = None
    """First module in execution order whose output differs; determined when the gate fails."""
    layer_differences: dict[str, float] = field(default_factory=dict)
    """Largest absolute difference of each module's output over all samples; measured when the gate
    fails."""
    tokenizer_tokens: int = 0
    """Number of tokens in the validation texts that both tokenizers encode identically."""
    problems: list[str] = field(default_factory=list)
    """One clause per failed check; empty if the export may be published."""

    @property
    def passed(self) -> bool:
        """True if the exported model may be published."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return all values for JSON; numbers that are not finite become text."""
        values = {"passed": self.passed, **asdict(self)}
        values["layer_differences"] = {
            name: _finite(value) for name, value in self.layer_differences.items()
        }
        return {name: _finite(value) for name, value in values.items()}

    def sentence(self) -> str:
        """Return the outcome with its numbers in one sentence."""
        numbers = (
            f"on {self.samples} validation samples the largest logit difference is "
            f"{self.max_abs_logit_difference:.3g} (allowed {self.tolerance:g}), "
            f"perplexity {self.perplexity_exported:.6g} against {self.perplexity_ours:.6g}"
        )
        if self.perplexity_samples:
            numbers += f" on {self.perplexity_samples} {self.perplexity_split} samples"
        if self.perplexity_native is not None and self.perplexity_trained is not None:
            numbers += (
                f", computing in bfloat16 {self.perplexity_native:.6g} against "
                f"{self.perplexity_trained:.6g}"
            )
        if self.passed:
            return f"{numbers}, {self.greedy_tokens} greedy tokens equal"
        layer = (
            f"; first differing layer: {self.first_differing_layer}"
            if self.first_differing_layer
            else ""
        )
        return f"{'; '.join(self.problems)}; {numbers}{layer}"


def same_to_four_digits(value: float, reference: float) -> bool:
    """Return True if `value` equals `reference` to half a unit of its fourth digit."""
    if not (math.isfinite(value) and math.isfinite(reference)):
        return False
    if reference == 0:
        return value == 0
    unit = 10.0 ** (math.floor(math.log10(abs(reference))) - 3)
    return abs(value - reference) < unit / 2


def within(value: float, reference: float, share: float) -> bool:
    """Return True if `value` differs from `reference` by at most the fraction `share` of it."""
    return (
        math.isfinite(value)
        and math.isfinite(reference)
        and abs(value - reference) <= share * abs(reference)
    )


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
