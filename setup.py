"""Compiles the C++ parts when the package is installed; everything else is in pyproject.toml."""

import os
import platform
import sys
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

DATA = Path("megacore/data")
KERNELS = Path("megacore/kernels/cpu")
# A fused multiply-add would round otherwise than the reference does.
EXACT = ["-O3", "-ffp-contract=off"]
FAST = ["-O3", "-fno-math-errno"]
# Kernels need the threads of torch's own OpenMP library, which it brings on Linux.
OPENMP = ["-fopenmp"] if sys.platform == "linux" and platform.machine() == "x86_64" else []


def extension(source: Path, compile_args: list[str], link_args: list[str]) -> Pybind11Extension:
    """A compiled module beside its source."""
    return Pybind11Extension(
        ".".join(source.with_suffix("").parts),
        [str(source)],
        depends=sorted(map(str, source.parent.glob("_*.h"))),
        cxx_std=17,
        extra_compile_args=compile_args,
        extra_link_args=link_args,
    )


setup(
    options={"build_ext": {"parallel": os.cpu_count()}},
    ext_modules=[
        *(extension(source, EXACT, []) for source in sorted(DATA.glob("_*.cpp"))),
        *(extension(source, FAST + OPENMP, OPENMP) for source in sorted(KERNELS.glob("_*.cpp"))),
    ],
)
