"""Refusals of generation options before a model is read."""

from typing import Any

import pytest

from megacore.errors import ConfigError
from megacore.jobs.model import DEFAULT_NEW_TOKENS, GenerateOptions, new_token_limits


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0: give at least 1"),
        ({"temperature": -0.5}, "temperature is -0.5: give a number from 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": 1e-308}, "temperature is 1e-308: give 0 for the most probable token, or"),
        ({"top_k": 0}, "top_k is 0: give at least 1"),
        ({"top_p": 0.0}, "top_p is 0.0: give a probability above 0 and up to 1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": float("nan")}, "top_p is nan"),
        (
            {"temperature": 0, "top_k": 3},
            "temperature is 0, which takes the most probable token, but top_k is 3",
        ),
        ({"temperature": 0.0, "top_p": 0.9}, "but top_p is 0.9: leave one of them out"),
    ],
)
def test_impossible_values_are_refused_by_option(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        GenerateOptions(**values)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("values", "temperature"),
    [
        ({}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 1e-5}, 1e-5),
        ({"top_k": 5}, 1.0),
        ({"top_p": 0.9}, 1.0),
        ({"seed": 3}, 0.0),
    ],
)
def test_any_sampling_option_turns_sampling_on(values: dict[str, Any], temperature: float) -> None:
    options = GenerateOptions(**values)
    assert options.resolved_temperature == temperature
    assert options.samples == (temperature > 0)


def test_new_tokens_are_limited_by_the_positions() -> None:
    prompts = [[1] * 4, [1] * 90]
    assert new_token_limits(prompts, GenerateOptions(), 100) == [DEFAULT_NEW_TOKENS, 10]
    assert new_token_limits(prompts, GenerateOptions(max_new_tokens=10), 100) == [10, 10]
    with pytest.raises(
        ConfigError,
        match="max_new_tokens is 11, but prompt 2 has 90 of the model's 100 positions and",
    ):
        new_token_limits(prompts, GenerateOptions(max_new_tokens=11), 100)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt 2 is empty: give it at least one token"),
        (
            [1] * 100,
            "prompt 2 has 100 tokens and the model 100 positions.*shorten the prompt to at most 99",
        ),
        ([1] * 130, "prompt 2 has 130 tokens"),
    ],
)
def test_prompts_without_room_for_a_token_are_refused(prompt: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        new_token_limits([[1], prompt], GenerateOptions(), 100)
