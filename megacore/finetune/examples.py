"""Stage `examples`: tokenization of a task's rows.

The stage refuses invalid data, and models that do not fit the task.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megacore.artifact.files import read_json, reason_of, workspace_errors, write_json
from megacore.config.finetune import FinetuneConfig
from megacore.config.finetune_task import (
    CausalLmConfig,
    ClassificationConfig,
    MultipleChoiceConfig,
    Seq2SeqConfig,
    classification_settings,
)
from megacore.convert.tokenizers import missing_end
from megacore.errors import ConfigError, DataFormatError, WorkerLostError
from megacore.finetune.dataset import SPLITS, open_split, save_split, split_rows
from megacore.finetune.metrics import check_installed
from megacore.finetune.pretrained import (
    is_encoder_decoder,
    quiet,
    read_model_config,
    read_model_type,
    read_tokenizer,
)
from megacore.foreign.files import similar

if TYPE_CHECKING:
    import numpy.typing as npt
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

IDS = "input_ids"
SEGMENTS = "token_type_ids"
LABELS = "labels"
PAIR_SEPARATOR = "\n"
"""Text between the texts of a pair if the tokenizer puts no special token there."""
_ROWS_PER_READ = 10_000
_ROWS_PER_WORKER = 5_000
"""Minimum rows per process: with fewer rows, starting the process takes longer than its work."""
_SHOWN = 80
"""Maximum number of characters of a value in an error message."""

Rows = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Mapper:
    """Settings for mapping a data set: number of processes and directory of temporary files."""

    workers: int
    scratch: Path

    def __call__(
        self,
        rows: "Dataset",
        split: str,
        encode: Callable[[Rows], dict[str, Any]],
        columns: Sequence[str],
    ) -> "Dataset":
        """Apply `encode` to batches of rows and drop `columns`; keep all other columns.

        Raises WorkerLostError, WorkspaceError.
        """
        count = max(1, min(self.workers, len(rows) // _ROWS_PER_WORKER))
        try:
            with workspace_errors(self.scratch):
                return rows.map(
                    encode,
                    batched=True,
                    remove_columns=list(columns),
                    num_proc=count if count > 1 else None,
                    load_from_cache_file=False,
                    cache_file_name=str(self.scratch / f"{split}.arrow"),
                    new_fingerprint=f"encoded-{split}",
                )
        except RuntimeError as error:
            if "abruptly died" not in str(error):
                raise
            raise WorkerLostError(
                "a process that tokenized was killed, perhaps because memory ran out: set "
                "data.workers to fewer, or free memory"
            ) from error


def workers_of(choice: int | str) -> int:
    """Return the number of processes for a value of `data.workers`; auto means one per core."""
    return choice if isinstance(choice, int) else len(os.sched_getaffinity(0))


def token_counts(rows: "Dataset", column: str = IDS) -> "npt.NDArray[np.int64]":
    """Return the number of ids in each row."""
    import pyarrow.compute as pc

    batches = rows.select_columns([column]).with_format("arrow").iter(_ROWS_PER_READ)
    counts = [pc.list_value_length(batch[column]).to_numpy() for batch in batches]
    return np.concatenate(counts).astype(np.int64)


def check_columns(
    rows: "Dataset", split: str, texts: Mapping[str, str], others: Mapping[str, str] | None = None
) -> None:
    """Raise DataFormatError unless all columns exist and text columns contain text.

    Args:
        rows: rows of one split.
        split: name of the split.
        texts: names of the text columns, by the field of `task` that names them.
        others: names of columns of any other type, by the field of `task` that names them.
    """
    for field, column in {**texts, **(others or {})}.items():
        if column not in rows.column_names:
            raise DataFormatError(
                f"task.{field} is {column!r}, but the {split} split has the columns "
                f"{', '.join(rows.column_names)}{similar(column, rows.column_names)}: name one of "
                "them"
            )
    for field, column in texts.items():
        _check_text(rows, split, field, column)


def _check_text(rows: "Dataset", split: str, field: str, column: str) -> None:
    feature = rows.features[column]
    kind = getattr(feature, "dtype", type(feature).__name__)
    if kind == "Json":  # values of several types, in JSON
        raise _other_than_text(rows, split, field, column)
    if kind not in ("string", "large_string", "string_view", "null"):
        raise DataFormatError(
            f"task.{field} is {column!r}, which holds {kind} in the {split} split instead of text: "
            "name another"
        )
    empty = True
    for number, text in enumerate(rows[column]):
        if text is None:
            raise DataFormatError(
                f"row {number} of the {split} split has no text in column {column!r} "
                f"(task.{field}): fill or remove it; in .csv and .tsv, NA, None, null and nan are "
                "no text"
            )
        empty = empty and not text.strip()
    if empty:
        raise DataFormatError(
            f"column {column!r} (task.{field}) is empty in every row of the {split} split: name "
            "another, or repair it"
        )


def _other_than_text(rows: "Dataset", split: str, field: str, column: str) -> DataFormatError:
    """Return the error for a column that has texts and other values."""
    number, value = next(
        (number, value) for number, value in enumerate(rows[column]) if not isinstance(value, str)
    )
    return DataFormatError(
        f"row {number} of the {split} split has {str(value)[:_SHOWN]} in column {column!r} "
        f"(task.{field}), where other rows have text: write all as text, in quotes"
    )


def encode_texts(
    rows: Rows,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    first: str,
    second: str | None,
    max_length: int,
    segments: bool,
    end: int | None,
) -> dict[str, Any]:
    """Return the ids of each text or pair, truncated to `max_length`.

    If the tokenizer puts no special token between the texts of a pair, a line break separates them.
    `end` is appended, unless it is None or there are no ids.
    """
    pairs = None if second is None else list(rows[second])
    if pairs is not None and not tokenizer.num_special_tokens_to_add(pair=True):
        pairs = [f"{PAIR_SEPARATOR}{text}" for text in pairs]
    tokenized = tokenizer(
        list(rows[first]),
        pairs,
        truncation=True,
        max_length=max_length if end is None else max_length - 1,
        return_attention_mask=False,
        return_token_type_ids=segments,
    )
    suffix = [] if end is None else [end]
    encoded: dict[str, Any] = {IDS: [[*ids, *suffix] if ids else [] for ids in tokenized[IDS]]}
    if segments:
        encoded[SEGMENTS] = [
            [*kinds, *(kinds[-1:] if suffix else [])] for kinds in tokenized[SEGMENTS]
        ]
    return encoded


def text_encoder(
    tokenizer: "PreTrainedTokenizerBase",
    model: Any,
    *,
    first: str,
    second: str | None,
    max_length: int,
) -> Callable[[Rows], dict[str, Any]]:
    """Return a function that tokenizes the texts of a classification.

    `model` is the transformers configuration of the model.
    """
    return partial(
        encode_texts,
        tokenizer=tokenizer,
        first=first,
        second=second,
        max_length=max_length,
        segments=getattr(model, "type_vocab_size", 0) > 1,
        end=missing_end(tokenizer, model),
    )


_HEAD = "ForSequenceClassification"
_UNNAMED = "LABEL_"
"""Prefix that transformers gives to the classes of a head without names."""
_AFTER_PADDING = frozenset(
    {
        "camembert",
        "data2vec-text",
        "esm",
        "ibert",
        "layoutlmv3",
        "lilt",
        "longformer",
        "luke",
        "markuplm",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
"""Models whose positions begin after the padding id, so that the first entries of their position
table are unusable."""


def check_fit(config: FinetuneConfig, model: Any, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise ConfigError for a model that cannot learn the task.

    `model` is the transformers configuration of the model.
    """
    _check_class(config, model)
    _check_vocabulary(config.model.path, model, tokenizer)
    if not isinstance(config.task, CausalLmConfig) and tokenizer.pad_token_id is None:
        raise ConfigError(
            (
                f"the tokenizer of model.path {config.model.path} has no padding token, which "
                f"task.kind {config.task.kind} needs: name one of its tokens as model.pad_token"
            )
            + (f", such as {tokenizer.eos_token!r}" if tokenizer.eos_token else "")
        )
    _check_lengths(config, model, tokenizer)


