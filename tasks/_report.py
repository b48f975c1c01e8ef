"""Report of a run: one HTML page with its charts, checkpoints, sample, data and attempts.

The page has everything in one file and loads nothing, so it can be opened from disk, sent, and
shown by MLflow.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from pydantic import BaseModel

from megacore.artifact import Artifact
from megacore.artifact.files import replace_file, workspace_errors
from megacore.config import RunConfig
from megacore.errors import listed
from megacore.observe.logging import MFU_NAMES, short_number
from megacore.redact import redact, redact_values
from tasks._cache import summarize
from tasks._mlflow import versions
from tasks._plots import short_count
from tasks._report_charts import draw_charts, duration_unit, layouts_chart
from tasks._run_history import Attempt, RunHistory, SavedCheckpoint, end_of

_TEMPLATE = Path(__file__).with_name("_report.html.j2")
_MOST_ROWS = 100
"""Maximum number of rows of a table; kept checkpoints are always shown."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that a sample may contain and HTML must not."""
_UNKNOWN = "–"
_SLOW = 1.15
"""Measured time, relative to the prediction, from which the report names the slow part."""
_SHORTEST_PART = 0.05
"""Shortest time of a part that the report shows, in milliseconds."""


@dataclass(frozen=True)
class ReportFacts:
    """Content of a report in addition to the run's events."""

    config: RunConfig
    evaluation: Mapping[str, Any]
    """Report of the stage evaluate: `checkpoints` (one row each) and `unigram`; or empty."""
    exported: int | None
    """Iteration of the exported checkpoint."""
    sample: str
    """Text that the exported model wrote."""
    artifacts: Sequence[Artifact]
    """Outputs of the stages, in their order."""
    mlflow_run: str
    """Id of the MLflow run."""
    zero_shot: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Scores of the stage zeroshot by checkpoint, oldest first."""
    lm_eval: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Scores of lm-eval by name, by iteration of the exported checkpoint."""
    contamination: Sequence[Sequence[str]] = ()
    """Evaluation set, items, searched, contaminated, share and note."""
    contamination_warnings: Sequence[str] = ()


@dataclass(frozen=True)
class Row:
    """Cells of a table's row, and its CSS class."""

    cells: tuple[str, ...]
    kind: str = ""


def write_report(path: Path, run: str, history: RunHistory, facts: ReportFacts) -> Path:
    """Write the report of the run with the key `run` to `path` and return the path.

    Secrets are redacted. A run without iterations, checkpoints or sample has a page that says so.

    Raises WorkspaceError if `path` cannot be written.
    """
    last = history.attempts[-1] if history.attempts else None
    test_ppl = {row["iteration"]: row["test_ppl"] for row in _evaluated(facts)}
    history.by_position |= _by_position(facts, "valid")
    test_by_position = _by_position(facts, "test").get(facts.exported or 0, [])
    values = {
        "name": facts.config.name,
        "run": run,
        "written": _date(time.time()),
        "zone": _zone(),
        "headline": _headline(history, facts),
        "charts": draw_charts(history, test_ppl, test_by_position, facts.lm_eval),
        "restarts": len(history.attempts) - 1,
        "times": _times(last),
        "layouts": layouts_chart(facts.config, last),
        "checkpoints": _checkpoint_rows(history, facts),
        "lm_eval": _lm_eval_rows(facts),
        "notes": [row["disagreement"] for row in _evaluated(facts) if row.get("disagreement")],
        "zero_shot": _zero_shot_rows(facts),
        "zero_shot_checkpoints": [_iteration(name) for name in facts.zero_shot],
        "contamination": facts.contamination,
        "contamination_warnings": facts.contamination_warnings,
        "passkeys": _passkey_tables(facts),
        "sample": _sample(facts),
        "data": _data(facts),
        "stages": [
            (artifact.stage, artifact.name, summarize(artifact.counts), artifact.path)
            for artifact in facts.artifacts
        ],
        "attempts": [
            _attempt_row(attempt, last=attempt is last)
            for attempt in history.attempts[-_MOST_ROWS:]
        ],
        "changes": [
            (attempt.number, change)
            for attempt in history.attempts[-_MOST_ROWS:]
            for change in attempt.facts.get("changes") or []
        ],
        "omitted_attempts": max(0, len(history.attempts) - _MOST_ROWS),
        "warnings": [
            (_date(event["time"]), str(event["attempt"]), str(event.get("message")))
            for event in history.warnings[-_MOST_ROWS:]
        ],
        "omitted_warnings": max(0, len(history.warnings) - _MOST_ROWS),
        "software": ", ".join(
            f"{name.removeprefix('version.')} {version}" for name, version in versions().items()
        ),
        "config": yaml.safe_dump(
            redact_values(facts.config.model_dump(mode="json")), sort_keys=False
        ),
    }
    with workspace_errors(path):
        replace_file(path, _render(values).encode("utf-8", "replace"))
    return path


