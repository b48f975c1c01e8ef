"""Whole models divided over ranks against the serial one, and one model computed in several ways
against itself."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.parallel.mesh import ALONE
from tests import _gpt_ranks
from tests._gpt_ranks import VARIANTS
from tests._tensor_ranks import joined

Ranks = list[dict[str, Any]]
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("world", ["two_ranks", "four_ranks"])
def test_ranks_against_one(
    request: pytest.FixtureRequest, one_rank: Ranks, world: str, name: str
) -> None:
    ranks = [found["gpt"][name] for found in request.getfixturevalue(world)]
    serial = one_rank[0]["gpt"][name]
    for value in ("logits", "loss", "evaluated"):
        torch.testing.assert_close(joined(ranks, value, None), serial[value], **CLOSE)
    assert ranks[0]["grads"].keys() == serial["grads"].keys()
    for parameter, expected in serial["grads"].items():
        found = _whole_gradient(ranks, parameter)
        torch.testing.assert_close(
            found, expected, **CLOSE, msg=lambda text, name=parameter: f"{name}: {text}"
        )


def _whole_gradient(ranks: list[dict[str, Any]], parameter: str) -> Tensor:
    grads = [found["grads"] for found in ranks]
    part = ranks[0]["partitions"].get(parameter)
    if part is not None:
        return joined(grads, parameter, part.dim)
    if parameter in ranks[0]["partial"]:
        return torch.stack([found[parameter] for found in grads]).sum(0)
    return joined(grads, parameter, None)


def test_options_of_the_loss_are_for_training_alone(ranks: Ranks) -> None:
    plain, options = ranks[0]["gpt"]["plain"], ranks[0]["gpt"]["losses"]
    assert torch.equal(plain["loss"], plain["evaluated"])
    assert torch.equal(options["evaluated"], plain["evaluated"])
    assert not torch.allclose(options["loss"], plain["loss"], rtol=1e-3)


@pytest.mark.parametrize("kind", ["plain", "sequence"])
@pytest.mark.parametrize("way", ["selective", "full", "two in flight"])
def test_recomputation_and_passes_in_flight_give_the_same_bits(
    ranks: Ranks, kind: str, way: str
) -> None:
    for found in ranks:
        expected, got = found["dropout"][kind]["none"], found["dropout"][kind][way]
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], value) for name, value in expected.items())


@pytest.mark.parametrize("kind", ["plain", "sequence"])
def test_chunks_draw_the_dropout_of_the_whole(ranks: Ranks, kind: str) -> None:
    for found in ranks:
        expected, got = found["dropout"][kind]["none"], found["dropout"][kind]["chunks"]
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, **CLOSE)
        assert not torch.equal(got["loss 0"], got["loss 1"])


def test_replicated_activations_are_dropped_alike_and_divided_ones_apart(two_ranks: Ranks) -> None:
    for kind in ("plain", "sequence"):
        first, second = (found["dropout"][kind]["none"] for found in two_ranks)
        assert torch.equal(first["loss 0"], second["loss 0"])
    plain, sequence = (
        two_ranks[0]["dropout"][kind]["none"]["loss 0"] for kind in ("plain", "sequence")
    )
    assert not torch.allclose(plain, sequence, rtol=1e-3)


@pytest.mark.parametrize(
    ("recompute", "layers", "kept"),
    [("selective", None, (0.5, 0.95)), ("full", None, (0.0, 0.1)), ("full", 2, (0.5, 0.6))],
)
def test_recomputation_keeps_less(
    recompute: str, layers: int | None, kept: tuple[float, float]
) -> None:
    def numbers(values: dict[str, Any]) -> int:
        model = _gpt_ranks.model(ALONE, num_layers=4, attention_dropout=0.1, train=values)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: sizes.append(x.numel()) or x, lambda x: x
        ):
            hidden = model.encoder(
                torch.zeros(2, 16, 32, dtype=torch.float64, requires_grad=True), 1
            )
        assert hidden.requires_grad
        return sum(sizes)

    values = {"recompute": recompute} | ({} if layers is None else {"recompute_num_layers": layers})
    assert kept[0] <= numbers(values) / numbers({"recompute": "none"}) <= kept[1]
