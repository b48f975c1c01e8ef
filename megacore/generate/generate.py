"""Continue prompts with a causal model, or answer them with T5, several side by side.

What is drawn for a prompt depends on the seed, its number and how many tokens it has alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.errors import ConfigError
from megacore.jobs.model import GenerateOptions, new_token_limits
from megacore.models.gpt import GPTModel
from megacore.models.inputs import ModelInput
from megacore.models.layers.shared import KeyValueCache
from megacore.models.t5 import T5Model
from megacore.parallel.mesh import ParallelGroup
from megacore.parallel.rng import stable_seed

_READ_AT_ONCE = 256
"""Tokens of a prompt that one forward pass reads: it bounds the memory of their logits, of which
the last count."""


@dataclass(frozen=True)
class Continuation:
    """What a model has added to one prompt."""

    tokens: tuple[int, ...]
    """New ids; where the text ended, the token that ends it is the last one."""
    ended: bool
    """Whether the model ended the text, or the number of tokens was reached."""


@torch.inference_mode()
def generate(
    model: GPTModel | T5Model,
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions,
    *,
    vocab_size: int,
    end: int | None = None,
    start: int = 0,
    batch_size: int = 8,
    use_cache: bool = True,
) -> list[Continuation]:
    """Continue each prompt until its text ends or it has its tokens.

    What a prompt becomes depends on the model, its ids, `options` and its number alone: not on the
    prompts beside it nor on the layout, but where two tokens' chances are as close as rounding.

    Args:
        model: in evaluation mode, on any device and in any type; all tensor-parallel ranks call
            this alike.
        prompts: ids of each, of any lengths; of T5, what the encoder reads.
        options: how tokens are chosen, and how many.
        vocab_size: of the model before padding; the padding's rows are never chosen.
        end: id of the token that ends a text; None lets every prompt have all its tokens.
        start: id with which T5's decoder begins.
        batch_size: prompts at a time.
        use_cache: keep keys and values of what was read; without, every token reads all before it
            again, as T5's do.

    Raises:
        ConfigError: a prompt is empty or too long, or has an id that the vocabulary lacks.
    """
    answers = isinstance(model, T5Model)
    limits = new_token_limits(prompts, options, model.max_position_embeddings, answers=answers)
    _check_ids(prompts, vocab_size)
    found: list[Continuation] = []
    for first in range(0, len(prompts), batch_size):
        numbers = range(first, min(first + batch_size, len(prompts)))
        own, most = (
            [prompts[number] for number in numbers],
            max(limits[number] for number in numbers),
        )
        batch: Batch = (
            EncodedBatch(model, own, start)
            if isinstance(model, T5Model)
            else CausalBatch(model, own, most, use_cache)
        )
        chooser = Chooser(options, numbers)
        found += _continue(
            batch, chooser, [limits[number] for number in numbers], vocab_size, end, model.tp
        )
    return found


def _check_ids(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    for number, prompt in enumerate(prompts, 1):
        wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ConfigError(
                f"prompt {number} has the id {wrong}, which the model's vocabulary of {vocab_size} "
                "entries lacks: give the tokenizer that the model was trained with"
            )


class Batch(Protocol):
    """Prompts that are continued together."""

    def read_prompts(self) -> Tensor:
        """[b, v]: logits of the first new token of each prompt."""
        ...

    def read(self, new: Tensor) -> Tensor:
        """[b, 1] ids that were chosen -> [b, v] logits of the next ones."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these prompts alone."""
        ...


class CausalBatch:
    """Prompts that a causal model continues.

    The shorter ones are padded on the left, so that all end together.
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
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self._present = torch.arange(width, device=device) >= width - lengths[:, None]
        self._cache = KeyValueCache(width + new_tokens) if use_cache else None

    def read_prompts(self) -> Tensor:
        """[b, v]: logits of the first new token of each prompt."""
        if self._cache is None:
            return self._logits(self._tokens)
        for begin in range(0, self._tokens.shape[1], _READ_AT_ONCE):
            logits = self._logits(self._tokens[:, begin : begin + _READ_AT_ONCE])
        return logits

    def read(self, new: Tensor) -> Tensor:
        """[b, 1] ids that were chosen -> [b, v] logits of the next ones."""
        self._tokens = torch.cat([self._tokens, new], 1)
        self._present = torch.cat([self._present, torch.ones_like(new, dtype=torch.bool)], 1)
        return self._logits(self._tokens if self._cache is None else new)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these prompts alone."""
        chosen = torch.tensor(rows, device=self._tokens.device)
        self._tokens, self._present = self._tokens[chosen], self._present[chosen]
        if self._cache is not None:
            self._cache.keep(chosen)

    def _logits(self, tokens: Tensor) -> Tensor:
        """[b, s] ids that follow what the cache holds -> [b, v] logits after the last one."""
        begin = 0 if self._cache is None else self._cache.length
        present = self._present[:, : begin + tokens.shape[1]]
        if bool(present.all()):
            return self._model(tokens, cache=self._cache)[:, -1]  # type: ignore[no-any-return]
        positions = (present.cumsum(1) - 1).clamp(min=0)[:, begin:]
        logits = self._model(tokens, position_ids=positions, present=present, cache=self._cache)
        return logits[:, -1]  # type: ignore[no-any-return]


