"""scripts/house.py on small trees with known figures, and its call path on this repository."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests._limits import HANG

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
FLOORS = 'floors = [["errors", "Errors"], ["low", "Base"], ["high", "Top"], ["tasks", "Stages"]]\n'
Tree = Callable[..., Path]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import house

    return house


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Provide a function that writes files and adds them to a new git repository."""

    def write(files: dict[str, str], floors: str = FLOORS) -> Path:
        for name, text in {"tests/architecture/floors.toml": floors, **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text, encoding="utf-8")
        for command in (["init", "-q"], ["add", "-A"]):
            subprocess.run(["git", "-C", str(tmp_path), *command], check=True, capture_output=True)
        return tmp_path

    return write


def figures_of(house: ModuleType, count: str, root: Path, *more: Any) -> dict[str, Any]:
    """Return the figures of one function by name."""
    return {figure.name: figure for figure in getattr(house, count)(house.House.read(root), *more)}


def values(figures: dict[str, Any]) -> list[int]:
    return [figure.value for figure in figures.values()]


def test_sizes_count_files_tracked_by_git(house: ModuleType, tree: Tree) -> None:
    root = tree(
        {
            "megacore/__init__.py": '"""Doc."""\n',
            "megacore/low/short.py": "x = 1\n" * 59,
            "megacore/low/long.py": "x = 1\n" * 60,
            "megacore/low/add.cpp": "int x;\n" * 5,
            "tasks/train.py": "x = 1\n",
        }
    )
    (root / "megacore" / "low" / "built.so").write_text("x\n")
    figures = figures_of(house, "sizes", root)
    assert values(figures) == [4, 125, 120, 2, 1]
    assert figures["modules under 60 lines"].items == ("megacore/low/short.py: 59",)


def test_sizes_count_all_files_without_git(house: ModuleType, tree: Tree) -> None:
    root = tree({"megacore/low/a.py": "x = 1\n"})
    (root / "megacore" / "low" / "b.py").write_text("x = 1\n")
    (root / "megacore" / "low" / "__pycache__").mkdir()
    (root / "megacore" / "low" / "__pycache__" / "b.pyc").write_text("x\n")
    assert figures_of(house, "sizes", root)["files in megacore"].value == 1
    shutil.rmtree(root / ".git")
    assert figures_of(house, "sizes", root)["files in megacore"].value == 2


def test_neighbours_are_modules_with_one_importer_in_their_directory(
    house: ModuleType, tree: Tree
) -> None:
    root = tree(
        {
            "megacore/low/__init__.py": "from megacore.low.exported import x\n",
            "megacore/low/exported.py": "x = 1\n",
            "megacore/low/one.py": "from . import helper, twice, shared\nfrom .helper import x\n",
            "megacore/low/helper.py": "x = 1\ny = 1\n",
            "megacore/low/twice.py": "import megacore.low.one\n",
            "megacore/low/shared.py": "x = 1\n",
            "megacore/low/elsewhere.py": "x = 1\n",
            "megacore/low/measured.py": "x = 1\n",
            "megacore/low/tested.py": "x = 1\n",
            "megacore/high/two.py": "def f():\n    from megacore.low import shared, elsewhere\n",
            "megacore/low/three.py": "from megacore.low import measured, tested\n",
            "benchmarks/speed.py": "from megacore.low.measured import x\n",
            "tests/test_low.py": "from megacore.low.tested import x\n",
            "tasks/train.py": "from tasks import _plots\n",
            "tasks/_plots.py": "x = 1\n",
        }
    )
    figures = figures_of(house, "neighbours", root)
    assert figures["modules with a single importer, next to them"].items == (
        "megacore/low/exported.py by __init__.py",
        "megacore/low/helper.py by one.py",
        "megacore/low/one.py by twice.py",
        "megacore/low/tested.py by three.py",
        "megacore/low/twice.py by one.py",
    )
    assert values(figures) == [5, 1 + 2 + 2 + 1 + 1]


