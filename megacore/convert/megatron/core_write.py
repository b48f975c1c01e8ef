"""Export of GPT models in Megatron core's distributed form, torch_dist.

Megatron core loads it in any layout. The files are those of torch.distributed.checkpoint, with one
slice for each tensor of each layer; arguments and iteration are in `common.pt`.
"""

import argparse
import io
import itertools
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megacore.artifact.files import staged, workspace_errors
from megacore.checkpoint.format import METADATA_NAME, directory_name, write_tracker
from megacore.checkpoint.metadata import private_name
from megacore.config.model import ModelConfig
from megacore.config.spec import ModelSpec
from megacore.convert.megatron.args import (
    ACTIVATIONS,
    POSITIONS,
    args_of,
    refuse_options,
    rotates_otherwise,
)
from megacore.convert.megatron.core import BACKEND, COMMON_NAME
from megacore.convert.megatron.files import CHECKPOINT_VERSION, CONFIG_NAME, save_to
from megacore.convert.megatron.table import Slot, core_name, core_slots
from megacore.errors import ConversionError

_FILE_BYTES = 4 << 30
"""Size after which another file begins, in bytes."""
_STATEFUL = (
    "self_attention.linear_qkv",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""Modules of a layer from which Megatron core loads an additional state, empty here."""
_NO_PLACE: dict[str, Callable[[ModelConfig], bool]] = {
    "parallel_residual": lambda model: model.parallel_residual,
    "position_embedding_type": lambda model: model.position_embedding_type not in POSITIONS,
    "activation": lambda model: (
        model.activation not in ACTIVATIONS
        or (model.activation == "gelu_tanh" and not model.add_bias_linear)
    ),
    "rotary_percent": rotates_otherwise,
}
"""Options that Megatron core's GPT does not support, each with a test for its use. It computes the
approximate GELU only as a fused operation with a bias."""
_FREE = frozenset({"qk_layernorm", "sliding_window", "normalization", "add_bias_linear"})
"""Further options that it supports."""


def check_core(spec: ModelSpec) -> None:
    """Raise ConversionError if Megatron core's GPT does not support the model."""
    if spec.family != "gpt":
        raise ConversionError(
            f"family {spec.family!r} is not written in Megatron core's form, only gpt: export it "
            "with --format hf"
        )
    refuse_options(spec.model, _NO_PLACE, _FREE, "Megatron core's form")


def write_core(
    spec: ModelSpec, tensors: Mapping[str, Tensor], output: Path, *, iteration: int
) -> None:
    """Write `output/iter_<iteration>/` and the tracker file, or nothing on failure.

    The tensors of one slot, such as a layer's queries, keys and values, are in memory at a time.

    Args:
        spec: spec of the model.
        tensors: parameters by global name, with padded vocabulary; they are written in fp32.
        output: root directory, created if it does not exist.
        iteration: number of optimizer steps.

    Raises:
        ConversionError: if the format does not support the model, or `tensors` are of another one.
        ConfigError: if the iteration exists already.
        WorkspaceError: if the files cannot be written.
    """
    check_core(spec)
    with staged(output / directory_name(iteration)) as staging, workspace_errors(staging):
        with _Writer(staging) as writer:
            for slot in core_slots(spec):
                _write_slot(writer, spec, slot, tensors)
            for name in _state_names(spec):
                writer.add_object(name, [None])
        with open(staging / METADATA_NAME, "wb") as file:
            pickle.dump(writer.metadata(), file)
        common = {
            "args": core_args_of(spec, iteration=iteration),
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": iteration,
        }
        with open(staging / COMMON_NAME, "wb") as file:
            save_to(file, common)
        backend = {"sharded_backend": BACKEND, "sharded_backend_version": 1}
        (staging / CONFIG_NAME).write_text(json.dumps(backend), encoding="utf-8")
    write_tracker(output, iteration)


def core_args_of(spec: ModelSpec, *, iteration: int) -> argparse.Namespace:
    """Return the arguments with which Megatron core builds the model."""
    model = spec.model
    values = dict(args_of(spec, iteration=iteration, tensor=1, pipeline=1))
    values |= {
        "openai_gelu": False,
        "bias_gelu_fusion": model.activation == "gelu_tanh",
        "qk_layernorm": model.qk_layernorm,
        "window_size": None if model.sliding_window is None else (model.sliding_window - 1, 0),
        "add_qkv_bias": False,
        "ckpt_format": BACKEND,
        "no_save_optim": True,
        "no_save_rng": True,
    }
    directory = values.pop("tokenizer_name_or_path")
    if directory is not None:
        values |= {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": directory}
    if model.rotary_base.is_integer():
        values["rotary_base"] = int(model.rotary_base)
    return argparse.Namespace(**values)


def _write_slot(
    writer: "_Writer", spec: ModelSpec, slot: Slot, tensors: Mapping[str, Tensor]
) -> None:
    place = core_name(slot, spec.family)
    ours = []
    for name, shape in zip(slot.ours, slot.shapes, strict=True):
        tensor = tensors.get(name)
        if tensor is None or tuple(tensor.shape) != shape:
            raise ConversionError(
                f"the checkpoint is of another model than its description: it has no {name} of "
                f"shape {shape}: give the description it was saved with"
            )
        ours.append(tensor.detach().to(torch.float32))
    writer.add(
        place.names[0],
        slot.part(ours, 0, 1),
        None if place.layer is None else (place.layer, spec.model.num_layers),
    )


def _state_names(spec: ModelSpec) -> Iterator[str]:
    """Yield the names of the modules' additional state, as Megatron core numbers it."""
    layers = spec.model.num_layers
    modules = [*_STATEFUL]
    if spec.model.qk_layernorm:
        modules += ["self_attention.q_layernorm", "self_attention.k_layernorm"]
    for module, layer in itertools.product(modules, range(layers)):
        yield f"decoder.layers.{module}._extra_state/shard_{layer}_{layers}"
    yield "decoder.final_layernorm._extra_state/shard_0_1"


@dataclass
class _Writer:
    """Writer of slices one after the other, with their places."""

    directory: Path
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = field(default_factory=dict)
    places: dict[MetadataIndex, Any] = field(default_factory=dict)
    _files: int = 0
    _file: IO[bytes] | None = None

    def add(self, name: str, tensor: Tensor, layer: tuple[int, int] | None) -> None:
        """Write a tensor; `layer` is its layer and the number of layers if all are stacked."""
        whole, corner = tuple(tensor.shape), (0,) * tensor.dim()
        if layer is not None:
            whole, corner, tensor = (layer[1], *whole), (layer[0], *corner), tensor[None]
        entry = self.entries.setdefault(
            name, TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(whole), [])
        )
        assert isinstance(entry, TensorStorageMetadata)
        offsets = torch.Size(corner)
        entry.chunks.append(ChunkStorageMetadata(offsets, tensor.size()))
        self._write(MetadataIndex(name, offsets), lambda file: save_to(file, tensor))

    def add_object(self, name: str, value: object) -> None:
        """Write an object that is no tensor."""
        self.entries[name] = BytesStorageMetadata()
        packed = io.BytesIO()
        torch.save(value, packed)
        self._write(MetadataIndex(name), lambda file: file.write(packed.getbuffer()))

    def metadata(self) -> Metadata:
        """Return the metadata of everything that was written."""
        return Metadata(self.entries, None, self.places)

    def _write(self, index: MetadataIndex, write: Callable[[IO[bytes]], object]) -> None:
        if self._file is None or self._file.tell() >= _FILE_BYTES:
            self.__exit__()
            path = self.directory / f"__0_{self._files}.distcp"
            self._file = open(path, "wb")  # noqa: SIM115 -- closed by __exit__
            self._files += 1
        start = self._file.tell()
        write(self._file)
        name = Path(self._file.name).name
        place = private_name("torch.distributed.checkpoint.filesystem._StorageInfo")
        self.places[index] = place(name, start, self._file.tell() - start)

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()
