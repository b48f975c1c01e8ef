"""Checkpoints of GPT-NeoX: the imported models compute what transformers' models compute."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megacore.convert.imported import import_model
from megacore.convert.neox import open_neox
from megacore.convert.source import load_weights
from megacore.errors import CheckpointError, ConversionError, MegacoreError
from tests.convert._neox import (
    VOCABULARY,
    llama_layers,
    llama_model,
    llama_settings,
    neox_layers,
    neox_model,
    neox_settings,
    write_neox,
)


def check_logits(root: Path, model: Any) -> None:
    """Compare the logits of an imported checkpoint with those of transformers' model."""
    foreign = open_neox(root)
    ours = load_weights(foreign.spec, foreign.tensors)
    tokens = torch.randint(0, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, computed = model(tokens).logits, ours(tokens)
    assert float(expected.std()) > 0.1
    assert float((expected - computed).abs().max()) < 2e-5
    assert foreign.iteration == 20


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("parallel", [True, False])
def test_biases_are_summed_only_with_parallel_residuals(
    tmp_path: Path, size: int, parallel: bool
) -> None:
    model = neox_model(parallel=parallel)
    layers = neox_layers(model, size, parallel=parallel)
    write_neox(tmp_path, layers, neox_settings(**{"gpt-j-residual": parallel}))
    check_logits(tmp_path, model)


def test_early_names_a_tied_head_and_whole_files_are_read(tmp_path: Path) -> None:
    model = neox_model(tied=True)
    layers = neox_layers(model, 2, parallel=True, legacy=True)
    settings = neox_settings(**{"no-weight-tying": False})
    write_neox(tmp_path / "layers", layers, settings)
    check_logits(tmp_path / "layers", model)
    write_neox(tmp_path / "whole", layers, settings, pipeline=False)
    check_logits(tmp_path / "whole", model)


@pytest.mark.parametrize(("size", "groups", "legacy"), [(1, 2, True), (2, 2, False), (2, 4, True)])
def test_llama_is_read(tmp_path: Path, size: int, groups: int, legacy: bool) -> None:
    model = llama_model(groups)
    layers = llama_layers(model, size, legacy=legacy)
    write_neox(tmp_path, layers, llama_settings(**{"num-kv-heads": groups}))
    check_logits(tmp_path, model)


@pytest.mark.parametrize(("groups", "fused"), [(2, False), (4, True)])
def test_what_earlier_versions_computed_otherwise_is_remarked(
    tmp_path: Path, groups: int, fused: bool
) -> None:
    settings = llama_settings(**{"num-kv-heads": groups, "rmsnorm_fusion": fused})
    write_neox(tmp_path, llama_layers(llama_model(groups), 1), settings)
    remarks = " ".join(open_neox(tmp_path).remarks)
    assert ("ordered the rows of queries, keys and values" in remarks) == (groups < 4)
    assert ("added rms_norm_epsilon to the root" in remarks) == (not fused)


def refusal(root: Path, error: type[MegacoreError] = CheckpointError) -> str:
    """Return the sentence with which an import is refused; nothing may be left behind."""
    with pytest.raises(error) as caught:
        import_model(open_neox(root), root, root / "imported")
    assert not (root / "imported").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def written(root: Path, edit: Callable[[dict[int, Any]], object], **settings: Any) -> Path:
    """Write a checkpoint of other tensors or settings."""
    layers = neox_layers(neox_model(), 2, parallel=True)
    edit(layers)
    write_neox(root, layers, neox_settings(**settings))
    return root


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda layers: layers.pop(3), "it lacks "),
        (lambda layers: layers[6].pop("norm.bias"), "it lacks norm.bias of layer 6"),
        (lambda layers: layers[6].update(more=[torch.ones(2)] * 2), "it has more of layer 6"),
        (
            lambda layers: layers[6].update({"norm.bias": [torch.ones(33)] * 2}),
            "has norm.bias of layer 6 for encoder.final_layernorm.bias of shape (33,)",
        ),
        (
            lambda layers: layers[6]["norm.bias"][1].add_(1),
            "holds two of what should be one: norm.bias of layer 6",
        ),
        (
            lambda layers: layers[6].update({"norm.bias": ["text", "text"]}),
            "holds str as norm.bias of layer 6",
        ),
        (
            lambda layers: layers[6].update({"norm.bias": [torch.ones(32), torch.ones(31)]}),
            "has norm.bias of layer 6 of shape (32,) on tensor rank 0 and of (31,) on tensor rank "
            "1: use another checkpoint",
        ),
        (
            lambda layers: layers[0].update({"word_embeddings.weight": [torch.ones(())] * 2}),
            "describes no model: 1 validation error for ModelSpec vocab_size Input should be gr",
        ),
        (
            # It could be added to the other rank's bias.
            lambda layers: layers[3].update(
                {"attention.dense.bias": [torch.ones(32), torch.ones(1)]}
            ),
            "has attention.dense.bias of layer 3 of shape (32,) on tensor rank 0 and of (1,)",
        ),
    ],
)
def test_every_tensor_is_used_exactly_once(
    tmp_path: Path, edit: Callable[[dict[int, Any]], object], message: str
) -> None:
    assert message in refusal(written(tmp_path, edit))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"gpt_j_tied": True}, ConversionError, "gpt_j_tied True"),
        ({"use_mup": True}, ConversionError, "use_mup True"),
        ({"attention_config": [[["gmlp"], 3]]}, ConversionError, "attention_config 'gmlp'"),
        ({"pos-emb": "rpe"}, ConversionError, "pos_emb 'rpe'"),
        ({"norm": "scalenorm"}, ConversionError, "norm 'scalenorm'"),
        ({"activation": "mish"}, ConversionError, "activation 'mish'"),
        ({"use_bias_in_mlp": False}, ConversionError, "biases in only one"),
        ({"num-layers": 4}, CheckpointError, "it lacks "),
        ({"hidden-size": 10**12}, CheckpointError, "describes no model"),
        ({"num-attention-heads": 5}, CheckpointError, "describes no model"),
    ],
)
def test_other_models_are_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], error: type[MegacoreError], message: str
) -> None:
    assert message in refusal(written(tmp_path, lambda layers: None, **settings), error)


