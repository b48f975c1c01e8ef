"""The gate: an export, loaded from disk by transformers, must be the model that was trained.

Both models run in fp32 on the same samples: logits on validation samples, perplexity on the test
split, what they choose greedily, every weight, and the tokenizer. Nothing is published unless all
of them agree; where they do not, the first layer that differs is named.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.config.spec import SpecialTokens
from megacore.convert.outputs import (
    ModelPair,
    meaningful,
    one_sample,
    their_outputs,
    without_padding,
)
from megacore.convert.report import ParityReport, same_to_four_digits, within
from megacore.errors import ConversionError
from megacore.models.inputs import ModelInput
from megacore.tokenizer import Tokenizer
from megacore.tokenizer.load import JsonTokenizer

Run = Callable[[], object]
"""Runs a model once."""
Score = Callable[[ModelInput], Mapping[str, Tensor]]
"""Logits [b, s, v] of a micro batch's labels, by the name under which they count: one forward pass
can count twice."""
CONTINUATION_TOKENS = 32
"""Greedy tokens per sample."""
PROMPT_TOKENS = 128
"""Longest prompt of the greedy continuation; later positions are covered by the logits."""
_GREEDY = {"do_sample": False, "num_beams": 1, "temperature": 1.0, "top_k": 50}
_ROLES = ("pad", "cls", "sep", "mask")
OUTPUT_LAYER = "output_layer"
"""What differs when all hidden states agree and the logits do not."""
NATIVE_SHARE = 0.005
"""Largest change of perplexity when an export computes in its own type."""
Batches = Callable[[], Iterable[ModelInput]]
"""The micro batches of a split, from the beginning each time."""


@dataclass
class Perplexities:
    """exp of the mean loss of all labels that count, by the name of the model."""

    samples: int = 0
    labels: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    """Of the losses, in nats."""

    def __getitem__(self, name: str) -> float:
        return math.exp(min(self.sums[name] / max(self.labels, 1), 700.0))


def check_models(
    report: ParityReport, pair: ModelPair, validation: ModelInput, test: Batches
) -> None:
    """Compare the exported model, loaded by transformers, with ours.

    Where they differ, the layer where they part is looked for.

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
        return kind.from_pretrained(
            directory, local_files_only=True, dtype=dtype, output_loading_info=True
        )

    model, info = _loaded(directory, load)
    wrong = {kind: names for kind, names in info.items() if names}
    if wrong:
        raise ConversionError(
            f"transformers loads the export {directory} with {wrong}: every weight must have its "
            "place"
        )
    return model.eval()


def load_exported_tokenizer(directory: Path) -> Any:
    """The tokenizer of a transformers directory.

    Raises ConversionError when transformers refuses it.
    """
    from transformers import AutoTokenizer

    return _loaded(
        directory, lambda: AutoTokenizer.from_pretrained(directory, local_files_only=True)
    )


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
    """The perplexity of an export in its own type, against that of the weights before rounding."""
    found = perplexities([lambda given: {"native": their_outputs(native, given).logits}], test())
    report.perplexity_trained, report.perplexity_native = trained["ours"], found["native"]
    if not within(report.perplexity_native, report.perplexity_trained, NATIVE_SHARE):
        report.problems.append("its perplexity differs when it computes in bfloat16")


def our_perplexity(pair: ModelPair, test: Batches) -> Perplexities:
    """That of our model."""
    return perplexities(
        [lambda given: {"ours": pair.our_outputs(given).logits[..., : pair.spec.vocab_size]}],
        test(),
    )


def _compare_logits(report: ParityReport, pair: ModelPair, validation: ModelInput) -> None:
    """Logits of every place that means something, one sample at a time."""
    for number in range(len(validation.tokens)):
        given = one_sample(validation, number)
        own, other = pair.our_outputs(given), pair.their_outputs(given)
        logits = own.logits[..., : pair.spec.vocab_size]
        if logits.shape != other.logits.shape:
            raise ConversionError(
                f"the exported model gives logits of shape {tuple(other.logits.shape[1:])} where "
                f"ours gives {tuple(logits.shape[1:])}"
            )
        places = meaningful(given)
        report.tokens += int(places.sum())
        report.max_abs_logit_difference = _larger(
            report.max_abs_logit_difference, logits[places], other.logits[places]
        )
        if own.answers is not None and other.answers is not None:
            report.max_abs_answer_difference = _larger(
                report.max_abs_answer_difference or 0.0, own.answers, other.answers
            )
    report.samples = len(validation.tokens)
    if not report.max_abs_logit_difference <= report.tolerance:
        report.problems.append("the exported model's logits differ")
    if (
        report.max_abs_answer_difference is not None
        and not report.max_abs_answer_difference <= report.tolerance
    ):
        report.problems.append("the logits of its binary head differ")


