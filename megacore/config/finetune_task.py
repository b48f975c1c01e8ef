"""Section `task`: the tasks of fine-tuning and their metrics.

The tasks are classification of texts, choice of one of several answers, generation of a target
text, and prediction of the next token.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from megacore.config.base import Section, keyed
from megacore.config.data import Splitter
from megacore.errors import ConfigError

GlueTask = Literal["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli"]
ClassificationMetric = Literal["accuracy", "f1", "matthews_correlation", "pearson", "spearmanr"]
Seq2SeqMetric = Literal["bleu", "rouge1", "rouge2", "rougeL", "rougeLsum"]


class ClassificationConfig(Section):
    """Classification of, or regression on, a sentence or a pair of sentences.

    The model is an encoder, or a decoder whose last token is classified.
    """

    kind: Literal["classification"] = keyed()
    """Type of the task."""
    glue: GlueTask | None = keyed(None)
    """GLUE task (Wang et al. 2018) that provides columns, labels and metrics where they are null;
    null means none."""
    sentence1_column: str | None = keyed(None, min_length=1)
    """Column of the text, or of the first text of a pair."""
    sentence2_column: str | None = keyed(None, min_length=1)
    """Column of the second text of a pair; null means the GLUE task's column, or single texts
    without glue."""
    label_column: str = keyed("label", min_length=1)
    """Column of the label: a class as a number from 0 or a name, or for regression the number to
    predict."""
    labels: tuple[str, ...] | None = keyed(None, min_length=2)
    """Names of the classes in the order of their numbers; null means the names in the data's
    description, or the distinct labels of the training split. If all names are whole numbers, such
    as "1" to "5", a number in the data is a name; if they are "true" and "false", so is a truth
    value."""
    regression: bool = keyed(False)
    """If true, the label is a number to predict instead of a class."""
    max_length: int = keyed(128, gt=0)
    """Maximum tokens of a text or pair, including special tokens; longer inputs are truncated."""
    pad_to_max_length: bool = keyed(False)
    """If true, every sample is padded to max_length; if false, to the longest sample of its
    batch."""
    metrics: tuple[ClassificationMetric, ...] | None = keyed(None, min_length=1)
    """Metrics to compute; null means those of the GLUE task, else accuracy and f1, or for
    regression pearson and spearmanr."""

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
    """Generation of a target text from a source text with an encoder-decoder."""

    kind: Literal["seq2seq"] = keyed()
    """Type of the task."""
    source_column: str = keyed(min_length=1)
    """Column of the source text."""
    target_column: str = keyed(min_length=1)
    """Column of the target text."""
    source_prefix: str = keyed("")
    """Text inserted before each source, such as `summarize: ` for T5."""
    max_source_length: int = keyed(128, gt=0)
    """Maximum tokens of a source, including special tokens; longer sources are truncated."""
    max_target_length: int = keyed(64, gt=1)
    """Maximum tokens of a target and of a generated text."""
    min_target_length: int = keyed(0, ge=0)
    """Minimum tokens of a generated text."""
    pad_to_max_length: bool = keyed(False)
    """If true, every sample is padded to the maximum lengths; if false, to the longest sample of
    its batch."""
    num_beams: int = keyed(1, gt=0)
    """Number of beams in beam search; 1 means greedy decoding."""
    metrics: tuple[Seq2SeqMetric, ...] = keyed(("bleu",), min_length=1)
    """Metrics to compute: BLEU (Papineni et al. 2002) with sacrebleu, and ROUGE (Lin 2004), both
    from 0 to 100."""
    sentence_splitter: Splitter = keyed("rules")
    """Sentence splitter for rougeLsum: nltk's Punkt model, which is downloaded, or simple rules."""

    @model_validator(mode="after")
    def _lengths_are_in_order(self) -> Self:
        if self.min_target_length > self.max_target_length:
            raise ValueError(
                f"task.min_target_length is {self.min_target_length}, above task.max_target_length "
                f"{self.max_target_length}: lower it"
            )
        return self


