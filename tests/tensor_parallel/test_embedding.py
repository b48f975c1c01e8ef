"""The divided table against torch.nn.functional.embedding."""

from typing import Any

import torch
import torch.nn.functional as F

from megacore.tensor_parallel import VocabParallelEmbedding
from tests._two_ranks import VOCAB, ids, random


def test_alone_it_is_the_serial_table() -> None:
    layer = VocabParallelEmbedding(VOCAB, 6).double()
    with torch.no_grad():
        layer.weight.copy_(random("e", VOCAB, 6))
    assert torch.equal(layer(ids(2, 5)), F.embedding(ids(2, 5), random("e", VOCAB, 6)))


def test_two_ranks_find_every_row_and_give_it_its_gradient(two_ranks: list[dict[str, Any]]) -> None:
    table = random("e", VOCAB, 6).requires_grad_()
    expected = F.embedding(ids(2, 5), table)
    expected.backward(random("g", 2, 5, 6))
    parts = [found["embedding"] for found in two_ranks]
    assert all(torch.equal(part["y"], expected) for part in parts)
    assert table.grad is not None
    assert torch.equal(torch.cat([part["weight"] for part in parts]), table.grad)
