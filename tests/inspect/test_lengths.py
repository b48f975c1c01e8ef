import importlib.util
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacore.errors import ConfigError, WorkspaceError
from megacore.inspect import tokens as lengths
from megacore.inspect.tokens import (
    bin_lengths,
    draw_lengths,
    lengths_figure,
    ranked,
    summarize_lengths,
)

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


@pytest.mark.parametrize("values", [[], [0], [0, 0, 1], [7], [1, 2**31 - 1], list(range(1, 300))])
def test_any_lengths_are_drawn_reproducibly(tmp_path: Path, values: list[int]) -> None:
    lengths = np.array(values, np.int32)
    picture = draw_lengths(lengths, tmp_path / "a.png", "a")
    assert picture.read_bytes().startswith(b"\x89PNG")
    svg = draw_lengths(lengths, tmp_path / "a.svg", "a").read_bytes()
    assert svg == draw_lengths(lengths, tmp_path / "b.svg", "a").read_bytes()


def test_the_figure_shows_counts_and_quantiles() -> None:
    figure = lengths_figure(np.array([0, 1, 3, 3, 40], np.int32), "tokens per document")
    axes = figure.axes[0]
    assert axes.get_title(loc="left") == "tokens per document"
    assert "5 sequences, 47 tokens; 1 without tokens" in axes.get_xlabel()
    assert {text.get_text() for text in axes.texts} == {"median 3", "mean 9", "95 % 40"}
    shares = [bar.get_height() for bar in axes.patches if hasattr(bar, "get_height")]
    assert sum(shares) == pytest.approx(
        80
    )  # the empty one of the five sequences is not on the axis


def test_a_figure_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = np.array([1], np.int32)
    with pytest.raises(ConfigError, match=r"written as \.svg or \.png, not as \.pdf"):
        draw_lengths(lengths, tmp_path / "a.pdf", "a")
    with pytest.raises(WorkspaceError, match="choose another path"):
        draw_lengths(lengths, tmp_path / "none" / "a.png", "a")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="matplotlib, which is not installed"):
        draw_lengths(lengths, tmp_path / "a.png", "a")
    assert list(tmp_path.iterdir()) == []
