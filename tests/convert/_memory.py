"""Measurement of an export's memory: `python -m tests.convert._memory CHECKPOINT OUTPUT DTYPE`.

Prints the bytes by which the export increased the memory of its process.
"""

import sys
from collections.abc import Callable
from pathlib import Path


def peak(operation: Callable[[], object]) -> int:
    """Return the largest increase of the process's memory during the operation, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    operation()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )
    return 1024 * int(line.split()[1])


def main(checkpoint: str, output: str, dtype: str) -> None:
    """Export twice; code and caches that the first export loads are not counted."""
    import torch

    from megacore.checkpoint.spec import read_spec
    from megacore.convert.hf.write import write_model
    from megacore.convert.source import CheckpointTensors

    torch.set_num_threads(1)
    spec, tensors = read_spec(Path(checkpoint)), CheckpointTensors(Path(checkpoint))
    write_model(Path(output, "first"), spec, tensors, dtype=dtype)  # type: ignore[arg-type]
    grown = peak(lambda: write_model(Path(output, "second"), spec, tensors, dtype=dtype))  # type: ignore[arg-type]
    sys.stdout.write(f"{grown}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
