"""Jobs on a finished model, independent of any run: generation, zero-shot evaluation, lm-eval.

The module does not import torch, so that a command line can check a job quickly before it starts
processes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacore.config.base import Section
from megacore.config.spec import ModelSpec
from megacore.config.train import LmEvalConfig, Precision, ZeroShotConfig
from megacore.errors import ConfigError
from megacore.jobs.run import RankJob
from megacore.parallel.rank_layout import RankLayout

DEFAULT_NEW_TOKENS = 64
"""Default limit of new tokens per prompt."""
_OUTPUT = "result.json"


class ModelSource(Section):
    """A model on disk: a checkpoint or an export."""

    directory: str
    """A checkpoint (iter_*), or a transformers directory."""
    exported: bool
    """True if `directory` is a transformers directory."""
    spec: ModelSpec
    """Specification of the model."""


class ResultJob(RankJob):
    """Job whose ranks write one JSON file."""

    output: str
    """JSON file to write."""


class ModelJob(ResultJob):
    """Common fields of the jobs on a finished model."""

    source: ModelSource
    """Weights and specification of the model."""
    tensor_model_parallel_size: int
    """Number of ranks that share each layer; the data-parallel size is `ranks` divided by it."""
    precision: Precision
    """Compute type; auto means bf16 where the hardware multiplies it natively, else fp32."""
    batch_size: int
    """Sequences per forward pass."""

    @property
    def layout(self) -> RankLayout:
        """Layout of the job's ranks. Raises ParallelLayoutError if it does not use all of them."""
        return RankLayout.of_world(self.ranks, tensor=self.tensor_model_parallel_size)


_LEAST_TEMPERATURE = 1e-5
"""Smallest divisor of logits; a far smaller one would give infinite quotients."""


@dataclass(frozen=True)
class GenerateOptions:
    """Options of generation: greedy, or sampling by temperature, top_k and top_p.

    Raises ConfigError for an invalid value.
    """

    max_new_tokens: int | None = None
    """Limit of new tokens per prompt; None means 64, or all positions that are left if fewer."""
    temperature: float | None = None
    """Divisor of the logits. 0 takes the most probable token. None means 1 if top_k or top_p is
    given, else 0."""
    top_k: int | None = None
    """Number of most probable tokens to draw from (Fan et al. 2018, arXiv:1805.04833)."""
    top_p: float | None = None
    """Total probability of the most probable tokens to draw from (Holtzman et al. 2019,
    arXiv:1904.09751)."""
    seed: int = 1234
    """Seed of the draws. Each prompt has a generator, seeded with this value and its number."""

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}: give at least 1")
        if self.temperature is not None and not (
            math.isfinite(self.temperature) and self.temperature >= 0
        ):
            raise ConfigError(
                f"temperature is {self.temperature}: give a number from 0 (the most probable "
                "token) up"
            )
        if self.temperature is not None and 0 < self.temperature < _LEAST_TEMPERATURE:
            raise ConfigError(
                f"temperature is {self.temperature}: give 0 for the most probable token, or at "
                f"least {_LEAST_TEMPERATURE}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(
                f"top_k is {self.top_k}: give at least 1, or leave it out for all tokens"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}: give a probability above 0 and up to 1")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            name = "top_k" if self.top_k is not None else "top_p"
            raise ConfigError(
                f"temperature is 0, which takes the most probable token, but {name} is "
                f"{getattr(self, name)}: leave one of them out"
            )

    @property
    def samples(self) -> bool:
        """True if tokens are drawn at random."""
        return self.resolved_temperature > 0

    @property
    def resolved_temperature(self) -> float:
        """Divisor of the logits; 0 if tokens are not drawn."""
        if self.temperature is not None:
            return self.temperature
        return 1.0 if self.top_k is not None or self.top_p is not None else 0.0


class GenerateJob(ModelJob):
    """Generation of continuations of prompts."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each prompt."""
    options: GenerateOptions
    """Sampling method and limit of new tokens."""
    ends: tuple[int, ...]
    """Ids of the tokens that end a text; without any, every prompt gets all its new tokens."""


class ZeroShotJob(ModelJob):
    """Scoring of a model on WikiText, LAMBADA and passkeys, which it was not trained for."""

    tokenizer_directory: str
    """Directory with tokenizer.json."""
    settings: ZeroShotConfig
    """Texts with absolute paths, their windows, and passkeys."""
    seq_length: int
    """Length of a window in tokens."""


class LmEvalJob(ResultJob):
    """Scoring of an exported model with lm-evaluation-harness, in one process."""

    model_directory: str
    """Transformers directory of the model and its tokenizer."""
    settings: LmEvalConfig
    """Tasks and their options; `include_path` is absolute."""
    batch_size: int
    """Sequences of one forward pass."""


def places(scratch: Path) -> dict[str, Any]:
    """Return the fields of a job that place its result and exit reasons in `scratch`."""
    return {"exit_directory": str(scratch / "exit"), "output": str(scratch / _OUTPUT)}


def new_token_limits(
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions,
    positions: int,
    *,
    answers: bool = False,
) -> list[int]:
    """Return the number of new tokens that each prompt, of token ids, may get.

    The model has `positions` positions. With `answers`, the new tokens are a separate sequence,
    like those of T5; otherwise they follow the prompt. Raises ConfigError if a prompt is empty,
    fills all positions, or leaves fewer than `max_new_tokens`.
    """
    return [
        _limit(number, len(prompt), options, positions, answers)
        for number, prompt in enumerate(prompts, 1)
    ]


def _limit(
    number: int, length: int, options: GenerateOptions, positions: int, answers: bool
) -> int:
    longest, left = (positions, positions) if answers else (positions - 1, positions - length)
    if length == 0:
        raise ConfigError(f"prompt {number} is empty: give it at least one token")
    if length > longest:
        reserved = "" if answers else ", of which one must be left for a new token"
        raise ConfigError(
            f"prompt {number} has {length} tokens and the model {positions} positions{reserved}: "
            f"shorten the prompt to at most {longest} tokens"
        )
    if options.max_new_tokens is not None and options.max_new_tokens > left:
        why = (
            f"the model has {positions} positions: lower it to at most {left}"
            if answers
            else (
                f"prompt {number} has {length} of the model's {positions} positions and leaves "
                f"{left}: lower it to at most {left}, or shorten the prompt"
            )
        )
        raise ConfigError(f"max_new_tokens is {options.max_new_tokens}, but {why}")
    return options.max_new_tokens or min(DEFAULT_NEW_TOKENS, left)
