"""Order of packages: no import goes to a higher floor, and no imports form a circle."""

from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.architecture import _source
from tests.architecture._source import Step, floors, python_files, steps, steps_of


def test_exactly_the_packages_have_floors() -> None:
    files = python_files("megacore")
    packages = {path.parts[1] for path in files if len(path.parts) > 2}
    modules = {path.stem for path in files if len(path.parts) == 2} - {"__init__"}
    assert sorted(floors()) == sorted({*packages, *modules, "tasks", "flows"})


def test_every_floor_has_a_purpose() -> None:
    assert [name for name, purpose in floors().items() if len(purpose.split()) < 2] == []


def test_no_import_goes_up() -> None:
    level = {name: number for number, name in enumerate(("megacore", *floors()))}
    upward = [step for step in steps() if level[step.imported] > level[step.importer]]
    assert upward == [], "\n".join(["these imports go up:", *map(str, upward)])


def test_packages_do_not_import_each_other_in_a_circle() -> None:
    circle = circle_of(steps())
    assert circle == [], "\n".join(["these imports lead in a circle:", *map(str, circle)])


def circle_of(imports: list[Step]) -> list[Step]:
    """Return the imports that form a circle of packages, if there is one."""
    graph: dict[str, set[str]] = {}
    for step in imports:
        graph.setdefault(step.importer, set()).add(step.imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pairs = {(importer, imported) for imported, importer in pairwise(error.args[1])}
        return [step for step in imports if (step.importer, step.imported) in pairs]
    return []


def test_a_circle_is_reported_with_its_imports() -> None:
    forward = Step("plan", "train", Path("megacore/plan/memory.py"), 3)
    backward = Step("train", "plan", Path("megacore/train/loop.py"), 7)
    unrelated = Step("train", "errors", Path("megacore/train/loop.py"), 8)
    assert circle_of([forward, unrelated]) == []
    assert circle_of([forward, backward, unrelated]) == [forward, backward]
    assert str(backward) == "megacore/train/loop.py:7 imports plan into train"


def test_every_kind_of_import_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "launch" in floors()  # read and cached before ROOT changes
    path = Path("megacore", "plan", "every_kind_of_import.py")
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(
        "import megacore.launch.guard\n"
        "from megacore import __version__\n"
        "from megacore import errors\n"
        "from . import memory\n"
        "from .. import redact\n"
        "from ..train.loop import Trainer\n"
        "if TYPE_CHECKING:\n"
        "    from megacore.cli import main\n"
        "def later():\n"
        "    import flows.pretrain\n"
        'start("megacore.ranks.pretrain")\n'
        "import torch\n"
    )
    monkeypatch.setattr(_source, "ROOT", tmp_path)
    assert sorted((step.line, step.imported) for step in steps_of(path)) == [
        (1, "launch"),
        (2, "megacore"),
        (3, "errors"),
        (3, "megacore"),
        (5, "megacore"),
        (5, "redact"),
        (6, "train"),
        (8, "cli"),
        (10, "flows"),
    ]
