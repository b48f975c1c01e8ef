"""Estimate of the training loss of each source from the losses of micro batches."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megacore.config.data import DataConfig
from megacore.train.evaluate import SourceLoss
from megacore.train.source_losses import SourceLossEstimator, named_losses

DATA = DataConfig.model_validate(
    {
        "blend": [
            {"weight": 1, "name": name, "source": {"kind": "prefix", "prefix": name}}
            for name in ("web", "books", "code")
        ]
    }
)
LOSSES = np.array([3.0, 2.0, 4.0])


class Samples:
    """Samples of three sources, drawn at random; sources 0 and 2 of the run come in this order."""

    seq_length, width = 8, 9

    def __init__(self, places: Sequence[int], sources: tuple[int, ...] = (0, 1, 2)) -> None:
        self.places, self.sources = np.asarray(places, np.int64), sources

    def __len__(self) -> int:
        return len(self.places)

    def source_places(self, indices: Any) -> npt.NDArray[np.int64]:
        return self.places[np.asarray(indices)]

    def gather(self, indices: Any, out: Any = None) -> Any:
        raise AssertionError("no tokens are read")


def fill(estimator: SourceLossEstimator, samples: Samples, size: int, noise: float) -> None:
    random = np.random.default_rng(3)
    losses = LOSSES[list(samples.sources)][samples.places]
    losses = losses + noise * random.standard_normal(len(losses))
    means = losses.reshape(-1, size).mean(1)
    for first in range(0, len(means), 4):  # four micro batches in a global batch
        estimator.add(first * size, means[first : first + 4].tolist())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_losses_are_found_within_their_standard_error(size: int) -> None:
    places = np.random.default_rng(1).choice(3, 2000, p=[0.6, 0.3, 0.1])
    samples = Samples(places.tolist())
    estimator = SourceLossEstimator(samples, DATA, size)
    fill(estimator, samples, size, noise=0.5)
    rows = estimator.estimates()
    assert [each["source"] for each in rows] == ["web", "books", "code"]
    assert [each["samples"] for each in rows] == np.bincount(places).tolist()
    for each, loss in zip(rows, LOSSES, strict=True):
        assert abs(each["loss"] - loss) < 4 * each["error"] < 0.4
    estimator.clear()
    assert estimator.estimates() == []


def test_samples_of_one_source_per_micro_batch_give_its_mean() -> None:
    samples = Samples([0, 1, 0, 0, 1, 1, 0, 1], sources=(2, 0))
    estimator = SourceLossEstimator(samples, DATA, 1)
    values = [4.0, 3.0, 4.2, 4.1, 3.2, 3.1, 3.9, 3.3]
    estimator.add(0, values[:4])
    estimator.add(4, values[4:])
    estimator.add(0, [float("nan"), 1.0, 1.0, 1.0])  # an iteration that is not applied
    code, web = estimator.estimates()
    assert (code["source"], web["source"]) == ("code", "web")
    assert code["loss"] == pytest.approx((4.0 + 4.2 + 4.1 + 3.9) / 4)
    assert web["loss"] == pytest.approx((3.0 + 3.2 + 3.1 + 3.3) / 4)


def test_what_micro_batches_do_not_tell_apart_is_not_estimated() -> None:
    samples = Samples([0, 1] * 20, sources=(0, 1))  # each micro batch has one sample of each
    estimator = SourceLossEstimator(samples, DATA, 2)
    fill(estimator, samples, 2, noise=0.1)
    assert estimator.estimates() == []
    single = SourceLossEstimator(Samples([0] * 8, sources=(0,)), DATA, 2)
    single.add(0, [1.0, 2.0])
    assert single.estimates() == []
    noisy = Samples([0] * 98 + [1, 1], sources=(0, 1))
    estimator = SourceLossEstimator(noisy, DATA, 1)
    fill(estimator, noisy, 1, noise=1.5)  # the loss of two samples is not known within 10 %
    assert [each["source"] for each in estimator.estimates()] == ["web"]


def test_losses_have_the_names_of_their_sources() -> None:
    rows = named_losses([SourceLoss(2, 1.5, 10), SourceLoss(0, 2.5, 30)], DATA)
    assert rows == [
        {"source": "code", "loss": 1.5, "tokens": 10},
        {"source": "web", "loss": 2.5, "tokens": 30},
    ]
