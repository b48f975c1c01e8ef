"""Writing one `.safetensors` file tensor by tensor, so that no more than one of them is in memory.

Layout (huggingface/safetensors): u64 little endian N, N bytes of JSON (name -> dtype, shape, [begin, end) in the
data), then the data, without holes, in the header's order. N is padded with spaces to a multiple of 8.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megacore.artifact.files import workspace_errors

_ITEM_SIZE = 4


def write_float32(path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Write `tensors` in float32 to `path` and return the file's size in bytes.

    `shapes` says beforehand which tensors will come, in which order. Raises WorkspaceError when the disk refuses.
    """
    header = _header(shapes)
    with workspace_errors(path), open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for (expected, shape), (name, tensor) in zip(shapes.items(), tensors, strict=True):
            assert (name, tuple(tensor.shape)) == (expected, shape), (
                f"{name} came where {expected} {shape} was announced"
            )
            file.write(tensor.detach().to("cpu", torch.float32).contiguous().numpy().reshape(-1).data)
        return file.tell()


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + _ITEM_SIZE * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    return text + b" " * (-len(text) % 8)