def _render(values: Mapping[str, Any]) -> str:
    """Fill the template: each text is redacted, then escaped."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    def shown(value: Any) -> Any:
        if isinstance(value, Markup) or not isinstance(value, str):
            return value
        return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", redact(value))

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # The charts are made of numbers and fixed words.
    environment.filters["markup"] = Markup
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(values)


def _headline(history: RunHistory, facts: ReportFacts) -> list[tuple[str, str, str]]:
    """Return name, value and note of the page's main numbers."""
    best = min(_evaluated(facts), key=lambda row: row["valid_ppl"], default=None)
    measured = [
        saved.valid_ppl for saved in history.checkpoints.values() if saved.valid_ppl is not None
    ]
    valid = best["valid_ppl"] if best else min(measured, default=None)
    unigram = facts.evaluation.get("unigram", {})
    rates = history.curve("tokens_per_second").values
    mfus = {
        relative: f"{median(values):.1%}"
        for name, relative in MFU_NAMES.items()
        if (values := history.curve(name).values)
    }
    start = history.facts
    length, unit = duration_unit(history.seconds)
    parameters = start.get("parameters")
    return [
        (
            "Test PPL",
            _ppl(best["test_ppl"] if best else None),
            f"unigram model {short_number(unigram['test'])}" if unigram else "not measured",
        ),
        (
            "Validation PPL",
            _ppl(valid),
            f"best checkpoint, iteration {best['iteration']:,}" if best else "best so far",
        ),
        ("Tokens", short_count(history.tokens), f"{history.tokens:,} consumed"),
        (
            "Training time",
            f"{history.seconds / length:.3g} {'h' if unit == 'hours' else unit[:3]}",
            f"{len(history.attempts)} attempt{'s' * (len(history.attempts) != 1)}",
        ),
        ("Tokens/s", short_count(median(rates)) if rates else _UNKNOWN, "median, all ranks"),
        (
            "MFU",
            " / ".join(mfus.values()) or _UNKNOWN,
            f"median, {' / '.join(mfus)}" if mfus else "peak rate of the hardware unknown",
        ),
        (
            "Parameters",
            short_count(parameters) if parameters else _UNKNOWN,
            f"{parameters:,}" if parameters else "",
        ),
        ("Hardware", *_hardware(start)),
    ]


def _hardware(start: Mapping[str, Any]) -> tuple[str, str]:
    if not start:
        return _UNKNOWN, ""
    hosts = start.get("hosts") or []
    device = str(start.get("device"))
    names = ", ".join(map(str, hosts[:3])) + (", …" if len(hosts) > 3 else "")
    return (
        f"{start.get('ranks')} × {'GPU' if device == 'cuda' else device.upper()}",
        f"{len(hosts)} host{'s' * (len(hosts) != 1)} ({names}), {start.get('precision')}",
    )


def _checkpoint_rows(history: RunHistory, facts: ReportFacts) -> dict[str, Any]:
    """Return the rows of the checkpoints by validation perplexity, and the number left out."""
    evaluated = {int(row["iteration"]): row for row in _evaluated(facts)}

    def valid(saved: SavedCheckpoint) -> float | None:
        measured: float | None = evaluated.get(saved.iteration, {}).get(
            "valid_ppl", saved.valid_ppl
        )
        return measured

    known = history.checkpoints | {
        iteration: SavedCheckpoint(iteration)
        for iteration in evaluated.keys() - history.checkpoints.keys()
    }
    ranked = sorted(
        known.values(), key=lambda saved: (valid(saved) is None, valid(saved), saved.iteration)
    )
    shown = [
        saved
        for position, saved in enumerate(ranked)
        if position < _MOST_ROWS or saved.iteration in evaluated
    ]
    iterations = [saved.iteration for saved in shown]
    places = zip(shown, history.tokens_at(iterations), history.seconds_at(iterations), strict=True)
    rows = []
    for saved, tokens, seconds in places:
        state = "deleted" if saved.deleted else "kept" if saved.size_bytes is not None else ""
        state = "exported" if saved.iteration == facts.exported else state
        test = evaluated.get(saved.iteration, {}).get("test_ppl")
        cells = (
            f"{saved.iteration:,}",
            f"{round(tokens):,}",
            _time(seconds),
            _ppl(valid(saved)),
            _ppl(test),
            _UNKNOWN if saved.size_bytes is None else _size(saved.size_bytes),
            _UNKNOWN if saved.seconds is None else f"{saved.seconds:.1f} s",
            state,
        )
        rows.append(Row(cells, state))
    unigram = facts.evaluation.get("unigram")
    if unigram:
        blank = _UNKNOWN
        ppl = (_ppl(unigram["valid"]), _ppl(unigram["test"]))
        rows.append(Row(("unigram model", blank, blank, *ppl, blank, blank, ""), "baseline"))
    return {"rows": rows, "omitted": len(ranked) - len(shown)}


