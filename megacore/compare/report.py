"""Result of a comparison: findings with their causes, and its form as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from megacore.artifact.files import standard_json
from megacore.errors import listed

Subject = Literal["architecture", "weights", "logits", "tokenizer", "files", "run"]
Explains = Literal["all", "part", "not tested", "nothing"]
_EFFECTS = get_args(Explains)
UNEXPLAINED = "unexplained"
"""Cause of a finding whose reason is unknown."""


@dataclass(frozen=True)
class Finding:
    """One difference and its cause."""

    subject: Subject
    """Part of the comparison."""
    cause: str
    """Name of the cause, one of docs/compare.md."""
    sentence: str
    """Description with both values."""
    where: tuple[str, ...] = ()
    """Fields, tensors, layers or steps that differ."""
    a: Any = None
    """Value of A."""
    b: Any = None
    """Value of B."""
    differs: bool = True
    """False for a remark, which leaves the two equal."""
    explains: Explains = "not tested"
    """Part of the difference of the logits that disappears when it is corrected in B."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Sizes of the difference."""

    def tested(self, explains: Explains) -> "Finding":
        """Return the finding with the result of its correction."""
        return replace(self, explains=explains)


@dataclass
class Report:
    """Result of a comparison."""

    kind: Literal["models", "runs"]
    a: dict[str, Any]
    """Description of A."""
    b: dict[str, Any]
    """Description of B."""
    findings: list[Finding] = field(default_factory=list)
    """Differences and remarks, in the order in which they were found."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Numbers of the comparison: tensors, logits, layers, steps."""

    @property
    def equal(self) -> bool:
        """True if no finding is a difference."""
        return not self._differing

    @property
    def causes(self) -> list[str]:
        """Names of the causes of all differences, each once."""
        return list(dict.fromkeys(finding.cause for finding in self.differences))

    @property
    def differences(self) -> list[Finding]:
        """Findings that are differences, the effective ones first."""
        return sorted(self._differing, key=lambda finding: _EFFECTS.index(finding.explains))

    @property
    def _differing(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.differs]

    @property
    def remarks(self) -> list[Finding]:
        """Findings that are no differences."""
        return [finding for finding in self.findings if not finding.differs]

    def verdict(self) -> str:
        """Return the result in one sentence."""
        if self.equal:
            return f"A and B are equal: {self._scope()}."
        effective = [each for each in self._differing if each.explains in ("all", "part")]
        chosen = effective or self._differing
        named = list(dict.fromkeys(each.cause.replace("_", " ") for each in chosen))
        return f"A and B differ: {listed(named)}."

    def _scope(self) -> str:
        compared: Sequence[str] = self.facts.get("compared", ())
        return ", ".join(compared) or "nothing differs"

    def to_json(self) -> dict[str, Any]:
        """Return the report as values of JSON; numbers that are not finite are null."""
        values: dict[str, Any] = {
            "kind": self.kind,
            "equal": self.equal,
            "verdict": self.verdict(),
            "causes": self.causes,
            "a": self.a,
            "b": self.b,
            "findings": [asdict(finding) for finding in self.findings],
            "facts": self.facts,
        }
        return standard_json(values)  # type: ignore[no-any-return]
