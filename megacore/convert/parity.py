"""The gate: an export, loaded from disk by transformers, must equal the trained model.

Both models run in fp32 on the same samples. The gate compares logits on validation samples,
perplexity on the test split, greedy choices, every weight, and the tokenizer. An export is
published only if all of them agree. Otherwise the report names the first layer that differs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.config.rope import same_up_to
from megacore.config.spec import SpecialTokens
from megacore.convert.key_map import translated
from megacore.convert.outputs import (
    ModelPair,
    meaningful,
    one_sample,
    their_outputs,
    without_padding,
)
from megacore.convert.report import ParityReport, same_to_four_digits, within
from megacore.errors import ConversionError, listed, one_line
from megacore.models.inputs import ModelInput
from megacore.observe.logging import perplexity
from megacore.tokenizer import Tokenizer
from megacore.tokenizer.load import JsonTokenizer

Run = Callable[[], object]
"""Function that runs a model once."""
Score = Callable[[ModelInput], Iterable[tuple[str, Tensor]]]
"""Function from a micro batch to names of models and their logits [b, s, v] of its labels."""
_CONTINUATION_TOKENS = 32
"""Number of greedy tokens per sample."""
_PROMPT_TOKENS = 128
"""Maximum prompt length of the greedy continuation; the logits cover later positions."""
_GREEDY = {"do_sample": False, "num_beams": 1, "temperature": 1.0, "top_k": 50}
_ROLES = ("pad", "cls", "sep", "mask")
OUTPUT_LAYER = "output_layer"
"""Layer that is reported if all hidden states agree and the logits do not."""
_NATIVE_SHARE = 0.005
"""Largest relative change of perplexity when an export computes in its own type."""
Batches = Callable[[], Iterable[ModelInput]]
"""Function that returns the micro batches of a split, from the first one."""


@dataclass
class Perplexities:
    """Perplexities over the labels that the loss mask keeps, by the name of the model."""

    samples: int = 0
    labels: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    """Sums of the losses in nats, by the name of the model."""

    def __getitem__(self, name: str) -> float:
        return perplexity(self.sums[name] / max(self.labels, 1))


def check_models(
    report: ParityReport, pair: ModelPair, validation: ModelInput, test: Batches
) -> None:
    """Compare the exported model, loaded by transformers, with ours.

    If they differ, also find the first layer that differs.

    Args:
        report: report that receives the results. Problems that it already has remain.
        pair: both models, on one device.
        validation: samples whose logits and greedy choices are compared, one at a time.
        test: micro batches of `report.perplexity_split`.

    Raises:
        ConversionError: if the logits have another vocabulary, so that they cannot be compared.
    """
    pair.ours.eval()
    with torch.inference_mode():
        _compare_logits(report, pair, validation)
        _compare_perplexities(report, pair, test())
        if pair.spec.family == "bert":
            _compare_masked(report, pair, validation)
        else:
            _compare_continuations(report, pair, validation)
    _compare_weights(report, pair)
    if not report.passed:
        _find_layer(report, pair, validation)


def load_exported(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load the model of a transformers directory, in evaluation mode and without network access.

    Raises:
        ConversionError: if transformers cannot load it, or would initialize or drop a weight.
    """
    import transformers

    def load() -> Any:
        config: Any = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        kind = getattr(transformers, config.architectures[0])
        return kind.from_pretrained(
            directory, local_files_only=True, dtype=dtype, output_loading_info=True
        )

    model, info = _loaded(directory, load)
    # transformers names them in sets, whose order differs from process to process
    wrong = {kind: sorted(names) for kind, names in info.items() if names}
    if wrong:
        raise ConversionError(
            f"transformers loads the export {directory} with {wrong}: every weight must have its "
            "place"
        )
    return model.eval()


def load_exported_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a transformers directory.

    Raises:
        ConversionError: if transformers cannot load it.
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
            f"transformers cannot load the export {directory}: {one_line(error, 500)}"
        ) from error


def compare_native(report: ParityReport, native: Any, trained: Perplexities, test: Batches) -> None:
    """Compare the perplexity of an export in its own type with that of the unrounded weights."""
    results = perplexities(lambda batch: [("native", their_outputs(native, batch).logits)], test())
    report.perplexity_trained, report.perplexity_native = trained["ours"], results["native"]
    if not within(report.perplexity_native, report.perplexity_trained, _NATIVE_SHARE):
        report.problems.append("its perplexity differs when it computes in bfloat16")


def our_perplexity(pair: ModelPair, test: Batches) -> Perplexities:
    """Compute the perplexity of our model."""
    return perplexities(
        lambda batch: [("ours", pair.our_outputs(batch).logits[..., : pair.spec.vocab_size])],
        test(),
    )


