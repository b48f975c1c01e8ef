"""Outputs of a model and its layers on a probe, and the first difference of two models."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megacore.compare.report import Finding
from megacore.compare.side import Reading, fitted
from megacore.config.spec import ModelSpec
from megacore.convert.hf.forms import hf_form_of
from megacore.convert.key_map import Shape
from megacore.convert.outputs import our_outputs, their_outputs
from megacore.convert.parity import OUTPUT_LAYER, exceeds, load_exported, recorded_outputs
from megacore.convert.source import load_weights, parameter_shapes
from megacore.errors import ConfigError, ConversionError
from megacore.models.inputs import ModelInput

LENGTH = 64
"""Default number of tokens of a sample of the probe."""
SAMPLES = 2
SEED = 1234
TOLERANCE = 1e-4
"""Default largest difference of equal logits, that of the gate."""
_DECODER_LENGTH = 16
_RECORDED = re.compile(
    r"^(embedding|lm_head(\.\w+)?|pooler|binary_head"
    r"|(encoder|decoder)\.(final_layernorm|layers\.\d+(\.\w+){0,2}))$"
)
"""Modules whose outputs are compared."""


@dataclass(frozen=True)
class Outputs:
    """Outputs of one model on the probe, in fp32."""

    logits: Tensor
    """[samples, s, v], without padding of the vocabulary."""
    answers: Tensor | None
    """[samples, 2] logits of BERT's binary head."""
    layers: Mapping[str, Tensor]
    """Output of each recorded module by name, in the order of execution."""


@dataclass(frozen=True)
class Distance:
    """Difference of the outputs of two models."""

    logits: float
    """Largest absolute difference of the logits."""
    scale: float
    """Largest absolute logit of A."""
    same_choice: float
    """Share of positions with the same most probable token."""
    first_layer: str | None
    """First module with another output; None if all agree."""
    layers: Mapping[str, float]
    """Largest absolute difference of each module's output."""

    def within(self, tolerance: float) -> bool:
        """Return True if the logits agree; NaN never does."""
        return self.logits <= tolerance * max(1.0, self.scale / 100)


