"""Batched generation: continuations by a causal model, or outputs of T5.

The random draws of a prompt depend only on the seed, the prompt's number and the number of tokens
drawn so far.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.config.rope import same_up_to
from megacore.errors import ConfigError
from megacore.jobs.model import GenerateOptions, new_token_limits
from megacore.models.gpt import GPTModel
from megacore.models.inputs import ModelInput
from megacore.models.layers.shared import KeyValueCache
from megacore.models.t5 import T5Model
from megacore.parallel.mesh import ParallelGroup
from megacore.parallel.rng import stable_seed

_READ_AT_ONCE = 256
"""Prompt tokens per forward pass, which bound the memory of activations and attention masks."""


@dataclass(frozen=True)
class Continuation:
    """Tokens that a model has generated for one prompt."""

    tokens: tuple[int, ...]
    """New ids, including the token that ended the text, if the model ended it."""
    ended: bool
    """True if the model ended the text, False if it reached the limit of tokens."""


@torch.inference_mode()
def generate(
    model: GPTModel | T5Model,
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions,
    *,
    vocab_size: int,
    ends: Collection[int] = (),
    start: int = 0,
    batch_size: int = 8,
    use_cache: bool = True,
    on_token: Callable[[int, int], None] | None = None,
) -> list[Continuation]:
    """Continue each prompt until the model ends the text or the limit of tokens is reached.

    The result of a prompt depends only on the model, the prompt's ids and number, and `options`.
    It does not depend on the other prompts or the layout, except where the probabilities of two
    tokens differ by no more than rounding.

    Args:
        model: model in evaluation mode, on any device and in any type. All tensor-parallel ranks
            must call this function with the same arguments.
        prompts: ids of each prompt, of any lengths; for T5 the encoder's input.
        options: sampling method and number of tokens.
        vocab_size: vocabulary size of the model before padding; padding rows are never chosen.
        ends: ids of the tokens that end a text; without any, every prompt gets all its tokens.
        start: first id of T5's decoder.
        batch_size: prompts per batch.
        use_cache: cache keys and values. Without the cache, every step computes all preceding
            tokens again. It is not used where rotary positions depend on the text's length
            (dynamic, longrope) and a text may exceed original_max_position_embeddings: the cached
            keys were rotated for a shorter text.
        on_token: called with the prompt's number, from 0, and each new id when it is chosen.

    Raises:
        ConfigError: if a prompt is empty or too long, or has an id outside of the vocabulary.
    """
    is_t5 = isinstance(model, T5Model)
    limits = new_token_limits(prompts, options, model.max_position_embeddings, answers=is_t5)
    _check_ids(prompts, vocab_size)
    results: list[Continuation] = []
    for first in range(0, len(prompts), batch_size):
        numbers = range(first, min(first + batch_size, len(prompts)))
        batch_prompts = [prompts[number] for number in numbers]
        batch_limits = [limits[number] for number in numbers]
        batch: Batch = (
            EncodedBatch(model, batch_prompts, start, max(batch_limits), use_cache)
            if isinstance(model, T5Model)
            else CausalBatch(model, batch_prompts, max(batch_limits), use_cache)
        )
        results += _continue(
            batch,
            Chooser(options, numbers),
            batch_limits,
            vocab_size,
            ends,
            model.tp,
            None if on_token is None else _numbered(on_token, first),
        )
    return results


def _check_ids(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    for number, prompt in enumerate(prompts, 1):
        wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ConfigError(
                f"prompt {number} has the id {wrong}, which the model's vocabulary of {vocab_size} "
                "entries lacks: give the tokenizer that the model was trained with"
            )


class Batch(Protocol):
    """Batch of prompts that are continued together."""

    def read_prompts(self) -> Tensor:
        """Return the logits [b, v] of the first new token of each prompt."""
        ...

    def read(self, new: Tensor) -> Tensor:
        """Append the chosen ids [b, 1] and return the logits [b, v] of the next tokens."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only the prompts in `rows`."""
        ...


