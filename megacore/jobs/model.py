"""Jobs on a finished model, apart from any run: generation and zero-shot evaluation.

Imports no torch: a command line checks a job before anything starts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacore.config.base import Section
from megacore.config.spec import ModelSpec
from megacore.config.train import Precision
from megacore.errors import ConfigError
from megacore.jobs.run import RankJob
from megacore.parallel.rank_layout import RankLayout

DEFAULT_NEW_TOKENS = 64
"""At most so many where nobody says how many."""
_OUTPUT = "result.json"


class ModelSource(Section):
    """A model on disk, in whichever form."""

    directory: str
    """A checkpoint (iter_*), or a transformers directory."""
    exported: bool
    """Whether it is a transformers directory."""
    spec: ModelSpec
    """What the model is."""


class ModelJob(RankJob):
    """What every rank needs to know of a job on a finished model."""

    source: ModelSource
    """Where the weights are, and of which model."""
    tensor_model_parallel_size: int
    """Ranks that share each layer; what they leave of the ranks is data parallel."""
    precision: Precision
    """Compute type; auto takes bf16 where the hardware multiplies it natively, else fp32."""
    batch_size: int
    """Sequences per forward pass."""
    output: str
    """JSON file to write."""

    @property
    def layout(self) -> RankLayout:
        """The layout of the job's ranks. Raises ParallelLayoutError when they do not divide."""
        return RankLayout.of_world(self.ranks, tensor=self.tensor_model_parallel_size)


@dataclass(frozen=True)
class GenerateOptions:
    """The most probable token each time, or sampling by temperature, top_k and top_p.

    Raises ConfigError for a value that cannot work.
    """

    max_new_tokens: int | None = None
    """Tokens that each prompt gets at most; None: 64, or as many as the model's positions leave."""
    temperature: float | None = None
    """Divides the logits; 0 takes the most probable token; None: 1 where top_k or top_p is given,
    else 0."""
    top_k: int | None = None
    """Draw from this many most probable tokens (Fan et al. 2018, arXiv:1805.04833)."""
    top_p: float | None = None
    """Draw from the most probable tokens that together have this probability (Holtzman et al. 2019,
    arXiv:1904.09751)."""
    seed: int = 1234
    """Of the draws; each prompt has its own, by its number."""

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
        """Whether tokens are drawn."""
        return self.resolved_temperature > 0

    @property
    def resolved_temperature(self) -> float:
        """What divides the logits; 0 where tokens are not drawn."""
        if self.temperature is not None:
            return self.temperature
        return 1.0 if self.top_k is not None or self.top_p is not None else 0.0


class GenerateJob(ModelJob):
    """Continuations of prompts."""

    prompts: tuple[tuple[int, ...], ...]
    """Ids of each."""
    options: GenerateOptions
    """How tokens are chosen, and how many."""
    end: int | None
    """Id of the token that ends a text; null lets every prompt have all its tokens."""


class ZeroShotJob(ModelJob):
    """Scores of a model on texts that it was not trained for."""

    tokenizer_directory: str
    """Directory with tokenizer.json."""
    wikitext: str | None
    """Path of WikiText's test split; null leaves it out."""
    lambada: str | None
    """Path of LAMBADA's test split; null leaves it out."""
    seq_length: int
    """Tokens of a window."""
    overlapping_eval: int | None
    """Tokens between the starts of windows; null means seq_length."""


def places(scratch: Path) -> dict[str, Any]:
    """Where a job in `scratch` puts its result and the reasons of ranks that fail."""
    return {"exit_directory": str(scratch / "exit"), "output": str(scratch / _OUTPUT)}


def new_token_limits(
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions,
    positions: int,
    *,
    answers: bool = False,
) -> list[int]:
    """How many tokens each prompt may get.

    Args:
        prompts: ids of each.
        options: say how many are wanted.
        positions: longest sequence of the model, in tokens.
        answers: whether new tokens are a sequence of their own, as T5's are, instead of following
            the prompt.

    Raises:
        ConfigError: a prompt is empty, fills all positions, or leaves fewer than `max_new_tokens`.
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
