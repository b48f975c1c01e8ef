"""Checkpoints of Megatron core in its distributed form, torch_dist.

`iter_0001000/` has `.metadata` and `__0_0.distcp` … of torch.distributed.checkpoint: every tensor
with its complete shape, whatever the layout. Iteration and arguments are in `common.pt`, or in an
object of the same files. Only weights are converted. Nothing in the files is executed, and one
tensor at a time is in memory.

Megatron core reads some arguments differently from Megatron-LM's models before it, has more
options, and supports norms of queries and keys and a sliding window. The other arguments are in
`args`.

Source: NVIDIA/Megatron-LM, megatron/core/dist_checkpointing,
megatron/training/argument_utils.py and megatron/core/transformer/transformer_config.py.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from megacore.artifact.files import read_json, reason_of
from megacore.checkpoint.format import MARKER_NAME, METADATA_NAME
from megacore.checkpoint.load import CheckpointReader
from megacore.checkpoint.shard import Rectangle, TensorShard, tile
from megacore.config.model import Family
from megacore.config.spec import ModelSpec
from megacore.convert.inert import load_inert, load_inert_bytes
from megacore.convert.key_map import LazyTensors, Shape
from megacore.convert.megatron.args import refuse_used, remarks_on, spec_of, tensor_size
from megacore.convert.megatron.files import CONFIG_NAME, args_in
from megacore.convert.megatron.table import (
    GATED,
    HALVES,
    OTHERS,
    WORD_EMBEDDINGS,
    Slot,
    core_name,
    core_slots,
)
from megacore.convert.source import HALF_PRECISION, Foreign
from megacore.errors import CheckpointError, ConversionError, listed
from megacore.paths import exists, glob, is_file

OFF: dict[str, tuple[Any, ...]] = {
    "activation_func_clamp_value": (),
    "apply_layernorm_1p": (),
    "attention_output_gate": (),
    "enable_hyper_connections": (),
    "enable_mhc_connections": (),
    "experimental_attention_variant": (),
    "glu_linear_offset": (),
    "heterogeneous_layers_config_encoded_json": (),
    "heterogeneous_layers_config_path": (),
    "hybrid_layer_pattern": (),
    "hybrid_override_pattern": (),
    "is_hybrid_model": (),
    "layernorm_zero_centered_gamma": (),
    "linear_attention_freq": (),
    "mrope_section": (),
    "mtp_num_layers": (),
    "multi_latent_attention": (),
    "no_rope_freq": (),
    "num_experts": (),
    "qk_l2_norm": (),
    "quick_geglu": (),
    "retro_add_retriever": (),
    "rope_type": ("rope",),
    "softmax_scale": (),
    "softmax_type": ("vanilla",),
    "spec": (),
    "squared_relu": (),
    "use_mup": (),
}
"""Arguments that our models support only with a false value, null or one of these values. Each
changes what the model computes."""
_QUANTIZED = ("fp8", "fp4")
"""Arguments of training with quantized products, which are computed as usual here."""
_ABSENT = {
    ".experts.": "experts",
    ".router.": "experts",
    ".shared_experts.": "experts",
    "mtp.": "multi-token prediction",
    ".mixer.": "Mamba or hybrid layers",
    "linear_q_down_proj": "multi-head latent attention",
    "linear_kv_down_proj": "multi-head latent attention",
    "linear_q_up_proj": "multi-head latent attention",
    "cross_attention.linear": "cross attention",
    "vision_model.": "an image encoder",
}
"""Parts of names and the module that they belong to, which no model of megacore has."""
COMMON_NAME = "common.pt"
_COMMON_OBJECT = "common_state/shard_0_1"
"""Name of the object with iteration and arguments, in versions without `common.pt`."""
BACKEND = "torch_dist"
_MOST_COMMON = 256 << 20
"""Largest object with iteration and arguments, in bytes."""
_FAMILIES: dict[str, Family] = {"decoder.": "gpt", "encoder.": "bert"}
"""Family by the beginning of the layers' names."""


