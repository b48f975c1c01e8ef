"""Models built from a configuration."""

from dataclasses import replace

import pytest
import torch

from megacore.config.spec import ModelSpec
from megacore.models.build import build_model
from megacore.models.parameters import parameter_count
from megacore.parallel.mesh import ParallelGroup, ProcessMesh
from megacore.tensor_parallel import partial_gradients
from tests._tiny import tiny_config


def test_parameters_are_fp32_and_have_megatrons_names() -> None:
    model = build_model(tiny_config(num_layers=1), 500, ProcessMesh.serial())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == {
        "embedding.word_embeddings.weight": (504, 32),
        "embedding.position_embeddings.weight": (16, 32),
        "encoder.layers.0.input_layernorm.weight": (32,),
        "encoder.layers.0.input_layernorm.bias": (32,),
        "encoder.layers.0.self_attention.query_key_value.weight": (96, 32),
        "encoder.layers.0.self_attention.query_key_value.bias": (96,),
        "encoder.layers.0.self_attention.dense.weight": (32, 32),
        "encoder.layers.0.self_attention.dense.bias": (32,),
        "encoder.layers.0.post_attention_layernorm.weight": (32,),
        "encoder.layers.0.post_attention_layernorm.bias": (32,),
        "encoder.layers.0.mlp.dense_h_to_4h.weight": (128, 32),
        "encoder.layers.0.mlp.dense_h_to_4h.bias": (128,),
        "encoder.layers.0.mlp.dense_4h_to_h.weight": (32, 128),
        "encoder.layers.0.mlp.dense_4h_to_h.bias": (32,),
        "encoder.final_layernorm.weight": (32,),
        "encoder.final_layernorm.bias": (32,),
    }


@pytest.mark.parametrize(("vocab_size", "ffn", "positions"), [(512, None, None), (509, 96, 64)])
def test_parameter_count_equals_the_models(
    vocab_size: int, ffn: int | None, positions: int | None
) -> None:
    rms = {"normalization": "rmsnorm", "qk_layernorm": True}
    for groups, values in (
        (None, {}),
        (2, {}),
        (None, {"norm_position": "sandwich"}),
        (2, rms | {"norm_position": "reordered"}),
        (2, rms | {"qk_layernorm_scope": "projection", "kv_channels": 10}),
    ):
        config = tiny_config(
            num_layers=3,
            ffn_hidden_size=ffn,
            max_position_embeddings=positions,
            num_query_groups=groups,
            **values,
        )
        model = build_model(config, vocab_size, ProcessMesh.serial())
        assert parameter_count(ModelSpec.of(config, vocab_size)) == sum(
            parameter.numel() for parameter in model.parameters()
        )


@pytest.mark.parametrize("groups", [None, 2])
def test_parameter_count_includes_biases_of_queries_keys_and_values(groups: int | None) -> None:
    config = tiny_config(add_bias_linear=False, add_qkv_bias=True, num_query_groups=groups)
    model = build_model(config, 512, ProcessMesh.serial())
    names = {name for name, _ in model.named_parameters() if "bias" in name and "norm" not in name}
    parts = ("query_key_value",) if groups is None else ("query", "key_value")
    assert names == {
        f"encoder.layers.{layer}.self_attention.{part}.bias" for layer in range(2) for part in parts
    }
    assert parameter_count(ModelSpec.of(config, 512)) == sum(
        parameter.numel() for parameter in model.parameters()
    )


def test_the_meta_device_allocates_nothing() -> None:
    config = tiny_config(num_layers=96, hidden_size=12288, num_attention_heads=96)
    model = build_model(config, 50257, ProcessMesh.serial(), device="meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in model.parameters()) == parameter_count(
        ModelSpec.of(config, 50257)
    )


def test_sequence_parallelism_needs_a_tensor_parallel_group() -> None:
    config = tiny_config()
    config = config.model_copy(
        update={"parallel": config.parallel.model_copy(update={"sequence_parallel": True})}
    )
    assert not build_model(config, 512, ProcessMesh.serial(), device="meta").sequence_parallel
    two = replace(ProcessMesh.serial(), tensor_parallel=ParallelGroup(None, 0, 2))
    model = build_model(config, 512, two, device="meta")
    assert model.sequence_parallel
    assert partial_gradients(model) == {
        "embedding.position_embeddings.weight",
        *(
            f"encoder.layers.{layer}.{norm}.{kind}"
            for layer in range(2)
            for norm in ("input_layernorm", "post_attention_layernorm")
            for kind in ("weight", "bias")
        ),
        "encoder.final_layernorm.weight",
        "encoder.final_layernorm.bias",
    }
