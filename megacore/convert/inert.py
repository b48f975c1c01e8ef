"""Files of torch that others wrote, read without executing anything in them."""

import re
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

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
"""Names that files hold beside tensors: in args, whose enumerations some versions of Python pickle
by getattr, and in the state of random number generators. A Record stands for each, as for whatever
is below `_INERT_PACKAGES`."""
_INERT_PACKAGES = ("megatron.", "deepspeed.")


class Record:
    """What a class or function named by a file becomes when it is read.

    It is called, and keeps attributes.
    """

    __slots__ = ("__dict__", "given")

    def __init__(self, *values: Any) -> None:
        self.given = values
        """What it was called with: an enumeration's value."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)


def load_inert(path: Path) -> Any:
    """What a file holds.

    Its tensors are mapped, not copied, unless it is of torch's form before 1.6.

    Raises CheckpointError when it cannot be read, or asks for anything that could act.
    """
    try:
        zipped = zipfile.is_zipfile(path)
        named = torch.serialization.get_unsafe_globals_in_checkpoint(path) if zipped else _INERT
        harmless = {name for name in named if name in _INERT or name.startswith(_INERT_PACKAGES)}
        # torch takes pairs of what to call and the name that a file knows it by.
        with torch.serialization.safe_globals([(Record, name) for name in harmless]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # a damaged pickle raises whatever its next byte asks for
        raise CheckpointError(f"{path} {_problem(error)}") from error


def _problem(error: Exception) -> str:
    """What torch refused, without its advice to execute it."""
    cause = error.__context__ if isinstance(error, UnpicklingError) and error.__context__ else error
    asked = _ASKED.search(str(cause))
    if asked:
        return (
            f"asks for {asked[1]}, which no checkpoint of a model needs: nothing of it was run, do "
            "not use it"
        )
    reason = " ".join(str(cause).split()).partition(". ")[0][:200]
    return f"cannot be read ({type(cause).__name__}: {reason}): use another checkpoint"