def open_core(directory: Path, iteration: int | None) -> Foreign:
    """Open the checkpoint in `directory`, an `iter_*` directory; its tensors are read on access.

    `iteration` is used if the files do not say theirs.

    Raises:
        CheckpointError: if a file is missing or damaged, asks for more than data, or disagrees
            with another file.
        ConversionError: if it is in another form, or our models do not support it.
    """
    _check_form(directory)
    reader = CheckpointReader(directory, foreign=True)
    common = _common_state(reader)
    args = args_in(common)
    names = [name for name in reader.tensors if not OTHERS.search(name)]
    family = _family(names, directory)
    _check_modules(names, directory)
    layers = _layers(reader)
    spec = _spec(args, family, layers, _vocabulary(reader, directory), directory)
    tensors = CoreTensors(reader, spec, tensor_size(args), directory)
    saved = common.get("iteration")
    remarks = [*remarks_on(args, family), *_remarks(args)]
    if any(reader.tensors[name].properties.dtype != torch.float32 for name in names):
        remarks.append(HALF_PRECISION)
    iterations = saved if type(saved) is int and saved >= 0 else iteration
    described = [directory / name for name in (CONFIG_NAME, METADATA_NAME, COMMON_NAME)]
    files = (*filter(is_file, described), *sorted(glob(directory, "*.distcp")))
    return Foreign(
        "megatron",
        f"Megatron core {family}",
        spec,
        tensors,
        files,
        iterations or 0,
        tuple(remarks),
    )


def _check_form(directory: Path) -> None:
    """Raise ConversionError for other forms of torch.distributed.checkpoint."""
    if is_file(directory / MARKER_NAME):
        raise ConversionError(
            f"{directory} is a checkpoint of megacore already: megacore reads it without an import"
        )
    config = directory / CONFIG_NAME
    if not is_file(config):
        raise ConversionError(
            f"{directory} has {METADATA_NAME} but no {CONFIG_NAME}, so it is of Megatron's form "
            "torch_dcp or fsdp_dtensor, of which neither is read: save it with --ckpt-format "
            f"{BACKEND}"
        )
    try:
        backend = read_json(config).get("sharded_backend")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{config} cannot be read ({reason_of(error)}): use another checkpoint"
        ) from error
    if backend != BACKEND:
        raise ConversionError(
            f"{directory} is in the form {backend!r}, and of Megatron core's forms only "
            f"{BACKEND} is read: save it with --ckpt-format {BACKEND}"
        )
    if not is_file(directory / METADATA_NAME):
        raise CheckpointError(
            f"{directory} has no {METADATA_NAME}, so it was not saved to its end: use another "
            "checkpoint"
        )


def _common_state(reader: CheckpointReader) -> Mapping[str, Any]:
    """Return iteration, arguments and other state that is no tensor."""
    path = reader.directory / COMMON_NAME
    where = str(path) if exists(path) else f"{_COMMON_OBJECT} of {reader.directory}"
    if exists(path):
        state = load_inert(path)
    elif _COMMON_OBJECT in reader.objects:
        loaded = load_inert_bytes(reader.read_object(_COMMON_OBJECT, _MOST_COMMON), where)
        state = loaded[0] if isinstance(loaded, list) and len(loaded) == 1 else loaded
    else:
        raise CheckpointError(
            f"{reader.directory} has neither {COMMON_NAME} nor an object {_COMMON_OBJECT}, which "
            "hold the model's arguments: use another checkpoint"
        )
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"{where} holds {type(state).__name__}, not a dictionary: use another checkpoint"
        )
    return state


