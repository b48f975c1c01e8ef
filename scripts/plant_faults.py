"""Plant one-line faults and report which of them the tests catch.

    python scripts/plant_faults.py [NAME ...] [--suite test|test-all] [--whole] [--jobs 2] [--list]

Each fault of `faults.toml` replaces one line in a copy of the repository. The tests listed with it
run first; a failure means that the fault is caught. With `--whole`, all tests of the suite but
those of this script run for a fault that they miss. The exit status is 1 if a fault is missed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("faults.toml")
OWN_TESTS = "tests/scripts/test_plant_faults.py"
"""Tests that fail with every fault, since the replaced text is gone."""
LIMIT = 1800.0
"""Seconds that the tests listed with a fault may take."""
WHOLE_LIMIT = 4 * 3600.0
"""Seconds that the complete suite may take, one test after the other."""
Suite = Literal["test", "test-all"]


@dataclass(frozen=True)
class Fault:
    """One changed line."""

    name: str
    file: str
    """Path relative to the root."""
    old: str
    """Text that occurs exactly once in the file."""
    new: str
    kind: str
    """Sort of mistake, for instance "off by one"."""
    tests: tuple[str, ...]
    """Paths of the tests that run first."""

    def planted(self, source: str) -> str:
        """Return the file's text with the fault.

        Raises:
            ValueError: `old` does not occur exactly once.
        """
        count = source.count(self.old)
        if count != 1:
            raise ValueError(
                f"{self.name}: {self.file} contains {self.old!r} {count} times: change faults.toml "
                "so that it occurs once"
            )
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """The result of one fault."""

    fault: Fault
    caught_by: str | None
    """First failed test; None if all tests passed."""
    seconds: float

    def __str__(self) -> str:
        verdict = f"caught by {self.caught_by}" if self.caught_by else "MISSED"
        fault = self.fault
        return f"{fault.name} ({fault.kind}, {fault.file}): {verdict}, {self.seconds:.0f} s"


def read_faults(path: Path = TABLE) -> list[Fault]:
    """Read the table of faults."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return [
        Fault(name, **{**values, "tests": tuple(values["tests"])}) for name, values in table.items()
    ]


def plant(fault: Fault, suite: Suite, *, whole: bool) -> Outcome:
    """Run the tests on a copy of the repository with one fault."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="megacore-fault-") as folder:
        copy = Path(folder) / "repository"
        _copy_repository(copy)
        target = copy / fault.file
        target.write_text(fault.planted(target.read_text(encoding="utf-8")), encoding="utf-8")
        caught_by = _first_failure(copy, fault.tests, suite, LIMIT)
        if caught_by is None and whole:
            tests = ("tests", f"--ignore={OWN_TESTS}")
            caught_by = _first_failure(copy, tests, suite, WHOLE_LIMIT)
    return Outcome(fault, caught_by, time.monotonic() - began)


def _copy_repository(target: Path) -> None:
    """Copy all files that git tracks, and the compiled modules, into a new git repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    compiled = (path.relative_to(ROOT).as_posix() for path in (ROOT / "megacore").rglob("*.so"))
    for name in (*filter(None, listing.split("\0")), *compiled):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    identity = ["-c", "user.name=plant_faults", "-c", "user.email="]
    for git in (["init", "-q"], ["add", "--all"], ["commit", "-q", "--no-gpg-sign", "-m", "copy"]):
        subprocess.run(["git", *identity, *git], cwd=target, check=True)


def _first_failure(directory: Path, tests: Sequence[str], suite: Suite, limit: float) -> str | None:
    """Run pytest in `directory` until a test fails; return that test.

    Raises:
        RuntimeError: pytest neither passed nor failed; for instance, no test was selected.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    # Without it, a file that cannot be imported is not counted as a failed test.
    command.append("--continue-on-collection-errors")
    selection = ["-m", "not slow and not long" if suite == "test" else "not long"]
    environment = {**os.environ, "PYTHONPATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}
    shared = Path(os.environ.get("MEGACORE_SHARED") or ROOT.parent / "shared").resolve()
    if shared.is_dir():
        environment["MEGACORE_SHARED"] = str(shared)
    try:
        result = subprocess.run(
            [*command, *selection],
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return f"a hang of more than {limit:.0f} s"
    if result.returncode == 0:
        return None
    if result.returncode != 1:
        raise RuntimeError(
            f"pytest {' '.join([*tests, *selection])} ended with exit code {result.returncode}:\n"
            f"{result.stdout[-2000:]}{result.stderr[-2000:]}"
        )
    failures = [
        line.split(" ", 2)[1]
        for line in result.stdout.splitlines()
        if line.startswith(("FAILED ", "ERROR "))
    ]
    return failures[0] if failures else "a test that ended pytest"


def main() -> int:
    """Plant the requested faults and print the outcomes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="names of faults; all without any")
    parser.add_argument("--suite", choices=("test", "test-all"), default="test")
    parser.add_argument("--whole", action="store_true", help="run all tests for missed faults")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    parser.add_argument("--list", action="store_true", help="list the faults and run nothing")
    options = parser.parse_args()
    faults = read_faults()
    if unknown := sorted(set(options.names) - {fault.name for fault in faults}):
        parser.error(f"{TABLE.name} has no {', '.join(unknown)}")
    faults = [fault for fault in faults if not options.names or fault.name in options.names]
    if options.list:
        for fault in faults:
            print(f"{fault.name:32} {fault.kind:20} {fault.file}")
        return 0
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = [pool.submit(plant, fault, options.suite, whole=options.whole) for fault in faults]
        try:
            for run in as_completed(runs):
                outcomes.append(run.result())
                print(outcomes[-1], flush=True)
        finally:
            pool.shutdown(cancel_futures=True)
    caught = sum(outcome.caught_by is not None for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} faults caught by make {options.suite}")
    return 0 if caught == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
