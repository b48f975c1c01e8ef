"""Imports hold one tensor at a time, not a model: memory of mapped files is the system's."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megacore.convert.megatron.checkpoint import write_megatron
from tests._limits import HANG
from tests.convert._megatron import megatron_spec, weights
from tests.convert._megatron_core import core_args, core_state, write_core
from tests.convert._nanotron import nanotron_config, nanotron_parameters, write_nanotron
from tests.convert._neox import llama_layers, llama_settings, write_neox

ROOT = Path(__file__).parents[2]
LAYERS, HIDDEN, INNER = 12, 384, 1024
TOTAL = 4 * LAYERS * (3 * INNER * HIDDEN + 3 * HIDDEN**2)
"""Bytes of the layers' weights in fp32: 78 MB."""
BLOCKS = 8 << 20
"""Bytes of the blocks that are read and hashed at a time."""


def llama() -> Any:
    """Return a LlamaForCausalLM of the sizes above."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=INNER,
        max_position_embeddings=48,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return LlamaForCausalLM(config).eval()


def write_hf(root: Path) -> None:
    llama().save_pretrained(root)


def write_neox_model(root: Path) -> None:
    model = llama()
    changes = {"num-layers": LAYERS, "hidden-size": HIDDEN, "num-attention-heads": 6}
    settings = llama_settings(**changes, **{"num-kv-heads": 3, "attention_config": None})
    write_neox(root, llama_layers(model, 1), settings)


def write_nanotron_model(root: Path) -> None:
    model = llama()
    write_nanotron(root, nanotron_parameters(model), nanotron_config(model), 2)


def _megatron_model() -> tuple[Any, dict[str, torch.Tensor]]:
    sizes = {"num_layers": LAYERS, "hidden_size": HIDDEN, "ffn_hidden_size": INNER}
    spec = megatron_spec("llama", **sizes, num_attention_heads=6, num_query_groups=2)
    return spec, weights(spec, numbered=False)


def write_classic(root: Path) -> None:
    write_megatron(*_megatron_model(), root, iteration=1, tensor=2)


def write_distributed(root: Path) -> None:
    spec, ours = _megatron_model()
    write_core(root, core_state(spec, ours, tensor=2), core_args(spec, tensor=2))


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's record of memory"
)
@pytest.mark.parametrize(
    ("form", "write"),
    [
        ("hf", write_hf),
        pytest.param("neox", write_neox_model, marks=pytest.mark.long),
        pytest.param("nanotron", write_nanotron_model, marks=pytest.mark.long),
        ("megatron", write_classic),
        ("megatron", write_distributed),
    ],
)
def test_an_import_does_not_hold_the_model(
    tmp_path: Path, form: str, write: Callable[[Path], None]
) -> None:
    source = tmp_path / "source"
    write(source)
    arguments = ["import", form, str(source), str(tmp_path / "imported")]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # return what is freed
    result = subprocess.run(
        [sys.executable, "-m", "tests.convert._memory", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert result.returncode == 0, result.stderr
    largest = 4 * 2 * INNER * HIDDEN
    assert int(result.stdout) < 3 * largest + BLOCKS < TOTAL / 4
