"""Habits that keep the code testable: no print, no globals, types, one place for each name."""

import ast
import re
from pathlib import Path

import pytest

from megacore.artifact.workspace import FOLDERS
from tests.architecture._source import ROOT, python_files, repository_files, tree
from tests.conftest import OVERLOOKED

TOP_LEVEL = {
    "directories": {
        ".ci",
        "benchmarks",
        "conf",
        "deploy",
        "docs",
        "flows",
        "megacore",
        "scripts",
        "tasks",
        "tests",
    },
    "files": {
        ".dockerignore",
        ".gitignore",
        ".pre-commit-config.yaml",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "Dockerfile",
        "LICENSE",
        "MANIFEST.in",
        "Makefile",
        "README.md",
        "constraints.txt",
        "docker-compose.yml",
        "mkdocs.yml",
        "prefect.yaml",
        "pyproject.toml",
        "setup.py",
    },
}

TEST_FOLDERS_WITHOUT_PACKAGE = {
    "architecture",
    "benchmarks",
    "deploy",
    "faults",
    "flows",
    "gpu_emulated",
    "hosts",
    "parity",
    "scripts",
    "security",
    "tasks",
}


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        node
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_only_command_lines_print() -> None:
    prints = [
        f"{path}:{node.lineno}"
        for path in python_files("megacore", "tasks", "flows")
        if path.parent.name != "cli" and path.name != "_cli.py"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert prints == []


def test_no_function_declares_globals() -> None:
    statements = [
        f"{path}:{node.lineno}"
        for path in python_files("megacore", "tasks", "flows", "scripts")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Global)
    ]
    assert statements == []


def test_no_markers_of_unfinished_work_remain() -> None:
    markers = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
    marked_lines = [
        f"{path}:{number}: {line.strip()}"
        for path in python_files("megacore", "tasks", "flows", "scripts")
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1)
        if markers.search(line)
    ]
    assert marked_lines == []


def test_no_test_changes_the_clock_of_other_threads() -> None:
    """A test that replaces a clock replaces the name `time` in the module that it tests."""
    clock = re.compile(r"setattr\(\s*(?:[\w.]+\.)?time,|setattr\(\s*[\"']time\.")
    replaced = [
        f"{path}:{text.count(chr(10), 0, found.start()) + 1}"
        for path in python_files("tests")
        for text in [(ROOT / path).read_text(encoding="utf-8")]
        for found in clock.finditer(text)
    ]
    assert replaced == []


def test_stage_folders_are_spelled_in_one_place() -> None:
    assert FOLDERS == {
        "collect": "corpora",
        "curate": "curated",
        "search": "searches",
        "decontaminate": "decontaminated",
        "punkt": "corpora",
        "tokenizer": "tokenizers",
        "tokenize-shard": "tokenized",
        "tokenize": "tokenized",
        "blend": "tokenized",
        "index": "index",
        "contamination": "contamination",
        "train": "runs",
        "evaluate-checkpoint": "scores",
        "evaluate": "evaluations",
        "zeroshot": "zeroshot",
        "convert": "exports",
        "lm-eval": "lm-eval",
        "publish": "published",
        "push": "pushed",
        "operator": "extensions",
        "pretrained": "pretrained",
        "dataset": "datasets",
        "examples": "examples",
        "finetune": "finetuned",
        "finetune-export": "exports",
        "finetune-publish": "published",
        "find-batch-size": "batch-sizes",
    }
    joined = [
        f"{path}:{node.lineno} / {node.right.value!r}"
        for path in python_files("megacore", "tasks", "flows", "scripts")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Div)
        and isinstance(node.right, ast.Constant)
        # Hugging Face's libraries name the files in their caches.
        if node.right.value in FOLDERS.values() and ast.unparse(node.left) != "cache_directory"
    ]
    assert joined == [], "use Workspace.folder(stage)"


@pytest.mark.parametrize("package", ["megacore", "tasks", "flows"])
def test_every_function_is_annotated(package: str) -> None:
    untyped = [
        f"{path}:{node.lineno} {node.name}"
        for path in python_files(package)
        for node in functions(path)
        if node.returns is None and node.name != "__init__"
    ]
    assert untyped == []


def test_the_top_level_has_only_the_listed_entries() -> None:
    files = repository_files()
    assert {path.parts[0] for path in files if len(path.parts) > 1} <= TOP_LEVEL["directories"]
    assert {path.name for path in files if len(path.parts) == 1} <= TOP_LEVEL["files"]


def test_test_folders_mirror_the_packages() -> None:
    packages = {
        path.name for path in (ROOT / "megacore").iterdir() if path.is_dir()
    } | TEST_FOLDERS_WITHOUT_PACKAGE
    folders = {path.parts[1] for path in python_files("tests") if len(path.parts) > 2}
    assert folders - packages == set()


def test_slow_tests_are_collected_where_only_they_run(pytestconfig: pytest.Config) -> None:
    """`make test`, which collects all files, checks all of them."""
    assert not pytestconfig.stash[OVERLOOKED], "extend _SLOW in tests/conftest.py"


def test_files_name_no_author_paths_package_indexes_or_merge_markers() -> None:
    slash = "/"
    foreign = re.compile(
        rf"(?<![\w.~}}]){slash}(?:work|root|home{slash}\w+|tmp){slash}"
        r"|python" + r"hosted\.org|pypi" + r"\.org|--(?:extra-)?index" + r"-url|^<{7} |^>{7} ",
        re.MULTILINE,
    )
    matches = []
    for path in repository_files():
        if path.suffix in {".png", ".npy", ".bin", ".idx", ".svg"} or path.name == "LICENSE":
            continue
        match = foreign.search((ROOT / path).read_text(encoding="utf-8"))
        if match:
            matches.append(f"{path}: {match.group()!r}")
    assert matches == []