def _lm_eval_rows(facts: ReportFacts) -> dict[str, Any]:
    """Return the titles of the scored checkpoints, and a row for each score."""
    names = dict.fromkeys(name for scores in facts.lm_eval.values() for name in scores)
    rows = [
        Row(
            (
                name.removeprefix("lm_eval/").replace("/", " "),
                *(
                    f"{scores[name]:.4g}" if name in scores else _UNKNOWN
                    for scores in facts.lm_eval.values()
                ),
            )
        )
        for name in names
    ]
    return {"titles": [f"iteration {each:,}" for each in facts.lm_eval], "rows": rows}


def _times(attempt: Attempt | None) -> dict[str, Any]:
    """Return the predicted and the measured time per iteration by part, and a sentence on both."""
    if attempt is None or not attempt.phases or not attempt.facts.get("predicted_ms"):
        return {"rows": [], "sentence": ""}
    predicted, measured = attempt.facts["predicted_ms"], attempt.phase_ms
    parts = [
        part
        for part in dict.fromkeys([*predicted, *measured])
        if max(predicted.get(part, 0.0), measured.get(part, 0.0)) >= _SHORTEST_PART
    ]
    rows = [
        Row((part, f"{predicted.get(part, 0.0):,.1f}", f"{measured.get(part, 0.0):,.1f}"))
        for part in parts
    ]
    expected, actual = sum(predicted.values()), sum(measured.values())
    rows.append(Row(("all", f"{expected:,.1f}", f"{actual:,.1f}"), "baseline"))
    sentence = f"{abs(actual / expected - 1):.0%} {'slower' if actual > expected else 'faster'}"
    sentence += f" than predicted for {attempt.facts['hardware']}"
    if actual > _SLOW * expected:
        excess = {part: measured.get(part, 0.0) - predicted.get(part, 0.0) for part in parts}
        worst = max(excess, key=lambda part: excess[part])
        sentence += (
            f": {actual - expected:,.1f} ms more, and {excess[worst]:,.1f} ms more in {worst}"
        )
    return {"rows": rows, "sentence": f"{sentence}."}


def _attempt_row(attempt: Attempt, *, last: bool) -> Row:
    facts = attempt.facts
    hosts = facts.get("hosts") or []
    names = listed([str(host) for host in hosts])
    cells = (
        str(attempt.number),
        _date(attempt.start),
        _date(attempt.end),
        _time(attempt.seconds),
        f"{attempt.first_iteration:,} to {attempt.last_iteration:,}",
        end_of(attempt, last=last),
        str(facts.get("ranks", _UNKNOWN)),
        names or _UNKNOWN,
    )
    return Row(cells)


def _sample(facts: ReportFacts) -> dict[str, str]:
    """Return the prompt and the text, without the prompt where the text begins with it."""
    prompt, text = facts.config.export.sample_prompt, facts.sample.rstrip()
    begins = bool(prompt) and text.startswith(prompt)
    return {
        "prompt": prompt,
        "lead": prompt if begins else "",
        "text": text.removeprefix(prompt) if begins else text,
    }


def _data(facts: ReportFacts) -> list[tuple[str, str]]:
    data = facts.config.data
    sources = [
        (f"Source {number}" if number > 1 else "Source", _json(source))
        for number, source in enumerate(data.sources, 1)
    ]
    return [
        *sources,
        ("Tokenizer", _json(data.tokenizer)),
        ("Split (train, valid, test)", data.split_weights),
        ("Sequence length", f"{data.seq_length:,} tokens"),
        ("Registered model", facts.config.registered_model),
        ("MLflow run", facts.mlflow_run),
    ]


