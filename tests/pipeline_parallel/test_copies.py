"""Which parameters several stages hold: what the chunks of the models themselves say."""

from typing import Any

import pytest

from megacore.config.load import parse_config
from megacore.config.run import RunConfig
from megacore.models.build import build_model
from megacore.parallel.mesh import ProcessMesh
from megacore.pipeline_parallel.partition import (
    DECODER_BIAS,
    ENCODER_BIAS,
    WORD_EMBEDDINGS,
    chunks_of,
    copied_parameters,
    shared_stages,
)

VOCAB = 64
T5 = {"normalization": "rmsnorm", "add_bias_linear": False, "position_embedding_type": "relative"}
UNTIED = {"untie_embeddings_and_output_weights": True}
PP4 = {"pipeline_model_parallel_size": 4}


def config(family: str, model: dict[str, Any], parallel: dict[str, Any]) -> RunConfig:
    """Four layers, of T5 four in each stack."""
    values: dict[str, Any] = {
        "name": "tiny",
        "family": family,
        "data": {
            "source": {"kind": "source_tree"},
            "tokenizer": {"kind": "hf", "name": "any"},
            "seq_length": 16,
        },
        "model": {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, **model},
        "optim": {"lr": 1e-3},
        "train": {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 1},
        "checkpoint": {"save_interval": 1},
        "parallel": parallel,
    }
    if family != "gpt":
        values["data"] |= {"split_sentences": True, "append_eod": False}
    return parse_config(values, origin="tests")


CASES = {
    "gpt": ("gpt", {}, PP4),
    "gpt untied": ("gpt", UNTIED, PP4),
    "gpt on one stage": ("gpt", {}, {}),
    "gpt interleaved": (
        "gpt",
        {},
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ),
    "bert": ("bert", {}, PP4),
    "t5": ("t5", T5, PP4 | {"pipeline_model_parallel_split_rank": 2}),
    "t5, one stage each": ("t5", T5, {"pipeline_model_parallel_size": 2}),
    "t5 untied": ("t5", T5 | UNTIED, PP4 | {"pipeline_model_parallel_split_rank": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_copies_are_what_several_chunks_hold(name: str) -> None:
    own = config(*CASES[name])
    stages = own.parallel.pipeline_model_parallel_size
    holders: dict[str, list[int]] = {}
    for number, chunk in enumerate(chunks_of(own, VOCAB)):
        model = build_model(own, VOCAB, ProcessMesh.serial(), device="meta", chunk=chunk)
        for parameter, _ in model.named_parameters():
            holders.setdefault(parameter, []).append(number % stages)
    expected = {
        parameter: tuple(numbers) for parameter, numbers in holders.items() if len(numbers) > 1
    }
    assert copied_parameters(chunks_of(own, VOCAB), stages, own.model) == expected


def test_a_stage_may_belong_to_several_groups() -> None:
    own = config(*CASES["t5"])
    assert copied_parameters(chunks_of(own, VOCAB), 4, own.model) == {
        WORD_EMBEDDINGS: (0, 2, 3),
        ENCODER_BIAS: (0, 1),
        DECODER_BIAS: (2, 3),
    }
    assert shared_stages(own, VOCAB) == ((0, 1), (0, 2, 3), (2, 3))
    assert shared_stages(config(*CASES["gpt"]), VOCAB) == ((0, 3),)
    assert shared_stages(config(*CASES["gpt untied"]), VOCAB) == ()
