"""Tests of the readers of YAML and of JSON settings: limits, repeated keys and plain dates."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from megacore.config.load import load_config, parse_overrides
from megacore.errors import ConfigError
from megacore.foreign.files import YAML_BYTES, parse_yaml, read_settings_json, read_yaml

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{below}'] * 10)}]\n"
    for below, name in zip("abcdefgh", "bcdefghi", strict=True)
)
"""Aliases of aliases: a billion values in 500 bytes."""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (LAUGHS, "line 5, column 4: it has more than 50,000 values, with those that aliases"),
        ("a: &a [1, *a]", "line 1, column 11: an alias stands for a value that contains it"),
        ("[" * 100_000, "line 1, column 65: it nests more than 64 levels deep"),
        ("- " * 5000 + "a", "it nests more than 64 levels deep"),
        ("a: " + "9" * 6000, "the number 99999999999999999999… has 6000 digits, more than 100"),
        ("a: 0x" + "f" * 6000, "has 6002 digits"),
        ("a: 1\nb: 2\na: 3", "line 3, column 1: the key a is given twice"),
        ("x: {b: 1, 'b': 2}", "line 1, column 11: the key b is given twice"),
        ("a: !!timestamp 2023-13-45", '"2023-13-45" is no timestamp'),
        ("a: !!int x", '"x" is no int'),
        ("a: !!python/object/apply:os.system [x]", "could not determine a constructor"),
        ("? [a]\n: b", "found unhashable key"),
        ("a: [", "line 1, column 5"),
        ("a: \x07", "special characters are not allowed"),
    ],
)
def test_hostile_yaml_is_refused_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "f.yaml")
    message = str(caught.value)
    assert message.startswith("f.yaml cannot be read as YAML")
    assert sentence in message
    assert "\n" not in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 2023-13-45", {"a": "2023-13-45"}),
        ("a: 2024-01-31", {"a": "2024-01-31"}),
        ("a: 12:00:00", {"a": "12:00:00"}),
        (
            "a: &a {k: 1, l: 2}\nb: &b {<<: *a, k: 3}\nc: {<<: *b, l: 4}",
            {"a": {"k": 1, "l": 2}, "b": {"k": 3, "l": 2}, "c": {"k": 3, "l": 4}},
        ),
        ("a: [&x 7, *x, *x]", {"a": [7, 7, 7]}),
        ("[" * 63 + "a" + "]" * 63, None),
        ("", None),
    ],
)
def test_yaml_within_the_limits_is_read(text: str, value: Any) -> None:
    read = parse_yaml(text, "f.yaml")
    assert read == value or (value is None and read)


def test_large_files_and_pipes_are_refused(tmp_path: Path) -> None:
    large, pipe = tmp_path / "large.yaml", tmp_path / "pipe.yaml"
    large.write_text("#" * (YAML_BYTES + 1))
    os.mkfifo(pipe)
    for read in (read_yaml, read_settings_json):
        with pytest.raises(ConfigError, match="1,048,577 bytes, more than the 1,048,576"):
            read(large)
        with pytest.raises(ConfigError, match="it is a named pipe, not a file"):
            read(pipe)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("train.train_iters", "2023-13-45", "train.train_iters is '2023-13-45': give an integer"),
        ("train.train_iters", "1e300", "train.train_iters is '1e300': give an integer"),
        ("train.train_iters", "1.0e+300", "train.train_iters is 1e+300: "),
        ("train.train_iters", "9" * 30, "train.train_iters is an integer of about 31 digits"),
        ("train.train_iters", "'" + "9" * 6000 + "'", "train.train_iters is '99999"),
        ("optim.lr", "1e999", "optim.lr is '1e999': give a finite number"),
        ("model.num_layers", "1000000000", "give at most 1,024"),
        ("model.hidden_size", "1000000000000", "give at most 1,048,576"),
        ("train.global_batch_size", "1000000000000", "give at most 262,144"),
        ("launch.nproc_per_node", "1000000000", "give the ranks of a host, at least 1"),
        ("launch.nnodes", "2:1000000000", "or a range, such as 2:4, of at most 100,000"),
        (".".join("a" * 100), "1", "nests more than 64 levels deep"),
    ],
)
def test_hostile_values_are_refused_at_once(key: str, value: str, sentence: str) -> None:
    started = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load_config("gpt2-tiny", parse_overrides([f"{key}={value}"]))
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 500
    assert time.process_time() - started < 10
