"""BERT compared with transformers, and divided over ranks and chunks with the undivided model."""

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
from tests.models._comparison import (
    EXACT,
    assert_dropout_depends_only_on_the_seed,
    assert_model_equals_transformers,
    assert_ranks_equal_single_rank,
    in_transformers,
)


@pytest.mark.parametrize("name", BERTS)
def test_logits_loss_and_gradients_equal_transformers(name: str) -> None:
    ours, theirs = in_transformers(name)
    model_input = _families.given(_families.spec(name))
    sentence_labels = (
        {"next_sentence_label": model_input.sentence_labels}
        if "sop_loss" in ours.loss_names
        else {}
    )
    assert model_input.present is not None
    output = theirs(
        model_input.tokens,
        attention_mask=model_input.present.long(),
        token_type_ids=model_input.tokentypes,
        labels=model_input.labels.where(model_input.loss_mask, -100),
        **sentence_labels,
    )
    logits = (
        [output.prediction_logits, output.seq_relationship_logits]
        if sentence_labels
        else [output.logits]
    )
    assert_model_equals_transformers(name, ours, theirs, model_input, logits, output.loss, EXACT)


@pytest.mark.parametrize("name", BERTS)
def test_chunks_equal_the_undivided_model(family_single_rank: dict[str, Any], name: str) -> None:
    assert_ranks_equal_single_rank(
        [family_single_rank], family_single_rank, name, "plain", "chunks"
    )


@pytest.mark.parametrize(
    ("kind", "parts"), [("plain", "whole"), ("sequence", "whole"), ("sequence", "chunks")]
)
@pytest.mark.parametrize("name", ["bert", "megatron bert"])
def test_two_ranks_equal_one(
    family_ranks: list[dict[str, Any]],
    family_single_rank: dict[str, Any],
    name: str,
    kind: str,
    parts: str,
) -> None:
    assert_ranks_equal_single_rank(family_ranks, family_single_rank, name, kind, parts)


def test_heads_have_the_expected_partitions_and_partial_gradients(
    family_ranks: list[dict[str, Any]],
) -> None:
    results = family_ranks[0]["bert"]
    assert results["sequence"]["partitions"]["lm_head.bias"].dim == 0
    assert not {
        name
        for name in results["sequence"]["partitions"]
        if name.startswith(("pooler", "lm_head.dense"))
    }
    assert not results["plain"]["partial"]
    heads = {
        name
        for name in results["sequence"]["partial"]
        if not name.startswith(("encoder", "embedding"))
    }
    assert heads == {
        f"lm_head.{module}.{kind}"
        for module in ("dense", "layernorm")
        for kind in ("weight", "bias")
    }


@pytest.mark.parametrize("kind", ["plain", "sequence"])
def test_dropout_depends_only_on_the_seed(
    family_ranks: list[dict[str, Any]], family_single_rank: dict[str, Any], kind: str
) -> None:
    for rank in (*family_ranks, *([family_single_rank] if kind == "plain" else [])):
        assert_dropout_depends_only_on_the_seed(rank, "bert", kind)


def test_the_content_of_padding_does_not_change_the_losses() -> None:
    spec = _families.spec("bert")
    model, model_input = _families.model(spec), _families.given(spec)
    expected = model.run(model_input)
    model_input.tokens[~model_input.present] = 5
    losses = model.run(model_input)
    assert isinstance(expected, dict)
    assert isinstance(losses, dict)
    for name, term in expected.items():
        counts = slice(None) if term.counts is None else term.counts
        assert torch.equal(losses[name].losses[counts], term.losses[counts])


@pytest.mark.parametrize(
    ("task", "names"), [("sop", (LM_LOSS, "sop_loss")), ("nsp", (LM_LOSS, "nsp_loss"))]
)
def test_the_sentence_task_names_the_loss(task: str, names: tuple[str, ...]) -> None:
    spec = _families.spec("bert")
    model = _families.model(spec, sentence_task=task)
    losses = model.run(_families.given(spec))
    assert isinstance(losses, dict)
    assert tuple(losses) == model.loss_names == names


def test_loss_options_apply_only_to_the_masked_lm_in_training() -> None:
    spec = _families.spec("bert")
    plain, options = _families.model(spec), _families.model(spec, label_smoothing=0.1, z_loss=0.01)

    def losses(model: BertModel) -> dict[str, torch.Tensor]:
        terms = model.run(_families.given(spec))
        assert isinstance(terms, dict)
        return {name: term.losses for name, term in terms.items()}

    expected, actual = losses(plain), losses(options)
    assert not torch.allclose(actual[LM_LOSS], expected[LM_LOSS], rtol=1e-3)
    assert torch.equal(actual["sop_loss"], expected["sop_loss"])
    assert torch.equal(losses(options.eval())[LM_LOSS], expected[LM_LOSS])


@pytest.mark.parametrize("task", ["sop", "nsp"])
def test_the_configuration_selects_bert_and_its_sentence_task(task: str) -> None:
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
    spec = _families.spec("bert")
    exact, rounded = (
        _families.model(spec).run(_families.given(spec)),
        _families.model(spec).to(dtype).run(_families.given(spec)),
    )
    assert isinstance(exact, dict)
    assert isinstance(rounded, dict)
    for name, term in rounded.items():
        assert term.losses.dtype == torch.float32
        torch.testing.assert_close(term.losses.double(), exact[name].losses, rtol=0.03, atol=0.05)