def make_probe(
    spec: ModelSpec,
    vocab_size: int,
    *,
    length: int = LENGTH,
    samples: int = SAMPLES,
    seed: int = SEED,
    tokens: Sequence[Sequence[int]] | None = None,
) -> ModelInput:
    """Return the inputs of the probe: random ids, or `tokens`.

    Args:
        spec: specification of a model that reads the probe.
        vocab_size: number of ids that both models know.
        length: tokens of a random sample, cut to the model's positions.
        samples: number of random samples.
        seed: seed of the random ids.
        tokens: ids of each sample; they are cut to the shortest.

    Raises:
        ConfigError: if an id is not in the vocabulary, there is none, or there are more than the
            model's positions.
    """
    positions = spec.max_position_embeddings
    generator = torch.Generator().manual_seed(seed)
    if tokens is None:
        shape = (samples, min(length, positions))
        ids = torch.randint(0, vocab_size, shape, generator=generator)
    else:
        shortest = min((len(sample) for sample in tokens), default=0)
        wrong = next(
            (each for sample in tokens for each in sample if not 0 <= each < vocab_size), None
        )
        if shortest == 0 or wrong is not None:
            problem = "has no token" if wrong is None else f"has the id {wrong}"
            raise ConfigError(
                f"the probe {problem}, and the models have a vocabulary of {vocab_size:,} entries: "
                "give ids below that"
            )
        if shortest > positions:
            raise ConfigError(
                f"the probe has {shortest:,} tokens, and the models have {positions:,} positions: "
                "shorten it"
            )
        ids = torch.tensor([list(sample[:shortest]) for sample in tokens])
    rows, columns = ids.shape
    present = torch.ones_like(ids, dtype=torch.bool)
    if spec.family == "gpt":
        return ModelInput(ids, ids)
    if spec.family != "t5":
        segments = (torch.arange(columns) >= columns // 2).long().expand(rows, -1)
        return ModelInput(ids, ids, present=present, tokentypes=segments)
    decoder = torch.randint(0, vocab_size, (rows, _DECODER_LENGTH), generator=generator)
    return ModelInput(ids, decoder, present=present, decoder_tokens=decoder)


def merged_tensors(
    spec: ModelSpec,
    reading: Reading,
    other: Reading,
    taken: frozenset[str],
    base: Mapping[str, Shape],
) -> dict[str, Tensor]:
    """Return the weights of a model: those of `reading`, and of `other` for the names in `taken`.

    A tensor that `reading` lacks, or has in another shape, is taken from `other` if `base`, the
    shapes without correction, differs. Otherwise the lack is what must be seen.
    """
    everything = "*" in taken
    result = {}
    for name, shape in parameter_shapes(spec).items():
        sound = name in reading.shapes and name not in reading.unsound
        corrected = not sound and base.get(name) != shape
        if name in other.shapes and (everything or name in taken or corrected):
            source = other.rows(name)
        elif name in reading.shapes:
            source = reading.rows(name)
        else:
            source = torch.zeros(shape)
        result[name] = fitted(source, shape)
    return result


def run_ours(spec: ModelSpec, tensors: Mapping[str, Tensor], probe: ModelInput) -> Outputs:
    """Compute the outputs of our model with these weights."""
    model = load_weights(spec, tensors)
    names = [name for name, _ in model.named_modules() if _RECORDED.match(name)]
    with torch.inference_mode(), recorded_outputs(model, names) as layers:
        result = our_outputs(spec.family, model, probe)
    return Outputs(result.logits[..., : spec.vocab_size], result.answers, dict(layers))


def run_theirs(directory: Path, spec: ModelSpec, probe: ModelInput) -> Outputs:
    """Compute the outputs of a transformers directory with transformers, under our module names.

    Raises:
        ConversionError: if transformers cannot load it, or would initialize or drop a weight.
    """
    model: Any = load_exported(directory)
    try:
        pairs = hf_form_of(spec)[1].module_pairs(spec)
        for _, theirs in pairs:
            model.get_submodule(theirs)
    except (ConversionError, AttributeError):
        pairs = []
    module: nn.Module = model
    with torch.inference_mode(), recorded_outputs(module, [pair[1] for pair in pairs]) as layers:
        result = their_outputs(model, probe)
    renamed = {ours: layers[theirs] for ours, theirs in pairs if theirs in layers}
    return Outputs(result.logits, result.answers, renamed)


def distance(a: Outputs, b: Outputs, tolerance: float) -> Distance:
    """Compare the outputs of two models on the ids that both know."""
    common = min(a.logits.shape[-1], b.logits.shape[-1])
    ours, theirs = a.logits[..., :common], b.logits[..., :common]
    layers: dict[str, float] = {}
    first = None
    for name, reference in a.layers.items():
        other = b.layers.get(name)
        if other is None:
            continue
        layers[name] = _gap(reference, other)
        if first is None and exceeds(layers[name], reference, tolerance):
            first = name
    gap = _gap(ours, theirs)
    if a.answers is not None and b.answers is not None:
        answers = _gap(a.answers, b.answers)
        gap = answers if not answers <= gap else gap
    same_choice = float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    distance = Distance(gap, float(ours.abs().max()), same_choice, first, layers)
    if first is None and not distance.within(tolerance):
        return replace(distance, first_layer=OUTPUT_LAYER)
    return distance


def _gap(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().max()) if first.shape == second.shape else float("inf")


def first_layer_text(found: Distance) -> str:
    """Describe the first module with another output, and what is equal before it."""
    if found.first_layer is None:
        return "all layers have the same outputs"
    names = list(found.layers)
    if found.first_layer == OUTPUT_LAYER:
        return "all layers agree; the output layer is the first with another output"
    before = names[: names.index(found.first_layer)]
    equal = f"; {before[-1]} before it agrees" if before else ""
    return f"the first module with another output is {found.first_layer}{equal}"


def logits_finding(cause: str, found: Distance, text: str) -> Finding:
    """Return the finding of a difference of the logits."""
    return Finding(
        "logits",
        cause,
        text,
        (found.first_layer,) if found.first_layer else (),
        numbers={"max_abs": found.logits, "same_choice": found.same_choice},
    )
