"""The tasks of GLUE (Wang et al. 2018): columns, classes in the order of their numbers, and metrics."""

from dataclasses import dataclass

from megacore.config.finetune_task import ClassificationConfig, ClassificationMetric, GlueTask
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
