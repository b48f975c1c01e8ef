"""Models of every family with the kernels that are chosen here against plain torch: dropout,
recomputation, caches."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.config.spec import ModelSpec
from megacore.kernels.choice import Kernels, choose_kernels, plain_kernels
from megacore.kernels.cpu.common import runs_bf16, runs_fp32
from megacore.models.base import Model
from megacore.models.gpt import GPTModel
from megacore.models.layers.shared import KeyValueCache
from tests import _families
from tests._families import DECODERS, LENGTH, VARIANTS

pytestmark = pytest.mark.skipif(not runs_fp32(), reason="this CPU has no kernels of its own")

GATED_BERT = {"activation": "swiglu", "ffn_hidden_size": 48}
EVERY: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in VARIANTS},
    "bert with a gated unit": ("bert", GATED_BERT),
    "heads wider than the kernel's": ("gpt2", {"kv_channels": 264}),
}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.2}
TYPES = [torch.float32, *([torch.bfloat16] if runs_bf16() else [])]


def spec(name: str, **values: Any) -> ModelSpec:
    variant, own = EVERY[name]
    return _families.spec(variant, **own, **values)


def build(
    of: ModelSpec, kernels: Kernels, dtype: torch.dtype = torch.float32, **options: Any
) -> Model:
    return _families.model(of, kernels=kernels, **options).to(dtype)


def chosen(dtype: torch.dtype = torch.float32) -> Kernels:
    kernels = choose_kernels(torch.device("cpu"), dtype)
    assert kernels.names["attention"].startswith("C++")
    return kernels


def check(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float = 2e-5) -> None:
    """Gradients relative to their largest number; those that vanish, to 1."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        largest = max(float(value.abs().max()), 0.05)
        assert float((found[name] - value).abs().max()) <= limit * largest, name


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("name", EVERY)
def test_losses_and_gradients(name: str, dropout: bool) -> None:
    of = spec(name, **(DROPOUT if dropout else {}))
    given = _families.given(of)
    expected = _families.backward([build(of, plain_kernels())], given, dropout_seed=5)
    for recompute in ("none", "selective", "full"):
        check(
            _families.backward([build(of, chosen(), recompute=recompute)], given, dropout_seed=5),
            expected,
        )


@pytest.mark.parametrize("name", EVERY)
def test_logits_without_gradients(name: str) -> None:
    of = spec(name)
    given = _families.given(of)
    models = [build(of, kernels).eval() for kernels in (plain_kernels(), chosen())]
    with torch.inference_mode():
        for found, expected in zip(
            *(_families.logits(own, given) for own in reversed(models)), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        losses = [_families.total(own.run(given)) for own in models]
    torch.testing.assert_close(losses[1], losses[0])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", [*DECODERS, "alibi"])
def test_a_cache_gives_what_the_whole_text_gives(name: str, dtype: torch.dtype) -> None:
    own = build(spec(name), chosen(dtype), dtype).eval()
    assert isinstance(own, GPTModel)
    tokens = _families.given(spec(name)).tokens
    with torch.inference_mode():
        whole, cache = own(tokens), KeyValueCache(LENGTH)
        parts = [
            own(tokens[:, first:end], cache=cache)
            for first, end in ((0, 5), (5, 8), (8, 9), (9, LENGTH))
        ]
    limit = 1e-4 if dtype == torch.float32 else 0.05
    assert float((torch.cat(parts, 1) - whole).abs().max() / whole.abs().max()) < limit


@pytest.mark.parametrize("name", EVERY)
def test_frozen_weights_leave_the_others_their_gradients(name: str) -> None:
    of = spec(name)
    given = _families.given(of)
    expected = _families.backward([build(of, plain_kernels())], given)
    own = build(of, chosen())
    frozen = {parameter for parameter, _ in list(own.named_parameters())[::2]}
    for parameter, values in own.named_parameters():
        values.requires_grad_(parameter not in frozen)
    _families.total(own.run(given)).backward()
    found = {
        parameter: values.grad
        for parameter, values in own.named_parameters()
        if values.grad is not None
    }
    check(
        found,
        {
            parameter: expected[parameter]
            for parameter, _ in own.named_parameters()
            if parameter not in frozen
        },
    )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", EVERY)
def test_what_is_no_number_reaches_the_loss(name: str, dtype: torch.dtype) -> None:
    """From any parameter that the loss depends on."""
    of = spec(name)
    given, own = _families.given(of), build(of, chosen(dtype), dtype)
    for parameter, values in own.named_parameters():
        if (
            "relative" in parameter
            or "position_embeddings" in parameter
            or "tokentype" in parameter
        ):
            continue  # rows of tables that this batch may leave alone
        with torch.no_grad():
            before = values.clone()
            values.view(-1)[-1 if "word_embeddings" not in parameter else slice(None)] = torch.nan
        assert _families.total(own.run(given)).isnan(), parameter
        with torch.no_grad():
            values.copy_(before)