def _compare_logits(report: ParityReport, pair: ModelPair, validation: ModelInput) -> None:
    """Compare the logits at every meaningful position, one sample at a time."""
    for number in range(len(validation.tokens)):
        sample = one_sample(validation, number)
        our, their = pair.our_outputs(sample), pair.their_outputs(sample)
        logits = our.logits[..., : pair.spec.vocab_size]
        if logits.shape != their.logits.shape:
            raise ConversionError(
                f"the exported model gives logits of shape {tuple(their.logits.shape[1:])} where "
                f"ours gives {tuple(logits.shape[1:])}"
            )
        positions = meaningful(sample)
        report.tokens += int(positions.sum())
        report.max_abs_logit_difference = _larger(
            report.max_abs_logit_difference, logits[positions], their.logits[positions]
        )
        if our.answers is not None and their.answers is not None:
            report.max_abs_answer_difference = _larger(
                report.max_abs_answer_difference or 0.0, our.answers, their.answers
            )
    report.samples = len(validation.tokens)
    if not report.max_abs_logit_difference <= report.tolerance:
        report.problems.append("the exported model's logits differ")
    if (
        report.max_abs_answer_difference is not None
        and not report.max_abs_answer_difference <= report.tolerance
    ):
        report.problems.append("the logits of its binary head differ")


def _larger(largest: float, our: Tensor, their: Tensor) -> float:
    """Return the larger of `largest` and the largest difference; NaN remains."""
    difference = float((our - their).abs().max()) if our.numel() else 0.0
    return largest if difference <= largest or largest != largest else difference


def _compare_perplexities(
    report: ParityReport, pair: ModelPair, batches: Iterable[ModelInput]
) -> None:
    def score(batch: ModelInput) -> Iterator[tuple[str, Tensor]]:
        padded = pair.our_outputs(batch).logits
        yield "ours", padded[..., : pair.spec.vocab_size]
        yield "padded", padded
        yield "exported", pair.their_outputs(batch).logits

    results = perplexities(score, batches)
    report.perplexity_samples, report.perplexity_tokens = results.samples, results.labels
    report.perplexity_ours = results["ours"]
    report.perplexity_with_padding = results["padded"]
    report.perplexity_exported = results["exported"]
    if not same_to_four_digits(report.perplexity_exported, report.perplexity_ours):
        report.problems.append("its perplexity differs")


def _compare_weights(report: ParityReport, pair: ModelPair) -> None:
    """Compare every weight of the loaded export bitwise with ours, except for padding."""
    exported, parameters = pair.theirs.state_dict(), dict(pair.ours.named_parameters())
    for entry in pair.form.key_map(pair.spec).entries:
        parts = translated(entry, parameters)
        names = map(pair.form.name_when_loaded, entry.their_shapes())
        if not all(
            torch.equal(part, exported[name]) for part, name in zip(parts, names, strict=True)
        ):
            report.differing_weights.append(entry.ours)
    if report.differing_weights:
        report.problems.append(f"its weights differ in {listed(report.differing_weights, 3)}")


def _find_layer(report: ParityReport, pair: ModelPair, validation: ModelInput) -> None:
    def runs() -> Iterable[tuple[Callable[[], object], Callable[[], object]]]:
        for number in range(len(validation.tokens)):
            sample = without_padding(one_sample(validation, number))
            yield partial(pair.our_outputs, sample), partial(pair.their_outputs, sample)

    theirs: nn.Module = pair.theirs
    report.layer_differences, report.first_differing_layer = layer_differences(
        pair.ours, theirs, pair.form.module_pairs(pair.spec), runs(), report.tolerance
    )
    if (
        report.first_differing_layer is None
        and not report.max_abs_logit_difference <= report.tolerance
    ):
        report.first_differing_layer = OUTPUT_LAYER


def perplexities(score: Score, batches: Iterable[ModelInput]) -> Perplexities:
    """Compute the perplexities of models; `batches` must be on their device."""
    result = Perplexities()
    with torch.inference_mode():
        for batch in batches:
            counts = (
                torch.ones_like(batch.labels, dtype=torch.bool)
                if batch.loss_mask is None
                else batch.loss_mask
            )
            labels = batch.labels[counts]
            for name, logits in score(batch):
                loss = F.cross_entropy(logits[counts], labels, reduction="sum")
                result.sums[name] = result.sums.get(name, 0.0) + float(loss)
            result.samples += len(batch.tokens)
            result.labels += labels.numel()
    return result


def _compare_continuations(report: ParityReport, pair: ModelPair, validation: ModelInput) -> None:
    """Compare the greedy continuations of transformers' `generate` with our model's choices.

    `generate` uses its cache. Our model needs one forward pass over prompt and continuation,
    because the prefixes agree up to the first difference (`_of_causal` has an exception). The
    comparison of a sample stops where the two best logits are closer than twice the tolerance.
    """
    run = _of_decoder if pair.spec.family == "t5" else _of_causal
    special = pair.spec.special_tokens
    end = {special.eod, special.sep} if pair.spec.family == "t5" else {special.eod}
    ends = end.union(special.ends)
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