def _larger(largest: float, own: Tensor, other: Tensor) -> float:
    """The largest difference so far; what is no number stays."""
    difference = float((own - other).abs().max()) if own.numel() else 0.0
    return largest if difference <= largest or largest != largest else difference


def _compare_perplexities(
    report: ParityReport, pair: ModelPair, batches: Iterable[ModelInput]
) -> None:
    def ours(given: ModelInput) -> dict[str, Tensor]:
        padded = pair.our_outputs(given).logits
        return {"ours": padded[..., : pair.spec.vocab_size], "padded": padded}

    found = perplexities(
        [ours, lambda given: {"exported": pair.their_outputs(given).logits}], batches
    )
    report.perplexity_samples, report.perplexity_tokens = found.samples, found.labels
    report.perplexity_ours = found["ours"]
    report.perplexity_with_padding = found["padded"]
    report.perplexity_exported = found["exported"]
    if not same_to_four_digits(report.perplexity_exported, report.perplexity_ours):
        report.problems.append("its perplexity differs")


def _compare_weights(report: ParityReport, pair: ModelPair) -> None:
    """Every exported weight against ours through the table: bitwise, padding aside.

    The exported ones are as transformers holds them.
    """
    held, parameters = pair.theirs.state_dict(), dict(pair.ours.named_parameters())
    for entry in pair.form.key_map(pair.spec).entries:
        parts = entry.layout.split(parameters[entry.ours].detach())
        names = [pair.form.name_when_loaded(name) for name in entry.theirs]
        if not all(torch.equal(part, held[name]) for part, name in zip(parts, names, strict=True)):
            report.differing_weights.append(entry.ours)
    if report.differing_weights:
        named = ", ".join(report.differing_weights[:3])
        more = (
            f" and {len(report.differing_weights) - 3} more"
            if len(report.differing_weights) > 3
            else ""
        )
        report.problems.append(f"its weights differ in {named}{more}")


def _find_layer(report: ParityReport, pair: ModelPair, validation: ModelInput) -> None:
    def runs() -> Iterable[tuple[Callable[[], object], Callable[[], object]]]:
        for number in range(len(validation.tokens)):
            given = without_padding(one_sample(validation, number))
            yield partial(pair.our_outputs, given), partial(pair.their_outputs, given)

    theirs: nn.Module = pair.theirs
    report.layer_differences, report.first_differing_layer = layer_differences(
        pair.ours, theirs, pair.form.module_pairs(pair.spec), runs(), report.tolerance
    )
    if (
        report.first_differing_layer is None
        and not report.max_abs_logit_difference <= report.tolerance
    ):
        report.first_differing_layer = OUTPUT_LAYER


def perplexities(models: Sequence[Score], batches: Iterable[ModelInput]) -> Perplexities:
    """Score all batches, which are on the models' device, by all models."""
    found = Perplexities()
    with torch.inference_mode():
        for given in batches:
            counts = (
                torch.ones_like(given.labels, dtype=torch.bool)
                if given.loss_mask is None
                else given.loss_mask
            )
            labels = given.labels[counts]
            for model in models:
                for name, logits in model(given).items():
                    loss = F.cross_entropy(logits[counts], labels, reduction="sum")
                    found.sums[name] = found.sums.get(name, 0.0) + float(loss)
            found.samples += len(given.tokens)
            found.labels += labels.numel()
    return found


