"""Exports in Megatron core's distributed form: torch and the import read back every element."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load

from megacore.convert.megatron.checkpoint import open_megatron
from megacore.convert.megatron.core_write import check_core, core_args_of, write_core
from megacore.errors import ConversionError
from tests.convert._megatron import megatron_spec, weights
from tests.convert._megatron_core import core_state

QUERY_NORMS = {"qk_layernorm": True, "sliding_window": 7}


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("gpt", {}),
        ("gpt-sizes", {}),
        ("gpt-gated", {}),
        ("llama", QUERY_NORMS),
        ("no-positions", {}),
    ],
)
def test_an_export_is_read_back(tmp_path: Path, name: str, model: dict[str, Any]) -> None:
    spec = megatron_spec(name, **model)
    ours = weights(spec)
    write_core(spec, ours, tmp_path, iteration=12)
    opened = open_megatron(tmp_path)
    assert all(torch.equal(opened.tensors[key], value) for key, value in ours.items())
    assert opened.tensors.keys() == ours.keys()
    assert opened.iteration == 12
    assert opened.spec.special_tokens == spec.special_tokens
    assert opened.spec.vocab_size == spec.vocab_size
    read, same = opened.spec.model, spec.model
    for field in ("query_groups", "head_dim", "ffn_size", "activation", "sliding_window"):
        assert getattr(read, field) == getattr(same, field)


def test_torch_reads_every_tensor_under_megatron_cores_name(tmp_path: Path) -> None:
    spec = megatron_spec("llama")
    ours = weights(spec)
    write_core(spec, ours, tmp_path, iteration=12)
    directory = tmp_path / "iter_0000012"
    expected = {
        name: value
        for name, value in core_state(spec, ours).items()
        if not name.startswith("optimizer.") and "_extra_state" not in name
    }
    reader = FileSystemReader(directory)
    entries = reader.read_metadata().state_dict_metadata
    assert {name for name in entries if "_extra_state" not in name} == expected.keys()
    read = {name: torch.empty(value.shape) for name, value in expected.items()}
    load(read, storage_reader=reader, no_dist=True)
    for name, value in expected.items():
        for corner, part in value.parts.items():
            place = tuple(slice(a, a + n) for a, n in zip(corner, part.shape, strict=True))
            assert torch.equal(read[name][place], part), name
    config = json.loads((directory / "metadata.json").read_text())
    assert config == {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


def test_the_arguments_are_those_of_megatron_core() -> None:
    args = core_args_of(megatron_spec("gpt", activation="gelu_tanh"), iteration=3)
    assert (args.bias_gelu_fusion, args.openai_gelu, args.iteration) == (True, False, 3)
    args = core_args_of(megatron_spec("llama", **QUERY_NORMS), iteration=3)
    assert (args.window_size, args.qk_layernorm, args.rotary_base) == ((6, 0), True, 5000)


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        ("bert", {}, "family 'bert' is not written"),
        ("llama", {"parallel_residual": True}, "model.parallel_residual True"),
        ("gpt", {"position_embedding_type": "alibi"}, "model.position_embedding_type 'alibi'"),
        ("gpt", {"add_bias_linear": False}, "model.activation 'gelu_tanh'"),
        ("gpt", {"activation": "relu"}, "model.activation 'relu'"),
    ],
)
def test_models_that_megatron_core_lacks_are_refused(
    name: str, model: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConversionError) as caught:
        check_core(megatron_spec(name, **model))
    assert message in str(caught.value)


def test_weights_of_another_model_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    spec = megatron_spec("gpt")
    ours = weights(spec)
    ours["encoder.final_layernorm.bias"] = torch.ones(3)
    with pytest.raises(ConversionError, match="of another model than its description"):
        write_core(spec, ours, tmp_path, iteration=12)
    assert not list(tmp_path.iterdir())