_MODELS_OF = {
    "seq2seq": "an encoder-decoder, such as T5, BART or Blenderbot",
    "causal_lm": "a decoder, such as GPT-2 or Llama",
    "classification": (
        "a model that transformers has a class …ForSequenceClassification of, such as BERT, "
        "DeBERTa or GPT-2"
    ),
    "multiple_choice": (
        "a model that transformers has a class …ForMultipleChoice of, such as BERT, RoBERTa or "
        "DeBERTa"
    ),
}
"""Models that each kind of task takes."""


def _check_class(config: FinetuneConfig, model: Any) -> None:
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
        MODEL_FOR_MULTIPLE_CHOICE_MAPPING,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    )

    kind = type(model)
    both = bool(getattr(model, "is_encoder_decoder", False))
    # XLNet's language model does not predict the next token: it does not shift the labels.
    masked = kind in MODEL_FOR_MASKED_LM_MAPPING or model.model_type == "xlnet"
    encoder = masked and not both and not getattr(model, "is_decoder", False)
    fits = {
        "seq2seq": both and kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        "causal_lm": not both and not encoder and kind in MODEL_FOR_CAUSAL_LM_MAPPING,
        "classification": kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        "multiple_choice": kind in MODEL_FOR_MULTIPLE_CHOICE_MAPPING,
    }
    if fits[config.task.kind]:
        return
    expected = _MODELS_OF[config.task.kind]
    form = "an encoder-decoder" if both else "an encoder" if encoder else "a decoder"
    possible = [name for name, fitting in fits.items() if fitting]
    raise ConfigError(
        (
            f"model.path {config.model.path} is {_architecture(model)}, {form}, but task.kind "
            f"{config.task.kind} takes {expected}: give such a model"
        )
        + (f", or set task.kind to {' or '.join(possible)}" if possible else "")
    )


