"""Compilers of a host, CUDA of its driver, torch and nvcc, apex, and DeepSpeed's operators.

The functions named `look_at_…` inspect the host they run on; torch and DeepSpeed are imported only
by the functions that need them. The other functions evaluate the hosts' answers.
"""

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from megacore.doctor.findings import Facts, Finding, Judgement
from megacore.doctor.machine import APEX_MODULES
from megacore.hardware import driver_cuda, installed_version, unsupported_accelerator
from megacore.paths import glob, is_dir, is_file

_TORCH_OF_CUDA = {"12.8": "torch==2.10.*", "13.0": "torch==2.13.*", "13.2": "torch==2.15.*"}
"""Newest torch on the package index whose default build is for a version of CUDA."""
_DRIVERS = {12: 525, 13: 580}
"""Oldest driver for all builds of torch for a major version of CUDA (minor version compatibility).
"""
_SECONDS = 3.5
"""Time limit of a compiler."""
_NO_OPERATOR = "deepspeed_not_implemented"
_AIO = "#include <libaio.h>\nint main() { return io_submit(0, 0, nullptr); }\n"


def look_at_toolchain() -> dict[str, Any]:
    """Return C++ compiler, ninja, nvcc, installed toolkits, the driver's CUDA, libaio and apex.

    None stands for what is missing.
    """
    compiler = _compiler()
    home = cuda_home()
    nvcc = None if home is None else str(Path(home, "bin", "nvcc"))
    return {
        "compiler": compiler,
        "compiler_version": _first_line(compiler, "-dumpfullversion", "-dumpversion"),
        "ninja": _first_line(_ninja(), "--version"),
        "cuda_home": home,
        "nvcc": nvcc and release_of(_output(nvcc, "--version")),
        "toolkits": sorted(str(path.parents[1]) for path in glob("/usr/local", "cuda-*/bin/nvcc")),
        "driver": driver_release(),
        "libaio": compiler is not None and _links_libaio(compiler),
        "apex": [name for name in APEX_MODULES if importlib.util.find_spec(name) is not None],
        "other_apex": installed_version("apex"),
        "accelerator": unsupported_accelerator(),
    }


def driver_release() -> str | None:
    """Return the newest CUDA that the driver runs, such as 12.8; None without a driver."""
    driver = driver_cuda()
    return None if driver is None else f"{driver // 1000}.{driver % 1000 // 10}"


def cuda_home() -> str | None:
    """Return the directory of the CUDA toolkit that torch and apex would compile with, or None."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    program = shutil.which("nvcc")
    home = named or (str(Path(program).parents[1]) if program else "/usr/local/cuda")
    return home if is_file(Path(home, "bin", "nvcc")) else None


def release_of(output: str) -> str | None:
    """Return the version in the output of `nvcc --version`, such as "13.0"; None if it has none."""
    match = re.search(r"release (\d+\.\d+)", output)
    return match and match[1]


def _compiler() -> str | None:
    """Return the C++ compiler that builds extensions here: CXX, or the first one on the PATH."""
    names = [os.environ["CXX"].split()[0]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next(filter(None, map(shutil.which, names)), None)


def _ninja() -> str | None:
    # pip installs ninja next to the interpreter, which may not be on PATH.
    return shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))


def _output(*command: str) -> str:
    """Return the output of a program; empty if it fails."""
    try:
        return subprocess.run(
            command, input="", capture_output=True, text=True, timeout=_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _first_line(program: str | None, *arguments: str) -> str | None:
    return program and next(iter(_output(program, *arguments).splitlines()), "unknown version")


def _links_libaio(compiler: str) -> bool:
    command = [compiler, "-x", "c++", "-", "-laio", "-o", os.devnull]
    try:
        result = subprocess.run(
            command, input=_AIO.encode(), capture_output=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return result.returncode == 0


def toolchains(facts: Facts) -> Finding | None:
    """Check compilers and apex, and that driver, torch's CUDA and nvcc fit together."""
    judgement = Judgement("toolchain")
    for host, value in facts.answered("toolchain"):
        if value["accelerator"] is not None:
            judgement.error(host, f"on {host}, {value['accelerator']}")
        cuda, works = (facts.probes[host].get("torch", key) for key in ("cuda_build", "apex"))
        judgement.note(host, _described(value, cuda))
        if value["compiler"] is None:
            judgement.warn(
                host,
                f"{host} has no C++ compiler, which torch.compile and DeepSpeed's operators need: "
                "install one (Debian: apt-get install g++)",
            )
        uses_deepspeed = facts.needs is not None and facts.needs.deepspeed
        if value["ninja"] is None and uses_deepspeed:
            judgement.warn(
                host,
                f"{host} has no ninja, which compiles DeepSpeed's operators: pip install ninja",
            )
        if value["other_apex"] is not None and not value["apex"]:
            judgement.warn(
                host,
                f"the package apex {value['other_apex']} on {host} has none of NVIDIA's kernels "
                "(PyPI's apex is another project): pip uninstall apex, and run "
                "scripts/install_apex.sh",
            )
        broken = [name for name in value["apex"] if name not in works] if works is not None else []
        if broken:
            judgement.warn(
                host,
                f"apex's module {broken[0]} on {host} cannot be imported, since it was compiled "
                "for another torch: run scripts/install_apex.sh again",
            )
        # Without torch's answer, the check of the kernels reports why.
        if "torch" in facts.probes[host].values and value["accelerator"] is None:
            driver = value["driver"]
            problem = cuda_problem(host, driver, cuda, value["nvcc"], value["toolkits"])
            add = judgement.error if is_too_old(driver, cuda) else judgement.warn
            if problem is not None:
                add(host, problem)
    judgement.unanswered(facts, "toolchain", "warning", "")
    return judgement.finding()


