"""The gate for every class: it passes equal models and names the first differing layer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.convert.hf.forms import hf_form_of
from megacore.convert.hf.write import write_model
from megacore.convert.outputs import ModelPair
from megacore.convert.parity import (
    _of_causal,
    _of_decoder,
    check_models,
    compare_native,
    load_exported,
    our_perplexity,
)
from megacore.convert.report import ParityReport
from tests.convert._models import MODELS, our_model, samples, tiny_spec

TOLERANCE = 1e-4


def exported(name: str, directory: Path, *, dtype: Any = "float32") -> ModelPair:
    """Return a model of megacore and the model that transformers loads from its export."""
    spec = tiny_spec(name)
    ours = our_model(spec)
    write_model(directory, spec, dict(ours.named_parameters()), dtype=dtype)
    return ModelPair(spec, hf_form_of(spec)[1], ours, load_exported(directory))


def reported(pair: ModelPair) -> ParityReport:
    report = ParityReport(TOLERANCE)
    micro_batch = samples(pair.spec)
    check_models(report, pair, micro_batch, lambda: [micro_batch])
    return report


@pytest.mark.parametrize("name", list(MODELS))
def test_equal_models_pass_the_gate(name: str, tmp_path: Path) -> None:
    pair = exported(name, tmp_path)
    report = reported(pair)
    assert report.problems == []
    assert report.first_differing_layer is None
    assert report.max_abs_logit_difference <= 2e-5
    assert (report.max_abs_answer_difference is not None) == (name in {"bert", "megatron-bert"})
    micro_batch = samples(pair.spec)
    labels = (
        micro_batch.labels.numel()
        if micro_batch.loss_mask is None
        else int(micro_batch.loss_mask.sum())
    )
    assert (report.perplexity_samples, report.perplexity_tokens) == (3, labels)
    assert report.perplexity_with_padding > report.perplexity_ours > 1
    assert report.greedy_tokens >= 3


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_continuation_that_stops_at_a_further_end_passes_the_gate(
    name: str, tmp_path: Path
) -> None:
    """The other samples go on, so that the shorter continuation is padded."""
    pair = exported(name, tmp_path / "one")
    whole = reported(pair)
    batch = samples(pair.spec)
    rows = list((_of_decoder if name == "t5" else _of_causal)(pair, batch))
    end = int(rows[0][1][0])
    assert any(end not in choices.tolist() for _, choices in rows)
    special = pair.spec.special_tokens.model_copy(update={"ends": (end,)})
    spec = pair.spec.model_copy(update={"special_tokens": special})
    write_model(tmp_path / "two", spec, dict(pair.ours.named_parameters()))
    stopped = ModelPair(spec, pair.form, pair.ours, load_exported(tmp_path / "two"))
    report = reported(stopped)
    assert report.problems == []
    assert 0 < report.greedy_tokens < whole.greedy_tokens


PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
CHANGES = [
    ("llama", "model.layers.1.mlp.up_proj.weight", "encoder.layers.1.mlp"),
    ("llama", "lm_head.weight", "output_layer"),
    ("mistral", "model.layers.2.self_attn.k_proj.weight", "encoder.layers.2.self_attention"),
    ("qwen3", "model.layers.0.self_attn.q_norm.weight", "encoder.layers.0.self_attention"),
    ("qwen2", "model.layers.1.self_attn.v_proj.bias", "encoder.layers.1.self_attention"),
    ("phi3", "model.layers.1.self_attn.qkv_proj.weight", "encoder.layers.1.self_attention"),
    ("phi3", "model.layers.2.mlp.gate_up_proj.weight", "encoder.layers.2.mlp"),
    (
        "gemma2",
        "model.layers.1.post_attention_layernorm.weight",
        "encoder.layers.1.post_self_attn_layernorm",
    ),
    (
        "gemma2",
        "model.layers.0.pre_feedforward_layernorm.weight",
        "encoder.layers.0.post_attention_layernorm",
    ),
    ("gemma2", "model.layers.0.self_attn.v_proj.weight", "encoder.layers.0.self_attention"),
    ("olmo2", "model.layers.1.self_attn.k_norm.weight", "encoder.layers.1.self_attention"),
    (
        "olmo2",
        "model.layers.2.post_feedforward_layernorm.weight",
        "encoder.layers.2.post_mlp_layernorm",
    ),
    ("starcoder2", "model.layers.1.mlp.c_fc.bias", "encoder.layers.1.mlp"),
    (
        "neox",
        "gpt_neox.layers.1.post_attention_layernorm.bias",
        "encoder.layers.1.post_attention_layernorm",
    ),
    ("neox", "embed_out.weight", "output_layer"),
    ("bert", "bert.embeddings.LayerNorm.bias", "embedding"),
    ("bert", "bert.encoder.layer.1.output.dense.weight", "encoder.layers.1.mlp"),
    ("bert", "bert.pooler.dense.weight", "pooler"),
    ("bert", "cls.seq_relationship.bias", "binary_head"),
    ("bert", "cls.predictions.transform.dense.weight", "lm_head.layernorm"),
    ("bert", "cls.predictions.bias", "output_layer"),
    (
        "megatron-bert",
        "bert.encoder.layer.2.attention.ln.weight",
        "encoder.layers.2.input_layernorm",
    ),
    ("megatron-bert", "bert.encoder.ln.bias", "encoder.final_layernorm"),
    ("t5", "encoder.block.1.layer.1.DenseReluDense.wi.weight", "encoder.layers.1.mlp"),
    ("t5", "decoder.block.0.layer.1.EncDecAttention.v.weight", "decoder.layers.0.inter_attention"),
    (
        "t5",
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "decoder.layers.0.self_attention",
    ),
    ("t5-v1.1", "decoder.block.1.layer.2.DenseReluDense.wi_0.weight", "decoder.layers.1.mlp"),
    ("t5-v1.1", "lm_head.weight", "output_layer"),
]


@pytest.mark.parametrize(
    ("name", "weight", "layer"), CHANGES, ids=[f"{name}-{layer}" for name, _, layer in CHANGES]
)
def test_a_changed_weight_fails_the_gate_with_its_layer(
    name: str, weight: str, layer: str, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    exported(name, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors[weight] = tensors[weight] + 0.3 * torch.randn_like(tensors[weight])
    save_file(tensors, path, metadata={"format": "pt"})
    spec = tiny_spec(name)
    report = reported(
        ModelPair(spec, hf_form_of(spec)[1], our_model(spec), load_exported(tmp_path))
    )
    assert not report.passed
    assert report.first_differing_layer == layer
    assert len(report.differing_weights) == 1
    if layer in {"pooler", "binary_head"}:
        assert "the logits of its binary head differ" in report.problems
        assert report.max_abs_logit_difference <= TOLERANCE
    else:
        assert "the exported model's logits differ" in report.problems


@pytest.mark.parametrize(
    ("name", "values", "layer"),
    [
        ("llama", {"rms_norm_eps": 1e-2}, "encoder.layers.0.input_layernorm"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
            "encoder.layers.0.self_attention",
        ),
        ("llama-grouped", {"hidden_act": "gelu"}, "encoder.layers.0.mlp"),
        ("mistral", {"sliding_window": 6}, "encoder.layers.0.self_attention"),
        ("gemma2", {"attn_logit_softcapping": None}, "encoder.layers.0.self_attention"),
        ("gemma2", {"query_pre_attn_scalar": 12}, "encoder.layers.0.self_attention"),
        ("gemma2", {"layer_types": ["full_attention"] * 3}, "encoder.layers.0.self_attention"),
        ("starcoder2", {"sliding_window": None}, "encoder.layers.0.self_attention"),
        ("llama3", {"rope_scaling": None, **PLAIN_ROPE}, "encoder.layers.0.self_attention"),
        ("qwen2-window", {"rope_scaling": None, **PLAIN_ROPE}, "encoder.layers.0.self_attention"),
        ("llama-dynamic", {"max_position_embeddings": 12}, "encoder.layers.0.self_attention"),
        ("phi3", {"original_max_position_embeddings": 24}, "encoder.layers.0.self_attention"),
        ("neox", {"use_parallel_residual": False}, "encoder.layers.0.post_attention_layernorm"),
        ("bert", {"layer_norm_eps": 1e-2}, "embedding"),
        ("bert", {"hidden_act": "relu"}, "encoder.layers.0.mlp"),
        ("t5", {"relative_attention_max_distance": 9}, "encoder.layers.0.self_attention"),
        ("t5-v1.1", {"tie_word_embeddings": True}, "output_layer"),
    ],
)
def test_a_wrong_configuration_fails_the_gate(
    name: str, values: dict[str, Any], layer: str, tmp_path: Path
) -> None:
    exported(name, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}), encoding="utf-8"
    )
    spec = tiny_spec(name)
    report = reported(
        ModelPair(spec, hf_form_of(spec)[1], our_model(spec), load_exported(tmp_path))
    )
    assert report.differing_weights == []
    assert "the exported model's logits differ" in report.problems
    assert report.first_differing_layer == layer


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        (
            "llama",
            "model.layers.1.self_attn.q_proj.weight",
            "model.layers.1.self_attn.k_proj.weight",
        ),
        (
            "bert",
            "bert.encoder.layer.1.attention.self.query.weight",
            "bert.encoder.layer.1.attention.self.key.weight",
        ),
        (
            "t5",
            "encoder.block.1.layer.0.SelfAttention.q.weight",
            "encoder.block.1.layer.0.SelfAttention.k.weight",
        ),
    ],
)
def test_swapped_query_and_key_fail_the_gate(
    name: str, first: str, second: str, tmp_path: Path
) -> None:
    pair = exported(name, tmp_path)
    state = pair.theirs.state_dict()
    state[first], state[second] = state[second].clone(), state[first].clone()
    pair.theirs.load_state_dict(state)
    report = reported(pair)
    assert report.first_differing_layer == "encoder.layers.1.self_attention"
    assert "the exported model's logits differ" in report.problems


class OtherTokens:
    """An exported model that generates other tokens."""

    def __init__(self, model: Any, change: Callable[[Any], None]) -> None:
        self._model, self._change = model, change

    def __call__(self, **values: Any) -> Any:
        return self._model(**values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, *values: Any, **options: Any) -> Any:
        tokens = self._model.generate(*values, **options)
        self._change(tokens)
        return tokens


@pytest.mark.parametrize(("name", "place"), [("llama", 13), ("t5", 1)])
def test_another_greedy_continuation_fails_the_gate(name: str, place: int, tmp_path: Path) -> None:
    pair = exported(name, tmp_path)

    def change(tokens: Any) -> None:
        tokens[1, place] = (tokens[1, place] + 1) % 100

    changed = ModelPair(pair.spec, pair.form, pair.ours, OtherTokens(pair.theirs, change))
    assert reported(changed).problems == ["its greedy continuation differs on 1 of 3 samples"]


def test_bfloat16_is_compared_with_rounded_weights_and_natively(tmp_path: Path) -> None:
    pair = exported("llama-grouped", tmp_path, dtype="bfloat16")
    micro_batch = samples(pair.spec)
    trained = our_perplexity(pair, lambda: [micro_batch])
    assert "its weights differ" in reported(pair).problems[-1]
    with torch.no_grad():
        for parameter in pair.ours.parameters():
            parameter.copy_(parameter.bfloat16())
    report = reported(pair)
    assert report.problems == []
    native = load_exported(tmp_path, torch.bfloat16)
    assert next(native.parameters()).dtype == torch.bfloat16
    # These random weights give logits in the tens, for which bfloat16 makes a difference.
    compare_native(report, native, trained, lambda: [micro_batch])
    assert report.perplexity_trained == trained["ours"]
    assert report.perplexity_native != report.perplexity_exported
    near = abs(report.perplexity_native / report.perplexity_trained - 1) <= 0.005  # type: ignore[operator]
    assert report.passed is near
