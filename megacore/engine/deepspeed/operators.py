"""DeepSpeed's compiled operators: built once before the ranks start, and loaded by the ranks.

They are in the workspace's `extensions`, one artifact for each operator, version of torch and of
DeepSpeed, Python and instruction set. `python -m megacore.ranks.operators --config run.json` builds
the operators that a job needs.
"""

import contextlib
import importlib.util
import logging
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

from megacore.artifact.build import StageKey, build_artifact, open_artifact
from megacore.artifact.files import read_object
from megacore.artifact.workspace import Workspace
from megacore.config.deepspeed import zero_of
from megacore.config.run import RunConfig
from megacore.errors import ArtifactError, ConfigError, LaunchError
from megacore.hardware import Hardware
from megacore.paths import glob, is_dir, is_file, rglob

Operator = Literal["cpu_adam", "async_io"]
OPERATORS: tuple[Operator, ...] = get_args(Operator)

REPORT_VARIABLE = "MEGACORE_OPERATORS"
"""Variable with the path of a file that maps each operator of a job to the reason why it is
missing, or null."""

_VERSION = 1
_BUILDERS = {"cpu_adam": ("CPUAdamBuilder",), "async_io": ("PinMemoryBuilder", "AsyncIOBuilder")}
"""Classes of `deepspeed.ops.op_builder`, in the order in which their libraries are loaded."""
_LINES = 5

_log = logging.getLogger(__name__)


def require_deepspeed(config: RunConfig) -> None:
    """Raise ConfigError if the run uses DeepSpeed and it is not installed."""
    option = "engine" if config.engine == "deepspeed" else "launch.kind"
    if (
        "deepspeed" in (config.engine, config.launch.kind)
        and importlib.util.find_spec("deepspeed") is None
    ):
        raise ConfigError(
            f"{option} is deepspeed, which is not installed: pip install megacore[deepspeed], or "
            f"set {option} to {'native' if option == 'engine' else 'torchrun'}"
        )


def needed_operators(config: RunConfig) -> tuple[Operator, ...]:
    """Return the operators that a run's ranks load.

    These are Adam for an offloaded optimizer, and NVMe access.
    """
    if config.engine != "deepspeed":
        return ()
    zero, needed = zero_of(config), list[Operator]()
    if zero.offload_optimizer != "none" and config.deepspeed.cpu_adam != "torch":
        needed.append("cpu_adam")
    if "nvme" in (zero.offload_optimizer, zero.offload_param):
        needed.append("async_io")
    return tuple(needed)


def operator_is_built(name: Operator) -> bool:
    """Return True if the workspace has the operator for this machine and these versions."""
    return _problem(name) is None


def operator_directories(config: RunConfig) -> list[Path]:
    """Return the directories of the built operators that a run's ranks load."""
    keys = [_key(name) for name in needed_operators(config) if operator_is_built(name)]
    return [Workspace.of().folder(key.stage) / key.key for key in keys]


def load_operators(config: RunConfig) -> frozenset[Operator]:
    """Load the operators that the configuration needs and the preparation built.

    Nothing is compiled here.

    Returns:
        The loaded operators. If `cpu_adam` is missing, torch's Adam must be used; a warning reports
            it.

    Raises:
        LaunchError: an operator that the run cannot do without is missing.
    """
    loaded = set[Operator]()
    for name in needed_operators(config):
        problem = _reported(name) or _problem(name)
        if problem is None:
            _load(name)
            loaded.add(name)
        elif name == "cpu_adam" and config.deepspeed.cpu_adam == "auto":
            _log.warning("torch's Adam updates what is offloaded to the CPU, for %s", problem)
        else:
            raise LaunchError(problem)
    return frozenset(loaded)


def build_operator(name: Operator) -> Path:
    """Compile an operator unless the workspace has it, and return its directory.

    If two processes request it at the same time, one waits.

    Raises LaunchError that names the missing program or the compiler's last lines.
    """
    from megacore.engine.deepspeed.join import import_deepspeed

    # pip installs ninja next to the interpreter, which may not be on PATH.
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}{os.pathsep}{Path(sys.executable).parent}"
    compiler = os.environ.get("CXX", "c++").split()[0]
    for program, package in ((compiler, "apt-get install g++"), ("ninja", "pip install ninja")):
        if shutil.which(program) is None:
            raise LaunchError(
                f"{_cannot(name)}: {program} is not installed: {package}{_otherwise(name)}"
            )
    import_deepspeed()
    key = _key(name)
    artifact, _ = build_artifact(
        Workspace.of().folder(key.stage), key, lambda directory: _compile(name, directory)
    )
    return artifact.directory


