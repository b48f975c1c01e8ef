"""Checkpoints of nanotron: the imported models compute what transformers' models compute."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megacore.config.rope import LinearRope
from megacore.convert.imported import import_model
from megacore.convert.nanotron import open_nanotron
from megacore.convert.source import load_weights
from megacore.errors import CheckpointError, ConversionError, MegacoreError
from tests.convert._nanotron import nanotron_config, nanotron_parameters, write_nanotron
from tests.convert._neox import VOCABULARY, llama_model

QKV = "model.decoder.1.pp_block.attn.qkv_proj.weight"


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("interleaved", [False, True, None], ids=["halves", "pairs", "not written"])
def test_llama_is_read(tmp_path: Path, size: int, groups: int, interleaved: bool | None) -> None:
    model = llama_model(groups)
    parameters = nanotron_parameters(model, interleaved=interleaved is not False)
    config = nanotron_config(model, rope_interleaved=interleaved)
    if interleaved is None:  # as before September 2024
        del config["rope_interleaved"]
    write_nanotron(tmp_path, parameters, config, size)
    foreign = open_nanotron(tmp_path)
    ours = load_weights(foreign.spec, foreign.tensors)
    tokens = torch.randint(0, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, computed = model(tokens).logits, ours(tokens)
    assert float(expected.std()) > 0.1
    assert float((expected - computed).abs().max()) < 2e-5
    assert (foreign.kind, foreign.iteration) == ("nanotron Llama", 30)


def test_half_precision_a_tied_head_and_qwen2_are_read(tmp_path: Path) -> None:
    model = llama_model()
    parameters = {
        name: (whole.bfloat16(), dim, chunks)
        for name, (whole, dim, chunks) in nanotron_parameters(model).items()
        if "lm_head" not in name
    }
    config = nanotron_config(model, is_qwen2_config=True, tie_word_embeddings=True)
    del config["is_llama_config"]
    write_nanotron(tmp_path, parameters, config, 2)
    foreign = open_nanotron(tmp_path)
    words = parameters["model.token_position_embeddings.pp_block.token_embedding.weight"][0]
    assert torch.equal(foreign.tensors["embedding.word_embeddings.weight"], words.float())
    assert not foreign.spec.model.untie_embeddings_and_output_weights
    assert foreign.kind == "nanotron Qwen2"
    assert "half precision" in foreign.remarks[0]
    assert import_model(foreign, tmp_path, tmp_path / "imported").name == "iter_0000030"


def test_divided_positions_are_read_where_nanotron_computes_them(tmp_path: Path) -> None:
    qwen2 = {"is_llama_config": False, "is_qwen2_config": True, "_use_qkv_packed": True}
    factor = {"rope_seq_len_interpolation_factor": 4.0}
    written(tmp_path / "qwen2", lambda parameters: None, **qwen2, **factor)
    scaling = open_nanotron(tmp_path / "qwen2").spec.model.rope_scaling
    assert scaling == LinearRope(kind="linear", factor=4.0)
    written(tmp_path / "llama", lambda parameters: None, **factor)
    assert "rope_seq_len_interpolation_factor 4.0" in refusal(tmp_path / "llama", ConversionError)


def refusal(root: Path, error: type[MegacoreError] = CheckpointError) -> str:
    """Return the sentence with which an import is refused; nothing may be left behind."""
    with pytest.raises(error) as caught:
        import_model(open_nanotron(root), root, root / "imported")
    assert not (root / "imported").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def written(root: Path, edit: Callable[[dict[str, Any]], object], **config: Any) -> Path:
    """Write a checkpoint of other parameters or settings; return the directory of its step."""
    model = llama_model()
    parameters = nanotron_parameters(model)
    edit(parameters)
    return write_nanotron(root, parameters, nanotron_config(model, **config), 2)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda known: known.pop(QKV), f"it lacks {QKV}"),
        (lambda known: known.update({"model.more.weight": known[QKV]}), "no place for model.more"),
        (lambda known: known.update({QKV: (torch.ones(64, 8), 0, None)}), "of shape (64, 8)"),
    ],
)
def test_every_parameter_is_used_exactly_once(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    written(tmp_path, edit)
    assert message in refusal(tmp_path)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"rope_scaling": {"factor": 2}}, ConversionError, "rope_scaling {'factor': 2}"),
        ({"moe_config": {"num_experts": 2}}, ConversionError, "moe_config"),
        ({"attention_bias": True}, ConversionError, "attention_bias True"),
        ({"hidden_act": "relu"}, ConversionError, "hidden_act 'relu'"),
        ({"hidden_act": ["silu"]}, ConversionError, "hidden_act ['silu']"),
        ({"is_llama_config": False}, ConversionError, "only Llama and Qwen2 models"),
        ({"num_hidden_layers": 4}, CheckpointError, "it lacks model.decoder.3"),
        ({"hidden_size": 10**12}, CheckpointError, "describes no model"),
        ({"num_attention_heads": None}, CheckpointError, "describes no model"),
    ],
)
def test_other_models_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], error: type[MegacoreError], message: str
) -> None:
    written(tmp_path, lambda parameters: None, **config)
    assert message in refusal(tmp_path, error)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"unsharded_shape": "(10000000000000, 32)"}, "of shape (64, 32), where"),
        ({"unsharded_shape": "__import__('os')"}, "where a number belongs"),
        ({"local_global_slices_pairs": "0,99,None|None,None,None"}, "its header has slices"),
        (
            {"local_global_slices_pairs": "0,99,None|None,None,None#0,99,None|None,None,None"},
            "has the slice '0,99,None'",
        ),
        (
            {"local_global_slices_pairs": "0,32,None|None,None,None#0,32,None|None,None,None"},
            "does not hold every number of",
        ),
        ({"local_global_slices_pairs": "0,8,2|None,None,None#0,8,2|None,None,None"}, "slice '0,8"),
    ],
)
def test_hostile_headers_are_refused(tmp_path: Path, header: dict[str, str], message: str) -> None:
    directory = written(tmp_path, lambda parameters: None)
    path = sorted(directory.joinpath("model", *QKV.split(".")[:-1]).iterdir())[0]
    good = {
        "version": "1.5",
        "unsharded_shape": "(64, 32)",
        "local_global_slices_pairs": "0,32,None|None,None,None#32,64,None|None,None,None",
    }
    save_file(load_file(path), path, metadata=good | header)
    assert message in refusal(tmp_path)


def test_missing_and_damaged_files_are_refused(tmp_path: Path) -> None:
    directory = written(tmp_path, lambda parameters: None)
    _, second = sorted(directory.joinpath("model", *QKV.split(".")[:-1]).iterdir())
    content = second.read_bytes()
    second.unlink()
    assert f"does not hold every number of {QKV}" in refusal(tmp_path)
    second.write_bytes(content[:100])
    assert f"{second} cannot be read" in refusal(tmp_path)
    second.rename(second.with_name("model_weight_exp-rank-0.safetensors"))
    assert "is not named as a parameter" in refusal(tmp_path, ConversionError)
    (directory / "model_config.json").write_text("[]")
    assert "holds no settings" in refusal(tmp_path)
    (directory / "model_config.json").unlink()
    assert "latest.txt names '30', where there is no model_config.json" in refusal(tmp_path)
    (tmp_path / "latest.txt").unlink()
    assert "is no checkpoint of nanotron" in refusal(tmp_path)
