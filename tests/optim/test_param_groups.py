"""Groups of parameters with and without weight decay."""

import torch

from megacore.optim.adam import param_groups

PARAMETERS = {
    "embedding.word_embeddings.weight": torch.zeros(8, 4),
    "encoder.layers.0.input_layernorm.weight": torch.zeros(4),
    "encoder.layers.0.input_layernorm.bias": torch.zeros(4),
    "encoder.layers.0.mlp.dense_h_to_4h.weight": torch.zeros(16, 4),
    "encoder.layers.0.mlp.dense_h_to_4h.bias": torch.zeros(16),
}


def test_biases_and_layer_norms_do_not_decay() -> None:
    decayed, undecayed = param_groups(PARAMETERS.items())
    assert decayed.decays
    assert decayed.names == (
        "embedding.word_embeddings.weight",
        "encoder.layers.0.mlp.dense_h_to_4h.weight",
    )
    assert not undecayed.decays
    assert set(decayed.names) | set(undecayed.names) == set(PARAMETERS)


def test_an_empty_group_is_left_out() -> None:
    groups = param_groups({"bias": torch.zeros(3)}.items())
    assert [group.names for group in groups] == [("bias",)]