def _family(names: Sequence[str], where: Path) -> Family:
    families = {
        family
        for beginning, family in _FAMILIES.items()
        if any(name.startswith(f"{beginning}layers.") for name in names)
    }
    if len(families) == 1:
        return families.pop()
    shown = listed(names) or "no tensors"
    what = "both encoder and decoder layers, as T5" if families else f"no layers, but {shown}"
    raise ConversionError(f"{where} has {what}: only gpt and bert are read from this form")


def _spec(
    args: Mapping[str, Any], family: Family, layers: int, vocabulary_rows: int, where: Path
) -> ModelSpec:
    """Return the spec of the model that Megatron core builds with `args`; see `args.spec_of`.

    Raises:
        ConversionError: if our models do not support an argument.
        CheckpointError: if an argument is missing, invalid or contradicts the tensors.
    """
    refuse_used(args, OFF, where)
    options: dict[str, Any] = {"qk_layernorm": bool(args.get("qk_layernorm"))}
    options |= _window(args, where)
    # Megatron core ignores openai_gelu.
    read = {**args, "openai_gelu": False, "onnx_safe": False}
    read |= {"qk_layernorm": False, "window_size": None}
    if args.get("tokenizer_type") == "HuggingFaceTokenizer":
        tokenizer = {"tokenizer_type": "PretrainedFromHF"}
        read |= tokenizer | {"tokenizer_name_or_path": args.get("tokenizer_model")}
    return spec_of(read, family, layers, vocabulary_rows, where, options)


def _window(args: Mapping[str, Any], where: Path) -> dict[str, int]:
    """Return our sliding_window, which counts the token itself and its window's left part.

    Every n-th layer has no window, here as in Megatron core, with window_attn_skip_freq n.
    """
    window = args.get("window_size")
    if not window:
        return {}
    if not (
        isinstance(window, tuple | list)
        and len(window) == 2
        and all(type(side) is int for side in window)
    ):
        raise CheckpointError(
            f"args of {where} have window_size {window!r}, which is no pair of numbers: use "
            "another checkpoint"
        )
    left, right = window
    if right not in (0, -1):
        raise ConversionError(
            f"{where} was trained with window_size {tuple(window)!r}, in which tokens attend to "
            "later ones, which no GPT of megacore does"
        )
    skip = args.get("window_attn_skip_freq")
    if skip is not None and (type(skip) is not int or skip < 1):
        raise ConversionError(
            f"{where} was trained with window_attn_skip_freq {skip!r}: models of megacore have a "
            "window in all layers, or in all but every n-th"
        )
    if left < 0 or skip == 1:
        return {}
    return {"sliding_window": left + 1} | ({"window_attn_skip_freq": skip} if skip else {})


def _remarks(args: Mapping[str, Any]) -> tuple[str, ...]:
    """Return sentences about what the import leaves out."""
    quantized = [f"{name} {args[name]}" for name in _QUANTIZED if args.get(name)]
    return tuple(
        f"the model was trained with {name}: megacore computes its products in the precision of "
        "the weights"
        for name in quantized
    )


def _check_modules(names: Sequence[str], where: Path) -> None:
    for part, module in _ABSENT.items():
        name = next((name for name in names if part in f".{name}"), None)
        if name is not None:
            raise ConversionError(f"{where} has {name}: no model of megacore has {module}")


def _layers(reader: CheckpointReader) -> int:
    """Return the number of layers of the tensors, which are stacked or one per layer."""
    end = ".self_attention.linear_proj.weight"
    names = [name for name in reader.tensors if name.endswith(end) and not OTHERS.search(name)]
    stacked = [name for name in names if name.endswith(f".layers{end}")]
    size = reader.tensors[stacked[0]].size if len(stacked) == 1 else ()
    return int(size[0]) if size else len(names)


def _vocabulary(reader: CheckpointReader, where: Path) -> int:
    entry = reader.tensors.get(WORD_EMBEDDINGS)
    if entry is None or len(entry.size) != 2:
        raise CheckpointError(f"{where} has no table {WORD_EMBEDDINGS}: use another checkpoint")
    return int(entry.size[0])


