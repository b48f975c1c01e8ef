"""BERT against transformers, and divided over ranks and chunks against whole."""

from typing import Any

import pytest
import torch

from megacore.config.data import MaskedLmConfig
from megacore.models.base import LM_LOSS
from megacore.models.bert import BertModel
from megacore.models.build import build_model
from megacore.parallel.mesh import ProcessMesh
from tests import _families
from tests._families import BERTS
from tests._tiny import tiny_config
from tests.models._against import (
    EXACT,
    assert_dropout_repeats,
    assert_equal,
    assert_ranks_agree,
    in_transformers,
)


@pytest.mark.parametrize("name", BERTS)
def test_against_transformers(name: str) -> None:
    ours, theirs = in_transformers(name)
    given = _families.given(_families.spec(name))
    answers = (
        {"next_sentence_label": given.sentence_labels} if "sop_loss" in ours.loss_names else {}
    )
    assert given.present is not None
    found = theirs(
        given.tokens,
        attention_mask=given.present.long(),
        token_type_ids=given.tokentypes,
        labels=given.labels.where(given.loss_mask, -100),
        **answers,
    )
    logits = [found.prediction_logits, found.seq_relationship_logits] if answers else [found.logits]
    assert_equal(name, ours, theirs, given, logits, found.loss, EXACT)


@pytest.mark.parametrize("name", BERTS)
def test_chunks_against_the_whole(family_alone: dict[str, Any], name: str) -> None:
    assert_ranks_agree([family_alone], family_alone, name, "plain", "chunks")


@pytest.mark.parametrize(
    ("kind", "parts"), [("plain", "whole"), ("sequence", "whole"), ("sequence", "chunks")]
)
@pytest.mark.parametrize("name", ["bert", "megatron bert"])
def test_two_ranks_against_one(
    family_ranks: list[dict[str, Any]],
    family_alone: dict[str, Any],
    name: str,
    kind: str,
    parts: str,
) -> None:
    assert_ranks_agree(family_ranks, family_alone, name, kind, parts)


def test_what_is_divided_and_what_is_a_part(family_ranks: list[dict[str, Any]]) -> None:
    found = family_ranks[0]["bert"]
    assert found["sequence"]["partitions"]["lm_head.bias"].dim == 0
    assert not {
        name
        for name in found["sequence"]["partitions"]
        if name.startswith(("pooler", "lm_head.dense"))
    }
    assert not found["plain"]["partial"]
    heads = {
        name
        for name in found["sequence"]["partial"]
        if not name.startswith(("encoder", "embedding"))
    }
    assert heads == {
        f"lm_head.{module}.{kind}"
        for module in ("dense", "layernorm")
        for kind in ("weight", "bias")
    }


@pytest.mark.parametrize("kind", ["plain", "sequence"])
def test_dropout_repeats(
    family_ranks: list[dict[str, Any]], family_alone: dict[str, Any], kind: str
) -> None:
    for rank in (*family_ranks, *([family_alone] if kind == "plain" else [])):
        assert_dropout_repeats(rank, "bert", kind)


def test_what_is_in_padding_does_not_matter() -> None:
    of = _families.spec("bert")
    model, given = _families.model(of), _families.given(of)
    expected = model.run(given)
    given.tokens[~given.present] = 5
    found = model.run(given)
    assert isinstance(expected, dict)
    assert isinstance(found, dict)
    for name, term in expected.items():
        counts = slice(None) if term.counts is None else term.counts
        assert torch.equal(found[name].losses[counts], term.losses[counts])


@pytest.mark.parametrize(
    ("task", "names"), [("sop", (LM_LOSS, "sop_loss")), ("nsp", (LM_LOSS, "nsp_loss"))]
)
def test_the_task_names_the_loss(task: str, names: tuple[str, ...]) -> None:
    of = _families.spec("bert")
    model = _families.model(of, sentence_task=task)
    losses = model.run(_families.given(of))
    assert isinstance(losses, dict)
    assert tuple(losses) == model.loss_names == names


def test_options_of_the_loss_are_the_masked_lms_alone_and_for_training() -> None:
    of = _families.spec("bert")
    plain, options = _families.model(of), _families.model(of, label_smoothing=0.1, z_loss=0.01)

    def losses(model: BertModel) -> dict[str, torch.Tensor]:
        found = model.run(_families.given(of))
        assert isinstance(found, dict)
        return {name: term.losses for name, term in found.items()}

    expected, found = losses(plain), losses(options)
    assert not torch.allclose(found[LM_LOSS], expected[LM_LOSS], rtol=1e-3)
    assert torch.equal(found["sop_loss"], expected["sop_loss"])
    assert torch.equal(losses(options.eval())[LM_LOSS], expected[LM_LOSS])


@pytest.mark.parametrize("task", ["sop", "nsp"])
def test_the_run_decides_the_model(task: str) -> None:
    config = tiny_config()
    data = config.data.model_copy(update={"masked_lm": MaskedLmConfig(sentence_task=task)})
    model = build_model(
        config.model_copy(update={"family": "bert", "data": data}), 60, ProcessMesh.serial()
    )
    assert isinstance(model, BertModel)
    assert model.loss_names == (LM_LOSS, f"{task}_loss")
    assert model.embedding.word_embeddings.weight.shape == (64, 32)


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_parameters_have_megatrons_names(norm_position: str) -> None:
    model = _families.model(_families.spec("bert", norm_position=norm_position, num_layers=1))
    norms = (
        "post_attention_layernorm",
        "input_layernorm" if norm_position == "pre" else "output_layernorm",
    )
    outer = "encoder.final_layernorm" if norm_position == "pre" else "embedding.layernorm"
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == {
        "embedding.word_embeddings.weight": (64, 32),
        "embedding.position_embeddings.weight": (12, 32),
        "embedding.tokentype_embeddings.weight": (2, 32),
        f"{outer}.weight": (32,),
        f"{outer}.bias": (32,),
        **{
            f"encoder.layers.0.{norm}.{kind}": (32,)
            for norm in norms
            for kind in ("weight", "bias")
        },
        "encoder.layers.0.self_attention.query_key_value.weight": (96, 32),
        "encoder.layers.0.self_attention.query_key_value.bias": (96,),
        "encoder.layers.0.self_attention.dense.weight": (32, 32),
        "encoder.layers.0.self_attention.dense.bias": (32,),
        "encoder.layers.0.mlp.dense_h_to_4h.weight": (128, 32),
        "encoder.layers.0.mlp.dense_h_to_4h.bias": (128,),
        "encoder.layers.0.mlp.dense_4h_to_h.weight": (32, 128),
        "encoder.layers.0.mlp.dense_4h_to_h.bias": (32,),
        "lm_head.dense.weight": (32, 32),
        "lm_head.dense.bias": (32,),
        "lm_head.layernorm.weight": (32,),
        "lm_head.layernorm.bias": (32,),
        "lm_head.bias": (64,),
        "pooler.dense.weight": (32, 32),
        "pooler.dense.bias": (32,),
        "binary_head.weight": (2, 32),
        "binary_head.bias": (2,),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_fp32_losses_near_the_exact_ones(dtype: torch.dtype) -> None:
    of = _families.spec("bert")
    exact, found = (
        _families.model(of).run(_families.given(of)),
        _families.model(of).to(dtype).run(_families.given(of)),
    )
    assert isinstance(exact, dict)
    assert isinstance(found, dict)
    for name, term in found.items():
        assert term.losses.dtype == torch.float32
        torch.testing.assert_close(term.losses.double(), exact[name].losses, rtol=0.03, atol=0.05)