def _described(value: dict[str, Any], cuda: str | None) -> str:
    compiler = value["compiler"] and f"{Path(value['compiler']).name} {value['compiler_version']}"
    return ", ".join(
        (
            compiler or "no C++ compiler",
            f"ninja {value['ninja']}" if value["ninja"] else "no ninja",
            f"nvcc {value['nvcc']} ({value['cuda_home']})" if value["nvcc"] else "no nvcc",
            f"torch for CUDA {cuda}" if cuda else "torch without CUDA",
            f"driver for CUDA {value['driver']}" if value["driver"] else "no NVIDIA driver",
            f"apex {', '.join(value['apex'])}" if value["apex"] else "no apex",
            "libaio" if value["libaio"] else "no libaio",
        )
    )


def is_too_old(driver: str | None, cuda: str | None) -> bool:
    """Return True if a driver for CUDA `driver` cannot run a torch that is built for `cuda`."""
    return driver is not None and cuda is not None and _major(driver) < _major(cuda)


def _major(version: str) -> int:
    return int(version.split(".")[0])


def torch_for(driver: str) -> str | None:
    """Return the newest torch, as a requirement, that a driver for this CUDA runs, or None."""
    versions = [cuda for cuda in _TORCH_OF_CUDA if not is_too_old(driver, cuda)]
    return _TORCH_OF_CUDA[versions[-1]] if versions else None


def cuda_problem(
    host: str, driver: str | None, torch: str | None, nvcc: str | None, toolkits: list[str]
) -> str | None:
    """Compare the CUDA versions of a host, and return the problem and which version to take.

    Within a major version every driver runs every torch. Compilers are compared exactly, as apex
    compares them.

    Args:
        host: name of the host.
        driver: newest CUDA that the driver runs; None without a driver.
        torch: CUDA that torch is built for; None for a build without CUDA.
        nvcc: version of the CUDA compiler; None without one.
        toolkits: directories of the installed toolkits, `…/cuda-<version>`.

    Returns:
        One sentence, or None if the versions fit.
    """
    if driver is not None and (torch is None or is_too_old(driver, torch)):
        wanted = torch_for(driver)
        build = "without CUDA" if torch is None else f"for CUDA {torch}"
        if wanted is None:
            oldest = min(_DRIVERS)
            return (
                f"the driver of {host} runs CUDA {driver}, and every torch that megacore takes "
                f"needs CUDA {oldest}: install a driver {_DRIVERS[oldest]} or newer"
            )
        newer = "" if torch is None else f", or install a driver {_DRIVERS[_major(torch)]} or newer"
        return (
            f"torch on {host} is built {build}, and its driver runs CUDA {driver}: take make venv "
            f"TORCH='{wanted}'{newer}"
        )
    if torch is None or nvcc is None or nvcc == torch:
        return None
    installed = next((path for path in toolkits if path.endswith(f"cuda-{torch}")), None)
    remedy = (
        f"set CUDA_HOME={installed}"
        if installed is not None
        else f"install the CUDA toolkit {torch} and set CUDA_HOME to it"
    )
    other = _TORCH_OF_CUDA.get(nvcc)
    if other is not None and not is_too_old(driver, nvcc):
        remedy += f", or take the torch of this nvcc (make venv TORCH='{other}')"
    return (
        f"torch on {host} is built for CUDA {torch} and nvcc is {nvcc}, and apex and DeepSpeed's "
        f"operators are compiled only with the same: {remedy}"
    )


