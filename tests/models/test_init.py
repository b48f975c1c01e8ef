"""Initial weights: the right spread, and the same whatever the layout."""

import math
from typing import Any

import torch

from megacore.models import build_model
from megacore.models.init import RESIDUAL_PROJECTIONS
from megacore.parallel.mesh import ProcessMesh
from tests._tiny import tiny_config
from tests._two_ranks import VOCAB


def test_spread_of_every_kind_of_parameter() -> None:
    config = tiny_config(num_layers=8, hidden_size=256, init_method_std=0.05)
    model = build_model(config, 1024, ProcessMesh.serial())
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "layernorm" in name:
            assert (parameter == 1).all(), name
        else:
            std = 0.05 / math.sqrt(16) if name.endswith(RESIDUAL_PROJECTIONS) else 0.05
            spread = 5 / math.sqrt(2 * parameter.numel())
            assert abs(parameter.std().item() / std - 1) < spread, name
            assert abs(parameter.mean().item() / std) < 5 / math.sqrt(parameter.numel()), name


def test_the_seed_decides_and_the_global_state_does_not() -> None:
    torch.manual_seed(1)
    first = build_model(tiny_config(seed=1), VOCAB, ProcessMesh.serial()).state_dict()
    torch.manual_seed(2)
    again = build_model(tiny_config(seed=1), VOCAB, ProcessMesh.serial()).state_dict()
    other = build_model(tiny_config(seed=2), VOCAB, ProcessMesh.serial()).state_dict()
    name = "encoder.layers.1.mlp.dense_h_to_4h.weight"
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first["encoder.layers.0.mlp.dense_h_to_4h.weight"])


def test_two_ranks_hold_the_parts_of_the_serial_weights(two_ranks: list[dict[str, Any]]) -> None:
    serial = build_model(tiny_config(), VOCAB, ProcessMesh.serial()).double().state_dict()
    for found in two_ranks:
        initial, parts = found["gpt"]["initial"], found["gpt"]["partitions"]
        assert initial.keys() == serial.keys()
        assert len(parts) == 1 + 2 * 6 + 1  # embedding, per layer 4 weights and 2 biases, position table (whole)
        for name, whole in serial.items():
            expected = parts[name].shard(whole) if name in parts else whole
            assert torch.equal(initial[name], expected), name


def test_padding_does_not_change_the_other_rows(two_ranks: list[dict[str, Any]]) -> None:
    serial = build_model(tiny_config(), 117, ProcessMesh.serial()).embedding.word_embeddings.weight
    divided = torch.cat([found["uneven_padding"] for found in two_ranks])
    assert (serial.shape[0], divided.shape[0]) == (120, 128)
    assert torch.equal(serial[:117], divided[:117])
