"""Sample maps for models that read whole sentences (BERT, T5): which sentences make up each sample.

They are Megatron core's (https://github.com/NVIDIA/Megatron-LM, `build_mapping` in core/datasets/helpers.cpp), bit for
bit. A map has a row per sample: first sentence, sentence after the last, target length in tokens. Its token files hold
a sequence per sentence (`PREFIX_text_sentence`), and splits are of documents.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megacore.data import _index_helpers as helpers
from megacore.data.index_directory import map_path, save_array
from megacore.data.indexed_dataset import IndexedDataset
from megacore.data.splits import SPLIT_NAMES, split_ranges
from megacore.errors import ConfigError, DataFormatError

SentenceModel = Literal["bert", "t5"]
MAP_NAME = "sentence"
SPECIAL_TOKENS: dict[SentenceModel, int] = {"bert": 3, "t5": 2}
"""Tokens that the model's samples have besides their sentences: [CLS] and two [SEP]; a begin and an end."""
MINIMUM_SENTENCES: dict[SentenceModel, int] = {"bert": 2, "t5": 1}
"""BERT predicts whether the second part of a sample follows its first."""
_ENDLESS = 2**31 - 2
_UINT32_MAX = 2**32 - 1


def build_masked_lm_map(
    dataset: IndexedDataset,
    first_document: int,
    last_document: int,
    *,
    max_samples: int | None,
    max_sequence_length: int,
    short_sequence_probability: float,
    seed: int,
    minimum_sentences: int,
) -> npt.NDArray[Any]:
    """The samples of the documents first … last-1, shuffled, shape (samples, 3); u64 from 2^32 sentences on, else u32.

    A sample takes whole sentences until it has its target length, at least `minimum_sentences`, and leaves two or more
    to the next; or to the end of its document. Documents with less than `minimum_sentences`, and those of several
    sentences of which one is longer than 512 tokens, are left out.

    Args:
        dataset: sentences, grouped by document.
        first_document: of the split.
        last_document: the one after the split's last.
        max_samples: epochs are gone through until there are that many samples, or a few more (whole epochs); None: one.
        max_sequence_length: target length in tokens, without special tokens.
        short_sequence_probability: share of samples with a shorter target, 2 tokens or more.
        seed: of the targets (std::mt19937) and, plus 1, of the order (std::mt19937_64).
        minimum_sentences: of a sample: 1 for T5, 2 for BERT.

    Raises:
        DataFormatError: there is no sample, but some are wanted.
        ConfigError: a value is out of range.
    """
    if max_sequence_length < 2:
        raise ConfigError(f"a sample of sentences has at most {max_sequence_length} tokens: raise data.seq_length")
    if not 0 <= short_sequence_probability <= 1 or 0 < short_sequence_probability < 1e-6:
        raise ConfigError(
            f"the probability of a short sequence is {short_sequence_probability}: give 0, or 0.000001 … 1"
        )
    wide = len(dataset) > _UINT32_MAX
    build = helpers.build_sentence_map_uint64 if wide else helpers.build_sentence_map_uint32
    samples = build(
        np.require(dataset.document_indices[first_document : last_document + 1], np.int64, ["C", "A"]),
        np.require(dataset.lengths, np.int32, ["C", "A"]),
        _ENDLESS * 2**31 if max_samples is None else max_samples,
        1 if max_samples is None else _ENDLESS,
        max_sequence_length,
        short_sequence_probability,
        minimum_sentences,
        seed,
    )
    if max_samples != 0 and last_document <= first_document:
        raise DataFormatError(
            f"the split has 0 of {dataset.documents} documents of {dataset.prefix}: give it more of data.split, or use "
            "more text"
        )
    if max_samples != 0 and len(samples) == 0:
        raise DataFormatError(
            f"none of the documents {first_document} … {last_document - 1} of {dataset.prefix} gives a sample: one "
            f"takes at least {minimum_sentences} sentences, none above 512 tokens (was the text split into sentences?)"
        )
    return samples


def build_sentence_maps(
    prefix: str | Path,
    directory: str | Path,
    kind: SentenceModel,
    *,
    split: str,
    seq_length: int,
    seed: int,
    samples: Sequence[int | None],
    short_sequence_probability: float = 0.1,
) -> dict[str, dict[str, int]]:
    """Write `{train,valid,test}_sentence_index.npy` into `directory`; returns counts per split.

    `samples` are the wanted numbers for train, valid and test (None: one epoch). Raises ConfigError, DataFormatError,
    WorkspaceError.
    """
    dataset = IndexedDataset(prefix)
    counts = {}
    for (name, (first, last)), wanted in zip(split_ranges(split, dataset.documents).items(), samples, strict=True):
        rows = build_masked_lm_map(
            dataset,
            first,
            last,
            max_samples=wanted,
            max_sequence_length=seq_length - SPECIAL_TOKENS[kind],
            short_sequence_probability=short_sequence_probability,
            seed=seed,
            minimum_sentences=MINIMUM_SENTENCES[kind],
        )
        save_array(map_path(directory, name, MAP_NAME), rows)
        counts[name] = {"documents": last - first, "samples": len(rows)}
    return counts


def load_sentence_map(directory: str | Path, split_name: str, dataset: IndexedDataset) -> npt.NDArray[Any]:
    """A split's map, memory-mapped and checked against its sentences. Raises DataFormatError."""
    if split_name not in SPLIT_NAMES:
        raise DataFormatError(f"there is no split {split_name}: take one of {', '.join(SPLIT_NAMES)}")
    path = map_path(directory, split_name, MAP_NAME)
    try:
        rows: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise DataFormatError(f"{path} does not exist: build the index maps first") from error
    except (OSError, ValueError, EOFError, SyntaxError) as error:
        raise DataFormatError(f"{path} is not a readable map ({error}): build the index maps again") from error
    if rows.dtype.kind != "u" or rows.ndim != 2 or rows.shape[1] != 3:
        raise DataFormatError(f"{path} is an array of {rows.dtype} with shape {rows.shape}: build the index maps again")
    if len(rows) and not ((rows[:, 0] < rows[:, 1]).all() and rows[:, 1].max() <= len(dataset)):
        raise DataFormatError(f"{path} points beyond the {len(dataset)} sentences of {dataset.prefix}: build it again")
    return rows