def compare_continuations(report: ParityReport, pair: ModelPair, validation: ModelInput) -> None:
    """Greedy continuations by `generate` of transformers against our choices.

    It runs with its cache; ours follow the same prefix.

    One forward pass of ours over prompt and continuation is enough: up to the first difference the
    prefixes agree. A sample's comparison ends where the two best logits are closer than twice the
    tolerance.
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
        report.problems.append(
            f"its greedy continuation differs on {differing} of {samples} samples"
        )


def compare_masked(report: ParityReport, pair: ModelPair, validation: ModelInput) -> None:
    """The most likely token of each masked place.

    Places whose two best logits are closer than twice the tolerance are left out.
    """
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
        report.problems.append(
            f"its choice differs at {differing} of {int(validation.loss_mask.sum())} masked places"
        )


def _of_causal(pair: ModelPair, validation: ModelInput) -> Iterator[tuple[Tensor, Tensor]]:
    """For each sample our logits [new, v] beside the exported model's continuation [new].

    The logits follow the prefixes of that continuation.
    """
    tokens = validation.tokens
    length = tokens.shape[1] + 1
    new = min(CONTINUATION_TOKENS, length // 2)
    prompt = tokens[:, : min(length - new, PROMPT_TOKENS)]
    continued = pair.theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, **_GREEDY
    )
    for row in continued:
        given = ModelInput(row[None, :-1], row[None, 1:])
        logits = pair.our_outputs(given).logits[0, prompt.shape[1] - 1 :, : pair.spec.vocab_size]
        yield logits, row[prompt.shape[1] :]


def _of_decoder(pair: ModelPair, validation: ModelInput) -> Iterator[tuple[Tensor, Tensor]]:
    """The same of a decoder, which begins anew."""
    assert validation.present is not None
    new = min(CONTINUATION_TOKENS, validation.labels.shape[1])
    continued = pair.theirs.generate(
        validation.tokens, attention_mask=validation.present.long(), max_new_tokens=new, **_GREEDY
    )
    for number, row in enumerate(continued):
        sample = one_sample(validation, number)
        given = ModelInput(
            sample.tokens, row[None, 1:], present=sample.present, decoder_tokens=row[None, :-1]
        )
        yield pair.our_outputs(given).logits[0, :, : pair.spec.vocab_size], row[1:]


def compare_tokenizers(
    report: ParityReport,
    ours: Tokenizer,
    theirs: Any,
    special: SpecialTokens,
    samples: Sequence[Sequence[int]],
) -> None:
    """Compare end of document, size, roles, and both directions of encoding.

    Texts are those of the validation split of which `samples` are the ids.
    """
    if theirs.eos_token_id != ours.eod_id:
        report.problems.append(
            f"its tokenizer ends documents with id {theirs.eos_token_id}, ours with {ours.eod_id}"
        )
    for role in _ROLES:
        wanted, given = getattr(special, role), getattr(theirs, f"{role}_token_id")
        if given is not None and wanted is not None and given != wanted:
            report.problems.append(f"its tokenizer has id {given} for {role}, ours {wanted}")
    vocab_size = max(theirs.get_vocab().values()) + 1
    if vocab_size != ours.vocab_size:
        report.problems.append(
            f"its tokenizer has a vocabulary of {vocab_size}, ours of {ours.vocab_size}"
        )
    if not isinstance(ours, JsonTokenizer):
        samples = [_words(ours, special, sample) for sample in samples]
    texts = [ours.decode(sample) for sample in samples]
    encoded = decoded = 0
    for text, sample, expected in zip(texts, samples, ours.encode_batch(texts), strict=True):
        same = (
            theirs(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
            == expected.tolist()
        )
        encoded += same
        report.tokenizer_tokens += len(expected) if same else 0
        decoded += theirs.decode(list(sample)) == text
    if encoded < len(texts):
        report.problems.append(
            f"its tokenizer encodes {len(texts) - encoded} of {len(texts)} validation texts to "
            "other ids"
        )
    if decoded < len(texts):
        report.problems.append(
            f"its tokenizer decodes {len(texts) - decoded} of {len(texts)} samples to another text"
        )


def _words(ours: Tokenizer, special: SpecialTokens, sample: Sequence[int]) -> list[int]:
    """What is no special token.

    A SentencePiece model has no text for its control symbols, transformers has one.
    """
    roles = {
        ours.eod_id,
        *special.sentinels,
        *(getattr(special, role) for role in (*_ROLES, "unk", "eod")),
    }
    return [token for token in sample if token not in roles]


@contextmanager
def recorded_outputs(model: nn.Module, names: list[str]) -> Iterator[dict[str, Tensor]]:
    """Collect the output of each named module in the forward pass that runs inside the block."""
    outputs: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(name).register_forward_hook(_keep(outputs, name)) for name in names
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _keep(outputs: dict[str, Tensor], name: str) -> Callable[[nn.Module, Any, Any], None]:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        outputs[name] = hidden.detach().float()

    return hook


def layer_differences(
    ours: nn.Module,
    theirs: nn.Module,
    pairs: list[tuple[str, str]],
    runs: Iterable[tuple[Run, Run]],
    tolerance: float,
) -> tuple[dict[str, float], str | None]:
    """Compare the outputs of each pair of modules, in one run of both models after the other.

    Args:
        ours: our model.
        theirs: the model of transformers.
        pairs: modules of ours and of theirs, in the order in which they run.
        runs: for each sample, what runs our model on it and what runs theirs.
        tolerance: of the logits.

    Returns:
        The largest absolute difference by our module's name, in the order of `pairs`, and the first
        name whose difference exceeds a tenth of `tolerance`, relative to its largest value where
        that is above 1. A logit is a sum over hidden values, so it can exceed the tolerance when
        none of them does.
    """
    differences = {name: 0.0 for name, _ in pairs}
    differing: set[str] = set()
    for run_ours, run_theirs in runs:
        with (
            torch.inference_mode(),
            recorded_outputs(ours, [pair[0] for pair in pairs]) as our_outputs,
            recorded_outputs(theirs, [pair[1] for pair in pairs]) as their_outputs,
        ):
            run_ours()
            run_theirs()
        for our_name, their_name in pairs:
            reference = our_outputs[our_name]
            difference = float((reference - their_outputs[their_name]).abs().max())
            if not difference <= differences[our_name]:
                differences[our_name] = difference
            if not difference <= tolerance / 10 * max(1.0, float(reference.abs().max())):
                differing.add(our_name)
    return differences, next((name for name, _ in pairs if name in differing), None)
