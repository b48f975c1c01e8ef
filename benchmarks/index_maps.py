"""Speed and memory of building index maps and blends, compared with Megatron core.

The maps are of 10 M documents x 10 epochs (100 M entries, 29 M samples of 2048), and the blend is
of 8 data sets with 50 M samples.

    python -m benchmarks.index_maps [--megatron PATH] [--rounds 5] [--documents 10000000]
        [--samples 50000000]

Each measurement runs in a separate process, on one thread; for megacore's maps a second one touches
new memory. Its first round uses memory that the process has not touched before ("first touch"), as
a run does; of the other rounds the best one counts ("warm").
The peak memory is the process's, including Python and the documents' lengths. PATH is a checkout of
https://github.com/NVIDIA/Megatron-LM: its helpers.cpp is compiled into a temporary directory and
does the same work as its GPTDataset and BlendedDataset, and the results are compared with
megacore's.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._verdict import Check, verdict
from megacore.data import _compiled as helpers
from megacore.data.blend import build_blend
from megacore.data.index_maps import build_split
from megacore.data.index_options import IndexOptions
from megacore.data.index_plans import EpochPlan, plan_epochs

EPOCHS = 10
SEQ_LENGTH = 2048
SEED = 1234
WEIGHTS = [30.0, 22.5, 17.0, 11.3, 8.2, 5.0, 4.1, 1.9]
Work = Callable[[], list[np.ndarray]]


def document_lengths(documents: int) -> np.ndarray:
    """Return lengths like those of web pages: 598 tokens on average, some longer than 65,535."""
    random = np.random.RandomState(0)
    return np.clip(random.lognormal(6.0, 0.89, documents), 1, 1e6).astype(np.int32)


def plan(lengths: np.ndarray) -> EpochPlan:
    """Return the plan of as many samples as EPOCHS whole epochs contain."""
    tokens = int(lengths.sum())
    return plan_epochs(tokens, SEQ_LENGTH, (EPOCHS * tokens - 1) // SEQ_LENGTH)


def our_maps(documents: int) -> Work:
    lengths = document_lengths(documents)
    epochs, options = plan(lengths), IndexOptions(split=None, seq_length=SEQ_LENGTH, seed=SEED)

    def work() -> list[np.ndarray]:
        maps = build_split(lengths, 0, documents, epochs, options)
        return [maps.document_index, maps.sample_index, maps.shuffle_index]

    return work


def their_maps(documents: int, library: Any) -> Work:
    """Return a function that does the work of Megatron core's GPTDataset."""
    lengths = document_lengths(documents)
    tokens, epochs = int(lengths.sum()), plan(lengths).epochs

    def work() -> list[np.ndarray]:
        state = np.random.RandomState(SEED)
        index = np.mgrid[0:epochs, 0:documents][1]
        index[:] = np.arange(documents)
        document_index = index.reshape(-1).astype(np.int32)
        del index
        state.shuffle(document_index)
        rows = library.build_sample_idx_int32(
            lengths, document_index, SEQ_LENGTH, epochs, tokens, True, 1
        )
        order = np.arange(len(rows) - 1, dtype=np.uint32)
        state.shuffle(order)
        return [document_index, rows, order]

    return work


def our_blend(samples: int) -> Work:
    return lambda: list(build_blend(WEIGHTS, samples))


def portable_blend(samples: int) -> Work:
    weights = np.array(WEIGHTS) / np.sum(WEIGHTS)
    return lambda: list(helpers.build_blend(weights, samples, portable=True))