def test_floors_list_upward_imports_and_cycles(house: ModuleType, tree: Tree) -> None:
    root = tree(
        {
            "megacore/__init__.py": "__version__ = '1'\n",
            "megacore/errors.py": "",
            "megacore/low/a.py": (
                "from megacore import errors\n"
                "from ..errors import Wrong\n"
                "if TYPE_CHECKING:\n"
                "    from megacore.high.b import B\n"
                "start('megacore.high.c')\n"
            ),
            "megacore/low/b.py": "def f():\n    import tasks.train\n",
            "megacore/high/b.py": "from ..low import a\nfrom megacore.low import b\n",
            "megacore/high/c.py": "from .b import B\nimport torch\n",
            "megacore/cellar/d.py": "from megacore import errors, __version__\n",
            "tasks/train.py": "from megacore.high import b\n",
            "scripts/run.py": "from megacore.high import b\n",
        }
    )
    figures = figures_of(house, "floors", root)
    assert values(figures) == [3, 7, 4, 3]
    assert figures["imports that go up"].items == (
        "megacore/cellar/d.py:1 imports megacore.errors",
        "megacore/cellar/d.py:1 imports megacore",
        "megacore/low/a.py:4 imports megacore.high.b",
        "megacore/low/b.py:2 imports tasks.train",
    )
    assert figures["packages in a cycle"].items == ("high", "low", "tasks")
    assert figures["packages in a cycle"].missed


def test_smells_are_listed_with_their_first_line(house: ModuleType, tree: Tree) -> None:
    body = "    x = 1\n"
    root = tree(
        {
            "megacore/low/a.py": f"@cache\ndef f():\n{body * 79}@cache\ndef g():\n{body * 80}",
            "tests/test_a.py": "x = 1\n" * 600,
            "scripts/b.py": "x = 1\n" * 600 + "#" * 100 + "\n" + "#" * 101 + "\n",
            "docs/conf.py": "x = 1\n" * 700,
        }
    )
    figures = figures_of(house, "smells", root)
    assert values(figures) == [1, 1, 1]
    assert str(figures["functions over 80 lines"]).endswith("\n    megacore/low/a.py:83 g: 81")
    assert figures["files over 600 lines"].items == ("scripts/b.py: 602",)


def test_signatures_count_each_function_once(house: ModuleType, tree: Tree) -> None:
    text = (
        "def f(a: RunConfig, *, b: 'dict[str, RunConfig] | None' = None) -> None: ...\n"
        "def g(a: int = RunConfig.size) -> RunConfig: ...\n"
        "class C:\n"
        "    config: RunConfig\n"
        "    async def h(self, *configs: config.RunConfig) -> None: ...\n"
    )
    root = tree({"megacore/low/a.py": text, "tasks/train.py": text})
    (figure,) = figures_of(house, "signatures", root).values()
    assert figure.items == ("megacore/low/a.py:1 f", "megacore/low/a.py:5 h")


def test_hops_count_the_call_path_and_its_broken_links(house: ModuleType, tree: Tree) -> None:
    root = tree(
        {
            "flows/pretrain.py": "from tasks import train\ndef pretrain(): train.train()\n",
            "tasks/train.py": "def train(): start('megacore.rank')\n",
            "megacore/rank.py": "def main(engine): engine.update()\n",
            "megacore/native.py": "class Engine:\n    def update(self): ...\n",
            "megacore/adam.py": "def step(): ...\n",
        }
    )
    path = [
        "flows.pretrain:pretrain",
        "tasks.train:train",
        "megacore.rank:main",
        "megacore.native:update",
    ]
    assert values(figures_of(house, "hops", root, path)) == [4, 0]
    path += ["megacore.adam:step", "megacore.rank:leave", "megacore.gone:run"]
    figures = figures_of(house, "hops", root, path)
    assert values(figures) == [6, 3]
    assert figures["broken links between them"].items == (
        "megacore/adam.py: no file before it imports megacore.adam or calls step",
        "megacore/rank.py defines no leave",
        "megacore.gone is not there: correct HOPS in scripts/house.py",
    )


def test_call_path_of_this_repository_has_no_broken_link(house: ModuleType) -> None:
    repository = house.House.read(house.ROOT)
    length, broken = house.hops(repository)
    assert broken.items == ()
    assert length.value == len(house.HOPS)
    assert house.RANK_ENTRY in repository.modules


FLOW = """
import os, subprocess, sys
from pathlib import Path
assert sys.argv[1:3] == ["--conf", "gpt2-tiny"] and "train.train_iters=4" in sys.argv
Path(os.environ["MEGACORE_WORKSPACE"]).mkdir()
for entry in ENTRIES:
    for rank in ("1", "0"):
        subprocess.run([sys.executable, "-m", entry], check=True, env={**os.environ, "RANK": rank})
"""
RANK = """
import os
if os.environ["RANK"] == "0":
    import megacore.low.used, json
    if os.fork() == 0:
        import megacore.low.forked
        os._exit(0)
os._exit(0)
"""


