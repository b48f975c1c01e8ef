"""Comparisons of a model with transformers', and of several ranks with a single one."""

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
"""Tolerance of results that are computed only in float64."""
NEAR = 1e-5
"""Tolerance where transformers computes a part in float32: RMSNorm and MPT's softmax."""


def in_transformers(name: str, **options: Any) -> tuple[Model, nn.Module]:
    """Return our model of a variant, and transformers' with the same weights.

    Every weight of transformers' model comes from ours.
    """
    transformers = pytest.importorskip("transformers")
    spec = _families.spec(name)
    ours = _families.model(spec)
    config = model_config(spec, "float32") | options
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
    """Return our weights or gradients under transformers' names; the tables only move numbers."""
    spec = _families.spec(name)
    form = hf_form_of(spec)[1]
    return {form.name_when_loaded(key): value for key, value in form.key_map(spec).forward(tensors)}


def _untie(theirs: nn.Module, weights: dict[str, Tensor]) -> None:
    """Give transformers' head its own weights if ours has them.

    transformers 5 ties the head of every T5 when it is built.
    """
    head = theirs.get_output_embeddings()
    if "lm_head.weight" in weights and head.weight is theirs.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.detach().clone())


def assert_model_equals_transformers(
    name: str,
    ours: Model,
    theirs: nn.Module,
    model_input: ModelInput,
    their_logits: list[Tensor],
    loss: Tensor,
    tolerance: float,
) -> None:
    """Compare logits where they count, the loss, and every gradient."""
    counts = {"gpt": None, "bert": model_input.present, "t5": model_input.loss_mask}[
        _families.spec(name).family
    ]
    for our_logits, reference in zip(
        _families.logits(ours, model_input), their_logits, strict=True
    ):
        counted = slice(None) if counts is None or reference.dim() < 3 else counts
        assert difference(our_logits[counted], reference[counted]) <= tolerance
    theirs.zero_grad()
    loss.backward()
    torch.testing.assert_close(_families.total(ours.run(model_input)), loss, rtol=tolerance, atol=0)
    gradients = {
        key: value
        for key, value in _families.backward([ours], model_input).items()
        if not key.startswith("losses")
    }
    differences = {
        key: difference(value, _gradient(theirs, key))
        for key, value in translated(name, gradients).items()
    }
    worst = max(differences, key=differences.__getitem__)
    assert differences[worst] <= tolerance, f"{worst}: {differences[worst]}"


def _gradient(theirs: nn.Module, name: str) -> Tensor:
    gradient = theirs.get_parameter(name).grad
    assert gradient is not None
    return gradient


def assert_ranks_equal_single_rank(
    ranks: list[dict[str, Any]], single_rank: dict[str, Any], name: str, kind: str, parts: str
) -> None:
    """Compare losses and complete gradients of several ranks with those of one."""
    results = [rank[name][kind] for rank in ranks]
    expected = single_rank[name]["plain"]
    for number, reference in enumerate(expected["logits"]):
        for rank in results:
            assert difference(rank["logits"][number], reference) <= EXACT
    assert results[0][parts].keys() == expected["whole"].keys()
    for key, reference in expected["whole"].items():
        assert difference(_joined_gradient(results, parts, key), reference) <= EXACT, key


def _joined_gradient(ranks: list[dict[str, Any]], parts: str, key: str) -> Tensor:
    tensors = [rank[parts] for rank in ranks]
    division = ranks[0]["partitions"].get(key)
    if division is not None:
        return joined(tensors, key, division.dim)
    if key in ranks[0]["partial"]:
        return torch.stack([tensor[key] for tensor in tensors]).sum(0)
    return joined(tensors, key, None)


def assert_dropout_depends_only_on_the_seed(rank: dict[str, Any], name: str, kind: str) -> None:
    """Check that the same seed gives the same bits, however the model is computed.

    In chunks it gives the same numbers, and another seed gives others.
    """
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
