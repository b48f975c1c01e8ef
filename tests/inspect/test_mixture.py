"""Tokens and epochs of each source by step, of index maps and of a configuration."""

import json
from pathlib import Path

import pytest
import yaml

from megacore.data.index_maps import build_index_maps
from megacore.data.index_options import IndexOptions, Member, Mixture, WeightStep
from tests.cli._model import run
from tests.data._files import write_tokens

STEPS = (WeightStep(60, (1.0, 3.0)),)


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    return [
        write_tokens(tmp_path / name, [80] * count) for name, count in (("web", 10), ("books", 5))
    ]


def build(directory: Path, prefixes: list[str], steps: tuple[WeightStep, ...] = STEPS) -> None:
    directory.mkdir()
    members = [Member(prefix, weight) for prefix, weight in zip(prefixes, (3.0, 1.0), strict=True)]
    options = IndexOptions(split="8,1,1", seq_length=8, seed=5)
    build_index_maps(Mixture.blend(members, steps), directory, options, (100, 0, 0))


def test_samples_of_index_maps_are_counted(prefixes: list[str], tmp_path: Path) -> None:
    build(tmp_path / "maps", prefixes)
    report = json.loads(run("inspect", "mixture", tmp_path / "maps", "--json").output)
    assert report["source_tokens"] == {"0-web": 640, "1-books": 320}
    first, second = report["steps"]
    assert (first["first_sample"], first["samples"], second["first_sample"]) == (0, 60, 60)
    assert [each["samples"] for each in first["sources"]] == [45, 15]
    assert [each["samples"] for each in second["sources"]] == [10, 30]
    web, books = second["sources"]
    assert (web["tokens"], web["epochs"]) == (80, 10 / 80)
    assert (books["epochs"], books["epochs_so_far"]) == (30 / 40, 45 / 40)
    text = run("inspect", "mixture", tmp_path / "maps").output
    assert "1.125" in [line for line in text.splitlines() if "1-books" in line][-1]


def test_data_sets_without_weights_have_the_shares_of_their_samples(
    prefixes: list[str], tmp_path: Path
) -> None:
    (tmp_path / "maps").mkdir()
    options = IndexOptions(split="8,1,1", seq_length=8, seed=5)
    mixture = Mixture.blend([Member(prefix) for prefix in prefixes])
    build_index_maps(mixture, tmp_path / "maps", options, (None, 0, 0))
    report = json.loads(run("inspect", "mixture", tmp_path / "maps", "--json").output)
    (step,) = report["steps"]
    assert [each["samples"] for each in step["sources"]] == [79, 39]
    assert [each["weight"] for each in step["sources"]] == pytest.approx([79 / 118, 39 / 118])


def test_a_configuration_tells_what_it_asks_for(prefixes: list[str], tmp_path: Path) -> None:
    blend = [
        {"source": {"kind": "prefix", "prefix": prefix}, "name": name}
        for prefix, name in zip(prefixes, ("web", "books"), strict=True)
    ]
    path = tmp_path / "mixed.yaml"
    values = {
        "data": {
            "source": None,
            "blend": blend,
            "blend_temperature": 1.0,
            "blend_schedule": [{"samples": 64, "weights": [0, 1]}],
            "split": "8,1,1",
            "seq_length": 8,
            "tokenizer": {"kind": "train-bpe", "vocab_size": 512},
        },
        "train": {"train_iters": 16, "global_batch_size": 8, "micro_batch_size": 2},
    }
    path.write_text(yaml.safe_dump(values))
    report = json.loads(run("inspect", "mixture", path, "--json").output)
    first, second = report["steps"]
    assert [each["weight"] for each in first["sources"]] == pytest.approx([2 / 3, 1 / 3])
    assert [each["source"] for each in second["sources"]] == ["web", "books"]
    assert second["sources"][1]["samples"] == 64
    assert second["sources"][1]["epochs_so_far"] == pytest.approx((64 + 64 / 3) / 40)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("mixture", "gpt2-tiny"), "has a single data.source"),
        (("elsewhere", "gpt2-tiny"), "give one path, or `mixture`"),
    ],
)
def test_what_has_no_mixture_is_refused(arguments: tuple[str, str], sentence: str) -> None:
    assert sentence in str(run("inspect", *arguments).exception)
