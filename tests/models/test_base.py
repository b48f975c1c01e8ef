"""Sums of losses over several micro batches."""

from unittest.mock import Mock

import pytest
import torch

from megacore.models import base
from megacore.models.base import POSITION_BUCKETS, LossTotals, SampleSources
from megacore.tensor_parallel.linear import add_rows_

CPU = torch.device("cpu")


def test_losses_of_a_source_are_added_in_a_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU index_add_ is atomic: the validation of equal weights would have other bits."""
    add = Mock(side_effect=add_rows_)
    monkeypatch.setattr(base, "add_rows_", add)
    totals = LossTotals(1, SampleSources(torch.tensor([1, 0, 1, 0]), 2), CPU)
    for losses in ([1.0, 2.0, 4.0], [8.0]):
        by_sample = torch.tensor([[loss, 1.0] for loss in losses], dtype=torch.float64)
        others = torch.zeros(1 + POSITION_BUCKETS, 2, dtype=torch.float64)
        totals.add(torch.cat([others, by_sample]))
    assert totals.total[-2:].tolist() == [[10.0, 2.0], [5.0, 2.0]]
    assert add.call_count == 2