@dataclass(frozen=True)
class _Place:
    """Tensors of a checkpoint that a slot of the table is read from."""

    names: tuple[str, ...]
    """Names in the checkpoint; several are joined along the first dimension."""
    layer: int | None
    """Position in the tensors' first dimension; None if they are of one layer."""
    shape: Shape
    """Shape of the slot's tensor."""
    shards: int = 1
    """Number of parts of the tensor that each have both halves of a gated layer."""


class CoreTensors(LazyTensors):
    """Mapping of our fp32 parameters by global name, each read on access.

    Args:
        reader: reader of the checkpoint.
        spec: spec of the model.
        tensor: tensor parallel size of the program that wrote it, if it is known.
        where: checkpoint that errors name.

    Raises:
        CheckpointError: on construction, if a tensor is missing, unknown, incomplete or of a wrong
            shape.
        ConversionError: on construction, if a tensor has numbers in an unknown order.
    """

    def __init__(self, reader: CheckpointReader, spec: ModelSpec, tensor: Any, where: Path) -> None:
        self._reader = reader
        self._slots: dict[str, tuple[Slot, _Place]] = {}
        known = {name for name in reader.tensors if not OTHERS.search(name)}
        used: set[str] = set()
        for slot in core_slots(spec):
            place = _place(reader, slot, spec, tensor, where)
            used |= set(place.names)
            self._slots |= dict.fromkeys(slot.ours, (slot, place))
        super().__init__(self._slots, self._whole)
        unknown = sorted(known - used)
        if unknown:
            raise CheckpointError(
                f"{where} is of another model than its args say: it has {listed(unknown)}, for "
                "which there is no place: use another checkpoint"
            )

    def _whole(self, name: str) -> Tensor:
        slot, place = self._slots[name]
        return slot.whole([self._read(place)], name)

    def _read(self, place: _Place) -> Tensor:
        """Read a slot's complete tensor."""
        whole = torch.empty(place.shape, dtype=torch.float32)
        parts = whole.chunk(len(place.names)) if len(place.names) > 1 else (whole,)
        for name, part in zip(place.names, parts, strict=True):
            entry = self._reader.tensors[name]
            if place.layer is None:
                self._reader.fill({name: part})
            else:
                corner = torch.Size([place.layer, *[0] * part.dim()])
                shard = TensorShard(entry.size, entry.properties.dtype, {corner: part[None]})
                self._reader.fill({name: shard})
        if place.shards > 1:
            by_part: Tensor = whole.view(place.shards, 2, -1, *place.shape[1:])
            return by_part.transpose(0, 1).reshape(place.shape)
        return whole


def _place(
    reader: CheckpointReader, slot: Slot, spec: ModelSpec, tensor: Any, where: Path
) -> _Place:
    """Return where a slot's tensor is, after checking that it is there and complete."""
    core = core_name(slot, spec.family)
    gated = spec.model.gated and any(GATED in name and "norm" not in name for name in core.names)
    candidates = [(name, core.layer) for name in core.names]
    candidates += [(name, None) for name in core.separate()] if core.layer is not None else []
    chosen = [
        (names, layer)
        for names, layer in _with_halves(candidates, gated)
        if any(name in reader.tensors for name in names)
    ]
    if len(chosen) != 1:
        shown = listed([name for name, _ in candidates])
        raise CheckpointError(
            f"{where} is of another model than its args say: it "
            f"{'lacks' if not chosen else 'has more than one of'} {shown}: use another checkpoint"
        )
    names, layer = chosen[0]
    shape = slot.shape(1)
    rows = shape[0] // len(names)
    for name in names:
        _check_tensor(reader, name, layer, (rows, *shape[1:]), spec.model.num_layers, where)
    shards = 1
    if gated and len(names) == 1:
        shards = _gated_shards(
            reader.tensors[names[0]], layer, shape[0] // 2, tensor, names[0], where
        )
    return _Place(names, layer, shape, shards)


