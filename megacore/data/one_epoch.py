"""Single pass over a split, independent of the maps of the run, for measuring perplexities."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.artifact.files import save_array, workspace_errors
from megacore.config.run import RunConfig
from megacore.data.blend import build_exhaustive_blend
from megacore.data.build import MemberOpener, describe, open_split
from megacore.data.index_directory import (
    SENTENCE_MAP_NAME,
    IndexDescription,
    map_path,
    save_blend,
    save_maps,
)
from megacore.data.index_maps import build_split
from megacore.data.index_options import SPLIT_NAMES, Member, Mixture
from megacore.data.index_plans import MemberPlan, plan_splits
from megacore.data.samples import BlendedDataset, Dataset
from megacore.data.sentence_maps import SentencePart, build_sentence_map, sequence_range
from megacore.token_files.indexed_dataset import IndexedDataset

_SAMPLES = 1 << 16
"""Maximum number of samples of T5's training split whose labels are returned."""
_BATCH = 1 << 10


def one_epoch(
    token_prefixes: Sequence[str],
    index_directory: str | Path,
    split_name: str,
    config: RunConfig,
    scratch: Path,
    *,
    tokenizer_directory: str | Path,
) -> Dataset:
    """Return a data set with each sample of each member of a split exactly once.

    Samples of several members are mixed by the numbers of their samples, without weights, so that
    the first samples are of all members.

    Args:
        token_prefixes: token files without .bin/.idx, in the order of the index directory's
            members.
        index_directory: directory of the run's maps.
        split_name: "train", "valid" or "test".
        config: configuration of the run.
        scratch: existing directory for temporary maps, whose files are deleted before the return
            (they stay open as memory maps).
        tokenizer_directory: directory of the tokenizer that produced the tokens.

    Raises:
        ConfigError: if the vocabulary lacks special tokens of the samples.
        DataFormatError: if tokens or maps are missing or damaged, or a member is too small for one
            sample.
    """
    opener = MemberOpener.of(token_prefixes, index_directory, config, tokenizer_directory)
    description = opener.description
    # NFS keeps a deleted file that is still mapped as .nfs… in its folder, which then cannot be
    # removed. It stays until `scratch` is removed.
    temporary = tempfile.TemporaryDirectory(dir=scratch, ignore_cleanup_errors=True)
    with workspace_errors(scratch), temporary as directory:
        numbers = description.blends.get(split_name, ())
        members = []
        for number in numbers:
            folder = Path(directory, str(number))
            folder.mkdir()
            _build(token_prefixes[number], folder, split_name, description)
            # Open memory maps stay valid after the folder is deleted.
            members.append(opener.member(number, folder, split_name))
        if not members:
            return opener.empty()
        if len(members) == 1:
            return members[0]
        blend = build_exhaustive_blend([len(member) for member in members])
        save_blend(directory, split_name, blend)
        return BlendedDataset(members, directory, split_name, numbers)


def train_tokens(
    token_prefixes: Sequence[str],
    index_directory: str | Path,
    config: RunConfig,
    *,
    tokenizer_directory: str | Path,
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield (prefix, view of the tokens) for each member of the train split.

    For T5, whose labels contain sentinels and ends, yield labels of the first samples instead.
    Raises ConfigError, DataFormatError.
    """
    if config.family == "t5":
        yield from _train_labels(token_prefixes, index_directory, config, tokenizer_directory)
        return
    description = describe(token_prefixes, index_directory, config)
    for number in description.blends.get("train", ()):
        tokens = IndexedDataset(token_prefixes[number])
        first, last = sequence_range(tokens, description.options, "train")
        yield tokens.prefix, tokens.token_range(first, last)


def _train_labels(
    token_prefixes: Sequence[str],
    index_directory: str | Path,
    config: RunConfig,
    tokenizer_directory: str | Path,
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    samples = open_split(
        token_prefixes, index_directory, "train", config, tokenizer_directory=tokenizer_directory
    )
    count = min(len(samples), _SAMPLES)
    for start in range(0, count, _BATCH):
        labels = samples.gather(range(start, min(start + _BATCH, count)))[:, samples.seq_length :]
        yield token_prefixes[0], labels[labels >= 0]


def _build(prefix: str, folder: Path, split_name: str, description: IndexDescription) -> None:
    """Write the maps of one pass over a member into `folder`."""
    options = description.options
    tokens = IndexedDataset(prefix)
    if options.sentences is not None:
        first, last = options.range_of(split_name, tokens.documents)
        rows = build_sentence_map(SentencePart(tokens, first, last, None), options)
        save_array(map_path(folder, split_name, SENTENCE_MAP_NAME), rows)
        return
    plan = _plan(tokens, split_name, description)
    # the array in the file is not aligned
    lengths = np.require(tokens.lengths, np.int32, ["C", "A"])
    maps = build_split(lengths, plan.first, plan.last, plan.epochs, options)
    save_maps(maps, folder, split_name)


def _plan(tokens: IndexedDataset, split_name: str, description: IndexDescription) -> MemberPlan:
    members = (Member(tokens.prefix),)
    mixture = Mixture.blend(members)
    if description.options.split is None:
        mixture = Mixture.per_split(
            *(members if name == split_name else () for name in SPLIT_NAMES)
        )
    samples = [None if name == split_name else 0 for name in SPLIT_NAMES]
    return plan_splits({tokens.prefix: tokens}, mixture, description.options, samples)[
        split_name
    ].members[0]
