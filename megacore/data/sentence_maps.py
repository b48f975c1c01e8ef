"""Sentence maps, which list the sentences of each sample of BERT and T5.

They equal Megatron core's (https://github.com/NVIDIA/Megatron-LM, `build_mapping` in
core/datasets/helpers.cpp) bit for bit. A map has a row per sample: first sentence, sentence after
the last, target length in tokens. The token files contain a sequence per sentence
(`PREFIX_text_sentence`), and splits are ranges of documents.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.artifact.files import save_array
from megacore.data import _compiled as helpers
from megacore.data.blend import Division, check_epochs, divide, write_blend
from megacore.data.index_directory import (
    SENTENCE_MAP_NAME,
    check_form,
    load_map,
    make_map_directory,
    map_path,
    write_description,
)
from megacore.data.index_options import (
    SPLIT_NAMES,
    IndexOptions,
    Mixture,
    SentenceOptions,
)
from megacore.data.index_plans import UINT32_MAX, check_agreement, check_requested
from megacore.errors import ConfigError, DataFormatError
from megacore.token_files.indexed_dataset import IndexedDataset

_ENDLESS = 2**31 - 2
_BLOCK = 1 << 20


@dataclass(frozen=True)
class SentencePart:
    """Documents of one data set in one split, with the requested number of samples."""

    dataset: IndexedDataset
    """Token files with a sequence per sentence."""
    first: int
    """First document."""
    last: int
    """Document after the last."""
    requested: int | None
    """Minimum number of samples, for which as many whole epochs as necessary are used; None for
    one epoch."""
    least: int = 0
    """Number of samples for later weights of a blend, or for a run that continues the order of an
    earlier plan. Single epochs, each with a seed of its own, are appended until there are as
    many."""


@dataclass(frozen=True)
class _Split:
    parts: dict[str, SentencePart]
    """Parts by prefix, in the order in which a blend numbers them."""
    division: Division


def build_sentence_map(part: SentencePart, options: IndexOptions) -> npt.NDArray[Any]:
    """Build the shuffled samples of a part, shape (samples, 3).

    The type is u64 from 2^32 sentences on, else u32.

    A sample takes whole sentences until it has its target length and at least `minimum_sentences`,
    provided that two or more sentences remain; otherwise it extends to the end of its document.
    Documents with fewer than `minimum_sentences` are excluded, as are documents of several
    sentences if one is longer than 512 tokens. Target lengths are drawn with the seed
    (std::mt19937), the order with the seed plus 1 (std::mt19937_64).

    Raises:
        DataFormatError: if samples are requested but there are none.
    """
    wide = len(part.dataset) > UINT32_MAX
    build = helpers.build_sentence_map_uint64 if wide else helpers.build_sentence_map_uint32
    samples = build(*_arguments(part, options))
    _check_count(part, options, len(samples))
    if part.least <= len(samples):
        return samples
    further = [build(*each) for each in _further_epochs(part, options, len(samples))]
    return np.concatenate([samples, *further])


def _further_epochs(
    part: SentencePart, options: IndexOptions, samples: int
) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of the maps of further epochs, until `part.least` samples are there."""
    one, seed = replace(part, requested=None, least=0), options.seed
    while samples < part.least:
        seed = (seed + 1) % 2**32
        arguments = _arguments(one, replace(options, seed=seed))
        yield arguments
        count = helpers.count_sentence_map(*arguments)[1]
        _check_count(one, options, count)
        samples += count


def count_samples(part: SentencePart, options: IndexOptions) -> tuple[int, int]:
    """Return (epochs, samples) of the map that `build_sentence_map` builds.

    Raises the same DataFormatError.
    """
    epochs, samples = helpers.count_sentence_map(*_arguments(part, options))
    _check_count(part, options, samples)
    for arguments in _further_epochs(part, options, samples):
        epochs += 1
        samples += helpers.count_sentence_map(*arguments)[1]
    return epochs, samples


