"""Opens the samples of a split, whatever the index directory holds: one data set, a blend, or several as a whole."""

from collections.abc import Sequence
from pathlib import Path

from megacore.config.data import DataConfig
from megacore.data.blended import BlendedDataset, ConcatDataset
from megacore.data.gpt_dataset import GPTDataset
from megacore.data.index_directory import IndexDescription, member_directory, read_description
from megacore.data.samples import Dataset
from megacore.errors import DataFormatError


def open_split(
    token_prefixes: Sequence[str],
    index_directory: str | Path,
    split_name: str,
    config: DataConfig,
    *,
    seed: int,
    tokenizer_directory: str | Path,
) -> Dataset:
    """The samples of a split in the order in which they are read, the training split's with fill-in-the-middle.

    Args:
        token_prefixes: token files without .bin/.idx, in the order of the index directory's members.
        index_directory: where the maps are.
        split_name: "train", "valid" or "test".
        config: how samples are made.
        seed: of the run.
        tokenizer_directory: of the tokenizer that the tokens were made with; fill-in-the-middle reads it.

    Raises:
        ConfigError: fill-in-the-middle has no special tokens in this vocabulary.
        DataFormatError: tokens or maps are missing, damaged, or do not belong together.
    """
    description = describe(token_prefixes, index_directory, config)
    dataset = _open(token_prefixes, index_directory, split_name, description)
    if config.fim is None or split_name != "train":
        return dataset
    from megacore.data.fim import FimDataset
    from megacore.tokenizer import load_tokenizer

    capacity = config.seq_length + description.options.extra
    return FimDataset(dataset, load_tokenizer(tokenizer_directory), config.fim, seed=seed, capacity=capacity)


def describe(token_prefixes: Sequence[str], index_directory: str | Path, config: DataConfig) -> IndexDescription:
    """What the index directory holds, for these tokens and this configuration. Raises DataFormatError."""
    description = read_description(index_directory)
    if len(token_prefixes) != len(description.members):
        raise DataFormatError(
            f"{index_directory} was built for {len(description.members)} pairs of token files, not for "
            f"{len(token_prefixes)} ({', '.join(token_prefixes)}): build the index maps again"
        )
    options = description.options
    for name in ("seq_length", "packing", "add_extra_token"):
        built, wanted = getattr(options, name), getattr(config, name)
        if built != wanted:
            raise DataFormatError(
                f"{index_directory} was built for data.{name} {built}, not {wanted}: build the index maps again"
            )
    return description


def open_member(
    prefix: str | Path, directory: str | Path, split_name: str, description: IndexDescription
) -> GPTDataset:
    """A split of one pair of token files, whose maps are in `directory`. Raises DataFormatError."""
    options = description.options
    return GPTDataset(
        prefix,
        directory,
        split_name,
        options.seq_length,
        packing=options.packing,
        add_extra_token=options.add_extra_token,
        keeps_partial=options.keeps_partial(split_name),
    )


def _open(
    token_prefixes: Sequence[str], index_directory: str | Path, split_name: str, description: IndexDescription
) -> Dataset:
    if description.single:
        return open_member(token_prefixes[0], index_directory, split_name, description)
    numbers = description.blends.get(split_name, ())
    if not numbers:  # the split has no data sets
        return ConcatDataset((), description.options.seq_length)
    members = [
        open_member(token_prefixes[number], member_directory(index_directory, number), split_name, description)
        for number in numbers
    ]
    return BlendedDataset(members, index_directory, split_name, description.options.seq_length)
