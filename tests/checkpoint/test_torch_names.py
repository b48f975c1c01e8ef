"""Tests that the package uses no private names of torch except those of `PRIVATE_NAMES`."""

import ast
from pathlib import Path

import pytest

import megacore.checkpoint
from megacore.checkpoint.metadata import PRIVATE_NAMES, private_name
from megacore.errors import CheckpointError

FILES = sorted(Path(megacore.checkpoint.__path__[0]).glob("*.py"))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def defined_names(tree: ast.Module) -> set[str]:
    """Return the names of the functions, classes and attributes that a module defines."""
    kinds = ast.FunctionDef | ast.ClassDef
    names = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
    return names | {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def foreign_private_names(tree: ast.Module) -> list[str]:
    """Return the private names of other modules that a module imports or uses as attributes."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            module = getattr(node, "module", None) or ""
            imports = [f"{module}.{alias.name}".strip(".") for alias in node.names]
            names += [name for name in imports if any(map(is_private, name.split(".")))]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            names += [node.attr] if node.attr not in defined_names(tree) else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            attributes = [str(getattr(argument, "value", "")) for argument in node.args[1:2]]
            names += [name for name in attributes if is_private(name)]
    return names


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_the_installed_torch_has_each_private_name(name: str) -> None:
    assert private_name(name).__name__ == name.rpartition(".")[2]


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_a_moved_private_name_is_reported_with_file_and_purpose(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(name)
    file, purpose = PRIVATE_NAMES[name]
    with pytest.raises(CheckpointError) as caught:
        private_name(name)
    assert f"moved {name}, which megacore/checkpoint/{file} uses for {purpose}: " in str(
        caught.value
    )
    code = next(path for path in FILES if path.name == file).read_text(encoding="utf-8")
    assert f'private_name("{name}")' in code


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_other_private_name_is_used(path: Path) -> None:
    assert foreign_private_names(ast.parse(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "line",
    [
        "from torch.distributed.checkpoint.filesystem import _StorageInfo",
        "from torch.distributed._shard import x",
        "import torch._utils",
        "torch._foreach_copy_(a, b)",
        "storage._checkpoint_offset",
        "getattr(storage, '_checkpoint_offset', None)",
    ],
)
def test_foreign_private_names_are_found_in_each_form(line: str) -> None:
    assert len(foreign_private_names(ast.parse(line))) == 1
