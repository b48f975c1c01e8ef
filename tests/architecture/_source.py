"""The repository as data: its files, and the imports of each module."""

import ast
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOUSE = ("megacore", "tasks", "flows")
"""Top-level packages with floors."""
FLOORS = Path("tests/architecture/floors.toml")


@dataclass(frozen=True)
class Import:
    """An imported module, and whether the import runs when the importing module is imported."""

    module: str
    at_import: bool
    line: int


@dataclass(frozen=True)
class Step:
    """An import of another package; root modules such as errors.py count as packages."""

    importer: str
    imported: str
    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.imported} into {self.importer}"


@cache
def repository_files() -> tuple[Path, ...]:
    """Return every file that git tracks or would track, relative to the root.

    In an unpacked archive, return every file.
    """
    if not (ROOT / ".git").exists():
        return tuple(path.relative_to(ROOT) for path in sorted(ROOT.rglob("*")) if path.is_file())
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    return tuple(Path(name) for name in sorted(set(names)) if name and (ROOT / name).is_file())


@cache
def python_files(*packages: str) -> tuple[Path, ...]:
    """Return the Python files below the given top-level directories."""
    return tuple(
        path for path in repository_files() if path.suffix == ".py" and path.parts[0] in packages
    )


@cache
def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """Return all imports of `path`.

    Imports in a function or under TYPE_CHECKING do not run at import.
    """
    result: list[Import] = []

    def visit(node: ast.AST, at_import: bool) -> None:
        if isinstance(node, ast.Import):
            result.extend(Import(alias.name, at_import, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(path, node)
            result.append(Import(module, at_import, node.lineno))
            result.extend(
                Import(f"{module}.{alias.name}", at_import, node.lineno) for alias in node.names
            )
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        later = function or _is_type_checking(node)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):
                visit(child, at_import and not later)

    visit(tree(path), True)
    return tuple(result)


def imports_of(path: Path, *packages: str) -> list[Import]:
    """Return the imports of `path` from one of the packages."""
    return [item for item in imports(path) if item.module.split(".")[0] in packages]


@cache
def floors() -> dict[str, str]:
    """Return the purpose of each package by its name, lowest first."""
    table = tomllib.loads((ROOT / FLOORS).read_text(encoding="utf-8"))["floors"]
    purposes: dict[str, str] = dict(table)
    assert len(purposes) == len(table), f"{FLOORS} names a package twice"
    return purposes


def steps() -> list[Step]:
    """Return every import in megacore, tasks or flows that leads to another package of them."""
    return [step for path in python_files(*HOUSE) for step in steps_of(path)]


def steps_of(path: Path) -> list[Step]:
    """Return the imports of `path` that lead to another package, one per line and package."""
    importer = _package(path.with_suffix("").parts)
    imported = imports_of(path, *HOUSE)
    lines = {(item.line, _package(tuple(item.module.split(".")))) for item in imported}
    pairs = ((line, package) for line, package in sorted(lines) if package != importer)
    return [Step(importer, package, path, line) for line, package in pairs]


def _package(parts: tuple[str, ...]) -> str:
    """Return the name in the table of floors; megacore for exports of megacore/__init__.py."""
    if parts[0] != "megacore":
        return parts[0]
    return parts[1] if parts[1:] and parts[1] in floors() else "megacore"


def _absolute(path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = path.parts[: len(path.parts) - node.level]
    return ".".join((*package, *(node.module or "").split("."))).rstrip(".")


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
