"""One side of a comparison of models: its specification, and its weights by our global names.

A damaged conversion must be readable to be compared. So the weights of a transformers directory are
read leniently: a missing tensor is zero, a transposed one is turned, rows of another vocabulary are
cut off or zero. Each of these is a finding.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.checkpoint.format import reading
from megacore.compare.report import Finding
from megacore.config.spec import ModelSpec
from megacore.convert.hf.config import CONFIG_NAME, HfConfig
from megacore.convert.hf.directory import (
    Reader,
    tensor_readers,
    with_heads_of_files,
    with_tokens_of_generation,
)
from megacore.convert.hf.forms import FORMS, HfForm, model_config, read_spec
from megacore.convert.imported import OPENERS
from megacore.convert.key_map import KeyMap, LazyTensors, Shape
from megacore.convert.model_source import find_model, transformers_directory
from megacore.convert.source import CheckpointTensors, parameter_shapes
from megacore.errors import CheckpointError, ConversionError, MegacoreError, listed
from megacore.paths import is_dir, is_file

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "lm_head.bias")
"""Tensors with a row per entry of the vocabulary, padded."""
REPAIRED = frozenset({"transposed", "vocabulary_padding"})
"""Causes of the findings that the reading of the weights corrects."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.txt", "vocab.json")
_CAUSE_OF_KEY = {
    "scale": "attention_scale",
    "attention_multiplier": "attention_scale",
    "query_pre_attn_scalar": "attention_scale",
    "attn_scale": "attention_scale",
    "rope_scaling": "rope_scaling",
    "rope_parameters": "rope_scaling",
    "rope_theta": "rope_base",
    "rotary_emb_base": "rope_base",
    "partial_rotary_factor": "rope_share",
    "window": "sliding_window",
    "layer_types": "sliding_window",
    "softcap": "soft_cap",
    "act": "activation",
    "feed_forward_proj": "activation",
    "position_embedding_type": "position_embedding",
    "tie_word_embeddings": "tied_embeddings",
    "scale_decoder_outputs": "tied_embeddings",
    "bias": "missing_bias",
    "norm": "norm_kind",
    "is_decoder": "attention_mask",
}
"""Causes by part of a key of config.json."""


@dataclass(frozen=True)
class Reading:
    """Weights that were read for a specification."""

    spec: ModelSpec
    shapes: Mapping[str, Shape]
    """Expected shapes by our names."""
    tensors: Mapping[str, Tensor]
    """Parameters in fp32 by our names, each computed on access."""
    problems: tuple[Finding, ...] = ()
    """Tensors that are missing, left over, or of another shape than the specification says."""
    unsound: frozenset[str] = frozenset()
    """Names of the parameters that are not there as a whole in their shape."""

    def rows(self, name: str) -> Tensor:
        """Return a tensor without the padding of the vocabulary."""
        tensor = self.tensors[name]
        return tensor[: self.spec.vocab_size] if name in VOCABULARY else tensor


@dataclass
class Side:
    """One opened model."""

    path: Path
    form: str
    """Format: megacore, or one of OPENERS."""
    kind: str
    """Class or family of the model."""
    spec: ModelSpec
    read: Callable[[ModelSpec], Reading]
    """Function that reads the weights as those of a specification."""
    tokenizer: Path | None = None
    """Directory of the tokenizer; None without one."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Content of config.json of a transformers directory."""
    findings: list[Finding] = field(default_factory=list)
    """Values of config.json that our models do not support."""
    remarks: tuple[str, ...] = ()
    names_of: Callable[[ModelSpec, Sequence[str]], list[str]] = lambda _spec, names: list(names)
    """Function from names in the files to our global names."""

    def describe(self) -> dict[str, Any]:
        """Return path, format and size for the report."""
        return {
            "path": str(self.path),
            "format": self.form,
            "class": self.kind,
            "family": self.spec.family,
            "vocab_size": self.spec.vocab_size,
            "tokenizer": None if self.tokenizer is None else str(self.tokenizer),
        }


def open_sides(a: Path, b: Path, held: ExitStack) -> tuple[Side, Side]:
    """Open two models; checkpoints of megacore stay locked until `held` closes.

    A config.json with a value that our models lack is read with the value of the other side, if
    that side can be read as it is. The value is then a finding.

    Raises:
        MegacoreError: if one of them cannot be read as a model of any known format.
    """
    try:
        first = open_side(a, held)
    except ConversionError:
        if transformers_directory(a) is None:
            raise
        second = open_side(b, held)
        return _open_refused(a, second, "A", "B"), second
    try:
        return first, open_side(b, held)
    except ConversionError:
        if transformers_directory(b) is None:
            raise
        return first, _open_refused(b, first, "B", "A")


