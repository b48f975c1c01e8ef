"""What a fine-tuning is measured by: names, which way is better, and the numbers themselves."""

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megacore.config.finetune import (
    CausalLmConfig,
    ClassificationConfig,
    ClassificationMetric,
    FinetuneConfig,
    GlueTask,
    Seq2SeqConfig,
)
from megacore.errors import ConfigError


@dataclass(frozen=True)
class GlueSettings:
    """What a task gives where the configuration says nothing."""

    columns: tuple[str, str | None]
    labels: tuple[str, ...] | None
    """None: a number is predicted."""
    metrics: tuple[ClassificationMetric, ...]


_ENTAILMENT = ("entailment", "not_entailment")
GLUE: dict[GlueTask, GlueSettings] = {
    "cola": GlueSettings(("sentence", None), ("unacceptable", "acceptable"), ("matthews_correlation",)),
    "mnli": GlueSettings(("premise", "hypothesis"), ("entailment", "neutral", "contradiction"), ("accuracy",)),
    "mrpc": GlueSettings(("sentence1", "sentence2"), ("not_equivalent", "equivalent"), ("accuracy", "f1")),
    "qnli": GlueSettings(("question", "sentence"), _ENTAILMENT, ("accuracy",)),
    "qqp": GlueSettings(("question1", "question2"), ("not_duplicate", "duplicate"), ("accuracy", "f1")),
    "rte": GlueSettings(("sentence1", "sentence2"), _ENTAILMENT, ("accuracy",)),
    "sst2": GlueSettings(("sentence", None), ("negative", "positive"), ("accuracy",)),
    "stsb": GlueSettings(("sentence1", "sentence2"), None, ("pearson", "spearmanr")),
    "wnli": GlueSettings(("sentence1", "sentence2"), ("not_entailment", "entailment"), ("accuracy",)),
}


@dataclass(frozen=True)
class ClassificationSettings:
    """A classification with everything that GLUE or the defaults give filled in."""

    sentence1: str
    sentence2: str | None
    labels: tuple[str, ...] | None
    """Names in the order of their numbers; None: they are found in the data, or a number is predicted."""
    regression: bool
    metrics: tuple[ClassificationMetric, ...]


_OF_NUMBERS: tuple[ClassificationMetric, ...] = ("pearson", "spearmanr")


def classification_settings(task: ClassificationConfig) -> ClassificationSettings:
    """What the configuration says, and where it says nothing what its GLUE task or the defaults do.

    Raises ConfigError for sections that contradict the GLUE task, and for metrics of the other kind of label.
    """
    glue = None if task.glue is None else GLUE[task.glue]
    if glue is not None:
        _check_against(task, glue)
    regression = task.regression or (glue is not None and glue.labels is None)
    default: tuple[ClassificationMetric, ...] = _OF_NUMBERS if regression else ("accuracy", "f1")
    metrics = tuple(dict.fromkeys(task.metrics or (glue.metrics if glue else default)))
    for name in metrics:
        if (name in _OF_NUMBERS) != regression:
            kind, other = ("numbers", "classes") if regression else ("classes", "numbers")
            raise ConfigError(
                f"task.metrics has {name}, which measures {other}, but the task predicts {kind}: remove it, or set "
                f"task.regression to {str(not regression).lower()}"
            )
    own = glue.columns if glue else (None, None)
    first, second = task.sentence1_column or own[0], task.sentence2_column or own[1]
    assert first is not None  # the configuration names a column or a task
    labels = task.labels or (glue.labels if glue else None)
    return ClassificationSettings(first, second, None if regression else labels, regression, metrics)


def _check_against(task: ClassificationConfig, glue: GlueSettings) -> None:
    if glue.labels is not None and task.regression:
        raise ConfigError(
            f"task.regression is true but task.glue {task.glue} has the classes {', '.join(glue.labels)}: remove one"
        )
    if task.labels is None:
        return
    if glue.labels is None:
        raise ConfigError(f"task.labels names classes but task.glue {task.glue} predicts a number: remove task.labels")
    if len(task.labels) != len(glue.labels):
        raise ConfigError(
            f"task.labels names {len(task.labels)} classes ({', '.join(task.labels)}) but task.glue {task.glue} has "
            f"{len(glue.labels)} ({', '.join(glue.labels)}): name as many, or remove task.labels"
        )


LOSS = "loss"
_SMALLER_IS_BETTER = (LOSS, "ppl")
_PACKAGES = {
    **dict.fromkeys(("accuracy", "f1", "matthews_correlation"), "sklearn"),
    **dict.fromkeys(("pearson", "spearmanr"), "scipy"),
    "bleu": "sacrebleu",
    **dict.fromkeys(("rouge1", "rouge2", "rougeL", "rougeLsum"), "rouge_score"),
}

Split = Callable[[str], list[str]]
"""The sentences of a text."""


def metric_names(task: ClassificationConfig | Seq2SeqConfig | CausalLmConfig) -> tuple[str, ...]:
    """What is measured beside the loss; the first tells the best model unless the configuration names another.

    Raises ConfigError.
    """
    match task:
        case ClassificationConfig():
            return classification_settings(task).metrics
        case Seq2SeqConfig():
            return tuple(dict.fromkeys(task.metrics))
        case CausalLmConfig():
            return ("ppl",)


def check_installed(config: FinetuneConfig) -> None:
    """Raise ConfigError where the package that computes a metric is missing."""
    for name in metric_names(config.task):
        package = _PACKAGES.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"the metric {name} of task.kind {config.task.kind} is computed by {package}, which is not installed: "
                "pip install megacore[finetune], or set task.metrics to others"
            )


def best_metric(config: FinetuneConfig) -> tuple[str, bool]:
    """Name of the metric that tells the best model, and whether larger is better. Raises ConfigError."""
    names = metric_names(config.task)
    name = config.train.best_metric or names[0]
    if name not in (*names, LOSS):
        raise ConfigError(
            f"train.best_metric is {name!r}, which this task does not measure: name one of {', '.join((*names, LOSS))}"
        )
    return name, name not in _SMALLER_IS_BETTER


def classification_metrics(
    names: Sequence[str], predictions: Sequence[float], labels: Sequence[float], classes: int
) -> dict[str, float]:
    """The named metrics of all predictions of a split.

    f1 is that of class 1 where there are two classes, as GLUE has it, else the mean of all classes' (macro).
    A correlation with predictions that are all alike is 0.
    """
    return {name: _classification(name, predictions, labels, classes) for name in names}


def _classification(name: str, predictions: Sequence[float], labels: Sequence[float], classes: int) -> float:
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
    """BLEU of the corpus and mean F-measures of ROUGE, from 0 to 100; `split` finds the sentences of rougeLsum."""
    found: dict[str, float] = {}
    if "bleu" in names:
        import sacrebleu

        found["bleu"] = float(sacrebleu.corpus_bleu(list(written), [list(targets)]).score)
    rouge = [name for name in names if name.startswith("rouge")]
    if rouge:
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer(rouge, use_stemmer=True)
        sums = dict.fromkeys(rouge, 0.0)
        for text, target in zip(written, targets, strict=True):
            # The library takes each line for a sentence; only rougeLsum looks at lines.
            scores = scorer.score("\n".join(split(target)), "\n".join(split(text)))
            for name in rouge:
                sums[name] += scores[name].fmeasure
        found |= {name: 100 * total / max(1, len(targets)) for name, total in sums.items()}
    return {name: found[name] for name in names}


def perplexity(loss: float) -> float:
    """The exponential of a token's mean loss."""
    return math.exp(loss) if loss < math.log(1e300) else math.inf
