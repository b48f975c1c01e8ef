"""Models of every family with the chosen kernels, compared with plain torch.

The tests include dropout, recomputation, caches and frozen weights.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.config.rope import same_up_to
from megacore.config.spec import ModelSpec
from megacore.config.train import KernelsConfig
from megacore.kernels.choice import Kernels, choose_kernels, plain_kernels
from megacore.kernels.cpu.common import runs_bf16, runs_fp32
from megacore.kernels.implementation import Setting
from megacore.models.base import Model
from megacore.models.gpt import GPTModel
from megacore.models.layers.shared import KeyValueCache
from tests import _families
from tests._families import DECODERS, LENGTH, VARIANTS

pytestmark = pytest.mark.skipif(not runs_fp32(), reason="this CPU has no kernels of its own")

GATED_BERT = {"activation": "swiglu", "ffn_hidden_size": 48}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in VARIANTS},
    "bert with a gated unit": ("bert", GATED_BERT),
    "heads wider than the kernel's": ("gpt2", {"kv_channels": 264}),
}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.2}
TYPES = [torch.float32, *([torch.bfloat16] if runs_bf16() else [])]


def spec(name: str, **values: Any) -> ModelSpec:
    variant, options = MODELS[name]
    return _families.spec(variant, **options, **values)


def build(
    spec: ModelSpec, kernels: Kernels, dtype: torch.dtype = torch.float32, **options: Any
) -> Model:
    return _families.model(spec, kernels=kernels, **options).to(dtype)


def chosen(model_spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Kernels:
    softcapped = model_spec.model.attn_logit_softcapping is not None
    kernels = choose_kernels(Setting(torch.device("cpu"), dtype, softcapped=softcapped))
    assert kernels.names["attention"].startswith("torch" if softcapped else "C++")
    return kernels


def check_gradients(
    actual: dict[str, Tensor], expected: dict[str, Tensor], limit: float = 2e-5
) -> None:
    """Compare gradients relative to their largest number, or to 0.05 if they vanish."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        largest = max(float(value.abs().max()), 0.05)
        assert float((actual[name] - value).abs().max()) <= limit * largest, name


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_equal_plain_torch(name: str, dropout: bool) -> None:
    model_spec = spec(name, **(DROPOUT if dropout else {}))
    model_input = _families.given(model_spec)
    expected = _families.backward([build(model_spec, plain_kernels())], model_input, dropout_seed=5)
    for recompute in ("none", "selective", "full"):
        check_gradients(
            _families.backward(
                [build(model_spec, chosen(model_spec), recompute=recompute)],
                model_input,
                dropout_seed=5,
            ),
            expected,
        )


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_losses_and_gradients_of_mixed_kernels_equal_plain_torch(name: str) -> None:
    model_spec = spec(name, **DROPOUT)
    model_input = _families.given(model_spec)
    mixed = choose_kernels(
        Setting(torch.device("cpu"), torch.float32),
        config=KernelsConfig(attention="plain", norm="cpp", cross_entropy="plain", dropout="cpp"),
    )
    expected = _families.backward([build(model_spec, plain_kernels())], model_input, dropout_seed=5)
    actual = _families.backward([build(model_spec, mixed)], model_input, dropout_seed=5)
    check_gradients(actual, expected)


@pytest.mark.parametrize("name", MODELS)
def test_inference_equals_plain_torch(name: str) -> None:
    model_spec = spec(name)
    model_input = _families.given(model_spec)
    models = [
        build(model_spec, kernels).eval() for kernels in (plain_kernels(), chosen(model_spec))
    ]
    with torch.inference_mode():
        for actual, expected in zip(
            *(_families.logits(model, model_input) for model in reversed(models)), strict=True
        ):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        losses = [_families.total(model.run(model_input)) for model in models]
    torch.testing.assert_close(losses[1], losses[0])


def cacheable(name: str) -> bool:
    """Return True if the rotations do not depend on the length of the sequence."""
    return same_up_to(spec(name).model.rope_scaling) is None


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", [name for name in (*DECODERS, "alibi") if cacheable(name)])
def test_cached_logits_equal_those_of_the_complete_sequence(name: str, dtype: torch.dtype) -> None:
    model_spec = spec(name)
    model = build(model_spec, chosen(model_spec, dtype), dtype).eval()
    assert isinstance(model, GPTModel)
    tokens = _families.given(spec(name)).tokens
    with torch.inference_mode():
        complete, cache = model(tokens), KeyValueCache(LENGTH)
        parts = [
            model(tokens[:, first:end], cache=cache)
            for first, end in ((0, 5), (5, 8), (8, 9), (9, LENGTH))
        ]
    limit = 1e-4 if dtype == torch.float32 else 0.05
    assert float((torch.cat(parts, 1) - complete).abs().max() / complete.abs().max()) < limit


@pytest.mark.parametrize("name", MODELS)
def test_frozen_weights_do_not_change_the_other_gradients(name: str) -> None:
    model_spec = spec(name)
    model_input = _families.given(model_spec)
    expected = _families.backward([build(model_spec, plain_kernels())], model_input)
    model = build(model_spec, chosen(model_spec))
    frozen = {parameter for parameter, _ in list(model.named_parameters())[::2]}
    for parameter, values in model.named_parameters():
        values.requires_grad_(parameter not in frozen)
    _families.total(model.run(model_input)).backward()
    actual = {
        parameter: values.grad
        for parameter, values in model.named_parameters()
        if values.grad is not None
    }
    check_gradients(
        actual,
        {
            parameter: expected[parameter]
            for parameter, _ in model.named_parameters()
            if parameter not in frozen
        },
    )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", MODELS)
def test_nan_in_any_used_parameter_reaches_the_loss(name: str, dtype: torch.dtype) -> None:
    model_spec = spec(name)
    model_input, model = (
        _families.given(model_spec),
        build(model_spec, chosen(model_spec, dtype), dtype),
    )
    for parameter, values in model.named_parameters():
        if (
            "relative" in parameter
            or "position_embeddings" in parameter
            or "tokentype" in parameter
        ):
            continue  # rows of tables that this batch may not use
        with torch.no_grad():
            before = values.clone()
            values.view(-1)[-1 if "word_embeddings" not in parameter else slice(None)] = torch.nan
        assert _families.total(model.run(model_input)).isnan(), parameter
        with torch.no_grad():
            values.copy_(before)
