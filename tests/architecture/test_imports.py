"""Imports go one way: flows → tasks → megacore.

Each heavy package has one place, and light modules stay light.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests._limits import HANG
from tests.architecture._source import ROOT, imports_of, python_files, tree

LIGHT = (
    "megacore.artifact",
    "megacore.config",
    "megacore.corpus",
    "megacore.data.index_maps",
    "megacore.engine.deepspeed.operators",
    "megacore.foreign.accelerate",
    "megacore.foreign.deepspeed_claims",
    "megacore.cluster.hosts.agent",
    "megacore.cluster.hosts.fanout",
    "megacore.launch.guard",
    "megacore.config.hostfile",
    "megacore.launch.supervise",
    "megacore.observe.events",
    "megacore.pipeline_parallel.partition",
    "megacore.pipeline_parallel.schedules",
    "megacore.tokenizer",
)
"""Modules that a task imports only to look something up, or that run next to the training."""

ONLY_IN = {
    "transformers": ("megacore/convert/", "megacore/finetune/"),
    "deepspeed": ("megacore/engine/deepspeed", "megacore/foreign/"),
    "apex": ("megacore/kernels/",),
    "tree_sitter": ("megacore/adopt/",),
    "tree_sitter_bash": ("megacore/adopt/",),
    "accelerate": ("megacore/finetune/", "megacore/foreign/"),
    "sacrebleu": ("megacore/finetune/",),
    "rouge_score": ("megacore/finetune/",),
    "sklearn": ("megacore/finetune/",),
    "scipy": ("megacore/finetune/",),
    "wandb": ("tasks/_wandb.py",),
    "datasets": ("megacore/corpus/", "megacore/finetune/"),
}


def violations(
    packages: tuple[str, ...], forbidden: tuple[str, ...], *, at_import_only: bool = False
) -> list[str]:
    return [
        f"{path}:{item.line} imports {item.module}"
        for path in python_files(*packages)
        for item in imports_of(path, *forbidden)
        if item.at_import or not at_import_only
    ]


def test_megacore_does_not_import_prefect_mlflow_or_the_other_packages() -> None:
    assert python_files("megacore")
    assert (
        violations(("megacore",), ("prefect", "mlflow", "tasks", "flows", "scripts", "tests")) == []
    )


def test_tasks_do_not_import_flows() -> None:
    assert violations(("tasks",), ("flows", "scripts", "tests")) == []


def test_flows_do_not_import_mlflow_torch_or_transformers() -> None:
    assert violations(("flows",), ("mlflow", "torch", "transformers", "scripts", "tests")) == []


def test_tasks_and_flows_import_without_torch() -> None:
    assert violations(("tasks", "flows"), ("torch",), at_import_only=True) == []


@pytest.mark.parametrize("package", ONLY_IN)
def test_optional_packages_have_one_place_and_are_imported_lazily(package: str) -> None:
    for path in python_files("megacore", "tasks", "flows"):
        for item in imports_of(path, package):
            assert str(path).startswith(ONLY_IN[package]), (
                f"{path}:{item.line} imports {item.module}"
            )
            assert not item.at_import, f"{path}:{item.line} imports {item.module} at module level"


def test_errors_of_the_file_system_are_no_absence() -> None:
    """pathlib's methods take EIO and EACCES for a missing file, since Python 3.14 at the latest."""
    silent = {"exists", "is_file", "is_dir", "is_symlink", "glob", "rglob"}
    found = [
        f"{path}:{node.lineno} calls pathlib's {node.attr} instead of megacore.paths"
        for path in python_files("megacore", "tasks", "flows")
        if path != Path("megacore/paths.py")
        for node in _methods(tree(path))
        if node.attr in silent
    ]
    assert found == []


def _methods(module: ast.Module) -> Iterator[ast.Attribute]:
    """Yield the methods that a module calls, and those of Path that it passes on."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if ast.unparse(node.func.value) not in ("glob", "os.path"):
                yield node.func
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "Path":
            yield node


def printed(script: str) -> list[str]:
    """Return the words that a script prints in a separate process."""
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=HANG
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_do_not_import_torch(module: str) -> None:
    assert (ROOT / Path(*module.split("."))).is_dir() or (
        ROOT / f"{module.replace('.', '/')}.py"
    ).is_file()
    heavy = (
        "{'torch', 'transformers', 'datasets', 'prefect', 'mlflow', 'deepspeed', 'accelerate'} & "
        "set(sys.modules)"
    )
    script = f"import sys, {module}; print(*sorted({heavy}))"
    assert printed(script) == [], f"what import {module} also imports"


def test_a_cached_flow_imports_neither_prefects_server_nor_mlflow() -> None:
    """Prefect's clients take the class of the temporary server without the server's module."""
    script = (
        "import sys, flows.pretrain; from tasks import _temporary_server; "
        "_temporary_server._replace_server_module(); "
        "from prefect.server.api.server import SubprocessASGIServer as used; "
        "assert used is _temporary_server.TemporaryServer; "
        "print(*sorted({'mlflow', 'sqlalchemy', 'docket', 'torch', 'pandas'} & set(sys.modules)))"
    )
    assert printed(script) == [], "what a flow also imports"


def test_a_rank_starts_without_torchs_checkpoints() -> None:
    """The writer of checkpoints takes half as long to import as torch, and the first step waits."""
    script = (
        "import sys, megacore.ranks.pretrain, megacore.ranks.process, megacore.train.loop; "
        "print(*sorted({'torch.distributed.checkpoint', 'sympy', 'torch._dynamo'} & "
        "set(sys.modules)))"
    )
    assert printed(script) == [], "what the start of a training also imports"


_OWN = ("megacore", "tasks", "flows", "tests")


def test_imported_names_exist() -> None:
    """Tests are not type-checked, and some of their files are imported only by slow tests."""
    missing = [
        f"{path}:{node.lineno} imports {node.module}.{alias.name}"
        for path in python_files("tests")
        for node in _imports_from(path)
        for alias in node.names
        if not _exists(f"{node.module}.{alias.name}")
    ]
    assert missing == []


def _imports_from(path: Path) -> Iterator[ast.ImportFrom]:
    """Yield the statements that import from the repository. Expressions are not searched."""
    todo: list[ast.AST] = [tree(path)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_OWN):
            yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, block, ())
            todo += inner if isinstance(inner, list) else ()


@cache
def _exists(name: str) -> bool:
    """Return True if a dotted name is a module of the repository, or defined in one."""
    if _file_of(name) is not None:
        return True
    module, _, defined = name.rpartition(".")
    file = _file_of(module)
    if file is None:
        return False
    return {defined, "__getattr__"} & _defined_names(file) != set()


def _file_of(module: str) -> Path | None:
    path = Path(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py", path.with_suffix(".pyi")):
        if (ROOT / file).is_file():
            return file
    return path if (ROOT / path).is_dir() else None


@cache
def _defined_names(file: Path) -> set[str]:
    """Return the names that a module binds when it is imported."""
    names: set[str] = set()
    todo: list[ast.AST] = [] if (ROOT / file).is_dir() else list(tree(file).body)
    while todo:
        node = todo.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Import() | ast.ImportFrom():
                names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case _:
                todo += ast.iter_child_nodes(node)
    return names
