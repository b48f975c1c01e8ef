"""The three index maps of a GPT data set: which tokens, in which order, make up each sample.

They are Megatron core's (https://github.com/NVIDIA/Megatron-LM, core/datasets), bit for bit:
document index (i32), the split's sequences repeated once per epoch and shuffled; sample index (i32 or i64, shape
(samples + 1, 2)), where each sample begins in the document index; shuffle index (u32), the order of the samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.artifact.files import workspace_errors
from megacore.data import _index_helpers as helpers
from megacore.data.indexed_dataset import IndexedDataset
from megacore.data.splits import split_ranges
from megacore.errors import DataFormatError

VERSION = 1
"""Of the index stage; raised when it produces something else."""
EXTRA_TOKENS = 1
"""Tokens that a sample has beyond seq_length: the last label."""
MAP_NAMES = ("document", "sample", "shuffle")
_INT32_MAX = 2**31 - 1
_UINT32_MAX = 2**32 - 1


@dataclass(frozen=True)
class EpochPlan:
    """How often a split is gone through, which with its sequences decides its maps."""

    epochs: int
    """Passes over the split; 0 when it has no sample and none is wanted."""
    separate_final_epoch: bool
    """Whether the last pass is shuffled by itself, because only a small part of it is needed."""
    samples: int
    """Samples in all passes."""
    samples_before_final_epoch: int
    """Samples shuffled among themselves: those before a separate last pass, else all."""


@dataclass(frozen=True)
class IndexMaps:
    """The maps of one split."""

    document_index: npt.NDArray[np.int32]
    sample_index: npt.NDArray[Any]
    shuffle_index: npt.NDArray[Any]


def map_path(directory: str | Path, split_name: str, map_name: str) -> Path:
    """Where one of a split's maps is: `{train,valid,test}_{document,sample,shuffle}_index.npy`."""
    return Path(directory, f"{split_name}_{map_name}_index.npy")