def _compile(name: Operator, directory: Path) -> Mapping[str, Any]:
    """Fill an empty directory with the operator's libraries, `<library>/<library>.so`."""
    builders = _builders(name)
    if not builders[-1].is_compatible():
        missing = (
            "libaio's headers are missing: apt-get install libaio-dev"
            if name == "async_io"
            else "unsupported here"
        )
        raise LaunchError(f"{_cannot(name)}: {missing}{_otherwise(name)}")
    _require_toolkit(name)
    with _environment(TORCH_EXTENSIONS_DIR=str(directory)):
        try:
            for builder in builders:
                builder.jit_load(verbose=False)
                builder.load()  # the next library needs this one's symbols
        except Exception as error:  # from torch, the compiler or the loader
            lines = [
                line.strip()
                for line in f"{error}\n{error.__cause__ or ''}".splitlines()
                if line.strip()
            ]
            raise LaunchError(
                f"{_cannot(name)}: {' | '.join(lines[-_LINES:])}: fix the "
                f"compiler{_otherwise(name)}"
            ) from error
    for path in rglob(directory, "*"):
        if is_file(path) and path.suffix != ".so":
            path.unlink()
    return {"libraries": [builder.name for builder in builders]}


def _require_toolkit(name: Operator) -> None:
    """Raise LaunchError if an operator for GPUs has no CUDA toolkit, whose headers it includes."""
    import torch
    from torch.utils import cpp_extension

    if name == "async_io" and torch.cuda.is_available() and cpp_extension.CUDA_HOME is None:
        raise LaunchError(
            f"{_cannot(name)}: the CUDA toolkit is missing: install that of CUDA "
            f"{torch.version.cuda} and set CUDA_HOME to it{_otherwise(name)}"
        )


def _load(name: Operator) -> None:
    """Make DeepSpeed's builders return the built libraries, so that nothing is compiled."""
    from megacore.engine.deepspeed.join import import_deepspeed

    import_deepspeed()
    from deepspeed.ops.op_builder.builder import OpBuilder

    key = _key(name)
    directory = Workspace.of().folder(key.stage) / key.key
    for builder in _builders(name):
        if builder.name not in OpBuilder._loaded_ops:
            spec = importlib.util.spec_from_file_location(
                builder.name, directory / builder.name / f"{builder.name}.so"
            )
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            OpBuilder._loaded_ops[builder.name] = module
        builder.load()


def _builders(name: Operator) -> list[Any]:
    from deepspeed.ops import op_builder

    return [getattr(op_builder, builder)() for builder in _BUILDERS[name]]


def _key(name: Operator) -> StageKey:
    hardware = Hardware.detect()
    parameters = {
        "operator": name,
        "torch": version("torch"),
        "deepspeed": version("deepspeed"),
        "python": sysconfig.get_config_var("SOABI"),
        "machine": platform.machine(),
        "cpu_flags": sorted(hardware.cpu_flags),  # it is compiled for this exact processor
        "device": hardware.device_type,
    }
    return StageKey("operator", _VERSION, parameters, {})


def _problem(name: Operator) -> str | None:
    """Return the reason why the operator cannot be loaded here, in one sentence, or None."""
    key = _key(name)
    folder = Workspace.of().folder(key.stage)
    try:
        open_artifact(folder / key.key)
    except ArtifactError:
        built = any(glob(folder, "[0-9a-f]*")) if is_dir(folder) else False
        other = " for this machine and these versions" if built else ""
        return (
            f"DeepSpeed's operator {name} is not built{other} in {folder}, and ranks do not "
            "compile: build it with `python -m megacore.ranks.operators --config "
            f"run.json`{_otherwise(name)}"
        )
    return None


def _reported(name: Operator) -> str | None:
    """Return the reason for a missing operator from the report of this job's preparation."""
    path = os.environ.get(REPORT_VARIABLE)
    if path is None:
        return None
    report: dict[str, str | None] = read_object(Path(path))
    return report.get(name)


def _cannot(name: Operator) -> str:
    return f"DeepSpeed's operator {name} cannot be compiled"


def _otherwise(name: Operator) -> str:
    return ", or set deepspeed.cpu_adam to torch" if name == "cpu_adam" else ", or offload to cpu"


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    previous = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