def open_side(path: Path, held: ExitStack) -> Side:
    """Open one model of any format. Raises MegacoreError."""
    if not is_dir(path):
        raise CheckpointError(
            f"{path} is no directory: give a checkpoint, a run, or a transformers directory"
        )
    directory = transformers_directory(path)
    if directory is not None:
        config = HfConfig.read(directory)
        return _transformers_side(directory, config.values)
    try:
        source = find_model(path)
    except CheckpointError as error:
        return _foreign_side(path, error)
    checkpoint = Path(source.directory)
    held.enter_context(reading(checkpoint))
    named = source.spec.tokenizer_directory
    return Side(
        checkpoint,
        "megacore",
        f"megacore {source.spec.family}",
        source.spec,
        _reader_of(CheckpointTensors(checkpoint)),
        _tokenizer(None if named is None else Path(named)),
    )


def _foreign_side(path: Path, refused: CheckpointError) -> Side:
    """Open a checkpoint of another program by the first format that reads it."""
    problems = []
    for form, opener in OPENERS.items():
        if form == "hf":
            continue
        try:
            foreign = opener(path)
        except MegacoreError as error:
            problems.append(f"as {form}: {error}")
            continue
        named = foreign.spec.tokenizer_directory
        tokenizer = _tokenizer(path) or _tokenizer(None if named is None else Path(named))
        return Side(
            path,
            form,
            foreign.kind,
            foreign.spec,
            _reader_of(foreign.tensors),
            tokenizer,
            remarks=foreign.remarks,
        )
    raise CheckpointError(
        f"{path} cannot be read as a model. As megacore: {refused}. "
        + ". ".join(problems).capitalize()
    )


def _tokenizer(directory: Path | None) -> Path | None:
    there = directory is not None and any(is_file(directory / name) for name in _TOKENIZER_FILES)
    return directory if there else None


def _reader_of(tensors: Mapping[str, Tensor]) -> Callable[[ModelSpec], Reading]:
    def read(spec: ModelSpec) -> Reading:
        shapes = parameter_shapes(spec)
        problems: list[Finding] = []
        missing = [name for name in shapes if name not in tensors]
        extra = [name for name in tensors if name not in shapes]
        problems += _absent(missing) + _left_over(extra)
        unsound = {
            name
            for name in tensors
            if name in shapes and tuple(tensors[name].shape) != shapes[name]
        } | set(missing)
        return Reading(spec, shapes, _fitted(tensors, shapes), tuple(problems), frozenset(unsound))

    return read


def _fitted(tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape]) -> LazyTensors:
    """Return tensors of these shapes: cut, padded or zero where theirs is another."""

    def read(name: str) -> Tensor:
        shape = shapes[name]
        return fitted(tensors[name].float(), shape) if name in tensors else torch.zeros(shape)

    return LazyTensors(shapes, read)


def fitted(tensor: Tensor, shape: Shape) -> Tensor:
    """Return a tensor in `shape`: turned, cut or padded with zeros if necessary."""
    if tuple(tensor.shape) == shape:
        return tensor
    if tensor.dim() == 2 and tuple(tensor.t().shape) == shape:
        return tensor.t().contiguous()
    result = torch.zeros(shape)
    if tensor.dim() == len(shape):
        place = tuple(slice(0, min(*sizes)) for sizes in zip(shape, tensor.shape, strict=True))
        result[place] = tensor[place]
    return result


def _transformers_side(directory: Path, values: Mapping[str, Any]) -> Side:
    config = HfConfig(values, str(directory / CONFIG_NAME))
    hf_class, spec = read_spec(config)
    form = FORMS[config.get("model_type", str)]
    readers = tensor_readers(directory)
    spec = with_tokens_of_generation(with_heads_of_files(spec, form, readers), directory)
    return Side(
        directory,
        "hf",
        hf_class.architecture,
        spec,
        lambda spec: _read_form(form, readers, spec),
        _tokenizer(directory),
        values,
        names_of=lambda spec, names: _containing(form.key_map(spec), names),
    )


def _containing(table: KeyMap, names: Collection[str]) -> list[str]:
    """Return our tensors that are in one of the other format's tensors `names`."""
    return [ours for ours in table.our_shapes if not set(table.theirs(ours)).isdisjoint(names)]


def _read_form(form: HfForm, readers: Mapping[str, Reader], spec: ModelSpec) -> Reading:
    """Read the tensors of a transformers directory as those of `spec`."""
    table = form.key_map(spec)
    known: dict[str, Reader] = {}
    extra: list[str] = []
    for name, reader in readers.items():
        place = form.name_on_disk(name, table.their_shapes)
        if place is None:
            continue
        if place in table.their_shapes or place in form.copies:
            known[place] = reader
        else:
            extra.append(name)
    problems = _left_over(extra)
    for copy, name in form.copies.items():
        if copy not in table.their_shapes and copy in known:
            reader = known.pop(copy)
            if name not in known:
                known[name] = reader
            elif not torch.equal(reader(), known[name]()):
                problems.append(_untied(copy, name))
    missing = [name for name in table.their_shapes if name not in known]
    problems += _absent(missing)
    misshapen = _misshapen(table, known)
    problems += misshapen
    parts = LazyTensors(known, lambda name: known[name]())
    whole = _fitted(parts, table.their_shapes)
    tensors = LazyTensors(table.our_shapes, lambda name: table.merged(name, whole.__getitem__))
    wrong = {name for each in misshapen if each.cause not in REPAIRED for name in each.where}
    unsound = frozenset(_containing(table, {*missing, *wrong}))
    return Reading(spec, dict(table.our_shapes), tensors, tuple(problems), unsound)


