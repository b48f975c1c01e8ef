"""Windows of a text: every token is predicted once, with as much context as a window has."""

import pytest

from megacore.errors import ConfigError
from megacore.zeroshot.texts import Window, check_windows, windows


@pytest.mark.parametrize("tokens", [2, 5, 8, 9, 10, 16, 17, 18, 33, 100])
@pytest.mark.parametrize("stride", [None, 1, 3, 7, 8])
def test_every_token_but_the_first_is_predicted_once(tokens: int, stride: int | None) -> None:
    length, step = 8, stride or 8
    predicted: list[int] = []
    for number, window in enumerate(windows(tokens, length, stride)):
        assert window.start == number * step
        assert 0 < window.stop - window.start <= length
        first = window.stop + 1 - window.scored
        predicted += range(first, window.stop + 1)
        assert first - window.start >= min(length - step + 1, first)
    assert predicted == list(range(1, tokens))


def test_windows_score_only_tokens_of_no_earlier_window() -> None:
    assert windows(20, 8) == [Window(0, 8, 8), Window(8, 16, 8), Window(16, 19, 3)]
    assert windows(8, 8, 2) == [Window(0, 7, 7)]
    assert windows(12, 8, 2) == [Window(0, 8, 8), Window(2, 10, 2), Window(4, 11, 1)]


@pytest.mark.parametrize("stride", [0, -1, 9])
def test_strides_that_skip_tokens_are_refused(stride: int) -> None:
    with pytest.raises(
        ConfigError, match=f"overlapping_eval is {stride}, but windows of 8 tokens begin 1 to 8"
    ):
        windows(100, 8, stride)


def test_windows_beyond_the_positions_are_refused() -> None:
    check_windows(8, 4, 8)
    with pytest.raises(
        ConfigError, match="seq_length is 9 and the model has 8 positions: lower it to at most 8"
    ):
        check_windows(9, None, 8)
