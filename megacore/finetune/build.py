"""The task that a configuration names."""

from pathlib import Path

from megacore.config.finetune import FinetuneConfig
from megacore.config.finetune_task import CausalLmConfig, ClassificationConfig, Seq2SeqConfig
from megacore.finetune.task import FinetuneTask


def build_task(config: FinetuneConfig, examples_directory: Path, pretrained_directory: Path) -> FinetuneTask:
    """The task on the artifacts of the stages `examples` and `pretrained`. Raises ConfigError, DataFormatError."""
    match config.task:
        case ClassificationConfig():
            from megacore.finetune.classification import ClassificationTask

            return ClassificationTask(config, examples_directory, pretrained_directory)
        case Seq2SeqConfig():
            from megacore.finetune.seq2seq import Seq2SeqTask

            return Seq2SeqTask(config, examples_directory, pretrained_directory)
        case CausalLmConfig():
            from megacore.finetune.causal_lm import CausalLmTask

            return CausalLmTask(config, examples_directory, pretrained_directory)