class CausalLmConfig(Section):
    """Prediction of the next token in blocks of running text, with a decoder."""

    kind: Literal["causal_lm"] = keyed()
    """Type of the task."""
    text_column: str = keyed("text", min_length=1)
    """Column of the text."""
    block_size: int = keyed(128, gt=1)
    """Tokens of a sample. The texts of a split are concatenated and cut into blocks; the remainder
    at the end is dropped."""
    append_eos: bool = keyed(False)
    """If true, the tokenizer's end-of-text token is added after each text."""


class MultipleChoiceConfig(Section):
    """Choice of one of several answers, as in RACE, SWAG and HellaSwag, with an encoder.

    The model reads the context and one choice at a time and gives each pair one score.
    """

    kind: Literal["multiple_choice"] = keyed()
    """Type of the task."""
    context_column: str = keyed("context", min_length=1)
    """Column of the text that all choices share."""
    question_column: str | None = keyed(None, min_length=1)
    """Column of the question, which is inserted before each choice; a choice replaces the `_` of a
    question that has one. Null means the choices continue the context."""
    choices_columns: tuple[str, ...] = keyed(("choices",), min_length=1)
    """Column with the list of a row's choices, or the columns with one choice each. All rows have
    the same number of choices."""
    label_column: str = keyed("label", min_length=1)
    """Column of the right choice: a number from 0, or a letter from A."""
    max_length: int = keyed(128, gt=0)
    """Maximum tokens of a context with one choice, including special tokens; the longer of both is
    truncated first."""
    pad_to_max_length: bool = keyed(False)
    """If true, every choice is padded to max_length; if false, to the longest of its batch."""


TaskConfig = Annotated[
    ClassificationConfig | MultipleChoiceConfig | Seq2SeqConfig | CausalLmConfig,
    Field(discriminator="kind"),
]


LOSS = "loss"
_SMALLER_IS_BETTER = (LOSS, "ppl")


@dataclass(frozen=True)
class GlueSettings:
    """Columns, labels and metrics of a GLUE task."""

    columns: tuple[str, str | None]
    labels: tuple[str, ...] | None
    """Names of the classes; None for regression."""
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
    """Classification options with all defaults filled in."""

    sentence1: str
    sentence2: str | None
    labels: tuple[str, ...] | None
    """Names of the classes in the order of their numbers; None for regression, or if the data
    provides them."""
    regression: bool
    metrics: tuple[ClassificationMetric, ...]


_OF_NUMBERS: tuple[ClassificationMetric, ...] = ("pearson", "spearmanr")


def classification_settings(task: ClassificationConfig) -> ClassificationSettings:
    """Return the options of a classification, filled in from its GLUE task or the defaults.

    Raises ConfigError if the options contradict the GLUE task, and for metrics of the wrong kind of
    label.
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
    glue_columns = glue.columns if glue else (None, None)
    first = task.sentence1_column or glue_columns[0]
    second = task.sentence2_column or glue_columns[1]
    assert first is not None  # The configuration names a column or a GLUE task.
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


def metric_names(
    task: ClassificationConfig | MultipleChoiceConfig | Seq2SeqConfig | CausalLmConfig,
) -> tuple[str, ...]:
    """Return the names of the task's metrics, without the loss. Raises ConfigError.

    The first one selects the best model unless the configuration names another.
    """
    match task:
        case ClassificationConfig():
            return classification_settings(task).metrics
        case MultipleChoiceConfig():
            return ("accuracy",)
        case Seq2SeqConfig():
            return tuple(dict.fromkeys(task.metrics))
        case CausalLmConfig():
            return ("ppl",)


def best_metric(task: TaskConfig, name: str | None) -> tuple[str, bool]:
    """Return the metric that selects the best model, and whether larger values are better.

    `name` is `train.best_metric`, None for the task's first metric. Raises ConfigError if the task
    does not compute it.
    """
    names = metric_names(task)
    name = name or names[0]
    if name not in (*names, LOSS):
        raise ConfigError(
            f"train.best_metric is {name!r}, which this task does not measure: name one of "
            f"{', '.join((*names, LOSS))}"
        )
    return name, name not in _SMALLER_IS_BETTER