class EncodedBatch:
    """Prompts that T5's encoder reads once.

    Its decoder reads what it has written again for every token.
    """

    def __init__(self, model: T5Model, prompts: Sequence[Sequence[int]], start: int) -> None:
        """`start` is the id that the decoder begins with."""
        self._model = model
        device = next(model.parameters()).device
        width = max(map(len, prompts))
        tokens = torch.tensor(
            [list(prompt) + [0] * (width - len(prompt)) for prompt in prompts], device=device
        )
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self._tokens, self._present = tokens, torch.arange(width, device=device) < lengths[:, None]
        self._written = torch.full((len(prompts), 1), start, device=device)
        self._memory = model.encode(self._given())

    def read_prompts(self) -> Tensor:
        """[b, v]: logits of the first token of each output."""
        return self._model(self._given(), memory=self._memory)[:, -1]  # type: ignore[no-any-return]

    def read(self, new: Tensor) -> Tensor:
        """[b, 1] ids that were chosen -> [b, v] logits of the next ones."""
        self._written = torch.cat([self._written, new], 1)
        return self.read_prompts()

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these prompts alone."""
        chosen = torch.tensor(rows, device=self._tokens.device)
        self._tokens, self._present = self._tokens[chosen], self._present[chosen]
        self._written, self._memory = self._written[chosen], self._memory[chosen]

    def _given(self) -> ModelInput:
        return ModelInput(
            self._tokens,
            torch.zeros_like(self._written),
            present=self._present,
            decoder_tokens=self._written,
        )


class Chooser:
    """Takes the next token of each prompt of a batch."""

    def __init__(self, options: GenerateOptions, numbers: Sequence[int]) -> None:
        """`numbers` are those of the prompts among all, by which they draw."""
        self._options = options
        self._generators = [
            torch.Generator().manual_seed(stable_seed("generate", options.seed, number))
            for number in numbers
        ]

    def choose(self, logits: Tensor) -> Tensor:
        """[b, v] -> [b] ids: the most probable ones, or drawn ones."""
        if not self._options.samples:
            return logits.argmax(-1)
        draws = torch.cat(
            [torch.rand(1, dtype=torch.float64, generator=own) for own in self._generators]
        )
        return sample(logits, draws.to(logits.device), self._options)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these prompts of the batch alone."""
        self._generators = [self._generators[row] for row in rows]


def sample(logits: Tensor, draws: Tensor, options: GenerateOptions) -> Tensor:
    """Invert the distribution function that temperature, top_k and top_p leave, in this order.

    Args:
        logits: [b, v].
        draws: [b] fp64, uniform in [0, 1).
        options: what is left of the distribution.

    Returns:
        [b] ids.
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
        # the first one always stays
        probabilities = probabilities.masked_fill(before >= options.top_p, 0.0)
    reached = probabilities.cumsum(-1)
    places = torch.searchsorted(reached, (draws[:, None] * reached[:, -1:]), right=True)
    # A product that rounds up to the whole would name a token behind the last one with a
    # probability.
    places = places.minimum((probabilities > 0).cumsum(-1).argmax(-1, keepdim=True))
    return (places if ids is None else ids.gather(-1, places))[:, 0]


def _continue(
    batch: Batch,
    chooser: Chooser,
    limits: Sequence[int],
    vocab_size: int,
    end: int | None,
    tp: ParallelGroup,
) -> list[Continuation]:
    """Tokens for each prompt of a batch; those that are finished leave it."""
    tokens: list[list[int]] = [[] for _ in limits]
    running = list(range(len(limits)))
    logits = batch.read_prompts()
    while True:
        chosen = _agree(chooser.choose(logits[:, :vocab_size]), tp)
        for row, token in zip(running, chosen.tolist(), strict=True):
            tokens[row].append(token)
        stay = [
            place
            for place, row in enumerate(running)
            if tokens[row][-1] != end and len(tokens[row]) < limits[row]
        ]
        if not stay:
            return [Continuation(tuple(row), ended=row[-1] == end) for row in tokens]
        if len(stay) < len(running):
            running, chosen = [running[place] for place in stay], chosen[stay]
            batch.keep(stay)
            chooser.keep(stay)
        logits = batch.read(chosen[:, None])


def _agree(chosen: Tensor, tp: ParallelGroup) -> Tensor:
    """The first tensor-parallel rank's choice on all of them: they must read the same tokens."""
    if tp.size > 1:
        dist.broadcast(chosen, group=tp.group, group_src=0)
    return chosen
