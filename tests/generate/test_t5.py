"""Answers of T5, compared with transformers' and between batches."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.convert.hf.write import write_model
from megacore.convert.model_source import find_model
from megacore.errors import ConfigError
from megacore.generate.generate import EncodedBatch, generate
from megacore.generate.weights import load_model
from megacore.jobs.model import GenerateOptions, new_token_limits
from megacore.models.t5 import T5Model
from megacore.parallel.mesh import ProcessMesh
from tests.convert._models import our_model, tiny_spec
from tests.generate import _tiny

END, START, NEW_TOKENS = 1, 0, 15


@pytest.fixture(scope="module", params=["relu", "gated-gelu"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, T5Model]:
    """Return T5 1.0 and 1.1 as a model of transformers and of megacore."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=_tiny.VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        feed_forward_proj=request.param,
        tie_word_embeddings=request.param == "relu",
        decoder_start_token_id=START,
    )
    theirs = T5ForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in theirs.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * drawn if parameter.dim() == 1 else 0.3 * drawn)
    directory: Path = tmp_path_factory.mktemp("t5")
    theirs.save_pretrained(directory)
    ours = load_model(
        find_model(directory), ProcessMesh.serial(), device=torch.device("cpu"), dtype=torch.float32
    )
    assert isinstance(ours, T5Model)
    return theirs, ours


@pytest.mark.parametrize("batch_size", [1, 5])
def test_greedy_tokens_equal_transformers(pair: tuple[Any, T5Model], batch_size: int) -> None:
    theirs, ours = pair
    prompts = _tiny.prompts()
    options = GenerateOptions(max_new_tokens=NEW_TOKENS)
    continuations = generate(
        ours,
        prompts,
        options,
        vocab_size=_tiny.VOCAB,
        ends=[END],
        start=START,
        batch_size=batch_size,
    )
    for prompt, continuation in zip(prompts, continuations, strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=END,
            pad_token_id=START,
            use_cache=False,  # its cache needs as many decoder as encoder layers
        )[0, 1:].tolist()
        assert continuation.tokens == tuple(expected)
    assert len({continuation.tokens for continuation in continuations}) > 1


def test_logits_do_not_depend_on_the_cache(pair: tuple[Any, T5Model]) -> None:
    prompts, written = _tiny.prompts((5, 1, 17)), torch.tensor(_tiny.prompts((9, 9, 9)))
    logits = []
    with torch.inference_mode():
        for use_cache in (True, False):
            batch = EncodedBatch(pair[1], prompts, START, 10, use_cache)
            steps = [batch.read_prompts()] + [batch.read(written[:, [i]]) for i in range(5)]
            batch.keep([2, 0])
            steps += [batch.read(written[[2, 0]][:, [i]]) for i in range(5, 9)]
            logits.append(torch.cat(steps))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_sampled_answers_do_not_depend_on_the_batch(
    pair: tuple[Any, T5Model],
) -> None:
    options = GenerateOptions(max_new_tokens=NEW_TOKENS, temperature=1.0)
    both = [
        generate(
            pair[1], _tiny.prompts(), options, vocab_size=_tiny.VOCAB, ends=[END], batch_size=size
        )
        for size in (1, 3)
    ]
    assert both[0] == both[1]


@pytest.mark.parametrize("decoder_layers", [2, 4])
def test_transformers_generates_with_every_export(tmp_path: Path, decoder_layers: int) -> None:
    """The cache of transformers has three layers here, as the encoder."""
    from transformers import T5ForConditionalGeneration

    spec = tiny_spec("t5", num_decoder_layers=decoder_layers)
    ours = our_model(spec)
    write_model(tmp_path, spec, {name: value.detach() for name, value in ours.named_parameters()})
    theirs = T5ForConditionalGeneration.from_pretrained(tmp_path, local_files_only=True)
    assert (theirs.generation_config.use_cache is False) == (decoder_layers == 4)
    [prompt] = _tiny.prompts((9,))
    [expected] = generate(
        ours,
        [prompt],
        GenerateOptions(max_new_tokens=NEW_TOKENS),
        vocab_size=spec.vocab_size,
        ends=[END],
        start=START,
    )
    written = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS)
    assert written[0, 1:].tolist() == list(expected.tokens)


def test_limits_of_prompts_and_answers_are_separate() -> None:
    prompts = [[1] * 90]
    assert new_token_limits(prompts, GenerateOptions(max_new_tokens=100), 100, answers=True) == [
        100
    ]
    with pytest.raises(
        ConfigError,
        match="max_new_tokens is 101, but the model has 100 positions: lower it to at most",
    ):
        new_token_limits(prompts, GenerateOptions(max_new_tokens=101), 100, answers=True)
    with pytest.raises(
        ConfigError,
        match="prompt 1 has 101 tokens and the model 100 positions: shorten the prompt to",
    ):
        new_token_limits([[1] * 101], GenerateOptions(), 100, answers=True)
