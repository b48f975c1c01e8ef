from pathlib import Path

import numpy as np
import pytest

from megacore.errors import ConfigError, WorkspaceError
from megacore.inspect import draw
from megacore.inspect.draw import draw_lengths, lengths_figure


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
    with pytest.raises(ConfigError, match=r"written as \.png or \.svg, not as \.pdf"):
        draw_lengths(lengths, tmp_path / "a.pdf", "a")
    with pytest.raises(WorkspaceError, match="choose another path"):
        draw_lengths(lengths, tmp_path / "none" / "a.png", "a")
    monkeypatch.setattr(draw.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="matplotlib, which is not installed"):
        draw_lengths(lengths, tmp_path / "a.png", "a")
    assert list(tmp_path.iterdir()) == []
