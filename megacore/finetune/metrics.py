"""Metrics of fine-tuned models, and the table of generated texts that some are computed from."""

import importlib.util
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megacore.artifact.files import read_object, write_json
from megacore.config.finetune import FinetuneConfig
from megacore.config.finetune_task import metric_names
from megacore.errors import ConfigError
from megacore.paths import is_file

_PACKAGES = {
    **dict.fromkeys(("accuracy", "f1", "matthews_correlation"), "sklearn"),
    **dict.fromkeys(("pearson", "spearmanr"), "scipy"),
    "bleu": "sacrebleu",
    **dict.fromkeys(("rouge1", "rouge2", "rougeL", "rougeLsum"), "rouge_score"),
}

ANSWERS_NAME = "answers.json"
"""Name of the file in the run directory with these texts."""

Split = Callable[[str], list[str]]
"""Function that splits a text into sentences."""


def check_installed(config: FinetuneConfig) -> None:
    """Raise ConfigError if the package that computes a metric is missing."""
    for name in metric_names(config.task):
        package = _PACKAGES.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"the metric {name} of task.kind {config.task.kind} is computed by {package}, "
                "which is not installed: pip install megacore[finetune], or set task.metrics to "
                "others"
            )


def classification_metrics(
    names: Sequence[str], predictions: Sequence[float], labels: Sequence[float], classes: int
) -> dict[str, float]:
    """Compute the named metrics over all predictions of a split.

    With two classes f1 is that of class 1, as in GLUE, otherwise the mean over the classes that
    occur in labels or predictions (macro). A correlation with constant predictions or labels is 0;
    predictions in bf16 or fp16 that differ by less than their type distinguishes are equal.
    """
    return {name: _classification(name, predictions, labels, classes) for name in names}


def _classification(
    name: str, predictions: Sequence[float], labels: Sequence[float], classes: int
) -> float:
    from scipy import stats
    from sklearn import metrics

    match name:
        case "accuracy":
            return float(metrics.accuracy_score(labels, predictions))
        case "f1":
            kind: dict[str, Any] = {"average": "binary"} if classes == 2 else {"average": "macro"}
            return float(metrics.f1_score(labels, predictions, zero_division=0.0, **kind))
        case "matthews_correlation":
            return float(metrics.matthews_corrcoef(labels, predictions))
        case "pearson" | "spearmanr":
            if len(set(predictions)) < 2 or len(set(labels)) < 2:
                return 0.0
            correlate = stats.pearsonr if name == "pearson" else stats.spearmanr
            return float(correlate(predictions, labels)[0])
    raise ConfigError(f"there is no metric {name!r} of a classification")


def text_metrics(
    names: Sequence[str], written: Sequence[str], targets: Sequence[str], split: Split
) -> dict[str, float]:
    """Compute corpus BLEU and mean F-measures of ROUGE, from 0 to 100.

    `split` splits texts into sentences for rougeLsum.
    """
    values: dict[str, float] = {}
    if "bleu" in names:
        import sacrebleu

        values["bleu"] = float(sacrebleu.corpus_bleu(list(written), [list(targets)]).score)
    rouge = [name for name in names if name.startswith("rouge")]
    if rouge:
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer(rouge, use_stemmer=True)
        sums = dict.fromkeys(rouge, 0.0)
        for text, target in zip(written, targets, strict=True):
            # rouge_score treats each line as a sentence; only rougeLsum depends on lines.
            scores = scorer.score("\n".join(split(target)), "\n".join(split(text)))
            for name in rouge:
                sums[name] += scores[name].fmeasure
        values |= {name: 100 * total / max(1, len(targets)) for name, total in sums.items()}
    return {name: values[name] for name in names}


class Answer(NamedTuple):
    """Text that a model generated for a sample."""

    question: str
    """Source text as the model reads it: with the prefix, and truncated."""
    reference: str
    """Target text."""
    answer: str
    """Generated text."""


def write_answers(path: Path, step: int, epoch: int, answers: Sequence[Answer]) -> None:
    """Add the answers after `step` optimizer steps to a table in the form of MLflow's tables.

    Rows of the same step are replaced: a repeated evaluation adds nothing.

    Raises WorkspaceError.
    """
    columns = ["step", "epoch", *Answer._fields]
    before = _rows(path)
    rows = [row for row in before if row[0] != step] + [[step, epoch, *row] for row in answers]
    write_json(path, {"columns": columns, "data": sorted(rows, key=lambda row: row[0])})


def _rows(path: Path) -> list[list[Any]]:
    """Return the table's rows; none if there is no table."""
    if not is_file(path):
        return []
    rows: list[list[Any]] = read_object(path, f"delete {shlex.quote(str(path))}")["data"]
    return rows


def read_answers(path: Path, step: int) -> list[Answer]:
    """Return the answers after `step` optimizer steps; none if there is no such table."""
    rows = _rows(path)
    return [Answer(*row[2:]) for row in rows if row[0] == step]
