"""Rotary tables: when they are made, and lengths that change them."""

from typing import Any

import pytest
import torch

from megacore.config.model import ModelConfig
from megacore.models.layers import rotary
from megacore.models.layers.rotary import Rotary

DYNAMIC = {"kind": "dynamic", "factor": 3.0, "original_max_position_embeddings": 8}
LONG = {
    "kind": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "short_factor": (1.0, 1.0, 1.0, 1.0),
    "long_factor": (1.0, 2.0, 3.0, 4.0),
}
YARN = {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}


def model(scaling: dict[str, Any] | None) -> ModelConfig:
    return ModelConfig(
        hidden_size=8,
        num_attention_heads=1,
        position_embedding_type="rope",
        rope_scaling=scaling,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("scaling", [None, DYNAMIC, LONG, YARN])
def test_frequencies_are_made_once(
    scaling: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, positions = Rotary(model(scaling)), torch.arange(20)[None]
    with torch.inference_mode():
        first = tables.tables(positions, torch.float32)
    for name in ("frequencies", "_plain", "_exponents"):
        monkeypatch.setattr(rotary, name, None)
    again = tables.tables(positions, torch.float32)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not again[0].is_inference()


@pytest.mark.parametrize("scaling", [DYNAMIC, LONG])
def test_a_rows_length_changes_only_its_own_rotations(scaling: dict[str, Any]) -> None:
    tables, plain = Rotary(model(scaling)), Rotary(model(None))
    short, long = torch.arange(20) % 8, torch.arange(20)
    for part in range(2):
        both = tables.tables(torch.stack([short, long]), torch.float64)[part]
        unscaled = plain.tables(torch.stack([short, long]), torch.float64)[part]
        scale = tables.scale
        torch.testing.assert_close(both[0], unscaled[0] * scale)
        assert (both[1] - unscaled[1] * scale).abs().max() > 0.1
        for row, positions in enumerate((short, long)):
            torch.testing.assert_close(
                both[row], tables.tables(positions[None], torch.float64)[part][0]
            )


def test_a_default_type_of_half_precision_does_not_round_the_frequencies() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = Rotary(model(YARN)).tables(torch.arange(20)[None], torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    expected = Rotary(model(YARN)).tables(torch.arange(20)[None], torch.float32)
    assert torch.equal(made[0], expected[0])


def test_every_scaled_table_is_multiplied_by_the_attention_factor() -> None:
    tables = Rotary(model(YARN | {"attention_factor": 0.5}))
    assert tables.tables(torch.zeros(1, 3), torch.float32)[0].unique().tolist() == [0.5]
