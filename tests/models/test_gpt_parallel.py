"""GPT divided over ranks compared with the serial model, and computed in several ways."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.parallel.mesh import SINGLE_RANK
from tests import _gpt_ranks
from tests._gpt_ranks import VARIANTS
from tests._tensor_ranks import joined

Ranks = list[dict[str, Any]]
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("world", ["two_ranks", pytest.param("four_ranks", marks=pytest.mark.slow)])
def test_ranks_equal_the_serial_model(
    request: pytest.FixtureRequest, one_rank: Ranks, world: str, name: str
) -> None:
    ranks = [rank["gpt"][name] for rank in request.getfixturevalue(world)]
    serial = one_rank[0]["gpt"][name]
    for value in ("logits", "loss", "evaluated"):
        torch.testing.assert_close(joined(ranks, value, None), serial[value], **CLOSE)
    assert ranks[0]["grads"].keys() == serial["grads"].keys()
    for parameter, expected in serial["grads"].items():
        gradient = _joined_gradient(ranks, parameter)
        torch.testing.assert_close(
            gradient, expected, **CLOSE, msg=lambda text, name=parameter: f"{name}: {text}"
        )


def _joined_gradient(ranks: list[dict[str, Any]], parameter: str) -> Tensor:
    grads = [rank_gradients["grads"] for rank_gradients in ranks]
    part = ranks[0]["partitions"].get(parameter)
    if part is not None:
        return joined(grads, parameter, part.dim)
    if parameter in ranks[0]["partial"]:
        return torch.stack([rank_gradients[parameter] for rank_gradients in grads]).sum(0)
    return joined(grads, parameter, None)


def test_loss_options_apply_only_in_training(ranks: Ranks) -> None:
    plain, options = ranks[0]["gpt"]["plain"], ranks[0]["gpt"]["losses"]
    assert torch.equal(plain["loss"], plain["evaluated"])
    assert torch.equal(options["evaluated"], plain["evaluated"])
    assert not torch.allclose(options["loss"], plain["loss"], rtol=1e-3)


@pytest.mark.parametrize("kind", ["plain", "sequence"])
@pytest.mark.parametrize("way", ["selective", "full", "two in flight"])
def test_recomputation_and_passes_in_flight_give_the_same_bits(
    ranks: Ranks, kind: str, way: str
) -> None:
    for rank in ranks:
        expected, actual = rank["dropout"][kind]["none"], rank["dropout"][kind][way]
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.parametrize("kind", ["plain", "sequence"])
def test_chunks_draw_the_dropout_of_the_undivided_model(ranks: Ranks, kind: str) -> None:
    for rank in ranks:
        expected, actual = rank["dropout"][kind]["none"], rank["dropout"][kind]["chunks"]
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, **CLOSE)
        assert not torch.equal(actual["loss 0"], actual["loss 1"])


def test_dropout_is_equal_on_replicated_and_differs_on_divided_activations(
    two_ranks: Ranks,
) -> None:
    for kind in ("plain", "sequence"):
        first, second = (rank["dropout"][kind]["none"] for rank in two_ranks)
        assert torch.equal(first["loss 0"], second["loss 0"])
    plain, sequence = (
        two_ranks[0]["dropout"][kind]["none"]["loss 0"] for kind in ("plain", "sequence")
    )
    assert not torch.allclose(plain, sequence, rtol=1e-3)


@pytest.mark.parametrize(
    ("recompute", "layers", "bounds"),
    [("selective", None, (0.5, 0.95)), ("full", None, (0.0, 0.1)), ("full", 2, (0.5, 0.6))],
)
def test_recomputation_saves_fewer_activations(
    recompute: str, layers: int | None, bounds: tuple[float, float]
) -> None:
    def saved_elements(values: dict[str, Any]) -> int:
        model = _gpt_ranks.model(SINGLE_RANK, num_layers=4, attention_dropout=0.1, train=values)
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
    assert bounds[0] <= saved_elements(values) / saved_elements({"recompute": "none"}) <= bounds[1]
