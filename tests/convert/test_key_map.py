"""The key map in both directions, and its refusals."""

import pytest
import torch

from megacore.convert.key_map import (
    SAME,
    Entry,
    KeyMap,
    Relayout,
    padded_rows,
    qkv_blocks,
)
from megacore.errors import ConversionError

TRANSPOSED = SAME.then(torch.Tensor.t, torch.Tensor.t)


def encoded(shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor whose values identify their position."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def test_qkv_blocks_moves_each_head_to_its_block() -> None:
    heads, head_dim = 3, 2
    ours = torch.tensor(
        [[head, kind, d] for head in range(heads) for kind in range(3) for d in range(head_dim)]
    )
    (theirs,) = qkv_blocks(heads, head_dim).split(ours)
    expected = [
        [head, kind, d] for kind in range(3) for head in range(heads) for d in range(head_dim)
    ]
    assert theirs.tolist() == expected


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (SAME, (5, 3)),
        (TRANSPOSED, (5, 3)),
        (qkv_blocks(3, 4), (36, 7)),
        (qkv_blocks(3, 4), (36,)),
        (qkv_blocks(3, 4).then(torch.Tensor.t, torch.Tensor.t), (36, 12)),
        (padded_rows(6, 6), (6, 2)),
    ],
)
def test_layouts_are_inverted(layout: Relayout, shape: tuple[int, ...]) -> None:
    ours = encoded(shape)
    assert torch.equal(layout.merge(layout.split(ours)), ours)


def test_padded_rows_are_cut_and_restored_as_zeros() -> None:
    layout = padded_rows(3, 8)
    (cut,) = layout.split(encoded((8, 2)))
    assert torch.equal(cut, encoded((8, 2))[:3])
    padded = layout.merge((cut,))
    assert padded.shape == (8, 2)
    assert torch.equal(padded[:3], cut)
    assert not padded[3:].any()


def halves() -> Relayout:
    return Relayout(lambda ours: ours.chunk(2), lambda theirs: torch.cat(theirs))


def table() -> KeyMap:
    return KeyMap(
        (
            Entry("a.weight", (4, 3), ("x.weight",), TRANSPOSED),
            Entry("b.weight", (6, 2), ("y.gate", "y.up"), halves()),
        )
    )


def test_one_tensor_may_map_to_several() -> None:
    ours = {"a.weight": encoded((4, 3)), "b.weight": encoded((6, 2)) + 100}
    theirs = dict(table().forward(ours))
    assert {name: tuple(tensor.shape) for name, tensor in theirs.items()} == table().their_shapes
    assert table().their_shapes == {"x.weight": (3, 4), "y.gate": (3, 2), "y.up": (3, 2)}
    back = dict(table().ours(theirs))
    assert all(torch.equal(back[name], tensor) for name, tensor in ours.items())
    assert all(tensor.is_contiguous() for tensor in back.values())


def test_a_name_in_the_table_twice_is_refused() -> None:
    with pytest.raises(AssertionError, match="x"):
        KeyMap((Entry("a", (2,), ("x",)), Entry("b", (2,), ("x",))))
    with pytest.raises(AssertionError, match="a"):
        KeyMap((Entry("a", (2,), ("x",)), Entry("a", (2,), ("y",))))


@pytest.mark.parametrize("direction", ["forward", "ours"])
def test_missing_and_unknown_names_and_wrong_shapes_are_refused(direction: str) -> None:
    shapes = table().our_shapes if direction == "forward" else table().their_shapes
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    convert = getattr(table(), direction)
    first = next(iter(tensors))
    with pytest.raises(ConversionError, match=f"it lacks {first}"):
        dict(convert({name: tensor for name, tensor in tensors.items() if name != first}))
    with pytest.raises(ConversionError, match=r"no place for stray\.bias"):
        dict(convert({**tensors, "stray.bias": torch.zeros(1)}))
    with pytest.raises(
        ConversionError, match=rf"{first} has shape \(9, 9\) where the configuration says"
    ):
        dict(convert({**tensors, first: torch.zeros(9, 9)}))


def test_many_missing_names_are_counted() -> None:
    big = KeyMap(tuple(Entry(f"n{i}", (1,), (f"m{i}",)) for i in range(9)))
    with pytest.raises(ConversionError, match="n0, n1, n2, n3 and 5 more"):
        list(big.forward({}))
