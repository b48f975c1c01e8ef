"""Initial weights: the expected spread, identical in every layout."""

import math
from typing import Any

import pytest
import torch

from megacore.models.build import build_model
from megacore.models.init import RESIDUAL_PROJECTIONS
from megacore.parallel.mesh import ProcessMesh
from tests._gpt_ranks import CHUNKS, VOCAB
from tests._tiny import tiny_config


@pytest.mark.parametrize("residual", [None, 0.2])
def test_every_kind_of_parameter_has_its_spread(residual: float | None) -> None:
    config = tiny_config(
        num_layers=8, hidden_size=256, init_method_std=0.05, residual_init_std=residual
    )
    model = build_model(config, 1024, ProcessMesh.serial())
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "layernorm" in name:
            assert (parameter == 1).all(), name
        else:
            projection = residual or 0.05 / math.sqrt(16)
            std = projection if name.endswith(RESIDUAL_PROJECTIONS) else 0.05
            spread = 5 / math.sqrt(2 * parameter.numel())
            assert abs(parameter.std().item() / std - 1) < spread, name
            assert abs(parameter.mean().item() / std) < 5 / math.sqrt(parameter.numel()), name


def test_weights_depend_on_the_seed_and_not_on_the_global_state() -> None:
    torch.manual_seed(1)
    first = build_model(tiny_config(seed=1), VOCAB, ProcessMesh.serial()).state_dict()
    torch.manual_seed(2)
    again = build_model(tiny_config(seed=1), VOCAB, ProcessMesh.serial()).state_dict()
    other = build_model(tiny_config(seed=2), VOCAB, ProcessMesh.serial()).state_dict()
    name = "encoder.layers.1.mlp.dense_h_to_4h.weight"
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first["encoder.layers.0.mlp.dense_h_to_4h.weight"])


@pytest.mark.parametrize(("kind", "values"), [("fused", {}), ("groups", {"num_query_groups": 2})])
def test_ranks_have_shards_of_the_serial_weights(
    ranks: list[dict[str, Any]], kind: str, values: dict[str, Any]
) -> None:
    serial = _serial(**values)
    for rank in ranks:
        weights, parts = rank["initial"][kind]["weights"], rank["initial"][kind]["partitions"]
        assert weights.keys() == serial.keys()
        # the embedding table, and in each layer all weights and biases except two biases
        divided = 1 + 4 * (6 if kind == "fused" else 8)
        assert len(parts) == (divided if len(ranks) > 1 else 0)
        for name, whole in serial.items():
            expected = parts[name].shard(whole) if name in parts else whole
            assert torch.equal(weights[name], expected), name


def test_chunks_have_the_serial_weights_and_the_last_a_copy_of_the_table(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        serial, table = rank["initial"]["fused"]["weights"], "embedding.word_embeddings.weight"
        chunks = [rank["initial"][f"chunk {number}"] for number in range(len(CHUNKS))]
        assert [name for chunk in chunks for name in chunk if name != table] == [
            key for key in serial if key != table
        ]
        assert [table in chunk for chunk in chunks] == [True, False, True]
        for chunk in chunks:
            assert all(torch.equal(value, serial[name]) for name, value in chunk.items())


def test_vocabulary_padding_does_not_change_the_other_rows() -> None:
    name = "embedding.word_embeddings.weight"
    small, large = _serial(make_vocab_size_divisible_by=8)[name], _serial()[name]
    assert (small.shape[0], large.shape[0]) == (120, 128)
    assert torch.equal(small[:117], large[:117])


def _serial(**values: Any) -> dict[str, torch.Tensor]:
    config = tiny_config(**{"num_layers": 4, "make_vocab_size_divisible_by": 128, **values})
    return build_model(config, 117, ProcessMesh.serial()).state_dict()