def _architecture(model: Any) -> str:
    names = getattr(model, "architectures", None) or [model.model_type]
    return str(names[0])


def largest_id(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the largest id of a tokenizer, apart from the mask's.

    BART's summarization models have no embedding for the mask.
    """
    return max(id_ for id_ in tokenizer.get_vocab().values() if id_ != tokenizer.mask_token_id)


def _check_vocabulary(path: str, model: Any, tokenizer: "PreTrainedTokenizerBase") -> None:
    largest = largest_id(tokenizer)
    size = getattr(model, "vocab_size", None)
    if size is not None and largest >= size:
        raise ConfigError(
            f"the tokenizer of model.path {path} has ids up to {largest}, but the model's "
            f"vocabulary has {size} entries: give the tokenizer that it was trained with"
        )


def positions(model: Any, length: str = "max_length") -> int | None:
    """Return the number of positions of a model, or None if its length is unlimited.

    `length` is the field of `task` that the positions limit: LED's sources and targets have others.
    """
    side = "decoder" if length == "max_target_length" else "encoder"
    count = getattr(
        model, f"max_{side}_position_embeddings", getattr(model, "max_position_embeddings", None)
    )
    if not isinstance(count, int) or count <= 0:
        return None
    if getattr(model, "relative_attention", False) and not getattr(
        model, "position_biased_input", True
    ):
        return None
    padding = getattr(model, "pad_token_id", None)
    if model.model_type in _AFTER_PADDING and padding is not None:
        return count - int(padding) - 1
    return count


def _check_lengths(
    config: FinetuneConfig, model: Any, tokenizer: "PreTrainedTokenizerBase"
) -> None:
    """Raise ConfigError for a maximum length beyond the positions of the model.

    Raise it, too, for one that leaves no room for text after the special tokens.
    """
    end = int(missing_end(tokenizer, model) is not None)
    single, pair = (tokenizer.num_special_tokens_to_add(pair=pair) for pair in (False, True))
    lengths: dict[str, tuple[int, int]]
    """Maximum length, and the least that leaves room, by field of `task`."""
    match config.task:
        case ClassificationConfig() as task:
            two_texts = classification_settings(task).sentence2 is not None
            least = (pair + 2 if two_texts else single + 1) + end
            lengths = {"max_length": (task.max_length, least)}
        case MultipleChoiceConfig() as task:
            lengths = {"max_length": (task.max_length, pair + 2)}
        case Seq2SeqConfig() as task:
            least = single + end + 1
            lengths = {
                "max_source_length": (task.max_source_length, least),
                "max_target_length": (task.max_target_length, least),
            }
        case CausalLmConfig() as task:
            lengths = {"block_size": (task.block_size, 1)}
    for name, (length, _) in lengths.items():
        limit = positions(model, name)
        if limit is not None and length > limit:
            raise ConfigError(
                f"task.{name} is {length}, but model.path {config.model.path} has {limit} "
                f"positions: lower it to {limit} or less"
            )
    for name, (length, least) in lengths.items():
        if length < least:
            raise ConfigError(
                f"task.{name} is {length}, which the special tokens of model.path "
                f"{config.model.path} leave no room in for text: raise it to {least} or more"
            )


def check_head(config: FinetuneConfig, model: Any, names: tuple[str, ...] | None) -> None:
    """Raise ConfigError for a checkpoint that has a trained head for other labels.

    `names` is None for regression.
    """
    if config.model.random_weights or not _architecture(model).endswith(_HEAD):
        return
    outputs, needed = int(model.num_labels), 1 if names is None else len(names)
    labels = "a number" if names is None else f"{needed} classes ({', '.join(names[:10])})"
    head_names = tuple(str(model.id2label[number]) for number in range(outputs))
    if outputs != needed:
        if config.model.new_head:
            return
        raise ConfigError(
            f"model.path {config.model.path} has a trained head of {outputs} outputs "
            f"({', '.join(head_names[:10])}), but the data has {labels}: set model.new_head to "
            "true, or give data with as many labels"
        )
    known = not any(name.startswith(_UNNAMED) for name in head_names)
    matching = matching_classes(head_names, names) if names is not None and known else None
    if names is None or matching is None:
        return
    ordered = [matching[name] for name in head_names]
    if ordered != list(names):
        raise ConfigError(
            f"model.path {config.model.path} has a trained head with the classes "
            f"{', '.join(head_names)}, but the data numbers them {', '.join(names)}: set "
            f"task.labels to [{', '.join(ordered)}] and label rows by name"
        )


_VERSION = 2
_VERSION_OF_SOURCES = 3
"""Version of the examples whose texts may lack an end token: those of encoder-decoders."""
_VERSION_OF_NAMES = 4
"""Version of the examples whose classes are named by numbers or truth values in another order than
from 0."""
_VERSION_OF_LANGUAGES = 4
"""Version of the examples whose targets have a language after the end token."""
_LANGUAGE_AT_END = ("mbart", "plbart")
TASK_NAME = "task.json"
_SCRATCH = ".scratch"


def are_numbers(names: Sequence[str]) -> bool:
    """Return True if all names of classes are whole numbers, such as the stars of a review."""
    return all(re.fullmatch(r"0|-?[1-9]\d*", name, re.ASCII) for name in names)


def matching_classes(names: Sequence[str], others: Sequence[str]) -> dict[str, str] | None:
    """Return the spelling of `others` by that of `names` if both are the same classes, else None.

    Their order may differ, and the case of their letters.
    """
    for key in (str, str.casefold):
        ours, theirs = ({key(name): name for name in each} for each in (names, others))
        if ours.keys() == theirs.keys() and len(names) == len(others) == len(ours):
            return {name: theirs[key(name)] for name in names}
    return None


def examples_version(config: FinetuneConfig, pretrained_directory: Path) -> int:
    """Return the version of the stage for a task and a model; raised when its output changes.

    Raises ConfigError if config.json of the model cannot be read.
    """
    match config.task:
        case Seq2SeqConfig():
            ends = read_model_type(config.model, pretrained_directory) in _LANGUAGE_AT_END
            return _VERSION_OF_LANGUAGES if ends else _VERSION_OF_SOURCES
        case ClassificationConfig(labels=labels):
            names = tuple(name.lower() for name in labels or ())
            counted = tuple(map(str, range(len(names))))
            if names == ("true", "false") or (are_numbers(names) and names != counted):
                return _VERSION_OF_NAMES
            both = is_encoder_decoder(config.model, pretrained_directory)
            return _VERSION_OF_SOURCES if both else _VERSION
        case MultipleChoiceConfig() | CausalLmConfig():
            return _VERSION


def build_examples(
    config: FinetuneConfig, rows_directory: Path, pretrained_directory: Path, directory: Path
) -> dict[str, Any]:
    """Fill the empty `directory` with the tokenized splits and `task.json`.

    Args:
        config: configuration of the whole fine-tuning.
        rows_directory: artifact of the stage `dataset`.
        pretrained_directory: artifact of the stage `pretrained`.
        directory: directory of the artifact.

    Returns:
        Counts: samples of each split, tokens, the longest sample, and the integer entries of the
            task, such as the number of classes.

    Raises:
        ConfigError: the model cannot learn the task, or the package of a metric is missing.
        DataFormatError: the columns, labels or texts do not fit the task.
        DownloadError: nltk's models are needed and cannot be downloaded.
        WorkerLostError: a tokenizing process was killed.
        WorkspaceError: a file cannot be written.
    """
    check_installed(config)
    model = read_model_config(config.model, pretrained_directory)
    tokenizer = read_tokenizer(config.model, pretrained_directory)
    check_fit(config, model, tokenizer)
    scratch = directory / _SCRATCH
    with workspace_errors(scratch):
        scratch.mkdir()
    counts, description = _save_samples(
        config, rows_directory, model, tokenizer, scratch, directory
    )
    shutil.rmtree(scratch)
    write_json(directory / TASK_NAME, {"kind": config.task.kind, **description, "counts": counts})
    return counts | {name: value for name, value in description.items() if isinstance(value, int)}


def _save_samples(
    config: FinetuneConfig,
    rows_directory: Path,
    model: Any,
    tokenizer: "PreTrainedTokenizerBase",
    scratch: Path,
    directory: Path,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Save the samples of each split; return the counts and the description of the task.

    The samples map files of `scratch`. Their maps end with this call, because NFS keeps a deleted
    file that is still mapped as .nfs… in its folder, which then cannot be removed.
    """
    splits = _limited(config, rows_directory)
    mapper = Mapper(workers_of(config.data.workers), scratch)
    with quiet(), _numbered_as_in_source(config, rows_directory):
        match config.task:
            case ClassificationConfig():
                from megacore.finetune.classification import encode_classification

                samples, description = encode_classification(
                    config, config.task, splits, model, tokenizer, mapper
                )
            case MultipleChoiceConfig():
                from megacore.finetune.multiple_choice import encode_multiple_choice

                samples, description = encode_multiple_choice(
                    config.task, splits, model, tokenizer, mapper
                )
            case Seq2SeqConfig():
                from megacore.finetune.seq2seq import encode_seq2seq

                samples, description = encode_seq2seq(
                    config.task, splits, model, tokenizer, mapper, directory
                )
            case CausalLmConfig():
                from megacore.finetune.causal_lm import encode_causal_lm

                samples, description = encode_causal_lm(config.task, splits, tokenizer, mapper)
        counts: dict[str, Any] = {}
        for name, rows in samples.items():
            _check_ids(rows, name, model, tokenizer)
            save_split(rows, directory / name)
            counts[name] = len(rows)
    lengths = token_counts(samples["train"])
    counts |= {"tokens": int(lengths.sum()), "longest": int(lengths.max())}
    return counts, description


def _check_ids(
    rows: "Dataset", split: str, model: Any, tokenizer: "PreTrainedTokenizerBase"
) -> None:
    """Raise DataFormatError for a sample with a mask that the model does not embed."""
    size, mask = getattr(model, "vocab_size", None), tokenizer.mask_token_id
    if size is None or mask is None or mask < size:
        return
    for number, row in enumerate(rows):
        if any(mask in ids for ids in row.values() if isinstance(ids, list)):
            raise DataFormatError(
                f"row {number} of the {split} split has the tokenizer's {tokenizer.mask_token} in "
                "its text, for which the model has no embedding: remove it"
            )


def read_task(directory: Path) -> dict[str, Any]:
    """Return the content of `task.json`, written by `build_examples` next to the splits.

    Raises DataFormatError.
    """
    path = directory / TASK_NAME
    try:
        values: dict[str, Any] = read_json(path)
    except (OSError, ValueError) as error:
        raise DataFormatError(
            f"{path} is damaged ({reason_of(error)}): delete {directory} to build it again"
        ) from error
    return values


_ROW = re.compile(r"row (\d+) of the (train|valid) split")
"""Beginning of the errors of a row."""


@contextmanager
def _numbered_as_in_source(config: FinetuneConfig, rows_directory: Path) -> Iterator[None]:
    """Add a row's number in the source to errors in the body if its validation split is held out.

    The number within a split does not say where the row is in the user's files.
    """
    try:
        yield
    except DataFormatError as error:
        match = _ROW.match(str(error))
        if config.data.source.valid or match is None:
            raise
        counts = {name: len(open_split(rows_directory, name) or ()) for name in ("train", "valid")}
        numbers = split_rows(sum(counts.values()), counts["valid"], config.seed)
        row = f"row {numbers[match[2]][int(match[1])]} of data.source.train"
        rest = str(error).removeprefix(match[0])
        raise DataFormatError(f"{row} (row {match[1]} of the {match[2]} split){rest}") from error


def _limited(config: FinetuneConfig, rows_directory: Path) -> "dict[str, Dataset]":
    """Return the splits, each limited to the number of rows that `data` allows."""
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
            raise DataFormatError(
                f"{rows_directory} has no {name} split: delete it to build it again"
            )
    return splits
