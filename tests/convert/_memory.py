"""Measurement of a conversion's memory.

`python -m tests.convert._memory CHECKPOINT OUTPUT DTYPE` prints the bytes by which an export
increased the memory of its process, and with `import FORM DIRECTORY OUTPUT` those of an import.
"""

import sys
import threading
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


def peak_anonymous(operation: Callable[[], object]) -> int:
    """Return the largest increase of the memory that is not of mapped files, in samples."""
    before = largest = _status("RssAnon")
    finished = threading.Event()

    def sample() -> None:
        nonlocal largest
        while not finished.wait(0.002):
            largest = max(largest, _status("RssAnon"))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        operation()
    finally:
        finished.set()
        sampler.join()
    return largest - before


def main_import(form: str, directory: str, output: str) -> None:
    """Import twice; code and caches that the first import loads are not counted."""
    import torch

    from megacore.convert.imported import OPENERS, import_model

    torch.set_num_threads(1)
    source = Path(directory)

    def run(name: str) -> None:
        import_model(OPENERS[form](source), source, Path(output, name))

    run("first")
    sys.stdout.write(f"{peak_anonymous(lambda: run('second'))}\n")


if __name__ == "__main__":
    if sys.argv[1] == "import":
        main_import(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
