"""Continuing prompts with a causal model, or answering them with T5: one token at a time, several prompts together."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.errors import ConfigError
from megacore.generate.batches import Batch, CausalBatch, EncodedBatch
from megacore.generate.options import GenerateOptions, new_token_limits
from megacore.generate.sampling import Chooser
from megacore.models.gpt import GPTModel
from megacore.models.t5 import T5Model
from megacore.parallel.mesh import ParallelGroup


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

    What a prompt becomes depends on the model, its ids, `options` and its number alone: not on the prompts beside it
    nor on the layout, but where two tokens' chances are as close as rounding.

    Args:
        model: in evaluation mode, on any device and in any type; all tensor-parallel ranks call this alike.
        prompts: ids of each, of any lengths; of T5, what the encoder reads.
        options: how tokens are chosen, and how many.
        vocab_size: of the model before padding; the padding's rows are never chosen.
        end: id of the token that ends a text; None lets every prompt have all its tokens.
        start: id with which T5's decoder begins.
        batch_size: prompts at a time.
        use_cache: keep keys and values of what was read; without, every token reads all before it again, as T5's do.

    Raises:
        ConfigError: a prompt is empty or too long, or has an id that the vocabulary lacks.
    """
    answers = isinstance(model, T5Model)
    limits = new_token_limits(prompts, options, model.max_position_embeddings, answers=answers)
    _check_ids(prompts, vocab_size)
    found: list[Continuation] = []
    for first in range(0, len(prompts), batch_size):
        numbers = range(first, min(first + batch_size, len(prompts)))
        own, most = [prompts[number] for number in numbers], max(limits[number] for number in numbers)
        batch: Batch = (
            EncodedBatch(model, own, start) if isinstance(model, T5Model) else CausalBatch(model, own, most, use_cache)
        )
        chooser = Chooser(options, numbers)
        found += _continue(batch, chooser, [limits[number] for number in numbers], vocab_size, end, model.tp)
    return found


def _continue(
    batch: Batch, chooser: Chooser, limits: Sequence[int], vocab_size: int, end: int | None, tp: ParallelGroup
) -> list[Continuation]:
    """Tokens for each prompt of a batch; those that are finished leave it."""
    tokens: list[list[int]] = [[] for _ in limits]
    running = list(range(len(limits)))
    logits = batch.read_prompts()
    while True:
        chosen = _agree(chooser.choose(logits[:, :vocab_size]), tp)
        for row, token in zip(running, chosen.tolist(), strict=True):
            tokens[row].append(token)
        stay = [place for place, row in enumerate(running) if tokens[row][-1] != end and len(tokens[row]) < limits[row]]
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


def _check_ids(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    for number, prompt in enumerate(prompts, 1):
        wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ConfigError(
                f"prompt {number} has the id {wrong}, which the model's vocabulary of {vocab_size} entries lacks: give "
                "the tokenizer that the model was trained with"
            )
