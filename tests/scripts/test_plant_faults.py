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


@pytest.fixture
def repository(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a small repository that the script copies."""
    root = tmp_path / "repository"
    (root / "tests").mkdir(parents=True)
    (root / "sums.py").write_text("def add(a, b):\n    return a + b\n\n\nUNUSED = 1\n")
    (root / "tests" / "test_sums.py").write_text(
        "from sums import add\n\n\ndef test_sum():\n    assert add(1, 2) == 3\n"
    )
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    monkeypatch.setattr(script, "ROOT", root)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # pytest starts in half the time
    return root


@pytest.mark.usefixtures("repository")
def test_failed_tests_and_failed_imports_catch_a_fault(script: ModuleType) -> None:
    fault = script.Fault("sum", "sums.py", "a + b", "a - b", "wrong value", ("tests",))
    assert script.plant(fault, "test", whole=False).caught_by == "tests/test_sums.py::test_sum"
    unimportable = script.Fault("syntax", "sums.py", "a + b", "a +", "syntax", ("tests",))
    assert script.plant(unimportable, "test", whole=False).caught_by == "tests/test_sums.py"


def test_missed_faults_meet_all_tests_in_a_repository_but_those_of_the_script(
    script: ModuleType, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared").mkdir()
    monkeypatch.delenv("MEGACORE_SHARED", raising=False)
    (repository / script.OWN_TESTS).parent.mkdir()
    (repository / script.OWN_TESTS).write_text("def test_texts():\n    assert False\n")
    (repository / "tests" / "test_copy.py").write_text(
        "import os\nimport subprocess\n\n\ndef test_files():\n"
        "    assert 'sums.py' in subprocess.check_output(['git', 'ls-tree', 'HEAD'], text=True)\n"
        f"    assert os.environ['MEGACORE_SHARED'] == {str(tmp_path / 'shared')!r}\n"
    )
    tests = ("tests/test_copy.py",)
    harmless = script.Fault("unused", "sums.py", "UNUSED = 1", "UNUSED = 2", "none", tests)
    assert script.plant(harmless, "test", whole=True).caught_by is None


@pytest.mark.usefixtures("repository")
def test_a_run_without_tests_is_an_error(script: ModuleType) -> None:
    fault = script.Fault("sum", "sums.py", "a + b", "a - b", "wrong value", ("sums.py",))
    with pytest.raises(RuntimeError, match=r"sums\.py .* ended with exit code 5"):
        script.plant(fault, "test", whole=False)


def test_unknown_names_are_refused(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["plant_faults.py", "--list", "nothing"])
    with pytest.raises(SystemExit):
        script.main()
    assert "has no nothing" in capsys.readouterr().err


def test_a_text_that_is_not_unique_is_refused(script: ModuleType) -> None:
    fault = script.Fault("twice", "sums.py", "a", "b", "wrong value", ("tests",))
    with pytest.raises(ValueError, match="contains 'a' 2 times"):
        fault.planted("a = a")
