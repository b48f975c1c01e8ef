"""Table of `megacore inspect mixture`: samples, tokens and epochs of each source by step.

From a directory of index maps the samples are counted. From a configuration they follow from the
weights, and epochs are known of token files that exist.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megacore.artifact.manifest import MANIFEST_NAME, Manifest
from megacore.config.batch_schedule import BatchSchedule
from megacore.config.blend_schedule import blend_steps, source_names
from megacore.config.data import PrefixSource
from megacore.config.run import RunConfig
from megacore.data.blend import Phase, phases, shares, temperature_weights
from megacore.data.index_directory import BLEND_MAP_NAMES, load_map, map_path
from megacore.data.index_options import SPLIT_NAMES, IndexOptions, WeightStep
from megacore.data.sentence_maps import sequence_range
from megacore.errors import ConfigError, DataFormatError
from megacore.inspect.index import describe_index
from megacore.paths import exists
from megacore.token_files.indexed_dataset import IndexedDataset

_PIECE = 1 << 22
"""Number of samples that are counted at a time."""
JsonReport = dict[str, Any]


def mixture_of_index(directory: Path) -> JsonReport:
    """Return the mixture of the train split in a directory of index maps.

    Raises DataFormatError.
    """
    index = describe_index(directory)
    numbers = index.blends.get("train", ())
    if index.single or not numbers:
        raise DataFormatError(
            f"{directory} has no blend in its train split, so there is no mixture: give index maps "
            "of several weighted sources"
        )
    members = [index.members[number] for number in numbers]
    dataset_index = load_map(map_path(directory, "train", BLEND_MAP_NAMES[0]))
    tokens = [_train_tokens(IndexedDataset(each.prefix), index.options) for each in members]
    weights = [weight for each in members if (weight := each.weights.get("train")) is not None]
    # Without weights, each sample is used once.
    weights = weights or _count(dataset_index, len(members))
    parts = phases(weights, index.steps, len(dataset_index))
    drawn = [_count(dataset_index[part.start : part.stop], len(members)) for part in parts]
    epoch_samples: list[float | None]
    if index.options.sentences is None and index.options.packing == "packed":
        epoch_samples = [count / index.options.seq_length for count in tokens]
    else:
        epoch_samples = _counted_epochs(directory, len(members))
    names = [f"{place}-{Path(member.prefix).name}" for place, member in enumerate(members)]
    return _report(
        str(directory), names, parts, drawn, epoch_samples, index.options.seq_length, tokens
    )


def _train_tokens(dataset: IndexedDataset, options: IndexOptions) -> int:
    """Return the tokens of a data set's train split."""
    return dataset.count_tokens(*sequence_range(dataset, options, SPLIT_NAMES[0]))


def _counted_epochs(directory: Path, members: int) -> list[float | None]:
    """Return the samples of an epoch of each member, None where no manifest counts them."""
    if not exists(directory / MANIFEST_NAME):
        return [None] * members
    entries = Manifest.read(directory).counts["train"]["members"]
    return [entry["samples"] / max(1, entry["epochs"]) for entry in entries]


def mixture_of_config(config: RunConfig) -> JsonReport:
    """Return the mixture that a configuration asks for. Raises ConfigError, DataFormatError."""
    data = config.data
    members = data.train_blend
    if not members:
        raise ConfigError(
            f"{config.name} has a single data.source, so there is no mixture: give data.blend"
        )
    prefixes = [
        member.source.prefix if isinstance(member.source, PrefixSource) else None
        for member in members
    ]
    tokens = [None if prefix is None else _tokens(prefix) for prefix in prefixes]
    weights = [member.weight or 0.0 for member in members]
    if data.blend_temperature is not None:
        if any(count is None for count in tokens):
            raise ConfigError(
                f"data.blend_temperature of {config.name} needs the tokens of each source, which "
                "are known only of kind prefix: run prepare-data, and give the directory of the "
                "index maps"
            )
        weights = list(
            temperature_weights([max(1, count or 0) for count in tokens], data.blend_temperature)
        )
    samples = BatchSchedule.of(config.train).consumed_after(config.train.train_iters)
    steps = tuple(WeightStep(*step) for step in blend_steps(data))
    parts = phases(weights, steps, samples)
    drawn = [[share * (part.stop - part.start) for share in part.shares] for part in parts]
    share = 1.0
    if data.split_blends is None:
        share = shares([float(part) for part in data.split_weights.split(",")])[0]
    by_tokens = config.family == "gpt" and data.packing == "packed"
    epoch_samples = [
        count * share / data.seq_length if by_tokens and count is not None else None
        for count in tokens
    ]
    by_source = dict(zip(data.sources, source_names(data), strict=True))
    return _report(
        config.name,
        [by_source[member.source] for member in members],
        parts,
        drawn,
        epoch_samples,
        data.seq_length,
        [None if count is None else round(share * count) for count in tokens],
    )


def _tokens(prefix: str) -> int:
    dataset = IndexedDataset(prefix)
    return dataset.count_tokens(0, len(dataset))


def _count(numbers: Any, members: int) -> list[float]:
    counts = np.zeros(members, np.int64)
    for start in range(0, len(numbers), _PIECE):
        counts += np.bincount(numbers[start : start + _PIECE], minlength=members)
    return [float(count) for count in counts]


def _report(
    of: str,
    names: Sequence[str],
    parts: Sequence[Phase],
    drawn: Sequence[Sequence[float]],
    epoch_samples: Sequence[float | None],
    seq_length: int,
    tokens: Sequence[int | None],
) -> JsonReport:
    """Return the report: for each step its samples and, for each source, share and epochs."""
    given = [0.0] * len(names)
    steps = []
    for part, counts in zip(parts, drawn, strict=True):
        given = [before + count for before, count in zip(given, counts, strict=True)]
        sources = [
            {
                "source": name,
                "weight": share,
                "samples": round(count),
                "tokens": round(count * seq_length),
                "epochs": None if not size else count / size,
                "epochs_so_far": None if not size else total / size,
            }
            for name, share, count, total, size in zip(
                names, part.shares, counts, given, epoch_samples, strict=True
            )
        ]
        steps.append(
            {"first_sample": part.start, "samples": part.stop - part.start}
            | {
                "tokens": (part.stop - part.start) * seq_length,
                "sources": sources,
            }
        )
    return {
        "of": of,
        "seq_length": seq_length,
        "source_tokens": dict(zip(names, tokens, strict=True)),
        "steps": steps,
    }
