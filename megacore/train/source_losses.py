"""Losses by source: names, and the estimate of the training loss of each source of a blend.

Training knows the mean loss of each micro batch and the sources of its samples, which a data set
tells without communication. If source d has the share f_jd of the samples of micro batch j, the
losses L_d are estimated by least squares from m_j = sum_d f_jd L_d: with one sample per micro
batch, or samples of one source, that is the mean over the source's micro batches.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megacore.config.blend_schedule import source_names
from megacore.config.data import DataConfig
from megacore.data.samples import Dataset
from megacore.train.evaluate import SourceLoss

MOST_SOURCES = 256
"""Number of sources up to which the training loss is estimated."""
MOST_ERROR = 0.1
"""Standard error relative to the estimate up to which it is reported."""


def named_losses(losses: Sequence[SourceLoss], data: DataConfig) -> list[dict[str, Any]]:
    """Return losses by source as an event has them: name of the source, loss and tokens."""
    names = source_names(data)
    return [
        {"source": names[each.source], "loss": each.loss, "tokens": each.tokens} for each in losses
    ]


class SourceLossEstimator:
    """Estimator of the training loss of each source in a log interval."""

    def __init__(self, dataset: Dataset, data: DataConfig, micro_batch_size: int) -> None:
        """Begin an interval.

        Args:
            dataset: train split.
            data: section of the configuration, with the sources' names.
            micro_batch_size: samples of a micro batch.
        """
        sources = dataset.sources
        self._enabled = 1 < len(sources) <= MOST_SOURCES
        names = source_names(data) if self._enabled else ()
        self._names = [names[source] for source in sources] if self._enabled else []
        self._dataset, self._size = dataset, micro_batch_size
        self.clear()

    def clear(self) -> None:
        """Begin a new interval."""
        count = len(self._names)
        self._products = np.zeros((count, count))
        self._moments = np.zeros(count)
        self._samples = np.zeros(count, np.int64)
        self._squares, self._batches = 0.0, 0

    def add(self, first_sample: int, losses: Sequence[float]) -> None:
        """Add the mean losses of the micro batches of a global batch, in sample order."""
        if not self._enabled or not all(map(math.isfinite, losses)):
            return
        stop = first_sample + len(losses) * self._size
        places = self._dataset.source_places(range(first_sample, stop)).reshape(-1, self._size)
        counts = np.zeros((len(losses), len(self._names)))
        np.add.at(counts, (np.arange(len(losses))[:, None], places), 1.0)
        shares, means = counts / self._size, np.asarray(losses)
        self._products += shares.T @ shares
        self._moments += shares.T @ means
        self._samples += counts.sum(0).astype(np.int64)
        self._squares += float(means @ means)
        self._batches += len(losses)

    def estimates(self) -> list[dict[str, Any]]:
        """Return source, loss, standard error and samples of each source that can be estimated.

        Empty if the micro batches do not tell the sources apart. A source whose standard error is
        more than MOST_ERROR of its loss is left out.
        """
        seen = np.flatnonzero(self._samples)
        freedom = self._batches - len(seen)
        products = self._products[np.ix_(seen, seen)]
        if freedom < 1 or np.linalg.matrix_rank(products, hermitian=True) < len(seen):
            return []
        inverse = np.linalg.inv(products)
        losses = inverse @ self._moments[seen]
        residual = max(0.0, self._squares - float(losses @ self._moments[seen])) / freedom
        errors = np.sqrt(residual * np.diag(inverse))
        return [
            {
                "source": self._names[place],
                "loss": float(loss),
                "error": float(error),
                "samples": int(self._samples[place]),
            }
            for place, loss, error in zip(seen.tolist(), losses, errors, strict=True)
            if error <= MOST_ERROR * loss
        ]
