"""The options that decide the index maps.

How samples are cut and ordered, which sequences belong to the train, validation and test split, and
which token files each split draws from.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, Self

import numpy as np

from megacore.errors import ConfigError

SPLIT_NAMES = ("train", "valid", "test")
"""In the order of the weights."""
IndexStyle = Literal["megatron", "neox"]
Packing = Literal["packed", "pack_until_overflow", "unpacked"]
SentenceModel = Literal["bert", "t5"]
MAX_MEMBERS = 2**15 - 1
"""Data sets that the i16 numbers of a blend can tell apart."""


def parse_split(split: str) -> tuple[float, float, float]:
    """The normalised weights in "949,50,1"; missing ones are 0. Raises ConfigError."""
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
    split: str, count: int, style: Literal["megatron", "neox"] = "megatron"
) -> Mapping[str, tuple[int, int]]:
    """First and end element of each split when `count` elements are divided.

    The boundaries are the cumulative fractions times `count`, rounded half to even, as in Megatron
    core. With "neox" they are GPT-NeoX's: each fraction times `count` is rounded by itself, and
    what the sum is off by is taken from the train split. Raises ConfigError.
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
    """How samples of whole sentences are made. Raises ConfigError for values that cannot work."""

    kind: SentenceModel
    """Whose samples: they differ in how many special tokens they have."""
    minimum_sentences: int = 1
    """Of a sample: 2 where it is predicted how its two parts belong together."""
    short_seq_prob: float = 0.1
    """Share of samples with a shorter target length."""

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
        """Tokens that a sample has besides its sentences: [CLS] and two [SEP].

        Of T5 a begin and an end.
        """
        return 3 if self.kind == "bert" else 2


@dataclass(frozen=True)
class IndexOptions:
    """How the samples of a data set are cut and ordered, beside which tokens and how many samples.

    Raises ConfigError for values that cannot work, alone or together.
    """

    split: str | None
    """Weights of the train, validation and test split; None where each data set belongs to one
    split whole."""
    seq_length: int
    """Tokens per sample (s)."""
    seed: int
    """Of the shuffles, 0 … 2**32 - 1; each split of each data set starts from it."""
    style: IndexStyle = "megatron"
    """Megatron core's order, or GPT-NeoX's, which has no separate final epoch and rounds splits
    otherwise."""
    packing: Packing = "packed"
    """Samples cut from documents end to end, or of whole documents (see
    `megacore.data.index_plans`)."""
    add_extra_token: bool = True
    """Whether a sample reads one token beyond seq_length as its last label."""
    drop_last_partial: bool = True
    """Whether the validation split loses its last sample when that is shorter than the others.

    As in Megatron core, the train and the test split always lose theirs.
    """
    sentences: SentenceOptions | None = None
    """Of samples that are made of whole sentences; None: they are made of tokens."""

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
        """Family of the models that these samples are for."""
        return "gpt" if self.sentences is None else self.sentences.kind

    @property
    def extra(self) -> int:
        """Tokens that a sample reads beyond seq_length."""
        return int(self.add_extra_token)

    def keeps_partial(self, split_name: str) -> bool:
        """Whether a last shorter sample of the split counts."""
        return split_name == "valid" and not self.drop_last_partial and self.packing == "packed"

    def _check_neox(self) -> None:
        """GPT-NeoX orders packed samples otherwise, and lacks the other two options."""
        wrong = {
            f"data.packing {self.packing}": self.packing != "packed",
            "data.add_extra_token false": not self.add_extra_token,
            "data.drop_last_partial false": not self.drop_last_partial,
        }
        for name, given in wrong.items():
            if given:
                raise ConfigError(
                    f"data.index_style neox reproduces GPT-NeoX's order of samples, which {name} "
                    "does not have: leave that at its default, or set data.index_style to megatron"
                )

    def _check_sentences(self, sentences: SentenceOptions) -> None:
        plain = IndexOptions(split=self.split, seq_length=self.seq_length, seed=self.seed)
        if replace(self, sentences=None) != plain:
            raise ConfigError(
                "data.index_style, data.packing, data.add_extra_token and data.drop_last_partial "
                f"are of samples of tokens, which those of {sentences.kind} are not: leave them at "
                "their defaults"
            )
        if self.seq_length < sentences.special_tokens + 2:
            raise ConfigError(
                f"data.seq_length is {self.seq_length}: a sample of {sentences.kind} has "
                f"{sentences.special_tokens} special tokens and at least 2 others"
            )


@dataclass(frozen=True)
class Member:
    """Token files that a split draws from."""

    prefix: str
    """Path of the pair of token files without .bin/.idx."""
    weight: float | None = None
    """Share of the samples; None in all members of a split means: each of their samples once."""


@dataclass(frozen=True)
class Mixture:
    """Which token files each split draws from.

    Raises ConfigError for weights and members that cannot work.
    """

    train: tuple[Member, ...]
    """What training draws from."""
    valid: tuple[Member, ...]
    """What validation draws from."""
    test: tuple[Member, ...]
    """What the test draws from."""
    whole: bool
    """Whether each split has members of its own, taken whole; else all have the same, divided by
    the split weights."""

    def __post_init__(self) -> None:
        if not self.whole and not self.train == self.valid == self.test:
            raise ConfigError(
                "the splits have different data sets: these cannot also be divided by data.split"
            )
        if not any(self.of(name) for name in SPLIT_NAMES):
            raise ConfigError("no split has a data set: name at least one")
        for name in SPLIT_NAMES:
            _check_members(self.of(name), name if self.whole else "data")

    @classmethod
    def single(cls, prefix: str) -> Self:
        """One data set, divided by the split weights."""
        return cls.blend((Member(prefix),))

    @classmethod
    def blend(cls, members: Sequence[Member]) -> Self:
        """Several data sets, each divided by the split weights."""
        return cls(tuple(members), tuple(members), tuple(members), whole=False)

    @classmethod
    def per_split(
        cls, train: Sequence[Member], valid: Sequence[Member], test: Sequence[Member]
    ) -> Self:
        """Data sets that belong to one split each; a split may have none."""
        return cls(tuple(train), tuple(valid), tuple(test), whole=True)

    def of(self, split_name: str) -> tuple[Member, ...]:
        """What a split draws from, in the order that its blend numbers them."""
        members: tuple[Member, ...] = getattr(self, split_name)
        return members

    @property
    def is_single(self) -> bool:
        """Whether there is one data set for all splits and nothing to blend."""
        return not self.whole and len(self.train) == 1 and self.train[0].weight is None

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Every pair of token files once, in the order in which it is first named."""
        return tuple(
            dict.fromkeys(member.prefix for name in SPLIT_NAMES for member in self.of(name))
        )


def _check_members(members: Sequence[Member], where: str) -> None:
    weights = [member.weight for member in members if member.weight is not None]
    if 0 < len(weights) < len(members):
        bare = next(member.prefix for member in members if member.weight is None)
        raise ConfigError(
            f"the {where} blend gives {bare} no weight but others one: weight all of them or none"
        )
    for member in members:
        if member.weight is not None and not 0 < member.weight < math.inf:
            raise ConfigError(
                f"the {where} blend gives {member.prefix} the weight {member.weight}: weights are "
                "positive numbers; leave out what should not be drawn from"
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


def parse_members(values: Sequence[str], option: str) -> tuple[Member, ...]:
    """The members that a command line names.

    Forms: PREFIX, or PREFIX PREFIX …, or WEIGHT PREFIX WEIGHT PREFIX ….

    Raises ConfigError for weights and prefixes that do not take turns; `option` names where they
    stand.
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
