"""Options that determine the index maps.

They define the division and order of samples, the train, validation and test splits, and the token
files that each split draws from.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, Self

import numpy as np

from megacore.config.base import as_yaml
from megacore.config.data import (
    MASKED_LM_SPECIAL_TOKENS,
    NEOX_DEFAULTS,
    T5_SPECIAL_TOKENS,
    IndexStyle,
    Packing,
)
from megacore.errors import ConfigError

SPLIT_NAMES = ("train", "valid", "test")
"""Names of the splits in the order of the weights."""
SentenceModel = Literal["bert", "t5"]
MAX_MEMBERS = 2**15 - 1
"""Maximum number of data sets of a blend, which numbers them with an i16."""


def parse_split(split: str) -> tuple[float, float, float]:
    """Parse weights such as "949,50,1" and normalize them; missing ones are 0.

    Raises ConfigError.
    """
    try:
        weights = [float(part) for part in split.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"data.split is {split!r}: give up to three numbers, as in 949,50,1"
        ) from error
    if (
        len(weights) > 3
        or any(not math.isfinite(weight) or weight < 0 for weight in weights)
        or sum(weights) <= 0
    ):
        raise ConfigError(
            f"data.split is {split!r}: give up to three weights for train, validation and test, "
            "none of them negative and not all of them 0, as in 949,50,1"
        )
    train, valid, test = np.asarray([*weights, 0.0, 0.0][:3]) / np.sum(weights)
    return float(train), float(valid), float(test)


def split_ranges(
    split: str, count: int, style: IndexStyle = "megatron"
) -> Mapping[str, tuple[int, int]]:
    """Return the first and end element of each split when `count` elements are divided.

    The boundaries are the cumulative fractions times `count`, rounded half to even, as in Megatron
    core. With "neox" they are GPT-NeoX's: each fraction times `count` is rounded separately, and
    the excess of the sum is subtracted from the train split. Raises ConfigError.
    """
    fractions = parse_split(split)
    if style == "neox":
        bounds = [0, *accumulate(round(fraction * float(count)) for fraction in fractions)]
        excess = bounds[-1] - count
        bounds = [0, *(bound - excess for bound in bounds[1:])]
        if bounds[1] < 0:
            raise ConfigError(
                f"data.split {split} leaves the train split {bounds[1]} of {count} sequences"
            )
    else:
        bounds = [round(fraction * float(count)) for fraction in accumulate(fractions, initial=0.0)]
    return {name: (bounds[i], bounds[i + 1]) for i, name in enumerate(SPLIT_NAMES)}


@dataclass(frozen=True)
class SentenceOptions:
    """Options of samples of whole sentences. Raises ConfigError for invalid values."""

    kind: SentenceModel
    """Model family, which determines the number of special tokens."""
    minimum_sentences: int = 1
    """Minimum number of sentences of a sample: 2 if the relation of its two segments is
    predicted."""
    short_seq_prob: float = 0.1
    """Fraction of samples with a shorter target length."""

    def __post_init__(self) -> None:
        if self.kind not in ("bert", "t5") or self.minimum_sentences not in (1, 2):
            raise ConfigError(
                "maps of sentences are for bert or t5 and take 1 or 2 sentences at least, not "
                f"{self.kind} with {self.minimum_sentences}"
            )
        if not 0 <= self.short_seq_prob <= 1 or 0 < self.short_seq_prob < 1e-6:
            raise ConfigError(f"short_seq_prob is {self.short_seq_prob}: give 0, or 0.000001 … 1")

    @property
    def special_tokens(self) -> int:
        """Number of special tokens of a sample."""
        return MASKED_LM_SPECIAL_TOKENS if self.kind == "bert" else T5_SPECIAL_TOKENS


@dataclass(frozen=True)
class IndexOptions:
    """Options for dividing a data set into samples and ordering them.

    Raises ConfigError for invalid values and combinations.
    """

    split: str | None
    """Weights of the train, validation and test split; None if each data set belongs to a single
    split."""
    seq_length: int
    """Number of tokens per sample (s)."""
    seed: int
    """Seed of the shuffles, 0 … 2**32 - 1; each split of each data set starts from it."""
    style: IndexStyle = "megatron"
    """Order of Megatron core, or of GPT-NeoX, which has no separate final epoch and rounds splits
    differently."""
    packing: Packing = "packed"
    """Samples cut from concatenated documents, or samples of whole documents (see
    `megacore.data.index_plans`)."""
    add_extra_token: bool = True
    """True if a sample reads one token beyond seq_length as its last label."""
    drop_last_partial: bool = True
    """True to drop the last sample of the validation split if it is shorter than the others.

    As in Megatron core, the train and the test split always drop it.
    """
    sentences: SentenceOptions | None = None
    """Options of samples of whole sentences; None for samples of tokens."""

    def __post_init__(self) -> None:
        if self.seq_length < 1:
            raise ConfigError(
                f"data.seq_length is {self.seq_length}: a sample has at least one token"
            )
        if not 0 <= self.seed < 2**32:
            raise ConfigError(
                f"the seed of the shuffles is {self.seed}: give one of 0 … {2**32 - 1}"
            )
        if self.style == "neox":
            self._check_neox()
        if self.sentences is not None:
            self._check_sentences(self.sentences)

    @property
    def kind(self) -> str:
        """Model family for which the samples are built."""
        return "gpt" if self.sentences is None else self.sentences.kind

    @property
    def extra(self) -> int:
        """Number of tokens that a sample reads beyond seq_length, 0 or 1."""
        return int(self.add_extra_token)

    def range_of(self, split_name: str, count: int) -> tuple[int, int]:
        """Return the first and end element of a split, if a data set has `count` elements."""
        if self.split is None:
            return 0, count
        return split_ranges(self.split, count, self.style)[split_name]

    def keeps_partial(self, split_name: str) -> bool:
        """Return True if the split keeps a last, shorter sample."""
        return split_name == "valid" and not self.drop_last_partial and self.packing == "packed"

    def _check_neox(self) -> None:
        """Raise ConfigError for options that GPT-NeoX's order of samples does not support."""
        for name in NEOX_DEFAULTS:
            value = getattr(self, name)
            if value != getattr(IndexOptions, name):
                raise ConfigError(
                    "data.index_style neox reproduces GPT-NeoX's order of samples, which "
                    f"data.{name} {as_yaml(value)} does not have: leave that at its default, "
                    "or set data.index_style to megatron"
                )

    def _check_sentences(self, sentences: SentenceOptions) -> None:
        plain = IndexOptions(split=self.split, seq_length=self.seq_length, seed=self.seed)
        if replace(self, sentences=None) != plain:
            raise ConfigError(
                "data.index_style, data.packing, data.add_extra_token and data.drop_last_partial "
                f"are for samples of tokens, which those of {sentences.kind} are not: leave them "
                "at their defaults"
            )
        if self.seq_length < sentences.special_tokens + 2:
            raise ConfigError(
                f"data.seq_length is {self.seq_length}: a sample of {sentences.kind} has "
                f"{sentences.special_tokens} special tokens and at least 2 others"
            )


