"""T5 compared with transformers, and divided over ranks and chunks with the undivided model."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.convert.hf.forms import hf_form_of
from megacore.models.base import LM_LOSS, Model
from megacore.models.build import build_model
from megacore.models.init import initialize
from megacore.models.t5 import T5Model
from megacore.parallel.mesh import SINGLE_RANK, ParallelGroup, ProcessMesh
from megacore.pipeline_parallel.partition import ModelChunk
from megacore.tensor_parallel import partitions
from tests import _families
from tests._families import DECODER_LENGTH, LENGTH, T5S
from tests._tiny import tiny_config
from tests.models._comparison import (
    NEAR,
    assert_dropout_depends_only_on_the_seed,
    assert_model_equals_transformers,
    assert_ranks_equal_single_rank,
    in_transformers,
)


@pytest.mark.parametrize("name", T5S)
def test_logits_loss_and_gradients_equal_transformers(name: str) -> None:
    ours, theirs = in_transformers(name)
    model_input = _families.given(_families.spec(name))
    assert model_input.present is not None
    output = theirs(
        model_input.tokens,
        attention_mask=model_input.present.long(),
        labels=model_input.labels.where(model_input.loss_mask, -100),
    )
    assert_model_equals_transformers(
        name, ours, theirs, model_input, [output.logits], output.loss, NEAR
    )


@pytest.mark.parametrize("name", T5S)
def test_chunks_equal_the_undivided_model(family_single_rank: dict[str, Any], name: str) -> None:
    assert_ranks_equal_single_rank(
        [family_single_rank], family_single_rank, name, "plain", "chunks"
    )


@pytest.mark.parametrize(
    ("kind", "parts"), [("plain", "whole"), ("sequence", "whole"), ("sequence", "chunks")]
)
@pytest.mark.parametrize("name", T5S)
def test_two_ranks_equal_one(
    family_ranks: list[dict[str, Any]],
    family_single_rank: dict[str, Any],
    name: str,
    kind: str,
    parts: str,
) -> None:
    assert_ranks_equal_single_rank(family_ranks, family_single_rank, name, kind, parts)


@pytest.mark.parametrize("kind", ["plain", "sequence"])
def test_dropout_depends_only_on_the_seed(
    family_ranks: list[dict[str, Any]], family_single_rank: dict[str, Any], kind: str
) -> None:
    for rank in (*family_ranks, *([family_single_rank] if kind == "plain" else [])):
        assert_dropout_depends_only_on_the_seed(rank, "t5 v1.1", kind)


def test_dropout_is_where_the_original_has_it_and_independent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Besides attention weights: both embeddings, all branches and MLPs, both stacks' outputs."""
    drawn: list[Tensor] = []
    dropout = F.dropout

    def recorded(x: Tensor, p: float) -> Tensor:
        dropped = dropout(x, p)
        drawn.append(dropped == 0)
        return dropped

    spec = _families.spec("t5 v1.0", hidden_dropout=0.1)
    model, model_input = _families.model(spec), _families.given(spec)
    monkeypatch.setattr(F, "dropout", recorded)
    model.run(model_input, dropout_seed=1)
    encoder, decoder = [LENGTH] * (1 + 2 * 3 + 1), [DECODER_LENGTH] * (1 + 2 * 4 + 1)
    assert [mask.shape[1] for mask in drawn] == encoder + decoder
    flat = [tuple(mask[0].flatten()[:128].tolist()) for mask in drawn]
    assert len(set(flat)) == len(flat)


def test_the_content_of_padding_does_not_change_the_logits() -> None:
    spec = _families.spec("t5 v1.0")
    model, model_input = _families.model(spec), _families.given(spec)
    expected = model(model_input)
    model_input.tokens[~model_input.present] = 5
    logits = model(model_input)
    assert torch.equal(logits, expected)
    assert model_input.decoder_tokens is not None
    model_input.decoder_tokens[:, 5:] = 7
    assert torch.equal(model(model_input)[:, :5], expected[:, :5])
    assert not torch.allclose(model(model_input)[:, 5:], expected[:, 5:], rtol=1e-3)


def test_a_decoder_chunk_passes_on_the_encoder_output() -> None:
    spec = _families.spec("t5 v1.1")
    model_input = _families.given(spec)
    parts = [_families.model(spec, chunk=chunk) for chunk in _families.chunks(spec)]
    hidden: list[Tensor] = []
    for part in parts[:-1]:
        hidden.append(part.run(model_input, hidden[-1] if hidden else None))  # type: ignore[arg-type]
    assert [output.shape[1] for output in hidden] == [LENGTH] * 2 + [LENGTH + DECODER_LENGTH] * 2
    for output in hidden[2:]:
        assert torch.equal(output[:, :LENGTH], hidden[1])


