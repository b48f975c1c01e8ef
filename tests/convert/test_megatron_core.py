"""Checkpoints in Megatron core's distributed form: every division of the tensors is read."""

import argparse
import pathlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.config.rope import LinearRope, Llama3Rope, RopeScaling
from megacore.convert.imported import import_model
from megacore.convert.inert import load_inert
from megacore.convert.megatron.checkpoint import open_megatron
from megacore.convert.source import CheckpointTensors
from tests.convert._megatron_core import ITERATION, core_args, core_state, write_core, written_core

ROOT = Path(__file__).parents[2]
QUERY_NORMS = {"qk_layernorm": True, "kv_channels": 16}


@pytest.mark.parametrize(
    "name",
    [
        *("gpt", "gpt-gated", "gpt-sizes", "llama", "llama3", "no-positions"),
        *("bert", "bert-no-binary-head"),
    ],
)
@pytest.mark.parametrize("tensor", [1, 2])
def test_every_element_has_its_place(tmp_path: Path, name: str, tensor: int) -> None:
    _, ours, spec = written_core(tmp_path, name, tensor=tensor)
    opened = open_megatron(tmp_path)
    assert opened.kind == f"Megatron core {spec.family}"
    assert opened.iteration == ITERATION
    assert opened.tensors.keys() == ours.keys()
    for key, value in ours.items():
        assert torch.equal(opened.tensors[key], value), key
    read, same = opened.spec.model.model_dump(), spec.model.model_dump()
    for field in ("num_query_groups", "kv_channels", "ffn_hidden_size"):
        read.pop(field), same.pop(field)
    assert read == same | {"make_vocab_size_divisible_by": read["make_vocab_size_divisible_by"]}
    assert opened.spec.padded_vocab_size == spec.padded_vocab_size


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"stacked": False, "tensor": 2}),
        ("llama", {"halves": "named", "tensor": 2}),
        ("llama", {"halves": "joined", "tensor": 2}),
        ("llama", {"halves": "joined", "tensor": 1}),
        ("gpt", {"local_norms": True, "common_file": True}),
        ("gpt", {"local_norms": True, "stacked": False, "plans": False}),
        ("llama", {"model": QUERY_NORMS, "tensor": 2}),
        ("gpt", {"model": {"qk_layernorm": True}}),
        ("llama", {"model": {"sliding_window": 7}}),
        ("llama", {"model": {"sliding_window": 7, "window_attn_skip_freq": 2}}),
    ],
)
def test_every_version_of_the_form_is_read(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    directory, ours, spec = written_core(tmp_path, name, **options)
    opened = open_megatron(directory)
    assert all(torch.equal(opened.tensors[key], value) for key, value in ours.items())
    assert opened.tensors.keys() == ours.keys()
    assert opened.spec.model.qk_layernorm == spec.model.qk_layernorm
    assert opened.spec.model.sliding_window == spec.model.sliding_window
    assert opened.spec.model.window_attn_skip_freq == spec.model.window_attn_skip_freq


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"use_rope_scaling": True}, Llama3Rope(kind="llama3", factor=8.0)),
        (
            {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
            Llama3Rope(kind="llama3", factor=32.0),
        ),
        ({"rotary_seq_len_interpolation_factor": 4}, LinearRope(kind="linear", factor=4.0)),
        ({"rotary_seq_len_interpolation_factor": 1}, None),
    ],
)
def test_scaled_rotary_positions_are_those_of_the_args(
    tmp_path: Path, args: dict[str, Any], expected: RopeScaling | None
) -> None:
    _, ours, spec = written_core(tmp_path / "base", "llama")
    write_core(tmp_path / "scaled", core_state(spec, ours), core_args(spec, **args))
    assert open_megatron(tmp_path / "scaled").spec.model.rope_scaling == expected


def test_half_precision_is_read_as_float32_with_a_remark(tmp_path: Path) -> None:
    spec_root = tmp_path / "source"
    _, ours, spec = written_core(spec_root, "llama")
    small = {name: (value % 251).bfloat16() for name, value in ours.items()}
    write_core(tmp_path / "half", core_state(spec, small, tensor=2), core_args(spec, tensor=2))
    opened = open_megatron(tmp_path / "half")
    assert all(torch.equal(opened.tensors[key], value.float()) for key, value in small.items())
    assert "half precision" in " ".join(opened.remarks)


def test_the_activation_is_the_one_that_megatron_core_computes(tmp_path: Path) -> None:
    _, ours, spec = written_core(tmp_path / "base")
    for number, (changes, expected) in enumerate(
        [
            ({"bias_gelu_fusion": True}, "gelu_tanh"),
            ({"bias_gelu_fusion": False, "openai_gelu": True}, "gelu"),
        ]
    ):
        root = tmp_path / str(number)
        write_core(root, core_state(spec, ours), core_args(spec, **changes))
        assert open_megatron(root).spec.model.activation == expected


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_that_any_python_has_pickled_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    """torch pickles the directory; Python 3.13 moved its class."""
    monkeypatch.setitem(sys.modules, module, pathlib)
    monkeypatch.setattr(pathlib.PosixPath, "__module__", module)
    _, ours, _ = written_core(tmp_path, "gpt")
    metadata = (tmp_path / f"iter_{ITERATION:07d}/.metadata").read_bytes()
    assert module.encode() + b"\x94\x8c\x09PosixPath" in metadata
    assert open_megatron(tmp_path).tensors.keys() == ours.keys()
    torch.save({"args": argparse.Namespace(load=tmp_path)}, tmp_path / "args.pt")
    assert load_inert(tmp_path / "args.pt")["args"].load.given[-1] == tmp_path.name


def test_an_import_writes_every_element(tmp_path: Path) -> None:
    _, ours, _ = written_core(tmp_path / "source", "llama", tensor=2)
    foreign = open_megatron(tmp_path / "source")
    written = import_model(foreign, tmp_path / "source", tmp_path / "imported")
    assert written.name == f"iter_{ITERATION:07d}"
    imported = CheckpointTensors(written)
    assert all(torch.equal(imported[key], value) for key, value in ours.items())
