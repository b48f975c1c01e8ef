"""A model against the same in transformers, and one computed by several ranks against one computed
by a single one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacore.convert.hf.forms import hf_form_of, model_config
from megacore.models.base import Model
from megacore.models.inputs import ModelInput
from tests import _families
from tests._families import difference
from tests._tensor_ranks import joined

EXACT = 1e-9
"""Bar of what is computed in float64 alone."""
NEAR = 1e-5
"""Bar where transformers computes a part in float32, whatever the model's type: RMSNorm and MPT's
softmax."""


def in_transformers(name: str, **options: Any) -> tuple[Model, nn.Module]:
    """A variant's model, and transformers' with the same weights, all of which come from ours."""
    transformers = pytest.importorskip("transformers")
    of = _families.spec(name)
    ours = _families.model(of)
    config = model_config(of, "float32") | options
    architecture = config.pop("architectures")[0]
    theirs = getattr(transformers, architecture)(
        transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    ).double()
    weights = translated(name, {key: value.detach() for key, value in ours.named_parameters()})
    _untie(theirs, weights)
    result = theirs.load_state_dict(weights, strict=False)
    assert not result.unexpected_keys
    loaded = {id(theirs.get_parameter(key)) for key in weights}
    assert loaded == {id(parameter) for parameter in theirs.parameters()}
    return ours, theirs.eval()


def translated(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights or gradients of ours under transformers' names; the tables only move numbers."""
    of = _families.spec(name)
    form = hf_form_of(of)[1]
    return {form.name_when_loaded(key): value for key, value in form.key_map(of).forward(tensors)}


def _untie(theirs: nn.Module, weights: dict[str, Tensor]) -> None:
    """Give the head weights of its own where ours has them.

    transformers 5 ties every T5's when it is built.
    """
    head = theirs.get_output_embeddings()
    if "lm_head.weight" in weights and head.weight is theirs.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.detach().clone())


def assert_equal(
    name: str,
    ours: Model,
    theirs: nn.Module,
    given: ModelInput,
    their_logits: list[Tensor],
    loss: Tensor,
    bar: float,
) -> None:
    """Compare logits where they count, the loss, and every gradient."""
    counts = {"gpt": None, "bert": given.present, "t5": given.loss_mask}[
        _families.spec(name).family
    ]
    for mine, reference in zip(_families.logits(ours, given), their_logits, strict=True):
        where = slice(None) if counts is None or reference.dim() < 3 else counts
        assert difference(mine[where], reference[where]) <= bar
    theirs.zero_grad()
    loss.backward()
    torch.testing.assert_close(_families.total(ours.run(given)), loss, rtol=bar, atol=0)
    found = {
        key: value
        for key, value in _families.backward([ours], given).items()
        if not key.startswith("losses")
    }
    differences = {
        key: difference(value, _gradient(theirs, key))
        for key, value in translated(name, found).items()
    }
    worst = max(differences, key=differences.__getitem__)
    assert differences[worst] <= bar, f"{worst}: {differences[worst]}"


def _gradient(theirs: nn.Module, name: str) -> Tensor:
    gradient = theirs.get_parameter(name).grad
    assert gradient is not None
    return gradient


def assert_ranks_agree(
    ranks: list[dict[str, Any]], alone: dict[str, Any], name: str, kind: str, parts: str
) -> None:
    """Compare losses and whole gradients of several ranks with those of one."""
    found = [rank[name][kind] for rank in ranks]
    expected = alone[name]["plain"]
    for number, reference in enumerate(expected["logits"]):
        for rank in found:
            assert difference(rank["logits"][number], reference) <= EXACT
    assert found[0][parts].keys() == expected["whole"].keys()
    for key, reference in expected["whole"].items():
        assert difference(_whole(found, parts, key), reference) <= EXACT, key


def _whole(found: list[dict[str, Any]], parts: str, key: str) -> Tensor:
    tensors = [rank[parts] for rank in found]
    division = found[0]["partitions"].get(key)
    if division is not None:
        return joined(tensors, key, division.dim)
    if key in found[0]["partial"]:
        return torch.stack([tensor[key] for tensor in tensors]).sum(0)
    return joined(tensors, key, None)


def assert_dropout_repeats(rank: dict[str, Any], name: str, kind: str) -> None:
    """The same seed gives the same bits however it is computed; in chunks the same numbers; another
    seed others."""
    ways = rank[name]["dropped"][kind]
    expected = ways["none"]
    for way in ("again", "selective", "full", "full of one layer"):
        assert ways[way].keys() == expected.keys()
        assert all(torch.equal(ways[way][key], value) for key, value in expected.items()), way
    assert ways["chunks"].keys() == expected.keys()
    for key, value in expected.items():
        assert difference(ways["chunks"][key], value) <= EXACT, key
    losses = "losses of lm_loss"
    assert not torch.allclose(ways["another seed"][losses], expected[losses], rtol=1e-3)
    assert not torch.allclose(rank[name][kind]["whole"][losses], expected[losses], rtol=1e-3)