def plan_epochs(tokens_per_epoch: int, seq_length: int, samples: int | None) -> EpochPlan:
    """The least number of epochs that yields `samples` samples (None: one epoch).

    The final epoch is separate when less than 80 % of it would be used.
    """
    epochs = 1
    if samples is not None:
        epochs = max(1, -(-(samples * seq_length + EXTRA_TOKENS) // tokens_per_epoch))
    total = (epochs * tokens_per_epoch - EXTRA_TOKENS) // seq_length
    if samples is None or epochs == 1:
        return EpochPlan(epochs, False, total, total)
    before_final = ((epochs - 1) * tokens_per_epoch - EXTRA_TOKENS) // seq_length
    per_epoch = (tokens_per_epoch - EXTRA_TOKENS) // seq_length
    separate = samples - before_final < int(0.8 * per_epoch)
    return EpochPlan(epochs, separate, total, before_final if separate else total)


def build_document_index(
    first: int, last: int, epochs: int, separate_final_epoch: bool, random_state: helpers.RandomState
) -> npt.NDArray[np.int32]:
    """The sequences first … last-1, once per epoch, shuffled (the final epoch by itself if separate)."""
    index: npt.NDArray[np.int32] = np.tile(np.arange(first, last, dtype=np.int32), epochs)
    whole = len(index) - (last - first if separate_final_epoch else 0)
    random_state.shuffle(index[:whole])
    if separate_final_epoch:
        random_state.shuffle(index[whole:])
    return index


def build_sample_index(
    lengths: npt.NDArray[np.int32], document_index: npt.NDArray[np.int32], seq_length: int, samples: int
) -> npt.NDArray[Any]:
    """Where each sample begins, shape (samples + 1, 2); i64 once a position no longer fits i32."""
    wide = len(document_index) > _INT32_MAX
    build = helpers.build_sample_index_int64 if wide else helpers.build_sample_index_int32
    return build(lengths, document_index, seq_length, samples, EXTRA_TOKENS)


def build_shuffle_index(
    samples: int, samples_before_final_epoch: int, random_state: helpers.RandomState
) -> npt.NDArray[Any]:
    """The order of the samples: those before the final epoch shuffled, then the rest."""
    index: npt.NDArray[Any] = np.arange(samples, dtype=np.int64 if samples >= _UINT32_MAX - 1 else np.uint32)
    random_state.shuffle(index[:samples_before_final_epoch])
    if samples > samples_before_final_epoch:
        random_state.shuffle(index[samples_before_final_epoch:])
    return index


def build_split(
    lengths: npt.NDArray[np.int32], first: int, last: int, plan: EpochPlan, seq_length: int, seed: int
) -> IndexMaps:
    """The maps of the split that holds the sequences first … last-1; one random state draws them in order."""
    random_state = helpers.RandomState(seed)
    document_index = build_document_index(first, last, plan.epochs, plan.separate_final_epoch, random_state)
    sample_index = build_sample_index(lengths, document_index, seq_length, plan.samples)
    shuffle_index = build_shuffle_index(plan.samples, plan.samples_before_final_epoch, random_state)
    return IndexMaps(document_index, sample_index, shuffle_index)


def index_plan(
    prefix: str | Path, split: str, seq_length: int, samples: Sequence[int | None]
) -> dict[str, dict[str, int | bool]]:
    """What decides the maps beside data, split, seq_length and seed: per split, epochs and the final one's shuffle.

    It stands in the index stage's key for the wanted numbers of samples (train, valid, test; None: one epoch), so
    that asking for more samples of the same epochs changes nothing. Raises ConfigError, DataFormatError.
    """
    plans = _plan_splits(IndexedDataset(prefix), split, seq_length, samples)
    return {
        name: {"epochs": plan.epochs, "separate_final_epoch": plan.separate_final_epoch} for name, plan in plans.items()
    }


def build_index_maps(
    prefix: str | Path,
    directory: str | Path,
    *,
    split: str,
    seq_length: int,
    seed: int,
    samples: Sequence[int | None],
) -> dict[str, dict[str, int | bool]]:
    """Write the nine maps of a pair of token files into `directory`; returns counts per split.

    `samples` are the wanted numbers for train, valid and test (None: as many as one epoch has); the maps cover
    whole epochs, so a split has at least that many. Raises ConfigError, DataFormatError, WorkspaceError.
    """
    dataset = IndexedDataset(prefix)
    plans = _plan_splits(dataset, split, seq_length, samples)
    lengths = np.require(dataset.lengths, np.int32, ["C", "A"])  # the file's own array is not aligned
    counts: dict[str, dict[str, int | bool]] = {}
    for name, (first, last) in split_ranges(split, len(dataset)).items():
        plan = plans[name]
        save_maps(build_split(lengths, first, last, plan, seq_length, seed), directory, name)
        counts[name] = {
            "sequences": last - first,
            "tokens": dataset.count_tokens(first, last),
            "samples": plan.samples,
            "epochs": plan.epochs,
            "separate_final_epoch": plan.separate_final_epoch,
        }
    return counts


def _plan_splits(
    dataset: IndexedDataset, split: str, seq_length: int, samples: Sequence[int | None]
) -> dict[str, EpochPlan]:
    if len(dataset) > _INT32_MAX:
        raise DataFormatError(f"{dataset.prefix} has {len(dataset)} sequences; the maps number up to {_INT32_MAX}")
    plans = {}
    for (name, (first, last)), wanted in zip(split_ranges(split, len(dataset)).items(), samples, strict=True):
        tokens = dataset.count_tokens(first, last)
        if tokens >= seq_length + EXTRA_TOKENS:
            plans[name] = plan_epochs(tokens, seq_length, wanted)
        elif wanted == 0:
            plans[name] = EpochPlan(0, False, 0, 0)
        else:
            raise DataFormatError(_too_small(dataset, split, name, last - first, tokens, seq_length, wanted))
    return plans


def _too_small(
    dataset: IndexedDataset, split: str, name: str, sequences: int, tokens: int, seq_length: int, wanted: int | None
) -> str:
    samples = "as many as there are" if wanted is None else str(wanted)
    return (
        f"the {name} split of {dataset.prefix} has {sequences} of {len(dataset)} sequences with {tokens} tokens, but "
        f"one sample takes {seq_length} + {EXTRA_TOKENS} (samples wanted: {samples}): give it more of data.split "
        f"(now {split}), lower data.seq_length, or use more text"
    )


def save_maps(maps: IndexMaps, directory: str | Path, split_name: str) -> None:
    """Write a split's three `.npy` files. Raises WorkspaceError."""
    arrays = (maps.document_index, maps.sample_index, maps.shuffle_index)
    for map_name, values in zip(MAP_NAMES, arrays, strict=True):
        path = map_path(directory, split_name, map_name)
        with workspace_errors(path):
            np.save(path, values, allow_pickle=False)
