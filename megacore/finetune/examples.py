"""The stage `examples`: rows to tokenized samples. Whatever is wrong with data or model is refused here."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.artifact.files import workspace_errors, write_json
from megacore.config.finetune import FinetuneConfig
from megacore.config.finetune_task import CausalLmConfig, ClassificationConfig, Seq2SeqConfig
from megacore.errors import DataFormatError
from megacore.finetune.dataset import SPLITS, open_split, save_split
from megacore.finetune.encode import Mapper, token_counts, workers_of
from megacore.finetune.fit import check_fit
from megacore.finetune.metrics import check_installed
from megacore.finetune.models import quiet, read_model_config, read_tokenizer

if TYPE_CHECKING:
    from datasets import Dataset

EXAMPLES_VERSION = 1
"""Of the stage; raised when it produces something else."""
TASK_NAME = "task.json"
_SCRATCH = ".scratch"


def build_examples(
    config: FinetuneConfig, rows_directory: Path, pretrained_directory: Path, directory: Path
) -> dict[str, Any]:
    """Fill the empty `directory` with the tokenized splits and `task.json`.

    Args:
        config: of the whole fine-tuning.
        rows_directory: artifact of the stage `dataset`.
        pretrained_directory: artifact of the stage `pretrained`.
        directory: of the artifact.

    Returns:
        Counts: samples of each split, and what the task has to say (classes, tokens, the longest sample).

    Raises:
        ConfigError: the model cannot learn the task, or the package of a metric is missing.
        DataFormatError: columns, labels or texts are not what the task needs.
        DownloadError: nltk's models cannot be fetched, where the task asks for them.
        WorkerLostError, WorkspaceError: as their names say.
    """
    check_installed(config)
    model = read_model_config(config.model, pretrained_directory)
    tokenizer = read_tokenizer(config.model, pretrained_directory)
    check_fit(config, model, tokenizer)
    splits = _limited(config, rows_directory)
    scratch = directory / _SCRATCH
    with workspace_errors(scratch):
        scratch.mkdir()
    mapper = Mapper(workers_of(config.data.workers), scratch)
    with quiet():
        match config.task:
            case ClassificationConfig():
                from megacore.finetune.classification import encode_classification

                samples, description = encode_classification(config, config.task, splits, model, tokenizer, mapper)
            case Seq2SeqConfig():
                from megacore.finetune.seq2seq import encode_seq2seq

                samples, description = encode_seq2seq(config.task, splits, model, tokenizer, mapper, directory)
            case CausalLmConfig():
                from megacore.finetune.causal_lm import encode_causal_lm

                samples, description = encode_causal_lm(config.task, splits, tokenizer, mapper)
        counts: dict[str, Any] = {}
        for name, rows in samples.items():
            save_split(rows, directory / name)
            counts[name] = len(rows)
    lengths = token_counts(samples["train"])
    counts |= {"tokens": int(lengths.sum()), "longest": int(lengths.max())}
    shutil.rmtree(scratch)
    write_json(directory / TASK_NAME, {"kind": config.task.kind, **description, "counts": counts})
    return counts | {name: value for name, value in description.items() if isinstance(value, int)}


def read_task(directory: Path) -> dict[str, Any]:
    """What `build_examples` wrote beside the splits. Raises DataFormatError."""
    path = directory / TASK_NAME
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataFormatError(f"{path} is damaged ({error}): delete {directory} to build it again") from error
    return values


def _limited(config: FinetuneConfig, rows_directory: Path) -> "dict[str, Dataset]":
    """The first rows of each split."""
    limits = {
        "train": config.data.max_train_samples,
        "valid": config.data.max_valid_samples,
        "test": config.data.max_test_samples,
    }
    splits: dict[str, Dataset] = {}
    for name in SPLITS:
        rows = open_split(rows_directory, name)
        if rows is not None:
            limit = limits[name]
            splits[name] = rows if limit is None else rows.select(range(min(limit, len(rows))))
    for name in ("train", "valid"):
        if name not in splits:
            raise DataFormatError(f"{rows_directory} has no {name} split: delete it to build it again")
    return splits