def sentence_plan(
    mixture: Mixture,
    options: IndexOptions,
    samples: Sequence[int | None],
    *,
    planned_before: int | None = None,
) -> dict[str, Any]:
    """Return the values that determine the maps together with data, weights and options.

    These are the epochs of each split, and the size of a blend.

    As with `megacore.data.index_maps.index_plan`, the plan replaces the requested numbers of
    samples in the index stage's key; see `megacore.data.index_plans.plan_splits` for
    `planned_before`. Raises ConfigError, DataFormatError.
    """
    plans: dict[str, Any] = {}
    requested = samples[0]
    extends = None not in (requested, planned_before) and (planned_before or 0) < (requested or 0)
    for name, split in _plan_splits(mixture, options, samples, planned_before).items():
        members = [
            _plan_values(part, options, extends=extends and name == "train")
            for part in split.parts.values()
        ]
        plans[name] = (
            members[0] if mixture.is_single else {"size": split.division.size, "members": members}
        )
    return plans


def _plan_values(part: SentencePart, options: IndexOptions, *, extends: bool) -> dict[str, int]:
    """Return the epochs of a part; if it extends an earlier plan, those after that plan separately.

    Without an earlier plan, the steps of a blend, which are in the key, determine how many follow.
    """
    epochs, _ = count_samples(part, options)
    further = 0
    if extends:
        further = epochs - count_samples(replace(part, least=0), options)[0]
    return {"epochs": epochs - further} | ({"further_epochs": further} if further else {})


def build_sentence_maps(
    mixture: Mixture,
    directory: str | Path,
    options: IndexOptions,
    samples: Sequence[int | None],
    *,
    planned_before: int | None = None,
) -> dict[str, Any]:
    """Write the sentence maps of each split and `index.json` into `directory`.

    `samples`, `planned_before` and blends have the same meaning as in
    `megacore.data.index_maps.build_index_maps`. Returns counts per split. Raises ConfigError,
    DataFormatError, WorkspaceError.
    """
    splits = _plan_splits(mixture, options, samples, planned_before)
    counts: dict[str, Any] = {}
    for name, split in splits.items():
        entries = []
        for prefix, part in split.parts.items():
            number = mixture.prefixes.index(prefix)
            folder = make_map_directory(directory, mixture, number)
            entries.append(_write_map(part, options, folder, name))
        single = mixture.is_single
        counts[name] = (
            entries[0] if single else write_blend(directory, mixture, name, split.division, entries)
        )
    write_description(
        directory, mixture, options, {name: entry["samples"] for name, entry in counts.items()}
    )
    return counts


def load_sentence_map(
    directory: str | Path, split_name: str, dataset: IndexedDataset, longest: int | None = None
) -> npt.NDArray[Any]:
    """Open a split's map as a memory map and check it.

    Its rows must refer to existing sentences, and its target lengths must be 2 … `longest` (None:
    not checked). Raises DataFormatError.
    """
    if split_name not in SPLIT_NAMES:
        raise DataFormatError(
            f"there is no split {split_name}: take one of {', '.join(SPLIT_NAMES)}"
        )
    path = map_path(directory, split_name, SENTENCE_MAP_NAME)
    rows = load_map(path)
    check_form(path, rows, 2, ("<u4", "<u8"))
    if rows.shape[1] != 3:
        raise DataFormatError(
            f"{path} is an array of {rows.dtype} with shape {rows.shape}, not of three columns: "
            "build it again"
        )
    for start in range(0, len(rows), _BLOCK):
        block = rows[start : start + _BLOCK]
        if not ((block[:, 0] < block[:, 1]).all() and block[:, 1].max() <= len(dataset)):
            raise DataFormatError(
                f"{path} points beyond the {len(dataset)} sentences of {dataset.prefix}: build it "
                "again"
            )
        if longest is not None and not 2 <= block[:, 2].min() <= block[:, 2].max() <= longest:
            raise DataFormatError(
                f"{path} has samples of {block[:, 2].min()} to {block[:, 2].max()} tokens where 2 "
                f"to {longest} have room: it was built for another data.seq_length; build it again"
            )
    return rows


