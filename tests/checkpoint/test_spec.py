"""What a checkpoint says of its model, and which models it refuses to be."""

import json
from pathlib import Path
from typing import Any

import pytest

from megacore.checkpoint.save import save_checkpoint
from megacore.checkpoint.spec import check_same_model, read_spec
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
    own = ModelConfig(**MODEL | {"make_vocab_size_divisible_by": 8} | model)
    return ModelSpec(
        family=family, model=own, vocab_size=vocab_size, special_tokens=tokens or SpecialTokens()
    )


def test_a_spec_survives_a_checkpoint(tmp_path: Path) -> None:
    own = spec(tokens=SpecialTokens(eod=3, sentinels=(99, 98)), normalization="rmsnorm")
    path = save_checkpoint(tmp_path, 0, {}, {"model": own.model_dump(mode="json")})
    assert read_spec(path) == own


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
def test_a_checkpoint_that_does_not_say_is_refused(
    tmp_path: Path, state: dict[str, Any], message: str
) -> None:
    (tmp_path / "state.json").write_text(json.dumps(state), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        read_spec(tmp_path)


SAME: dict[str, dict[str, Any]] = {
    "what matters to training alone": {
        "hidden_dropout": 0.3,
        "attention_dropout": 0.0,
        "init_method_std": 0.1,
    },
    "values that follow from others": {
        "num_query_groups": 4,
        "kv_channels": 8,
        "ffn_hidden_size": 128,
    },
    "another divisor with as many rows": {"make_vocab_size_divisible_by": 104},
    "another role of a token": {"tokens": SpecialTokens(eod=1)},
}


@pytest.mark.parametrize("name", SAME)
def test_what_makes_no_other_model_may_differ(name: str) -> None:
    check_same_model(Path("there"), spec(), spec(**SAME[name]))


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
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


@pytest.mark.parametrize("name", OTHERS)
def test_another_model_is_refused_with_both_sides(name: str) -> None:
    changes, message = OTHERS[name]
    with pytest.raises(
        CheckpointError, match=f"^there is of another model: {message}: use a checkpoint"
    ):
        check_same_model(Path("there"), spec(), spec(**changes))


def test_everything_that_differs_is_named() -> None:
    with pytest.raises(
        CheckpointError,
        match=r"num_layers is 2 there and 4 here, model\.hidden_size is 32 .* 64 here",
    ):
        check_same_model(
            Path("there"),
            spec(),
            spec(num_layers=4, hidden_size=64, kv_channels=8, ffn_hidden_size=128),
        )


def test_a_model_without_a_position_table_may_be_trained_on_longer_sequences() -> None:
    rope = {"position_embedding_type": "rope"}
    check_same_model(Path("there"), spec(**rope), spec(**rope, max_position_embeddings=64))


def test_a_vocabulary_that_does_not_tell_its_padding_takes_a_smaller_one() -> None:
    """As published models whose `vocab_size` is the number of rows; others mean every entry."""
    check_same_model(Path("there"), spec(vocab_size=104), spec(vocab_size=101))
    with pytest.raises(CheckpointError, match="104 entries there and 90 entries here"):
        check_same_model(Path("there"), spec(vocab_size=104), spec(vocab_size=90))
    with pytest.raises(CheckpointError, match="101 entries there and 104 entries here"):
        check_same_model(Path("there"), spec(vocab_size=101), spec(vocab_size=104))
