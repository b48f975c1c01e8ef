"""Tests of the options and mixtures of index maps."""

import pytest

from megacore.data.index_options import (
    MAX_MEMBERS,
    IndexOptions,
    Member,
    Mixture,
    SentenceOptions,
    parse_members,
)
from megacore.errors import ConfigError


def options(**changes: object) -> IndexOptions:
    return IndexOptions(**{"split": "8,1,1", "seq_length": 10, "seed": 1} | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_length": 0}, "data.seq_length is 0"),
        ({"seed": -1}, "the seed of the shuffles is -1"),
        ({"seed": 2**32}, "the seed of the shuffles is 4294967296"),
        ({"style": "neox", "packing": "unpacked"}, "data.packing unpacked"),
        ({"style": "neox", "add_extra_token": False}, "data.add_extra_token false"),
        ({"style": "neox", "drop_last_partial": False}, "data.drop_last_partial false"),
    ],
)
def test_invalid_options_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(**changes)


def test_only_the_valid_split_keeps_a_partial_sample() -> None:
    keeping = options(drop_last_partial=False)
    assert [name for name in ("train", "valid", "test") if keeping.keeps_partial(name)] == ["valid"]
    assert not options().keeps_partial("valid")


def test_extra_is_one_only_with_an_extra_token() -> None:
    assert (options().extra, options(add_extra_token=False).extra) == (1, 0)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1.0, -2.0), "gives b the weight -2.0"),
        ((0.0, 1.0), "gives a the weight 0.0"),
        ((1.0, float("nan")), "gives b the weight nan"),
        ((1.0, float("inf")), "gives b the weight inf"),
        ((1.0, None), "gives b no weight but others one"),
    ],
)
def test_invalid_weights_are_refused(weights: tuple, message: str) -> None:
    members = [Member(prefix, weight) for prefix, weight in zip("ab", weights, strict=True)]
    with pytest.raises(ConfigError, match=f"the data blend {message}"):
        Mixture.blend(members)
    with pytest.raises(ConfigError, match=f"the valid blend {message}"):
        Mixture.per_split([Member("c")], members, [])


def test_invalid_members_are_refused() -> None:
    with pytest.raises(ConfigError, match="the train blend names a 2 times"):
        Mixture.per_split([Member("a"), Member("b"), Member("a")], [], [])
    with pytest.raises(ConfigError, match="has 32768 data sets; 32767 can be numbered"):
        Mixture.blend([Member(str(number)) for number in range(MAX_MEMBERS + 1)])
    with pytest.raises(ConfigError, match="no split has a data set"):
        Mixture.per_split([], [], [])
    with pytest.raises(ConfigError, match="cannot also be divided"):
        Mixture((Member("a"),), (Member("b"),), (), whole=False)


def test_only_one_data_set_without_weight_is_single() -> None:
    assert Mixture.single("a").is_single
    assert Mixture.blend([Member("a")]).is_single
    assert not Mixture.blend([Member("a", 1.0)]).is_single
    assert not Mixture.blend([Member("a"), Member("b")]).is_single
    assert not Mixture.per_split([Member("a")], [], []).is_single


def test_prefixes_are_in_the_order_of_their_first_occurrence() -> None:
    mixture = Mixture.per_split(
        [Member("c"), Member("a")], [Member("b"), Member("c")], [Member("a")]
    )
    assert mixture.prefixes == ("c", "a", "b")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["a"], [("a", None)]),
        (["a", "b"], [("a", None), ("b", None)]),
        (["0.3", "a", "7", "b"], [("a", 0.3), ("b", 7.0)]),
        (["1", "./2"], [("./2", 1.0)]),
    ],
)
def test_prefixes_with_or_without_weights_are_parsed(values: list[str], expected: list) -> None:
    assert parse_members(values, "--data-prefix") == tuple(Member(*member) for member in expected)


@pytest.mark.parametrize(
    "values", [["0.3", "a", "0.7"], ["a", "0.7"], ["0.3", "0.7"], ["0.3"], ["a", "b", "1", "c"]]
)
def test_a_missing_weight_or_prefix_is_refused(values: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--data-prefix .*: give a weight before each prefix"):
        parse_members(values, "--data-prefix")


def test_the_least_values_of_sentence_samples() -> None:
    bert = SentenceOptions("bert", short_seq_prob=1e-6)
    assert SentenceOptions("bert", short_seq_prob=0).short_seq_prob == 0
    with pytest.raises(ConfigError, match=r"short_seq_prob is 9e-07: give 0, or 0\.000001 … 1"):
        SentenceOptions("bert", short_seq_prob=9e-7)
    IndexOptions(split="1", seq_length=5, seed=1, sentences=bert)
    with pytest.raises(ConfigError, match="is 4: a sample of bert has 3 special tokens and at"):
        IndexOptions(split="1", seq_length=4, seed=1, sentences=bert)
