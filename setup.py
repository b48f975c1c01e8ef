"""Build of the C++ extensions when the package is installed; the rest is in pyproject.toml."""

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

# A fused multiply-add would round differently from the reference.
EXACT = ["-O3", "-ffp-contract=off"]
FAST = ["-O3", "-fno-math-errno"]
# Kernels need the threads of torch's own OpenMP library, which torch includes on Linux.
OPENMP = ["-fopenmp"] if sys.platform == "linux" and platform.machine() == "x86_64" else []


class BuildInParallel(build_ext):
    """Build command that compiles all files of all modules in parallel, if their inputs changed."""

    def build_extensions(self) -> None:
        compile_in_turn = self.compiler.compile
        with ThreadPoolExecutor(os.cpu_count()) as pool:

            def compile(sources, output_dir=None, depends=(), **options):
                def compile_one(source):
                    [target] = self.compiler.object_filenames([source], output_dir=output_dir)
                    if self.force or newer_group([source, *depends], target, "newer"):
                        compile_in_turn([source], output_dir=output_dir, **options)
                    return target

                return list(pool.map(compile_one, sources))

            self.compiler.compile = compile
            super().build_extensions()


def extension(module: Path, compile_args: list[str], link_args: list[str]) -> Pybind11Extension:
    """Return an extension module of all C++ files in a folder."""
    return Pybind11Extension(
        ".".join(module.parts),
        sorted(map(str, module.parent.glob("_*.cpp"))),
        depends=sorted(map(str, module.parent.glob("_*.h"))),
        cxx_std=17,
        extra_compile_args=compile_args,
        extra_link_args=link_args,
    )


setup(
    cmdclass={"build_ext": BuildInParallel},
    ext_modules=[
        extension(Path("megacore/kernels/cpu/_kernels"), FAST + OPENMP, OPENMP),
        extension(Path("megacore/data/_compiled"), EXACT, []),
    ],
    options={"build_ext": {"parallel": 2}},
)