class CausalBatch:
    """Batch of prompts for a causal model.

    Shorter prompts are padded on the left, so that all end at the same position.
    """

    def __init__(
        self, model: GPTModel, prompts: Sequence[Sequence[int]], new_tokens: int, use_cache: bool
    ) -> None:
        self._model = model
        device = next(model.parameters()).device
        width = max(map(len, prompts))
        self._tokens = torch.tensor(
            [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device
        )
        self._places = torch.arange(width + new_tokens, device=device)
        padding = [width - len(prompt) for prompt in prompts]
        self._padding = torch.tensor(padding, device=device)[:, None] if any(padding) else None
        same = same_up_to(model.model.rope_scaling)
        cacheable = same is None or width + new_tokens <= same
        self._cache = KeyValueCache(width + new_tokens) if use_cache and cacheable else None

    def read_prompts(self) -> Tensor:
        """Return the logits [b, v] of the first new token of each prompt."""
        if self._cache is None:
            return self._logits(self._tokens)
        for tokens in torch.split(self._tokens, _READ_AT_ONCE, 1):
            logits = self._logits(tokens)
        return logits

    def read(self, new: Tensor) -> Tensor:
        """Append the chosen ids [b, 1] and return the logits [b, v] of the next tokens."""
        if self._cache is not None:
            return self._logits(new)
        self._tokens = torch.cat([self._tokens, new], 1)
        return self._logits(self._tokens)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only the prompts in `rows`."""
        chosen = torch.tensor(rows, device=self._tokens.device)
        self._tokens = self._tokens[chosen]
        if self._padding is not None:
            self._padding = self._padding[chosen]
        if self._cache is not None:
            self._cache.keep(chosen)

    def _logits(self, tokens: Tensor) -> Tensor:
        """Return the logits [b, v] after `tokens` [b, s], which follow the cached tokens."""
        positions = present = None
        if self._padding is not None:
            begin = 0 if self._cache is None else self._cache.length
            places = self._places[: begin + tokens.shape[1]] - self._padding
            positions, present = places[:, begin:].clamp(min=0), places >= 0
        logits: Tensor = self._model(
            tokens, position_ids=positions, present=present, cache=self._cache, last=1
        )
        return logits[:, -1]


class EncodedBatch:
    """Batch of prompts for T5, which the encoder reads once.

    Shorter prompts are padded on the right.
    """

    def __init__(
        self,
        model: T5Model,
        prompts: Sequence[Sequence[int]],
        start: int,
        new_tokens: int,
        use_cache: bool,
    ) -> None:
        """Encode `prompts`; `start` is the first id of the decoder."""
        self._model = model
        device = next(model.parameters()).device
        width = max(map(len, prompts))
        self._tokens = torch.tensor(
            [list(prompt) + [0] * (width - len(prompt)) for prompt in prompts], device=device
        )
        lengths = [len(prompt) for prompt in prompts]
        self._present = (
            torch.arange(width, device=device) < torch.tensor(lengths, device=device)[:, None]
            if min(lengths) < width
            else None
        )
        self._written = torch.full((len(prompts), 1), start, device=device)
        self._memory = model.encode(self._model_input(self._written))
        self._cache = KeyValueCache(new_tokens) if use_cache else None

    def read_prompts(self) -> Tensor:
        """Return the logits [b, v] of the first token of each output."""
        return self._logits(self._written)

    def read(self, new: Tensor) -> Tensor:
        """Append the chosen ids [b, 1] and return the logits [b, v] of the next tokens."""
        if self._cache is not None:
            return self._logits(new)
        self._written = torch.cat([self._written, new], 1)
        return self._logits(self._written)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only the prompts in `rows`."""
        chosen = torch.tensor(rows, device=self._tokens.device)
        self._tokens, self._memory = self._tokens[chosen], self._memory[chosen]
        self._written = self._written[chosen]
        if self._present is not None:
            self._present = self._present[chosen]
        if self._cache is not None:
            self._cache.keep(chosen)

    def _logits(self, written: Tensor) -> Tensor:
        """Return the logits [b, v] after `written` [b, s], which follow the cached tokens."""
        logits: Tensor = self._model(
            self._model_input(written), memory=self._memory, cache=self._cache, last_only=True
        )
        return logits[:, -1]

    def _model_input(self, written: Tensor) -> ModelInput:
        return ModelInput(
            self._tokens,
            torch.zeros_like(written),
            present=self._present,
            decoder_tokens=written,
        )


class Chooser:
    """Chooser of the next token of each prompt in a batch."""

    def __init__(self, options: GenerateOptions, numbers: Sequence[int]) -> None:
        """Seed one generator per prompt; `numbers` are the prompts' numbers among all prompts."""
        self._options = options
        self._generators = [
            torch.Generator().manual_seed(stable_seed("generate", options.seed, number))
            for number in numbers
        ]

    def choose(self, logits: Tensor) -> Tensor:
        """Return one id per row of `logits` [b, v]: the most probable one, or a sampled one."""
        if not self._options.samples:
            return logits.argmax(-1)
        draws = torch.cat(
            [torch.rand(1, dtype=torch.float64, generator=source) for source in self._generators]
        )
        return sample(logits, draws.to(logits.device), self._options)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only the prompts in `rows`."""
        self._generators = [self._generators[row] for row in rows]


def sample(logits: Tensor, draws: Tensor, options: GenerateOptions) -> Tensor:
    """Sample from the distribution after temperature, top_k and top_p, applied in this order.

    Sampling inverts the cumulative distribution function at `draws`.

    Args:
        logits: logits [b, v].
        draws: uniform numbers in [0, 1), fp64 [b].
        options: temperature, top_k and top_p.

    Returns:
        The sampled ids [b].
    """
    scaled = logits.double() / options.resolved_temperature
    ids = None
    if options.top_k is not None:
        scaled, ids = scaled.topk(min(options.top_k, logits.shape[-1]), dim=-1)
    elif options.top_p is not None:
        scaled, ids = scaled.sort(dim=-1, descending=True, stable=True)
    probabilities = scaled.softmax(-1)
    if options.top_p is not None:
        before = probabilities.cumsum(-1) - probabilities
        # The most probable token always remains.
        probabilities = probabilities.masked_fill(before >= options.top_p, 0.0)
    cumulative = probabilities.cumsum(-1)
    ranks = torch.searchsorted(cumulative, (draws[:, None] * cumulative[:, -1:]), right=True)
    # If the product rounds up to the total, the search passes the last token with a probability.
    ranks = ranks.minimum((probabilities > 0).cumsum(-1).argmax(-1, keepdim=True))
    return (ranks if ids is None else ids.gather(-1, ranks))[:, 0]


def _continue(
    batch: Batch,
    chooser: Chooser,
    limits: Sequence[int],
    vocab_size: int,
    ends: Collection[int],
    tp: ParallelGroup,
    on_token: Callable[[int, int], None] | None,
) -> list[Continuation]:
    """Generate tokens for the prompts of a batch, dropping each prompt when it is finished."""
    tokens: list[list[int]] = [[] for _ in limits]
    running = list(range(len(limits)))
    logits = batch.read_prompts()
    while True:
        chosen = _agree(chooser.choose(logits[:, :vocab_size]), tp)
        for row, token in zip(running, chosen.tolist(), strict=True):
            tokens[row].append(token)
            if on_token is not None:
                on_token(row, token)
        unfinished = [
            index
            for index, row in enumerate(running)
            if tokens[row][-1] not in ends and len(tokens[row]) < limits[row]
        ]
        if not unfinished:
            return [Continuation(tuple(row), ended=row[-1] in ends) for row in tokens]
        if len(unfinished) < len(running):
            running, chosen = [running[index] for index in unfinished], chosen[unfinished]
            batch.keep(unfinished)
            chooser.keep(unfinished)
        logits = batch.read(chosen[:, None])


def _numbered(on_token: Callable[[int, int], None], first: int) -> Callable[[int, int], None]:
    """Return `on_token` for the rows of a batch that begins with prompt number `first`."""
    return lambda row, token: on_token(first + row, token)


def _agree(chosen: Tensor, tp: ParallelGroup) -> Tensor:
    """Broadcast the first tensor-parallel rank's choice: all ranks must use the same tokens."""
    if tp.size > 1:
        dist.broadcast(chosen, group=tp.group, group_src=0)
    return chosen
