import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacore.inspect import tokens as lengths
from megacore.inspect.tokens import bin_lengths, ranked, summarize_lengths

lists_of_lengths = st.lists(
    st.one_of(st.integers(0, 12), st.integers(0, 2**31 - 1)), min_size=1, max_size=30
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "_BLOCK", 7)


@settings(max_examples=40, deadline=None)
@given(values=lists_of_lengths)
def test_ranked_equals_sorting(values: list[int]) -> None:
    assert ranked(np.array(values, np.int32), range(len(values))) == sorted(values)


@settings(max_examples=40, deadline=None)
@given(values=lists_of_lengths)
def test_summary_equals_numpy(values: list[int]) -> None:
    summary = summarize_lengths(np.array(values, np.int32))
    assert summary is not None
    assert (summary.sequences, summary.tokens) == (len(values), sum(values))
    assert (summary.shortest, summary.longest) == (min(values), max(values))
    assert summary.mean == pytest.approx(np.mean(values))
    for percent, percentile in ((50, summary.median), (95, summary.p95)):
        assert percentile == np.percentile(values, percent, method="inverted_cdf")


@settings(max_examples=40, deadline=None)
@given(values=lists_of_lengths, per_octave=st.integers(1, 4))
def test_bins_contain_every_sequence_once(values: list[int], per_octave: int) -> None:
    bins = bin_lengths(np.array(values, np.int32), per_octave)
    edges = bins.edges.tolist()
    assert edges == sorted(set(edges))
    assert (bins.sequences.sum(), bins.tokens.sum()) == (len(values), sum(values))
    for low, high, count, tokens in zip(
        edges[:-1], edges[1:], bins.sequences, bins.tokens, strict=True
    ):
        inside = [value for value in values if low <= value < high]
        assert (count, tokens) == (len(inside), sum(inside))
    assert bins.sequences[0] > 0
    assert bins.sequences[-1] > 0


def test_edges_of_bins_double() -> None:
    bins = bin_lengths(np.array([1, 2, 3, 4, 9, 16], np.int32))
    assert bins.edges.tolist() == [1, 2, 4, 8, 16, 32]
    assert bins.sequences.tolist() == [1, 2, 1, 1, 1]
    assert bins.tokens.tolist() == [1, 5, 4, 9, 16]
    assert bin_lengths(np.array([0, 0, 1], np.int32)).edges.tolist() == [0, 1, 2]


def test_no_sequences_have_no_summary_and_no_bins() -> None:
    no_lengths = np.zeros(0, np.int32)
    assert summarize_lengths(no_lengths) is None
    assert bin_lengths(no_lengths).sequences.tolist() == []
