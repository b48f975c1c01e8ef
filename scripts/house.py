"""Metrics of the code's structure, the "house", and checks of their goals.

    python scripts/house.py            print the figures
    python scripts/house.py --run      run a short quickstart too, and count what rank 0 loads
    python scripts/house.py --json     print JSON, with everything that each figure counted
    python scripts/house.py --goals    exit with 1 when a goal is missed

Only files that git tracks count. Figures of imports include imports in functions and under
TYPE_CHECKING. A module that imports another counts once, however often it does, and a name that a
package's __init__.py exports counts as that package.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FLOORS = "tests/architecture/floors.toml"
HOUSE = ("megacore", "tasks", "flows")
"""Top-level folders whose packages are ordered by floors."""
CODE = (*HOUSE, "scripts", "benchmarks", "tests")
RANK_ENTRY = "megacore.ranks.pretrain"
"""Main module of a rank that trains."""
HOPS = (
    "flows.pretrain:pretrain",
    "tasks._stage_runner:stage",
    "tasks.train:train",
    "megacore.ranks.stages:train",
    "megacore.cluster.start:start_ranks",
    "megacore.launch.supervise:supervise",
    "megacore.launch.guard:main",
    f"{RANK_ENTRY}:pretrain",
    "megacore.ranks.rank:run_rank",
    "megacore.train.loop:run",
    "megacore.train.step:step",
    "megacore.engine.native:update",
    "megacore.optim.adam:step",
)
"""Files through which calls pass from the flow to the optimizer step, with the function in each."""
QUICKSTART = (
    "train.train_iters=4",
    "train.eval_interval=4",
    "train.eval_iters=1",
    "checkpoint.save_interval=4",
    "data.tokenizer.vocab_size=512",
    "evaluate.max_samples=16",
    "export.max_test_samples=8",
)
"""Overrides that make the quickstart short."""
HOOK = """
import atexit, os, sys

def write(process=os.getpid()):
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if (os.getpid(), os.environ.get("RANK"), name) == (process, "0", {entry!r}):
        names = [name for name in sys.modules if name.partition(".")[0] == "megacore"]
        files = [getattr(sys.modules[name], "__file__", None) for name in ("__main__", *names)]
        with open({output!r}, "w") as file:
            file.write("\\n".join(sorted(filter(None, {{*files}}))))

def leave(code, _exit=os._exit):
    write()
    _exit(code)

atexit.register(write)
os._exit = leave  # ranks end with os._exit, which skips atexit
"""
"""Source of a run's sitecustomize.py, which writes the files that rank 0 has loaded when it
ends."""


class HouseError(Exception):
    """A figure cannot be counted; the message is one sentence."""


@dataclass(frozen=True)
class Figure:
    """One number, its goal, and the items that it counted."""

    name: str
    value: int
    at_most: int | None = None
    items: tuple[str, ...] = ()
    listed: bool = False
    """True if the items are printed in text output too, not only in JSON."""

    @property
    def missed(self) -> bool:
        """True if the value is beyond its goal."""
        return self.at_most is not None and self.value > self.at_most

    def __str__(self) -> str:
        goal = f"   at most {self.at_most}" * (self.at_most is not None) + ": missed" * self.missed
        lines = [f"{self.name:<46}{self.value:>8,}{goal}", *(self.items if self.listed else ())]
        return "\n    ".join(lines)


class Source(NamedTuple):
    """A Python file and its syntax tree."""

    path: Path
    lines: list[str]
    tree: ast.Module

    @property
    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Every function and method of the file."""
        kinds = ast.FunctionDef | ast.AsyncFunctionDef
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))


