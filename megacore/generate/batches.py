"""Several prompts side by side, read by a model step by step."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megacore.models.gpt import GPTModel
from megacore.models.inputs import ModelInput
from megacore.models.layers.cache import KeyValueCache
from megacore.models.t5 import T5Model

_READ_AT_ONCE = 256
"""Tokens of a prompt that one forward pass reads: it bounds the memory of their logits, of which the last count."""


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
    """Prompts that a causal model continues: the shorter ones are padded on the left, so that all end together."""

    def __init__(self, model: GPTModel, prompts: Sequence[Sequence[int]], new_tokens: int, use_cache: bool) -> None:
        self._model = model
        device = next(model.parameters()).device
        width = max(map(len, prompts))
        self._tokens = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
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
    """Prompts that T5's encoder reads once; its decoder reads what it has written again for every token."""

    def __init__(self, model: T5Model, prompts: Sequence[Sequence[int]], start: int) -> None:
        """`start` is the id that the decoder begins with."""
        self._model = model
        device = next(model.parameters()).device
        width = max(map(len, prompts))
        tokens = torch.tensor([list(prompt) + [0] * (width - len(prompt)) for prompt in prompts], device=device)
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
            self._tokens, torch.zeros_like(self._written), present=self._present, decoder_tokens=self._written
        )
