"""Epochs of a training over its data."""

from typing import Any

import pytest

from megacore.config import RunConfig, load_config
from megacore.plan.epochs import Epochs, estimated_epochs, measured_epochs

A, B = ({"kind": "jsonl", "files": [f"/data/{name}.jsonl"]} for name in "ab")
BLEND = {
    "data.source": None,
    "data.blend": [{"weight": 3, "source": A}, {"weight": 1, "source": B}],
    "data.seq_length": 10,
    "train.train_iters": 100,
    "train.micro_batch_size": 4,
    "train.global_batch_size": 8,
}
"""8,000 tokens of training, of which a source has 6,000 and the other 2,000."""


def config(name: str = "gpt2-tiny", **changes: Any) -> RunConfig:
    return load_config(name, changes)


def test_345m_on_wikitext_103_has_37_epochs_and_the_7b_model_more() -> None:
    counts = {"tokens": 111_900_000, "samples": 1, "epochs": 37}
    epochs = measured_epochs(config("gpt2-345m"), counts)
    assert epochs.trained == 500_000 * 8 * 1024
    assert epochs.epochs == pytest.approx(36.6, abs=0.1)
    assert epochs.sentence() == (
        "epochs: 36.6 (4,096,000,000 tokens of training over 111,900,000 tokens of the train split)"
    )
    warning = epochs.warning()
    assert warning is not None
    assert "36.6 epochs over Salesforce/wikitext wikitext-103-raw-v1 split train" in warning
    assert measured_epochs(config("gpt2-7b"), counts).epochs == pytest.approx(145, abs=1)


def test_blend_counts_the_epochs_of_each_source() -> None:
    members = [
        {"tokens": 6000, "samples": 600, "epochs": 1, "drawn": 603},
        {"tokens": 400, "samples": 240, "epochs": 6, "drawn": 201},
    ]
    counts = {"tokens": 6400, "samples": 804, "members": members}
    epochs = measured_epochs(config(**BLEND), counts)
    assert epochs.epochs == 8000 / 6400
    assert dict(epochs.sources) == {"/data/a.jsonl": 1.0, "/data/b.jsonl": 5.0}
    assert epochs.sentence().endswith("; 1 over /data/a.jsonl, 5 over /data/b.jsonl")
    warning = epochs.warning()
    assert warning is not None
    assert "makes 5 epochs over /data/b.jsonl: repeated" in warning


def test_epochs_of_maps_that_are_longer_than_the_training_are_those_of_its_samples() -> None:
    """800 of 1,600 planned samples are read; the others are all from the second source."""
    schedule = [{"samples": 800, "weights": [0, 1]}]
    members = [
        {"tokens": 6000, "samples": 600, "epochs": 1, "drawn": 600},
        {"tokens": 4000, "samples": 1200, "epochs": 3, "drawn": 1000},
    ]
    counts = {"tokens": 10_000, "samples": 1600, "members": members}
    run = config(**BLEND, **{"data.blend_schedule": schedule})
    assert dict(measured_epochs(run, counts).sources) == {
        "/data/a.jsonl": 1.0,
        "/data/b.jsonl": 0.5,
    }
    whole = measured_epochs(run, counts, 1600)
    assert dict(whole.sources) == {"/data/a.jsonl": 1.0, "/data/b.jsonl": 2.5}


def test_estimate_divides_the_tokens_by_split_and_weight_and_says_so() -> None:
    run = config(**BLEND, **{"data.split": "8,1,1"})
    epochs = estimated_epochs(run, [7500, 2500], "data.split")
    assert (epochs.size, epochs.epochs, epochs.warning()) == (8000, 1.0, None)
    assert epochs.sentence().startswith(
        "epochs: about 1 (8,000 tokens of training over about 8,000"
    )
    assert ", estimated from data.split)" in epochs.sentence()


def test_bert_counts_samples() -> None:
    run = config("bert-tiny", **{"train.train_iters": 10})
    counts = {"tokens": 999, "samples": 90, "epochs": 3}
    epochs = measured_epochs(run, counts)
    assert (epochs.trained, epochs.size, epochs.unit) == (640, 30, "samples")


def test_four_epochs_are_no_warning() -> None:
    assert Epochs(400, 100, (("a", 4.0),)).warning() is None
    assert Epochs(401, 100, (("a", 4.01),)).warning() is not None
