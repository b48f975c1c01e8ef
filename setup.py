"""Compiles the C++ helpers when the package is installed; everything else is in pyproject.toml."""

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

# -ffp-contract=off: a fused multiply-add would round otherwise than the reference does.
setup(
    ext_modules=[
        Pybind11Extension(
            "megacore.data._index_helpers",
            ["megacore/data/_index_helpers.cpp"],
            cxx_std=17,
            extra_compile_args=["-O3", "-ffp-contract=off"],
        )
    ]
)