def look_at_operators(workspace: Path) -> dict[str, Any]:
    """Return DeepSpeed's operators: by name, why it cannot be compiled, and where it is built.

    An empty result means that DeepSpeed is not installed. Only its builders are imported: the whole
    package takes as long as all other checks.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return {}
    import torch

    from megacore.engine.deepspeed.operators import OPERATORS, operator_is_built

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    cache = _extensions_directory()
    operators: dict[str, Any] = {}
    with _builders() as (builders, installed):
        for name, builder in builders.items():
            built: str | None
            if name in installed:
                built = "installed"
            elif name in OPERATORS and is_dir(workspace) and operator_is_built(name):
                built = "workspace"
            else:
                built = "torch's cache" if is_file(cache / name / f"{name}.so") else None
            operators[name] = {"problem": _problem_of(builder), "built": built}
    return operators


def _problem_of(builder: Any) -> str | None:
    """Return why an operator cannot be compiled here, in DeepSpeed's words, or None."""
    messages: list[str] = []
    builder.warning = messages.append
    try:
        if builder.is_compatible(verbose=True):
            return None
    except Exception as error:  # DeepSpeed's builders raise errors of many types
        messages = [str(error)]
    return " ".join((messages or ["unsupported here"])[0].split()).removeprefix(f"{builder.name} ")


@contextmanager
def _builders() -> Iterator[tuple[dict[str, Any], set[str]]]:
    """Import DeepSpeed's builders without its other modules, until the end of the context.

    Yields:
        The builders by operator, and the operators that were compiled when it was installed.
    """
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    root = (spec.submodule_search_locations or [""])[0]
    before = _take_deepspeed()
    for name, folder in (("deepspeed", Path(root)), ("deepspeed.ops", Path(root, "ops"))):
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    try:
        accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
        build = importlib.import_module("deepspeed.git_version_info")
        all_operators = importlib.import_module("deepspeed.ops.op_builder.all_ops").ALL_OPS
        builders = {name: value for name, value in all_operators.items() if name != _NO_OPERATOR}
        same = build.accelerator_name == accelerator._name
        yield builders, {name for name, done in build.installed_ops.items() if done and same}
    finally:
        _take_deepspeed()
        sys.modules |= before


def _take_deepspeed() -> dict[str, ModuleType]:
    """Remove DeepSpeed's modules from those that are imported, and return them."""
    names = [name for name in sys.modules if name.split(".")[0] == "deepspeed"]
    return {name: sys.modules.pop(name) for name in names}


def _extensions_directory() -> Path:
    """Return the directory in which torch caches compiled extensions."""
    import torch
    from torch.utils import cpp_extension

    if named := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(named)
    accelerator = f"cu{torch.version.cuda.replace('.', '')}" if torch.version.cuda else "cpu"
    version = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    root = cpp_extension.get_default_build_root()
    return Path(root, f"{version}_{accelerator}")


def operators(facts: Facts) -> Finding | None:
    """Check that the operators of DeepSpeed that the run needs can be compiled, and list all."""
    judgement = Judgement("operators")
    needed = facts.needs.operators if facts.needs is not None else ()
    for host, value in facts.answered("operators"):
        if not value:
            judgement.note(host, "DeepSpeed is not installed")
            continue
        built = [f"{name} ({item['built']})" for name, item in value.items() if item["built"]]
        compatible = [name for name, item in value.items() if not item["problem"]]
        others = [f"{name} ({item['problem']})" for name, item in value.items() if item["problem"]]
        judgement.note(
            host,
            f"built: {', '.join(built) or 'none'}; compatible: {', '.join(compatible) or 'none'}; "
            f"not compatible: {', '.join(others) or 'none'}",
        )
        for name in needed:
            item = value.get(name)
            problem = "unknown to this DeepSpeed" if item is None else item["problem"]
            if problem is not None and not (item and item["built"]):
                remedy = (
                    "apt-get install libaio-dev, or offload to cpu"
                    if name == "async_io"
                    else "install a C++ compiler and ninja, or set deepspeed.cpu_adam to torch"
                )
                judgement.error(
                    host,
                    f"the run needs DeepSpeed's operator {name}, which cannot be compiled on "
                    f"{host} ({problem}): {remedy}",
                )
    judgement.unanswered(facts, "operators", "warning", "")
    return judgement.finding()