def _json(section: BaseModel) -> str:
    return json.dumps(redact_values(section.model_dump(mode="json", exclude_none=True)))


def _evaluated(facts: ReportFacts) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = facts.evaluation.get("checkpoints", [])
    return rows


def _by_position(facts: ReportFacts, split: str) -> dict[int, list[dict[str, Any]]]:
    """Return the losses by position of the stage evaluate, by iteration."""
    rows = ((int(row["iteration"]), row.get(f"{split}_by_position")) for row in _evaluated(facts))
    return {iteration: positions for iteration, positions in rows if positions}


def _zero_shot_rows(facts: ReportFacts) -> list[tuple[str, str, list[str]]]:
    """Return text, measure and the values of all checkpoints."""
    measures = {
        ("WikiText", "PPL per word"): ("wikitext", "word_ppl", ",.2f"),
        ("WikiText", "PPL per token"): ("wikitext", "token_ppl", ",.2f"),
        ("LAMBADA", "accuracy"): ("lambada", "accuracy", ".2%"),
        ("LAMBADA", "PPL of last words"): ("lambada", "target_ppl", ",.2f"),
        ("Passkey", "accuracy"): ("passkey", "accuracy", ".2%"),
        ("Passkey", "ranked accuracy"): ("passkey", "ranked_accuracy", ".2%"),
    }
    return [
        (
            text,
            measure,
            [short_number(scores[name][value], style) for scores in facts.zero_shot.values()],
        )
        for (text, measure), (name, value, style) in measures.items()
        if facts.zero_shot and all(name in scores for scores in facts.zero_shot.values())
    ]


def _iteration(checkpoint: str) -> str:
    """Return the title of a checkpoint's column: iter_0001000 as `iteration 1,000`."""
    return f"iteration {int(checkpoint.removeprefix('iter_')):,}"


def _passkey_tables(facts: ReportFacts) -> list[dict[str, Any]]:
    """Return the accuracies by length and depth of the exported, else the last, checkpoint."""
    exported = f"iter_{facts.exported or 0:07d}"
    name = exported if exported in facts.zero_shot else next(reversed([*facts.zero_shot]), "")
    result = facts.zero_shot.get(name, {}).get("passkey")
    if result is None:
        return []
    depths = sorted({cell["depth"] for cell in result["cells"]})
    lengths = sorted({cell["length"] for cell in result["cells"]})
    checkpoint, chance = _iteration(name), result["chance"]
    titles = {
        "accuracy": f"Passkey accuracy of {checkpoint}",
        "ranked_accuracy": f"Passkey ranked accuracy of {checkpoint}, chance {chance:.0%}",
    }

    def row(length: int, measure: str) -> list[str]:
        cells = {
            cell["depth"]: cell[measure] for cell in result["cells"] if cell["length"] == length
        }
        return [f"{length:,} tokens", *(f"{cells[depth]:.0%}" for depth in depths)]

    return [
        {
            "title": title,
            "depths": [f"depth {depth:.0%}" for depth in depths],
            "rows": [row(length, measure) for length in lengths],
        }
        for measure, title in titles.items()
    ]


def _ppl(value: float | None) -> str:
    return _UNKNOWN if value is None else short_number(value, ",.2f")


def _size(count: int) -> str:
    """Format a size in decimal units: 1,490,000,000 bytes as 1.49 GB."""
    text = short_count(count).replace("B", "G").replace("K", "k")
    return f"{text} B" if text[-1].isdigit() else f"{text[:-1]} {text[-1]}B"


def _time(seconds: float) -> str:
    """Format a time with its two largest units."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"
    if whole >= 60:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{seconds:.1f} s"


def _date(seconds: float) -> str:
    """Format a time at the page's difference from UTC, also if summer time changed since."""
    zone = datetime.now().astimezone().tzinfo
    return datetime.fromtimestamp(seconds, zone).replace(tzinfo=None).isoformat(" ", "seconds")


def _zone() -> str:
    """Return the difference of the page's times from UTC, such as UTC+02:00."""
    offset = datetime.now().astimezone().strftime("%z")
    return f"UTC{offset[:3]}:{offset[3:]}"