def test_recomputation_counts_layers_of_the_encoder_first() -> None:
    def recomputed(chunk: ModelChunk | None, layers: int | None) -> list[str]:
        model = _families.model(
            _families.spec("t5 v1.1"), chunk=chunk, recompute="full", recompute_num_layers=layers
        )
        return [
            name
            for name, module in model.named_modules()
            if getattr(module, "recompute", None) == "full"
        ]

    encoder = [f"encoder.layers.{layer}" for layer in range(2)]
    decoder = [f"decoder.layers.{layer}" for layer in range(3)]
    assert recomputed(None, None) == encoder + decoder
    assert recomputed(None, 1) == encoder[:1]
    assert recomputed(None, 3) == encoder + decoder[:1]
    assert recomputed(ModelChunk(range(0), False, False, range(1, 3)), 1) == decoder[1:2]


def test_a_middle_decoder_chunk_has_no_embedding_table() -> None:
    model = _families.model(
        _families.spec("t5 v1.1"), chunk=ModelChunk(range(0), False, False, range(1, 2))
    )
    assert isinstance(model, T5Model)
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"decoder"}
    assert not [name for name, _ in model.named_parameters() if "final_layernorm" in name]


@pytest.mark.parametrize("name", T5S)
def test_initial_weights_have_the_spread_of_transformers(name: str) -> None:
    """An untied head is an exception: it has the spread of a matrix in Mesh TensorFlow."""
    transformers = pytest.importorskip("transformers")
    wide = {
        "hidden_size": 256,
        "ffn_hidden_size": 128,
        "kv_channels": 32,
        "relative_attention_num_buckets": 64,
    }
    spec = _families.spec(name, **wide, relative_attention_max_distance=128)
    ours = _families.model(spec)
    initialize(ours, spec, seed=3)
    weights = dict(
        hf_form_of(spec)[1]
        .key_map(spec)
        .forward({key: value.detach() for key, value in ours.named_parameters()})
    )
    theirs = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**hf_form_of(spec)[1].write_config(spec))
    )
    for key, value in weights.items():
        if value.dim() == 1:
            assert (value == 1).all(), key
            continue
        spread = (
            256**-0.5
            if key == "lm_head.weight"
            else float(theirs.get_parameter(key).detach().std())
        )
        assert abs(float(value.std()) / spread - 1) < 8 / (2 * value.numel()) ** 0.5, key
        assert abs(float(value.mean()) / spread) < 5 / value.numel() ** 0.5, key


@pytest.mark.parametrize("name", ["bert", "t5 v1.1"])
def test_initial_weights_are_the_same_in_every_layout(name: str) -> None:
    def initial(tp: ParallelGroup, chunk: ModelChunk | None = None) -> Model:
        model = _families.model(spec, tp, chunk=chunk)
        initialize(model, spec, seed=3)
        return model

    spec = _families.spec(name)
    undivided = initial(SINGLE_RANK).state_dict()
    for chunk in (None, *_families.chunks(spec)):
        for rank in range(2):
            part = initial(ParallelGroup(None, rank, 2), chunk)
            divided = partitions(part)
            for key, value in part.state_dict().items():
                expected = divided[key].shard(undivided[key]) if key in divided else undivided[key]
                assert torch.equal(value, expected), key


def test_the_configuration_selects_t5() -> None:
    config = tiny_config().model_copy(
        update={"family": "t5", "model": _families.spec("t5 v1.1").model}
    )
    model = build_model(config, 60, ProcessMesh.serial())
    assert isinstance(model, T5Model)
    assert model.embedding is not None
    assert model.embedding.word_embeddings.weight.shape == (64, 32)


def test_parameters_have_megatrons_names() -> None:
    model = _families.model(_families.spec("t5 v1.1", num_layers=1, num_decoder_layers=1))
    layer = {
        "input_layernorm.weight": (32,),
        "self_attention.query_key_value.weight": (144, 32),
        "self_attention.dense.weight": (32, 48),
        "post_attention_layernorm.weight": (32,),
        "mlp.dense_h_to_4h_gate.weight": (48, 32),
        "mlp.dense_h_to_4h.weight": (48, 32),
        "mlp.dense_4h_to_h.weight": (32, 48),
    }
    cross = {
        "inter_attention.query.weight": (48, 32),
        "inter_attention.key_value.weight": (96, 32),
        "inter_attention.dense.weight": (32, 48),
        "post_inter_attention_layernorm.weight": (32,),
    }
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == {
        "embedding.word_embeddings.weight": (64, 32),
        **{f"encoder.layers.0.{name}": shape for name, shape in layer.items()},
        "encoder.relative_attention_bias.weight": (8, 4),
        "encoder.final_layernorm.weight": (32,),
        **{f"decoder.layers.0.{name}": shape for name, shape in (layer | cross).items()},
        "decoder.relative_attention_bias.weight": (8, 4),
        "decoder.final_layernorm.weight": (32,),
        "output_layer.weight": (64, 32),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_fp32_losses_near_the_exact_ones(dtype: torch.dtype) -> None:
    spec = _families.spec("t5 v1.1")
    exact, rounded = (
        _families.model(spec).run(_families.given(spec)),
        _families.model(spec).to(dtype).run(_families.given(spec)),
    )
    assert isinstance(exact, dict)
    assert isinstance(rounded, dict)
    assert rounded[LM_LOSS].losses.dtype == torch.float32
    torch.testing.assert_close(
        rounded[LM_LOSS].losses.double(), exact[LM_LOSS].losses, rtol=0.03, atol=0.05
    )
