"""The gate: an export, loaded from disk by transformers, must be the model that was trained.

Both models run in fp32 on the same validation samples. Logits, perplexity, greedy continuation, every weight and
the tokenizer are compared; nothing is published unless all of them agree.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.convert.key_map import KeyMap
from megacore.convert.layers import layer_differences
from megacore.convert.report import ParityReport, same_to_four_digits
from megacore.errors import ConversionError
from megacore.tokenizer import Tokenizer

CONTINUATION_TOKENS = 32
"""Greedy tokens per sample."""
PROMPT_TOKENS = 128
"""Longest prompt of the greedy continuation; later positions are covered by the logits."""
OUTPUT_LAYER = "output_layer"
"""What differs when all hidden states agree and the logits do not."""


def check_parity(
    exported: Any,
    exported_tokenizer: Any,
    model: nn.Module,
    tokenizer: Tokenizer,
    samples: npt.NDArray[np.int64],
    key_map: KeyMap,
    module_pairs: list[tuple[str, str]],
    tolerance: float,
) -> ParityReport:
    """Compare the exported model and tokenizer, as transformers loaded them, with ours.

    Args:
        exported: transformers' model, see `load_exported`.
        exported_tokenizer: transformers' tokenizer.
        model: ours, in fp32, with the checkpoint's weights; `model(tokens [b, s]) -> logits [b, s, v_padded]`.
        tokenizer: ours.
        samples: ids [samples, s + 1] of the validation split.
        key_map: the table by which the weights were written.
        module_pairs: modules of ours and theirs whose outputs agree, in the order of execution.
        tolerance: largest absolute difference of logits.

    Raises:
        ConversionError: the logits are of another vocabulary, so that nothing can be compared.
    """
    report = ParityReport(tolerance=tolerance)
    tokens = torch.from_numpy(np.ascontiguousarray(samples, dtype=np.int64))
    model.eval()
    with torch.inference_mode():
        _compare_logits(report, model, exported, tokens, tokenizer.vocab_size)
        _compare_greedy(report, model, exported, tokens, tokenizer)
    _compare_weights(report, model, exported, key_map)
    _compare_tokenizers(report, tokenizer, exported_tokenizer, samples)
    if not report.passed:
        report.layer_differences, report.first_differing_layer = layer_differences(
            model, exported, module_pairs, tokens[:, :-1], tolerance
        )
        if report.first_differing_layer is None and not report.max_abs_logit_difference <= tolerance:
            report.first_differing_layer = OUTPUT_LAYER
    return report


def load_exported(directory: Path) -> tuple[Any, Any]:
    """The model (fp32, in evaluation mode) and the tokenizer of a transformers directory, without a network.

    Raises ConversionError when transformers refuses it, or would fill in or drop a weight.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, local_files_only=True, dtype=torch.float32, output_loading_info=True
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except MemoryError:
        raise
    except Exception as error:  # safetensors and tokenizers raise plain Exception
        raise ConversionError(
            f"transformers cannot load the export {directory}: {' '.join(str(error).split())[:500]}"
        ) from error
    model, info = loaded
    wrong = {kind: names for kind, names in info.items() if names}
    if wrong:
        raise ConversionError(
            f"transformers loads the export {directory} with {wrong}: every weight must have its place"
        )
    return model.eval(), tokenizer


def _compare_logits(report: ParityReport, ours: nn.Module, theirs: Any, tokens: Tensor, vocab_size: int) -> None:
    """Logits and perplexity, one sample at a time."""
    losses = {"ours": 0.0, "padded": 0.0, "exported": 0.0}
    largest = 0.0
    for sample in tokens:
        inputs, labels = sample[None, :-1], sample[1:]
        padded = ours(inputs)[0].float()
        own, other = padded[:, :vocab_size], theirs(inputs).logits[0].float()
        if own.shape != other.shape:
            raise ConversionError(
                f"the exported model gives logits of shape {tuple(other.shape)} where ours gives {tuple(own.shape)}"
            )
        difference = float((own - other).abs().max())
        if not difference <= largest:
            largest = difference
        for name, logits in (("ours", own), ("padded", padded), ("exported", other)):
            losses[name] += float(F.cross_entropy(logits, labels, reduction="sum"))
    report.samples, report.tokens = len(tokens), tokens[:, 1:].numel()
    report.max_abs_logit_difference = largest
    report.perplexity_ours = _perplexity(losses["ours"], report.tokens)
    report.perplexity_with_padding = _perplexity(losses["padded"], report.tokens)
    report.perplexity_exported = _perplexity(losses["exported"], report.tokens)
    if not largest <= report.tolerance:
        report.problems.append("the exported model's logits differ")
    if not same_to_four_digits(report.perplexity_exported, report.perplexity_ours):
        report.problems.append("its perplexity differs")


