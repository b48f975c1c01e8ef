"""GPT-2's table compared with the model of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.convert.hf.forms import model_config
from megacore.convert.hf.gpt2 import key_map, module_pairs
from megacore.convert.hf.write import SAMPLING, generation_config
from megacore.convert.key_map import KeyMap
from megacore.convert.parity import recorded_outputs
from megacore.models.gpt import GPTModel
from tests.convert._tiny import SEQ_LENGTH, VOCAB_SIZE, random_model, tiny_config

EOD = 5


def spec_of(config: RunConfig) -> ModelSpec:
    return ModelSpec.of(config, VOCAB_SIZE, SpecialTokens(eod=EOD))


def transformers_model(**model: Any) -> tuple[GPTModel, Any, KeyMap]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = tiny_config(**model)
    ours = random_model(config)
    table = key_map(spec_of(config))
    theirs = GPT2LMHeadModel(GPT2Config(**model_config(spec_of(config), "float32"))).eval()
    state = dict(table.forward(dict(ours.named_parameters())))
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    theirs.tie_weights()
    return ours, theirs, table


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"ffn_hidden_size": 40},
        {"layernorm_epsilon": 1e-3},
        {"max_position_embeddings": 64},
        {"hidden_dropout": 0.5},
    ],
    ids=lambda model: "-".join(model) or "default",
)
def test_logits_equal_transformers(model: dict[str, Any]) -> None:
    ours, theirs, _ = transformers_model(**model)
    tokens = torch.randint(VOCAB_SIZE, (3, SEQ_LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = theirs(tokens).logits
        difference = (ours(tokens)[..., :VOCAB_SIZE] - expected).abs().max()
    assert expected.std() > 0.5
    assert difference <= 1e-5


def test_paired_modules_give_the_same_hidden_states() -> None:
    ours, theirs, _ = transformers_model()
    pairs = module_pairs(spec_of(tiny_config()))
    tokens = torch.arange(20)[None]
    with (
        torch.inference_mode(),
        recorded_outputs(ours, [pair[0] for pair in pairs]) as our_outputs,
        recorded_outputs(theirs, [pair[1] for pair in pairs]) as their_outputs,
    ):
        ours(tokens)
        theirs(tokens)
    assert len(pairs) == 1 + 3 * 5 + 1
    for our_name, their_name in pairs:
        torch.testing.assert_close(
            our_outputs[our_name], their_outputs[their_name], atol=1e-5, rtol=0
        )


def test_transformers_reads_back_the_written_configurations(tmp_path: Path) -> None:
    from transformers import GenerationConfig, GPT2Config

    config = tiny_config(
        hidden_dropout=0.3, attention_dropout=0.2, layernorm_epsilon=1e-6, ffn_hidden_size=48
    )
    read = GPT2Config(**model_config(spec_of(config), "float32"))
    assert (read.n_layer, read.n_embd, read.n_head, read.n_inner, read.n_positions) == (
        3,
        32,
        4,
        48,
        SEQ_LENGTH,
    )
    assert (read.resid_pdrop, read.embd_pdrop, read.attn_pdrop) == (0.3, 0.3, 0.2)
    assert (read.layer_norm_epsilon, read.activation_function) == (1e-6, "gelu_new")
    assert (read.vocab_size, read.bos_token_id, read.eos_token_id) == (VOCAB_SIZE, EOD, EOD)
    ids = {"bos_token_id": EOD, "eos_token_id": EOD, "pad_token_id": EOD}
    assert generation_config(spec_of(config)) == ids | SAMPLING
    generation = GenerationConfig(**generation_config(spec_of(config)))
    generation.validate(strict=True)
    assert generation.eos_token_id == EOD
