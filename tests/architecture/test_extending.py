"""Agreement of docs/extending.md with the repository."""

import re
import tomllib
from itertools import pairwise

import pytest

from tests.architecture._source import FLOORS, ROOT, repository_files

PAGE = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
CODE = set(re.findall(r"`([^`\n]+)`", PAGE))
FOLDERS = ("megacore", "tasks", "flows", "tests", "scripts")
FOREIGN_NAMES = {"MASTER_ADDR", "MASTER_PORT", "grep"}
"""Names of torch and git that this code does not contain."""


def sections() -> dict[str, str]:
    """Return the text of each section by its heading."""
    parts = re.split(r"^## (.+)\n", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_named_file_and_module_exists() -> None:
    paths = {name for name in CODE if "/" in name and name.partition("/")[0] in FOLDERS}
    assert len(paths) > 80
    names = {path.name for path in repository_files()}
    bare = {name for name in CODE if re.fullmatch(r"\w+\.(py|pyi|cpp|h)", name)}
    modules = {name.removeprefix("python -m ") for name in CODE if name.startswith("python -m ")}
    assert {path for path in paths if not (ROOT / path).exists()} == set()
    assert bare - names == set()
    assert {
        name for name in modules if not (ROOT / f"{name.replace('.', '/')}.py").is_file()
    } == set()


def test_every_named_identifier_is_in_the_code() -> None:
    code = "\n".join(
        (ROOT / path).read_text(encoding="utf-8")
        for path in repository_files()
        if path.suffix in {".py", ".yaml"} and path.name != "test_extending.py"
    )
    names = {
        word for name in CODE if "/" not in name for word in re.findall(r"[A-Za-z]\w+|_\w+", name)
    }
    assert {"Stepper", "SUPPORTED_FIELDS", "LaunchKind", "run_rank", "sliding_window"} <= names
    missing = {name for name in names - FOREIGN_NAMES if not re.search(rf"\b{name}\b", code)}
    assert missing == set()


@pytest.mark.parametrize("number", range(9))
def test_each_change_has_its_files_its_test_and_an_example(number: int) -> None:
    change = list(sections().values())[number]
    files, test, example = re.split(r"\*\*(?:Test|Made that way):\*\*", change)
    assert "| file | what |" in files
    assert re.search(r"`tests/[\w/]+\.py`", test)
    assert example.strip()


def test_the_walk_is_the_path_that_house_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from house import HOPS

    walk = sections()["From the flow to the optimizer step"]
    paths = re.findall(r"^\d+\. `([\w/]+\.py)`", walk, re.MULTILINE)
    assert paths == [f"{hop.partition(':')[0].replace('.', '/')}.py" for hop in HOPS]


def test_the_page_states_the_number_of_files_of_a_family() -> None:
    files = [
        path
        for path in repository_files()
        if path.parts[0] in ("megacore", "tasks")
        and path.suffix == ".py"
        and '"bert"' in (ROOT / path).read_text(encoding="utf-8")
    ]
    assert f"prints {len(files)} files" in PAGE


def test_the_map_has_every_floor_in_order() -> None:
    table = tomllib.loads((ROOT / FLOORS).read_text(encoding="utf-8"))["floors"]
    level = {name: number for number, (name, _) in enumerate(table)}
    lines = re.findall(r"^ {6}(\w+(?:, \w+)*)  ", PAGE, re.MULTILINE)
    rows = [[level[name] for name in line.split(", ")] for line in lines]
    assert sorted(number for row in rows for number in row) == list(range(len(level) - 2))
    assert all(min(higher) > max(lower) for higher, lower in pairwise(rows))
