"""What a fine-tuning learns.

A class of each text, a target text, or the next token, and what it is measured by.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from megacore.config.base import Section, keyed
from megacore.errors import ConfigError

GlueTask = Literal["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli"]
ClassificationMetric = Literal["accuracy", "f1", "matthews_correlation", "pearson", "spearmanr"]
Seq2SeqMetric = Literal["bleu", "rouge1", "rouge2", "rougeL", "rougeLsum"]


class ClassificationConfig(Section):
    """A class, or a number, for a sentence or a pair of sentences.

    Made with an encoder, or with a decoder's last token.
    """

    kind: Literal["classification"] = keyed()
    """Which task this is."""
    glue: GlueTask | None = keyed(None)
    """Task of GLUE (Wang et al. 2018), which gives columns, labels and metrics where they are null;
    null means none."""
    sentence1_column: str | None = keyed(None, min_length=1)
    """Column with the text, or with the first of a pair."""
    sentence2_column: str | None = keyed(None, min_length=1)
    """Column with the second text of a pair; null means single texts, with glue the task's own."""
    label_column: str = keyed("label", min_length=1)
    """Column with the class, as a number from 0 or a name, or with the number to predict."""
    labels: tuple[str, ...] | None = keyed(None, min_length=2)
    """Names of the classes in the order of their numbers; null takes the data's own, or those found
    in training."""
    regression: bool = keyed(False)
    """Whether the label is a number to predict instead of a class."""
    max_length: int = keyed(128, gt=0)
    """Tokens of a text or pair, special tokens included; what is longer is cut."""
    pad_to_max_length: bool = keyed(False)
    """Whether every sample has max_length tokens; else a batch is as long as its longest."""
    metrics: tuple[ClassificationMetric, ...] | None = keyed(None, min_length=1)
    """What is measured; null means accuracy and f1, of a regression pearson and spearmanr, with
    glue the task's own."""

    @model_validator(mode="after")
    def _columns_are_known(self) -> Self:
        if self.glue is None and self.sentence1_column is None:
            raise ValueError(
                "task.sentence1_column is missing and task.glue is null: name the column with the "
                "text, or a GLUE task"
            )
        if self.regression and self.labels is not None:
            raise ValueError(
                "task.labels names classes and task.regression is true: keep one of them"
            )
        return self


class Seq2SeqConfig(Section):
    """A target text for a source text, with an encoder-decoder."""

    kind: Literal["seq2seq"] = keyed()
    """Which task this is."""
    source_column: str = keyed(min_length=1)
    """Column with the text to read."""
    target_column: str = keyed(min_length=1)
    """Column with the text to write."""
    source_prefix: str = keyed("")
    """Text before each source, as `summarize: ` for T5."""
    max_source_length: int = keyed(128, gt=0)
    """Tokens of a source, special tokens included; what is longer is cut."""
    max_target_length: int = keyed(64, gt=1)
    """Tokens of a target, and of what is generated."""
    min_target_length: int = keyed(0, ge=0)
    """Tokens that are generated at least."""
    pad_to_max_length: bool = keyed(False)
    """Whether every sample has its longest length; else a batch is as long as its longest."""
    num_beams: int = keyed(1, gt=0)
    """Beams of the search; 1 takes the likeliest token each time."""
    metrics: tuple[Seq2SeqMetric, ...] = keyed(("bleu",), min_length=1)
    """What is measured: BLEU (Papineni et al. 2002) by sacrebleu, and ROUGE (Lin 2004), both from 0
    to 100."""
    sentence_splitter: Literal["punkt", "rules"] = keyed("rules")
    """What finds the sentences that rougeLsum compares: nltk's punkt model, which is downloaded, or
    rules."""

    @model_validator(mode="after")
    def _lengths_are_in_order(self) -> Self:
        if self.min_target_length > self.max_target_length:
            raise ValueError(
                f"task.min_target_length is {self.min_target_length}, above task.max_target_length "
                f"{self.max_target_length}: lower it"
            )
        return self


class CausalLmConfig(Section):
    """The next token of running text, cut into blocks; with a decoder."""

    kind: Literal["causal_lm"] = keyed()
    """Which task this is."""
    text_column: str = keyed("text", min_length=1)
    """Column with the text."""
    block_size: int = keyed(128, gt=1)
    """Tokens of a sample: all texts of a split one after another, cut; what is left at the end is
    dropped."""
    append_eos: bool = keyed(False)
    """Whether the tokenizer's end-of-text token follows each text."""


TaskConfig = Annotated[
    ClassificationConfig | Seq2SeqConfig | CausalLmConfig, Field(discriminator="kind")
]


