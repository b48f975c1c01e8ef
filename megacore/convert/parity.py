"""The gate: an export, loaded from disk by transformers, must be the model that was trained.

Both models run in fp32 on the same samples: logits on validation samples, perplexity on the test split, what they
choose greedily, every weight, and the tokenizer. Nothing is published unless all of them agree.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megacore.convert.choices import compare_continuations, compare_masked
from megacore.convert.layers import layer_differences
from megacore.convert.outputs import Pair, meaningful, one_sample, their_outputs, without_padding
from megacore.convert.perplexity import Perplexities, perplexities
from megacore.convert.report import ParityReport, same_to_four_digits, within
from megacore.errors import ConversionError
from megacore.models.inputs import ModelInput

OUTPUT_LAYER = "output_layer"
"""What differs when all hidden states agree and the logits do not."""
NATIVE_SHARE = 0.005
"""Largest change of perplexity when an export computes in its own type."""

Batches = Callable[[], Iterable[ModelInput]]
"""The micro batches of a split, from the beginning each time."""


def check_models(report: ParityReport, pair: Pair, validation: ModelInput, test: Batches) -> None:
    """Compare the exported model, as transformers loaded it, with ours, and look for the layer where they part.

    Args:
        report: what is found goes there; problems that it has already keep it from passing.
        pair: both models, on one device.
        validation: samples whose logits and choices are compared, one at a time.
        test: samples of `report.perplexity_split`.

    Raises:
        ConversionError: the logits are of another vocabulary, so that nothing can be compared.
    """
    pair.ours.eval()
    with torch.inference_mode():
        _compare_logits(report, pair, validation)
        _compare_perplexities(report, pair, test())
        if pair.spec.family == "bert":
            compare_masked(report, pair, validation)
        else:
            compare_continuations(report, pair, validation)
    _compare_weights(report, pair)
    if not report.passed:
        _find_layer(report, pair, validation)


def load_exported(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a transformers directory, in evaluation mode, without a network.

    Raises ConversionError when transformers refuses it, or would fill in or drop a weight.
    """
    import transformers

    def load() -> Any:
        config: Any = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        kind = getattr(transformers, config.architectures[0])
        return kind.from_pretrained(directory, local_files_only=True, dtype=dtype, output_loading_info=True)

    model, info = _loaded(directory, load)
    wrong = {kind: names for kind, names in info.items() if names}
    if wrong:
        raise ConversionError(
            f"transformers loads the export {directory} with {wrong}: every weight must have its place"
        )
    return model.eval()


def load_exported_tokenizer(directory: Path) -> Any:
    """The tokenizer of a transformers directory. Raises ConversionError when transformers refuses it."""
    from transformers import AutoTokenizer

    return _loaded(directory, lambda: AutoTokenizer.from_pretrained(directory, local_files_only=True))


def _loaded(directory: Path, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except MemoryError:
        raise
    except Exception as error:  # safetensors and tokenizers raise plain Exception
        raise ConversionError(
            f"transformers cannot load the export {directory}: {' '.join(str(error).split())[:500]}"
        ) from error


def compare_native(report: ParityReport, native: Any, trained: Perplexities, test: Batches) -> None:
    """The perplexity of an export that computes in its own type, against that of the weights before rounding."""
    found = perplexities([lambda given: {"native": their_outputs(native, given).logits}], test())
    report.perplexity_trained, report.perplexity_native = trained["ours"], found["native"]
    if not within(report.perplexity_native, report.perplexity_trained, NATIVE_SHARE):
        report.problems.append("its perplexity differs when it computes in bfloat16")


def our_perplexity(pair: Pair, test: Batches) -> Perplexities:
    """That of our model."""
    return perplexities([lambda given: {"ours": pair.our_outputs(given).logits[..., : pair.spec.vocab_size]}], test())


def _compare_logits(report: ParityReport, pair: Pair, validation: ModelInput) -> None:
    """Logits of every place that means something, one sample at a time."""
    for number in range(len(validation.tokens)):
        given = one_sample(validation, number)
        own, other = pair.our_outputs(given), pair.their_outputs(given)
        logits = own.logits[..., : pair.spec.vocab_size]
        if logits.shape != other.logits.shape:
            raise ConversionError(
                f"the exported model gives logits of shape {tuple(other.logits.shape[1:])} where ours gives "
                f"{tuple(logits.shape[1:])}"
            )
        places = meaningful(given)
        report.tokens += int(places.sum())
        report.max_abs_logit_difference = _larger(report.max_abs_logit_difference, logits[places], other.logits[places])
        if own.answers is not None and other.answers is not None:
            report.max_abs_answer_difference = _larger(
                report.max_abs_answer_difference or 0.0, own.answers, other.answers
            )
    report.samples = len(validation.tokens)
    if not report.max_abs_logit_difference <= report.tolerance:
        report.problems.append("the exported model's logits differ")
    if report.max_abs_answer_difference is not None and not report.max_abs_answer_difference <= report.tolerance:
        report.problems.append("the logits of its binary head differ")


def _larger(largest: float, own: Tensor, other: Tensor) -> float:
    """The largest difference so far; what is no number stays."""
    difference = float((own - other).abs().max()) if own.numel() else 0.0
    return largest if difference <= largest or largest != largest else difference


def _compare_perplexities(report: ParityReport, pair: Pair, batches: Iterable[ModelInput]) -> None:
    def ours(given: ModelInput) -> dict[str, Tensor]:
        padded = pair.our_outputs(given).logits
        return {"ours": padded[..., : pair.spec.vocab_size], "padded": padded}

    found = perplexities([ours, lambda given: {"exported": pair.their_outputs(given).logits}], batches)
    report.perplexity_samples, report.perplexity_tokens = found.samples, found.labels
    report.perplexity_ours = found["ours"]
    report.perplexity_with_padding = found["padded"]
    report.perplexity_exported = found["exported"]
    if not same_to_four_digits(report.perplexity_exported, report.perplexity_ours):
        report.problems.append("its perplexity differs")


def _compare_weights(report: ParityReport, pair: Pair) -> None:
    """Every exported weight, as transformers holds it, against ours through the table: bitwise, padding aside."""
    held, parameters = pair.theirs.state_dict(), dict(pair.ours.named_parameters())
    for entry in pair.form.key_map(pair.spec).entries:
        parts = entry.layout.split(parameters[entry.ours].detach())
        names = [pair.form.name_when_loaded(name) for name in entry.theirs]
        if not all(torch.equal(part, held[name]) for part, name in zip(parts, names, strict=True)):
            report.differing_weights.append(entry.ours)
    if report.differing_weights:
        named = ", ".join(report.differing_weights[:3])
        more = f" and {len(report.differing_weights) - 3} more" if len(report.differing_weights) > 3 else ""
        report.problems.append(f"its weights differ in {named}{more}")


def _find_layer(report: ParityReport, pair: Pair, validation: ModelInput) -> None:
    def runs() -> Iterable[tuple[Callable[[], object], Callable[[], object]]]:
        for number in range(len(validation.tokens)):
            given = without_padding(one_sample(validation, number))
            yield partial(pair.our_outputs, given), partial(pair.their_outputs, given)

    theirs: nn.Module = pair.theirs
    report.layer_differences, report.first_differing_layer = layer_differences(
        pair.ours, theirs, pair.form.module_pairs(pair.spec), runs(), report.tolerance
    )
    if report.first_differing_layer is None and not report.max_abs_logit_difference <= report.tolerance:
        report.first_differing_layer = OUTPUT_LAYER