def rank_tree(tree: Tree, entry: str, *entries: str) -> Path:
    file = f"{entry.replace('.', '/')}.py"
    files = {f"{Path(file).parent}/__init__.py": "", file: RANK, "megacore/evaluate.py": RANK}
    files |= {f"megacore/low/{name}.py": "" for name in ("used", "forked", "unused")}
    files |= {f"{folder}/__init__.py": "" for folder in ("flows", "megacore", "megacore/low")}
    return tree({"flows/pretrain.py": FLOW.replace("ENTRIES", repr([*entries])), **files})


def test_loaded_counts_the_modules_of_rank_0(house: ModuleType, tree: Tree) -> None:
    entry = house.RANK_ENTRY
    root = rank_tree(tree, entry, entry, "megacore.evaluate")
    (figure,) = house.loaded(root)
    folder = entry.rpartition(".")[0].replace(".", "/")
    files = [f"{folder}/__init__.py", f"{folder}/pretrain.py", "megacore/__init__.py"]
    assert {*figure.items} == {*files, "megacore/low/__init__.py", "megacore/low/used.py"}
    assert figure.value == 5


def test_run_without_a_rank_0_is_an_error(house: ModuleType, tree: Tree) -> None:
    root = rank_tree(tree, house.RANK_ENTRY, "megacore.evaluate")
    with pytest.raises(house.HouseError, match=f"had no rank 0 of {house.RANK_ENTRY}"):
        list(house.loaded(root))


def test_failed_run_is_reported_with_its_log(
    house: ModuleType, tree: Tree, capsys: Capture
) -> None:
    flow = "print('first')\nraise SystemExit('no space left')\n"
    root = tree({"flows/__init__.py": "", "flows/pretrain.py": flow})
    assert house.main(["--run"], root) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the quickstart exited with 1; its log ends with\n")
    assert "no space left" in error


def test_missed_goal_gives_exit_code_1(
    house: ModuleType,
    tree: Tree,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.setattr(house, "hops", lambda house: ())
    root = tree({"megacore/low/a.py": "", "megacore/high/b.py": "from megacore.low import a\n"})
    assert house.main(["--goals"], root) == 0
    assert f"{'imports that go up':<46}       0   at most 0\n" in capsys.readouterr().out
    (root / "megacore/low/a.py").write_text("import megacore.high.b\n")
    assert house.main([], root) == 0
    assert house.main(["--goals"], root) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"{'imports that go up':<46}       1   at most 0: missed" in lines
    assert "    megacore/low/a.py:1 imports megacore.high.b" in lines
    assert not any("rank 0" in line for line in lines)


def test_json_contains_the_figures(house: ModuleType, tree: Tree, capsys: Capture) -> None:
    root = tree({"megacore/low/a.py": "import tasks.train\n", "tasks/train.py": ""})
    assert house.main(["--json"], root) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["files in megacore"] == {
        "value": 1,
        "at_most": 370,
        "missed": False,
        "items": [],
    }
    assert figures["imports that go up"] == {
        "value": 1,
        "at_most": 0,
        "missed": True,
        "items": ["megacore/low/a.py:1 imports tasks.train"],
    }


@pytest.mark.parametrize(
    ("files", "floors", "message"),
    [
        (
            {"megacore/a.py": "x = (\n"},
            FLOORS,
            "megacore/a.py:1 does not parse: '(' was never closed",
        ),
        ({}, "floors = 3\n", "tests/architecture/floors.toml is no table of names and purposes"),
        ({}, "[floors\n", "tests/architecture/floors.toml is no table of names and purposes"),
    ],
)
def test_invalid_input_is_reported_in_one_line(
    house: ModuleType,
    tree: Tree,
    capsys: Capture,
    files: dict[str, str],
    floors: str,
    message: str,
) -> None:
    assert house.main([], tree(files, floors)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


def test_directory_without_a_repository_is_refused(
    house: ModuleType, tmp_path: Path, capsys: Capture
) -> None:
    assert house.main([], tmp_path) == 2
    assert f"error: the repository in {tmp_path} cannot be read" in capsys.readouterr().err


@pytest.mark.slow
def test_script_runs_in_any_directory_with_only_the_standard_library(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-I", "-S", str(SCRIPTS / "house.py"), "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["files in megacore"]["value"] > 100