@pytest.mark.parametrize(
    ("kind", "pipeline", "window"), [("flash", 0, 9), ("global", 0, None), ("global", 1, 9)]
)
def test_global_attention_has_a_window_in_a_pipeline(
    tmp_path: Path, kind: str, pipeline: int, window: int | None
) -> None:
    settings = {"attention_config": [[[kind], 3]], "sliding_window_width": 8}
    layers = neox_layers(neox_model(), 2, parallel=True)
    write_neox(tmp_path, layers, neox_settings(**settings), pipeline=bool(pipeline))
    assert open_neox(tmp_path).spec.model.sliding_window == window


def test_a_window_in_some_kernels_is_refused(tmp_path: Path) -> None:
    settings = {"attention_config": [[["global"], 3]], "sliding_window_width": 8}
    settings["scaled_upper_triang_masked_softmax_fusion"] = True
    written(tmp_path, lambda layers: None, **settings)
    assert "in only some layers or kernels" in refusal(tmp_path, ConversionError)


def test_copies_that_drifted_apart_are_averaged_with_a_remark(tmp_path: Path) -> None:
    written(tmp_path, lambda layers: layers[6]["norm.weight"][1].add_(1e-3))
    foreign = open_neox(tmp_path)
    assert "drifted apart, such as norm.weight of layer 6" in " ".join(foreign.remarks)


def test_missing_and_damaged_files_are_refused(tmp_path: Path) -> None:
    directory = written(tmp_path, lambda layers: None) / "global_step20"
    path = directory / "layer_03-model_01-model_states.pt"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert "layer_03-model_01-model_states.pt cannot be read" in refusal(tmp_path)
    path.unlink()
    assert "has layer 3 of tensor ranks [0], where" in refusal(tmp_path)
    path.write_bytes(content)
    conflicting = directory / "configs" / "more.yml"
    conflicting.write_text(yaml.safe_dump({"hidden_size": 64}))
    assert "has hidden_size " in refusal(tmp_path)
    for config in (directory / "configs").iterdir():
        config.unlink()
    assert "has no YAML files in configs/" in refusal(tmp_path)