def _misshapen(table: KeyMap, readers: Mapping[str, Reader]) -> list[Finding]:
    """Return a finding for each kind of tensor whose shape is not that of the specification."""
    grouped: dict[tuple[str, str], list[str]] = {}
    checked: set[str] = set()
    for ours in table.our_shapes:
        for name in table.theirs(ours):
            if name not in readers or name in checked:
                continue
            checked.add(name)
            actual, shape = tuple(readers[name]().shape), table.their_shapes[name]
            if actual == shape:
                continue
            if actual == tuple(reversed(shape)) and len(shape) == 2:
                key = ("transposed", f"transposed: {actual} instead of {shape}")
            elif ours in VOCABULARY and actual[1:] == shape[1:]:
                key = (
                    "vocabulary_padding",
                    f"{actual[0]:,} rows where config.json says vocab_size {shape[0]:,}",
                )
            elif "position" in ours and actual[1:] == shape[1:]:
                key = (
                    "position_table",
                    f"{actual[0]:,} positions where config.json says {shape[0]:,}",
                )
            else:
                key = ("shape", f"of shape {actual} where config.json says {shape}")
            grouped.setdefault(key, []).append(name)
    return [
        Finding("weights", cause, f"{listed(names, 3)}: {text}", tuple(names))
        for (cause, text), names in grouped.items()
    ]


def _absent(names: list[str]) -> list[Finding]:
    """Return the findings of missing tensors; biases are one of their own."""
    biases = [name for name in names if name.endswith(".bias")]
    others = [name for name in names if not name.endswith(".bias")]
    result = []
    for missing, cause in ((biases, "missing_bias"), (others, "missing_tensors")):
        if missing:
            result.append(Finding("weights", cause, f"lacks {listed(missing, 3)}", tuple(missing)))
    return result


def _left_over(names: list[str]) -> list[Finding]:
    if not names:
        return []
    return [
        Finding(
            "weights",
            "extra_tensors",
            f"has {listed(names, 3)}, for which its configuration has no place",
            tuple(names),
        )
    ]


def _untied(copy: str, name: str) -> Finding:
    return Finding(
        "weights",
        "tied_embeddings",
        f"has {copy} and {name} with different values, where its configuration says that they "
        "are one",
        (copy, name),
    )


def _open_refused(path: Path, other: Side, name: str, other_name: str) -> Side:
    """Open a transformers directory with values that our models lack, as the other side has them.

    Raises ConversionError if the other side does not tell which values could be replaced.
    """
    directory = transformers_directory(path)
    assert directory is not None
    values = dict(HfConfig.read(directory).values)
    reference = dict(other.values)
    if reference.get("model_type") != values.get("model_type"):
        reference = dict(model_config(other.spec, "float32"))
    replaced = _readable(values, reference, directory)
    side = _transformers_side(directory, _without_null(values, replaced))
    for key in replaced:
        sentence = (
            f"config.json of {name} has {key} {_shown(values, key)}, which models here lack "
            f"({other_name}: {_shown(reference, key)})"
        )
        side.findings.append(
            Finding(
                "architecture",
                cause_of_key(key, values.get(key)),
                sentence,
                (key,),
                reference.get(key) if name == "B" else values.get(key),
                values.get(key) if name == "B" else reference.get(key),
            )
        )
    side.values = values
    return side


def _readable(values: dict[str, Any], reference: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the fewest values of `reference` with which `values` can be read.

    Raises ConversionError if all of them together do not help.
    """
    same_type = reference.get("model_type") == values.get("model_type")
    differing = [key for key in values if values[key] != reference.get(key)] if same_type else []
    replaced = {key: reference.get(key) for key in differing}
    path = str(directory / CONFIG_NAME)
    read_spec(HfConfig(_without_null(values, replaced), path))
    for key in differing:
        fewer = {name: value for name, value in replaced.items() if name != key}
        try:
            read_spec(HfConfig(_without_null(values, fewer), path))
        except ConversionError:
            continue
        replaced = fewer
    return replaced


def _without_null(values: dict[str, Any], replaced: dict[str, Any]) -> dict[str, Any]:
    merged = {**values, **replaced}
    dropped = {key for key, value in replaced.items() if value is None}
    return {key: value for key, value in merged.items() if key not in dropped}


def cause_of_key(key: str, value: Any = None) -> str:
    """Return the cause that a key of config.json belongs to."""
    if key in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
        kind = value.get("rope_type", value.get("type", "default"))
        if kind == "default":
            return "rope_base"
    return next((cause for part, cause in _CAUSE_OF_KEY.items() if part in key), "configuration")


def _shown(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "absent"
