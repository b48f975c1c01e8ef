"""Table of planted faults, and the script that plants them in a copy of the repository."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.architecture._source import ROOT


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "plant_faults", ROOT / "scripts" / "plant_faults.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_fault_changes_its_file_and_names_existing_tests(script: ModuleType) -> None:
    faults = script.read_faults()
    assert len(faults) >= 60
    for fault in faults:
        source = (ROOT / fault.file).read_text(encoding="utf-8")
        planted = fault.planted(source)
        assert planted != source
        ast.parse(planted)
        assert fault.tests
        assert all((ROOT / path).exists() for path in fault.tests)


def test_faults_are_in_most_packages(script: ModuleType) -> None:
    packages = {Path(fault.file).parts[:2] for fault in script.read_faults()}
    assert len(packages) >= 24


def test_caught_and_missed_faults_are_told_apart(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "repository"
    (repository / "tests").mkdir(parents=True)
    (repository / "sums.py").write_text("def add(a, b):\n    return a + b\n\n\nUNUSED = 1\n")
    (repository / "tests" / "test_sums.py").write_text(
        "from sums import add\n\n\ndef test_sum():\n    assert add(1, 2) == 3\n"
    )
    subprocess.run(["git", "init", "-q"], cwd=repository, check=True)
    monkeypatch.setattr(script, "ROOT", repository)
    fault = script.Fault("sum", "sums.py", "a + b", "a - b", "wrong value", ("tests",))
    assert script.plant(fault, "test", whole=False).caught_by == "tests/test_sums.py::test_sum"
    harmless = script.Fault("unused", "sums.py", "UNUSED = 1", "UNUSED = 2", "none", ("tests",))
    assert script.plant(harmless, "test", whole=True).caught_by is None


def test_a_text_that_is_not_unique_is_refused(script: ModuleType) -> None:
    fault = script.Fault("twice", "sums.py", "a", "b", "wrong value", ("tests",))
    with pytest.raises(ValueError, match="contains 'a' 2 times"):
        fault.planted("a = a")
