"""Comparison of two models: architecture, weights, logits and tokenizer, with the causes.

A cause is a hypothesis: a field of the specification or a relation of tensors that differs. It is
tested by its correction: B is run with A's value, and the logits tell how much of the difference
the correction removes.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from megacore.artifact.files import write_json
from megacore.compare.fields import (
    differing_fields,
    field_findings,
    shown,
    special_token_findings,
    with_fields,
)
from megacore.compare.logits import (
    LENGTH,
    SAMPLES,
    SEED,
    TOLERANCE,
    Distance,
    Outputs,
    distance,
    first_layer_text,
    logits_finding,
    make_probe,
    merged_tensors,
    run_ours,
    run_theirs,
)
from megacore.compare.report import UNEXPLAINED, Explains, Finding, Report
from megacore.compare.side import (
    REPAIRED,
    Reading,
    Side,
    cause_of_key,
    open_sides,
)
from megacore.compare.tokenizers import compare_tokenizers, encode
from megacore.compare.weights import Difference, compare_weights
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.convert.hf.config import CONFIG_NAME
from megacore.convert.hf.forms import model_config
from megacore.convert.source import parameter_shapes
from megacore.errors import ConversionError, MegacoreError, one_line
from megacore.hardware import memory_info, memory_limit
from megacore.models.inputs import ModelInput

_MOST_TESTED = 12
"""Most corrections that are tested one by one."""
_MEMORY = 0.4
"""Largest share of the free memory that one model may take."""


@dataclass(frozen=True)
class Options:
    """Options of a comparison of models."""

    length: int = LENGTH
    """Tokens of a sample of the probe."""
    samples: int = SAMPLES
    """Random samples of the probe."""
    seed: int = SEED
    """Seed of the random ids."""
    tokens: tuple[tuple[int, ...], ...] | None = None
    """Ids of the probe's samples; None draws random ones."""
    texts: tuple[str, ...] = ()
    """Texts of the probe, encoded by A's tokenizer, or else B's."""
    tolerance: float = TOLERANCE
    """Largest difference of equal logits."""
    logits: bool = True
    """False compares weights only, with one tensor in memory at a time."""

    def given(self) -> list[str]:
        """Return the options of the command line that have another value than by default."""
        names = {"texts": "text", "logits": "weights-only"}
        return [
            f"--{names.get(field.name, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]


def compare_models(a: Path, b: Path, options: Options | None = None) -> Report:
    """Compare two models of any format.

    Raises:
        MegacoreError: if one of them cannot be read as a model, or the probe does not fit.
    """
    options = options or Options()
    with ExitStack() as held:
        first, second = open_sides(a, b, held)
        return _Comparison(first, second, options).run()


class _Comparison:
    """One comparison: its sides, readings and report."""

    def __init__(self, a: Side, b: Side, options: Options) -> None:
        self.a, self.b, self.options = a, b, options
        self.report = Report("models", a.describe(), b.describe())
        self.report.facts["compared"] = []

    def run(self) -> Report:
        a, b, report = self.a, self.b, self.report
        fields = field_findings(a.spec, b.spec)
        if a.spec.family != b.spec.family:
            report.findings += [*a.findings, *b.findings, *fields]
            return report
        self.repaired = [*a.findings, *b.findings]
        self.contradicted: dict[str, tuple[str, ...]] = {}
        self.ours, self.theirs = self._read(a, b, "A"), self._read(b, a, "B")
        differences = self._structural(fields)
        findings, facts = compare_weights(self.ours, self.theirs)
        differences += self._new(findings, differences)
        report.facts["weights"] = facts
        report.facts["compared"] += ["architecture", f"{facts['tensors']} tensors"]
        if self.options.logits and self._fits_memory():
            differences = self._test(differences)
        report.findings += [*self.repaired, *(each.finding for each in differences)]
        self._compare_tokenizers()
        for side, name in ((a, "A"), (b, "B")):
            report.findings += [
                Finding("files", "remark", f"{name}: {text}", differs=False)
                for text in side.remarks
            ]
        return report

    def _read(self, side: Side, other: Side, names: str) -> Reading:
        """Read a side as its configuration says, or as the other's if its weights fit only that."""
        reading = side.read(side.spec)
        fields = tuple(name for name, _, _ in differing_fields(side.spec, other.spec))
        if not reading.problems or not fields:
            return reading
        fitting = _attempt(side, with_fields(side.spec, other.spec, fields))
        if fitting is None or len(fitting.problems) >= len(reading.problems):
            return reading
        wrong = [
            (name, ours, theirs)
            for name, ours, theirs in differing_fields(side.spec, other.spec)
            if _contradicts(side, fitting, name)
        ] or list(differing_fields(side.spec, other.spec))
        stated = ", ".join(f"{name} {shown(ours)}" for name, ours, _ in wrong)
        true = ", ".join(shown(theirs) for _, _, theirs in wrong)
        self.repaired.append(
            Finding(
                "architecture",
                "config_contradicts_weights",
                f"the configuration of {names} says {stated}, and its weights are those of {true}",
                tuple(name for name, _, _ in wrong),
            )
        )
        self.contradicted[names] = self.repaired[-1].where
        return fitting

    def _structural(self, fields: list[Finding]) -> list[Difference]:
        """Return the differences of the architecture, and of the tensors that are there."""
        differences = [Difference(each, fields=each.where) for each in fields]
        for side, reading, name in (
            (self.a, self.ours, "A"),
            (self.b, self.theirs, "B"),
        ):
            for problem in reading.problems:
                sentence = (
                    f"{name} {problem.sentence}"
                    if not problem.sentence.startswith(tuple(problem.where))
                    else f"{name}: {problem.sentence}"
                )
                finding = replace(problem, sentence=sentence)
                if problem.cause in REPAIRED:
                    self.repaired.append(finding)
                    continue
                tensors = frozenset(_our_names(problem, reading, side))
                differences.append(Difference(finding, tensors=tensors))
        return differences

    def _new(self, found: list[Difference], known: list[Difference]) -> list[Difference]:
        """Return the differences of values that no known difference has named already."""
        explained = {name for each in known if each.tensors for name in each.tensors}
        causes = {each.finding.cause for each in known} | {each.cause for each in self.repaired}
        result = []
        for each in found:
            repeated = each.tensors and each.tensors <= explained
            if repeated or (each.finding.cause in causes and each.finding.cause in _STRUCTURAL):
                continue
            result.append(each)
        return result

    def _fits_memory(self) -> bool:
        """Return True if a model fits in memory; else add a remark."""
        values = max(
            sum(math.prod(shape) for shape in reading.shapes.values())
            for reading in (self.ours, self.theirs)
        )
        free = memory_info()["MemAvailable"]
        limit = memory_limit()
        free = free if limit is None else min(free, limit)
        if 4 * values <= _MEMORY * free:
            return True
        self.report.findings.append(
            Finding(
                "logits",
                "remark",
                f"the logits were not compared: a model of {values:,} parameters takes "
                f"{4 * values / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free",
                differs=False,
            )
        )
        return False

    def _test(self, differences: list[Difference]) -> list[Difference]:
        """Compare the logits, and test every difference by its correction."""
        tester = _Tester(self)
        base, tolerance = tester.base, self.options.tolerance
        agree = base.within(tolerance)
        facts = {
            "max_abs_difference": base.logits,
            "largest_logit": base.scale,
            "same_choice": base.same_choice,
            "first_differing_layer": base.first_layer,
            "layers": dict(base.layers),
            "tolerance": tolerance,
        }
        self.report.facts["logits"] = facts
        self.report.facts["compared"].append(f"logits within {tolerance:g}")
        if not agree:
            differences = tester.tested(differences)
            facts["max_abs_difference_corrected"] = tester.corrected.logits
            text = f"largest difference {base.logits:.3g}: {first_layer_text(base)}"
            named = [
                each.finding.cause for each in differences if each.finding.explains in _EFFECTIVE
            ]
            cause = named[0] if named else UNEXPLAINED
            if not tester.corrected.within(tolerance):
                cause = UNEXPLAINED
                text += (
                    f"; with all named differences corrected, {tester.corrected.logits:.3g} remain"
                )
            self.report.findings.append(logits_finding(cause, base, text))
        else:
            differences = [each.tested("nothing") for each in differences]
        if agree or tester.corrected.within(tolerance):
            effect: Explains = "all" if agree else "part"
            self.repaired = [each.tested(effect) for each in self.repaired]
            wrong = {field for fields in self.contradicted.values() for field in fields}
            differences = [
                each.tested(effect)
                if each.finding.explains == "nothing" and wrong.intersection(each.fields)
                else each
                for each in differences
            ]
        self._check_transformers(self.a, "A", tester.outputs_of_a)
        self._check_transformers(self.b, "B", tester.outputs_of_b)
        return differences

    def _check_transformers(self, side: Side, name: str, ours: Outputs) -> None:
        """Compare transformers' logits of a directory with ours of the same files."""
        if side.form != "hf" or name in self.contradicted:
            return
        facts = self.report.facts["logits"]
        try:
            theirs = run_theirs(side.path, side.spec, self.probe)
        except (ConversionError, RuntimeError, IndexError) as error:
            facts[f"transformers_{name.lower()}"] = None
            reason = one_line(error, 300)
            self.report.findings.append(
                Finding(
                    "files", "remark", f"transformers does not run {name}: {reason}", differs=False
                )
            )
            return
        difference = distance(ours, theirs, self.options.tolerance)
        if math.isnan(difference.logits):  # of the weights, which is a finding already
            return
        facts[f"transformers_{name.lower()}"] = difference.logits
        if difference.within(self.options.tolerance):
            return
        reading = self.ours if side is self.a else self.theirs
        keys = [each for each in (*side.findings, *reading.problems) if each.where]
        if keys:
            cause, key = keys[0].cause, keys[0].where[0]
        else:
            cause, key = self._suspect(side, ours)
        because = f" because of {key}" if key else ""
        text = (
            f"transformers computes other logits from the files of {name} than megacore does "
            f"(largest difference {difference.logits:.3g}){because}: {first_layer_text(difference)}"
        )
        self.report.findings.append(logits_finding(cause, difference, text))

    def _suspect(self, side: Side, ours: Outputs) -> tuple[str, str]:
        """Return the cause and key of config.json without which transformers agrees with us.

        Keys are tried that our own configuration of the same model lacks or has otherwise.
        """
        try:
            reference = model_config(side.spec, "float32")
        except ConversionError:
            return UNEXPLAINED, ""
        for key, value in side.values.items():
            cause = cause_of_key(key, value)
            if reference.get(key) == value or cause == "configuration":
                continue
            changed = {name: each for name, each in side.values.items() if name != key}
            if key in reference:
                changed[key] = reference[key]
            with TemporaryDirectory() as folder:
                for path in side.path.iterdir():
                    if path.name != CONFIG_NAME:
                        (Path(folder) / path.name).symlink_to(path.absolute())
                write_json(Path(folder) / CONFIG_NAME, changed)
                try:
                    theirs = run_theirs(Path(folder), side.spec, self.probe)
                except (ConversionError, RuntimeError, IndexError):
                    continue
            if distance(ours, theirs, self.options.tolerance).within(self.options.tolerance):
                return cause, key
        return UNEXPLAINED, ""

    def _compare_tokenizers(self) -> None:
        report = self.report
        report.findings += special_token_findings(self.a.spec, self.b.spec)
        report.findings += config_token_findings(self.a, self.b)
        findings, compared = compare_tokenizers(self.a.tokenizer, self.b.tokenizer)
        report.findings += findings
        if compared:
            report.facts["compared"].append("tokenizer")

    @cached_property
    def probe(self) -> ModelInput:
        """Inputs on which the logits are compared."""
        common = min(self.a.spec.vocab_size, self.b.spec.vocab_size)
        shorter = min((self.a.spec, self.b.spec), key=lambda spec: spec.max_position_embeddings)
        options = self.options
        tokens: Sequence[Sequence[int]] | None = options.tokens
        if options.texts:
            tokens = encode(self.a.tokenizer or self.b.tokenizer, options.texts)
        return make_probe(
            shorter,
            common,
            length=options.length,
            samples=options.samples,
            seed=options.seed,
            tokens=tokens,
        )


class _Tester:
    """Runs of B with corrections, compared with A."""

    def __init__(self, comparison: _Comparison) -> None:
        self._comparison = comparison
        ours = comparison.ours
        self._tolerance = comparison.options.tolerance
        self.outputs_of_a = run_ours(ours.spec, ours.tensors, comparison.probe)
        self._shapes = parameter_shapes(comparison.b.spec)
        self.outputs_of_b = self._run(comparison.b.spec, frozenset())
        self.base = distance(self.outputs_of_a, self.outputs_of_b, self._tolerance)
        """Distance of B as it is."""
        self.corrected: Distance

    def tested(self, differences: list[Difference]) -> list[Difference]:
        """Return the differences with the effect of their corrections.

        A difference explains all if only its correction makes the logits agree, a part if the
        others together do not without it, and nothing otherwise.
        """
        active = [each for each in differences if each.finding.differs]
        self.corrected = self._with(active)
        if len(active) == 1 and self.corrected.within(self._tolerance):
            return [each.tested("all") if each in active else each for each in differences]
        if len(active) > _MOST_TESTED:
            if not self.corrected.within(self._tolerance):
                return differences
            return [each.tested("part") if each in active else each for each in differences]
        result = []
        for each in differences:
            if each not in active:
                result.append(each)
                continue
            others = [other for other in active if other is not each]
            alone = self._with([each])
            if alone.within(self._tolerance):
                effect: Explains = "all"
            else:
                without = self._with(others)
                needed = not without.logits <= max(self._tolerance, 1.01 * self.corrected.logits)
                lessens = alone.logits < 0.99 * self.base.logits
                effect = "part" if needed or lessens else "nothing"
            result.append(each.tested(effect))
        return result

    def _with(self, corrected: list[Difference]) -> Distance:
        """Return the distance of B with these corrections."""
        comparison = self._comparison
        fields = tuple(field for each in corrected for field in each.fields)
        taken = frozenset[str]().union(*(each.tensors for each in corrected))
        spec = with_fields(comparison.b.spec, comparison.a.spec, fields)
        try:
            outputs = self._run(spec, taken)
        except (MegacoreError, RuntimeError, AssertionError, ZeroDivisionError, ValueError):
            return Distance(float("inf"), 1.0, 0.0, None, {})
        return distance(self.outputs_of_a, outputs, self._tolerance)

    def _run(self, spec: ModelSpec, taken: frozenset[str]) -> Outputs:
        """Run B as `spec`, with A's tensors of the names in `taken`."""
        comparison = self._comparison
        try:
            reading = comparison.b.read(spec)
        except (AssertionError, RuntimeError):
            reading = comparison.theirs
        tensors = merged_tensors(spec, reading, comparison.ours, taken, self._shapes)
        return run_ours(spec, tensors, comparison.probe)


def _attempt(side: Side, spec: ModelSpec) -> Reading | None:
    """Read the weights of a side as those of a specification; None if they cannot be."""
    try:
        return side.read(spec)
    except (RuntimeError, AssertionError, ConversionError, ZeroDivisionError):
        return None


def _contradicts(side: Side, fitting: Reading, field: str) -> bool:
    """Return True if a side's weights do not fit its configuration's value of a field."""
    reading = _attempt(side, with_fields(fitting.spec, side.spec, (field,)))
    return reading is None or len(reading.problems) > len(fitting.problems)


def _our_names(problem: Finding, reading: Reading, side: Side) -> list[str]:
    """Return the global names of our tensors that a problem of the files concerns."""
    direct = [name for name in problem.where if name in reading.shapes]
    return direct or side.names_of(reading.spec, problem.where)


_EFFECTIVE = ("all", "part")
_STRUCTURAL = frozenset({"layers_missing", "vocabulary_padding", "position_table", "precision"})
"""Causes that the architecture and the weights would both name."""


def config_token_findings(a: Side, b: Side) -> list[Finding]:
    """Return the token ids of two config.json that differ and that no specification contains.

    Ends that one model has in config.json and the other in generation_config.json do not differ.
    """
    findings = []
    first, second = a.spec.special_tokens, b.spec.special_tokens
    for key in ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id"):
        ours, theirs = a.values.get(key), b.values.get(key)
        if ours is None or theirs is None or ours == theirs:
            continue
        if key == "eos_token_id" and (first.eod != second.eod or _ends(first) == _ends(second)):
            continue
        if key == "pad_token_id" and first.pad != second.pad:
            continue
        sentence = f"config.json has {key} {ours} in A, {theirs} in B"
        findings.append(Finding("tokenizer", "special_tokens", sentence, (key,), ours, theirs))
    return findings


def _ends(special: SpecialTokens) -> set[int | None]:
    return {special.eod, *special.ends}
