"""What a fine-tuning learns: a class of each text, a target text, or the next token."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from megacore.config.base import Section, keyed

GlueTask = Literal["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli"]
ClassificationMetric = Literal["accuracy", "f1", "matthews_correlation", "pearson", "spearmanr"]
Seq2SeqMetric = Literal["bleu", "rouge1", "rouge2", "rougeL", "rougeLsum"]


class ClassificationConfig(Section):
    """A class, or a number, for a sentence or a pair of sentences; with an encoder, or a decoder's last token."""

    kind: Literal["classification"] = keyed()
    """Which task this is."""
    glue: GlueTask | None = keyed(None)
    """Task of GLUE (Wang et al. 2018), which gives columns, labels and metrics where they are null; null means none."""
    sentence1_column: str | None = keyed(None, min_length=1)
    """Column with the text, or with the first of a pair."""
    sentence2_column: str | None = keyed(None, min_length=1)
    """Column with the second text of a pair; null means single texts, with glue the task's own."""
    label_column: str = keyed("label", min_length=1)
    """Column with the class, as a number from 0 or a name, or with the number to predict."""
    labels: tuple[str, ...] | None = keyed(None, min_length=2)
    """Names of the classes in the order of their numbers; null takes the data's own, or those found in training."""
    regression: bool = keyed(False)
    """Whether the label is a number to predict instead of a class."""
    max_length: int = keyed(128, gt=0)
    """Tokens of a text or pair, special tokens included; what is longer is cut."""
    pad_to_max_length: bool = keyed(False)
    """Whether every sample has max_length tokens; else a batch is as long as its longest."""
    metrics: tuple[ClassificationMetric, ...] | None = keyed(None, min_length=1)
    """What is measured; null means accuracy and f1, of a regression pearson and spearmanr, with glue the task's own."""

    @model_validator(mode="after")
    def _columns_are_known(self) -> Self:
        if self.glue is None and self.sentence1_column is None:
            raise ValueError(
                "task.sentence1_column is missing and task.glue is null: name the column with the text, or a GLUE task"
            )
        if self.regression and self.labels is not None:
            raise ValueError("task.labels names classes and task.regression is true: keep one of them")
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
    """What is measured: BLEU (Papineni et al. 2002) by sacrebleu, and ROUGE (Lin 2004), both from 0 to 100."""
    sentence_splitter: Literal["punkt", "rules"] = keyed("rules")
    """What finds the sentences that rougeLsum compares: nltk's punkt model, which is downloaded, or rules."""

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
    """Tokens of a sample: all texts of a split one after another, cut; what is left at the end is dropped."""
    append_eos: bool = keyed(False)
    """Whether the tokenizer's end-of-text token follows each text."""


TaskConfig = Annotated[ClassificationConfig | Seq2SeqConfig | CausalLmConfig, Field(discriminator="kind")]
