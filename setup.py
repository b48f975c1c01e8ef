"""Compiles the C++ helpers when the package is installed; everything else is in pyproject.toml."""

from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

# -ffp-contract=off: a fused multiply-add would round otherwise than the reference does.
setup(
    ext_modules=[
        Pybind11Extension(
            "megacore.data._index_helpers",
            ["megacore/data/_index_helpers.cpp"],
            depends=sorted(map(str, Path("megacore/data").glob("_*.h"))),
            cxx_std=17,
            extra_compile_args=["-O3", "-ffp-contract=off"],
        ),
        Pybind11Extension(
            "megacore.data._gather", ["megacore/data/_gather.cpp"], cxx_std=17, extra_compile_args=["-O3"]
        ),
    ]
)
