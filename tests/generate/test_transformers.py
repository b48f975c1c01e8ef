"""Greedy tokens of random models saved by transformers, compared with transformers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.convert.model_source import find_model
from megacore.generate.generate import generate
from megacore.generate.weights import load_model
from megacore.jobs.model import GenerateOptions
from megacore.models.gpt import GPTModel
from megacore.parallel.mesh import ProcessMesh
from tests.generate import _tiny

NEW_TOKENS = 25


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=_tiny.VOCAB,
        n_positions=_tiny.POSITIONS,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=_tiny.EOD,
        eos_token_id=_tiny.EOD,
    )
    return GPT2LMHeadModel(config)


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_sizes(), num_key_value_heads=2))


def _mistral() -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**_sizes(), num_key_value_heads=2, sliding_window=6))


def _neox() -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(GPTNeoXConfig(**_sizes(), hidden_act="gelu"))


def _gemma2() -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(
        Gemma2Config(
            **_sizes(),
            num_key_value_heads=2,
            head_dim=12,
            query_pre_attn_scalar=10,
            sliding_window=6,
            tie_word_embeddings=False,
        )
    )


def _olmo2() -> Any:
    from transformers import Olmo2Config, Olmo2ForCausalLM

    return Olmo2ForCausalLM(Olmo2Config(**_sizes(), num_key_value_heads=2))


def _starcoder2() -> Any:
    from transformers import Starcoder2Config, Starcoder2ForCausalLM

    return Starcoder2ForCausalLM(
        Starcoder2Config(**_sizes(), num_key_value_heads=2, sliding_window=6)
    )


def _llama3() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    return LlamaForCausalLM(LlamaConfig(**_sizes(), rope_scaling=scaling, tie_word_embeddings=True))


def _qwen2() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_sizes(), num_key_value_heads=2))


def _phi3() -> Any:
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(
        Phi3Config(**_sizes(), num_key_value_heads=2, sliding_window=6, pad_token_id=None)
    )


def _sizes() -> dict[str, Any]:
    return {
        "vocab_size": _tiny.VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": _tiny.POSITIONS,
        "bos_token_id": _tiny.EOD,
        "eos_token_id": _tiny.EOD,
    }


CLASSES: dict[str, Callable[[], Any]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "neox": _neox,
    "gemma2": _gemma2,
    "olmo2": _olmo2,
    "starcoder2": _starcoder2,
    "llama3": _llama3,
    "qwen2": _qwen2,
    "phi3": _phi3,
}


@dataclass(frozen=True)
class Pair:
    """One model in transformers and in megacore."""

    theirs: Any
    ours: GPTModel


@pytest.fixture(scope="module", params=list(CLASSES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Return a random model of transformers, and megacore's model read from its directory."""
    directory: Path = tmp_path_factory.mktemp("saved")
    theirs = CLASSES[request.param]().eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(
                1 + 0.2 * drawn if parameter.dim() == 1 and name.endswith("weight") else 0.3 * drawn
            )
    theirs.save_pretrained(directory)
    ours = load_model(
        find_model(directory), ProcessMesh.serial(), device=torch.device("cpu"), dtype=torch.float32
    )
    return Pair(theirs, ours)


def continue_with_transformers(
    theirs: Any, prompts: list[list[int]], ends: Sequence[int] = (_tiny.EOD,)
) -> list[tuple[int, ...]]:
    """Continue prompts with transformers, padded on the left."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    present = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        generated = theirs.generate(
            tokens,
            attention_mask=present,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=list(ends),
            pad_token_id=0,
        )
    rows = []
    for row in generated[:, width:].tolist():
        places = (place for place, token in enumerate(row, 1) if token in ends)
        rows.append(tuple(row[: next(places, len(row))]))
    return rows


@pytest.mark.parametrize("batch_size", [1, 5])
def test_greedy_tokens_equal_transformers(pair: Pair, batch_size: int) -> None:
    prompts = _tiny.prompts()
    ours = generate(
        pair.ours,
        prompts,
        GenerateOptions(max_new_tokens=NEW_TOKENS),
        vocab_size=_tiny.VOCAB,
        ends=[_tiny.EOD],
        batch_size=batch_size,
    )
    theirs = [continue_with_transformers(pair.theirs, [prompt])[0] for prompt in prompts]
    assert [continuation.tokens for continuation in ours] == theirs
    assert continue_with_transformers(pair.theirs, prompts) == theirs
    assert len({token for row in theirs for token in row}) > 10


def test_every_end_ends_a_text_as_in_transformers(pair: Pair) -> None:
    prompts, options = _tiny.prompts(), GenerateOptions(max_new_tokens=NEW_TOKENS)
    free = generate(pair.ours, prompts, options, vocab_size=_tiny.VOCAB)
    ends = [free[0].tokens[4], free[1].tokens[6]]
    ours = generate(pair.ours, prompts, options, vocab_size=_tiny.VOCAB, ends=ends)
    theirs = continue_with_transformers(pair.theirs, prompts, ends)
    assert [continuation.tokens for continuation in ours] == theirs
    assert ours[0].ended
    assert ours[1].ended
    assert ours != free
