"""Reading the files of index maps, and what is checked of each."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.errors import DataFormatError

_MAP_DTYPES = ("<i4", "<u4", "<i8")


def load_map(path: Path) -> npt.NDArray[Any]:
    """An index map, memory-mapped. Raises DataFormatError."""
    try:
        with np.errstate(over="raise"):  # of a shape whose size does not fit 64 bits
            return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)  # type: ignore[no-any-return]
    except FileNotFoundError as error:
        raise DataFormatError(f"{path} does not exist: build the index maps first") from error
    except Exception as error:  # NumPy reads a header as Python source, and passes on all that can go wrong there
        reason = " ".join(str(error).split())
        raise DataFormatError(f"{path} is not a readable index map ({reason}): build the index maps again") from error


def check_form(path: Path, values: npt.NDArray[Any], dimensions: int, dtypes: Sequence[str] = _MAP_DTYPES) -> None:
    """That a map is an array of one of its types. Raises DataFormatError."""
    if values.dtype not in map(np.dtype, dtypes) or values.ndim != dimensions or not values.flags.c_contiguous:
        raise DataFormatError(
            f"{path} is an array of {values.dtype} with shape {values.shape}, which is not that map's form: "
            "build the index maps again"
        )


def check_range(path: Path, values: npt.NDArray[Any], limit: int, reason: str) -> None:
    """That a map's values lie in 0 … limit-1. Raises DataFormatError."""
    if values.size and (values.min() < 0 or values.max() >= limit):
        raise DataFormatError(
            f"{path} points to {values.min()} … {values.max()} where only 0 … {limit - 1} exists: {reason}"
        )