def _compare_masked(report: ParityReport, pair: ModelPair, validation: ModelInput) -> None:
    """Compare the most probable token at each masked position.

    Positions whose two best logits are closer than twice the tolerance are left out.
    """
    assert validation.loss_mask is not None
    differing = 0
    for number in range(len(validation.tokens)):
        sample = one_sample(validation, number)
        assert sample.loss_mask is not None
        our = pair.our_outputs(sample).logits[sample.loss_mask][:, : pair.spec.vocab_size]
        their = pair.their_outputs(sample).logits[sample.loss_mask]
        best = our.topk(2).values
        decided = best[:, 0] - best[:, 1] >= 2 * report.tolerance
        report.greedy_undecided += int((~decided).sum())
        same = our.argmax(-1) == their.argmax(-1)
        report.greedy_tokens += int((decided & same).sum())
        differing += int((decided & ~same).sum())
    if differing:
        report.problems.append(
            f"its choice differs at {differing} of {int(validation.loss_mask.sum())} masked places"
        )


def _of_causal(pair: ModelPair, validation: ModelInput) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each sample our logits [new, v] and the exported model's continuation [new].

    Each logit vector is computed after a prefix of that continuation. Where rotary positions depend
    on the length of the text, every step computes the whole text, in both models.
    """
    tokens = validation.tokens
    length = tokens.shape[1] + 1
    new = min(_CONTINUATION_TOKENS, length // 2)
    prompt = tokens[:, : min(length - new, _PROMPT_TOKENS)]
    start = prompt.shape[1]
    same = same_up_to(pair.spec.model.rope_scaling)
    stepwise = same is not None and start + new > same
    if stepwise:
        # transformers keeps the base of the longest text until a short one
        pair.theirs(prompt[:, :1])
    continued = pair.theirs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new,
        use_cache=not stepwise,
        **_GREEDY,
    )
    for row in continued:
        if stepwise:
            ends = range(start, len(row))
            batches = [ModelInput(row[None, :end], row[None, 1 : end + 1]) for end in ends]
            logits = torch.cat([pair.our_outputs(batch).logits[0, -1:] for batch in batches])
        else:
            batch = ModelInput(row[None, :-1], row[None, 1:])
            logits = pair.our_outputs(batch).logits[0, start - 1 :]
        yield logits[:, : pair.spec.vocab_size], row[start:]


def _of_decoder(pair: ModelPair, validation: ModelInput) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same as `_of_causal` for T5, whose decoder starts without a prompt."""
    assert validation.present is not None
    new = min(_CONTINUATION_TOKENS, validation.labels.shape[1])
    continued = pair.theirs.generate(
        validation.tokens, attention_mask=validation.present.long(), max_new_tokens=new, **_GREEDY
    )
    for number, row in enumerate(continued):
        sample = one_sample(validation, number)
        batch = ModelInput(
            sample.tokens, row[None, 1:], present=sample.present, decoder_tokens=row[None, :-1]
        )
        yield pair.our_outputs(batch).logits[0, :, : pair.spec.vocab_size], row[1:]


def compare_tokenizers(
    report: ParityReport,
    ours: Tokenizer,
    theirs: Any,
    special: SpecialTokens,
    samples: Sequence[Sequence[int]],
) -> None:
    """Compare end of document, vocabulary size, special tokens, encoding and decoding.

    Args:
        report: report that receives the results.
        ours: our tokenizer.
        theirs: exported tokenizer as loaded by transformers.
        special: special tokens of the model.
        samples: ids of validation texts.
    """
    if theirs.eos_token_id != ours.eod_id:
        report.problems.append(
            f"its tokenizer ends documents with id {theirs.eos_token_id}, ours with {ours.eod_id}"
        )
    for role in _ROLES:
        expected_id, exported_id = getattr(special, role), getattr(theirs, f"{role}_token_id")
        if exported_id is not None and expected_id is not None and exported_id != expected_id:
            report.problems.append(
                f"its tokenizer has id {exported_id} for {role}, ours {expected_id}"
            )
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
        # SentencePiece's ids start and end with complete characters if they are those of a text.
        ids = list(sample) if isinstance(ours, JsonTokenizer) else expected.tolist()
        # A SentencePiece model without a tokenizer.json is read by the slow class.
        our_decode = ours.decode if theirs.is_fast else ours.decode_as_exported
        decoded += theirs.decode(ids) == our_decode(ids)
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
    """Return `sample` without special tokens.

    A SentencePiece model decodes control symbols to no text; transformers decodes some to text.
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
    """Compare the outputs of each pair of modules on each sample.

    Args:
        ours: our model.
        theirs: transformers model.
        pairs: names of corresponding modules (ours, theirs), in execution order.
        runs: for each sample, a function that runs our model on it, and one that runs theirs.
        tolerance: tolerance of the logits.

    Returns:
        The largest absolute difference by our module's name, in the order of `pairs`, and the first
        name for which `exceeds` is true.
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
            if exceeds(difference, reference, tolerance):
                differing.add(our_name)
    return differences, next((name for name, _ in pairs if name in differing), None)


def exceeds(difference: float, reference: Tensor, tolerance: float) -> bool:
    """Return True if a module's output differs too much from `reference`; NaN does.

    The bound is a tenth of the logits' `tolerance`, because a logit is a sum over hidden values and
    can exceed the tolerance when none of them does. It is relative to the largest value of the
    output if that is above 1.
    """
    return not difference <= tolerance / 10 * max(1.0, float(reference.abs().max()))
