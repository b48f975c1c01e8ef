"""Options of GPT compared with decoders of transformers, and divided models with whole ones."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.models.gpt import GPTModel
from megacore.models.layers.attention_bias import alibi_slopes
from tests import _families
from tests._families import DECODERS, LENGTH, VARIANTS, difference
from tests._family_ranks import DIVIDED
from tests.models._comparison import (
    EXACT,
    NEAR,
    assert_model_equals_transformers,
    assert_ranks_equal_single_rank,
    in_transformers,
)

NAMES = [name for name, (family, _) in VARIANTS.items() if family == "gpt"]
LAYERNORM = ("gpt2", "neox", "neox serial")


@pytest.mark.parametrize("name", DECODERS)
def test_logits_loss_and_gradients_equal_transformers(name: str) -> None:
    ours, theirs = in_transformers(name)
    model_input = _families.given(_families.spec(name))
    logits = theirs(model_input.tokens).logits
    labels = model_input.labels.where(model_input.loss_mask, -100)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert_model_equals_transformers(
        name, ours, theirs, model_input, [logits], loss, EXACT if name in LAYERNORM else NEAR
    )


@pytest.mark.parametrize("name", ["gpt2", "mistral", "neox"])
def test_logits_with_left_padding_equal_transformers(name: str) -> None:
    ours, theirs = in_transformers(name)
    assert isinstance(ours, GPTModel)
    tokens = _families.given(_families.spec(name)).tokens
    present = torch.arange(LENGTH) >= torch.tensor([[0], [3], [7]])
    positions = (present.cumsum(1) - 1).clamp(min=0)
    expected = theirs(tokens, attention_mask=present.long(), position_ids=positions).logits
    logits = ours(tokens, position_ids=positions, present=present)
    assert difference(logits[present], expected[present]) <= NEAR
    assert difference(logits[present], ours(tokens)[present]) > 0.01


def test_alibi_equals_mpt_of_transformers() -> None:
    """MPT is a GPT with ALiBi; its norms have no biases, so ours are zero here."""
    transformers = pytest.importorskip("transformers")
    ours = _families.model(_families.spec("alibi"))
    assert isinstance(ours, GPTModel)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.endswith("layernorm.bias"):
                parameter.zero_()
    theirs = transformers.MptForCausalLM(
        transformers.MptConfig(
            d_model=32,
            n_heads=4,
            n_layers=2,
            vocab_size=64,
            max_seq_len=LENGTH,
            attn_implementation="eager",
        )
    ).double()
    theirs.load_state_dict(
        _as_mpt({key: value.detach() for key, value in ours.named_parameters()}), strict=False
    )
    model_input = _families.given(_families.spec("alibi"))
    logits = theirs(model_input.tokens).logits
    assert difference(ours(model_input.tokens), logits) <= NEAR
    F.cross_entropy(
        logits.flatten(0, 1), model_input.labels.where(model_input.loss_mask, -100).flatten()
    ).backward()
    gradients = _as_mpt(
        {
            key: value
            for key, value in _families.backward([ours], model_input).items()
            if "losses" not in key
        }
    )
    assert len(gradients) == len(list(theirs.parameters()))
    for key, gradient in gradients.items():
        expected = theirs.get_parameter(key).grad
        assert expected is not None
        assert difference(gradient, expected) <= NEAR, key


def _as_mpt(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under MPT's names, with queries, keys and values in three blocks."""
    names = {
        "embedding.word_embeddings": "wte", "encoder.final_layernorm": "norm_f",
        "encoder.layers": "blocks", "input_layernorm": "norm_1",
        "post_attention_layernorm": "norm_2", "self_attention.dense": "attn.out_proj",
        "self_attention.query_key_value": "attn.Wqkv", "mlp.dense_h_to_4h": "ffn.up_proj",
        "mlp.dense_4h_to_h": "ffn.down_proj",
    }  # fmt: skip
    result = {}
    for name, value in tensors.items():
        if "query_key_value" in name:
            value = value.unflatten(0, (4, 3, 8)).transpose(0, 1).flatten(0, 2)
        for our_name, mpt_name in names.items():
            name = name.replace(our_name, mpt_name)
        if name.endswith("weight"):
            result[f"transformer.{name}"] = value
    return result


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 20])
def test_slopes_of_alibi_equal_blooms(heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    biases = bloom.build_alibi_tensor(
        torch.ones(1, 3, dtype=torch.long), heads, torch.float32
    ).view(heads, 3)
    torch.testing.assert_close(alibi_slopes(heads), biases[:, 1])


def test_slopes_of_alibi_are_not_made_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-3 rounds the tensors that are made with a model to the type of its weights."""
    exact = torch.tensor

    def rounded(*values: Any, **options: Any) -> Tensor:
        made = exact(*values, **options)
        return made.round() if made.is_floating_point() else made

    spec = _families.spec("alibi")
    tokens = _families.given(spec).tokens
    expected = _families.model(spec)(tokens)
    with monkeypatch.context() as engine:
        engine.setattr(torch, "tensor", rounded)
        ours = _families.model(spec)
    assert torch.equal(ours(tokens), expected)


@pytest.mark.parametrize("name", NAMES)
def test_chunks_equal_the_undivided_model(family_single_rank: dict[str, Any], name: str) -> None:
    assert_ranks_equal_single_rank(
        [family_single_rank], family_single_rank, name, "plain", "chunks"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "parts"), [("plain", "whole"), ("sequence", "whole"), ("sequence", "chunks")]
)
@pytest.mark.parametrize("name", [name for name in NAMES if name in DIVIDED])
def test_two_ranks_equal_one(
    family_ranks: list[dict[str, Any]],
    family_single_rank: dict[str, Any],
    name: str,
    kind: str,
    parts: str,
) -> None:
    assert_ranks_equal_single_rank(family_ranks, family_single_rank, name, kind, parts)
