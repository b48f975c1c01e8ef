"""The package stands on torch's public names, beside those of one table."""

import ast
from pathlib import Path

import pytest

import megacore.checkpoint
from megacore.checkpoint.metadata import PRIVATE_NAMES, private_name
from megacore.errors import CheckpointError

FILES = sorted(Path(megacore.checkpoint.__path__[0]).glob("*.py"))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def defined(tree: ast.Module) -> set[str]:
    """Return the names that a module gives to its own functions, classes and attributes."""
    kinds = ast.FunctionDef | ast.ClassDef
    names = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
    return names | {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def foreign(tree: ast.Module) -> list[str]:
    """Return the private names that a module takes from elsewhere, in imports and as attributes."""
    taken = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            module = getattr(node, "module", None) or ""
            names = [f"{module}.{alias.name}".strip(".") for alias in node.names]
            taken += [name for name in names if any(map(is_private, name.split(".")))]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            taken += [node.attr] if node.attr not in defined(tree) else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            texts = [str(getattr(argument, "value", "")) for argument in node.args[1:2]]
            taken += [text for text in texts if is_private(text)]
    return taken


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_this_torch_has_the_private_names(name: str) -> None:
    assert private_name(name).__name__ == name.rpartition(".")[2]


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_a_moved_name_is_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(name)
    file, purpose = PRIVATE_NAMES[name]
    with pytest.raises(CheckpointError) as caught:
        private_name(name)
    assert f"moved {name}, which megacore/checkpoint/{file} uses for {purpose}: " in str(
        caught.value
    )
    text = next(path for path in FILES if path.name == file).read_text(encoding="utf-8")
    assert f'private_name("{name}")' in text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_other_private_name_is_used(path: Path) -> None:
    assert foreign(ast.parse(path.read_text(encoding="utf-8"))) == []


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
def test_the_search_sees(line: str) -> None:
    assert len(foreign(ast.parse(line))) == 1
