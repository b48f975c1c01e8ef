"""The sharded embedding table compared with torch.nn.functional.embedding."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests._tensor_ranks import VOCAB, every_id, joined, random


@pytest.mark.parametrize("sequence", [False, True])
def test_lookup_and_gradient_equal_torch_embedding(
    ranks: list[dict[str, Any]], sequence: bool
) -> None:
    table = random("e", VOCAB, 6).requires_grad_()
    expected = F.embedding(every_id(), table)
    expected.backward(random("g", 2, 80, 6))
    parts = [rank["embedding"][sequence] for rank in ranks]
    assert torch.equal(joined(parts, "y", 1 if sequence else None), expected)
    torch.testing.assert_close(joined(parts, "weight", 0), table.grad)
