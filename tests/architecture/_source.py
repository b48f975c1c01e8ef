"""The repository as data: its files, and what each module imports."""

import ast
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = ("megacore", "tasks", "flows", "scripts", "benchmarks", "tests")


@dataclass(frozen=True)
class Import:
    """One imported module, and whether the import runs when the importing module is imported."""

    module: str
    at_import: bool
    line: int


@cache
def repository_files() -> tuple[Path, ...]:
    """Every file that git tracks or would track, relative to the root; in an unpacked archive, every file."""
    if not (ROOT / ".git").exists():
        return tuple(path.relative_to(ROOT) for path in sorted(ROOT.rglob("*")) if path.is_file())
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return tuple(Path(name) for name in sorted(set(names)) if name and (ROOT / name).is_file())


@cache
def python_files(*packages: str) -> tuple[Path, ...]:
    """The Python files below the given top-level directories."""
    return tuple(path for path in repository_files() if path.suffix == ".py" and path.parts[0] in packages)


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def imports(path: Path) -> list[Import]:
    """Everything `path` imports; what stands in a function or under TYPE_CHECKING does not run at import."""
    found: list[Import] = []

    def visit(node: ast.AST, at_import: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, at_import, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(path, node)
            found.append(Import(module, at_import, node.lineno))
            found.extend(Import(f"{module}.{alias.name}", at_import, node.lineno) for alias in node.names)
        later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_type_checking(node)
        for child in ast.iter_child_nodes(node):
            visit(child, at_import and not later)

    visit(tree(path), True)
    return found


def imports_of(path: Path, *packages: str) -> list[Import]:
    """The imports of `path` that come from one of the packages."""
    return [item for item in imports(path) if item.module.split(".")[0] in packages]


def _absolute(path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = path.parts[: len(path.parts) - node.level]
    return ".".join((*package, *(node.module or "").split("."))).rstrip(".")


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