@dataclass(frozen=True)
class House:
    """A repository: its files, and the packages of its table of floors, lowest first."""

    root: Path
    files: tuple[Path, ...]
    floors: tuple[str, ...]

    @classmethod
    def read(cls, root: Path) -> "House":
        """Read the house at `root`; without git, as in an unpacked archive, every file counts.

        Raises:
            HouseError: git or the table of floors cannot be read.
        """
        command = ["git", "-C", str(root), "ls-files", "-z"]
        try:
            if (root / ".git").exists():
                listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                paths = {root / name for name in listing.split("\0")}
            else:
                paths = {path for folder in CODE for path in (root / folder).rglob("*")}
            table = tomllib.loads((root / FLOORS).read_text(encoding="utf-8"))["floors"]
            floors = tuple(name for name, _ in table)
        except (OSError, subprocess.CalledProcessError) as error:
            raise HouseError(f"the repository in {root} cannot be read: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise HouseError(f"{FLOORS} is no table of names and purposes: {error!r}") from error
        files = (path for path in sorted(paths) if path.is_file() and path.suffix != ".pyc")
        return cls(root, tuple(path.relative_to(root) for path in files), floors)

    def below(self, *folders: str) -> tuple[Path, ...]:
        """Return the files in top-level folders."""
        return tuple(path for path in self.files if path.parts[0] in folders)

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """Every Python file of the code. Raises HouseError for one that does not parse."""
        sources = []
        for path in (path for path in self.below(*CODE) if path.suffix == ".py"):
            text = (self.root / path).read_text(encoding="utf-8")
            try:
                sources.append(Source(path, text.splitlines(), ast.parse(text)))
            except SyntaxError as error:
                raise HouseError(f"{path}:{error.lineno} does not parse: {error.msg}") from error
        return tuple(sources)

    @cached_property
    def modules(self) -> dict[str, Source]:
        """Modules by dotted name, except those of tests; a package is its __init__.py."""
        named = {}
        for source in self.sources:
            parts = source.path.with_suffix("").parts
            if parts[0] != "tests":
                named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = source
        return named

    @cached_property
    def imports(self) -> dict[tuple[str, str], int]:
        """Pairs of a module and a module that it imports, with the line of an import."""
        lines = {}
        for importer, source in self.modules.items():
            for name, line in imported(source):
                while name and name not in self.modules:
                    name = name.rpartition(".")[0]
                if name not in ("", importer):
                    lines[importer, name] = line
        return lines


def imported(source: Source) -> Iterator[tuple[str, int]]:
    """Yield the full name of each import of a file, `from a import b` as a.b, and its line."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = [*source.path.parts[: -node.level]] if node.level else []
            parts += [node.module] if node.module else []
            yield from ((".".join([*parts, alias.name]), node.lineno) for alias in node.names)


def sizes(house: House) -> Iterator[Figure]:
    """Count files of every kind, and lines including blank ones and comments."""
    files = house.below("megacore")
    lines = {path: len((house.root / path).read_bytes().splitlines()) for path in files}
    python = [path for path in lines if path.suffix == ".py"]
    modules = [path for path in python if path.name != "__init__.py"]
    small = tuple(f"{path}: {lines[path]}" for path in modules if lines[path] < 60)
    yield Figure("files in megacore", len(files), 370)
    yield Figure("lines in megacore", sum(lines.values()))
    yield Figure("lines of Python in megacore", sum(lines[path] for path in python))
    yield Figure("modules in megacore, without __init__.py", len(modules))
    yield Figure("modules under 60 lines", len(small), 40, small)


def neighbours(house: House) -> Iterator[Figure]:
    """Count modules of megacore with exactly one importer, which is in the same folder.

    An __init__.py is not counted as such a module, but counts as an importer. Scripts and
    benchmarks are importers too, tests are not.
    """
    importers: dict[str, list[Source]] = {}
    for importer, module in house.imports:
        importers.setdefault(module, []).append(house.modules[importer])
    single = {}
    for name, (path, lines, _) in house.modules.items():
        folders = [each.path.parent for each in importers.get(name, [])]
        if path.parts[0] == "megacore" and path.name != "__init__.py" and folders == [path.parent]:
            single[f"{path} by {importers[name][0].path.name}"] = len(lines)
    yield Figure("modules with a single importer, next to them", len(single), 45, tuple(single))
    yield Figure("their lines", sum(single.values()))


def package(module: str) -> str:
    """Return the floor of a module: train for megacore.train.loop, errors for megacore.errors."""
    first, _, rest = module.partition(".")
    return rest.partition(".")[0] if first == "megacore" and rest else first


def floors(house: House) -> Iterator[Figure]:
    """Count folders of megacore, its imports across packages, and violations of their order.

    For imports, a root module such as errors.py is a package. An import in megacore, tasks or flows
    goes up when the table has its target above the importer, or lacks one of the two;
    megacore/__init__.py is below all. A package whose imports lead back to it is in a cycle.
    """
    packages = {path.parts[1] for path in house.below("megacore") if len(path.parts) > 2}
    level = {name: number for number, name in enumerate(("megacore", *house.floors))}
    across, upward = 0, []
    graph: dict[str, set[str]] = {}
    for (importer, module), line in house.imports.items():
        path, start, end = house.modules[importer].path, package(importer), package(module)
        if start == end or path.parts[0] not in HOUSE:
            continue
        across += path.parts[0] == "megacore"
        graph.setdefault(start, set()).add(end)
        if not {start, end} <= set(level) or level[end] > level[start]:
            upward.append(f"{path}:{line} imports {module}")
    cyclic = tuple(sorted(name for name in graph if name in reached(graph, name)))
    yield Figure("packages of megacore", len(packages), items=tuple(sorted(packages)))
    yield Figure("imports across packages of megacore", across)
    yield Figure("imports that go up", len(upward), 0, tuple(upward), listed=True)
    yield Figure("packages in a cycle", len(cyclic), 0, cyclic, listed=True)


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """Return every node that is reachable from `start` over one or more edges."""
    seen: set[str] = set()
    pending = [start]
    while pending:
        new = graph.get(pending.pop(), set()) - seen
        seen |= new
        pending += new
    return seen


def smells(house: House) -> Iterator[Figure]:
    """Count long lines, functions and files in all Python code, including tests.

    The decorators of a function are not counted as its lines.
    """
    wide = 0
    functions, files = [], []
    for source in house.sources:
        wide += sum(len(line) > 100 for line in source.lines)
        if len(source.lines) > 600:
            files.append(f"{source.path}: {len(source.lines)}")
        for node in source.functions:
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > 80:
                functions.append(f"{source.path}:{node.lineno} {node.name}: {length}")
    yield Figure("lines over 100 columns", wide)
    yield Figure("functions over 80 lines", len(functions), items=tuple(functions), listed=True)
    yield Figure("files over 600 lines", len(files), items=tuple(files), listed=True)


def signatures(house: House) -> Iterator[Figure]:
    """Count functions of megacore with a parameter whose type is or contains RunConfig."""

    def types(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
        arguments = (each for each in ast.walk(node.args) if isinstance(each, ast.arg))
        return " ".join(ast.unparse(each.annotation) for each in arguments if each.annotation)

    matches = tuple(
        f"{source.path}:{node.lineno} {node.name}"
        for source in house.sources
        if source.path.parts[0] == "megacore"
        for node in source.functions
        if "RunConfig" in types(node)
    )
    yield Figure("signatures that take a whole RunConfig", len(matches), items=matches)


def hops(house: House, path: Iterable[str] = HOPS) -> Iterator[Figure]:
    """Count the files through which calls pass from flow to optimizer step; check the path.

    Each file must define the named function. An earlier file of the path must import its module,
    pass the module's name to a launcher, or call the function as a method of an object.
    """
    broken: list[str] = []
    before: list[str] = []
    for module, function in (hop.split(":") for hop in path):
        source = house.modules.get(module)
        if source is None:
            broken.append(f"{module} is not there: correct HOPS in scripts/house.py")
            continue
        if function not in (node.name for node in source.functions):
            broken.append(f"{source.path} defines no {function}")
        if before and not any(refers(house, name, module, function) for name in before):
            broken.append(f"{source.path}: no file before it imports {module} or calls {function}")
        before.append(module)
    yield Figure("files from the flow to the optimizer step", len(before), 13, tuple(path))
    yield Figure("broken links between them", len(broken), 0, tuple(broken), listed=True)


def refers(house: House, name: str, module: str, function: str) -> bool:
    """Return True if module `name` imports `module`, names it in a string, or calls `function`."""
    nodes = [*ast.walk(house.modules[name].tree)]
    strings = {node.value for node in nodes if isinstance(node, ast.Constant)}
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    methods = {node.attr for node in called if isinstance(node, ast.Attribute)}
    return (name, module) in house.imports or module in strings or function in methods


def loaded(root: Path) -> Iterator[Figure]:
    """Count the Python files of megacore in sys.modules of rank 0 when a short training ends.

    The rank's main module and each __init__.py count, compiled modules do not.

    Raises:
        HouseError: the run failed.
    """
    with tempfile.TemporaryDirectory(prefix="house-") as name:
        output, log, workspace = (Path(name, each) for each in ("loaded", "log", "workspace"))
        hook = HOOK.format(entry=RANK_ENTRY, output=str(output))
        Path(name, "sitecustomize.py").write_text(hook, encoding="utf-8")
        search = os.pathsep.join(filter(None, [name, str(root), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": search, "MEGACORE_WORKSPACE": str(workspace)}
        command = [sys.executable, "-m", "flows.pretrain", "--conf", "gpt2-tiny"]
        command += [word for value in QUICKSTART for word in ("-o", value)]
        with open(log, "wb") as file:
            code = subprocess.run(command, cwd=root, env=env, stdout=file, stderr=file).returncode
        if code != 0 or not output.exists():
            end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:])
            problem = f"exited with {code}" if code else f"had no rank 0 of {RANK_ENTRY}"
            raise HouseError(f"the quickstart {problem}; its log ends with\n{end}")
        paths = [Path(line) for line in output.read_text(encoding="utf-8").splitlines()]
    files = tuple(str(path.relative_to(root)) for path in paths if path.suffix == ".py")
    yield Figure("files of megacore that rank 0 loads", len(files), 140, files)


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Print the figures; return 1 for a missed goal, 2 when a figure cannot be counted."""
    parser = argparse.ArgumentParser(description="Print the figures of the house.")
    for option, text in {
        "--run": "run a short quickstart too, and count what rank 0 loads",
        "--json": "print JSON, with everything that each figure counted",
        "--goals": "exit with 1 when a goal is missed",
    }.items():
        parser.add_argument(option, action="store_true", help=text)
    options = parser.parse_args(arguments)
    try:
        house = House.read(root)
        counts = (sizes, neighbours, floors, smells, signatures, hops)
        figures = [figure for count in counts for figure in count(house)]
        figures += loaded(root) if options.run else ()
    except HouseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        keys = ("value", "at_most", "missed", "items")
        rows = {each.name: {key: getattr(each, key) for key in keys} for each in figures}
        print(json.dumps(rows, indent=2))
    else:
        print("\n".join(map(str, figures)))
    return int(options.goals and any(figure.missed for figure in figures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
