"""What two models choose: greedy continuations, and the tokens of masked places."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megacore.convert.outputs import Pair, one_sample
from megacore.convert.report import ParityReport
from megacore.models.inputs import ModelInput

CONTINUATION_TOKENS = 32
"""Greedy tokens per sample."""
PROMPT_TOKENS = 128
"""Longest prompt of the greedy continuation; later positions are covered by the logits."""
_GREEDY = {"do_sample": False, "num_beams": 1, "temperature": 1.0, "top_k": 50}


def compare_continuations(report: ParityReport, pair: Pair, validation: ModelInput) -> None:
    """Greedy continuations by `generate` of transformers (with its cache) against our choices after the same prefix.

    One forward pass of ours over prompt and continuation is enough: up to the first difference the prefixes agree.
    A sample's comparison ends where the two best logits are closer than twice the tolerance.
    """
    run = _of_decoder if pair.spec.family == "t5" else _of_causal
    special = pair.spec.special_tokens
    ends = {special.eod, special.sep} if pair.spec.family == "t5" else {special.eod}
    differing = 0
    for logits, choices in run(pair, validation):
        best = logits.topk(2).values
        for choice, their_choice, (first, second) in zip(
            logits.argmax(-1).tolist(), choices.tolist(), best.tolist(), strict=True
        ):
            if not first - second >= 2 * report.tolerance:
                report.greedy_undecided += 1
                break
            if choice != their_choice:
                differing += 1
                break
            report.greedy_tokens += 1
            if choice in ends:
                break
    if differing:
        samples = len(validation.tokens)
        report.problems.append(f"its greedy continuation differs on {differing} of {samples} samples")


def compare_masked(report: ParityReport, pair: Pair, validation: ModelInput) -> None:
    """The most likely token of each masked place, where the two best logits are not closer than twice the tolerance."""
    assert validation.loss_mask is not None
    differing = 0
    for number in range(len(validation.tokens)):
        given = one_sample(validation, number)
        assert given.loss_mask is not None
        own = pair.our_outputs(given).logits[given.loss_mask][:, : pair.spec.vocab_size]
        other = pair.their_outputs(given).logits[given.loss_mask]
        best = own.topk(2).values
        decided = best[:, 0] - best[:, 1] >= 2 * report.tolerance
        report.greedy_undecided += int((~decided).sum())
        same = own.argmax(-1) == other.argmax(-1)
        report.greedy_tokens += int((decided & same).sum())
        differing += int((decided & ~same).sum())
    if differing:
        report.problems.append(f"its choice differs at {differing} of {int(validation.loss_mask.sum())} masked places")


def _of_causal(pair: Pair, validation: ModelInput) -> Iterator[tuple[Tensor, Tensor]]:
    """For each sample our logits [new, v] after the prefixes of the exported model's continuation, and that [new]."""
    tokens = validation.tokens
    length = tokens.shape[1] + 1
    new = min(CONTINUATION_TOKENS, length // 2)
    prompt = tokens[:, : min(length - new, PROMPT_TOKENS)]
    continued = pair.theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, **_GREEDY)
    for row in continued:
        given = ModelInput(row[None, :-1], row[None, 1:])
        logits = pair.our_outputs(given).logits[0, prompt.shape[1] - 1 :, : pair.spec.vocab_size]
        yield logits, row[prompt.shape[1] :]


def _of_decoder(pair: Pair, validation: ModelInput) -> Iterator[tuple[Tensor, Tensor]]:
    """The same of a decoder, which begins anew."""
    assert validation.present is not None
    new = min(CONTINUATION_TOKENS, validation.labels.shape[1])
    continued = pair.theirs.generate(
        validation.tokens, attention_mask=validation.present.long(), max_new_tokens=new, **_GREEDY
    )
    for number, row in enumerate(continued):
        sample = one_sample(validation, number)
        given = ModelInput(sample.tokens, row[None, 1:], present=sample.present, decoder_tokens=row[None, :-1])
        yield pair.our_outputs(given).logits[0, :, : pair.spec.vocab_size], row[1:]
