"""Options of GPT against the decoders of transformers that they make, and over ranks and chunks
against the whole."""

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
from tests.models._against import (
    EXACT,
    NEAR,
    assert_equal,
    assert_ranks_agree,
    in_transformers,
)

NAMES = [name for name, (family, _) in VARIANTS.items() if family == "gpt"]
LAYERNORM = ("gpt2", "neox", "neox serial")


@pytest.mark.parametrize("name", DECODERS)
def test_against_transformers(name: str) -> None:
    ours, theirs = in_transformers(name)
    given = _families.given(_families.spec(name))
    logits = theirs(given.tokens).logits
    labels = given.labels.where(given.loss_mask, -100)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert_equal(name, ours, theirs, given, [logits], loss, EXACT if name in LAYERNORM else NEAR)


@pytest.mark.parametrize("name", ["gpt2", "mistral", "neox"])
def test_padding_on_the_left_against_transformers(name: str) -> None:
    ours, theirs = in_transformers(name)
    assert isinstance(ours, GPTModel)
    tokens = _families.given(_families.spec(name)).tokens
    present = torch.arange(LENGTH) >= torch.tensor([[0], [3], [7]])
    positions = (present.cumsum(1) - 1).clamp(min=0)
    expected = theirs(tokens, attention_mask=present.long(), position_ids=positions).logits
    logits = ours(tokens, position_ids=positions, present=present)
    assert difference(logits[present], expected[present]) <= NEAR
    assert difference(logits[present], ours(tokens)[present]) > 0.01


def test_alibi_against_transformers() -> None:
    """MPT is a GPT with ALiBi; its norms have no biases, which are zero here."""
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
    given = _families.given(_families.spec("alibi"))
    logits = theirs(given.tokens).logits
    assert difference(ours(given.tokens), logits) <= NEAR
    F.cross_entropy(
        logits.flatten(0, 1), given.labels.where(given.loss_mask, -100).flatten()
    ).backward()
    found = _as_mpt(
        {
            key: value
            for key, value in _families.backward([ours], given).items()
            if "losses" not in key
        }
    )
    assert len(found) == len(list(theirs.parameters()))
    for key, gradient in found.items():
        expected = theirs.get_parameter(key).grad
        assert expected is not None
        assert difference(gradient, expected) <= NEAR, key


def _as_mpt(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """MPT's names; its rows of queries, keys and values are three blocks."""
    names = {
        "embedding.word_embeddings": "wte", "encoder.final_layernorm": "norm_f",
        "encoder.layers": "blocks", "input_layernorm": "norm_1",
        "post_attention_layernorm": "norm_2", "self_attention.dense": "attn.out_proj",
        "self_attention.query_key_value": "attn.Wqkv", "mlp.dense_h_to_4h": "ffn.up_proj",
        "mlp.dense_4h_to_h": "ffn.down_proj",
    }  # fmt: skip
    found = {}
    for name, value in tensors.items():
        if "query_key_value" in name:
            value = value.unflatten(0, (4, 3, 8)).transpose(0, 1).flatten(0, 2)
        for mine, other in names.items():
            name = name.replace(mine, other)
        if name.endswith("weight"):
            found[f"transformer.{name}"] = value
    return found


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 20])
def test_slopes_of_alibi_against_bloom(heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    biases = bloom.build_alibi_tensor(
        torch.ones(1, 3, dtype=torch.long), heads, torch.float32
    ).view(heads, 3)
    torch.testing.assert_close(alibi_slopes(heads), biases[:, 1])


@pytest.mark.parametrize("name", NAMES)
def test_chunks_against_the_whole(family_alone: dict[str, Any], name: str) -> None:
    assert_ranks_agree([family_alone], family_alone, name, "plain", "chunks")


@pytest.mark.parametrize(
    ("kind", "parts"), [("plain", "whole"), ("sequence", "whole"), ("sequence", "chunks")]
)
@pytest.mark.parametrize("name", [name for name in NAMES if name in DIVIDED])
def test_two_ranks_against_one(
    family_ranks: list[dict[str, Any]],
    family_alone: dict[str, Any],
    name: str,
    kind: str,
    parts: str,
) -> None:
    assert_ranks_agree(family_ranks, family_alone, name, kind, parts)
