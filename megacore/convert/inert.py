"""Loading of untrusted torch files without executing code in them."""

import re
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from megacore.artifact.files import is_stored_zip
from megacore.errors import CheckpointError

_ASKED = re.compile(r"GLOBAL (\S+)")
_INERT = frozenset(
    {
        "argparse.Namespace",
        "types.SimpleNamespace",
        "builtins.getattr",
        "datetime.timedelta",
        "pathlib.PosixPath",
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
        CheckpointError: if the file cannot be read, or asks for a name that could execute code.
    """
    try:
        zipped = is_stored_zip(path)
        named = torch.serialization.get_unsafe_globals_in_checkpoint(path) if zipped else _INERT
        harmless = {name for name in named if name in _INERT or name.startswith(_INERT_PACKAGES)}
        # torch takes pairs of a callable and its name in the file.
        with torch.serialization.safe_globals([(Record, name) for name in harmless]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # a damaged pickle raises whatever its next byte asks for
        raise CheckpointError(f"{path} {_problem(error)}") from error


def _problem(error: Exception) -> str:
    """Describe what torch refused, without torch's advice to load the file unsafely."""
    cause = error.__context__ if isinstance(error, UnpicklingError) and error.__context__ else error
    match = _ASKED.search(str(cause))
    if match:
        return (
            f"asks for {match[1]}, which no checkpoint of a model needs: nothing of it was run, do "
            "not use it"
        )
    reason = " ".join(str(cause).split()).partition(". ")[0][:200]
    return f"cannot be read ({type(cause).__name__}: {reason}): use another checkpoint"
