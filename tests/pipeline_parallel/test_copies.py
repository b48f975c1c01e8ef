"""Parameters that several stages have, compared with the chunks of built models."""

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
    """Return a configuration of four layers; T5 has four in each stack."""
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
def test_copied_parameters_are_those_in_several_chunks(name: str) -> None:
    run_config = config(*CASES[name])
    stages = run_config.parallel.pipeline_model_parallel_size
    holders: dict[str, list[int]] = {}
    for number, chunk in enumerate(chunks_of(run_config, VOCAB)):
        model = build_model(run_config, VOCAB, ProcessMesh.serial(), device="meta", chunk=chunk)
        for parameter, _ in model.named_parameters():
            holders.setdefault(parameter, []).append(number % stages)
    expected = {
        parameter: tuple(numbers) for parameter, numbers in holders.items() if len(numbers) > 1
    }
    assert copied_parameters(chunks_of(run_config, VOCAB), stages, run_config.model) == expected


def test_a_stage_may_belong_to_several_groups() -> None:
    run_config = config(*CASES["t5"])
    assert copied_parameters(chunks_of(run_config, VOCAB), 4, run_config.model) == {
        WORD_EMBEDDINGS: (0, 2, 3),
        ENCODER_BIAS: (0, 1),
        DECODER_BIAS: (2, 3),
    }
    assert shared_stages(run_config, VOCAB) == ((0, 1), (0, 2, 3), (2, 3))
    assert shared_stages(config(*CASES["gpt"]), VOCAB) == ((0, 3),)
    assert shared_stages(config(*CASES["gpt untied"]), VOCAB) == ()