def sequence_range(
    dataset: IndexedDataset, options: IndexOptions, split_name: str
) -> tuple[int, int]:
    """Return (first sequence, sequence after the last) of a split.

    Splits divide sequences, or, for samples of whole sentences, documents.
    """
    if options.sentences is None:
        return options.range_of(split_name, len(dataset))
    first, last = options.range_of(split_name, dataset.documents)
    return int(dataset.document_indices[first]), int(dataset.document_indices[last])


def sentences_of(options: IndexOptions) -> SentenceOptions:
    """Return the sentence options. Raises ConfigError if there are none."""
    if options.sentences is None:
        raise ConfigError("maps of sentences are built for bert or t5: say for which")
    return options.sentences


def _plan_splits(
    mixture: Mixture,
    options: IndexOptions,
    samples: Sequence[int | None],
    planned_before: int | None,
) -> dict[str, _Split]:
    sentences_of(options)
    check_agreement(mixture, options)
    datasets = {prefix: IndexedDataset(prefix) for prefix in mixture.prefixes}
    splits = {}
    for name, requested in zip(SPLIT_NAMES, samples, strict=True):
        if not check_requested(mixture, name, requested):
            continue
        before = planned_before if name == "train" else None
        division = divide(mixture, options.style, name, requested, before)
        parts = {}
        least = division.least or (0,) * len(division.asked)
        for member, member_samples, later in zip(
            mixture.of(name), division.asked, least, strict=True
        ):
            dataset = datasets[member.prefix]
            first, last = options.range_of(name, dataset.documents)
            parts[member.prefix] = SentencePart(
                dataset, first, last, 0 if requested == 0 else member_samples, later
            )
        if name == "train":
            sizes = (
                count_samples(replace(part, requested=None, least=0), options)[1]
                for part in parts.values()
            )
            check_epochs(mixture.of(name), division, requested, sizes)
        splits[name] = _Split(parts, division)
    return splits


def _arguments(part: SentencePart, options: IndexOptions) -> tuple[Any, ...]:
    """Return the arguments of the compiled functions."""
    sentences, dataset = sentences_of(options), part.dataset
    return (
        np.require(dataset.document_indices[part.first : part.last + 1], np.int64, ["C", "A"]),
        np.require(dataset.lengths, np.int32, ["C", "A"]),
        _ENDLESS * 2**31 if part.requested is None else part.requested,
        1 if part.requested is None else _ENDLESS,
        options.seq_length - sentences.special_tokens,
        sentences.short_seq_prob,
        sentences.minimum_sentences,
        options.seed,
    )


def _check_count(part: SentencePart, options: IndexOptions, samples: int) -> None:
    """Raise DataFormatError if samples are requested but there are none."""
    if samples or part.requested == 0:
        return
    if part.last <= part.first:
        raise DataFormatError(
            f"the split has 0 of {part.dataset.documents} documents of {part.dataset.prefix}: give "
            "it more of data.split, or use more text"
        )
    raise DataFormatError(
        f"none of the documents {part.first} … {part.last - 1} of {part.dataset.prefix} gives a "
        f"sample: one takes at least {sentences_of(options).minimum_sentences} sentences, none "
        "above 512 tokens (was the text split into sentences?)"
    )


def _write_map(
    part: SentencePart, options: IndexOptions, folder: Path, split_name: str
) -> dict[str, Any]:
    rows = build_sentence_map(part, options)
    save_array(map_path(folder, split_name, SENTENCE_MAP_NAME), rows)
    starts = part.dataset.document_indices
    first, last = int(starts[part.first]), int(starts[part.last])
    return {
        "documents": part.last - part.first,
        "sequences": last - first,
        "tokens": part.dataset.count_tokens(first, last),
        "samples": len(rows),
        "epochs": count_samples(part, options)[0],
    }
