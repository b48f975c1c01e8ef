"""Compiles the C++ helpers when the package is installed; everything else is in pyproject.toml."""

from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

HEADERS = sorted(map(str, Path("megacore/data").glob("_*.h")))


def extension(name: str) -> Pybind11Extension:
    """A compiled module of megacore.data."""
    return Pybind11Extension(
        f"megacore.data.{name}",
        [f"megacore/data/{name}.cpp"],
        depends=HEADERS,
        cxx_std=17,
        # A fused multiply-add would round otherwise than the reference does.
        extra_compile_args=["-O3", "-ffp-contract=off"],
    )


setup(ext_modules=[extension(name) for name in ("_index_helpers", "_gather", "_sentence_samples")])