def _with_halves(
    candidates: Sequence[tuple[str, int | None]], gated: bool
) -> Iterator[tuple[tuple[str, ...], int | None]]:
    for name, layer in candidates:
        yield (name,), layer
        if gated:
            yield tuple(f"{name}{half}" for half in HALVES), layer


def _check_tensor(
    reader: CheckpointReader,
    name: str,
    layer: int | None,
    shape: Shape,
    layers: int,
    where: Path,
) -> None:
    """Check that a tensor, or its part for `layer`, has this shape and is in the files."""
    if name not in reader.tensors:
        raise CheckpointError(f"{where} lacks {name}: use another checkpoint")
    entry = reader.tensors[name]
    expected = shape if layer is None else (layers, *shape)
    if tuple(entry.size) != expected:
        raise CheckpointError(
            f"{where} has {name} of shape {tuple(entry.size)}, where its args say {expected}: use "
            "another checkpoint"
        )
    if not entry.properties.dtype.is_floating_point:
        raise CheckpointError(
            f"{where} has {name} of {entry.properties.dtype}, which are no weights: use another "
            "checkpoint"
        )
    corner = [0] * len(shape) if layer is None else [layer, *[0] * len(shape)]
    size = list(shape) if layer is None else [1, *shape]
    parts = [part for part in (_common(chunk, corner, size) for chunk in entry.chunks) if part]
    if not tile(parts, shape):
        raise CheckpointError(
            f"{where} does not hold every number of {name} exactly once: use another checkpoint"
        )
    for chunk in entry.chunks:
        if _common(chunk, corner, size):
            place = reader.place_of(name, chunk.offsets)
            if place.length < math.prod(chunk.sizes) * entry.properties.dtype.itemsize:
                raise CheckpointError(
                    f"{where} has fewer bytes of {name} than its metadata says: use another "
                    "checkpoint"
                )


def _common(
    chunk: ChunkStorageMetadata, corner: Sequence[int], size: Sequence[int]
) -> Rectangle | None:
    """Return the common part of a chunk and a rectangle; None if there is none."""
    if len(chunk.offsets) != len(corner) or len(chunk.sizes) != len(corner):
        return None
    starts = tuple(map(max, chunk.offsets, corner))
    stops = (
        min(a + b, c + d)
        for a, b, c, d in zip(chunk.offsets, chunk.sizes, corner, size, strict=True)
    )
    lengths = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return (starts, lengths) if all(length > 0 for length in lengths) else None


def _gated_shards(
    entry: TensorStorageMetadata, layer: int | None, half: int, tensor: Any, name: str, where: Path
) -> int:
    """Return the number of parts of a gated layer that each have both halves.

    Since late 2023, Megatron core stores both halves whole, each of them divided over the
    tensor-parallel ranks. Earlier, each rank stored its parts of both as one.

    Raises:
        ConversionError: if the division of the tensor does not tell which of the two it is.
    """
    dim = 0 if layer is None else 1
    begins = sorted(
        {
            (chunk.offsets[dim], chunk.sizes[dim])
            for chunk in entry.chunks
            if layer is None or chunk.offsets[0] <= layer < chunk.offsets[0] + chunk.sizes[0]
        }
    )
    size = tensor if type(tensor) is int and tensor > 0 else None
    if len(begins) == 1 or size == 1:
        return 1  # one rank wrote the layer: its halves are whole
    if size is not None and half % size == 0:
        part = half // size
        if all(begin % part == 0 and length == part for begin, length in begins):
            return 1
        if all(begin % (2 * part) == 0 and length == 2 * part for begin, length in begins):
            return size
    raise ConversionError(
        f"{where} has {name} in {len(begins)} parts for a tensor parallel size of {size}, which "
        "does not tell the order of its two halves: save it with another version of Megatron core"
    )