@dataclass(frozen=True)
class Member:
    """Token files that a split draws from, with their weight."""

    prefix: str
    """Path of the pair of token files without .bin/.idx."""
    weight: float | None = None
    """Share of the samples; None (for all members of a split) to use each of their samples once."""
    max_epochs: float | None = None
    """Epochs of the member in the train split above which a plan is refused; None for no limit."""


@dataclass(frozen=True)
class WeightStep:
    """Change of the weights of the train split."""

    samples: int
    """Sample of the blend from which the weights apply, more than 0."""
    weights: tuple[float, ...]
    """Weight of each member in the order of the blend; 0 to draw nothing from it."""


@dataclass(frozen=True)
class Mixture:
    """Token files that each split draws from.

    Raises ConfigError for invalid weights and members.
    """

    train: tuple[Member, ...]
    """Members of the train split."""
    valid: tuple[Member, ...]
    """Members of the validation split."""
    test: tuple[Member, ...]
    """Members of the test split."""
    whole: bool
    """True if each split has separate members, used completely; False if all splits have the same
    members, divided by the split weights."""
    steps: tuple[WeightStep, ...] = ()
    """Later weights of the train split, in ascending order of their samples."""

    def __post_init__(self) -> None:
        if not self.whole and not self.train == self.valid == self.test:
            raise ConfigError(
                "the splits have different data sets: these cannot also be divided by data.split"
            )
        if not any(self.of(name) for name in SPLIT_NAMES):
            raise ConfigError("no split has a data set: name at least one")
        for name in SPLIT_NAMES:
            later = self.steps if name == "train" or not self.whole else ()
            _check_members(self.of(name), name if self.whole else "data", later)
        _check_steps(self.steps, len(self.train))

    @classmethod
    def single(cls, prefix: str) -> Self:
        """Return a mixture of one data set, divided by the split weights."""
        return cls.blend((Member(prefix),))

    @classmethod
    def blend(cls, members: Sequence[Member], steps: Sequence[WeightStep] = ()) -> Self:
        """Return a mixture of several data sets, each divided by the split weights."""
        return cls(tuple(members), tuple(members), tuple(members), whole=False, steps=tuple(steps))

    @classmethod
    def per_split(
        cls,
        train: Sequence[Member],
        valid: Sequence[Member],
        test: Sequence[Member],
        *,
        steps: Sequence[WeightStep] = (),
    ) -> Self:
        """Return a mixture of data sets that belong to one split each; a split may have none."""
        return cls(tuple(train), tuple(valid), tuple(test), whole=True, steps=tuple(steps))

    def of(self, split_name: str) -> tuple[Member, ...]:
        """Return the members of a split, in the order in which its blend numbers them."""
        members: tuple[Member, ...] = getattr(self, split_name)
        return members

    def steps_before(self, samples: int) -> tuple[WeightStep, ...]:
        """Return the steps that begin within the first `samples` samples of the train split."""
        return tuple(step for step in self.steps if step.samples < samples)

    @property
    def is_single(self) -> bool:
        """True if there is one data set for all splits and nothing to blend."""
        return not self.whole and len(self.train) == 1 and self.train[0].weight is None

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Prefixes of all token files, without repetition, in order of first occurrence."""
        return tuple(
            dict.fromkeys(member.prefix for name in SPLIT_NAMES for member in self.of(name))
        )


def _check_members(members: Sequence[Member], where: str, steps: Sequence[WeightStep]) -> None:
    weights = [member.weight for member in members if member.weight is not None]
    if 0 < len(weights) < len(members):
        first = next(member.prefix for member in members if member.weight is None)
        raise ConfigError(
            f"the {where} blend gives {first} no weight but others one: weight all of them or none"
        )
    for number, member in enumerate(members):
        later = any(any(step.weights[number : number + 1]) for step in steps)
        if member.weight is not None and not (
            0 < member.weight < math.inf or (member.weight == 0 and later)
        ):
            raise ConfigError(
                f"the {where} blend gives {member.prefix} the weight {member.weight}: weights are "
                "positive numbers; leave out what should not be drawn from"
            )
    if weights and not sum(weights):
        raise ConfigError(
            f"the {where} blend gives all members the weight 0: give one of them a positive weight"
        )
    if len(members) > MAX_MEMBERS:
        raise ConfigError(
            f"the {where} blend has {len(members)} data sets; {MAX_MEMBERS} can be numbered: merge "
            "some"
        )
    prefix, times = (
        Counter(member.prefix for member in members).most_common(1)[0] if members else ("", 0)
    )
    if times > 1:
        raise ConfigError(
            f"the {where} blend names {prefix} {times} times: name it once, with the sum of the "
            "weights"
        )


def _check_steps(steps: Sequence[WeightStep], members: int) -> None:
    previous = 0
    for step in steps:
        if step.samples <= previous:
            raise ConfigError(
                f"the weights change at sample {step.samples} after sample {previous}: give the "
                "changes in ascending order, the first after sample 0"
            )
        finite = all(0 <= weight < math.inf for weight in step.weights)
        if len(step.weights) != members or not finite or not sum(step.weights):
            raise ConfigError(
                f"the weights from sample {step.samples} on are {list(step.weights)} for {members} "
                "data sets: give each a number from 0 on, not all of them 0"
            )
        previous = step.samples


def parse_members(values: Sequence[str], option: str) -> tuple[Member, ...]:
    """Parse the members on a command line.

    Forms: PREFIX, or PREFIX PREFIX …, or WEIGHT PREFIX WEIGHT PREFIX ….

    `option` is the name of the option in error messages. Raises ConfigError if weights and prefixes
    do not alternate.
    """
    numbers = [_number(value) for value in values]
    if all(number is None for number in numbers):
        return tuple(Member(value) for value in values)
    weights, prefixes = numbers[::2], values[1::2]
    if len(values) % 2 or None in weights or any(number is not None for number in numbers[1::2]):
        raise ConfigError(
            f"{option} {' '.join(values)}: give a weight before each prefix, or no weight at all "
            "(a prefix that looks like a number is written ./NUMBER)"
        )
    return tuple(Member(prefix, weight) for prefix, weight in zip(prefixes, weights, strict=True))


def _number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None
