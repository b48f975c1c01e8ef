"""Opening of the samples of a split: of one data set, a blend, or several concatenated."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.config.data import DataConfig
from megacore.config.model import Family, ModelConfig
from megacore.config.run import RunConfig
from megacore.data.gpt_dataset import GPTDataset
from megacore.data.index_directory import IndexDescription, member_directory, read_description
from megacore.data.index_options import SentenceOptions
from megacore.data.samples import BlendedDataset, Dataset, EmptyDataset, MemberDataset
from megacore.errors import DataFormatError

if TYPE_CHECKING:
    from megacore.tokenizer.vocabulary import Vocabulary


def open_split(
    token_prefixes: Sequence[str],
    index_directory: str | Path,
    split_name: str,
    config: RunConfig,
    *,
    tokenizer_directory: str | Path,
) -> Dataset:
    """Open the samples of a split in the order in which they are read.

    Fill-in-the-middle, if configured, is applied to the train split.

    Args:
        token_prefixes: token files without .bin/.idx, in the order of the index directory's
            members.
        index_directory: directory of the maps.
        split_name: "train", "valid" or "test".
        config: configuration of the run: model family, seed, and options of samples.
        tokenizer_directory: directory of the tokenizer that produced the tokens; needed for
            fill-in-the-middle and samples of sentences.

    Raises:
        ConfigError: if the vocabulary lacks special tokens of the samples.
        DataFormatError: if tokens or maps are missing, damaged, or do not belong together.
    """
    opener = MemberOpener.of(token_prefixes, index_directory, config, tokenizer_directory)
    dataset = opener.split(index_directory, split_name)
    if config.data.fim is None or split_name != "train":
        return dataset
    from megacore.data.fim import FimDataset
    from megacore.tokenizer import load_tokenizer

    capacity = config.data.seq_length + opener.description.options.extra
    tokenizer = load_tokenizer(tokenizer_directory)
    return FimDataset(dataset, tokenizer, config.data.fim, seed=config.seed, capacity=capacity)


def describe(
    token_prefixes: Sequence[str], index_directory: str | Path, config: RunConfig
) -> IndexDescription:
    """Read `index.json` and check that it matches the token files and the configuration.

    Raises DataFormatError.
    """
    description = read_description(index_directory)
    if len(token_prefixes) != len(description.members):
        raise DataFormatError(
            f"{index_directory} was built for {len(description.members)} pairs of token files, not "
            f"for {len(token_prefixes)} ({', '.join(token_prefixes)}): build the index maps again"
        )
    options, data = description.options, config.data
    if options.kind != config.family:
        raise DataFormatError(
            f"{index_directory} was built for family {options.kind}, not {config.family}: build "
            "the index maps again"
        )
    names = ("seq_length", "packing", "add_extra_token")
    pairs = {f"data.{name}": (getattr(options, name), getattr(data, name)) for name in names}
    expected = sentence_options(config.family, config.model, data)
    if options.sentences is not None and expected is not None:
        for name in ("minimum_sentences", "short_seq_prob"):
            pairs[name] = getattr(options.sentences, name), getattr(expected, name)
    for name, (built, value) in pairs.items():
        if built != value:
            raise DataFormatError(
                f"{index_directory} was built for {name} {built}, not {value}: build the index "
                "maps again"
            )
    return description


def sentence_options(
    family: Family, model: ModelConfig, data: DataConfig
) -> SentenceOptions | None:
    """Return the sentence options of a run, or None if its samples are made of tokens."""
    match family:
        case "bert":
            minimum = 2 if model.bert_binary_head else 1
            return SentenceOptions("bert", minimum, data.masked_lm.short_seq_prob)
        case "t5":
            return SentenceOptions("t5", 1, data.span_corruption.short_seq_prob)
        case _:
            return None


@dataclass(frozen=True)
class MemberOpener:
    """Factory of the data sets of a run, each of one pair of token files."""

    token_prefixes: Sequence[str]
    """Prefixes of the token files in the order of the members."""
    config: RunConfig
    """Configuration of the run."""
    description: IndexDescription
    """Description of the run's maps."""
    vocabulary: "Vocabulary | None"
    """Vocabulary for samples of sentences; None for samples of tokens."""

    @classmethod
    def of(
        cls,
        token_prefixes: Sequence[str],
        index_directory: str | Path,
        config: RunConfig,
        tokenizer_directory: str | Path,
    ) -> "MemberOpener":
        """Create an opener for the maps in `index_directory`.

        Raises ConfigError, DataFormatError.
        """
        description = describe(token_prefixes, index_directory, config)
        vocabulary = None
        if config.family != "gpt":
            from megacore.tokenizer.vocabulary import Vocabulary

            vocabulary = Vocabulary.load(tokenizer_directory, config.family, config.data)
        return cls(token_prefixes, config, description, vocabulary)

    def split(self, index_directory: str | Path, split_name: str) -> Dataset:
        """Open all members of a split with the maps in `index_directory`.

        Raises DataFormatError.
        """
        if self.description.single:
            return self.member(0, index_directory, split_name)
        numbers = self.description.blends.get(split_name, ())
        if not numbers:  # the split has no data sets
            return self.empty()
        members = [
            self.member(number, member_directory(index_directory, number), split_name)
            for number in numbers
        ]
        return BlendedDataset(members, index_directory, split_name, numbers)

    def empty(self) -> Dataset:
        """Return the data set of a split without members."""
        return EmptyDataset(self.config.data.seq_length, self.config.row_width)

    def member(self, number: int, directory: str | Path, split_name: str) -> MemberDataset:
        """Open a split of one pair of token files with the maps in `directory`.

        Raises DataFormatError.
        """
        prefix, data = self.token_prefixes[number], self.config.data
        if self.vocabulary is None:
            options = self.description.options
            return GPTDataset(
                prefix,
                directory,
                split_name,
                options.seq_length,
                packing=options.packing,
                add_extra_token=options.add_extra_token,
                keeps_partial=options.keeps_partial(split_name),
            )
        from megacore.data.sentence_dataset import MaskedLmDataset, T5Dataset

        if self.config.family == "bert":
            return MaskedLmDataset(
                prefix,
                directory,
                split_name,
                seq_length=data.seq_length,
                vocabulary=self.vocabulary,
                config=data.masked_lm,
                seed=self.config.seed,
                binary_head=self.config.model.bert_binary_head,
            )
        return T5Dataset(
            prefix,
            directory,
            split_name,
            seq_length=data.seq_length,
            vocabulary=self.vocabulary,
            config=data.span_corruption,
            seed=self.config.seed,
        )
