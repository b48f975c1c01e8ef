"""What DeepSpeed's checkpoints call the parameters of models of ours and of Megatron-DeepSpeed, and what we do."""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Literal

from megacore.convert.megatron.table import current_name
from megacore.errors import ConversionError

Style = Literal["ours", "megatron"]
_NAMED_AT_ONCE = 4
_WRAPPERS = re.compile(r"^(?:(?:module|model|chunk|\d+|tied_modules\.\w+)\.)+")
"""What a model of ours is registered under: by whatever calls it with a batch, or as a layer of a pipeline."""
_TIED = re.compile(r"^(?:module\.)?tied_modules\.(\w+)\.weight$")
"""A parameter that stages of a pipeline of ours share, under its own name."""
_TIED_LAYER = re.compile(r"^\d+\.weight$")
"""The same in the files of layers, without its name; the stage's own layer has it too."""
_OUR_LAYER = re.compile(r"(?:^|\.)(?:encoder|decoder)\.layers\.\d+\.")
_PIPELINE_LAYER = re.compile(
    r"^(?:module\.)?(\d+)\.((?:(?:input|post_attention)_(?:layer)?norm|(?:self_)?attention|mlp)\..+)$"
)
_PIPELINE_REST: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(rf"^(?:module\.)?(?:\d+|tied_modules\.\w+)\.{theirs}$"), ours)
    for theirs, ours in (
        (r"(word|position|tokentype)_embeddings\.weight", r"language_model.embedding.\1_embeddings.weight"),
        (r"(?:final_layernorm\.)?(weight|bias)", r"language_model.encoder.final_layernorm.\1"),
        (r"lm_head\.weight", "language_model.output_layer.weight"),
    )
)
"""Modules of Megatron-DeepSpeed's pipeline beside its transformer layers. The final norm has no name but its number."""


def style_of(names: Collection[str], where: Path) -> Style:
    """Whose names these are. Raises ConversionError for those of neither."""
    if any("language_model." in name for name in names) or any(_PIPELINE_LAYER.match(name) for name in names):
        return "megatron"
    if any(_OUR_LAYER.search(name) for name in names):
        return "ours"
    shown = ", ".join(list(names)[:_NAMED_AT_ONCE]) or "none"
    raise ConversionError(
        f"{where} has parameters {shown}, which are neither a model of ours nor Megatron-DeepSpeed's: only those are "
        "read from DeepSpeed's checkpoints"
    )


def our_names(names: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """Of each name of a model of ours the global name.

    Args:
        names: in the files.
        known: the model's global names, which tell those of tied modules.
    """
    tied = {name.replace(".", "_"): name for name in known}
    found = {}
    for name in names:
        match = _TIED.match(name)
        if match and match[1] in tied:
            found[name] = tied[match[1]]
        elif not _TIED_LAYER.match(name):
            found[name] = _WRAPPERS.sub("", name)
    return found


def megatron_names(names: Collection[str], where: Path) -> dict[str, str]:
    """Of each name of Megatron-DeepSpeed the dotted name of `megatron_table`, for those that are of weights.

    Args:
        names: of all pipeline stages, as layers are counted.
        where: the checkpoint, for messages.

    Raises ConversionError for a module of a pipeline that is not known.
    """
    if any("language_model." in name for name in names):
        found = {name: current_name(_WRAPPERS.sub("", name)) for name in names}
        return {name: current for name, current in found.items() if current is not None}
    layers = sorted({int(match[1]) for name in names if (match := _PIPELINE_LAYER.match(name))})
    numbers = {layer: number for number, layer in enumerate(layers)}
    return {
        name: current
        for name in names
        if (renamed := _of_pipeline(name, numbers, where)) and (current := current_name(renamed)) is not None
    }


def _of_pipeline(name: str, numbers: Mapping[int, int], where: Path) -> str:
    layer = _PIPELINE_LAYER.match(name)
    if layer:
        return f"language_model.encoder.layers.{numbers[int(layer[1])]}.{layer[2]}"
    for pattern, ours in _PIPELINE_REST:
        if match := pattern.match(name):
            return match.expand(ours)
    raise ConversionError(f"{where} has a parameter {name}, for which Megatron-DeepSpeed's GPT has no place")
