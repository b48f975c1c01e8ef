"""Loading of untrusted torch files without executing code in them."""

import io
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from megacore.artifact.files import access_errors, is_stored_zip
from megacore.errors import CheckpointError, FileAccessError, one_line

_ASKED = re.compile(r"GLOBAL (\S+)")
_INERT = frozenset(
    {
        "argparse.Namespace",
        "types.SimpleNamespace",
        "builtins.getattr",
        "datetime.timedelta",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",  # its place in Python 3.13
        "signal.Signals",
        *(
            f"numpy.{module}.multiarray.{name}"
            for module in ("core", "_core")
            for name in ("_reconstruct", "scalar")
        ),
        "numpy.ndarray",
        "numpy.dtype",
    }
)
"""Names in files that are replaced by a Record, in addition to the names in `_INERT_PACKAGES`. They
occur in args, whose enumerations some versions of Python pickle by getattr, and in the state of
random number generators."""
_INERT_PACKAGES = ("megatron.", "deepspeed.")


class Record:
    """Placeholder for a class or function that a file names.

    It records the arguments of its call and its attributes.
    """

    __slots__ = ("__dict__", "given")

    def __init__(self, *values: Any) -> None:
        self.given = values
        """Arguments of the call, such as an enumeration's value."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)


def load_inert(path: Path) -> Any:
    """Load a torch file without executing anything in it.

    Its tensors are memory-mapped, except in the format of torch before 1.6.

    Raises:
        CheckpointError: if the file cannot be read, asks for a name that could execute code, or has
            a tensor that is not dense.
        FileAccessError: the disk fails, the mount is lost, or too many files are open.
    """
    try:
        with access_errors(path):
            zipped = is_stored_zip(path)
            content = _load(path, zipped=zipped, mmap=zipped)
    except FileAccessError:
        raise
    except Exception as error:  # a damaged pickle raises whatever its next byte asks for
        raise CheckpointError(f"{path} {_problem(error)}") from error
    return _dense(content, str(path))


def load_inert_mapping(path: Path) -> Mapping[str, Any]:
    """Load a torch file that holds a dictionary, as `load_inert` does.

    Raises:
        CheckpointError: for the reasons of `load_inert`, and if the file holds something else.
        FileAccessError: for the reasons of `load_inert`.
    """
    state = load_inert(path)
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"{path} holds {type(state).__name__}, not a dictionary: use another checkpoint"
        )
    return state


def load_inert_bytes(archive: bytes, where: str) -> Any:
    """Load what torch.save wrote, without executing anything in it; `where` names it in errors.

    Raises:
        CheckpointError: for the reasons of `load_inert`.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as members:
            size = sum(member.file_size for member in members.infolist())
        if size > len(archive):
            raise ValueError(f"its members unpack to {size:,} bytes, more than its own")
        content = _load(io.BytesIO(archive), zipped=True, mmap=False)
    except Exception as error:  # a damaged pickle raises whatever its next byte asks for
        raise CheckpointError(f"{where} {_problem(error)}") from error
    return _dense(content, where)


def _load(source: Path | io.BytesIO, *, zipped: bool, mmap: bool) -> Any:
    named = torch.serialization.get_unsafe_globals_in_checkpoint(source) if zipped else _INERT
    harmless = {name for name in named if name in _INERT or name.startswith(_INERT_PACKAGES)}
    # torch takes pairs of a callable and its name in the file.
    records: list[Any] = [(Record, name) for name in harmless]
    if isinstance(source, io.BytesIO):
        source.seek(0)
    with torch.serialization.safe_globals(records):
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)


def _dense(content: Any, where: str) -> Any:
    if (problem := not_dense(content)) is not None:
        raise CheckpointError(f"{where}: {problem}: use another checkpoint")
    return content


def not_dense(content: Any) -> str | None:
    """Return a clause with the name of the first tensor in `content` without plain values, if any.

    Such tensors are sparse, quantized, nested, without data (meta), or of a subclass.
    """
    waiting: list[tuple[str, Any]] = [("", content)]
    seen = set[int]()
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, torch.Tensor):
            kind = _kind_of(value)
            if kind is not None:
                return f"{name or 'it'} is {kind}, not a dense tensor"
        elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            waiting += [(f"{name}.{key}" if name else str(key), item) for key, item in items]
    return None


def _kind_of(tensor: torch.Tensor) -> str | None:
    """Return what a tensor is if it is not dense, else None."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout is not torch.strided:
        return f"sparse ({tensor.layout})"
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_meta:
        return "without data"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__name__}"
    return None


def _problem(error: Exception) -> str:
    """Describe what torch refused, without torch's advice to load the file unsafely."""
    cause = error.__context__ if isinstance(error, UnpicklingError) and error.__context__ else error
    match = _ASKED.search(str(cause))
    if match:
        return (
            f"asks for {match[1]}, which no checkpoint of a model needs: nothing of it was run, do "
            "not use it"
        )
    reason = one_line(cause).partition(". ")[0][:200]
    return f"cannot be read ({type(cause).__name__}: {reason}): use another checkpoint"