LOSS = "loss"
_SMALLER_IS_BETTER = (LOSS, "ppl")


@dataclass(frozen=True)
class GlueSettings:
    """What a task gives where the configuration says nothing."""

    columns: tuple[str, str | None]
    labels: tuple[str, ...] | None
    """None: a number is predicted."""
    metrics: tuple[ClassificationMetric, ...]


_ENTAILMENT = ("entailment", "not_entailment")
GLUE: dict[GlueTask, GlueSettings] = {
    "cola": GlueSettings(
        ("sentence", None), ("unacceptable", "acceptable"), ("matthews_correlation",)
    ),
    "mnli": GlueSettings(
        ("premise", "hypothesis"), ("entailment", "neutral", "contradiction"), ("accuracy",)
    ),
    "mrpc": GlueSettings(
        ("sentence1", "sentence2"), ("not_equivalent", "equivalent"), ("accuracy", "f1")
    ),
    "qnli": GlueSettings(("question", "sentence"), _ENTAILMENT, ("accuracy",)),
    "qqp": GlueSettings(
        ("question1", "question2"), ("not_duplicate", "duplicate"), ("accuracy", "f1")
    ),
    "rte": GlueSettings(("sentence1", "sentence2"), _ENTAILMENT, ("accuracy",)),
    "sst2": GlueSettings(("sentence", None), ("negative", "positive"), ("accuracy",)),
    "stsb": GlueSettings(("sentence1", "sentence2"), None, ("pearson", "spearmanr")),
    "wnli": GlueSettings(
        ("sentence1", "sentence2"), ("not_entailment", "entailment"), ("accuracy",)
    ),
}


@dataclass(frozen=True)
class ClassificationSettings:
    """A classification with everything that GLUE or the defaults give filled in."""

    sentence1: str
    sentence2: str | None
    labels: tuple[str, ...] | None
    """Names in the order of their numbers; None: they are found in the data, or a number is
    predicted."""
    regression: bool
    metrics: tuple[ClassificationMetric, ...]


_OF_NUMBERS: tuple[ClassificationMetric, ...] = ("pearson", "spearmanr")


def classification_settings(task: ClassificationConfig) -> ClassificationSettings:
    """What the configuration says, and where it says nothing what its GLUE task or the defaults do.

    Raises ConfigError for sections that contradict the GLUE task, and for metrics of the other kind
    of label.
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
                f"task.metrics has {name}, which measures {other}, but the task predicts {kind}: "
                f"remove it, or set task.regression to {str(not regression).lower()}"
            )
    own = glue.columns if glue else (None, None)
    first, second = task.sentence1_column or own[0], task.sentence2_column or own[1]
    assert first is not None  # the configuration names a column or a task
    labels = task.labels or (glue.labels if glue else None)
    return ClassificationSettings(
        first, second, None if regression else labels, regression, metrics
    )


def _check_against(task: ClassificationConfig, glue: GlueSettings) -> None:
    if glue.labels is not None and task.regression:
        raise ConfigError(
            f"task.regression is true but task.glue {task.glue} has the classes "
            f"{', '.join(glue.labels)}: remove one"
        )
    if task.labels is None:
        return
    if glue.labels is None:
        raise ConfigError(
            f"task.labels names classes but task.glue {task.glue} predicts a number: remove "
            "task.labels"
        )
    if len(task.labels) != len(glue.labels):
        raise ConfigError(
            f"task.labels names {len(task.labels)} classes ({', '.join(task.labels)}) but "
            f"task.glue {task.glue} has {len(glue.labels)} ({', '.join(glue.labels)}): name as "
            "many, or remove task.labels"
        )


def metric_names(task: ClassificationConfig | Seq2SeqConfig | CausalLmConfig) -> tuple[str, ...]:
    """What is measured beside the loss.

    The first tells the best model unless the configuration names another.

    Raises ConfigError.
    """
    match task:
        case ClassificationConfig():
            return classification_settings(task).metrics
        case Seq2SeqConfig():
            return tuple(dict.fromkeys(task.metrics))
        case CausalLmConfig():
            return ("ppl",)


def best_metric(task: TaskConfig, name: str | None) -> tuple[str, bool]:
    """Return the name of the metric that tells the best model, and whether larger is better.

    Args:
        task: what is learnt.
        name: `train.best_metric`; None takes the task's first metric.

    Raises:
        ConfigError: the task does not measure it.
    """
    names = metric_names(task)
    name = name or names[0]
    if name not in (*names, LOSS):
        raise ConfigError(
            f"train.best_metric is {name!r}, which this task does not measure: name one of "
            f"{', '.join((*names, LOSS))}"
        )
    return name, name not in _SMALLER_IS_BETTER
