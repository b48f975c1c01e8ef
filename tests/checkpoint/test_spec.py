"""Tests of the model specification in a checkpoint and its comparison with another one."""

import json
from pathlib import Path
from typing import Any

import pytest

from megacore.checkpoint.save import save_checkpoint
from megacore.checkpoint.spec import changed_rotations, check_same_model, read_spec
from megacore.config.model import ModelConfig
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.errors import CheckpointError

MODEL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}


def spec(
    *, family: str = "gpt", vocab_size: int = 100, tokens: SpecialTokens | None = None, **model: Any
) -> ModelSpec:
    config = ModelConfig(**MODEL | {"make_vocab_size_divisible_by": 8} | model)
    return ModelSpec(
        family=family, model=config, vocab_size=vocab_size, special_tokens=tokens or SpecialTokens()
    )


def test_a_spec_is_read_back_equal_from_a_checkpoint(tmp_path: Path) -> None:
    saved = spec(tokens=SpecialTokens(eod=3, sentinels=(99, 98)), normalization="rmsnorm")
    path = save_checkpoint(tmp_path, 0, {}, {"model": saved.model_dump(mode="json")})
    assert read_spec(path) == saved


def test_changed_rotations_are_written_as_in_a_configuration() -> None:
    scaling = {"kind": "llama3", "factor": 2.0, "original_max_position_embeddings": 16}
    saved = spec(position_embedding_type="rope")
    current = spec(position_embedding_type="rope", rotary_base=5e5, rope_scaling=scaling)
    assert changed_rotations(saved, saved) == []
    assert changed_rotations(saved, current) == [
        "rotary_base 10000.0 -> 500000.0",
        "rope_scaling null -> {kind: llama3, factor: 2.0, low_freq_factor: 1.0, "
        "high_freq_factor: 4.0, original_max_position_embeddings: 16}",
    ]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {},
            (
                r"state\.json does not say which model its weights are of: it was written by an "
                r"earlier version"
            ),
        ),
        (
            {"model": {"family": "gpt"}},
            r"holds no model that this version of megacore knows .model\.model: Field req",
        ),
        ({"model": 3}, r"holds no model that this version of megacore knows .model: "),
    ],
)
def test_a_checkpoint_without_a_valid_spec_is_refused(
    tmp_path: Path, state: dict[str, Any], message: str
) -> None:
    (tmp_path / "state.json").write_text(json.dumps(state), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        read_spec(tmp_path)


SAME_MODEL: dict[str, dict[str, Any]] = {
    "options of training only": {
        "hidden_dropout": 0.3,
        "attention_dropout": 0.0,
        "init_method_std": 0.1,
    },
    "derived values set explicitly": {
        "num_query_groups": 4,
        "kv_channels": 8,
        "ffn_hidden_size": 128,
    },
    "another divisor with as many rows": {"make_vocab_size_divisible_by": 104},
    "another role of a token": {"tokens": SpecialTokens(eod=1)},
}


@pytest.mark.parametrize("name", SAME_MODEL)
def test_differences_that_keep_the_model_equal_are_accepted(name: str) -> None:
    check_same_model(Path("there"), spec(), spec(**SAME_MODEL[name]))


OTHER_MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "family": ({"family": "bert"}, "family is gpt there and bert here"),
    "vocabulary": ({"vocab_size": 101}, "the vocabulary is 100 entries there and 101 entries here"),
    "rows": (
        {"make_vocab_size_divisible_by": 128},
        "the padded vocabulary is 104 entries there and 128 entries here",
    ),
    "layers": ({"num_layers": 3}, r"model\.num_layers is 2 there and 3 here"),
    "groups": ({"num_query_groups": 2}, r"model\.num_query_groups is 4 there and 2 here"),
    "biases": ({"add_bias_linear": False}, r"model\.add_bias_linear is true there and false here"),
    "positions": (
        {"max_position_embeddings": 32},
        r"model\.max_position_embeddings is 16 there and 32 here",
    ),
    "norm": (
        {"layernorm_epsilon": 1e-6},
        r"model\.layernorm_epsilon is 1e-05 there and 1e-06 here",
    ),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_another_model_is_refused_with_both_values(name: str) -> None:
    changes, message = OTHER_MODELS[name]
    with pytest.raises(
        CheckpointError, match=f"^there is of another model: {message}: use a checkpoint"
    ):
        check_same_model(Path("there"), spec(), spec(**changes))


def test_all_differences_are_reported() -> None:
    with pytest.raises(
        CheckpointError,
        match=r"num_layers is 2 there and 4 here, model\.hidden_size is 32 .* 64 here",
    ):
        check_same_model(
            Path("there"),
            spec(),
            spec(num_layers=4, hidden_size=64, kv_channels=8, ffn_hidden_size=128),
        )


def test_layers_of_a_decoder_count_for_t5_only() -> None:
    saved, current = {"num_decoder_layers": 2}, {"num_decoder_layers": 3}
    check_same_model(Path("there"), spec(**saved), spec(**current))
    with pytest.raises(CheckpointError, match=r"model\.num_decoder_layers is 2 there and 3 here"):
        check_same_model(Path("there"), spec(family="t5", **saved), spec(family="t5", **current))


def test_longer_sequences_are_accepted_without_learned_positions() -> None:
    rope = {"position_embedding_type": "rope"}
    check_same_model(Path("there"), spec(**rope), spec(**rope, max_position_embeddings=64))


def test_a_smaller_vocabulary_is_accepted_within_the_padding_of_a_padded_one() -> None:
    # In published models `vocab_size` may be the padded number of rows.
    check_same_model(Path("there"), spec(vocab_size=104), spec(vocab_size=101))
    with pytest.raises(CheckpointError, match="104 entries there and 90 entries here"):
        check_same_model(Path("there"), spec(vocab_size=104), spec(vocab_size=90))
    with pytest.raises(CheckpointError, match="101 entries there and 104 entries here"):
        check_same_model(Path("there"), spec(vocab_size=101), spec(vocab_size=104))