def their_blend(samples: int, library: Any) -> Work:
    """Return a function that does the work of Megatron core's BlendedDataset."""
    weights = np.array(WEIGHTS) / np.sum(WEIGHTS)

    def work() -> list[np.ndarray]:
        dataset_index, sample_index = np.zeros(samples, np.int16), np.zeros(samples, np.int64)
        library.build_blending_indices(
            dataset_index, sample_index, weights, len(weights), samples, False
        )
        return [dataset_index, sample_index]

    return work


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure in this process: seconds (wall and processor), peak memory, digest of the results."""
    library = load_library(options.compiled) if options.compiled else None
    work = {
        "maps": lambda: our_maps(options.documents),
        "maps-megatron": lambda: their_maps(options.documents, library),
        "blend": lambda: our_blend(options.samples),
        "blend-portable": lambda: portable_blend(options.samples),
        "blend-megatron": lambda: their_blend(options.samples, library),
    }[name]()
    wall: list[float] = []
    processor: list[float] = []
    result: list[np.ndarray] = []
    for _ in range(options.rounds + 1):
        result.clear()
        begin = time.perf_counter(), time.process_time()
        result += work()
        wall.append(time.perf_counter() - begin[0])
        processor.append(time.process_time() - begin[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    digest = hashlib.sha256()
    for values in result:
        digest.update(values.data)
    return {"wall": wall, "processor": processor, "peak_mb": peak, "digest": digest.hexdigest()}


def load_library(path: str) -> Any:
    """Load Megatron's compiled helpers."""
    spec = importlib.util.spec_from_file_location("helpers_cpp", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_library(megatron: Path, directory: Path) -> Path:
    """Compile Megatron-LM's helpers.cpp with the options of its Makefile."""
    import pybind11

    source = megatron / "megatron" / "core" / "datasets" / "helpers.cpp"
    target = directory / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = [f"-I{path}" for path in (sysconfig.get_path("include"), pybind11.get_include())]
    compiler = os.environ.get("CXX", "g++")
    subprocess.run(
        [
            compiler,
            "-O3",
            "-shared",
            "-std=c++17",
            "-fPIC",
            *includes,
            str(source),
            "-o",
            str(target),
        ],
        check=True,
    )
    return target


def run(name: str, arguments: list[str]) -> dict[str, Any]:
    """Measure in a separate process."""
    command = [sys.executable, "-m", "benchmarks.index_maps", *arguments, "--measure", name]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    output = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    result: dict[str, Any] = json.loads(output)
    return result


def row(name: str, result: dict[str, Any], reference: dict[str, Any] | None) -> str:
    """Return a row of a Markdown table; the ratio is that of the first touch."""
    first = result["wall"][0]
    ratio = f"{reference['wall'][0] / first:.1f} x" if reference else "-"
    same = "-" if reference is None else "yes" if reference["digest"] == result["digest"] else "NO"
    return (
        f"| {name} | {first:.2f} | {ratio} | {min(result['wall'][1:]):.2f} "
        f"| {min(result['processor'][1:]):.2f} | {result['peak_mb']:,.0f} | {same} |"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megatron", type=Path, help="checkout of Megatron-LM to compare with")
    parser.add_argument("--rounds", type=int, default=5, help="besides the first")
    parser.add_argument(
        "--documents", type=int, default=10_000_000, help="of the maps, in an epoch"
    )
    parser.add_argument("--samples", type=int, default=50_000_000, help="of the blend")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", help=argparse.SUPPRESS)
    return parser.parse_args()


def checks(results: dict[str, dict[str, Any]]) -> list[Check]:
    """Return the figures and their goals, which hold for the default sizes."""
    maps, blend = results["maps"], results["blend"]
    return [
        Check("maps, first touch", maps["wall"][0], 1.5, at_most=True, unit="s"),
        Check("maps, warm", min(maps["wall"][1:]), 1.8, at_most=True, unit="s"),
        Check("maps, peak", maps["peak_mb"], 1000.0, at_most=True, unit="MB"),
        Check("blend, warm", min(blend["wall"][1:]), 0.25, at_most=True, unit="s"),
    ]


def main() -> int:
    options = parse()
    if options.measure:
        sys.stdout.write(json.dumps(measure(options.measure, options)))
        return 0
    results: dict[str, dict[str, Any]] = {}
    arguments = [
        f"--{name}={getattr(options, name)}" for name in ("rounds", "documents", "samples")
    ]
    sys.stdout.write(
        "| work | first touch (s) | to Megatron | warm (s) | processor (s) | peak (MB) | same |\n"
    )
    sys.stdout.write("| --- |" + " ---: |" * 6 + "\n")
    with tempfile.TemporaryDirectory() as directory:
        if options.megatron:
            arguments.append(f"--compiled={compile_library(options.megatron, Path(directory))}")
        for names in (["maps"], ["blend", "blend-portable"]):
            reference = run(f"{names[0]}-megatron", arguments) if options.megatron else None
            for name in names:
                results[name] = run(name, arguments)
                sys.stdout.write(row(name, results[name], reference) + "\n")
            if reference:
                sys.stdout.write(row(f"{names[0]}-megatron", reference, reference) + "\n")
            sys.stdout.flush()
    return verdict("index_maps", checks(results))


if __name__ == "__main__":
    sys.exit(main())