def _perplexity(loss_sum: float, tokens: int) -> float:
    return math.exp(min(loss_sum / tokens, 700.0))


def _compare_greedy(report: ParityReport, ours: nn.Module, theirs: Any, tokens: Tensor, tokenizer: Tokenizer) -> None:
    """Greedy continuations by `theirs.generate` (with its cache) against our choices after the same prefix.

    One forward pass of ours over prompt and continuation is enough: up to the first difference the prefixes agree.
    """
    new = min(CONTINUATION_TOKENS, tokens.shape[1] // 2)
    prompt = tokens[:, : min(tokens.shape[1] - new, PROMPT_TOKENS)]
    continued = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, temperature=1.0, top_k=50, max_new_tokens=new
    )
    differing = []
    for number, row in enumerate(continued):
        logits = ours(row[None, :-1])[0, prompt.shape[1] - 1 :, : tokenizer.vocab_size].float()
        best = logits.topk(2).values
        for choice, their_choice, (first, second) in zip(
            logits.argmax(-1).tolist(), row[prompt.shape[1] :].tolist(), best.tolist(), strict=True
        ):
            if not first - second >= 2 * report.tolerance:
                report.greedy_undecided += 1
                break
            if choice != their_choice:
                differing.append(number)
                break
            report.greedy_tokens += 1
            if choice == tokenizer.eod_id:
                break
    if differing:
        report.problems.append(f"its greedy continuation differs on {len(differing)} of {len(continued)} samples")


def _compare_weights(report: ParityReport, ours: nn.Module, theirs: nn.Module, key_map: KeyMap) -> None:
    """Every exported weight, as transformers holds it, against ours through the table: bitwise, padding aside."""
    held, parameters = theirs.state_dict(), dict(ours.named_parameters())
    for entry in key_map.entries:
        parts = entry.layout.split(parameters[entry.ours].detach())
        if not all(torch.equal(part, held[name]) for part, name in zip(parts, entry.theirs, strict=True)):
            report.differing_weights.append(entry.ours)
    if report.differing_weights:
        named = ", ".join(report.differing_weights[:3])
        more = f" and {len(report.differing_weights) - 3} more" if len(report.differing_weights) > 3 else ""
        report.problems.append(f"its weights differ in {named}{more}")


def _compare_tokenizers(report: ParityReport, ours: Tokenizer, theirs: Any, samples: npt.NDArray[np.int64]) -> None:
    """End of document, size, and both directions on the validation text."""
    if theirs.eos_token_id != ours.eod_id:
        report.problems.append(f"its tokenizer ends documents with id {theirs.eos_token_id}, ours with {ours.eod_id}")
    vocab_size = max(theirs.get_vocab().values()) + 1
    if vocab_size != ours.vocab_size:
        report.problems.append(f"its tokenizer has a vocabulary of {vocab_size}, ours of {ours.vocab_size}")
    texts = [ours.decode(sample) for sample in samples]
    encoded = differently_decoded = 0
    for text, sample, expected in zip(texts, samples, ours.encode_batch(texts), strict=True):
        same = theirs(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"] == expected.tolist()
        encoded += same
        report.tokenizer_tokens += len(expected) if same else 0
        differently_decoded += theirs.decode(sample.tolist()) != text
    if encoded < len(texts):
        report.problems.append(
            f"its tokenizer encodes {len(texts) - encoded} of {len(texts)} validation texts to other ids"
        )
    if differently_decoded:
        report.problems.append(f"its tokenizer decodes {differently_decoded} of {len(texts)} samples to another text")
