"""Independence of continuations from the cache and from other prompts, and their ends."""

import itertools
from typing import Any

import pytest
import torch

from megacore.errors import ConfigError
from megacore.generate.generate import Continuation, generate
from megacore.jobs.model import GenerateOptions
from megacore.models.gpt import GPTModel
from tests.generate import _tiny

OPTIONS = [GenerateOptions(max_new_tokens=30), GenerateOptions(max_new_tokens=30, top_k=20, seed=5)]


def continuations(
    model: GPTModel, prompts: list[list[int]], options: GenerateOptions, **changes: Any
) -> list[Continuation]:
    values = {"vocab_size": _tiny.VOCAB, "ends": [_tiny.EOD]}
    return generate(model, prompts, options, **{**values, **changes})


@pytest.mark.parametrize("kind", _tiny.KINDS)
def test_continuations_do_not_depend_on_cache_or_batch(kind: str) -> None:
    model, prompts = _tiny.random_model(_tiny.spec(**_tiny.KINDS[kind])), _tiny.prompts()
    for options in OPTIONS:
        expected = [
            step_by_step(model, prompt, number, options) for number, prompt in enumerate(prompts)
        ]
        for batch_size, use_cache in itertools.product((1, 2, 5), (True, False)):
            results = continuations(
                model, prompts, options, batch_size=batch_size, use_cache=use_cache
            )
            assert [result.tokens for result in results] == expected, (
                options,
                batch_size,
                use_cache,
            )


def step_by_step(
    model: GPTModel, prompt: list[int], number: int, options: GenerateOptions
) -> tuple[int, ...]:
    """Continue a prompt without cache and padding, reading it from its start for every token."""
    from megacore.generate.generate import Chooser

    tokens, chooser = list(prompt), Chooser(options, [number])
    while len(tokens) < len(prompt) + 30:
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]))[:, -1, : _tiny.VOCAB]
        tokens.append(int(chooser.choose(logits)))
        if tokens[-1] == _tiny.EOD:
            break
    return tuple(tokens[len(prompt) :])


def test_long_prompts_continue_the_same_without_cache() -> None:
    model = _tiny.random_model(_tiny.spec(max_position_embeddings=700, **_tiny.LLAMA))
    prompts = _tiny.prompts((600, 257, 3))
    options = GenerateOptions(max_new_tokens=5)
    assert continuations(model, prompts, options) == continuations(
        model, prompts, options, use_cache=False
    )


def test_a_continuation_ends_with_the_end_of_document_token() -> None:
    model = _tiny.random_model(_tiny.spec())
    free = continuations(model, _tiny.prompts(), GenerateOptions(max_new_tokens=20), ends=())
    assert [len(continuation.tokens) for continuation in free] == [20] * 5
    assert not any(continuation.ended for continuation in free)
    end = free[2].tokens[3]
    stopped = continuations(model, _tiny.prompts(), GenerateOptions(max_new_tokens=20), ends=[end])
    for with_end, without in zip(stopped, free, strict=True):
        stop = without.tokens.index(end) + 1 if end in without.tokens else 20
        assert with_end == Continuation(without.tokens[:stop], ended=end in without.tokens)
    assert len(stopped[2].tokens) <= 4


def test_a_continuation_ends_with_the_first_of_several_ends() -> None:
    model = _tiny.random_model(_tiny.spec())
    free = continuations(model, _tiny.prompts(), GenerateOptions(max_new_tokens=20), ends=())
    ends = [free[1].tokens[5], free[2].tokens[3]]
    assert ends[0] not in free[2].tokens[:4]
    stopped = continuations(model, _tiny.prompts(), GenerateOptions(max_new_tokens=20), ends=ends)
    for with_ends, without in zip(stopped, free, strict=True):
        found = [number for number, token in enumerate(without.tokens, 1) if token in ends]
        stop = found[0] if found else 20
        assert with_ends == Continuation(without.tokens[:stop], ended=bool(found))
    assert len(stopped[2].tokens) <= 4


def test_each_prompt_is_limited_by_its_own_length() -> None:
    model = _tiny.random_model(_tiny.spec())
    results = continuations(model, _tiny.prompts((3, 60)), GenerateOptions(), ends=())
    assert [len(result.tokens) for result in results] == [61, 4]
    assert (
        results[1]
        == continuations(model, _tiny.prompts((3, 60))[1:], GenerateOptions(), ends=())[0]
    )


def test_padding_of_the_vocabulary_is_never_chosen() -> None:
    model = _tiny.random_model(_tiny.spec())
    assert model.padded_vocab_size > _tiny.VOCAB
    with torch.no_grad():
        model.embedding.word_embeddings.weight[_tiny.VOCAB :] *= 100
    for options in OPTIONS:
        results = continuations(model, _tiny.prompts(), options)
        assert max(token for result in results for token in result.tokens) < _tiny.VOCAB


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    model = _tiny.random_model(_tiny.spec())
    with pytest.raises(
        ConfigError,
        match="prompt 2 has the id 101, which the model's vocabulary of 101 entries lacks",
    ):
        continuations(model, [[1], [2, 101]], GenerateOptions())
