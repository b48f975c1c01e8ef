"""Failure of every system call that writes: `python -m tests.faults.sweep`.

A stage runs once while a preloaded library (`_calls.c`) counts its calls. It then runs again for
each call, which fails with EIO or ENOSPC, or from which on the disk is full, or in which the
process is killed. A run that reports no error must have the same result as without the failure,
and the same call of the stage must then finish with it. Each run is a fork of one process, which
has imported everything.

A failed case is repeated by its id: `python -m tests.faults.sweep --case save-17-eio`, or
`--case save-umask` for a condition.
"""
# ruff: noqa: T201 - a program that prints

import argparse
import ctypes
import faulthandler
import gc
import importlib
import itertools
import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests._limits import HANG

LIBRARY_SOURCE = Path(__file__).with_name("_calls.c")
CONTROL_VARIABLE = "MEGACORE_FAULT_CONTROL"
OFF, COUNT, READ_ONLY, COUNT_READS = 0, 1, 7, 8
MODES = {"eio": 2, "enospc": 3, "full": 4, "dies": 5, "quota": 6, "read": 9}
"""Failures of a call: once with EIO or ENOSPC, with ENOSPC like every later one, by SIGKILL, or
once with EDQUOT; `read` is EIO of a call that reads, which are counted separately."""
CONDITIONS = (
    "umask",
    "clock",
    "disk",
    "memory-2",
    "memory-8",
    "memory-32",
    "read-only",
    "home",
    "tmpdir",
    "tmpdir-full",
    "tmpdir-missing",
    "no-tmpdir",
)
"""States of the machine under which a stage runs: umask 077, a clock that jumps by days, another
file system than the inputs' and TMPDIR's, so many MiB of address space left, a workspace, HOME or
TMPDIR that is read-only, a full TMPDIR, one that does not exist, and no usable directory at all."""
DISTURBING = ("memory", "read-only", "home", "tmpdir", "no-tmpdir")
"""Beginnings of the conditions that a stage may refuse in one sentence."""
WITH_MLFLOW = r"(finetune-)?publish.*|zeroshot|lm-eval|compare"
HARMLESS = (
    (
        r".*",
        r"write|ftruncate|close",
        r".*\.lock",
        "a lock holder's name, only shown",
    ),
    (r".*", r"mkdir", r".*", "the directory exists, or the next call in it fails"),
    (r".*", r"unlink|rmdir", r".*", "what stays is compared with the reference"),
    (
        rf"(finetune-)?export.*|{WITH_MLFLOW}",
        r"write",
        r".*\.tmp-\d+/.*(tokenizer\.json|vocab\.json|merges\.txt)|/mlartifacts/.*",
        "shutil copies the file again without sendfile",
    ),
    (
        r".*",
        r"close",
        r".*/(tokenizer\.json|vocab\.json|merges\.txt|[^/]*\.safetensors)",
        "Rust does not report it; the file is synced afterwards",
    ),
    (
        WITH_MLFLOW,
        r"fsync",
        r"",
        "SQLite ignores it after a journal's start (unixSync)",
    ),
    (
        WITH_MLFLOW,
        r"write|fsync",
        r"/mlflow\.db(-journal)?",
        "rolled back and sent again",
    ),
    (
        WITH_MLFLOW,
        r".*",
        r".*/mlflow\.answers\.json.*",
        "the next run asks MLflow again",
    ),
)
"""Stages, calls, paths below the stage's directory, and why it may go on when such a call fails."""
FILES = "files"
"""Directory of `inputs`, and of `case`: `place`, where the stage writes, HOME and TMPDIR."""


class Control(ctypes.Structure):
    """Memory shared with the library in every process: `struct control` of `_calls.c`."""

    _fields_ = (
        ("mode", ctypes.c_int),
        ("injected", ctypes.c_int),
        ("count", ctypes.c_long),
        ("target", ctypes.c_long),
        ("root", ctypes.c_char * 2048),
        ("skip", ctypes.c_char * 64),
        ("log", ctypes.c_char * 2048),
        ("call", ctypes.c_char * 256),
        ("path", ctypes.c_char * 4096),
    )


@dataclass(frozen=True)
class Stage:
    """A stage whose calls fail. Every function runs in a fork."""

    name: str
    prepare: Callable[[Path], None]
    """(inputs): writes the inputs; what is in `inputs/start` is there when a case begins."""
    run: Callable[[Path, Path], None]
    """(inputs, place): the call that is disturbed and repeated; writes only below `place`."""
    result: Callable[[Path, Path], Any]
    """(inputs, place): the JSON result that must be the same as without a fault."""
    visible: Callable[[Path, Path], list[str]]
    """(inputs, place): problems of outputs that look complete and are not, or of lost ones."""
    skip: str = ""
    """Part of the paths whose calls are not counted."""


@dataclass
class Case:
    """One call of a stage that fails in one way, and what followed."""

    stage: str
    number: int
    mode: str
    call: str = ""
    path: str = ""
    outcome: str = ""
    """`died`, `absorbed` (no error), `not reached`, or the name of the error."""
    message: str = ""
    faults: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Id with which the case is repeated."""
        if self.mode in CONDITIONS:
            return f"{self.stage}-{self.mode}"
        return f"{self.stage}-{self.number}-{self.mode}"


def compile_library(directory: Path) -> Path | None:
    """Compile the library with the system's C compiler; return None if there is none."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        return None
    library = directory / "calls.so"
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(LIBRARY_SOURCE), "-ldl"],
        check=True,
    )
    return library


def environment(directory: Path, library: Path) -> dict[str, str]:
    """Return the environment of a process that runs a sweep in `directory`."""
    control = directory / "control"
    control.write_bytes(bytes(ctypes.sizeof(Control)))
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    return {
        **os.environ,
        **dict.fromkeys(threads, "1"),
        "LD_PRELOAD": str(library),
        CONTROL_VARIABLE: str(control),
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(_make(directory / FILES / "case" / "home")),
        "TMPDIR": str(_make(directory / FILES / "case" / "tmp")),
    }


def _make(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


class Sweep:
    """Runner of cases, in a process with the library."""

    def __init__(self, directory: Path, stages: Sequence[Stage]) -> None:
        import mmap

        self.directory = directory
        self.stages = {stage.name: stage for stage in stages}
        with open(os.environ[CONTROL_VARIABLE], "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), ctypes.sizeof(Control))
        self.control = Control.from_buffer(self._memory)
        self.control.mode = OFF
        self._files = directory / FILES
        self._case = self._files / "case"
        self._calls: dict[str, list[str]] = {}
        self._reads: dict[str, list[str]] = {}
        self._results: dict[str, Any] = {}

    def calls(self, name: str) -> list[str]:
        """Return the calls of an undisturbed run of a stage, each as `call path`."""
        if name not in self._calls:
            stage, inputs = self.stages[name], self._inputs(name)
            inputs.mkdir(parents=True)
            self._value(stage.prepare, inputs)
            place = self._place(inputs)
            log = self.directory / f"{name}.calls"
            log.touch()
            self._arm(stage, self._case, COUNT, -1, log)
            modules = self._value(_modules_of, stage, inputs, place)
            self._disarm()
            for module in modules:  # so that no fork has to import them
                with suppress(Exception):
                    importlib.import_module(module)
            gc.freeze()  # a fork's collector then touches no page
            problems = self._value(stage.visible, inputs, place)
            assert not problems, problems
            self._results[name] = self._value(stage.result, inputs, place)
            self._calls[name] = self._logged(log)
            shutil.rmtree(self._case)
        return self._calls[name]

    def reads(self, name: str) -> list[str]:
        """Return the calls with which an undisturbed run of a stage reads its files."""
        if name not in self._reads:
            self.calls(name)
            stage, inputs = self.stages[name], self._inputs(name)
            place, log = self._place(inputs), self.directory / f"{name}.reads"
            log.touch()
            self._arm(stage, self._files, COUNT_READS, -1, log)
            self._value(stage.run, inputs, place)
            self._disarm()
            self._reads[name] = self._logged(log)
            shutil.rmtree(self._case)
        return self._reads[name]

    def _logged(self, log: Path) -> list[str]:
        lines = self._shown(log.read_text(encoding="utf-8")).splitlines()
        return [line.split(" ", 1)[1] for line in lines]

    def _shown(self, text: str) -> str:
        """Return a text with paths below the stage's directory, or that of the case."""
        for directory in (self._case / "place", self._case, self._files):
            text = text.replace(str(directory), "")
        return text

    def run(self, case: Case) -> Case:
        """Run a case; its `faults` are empty if it passes."""
        self.calls(case.stage)
        stage, inputs = self.stages[case.stage], self._inputs(case.stage)
        place = self._place(inputs)
        root = self._files if case.mode == "read" else self._case
        self._arm(stage, root, MODES[case.mode], case.number)
        answer = self._fork(stage.run, inputs, place)
        self._disarm()
        case.call = self.control.call.decode()
        case.path = self._shown(self.control.path.decode())
        self._judge(case, answer, place)
        if "error" not in answer:
            self._compare(case, "after success", _state, place)
        self._compare(case, "after the repeated call", _repeat, place)
        self._leave(case, place)
        return case

    def _compare(
        self,
        case: Case,
        moment: str,
        function: Callable[[Stage, Path, Path], tuple[list[str], Any]],
        place: Path,
    ) -> None:
        """Add to the case's faults what differs from the undisturbed run."""
        answer = self._fork(function, self.stages[case.stage], self._inputs(case.stage), place)
        if "error" in answer:
            case.faults.append(f"{moment}: {answer['error']}: {answer['message']}")
            return
        problems, result = answer["value"]
        case.faults += [f"{moment}: {problem}" for problem in problems]
        reference = self._results[case.stage]
        if case.mode == "disk" and isinstance(reference, dict) and isinstance(result, dict):
            # Paths from the output to its inputs, which some files contain, differ.
            result, reference = sorted(result), sorted(reference)
        if result != reference:
            case.faults.append(f"{moment}: another result: {_difference(result, reference)}")

    def _leave(self, case: Case, place: Path) -> None:
        """Keep the output of a failed case, remove that of another."""
        if case.faults:
            shutil.move(place, self.directory / f"case-{case.name}")
        elif place.parent != self._case:
            shutil.rmtree(place)
        shutil.rmtree(self._case)

    def run_under(self, name: str, condition: str) -> Case:
        """Run a stage under a condition, and again without it."""
        self.calls(name)
        stage, inputs = self.stages[name], self._inputs(name)
        case = Case(name, 0, condition)
        place = self._place(inputs)
        if condition == "disk":
            disk = Path(tempfile.mkdtemp(prefix="sweep-"))
            place = Path(shutil.move(place, disk))
            if disk.stat().st_dev == inputs.stat().st_dev:
                shutil.rmtree(disk)
                case.outcome = "not reached"
                return case
        root = {"read-only": self._case, "home": self._case / "home"}.get(
            condition, self._case / "tmp"
        )
        if condition in ("read-only", "home", "tmpdir"):
            self._arm(stage, root, READ_ONLY, 0)
        elif condition == "tmpdir-full":
            self._arm(stage, root, MODES["full"], -1)
        answer = self._fork(_run_under, condition, stage, inputs, place)
        self._disarm()
        case.outcome = answer.get("error", "done")
        case.message = answer.get("message", "")
        refused = condition.startswith(DISTURBING) and bool(answer.get("ours"))
        if condition.startswith("memory"):  # the allocators of Rust and C++ end the process
            refused |= case.outcome == "Died" or "new thread" in case.message
        if "error" in answer and not refused:
            case.faults.append(f"{answer['error']}: {case.message}\n{answer.get('trace')}")
        if "error" not in answer:
            self._compare(case, "after success", _state, place)
        self._compare(case, "after the repeated call", _repeat, place)
        self._leave(case, place)
        if condition == "disk":
            shutil.rmtree(disk)
        return case

    def _judge(self, case: Case, answer: dict[str, Any], place: Path) -> None:
        """Classify the outcome of the disturbed run."""
        case.message = self._shown(answer.get("message", ""))
        if not self.control.injected:
            case.outcome = answer.get("error", "not reached")
            if "error" in answer:
                case.faults.append(
                    f"{case.outcome} before any call failed: {case.message}\n{answer.get('trace')}"
                )
        elif case.mode == "dies":
            case.outcome = "died"
            if answer.get("error") != "Died":
                case.faults.append(f"the killed process went on: {answer}")
        elif "error" not in answer:
            case.outcome = "absorbed"
            # A reader may know another way; the result is compared.
            if case.mode != "read" and not any(
                all(map(re.fullmatch, patterns, (case.stage, case.call, case.path)))
                for *patterns, _ in HARMLESS
            ):
                case.faults.append("the failure was swallowed")
        else:
            case.outcome = answer["error"]
            if not answer.get("ours"):
                case.faults.append(f"raw {answer['error']}: {case.message}\n{answer.get('trace')}")
            elif "\n" in case.message or not re.search(r"\w: .*\w", case.message):
                case.faults.append(f"not a sentence: {case.message!r}")
        case.faults += [
            f"lost in a thread or destructor: {text}" for text in answer.get("lost", ())
        ]

    def _arm(
        self, stage: Stage, root: Path, mode: int, target: int, log: Path | None = None
    ) -> None:
        control = self.control
        control.root, control.log = f"{root}/".encode(), str(log or "").encode()
        control.skip, control.call, control.path = stage.skip.encode(), b"", b""
        control.injected, control.count, control.target = 0, 0, target
        control.mode = mode

    def _disarm(self) -> None:
        self.control.mode = OFF

    def _inputs(self, name: str) -> Path:
        return self._files / "inputs" / name

    def _place(self, inputs: Path) -> Path:
        _make(self._case / "home")
        _make(self._case / "tmp")
        place = self._case / "place"  # the same for all: some outputs contain it
        if (inputs / "start").is_dir():
            shutil.copytree(inputs / "start", place, symlinks=True)
        else:
            place.mkdir()
        return place

    def _value(self, function: Callable[..., Any], *arguments: Any) -> Any:
        answer = self._fork(function, *arguments)
        assert "value" in answer, answer
        return answer["value"]

    def _fork(self, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        """Call a function in a fork, in a group of its own, and return its value or error."""
        outcome = self.directory / "outcome.json"
        outcome.unlink(missing_ok=True)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            _child(outcome, self.directory / "log", function, arguments)
        deadline = time.monotonic() + HANG
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGABRT)  # faulthandler writes the stacks
                time.sleep(1)
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                stacks = (self.directory / "log").read_text(encoding="utf-8", errors="replace")
                return {"error": "Hang", "message": stacks[-3000:]}
            time.sleep(0.002)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        try:
            answer: dict[str, Any] = json.loads(outcome.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {"error": "Died", "message": ""}
        return answer


def _child(
    outcome: Path, log: Path, function: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    """Call the function, write its outcome and end the process."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable()
    lost: list[str] = []
    threading.excepthook = lambda arguments: lost.append(repr(arguments.exc_value))
    sys.unraisablehook = lambda arguments: lost.append(
        f"{arguments.exc_value!r} in {arguments.object!r}"
    )
    try:
        answer: dict[str, Any] = {"value": function(*arguments)}
    except BaseException as error:
        from megacore.errors import MegacoreError

        answer = {
            "error": type(error).__name__,
            "message": str(error),
            "ours": isinstance(error, MegacoreError),
            "trace": "".join(traceback.format_exception(error)[-12:]),
        }
        del error
    answer["lost"] = lost
    temporary = outcome.with_suffix(".part")
    temporary.write_text(json.dumps(answer), encoding="utf-8")
    temporary.rename(outcome)
    os._exit(0)


def _run_under(condition: str, stage: Stage, inputs: Path, place: Path) -> None:
    """Run a stage under a condition."""
    if condition == "umask":
        os.umask(0o077)
    elif condition == "clock":
        now, jumps = time.time, itertools.cycle((0.0, -86400.0, 400 * 86400.0))
        time.time = lambda: now() + next(jumps)
    elif condition in ("tmpdir-missing", "no-tmpdir"):
        tempfile.tempdir, os.environ["TMPDIR"] = None, str(place / "no" / "tmp")
        if condition == "no-tmpdir":
            tempfile._candidate_tempdir_list = lambda: [os.environ["TMPDIR"]]  # type: ignore[attr-defined]
    elif condition.startswith("memory"):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        left = int(condition.partition("-")[2]) << 20
        limit = pages * resource.getpagesize() + left
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        stage.run(inputs, place)
    finally:
        if condition.startswith("memory"):
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_AS, unlimited)


def _modules_of(stage: Stage, inputs: Path, place: Path) -> list[str]:
    """Run the stage and return the names of the modules that it has imported."""
    before = set(sys.modules)
    stage.run(inputs, place)
    return [name for name in sys.modules if name not in before]


def _state(stage: Stage, inputs: Path, place: Path) -> tuple[list[str], Any]:
    """Return the problems of a run that reported success, and its result."""
    return stage.visible(inputs, place), stage.result(inputs, place)


def _repeat(stage: Stage, inputs: Path, place: Path) -> tuple[list[str], Any]:
    """Return the problems that a fault left and the result of the repeated call."""
    problems = stage.visible(inputs, place)
    stage.run(inputs, place)
    return problems, stage.result(inputs, place)


def _difference(value: Any, reference: Any) -> str:
    if isinstance(value, list):
        return str([one for one in (*value, *reference) if (one in value) != (one in reference)])
    keys = sorted(value.keys() | reference.keys())
    pairs = {key: (value.get(key, "missing"), reference.get(key, "missing")) for key in keys}
    return str({key: pair for key, pair in pairs.items() if pair[0] != pair[1]})[:1500]


# the stages


def stages() -> tuple[Stage, ...]:
    """Return the stages with small inputs, so that a run takes a fraction of a second."""
    from tests.faults import _sweep_stages

    return _sweep_stages.STAGES


def selected(sweep: Sweep, name: str, share: float, seed: int) -> Iterator[Case]:
    """Yield the cases of a stage: all of them, or a seeded share, one mode for each call."""
    for number in range(len(sweep.calls(name))):
        draw = random.Random(f"{seed}-{name}-{number}")
        if share >= 1:
            rest = ("enospc", "full", "quota")[number % 3]
            yield from (Case(name, number, mode) for mode in ("eio", rest, "dies"))
        elif draw.random() < share:
            yield Case(name, number, draw.choice([mode for mode in MODES if mode != "read"]))
    for number in range(len(sweep.reads(name))):
        # In a share they are fewer: most of them read one file in pieces.
        if share >= 1 or random.Random(f"{seed}-{name}-read-{number}").random() < share / 4:
            yield Case(name, number, "read")


def parse_case(text: str, names: Iterable[str]) -> Case | None:
    """Return the case with the given id, or None if there is none."""
    for name in names:
        rest = text.removeprefix(f"{name}-")
        if rest in CONDITIONS:
            return Case(name, 0, rest)
        number, _, mode = rest.partition("-")
        if number.isdecimal() and mode in MODES:
            return Case(name, int(number), mode)
    return None


def problem_of(options: argparse.Namespace, names: Collection[str]) -> str | None:
    """Return one sentence about a stage or case that does not exist, or None."""
    unknown = [name for name in options.stage or () if name not in names]
    if unknown:
        return f"--stage: {unknown[0]} is no stage; use one of {', '.join(names)}"
    if options.case and parse_case(options.case, names) is None:
        return (
            f"--case: {options.case} is no case; use STAGE-NUMBER-MODE with one of "
            f"{', '.join(MODES)}, or STAGE-CONDITION with one of {', '.join(CONDITIONS)}"
        )
    return None


def main() -> int:
    """Run the sweep that the command line describes; return 1 if it found a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", action="append", help="only this stage; repeat for several")
    parser.add_argument("--share", type=float, default=1.0, help="share of the calls, 0 to 1")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", help="only this case, with its details")
    parser.add_argument(
        "--conditions", action="store_true", help="other conditions, no failed call"
    )
    parser.add_argument("--out", type=Path, help="JSON file for all outcomes")
    options = parser.parse_args()
    if CONTROL_VARIABLE not in os.environ:
        memory = Path("/dev/shm")  # syncing to a disk would take most of the time
        place = memory if os.access(memory, os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="sweep-", dir=place) as directory:
            library = compile_library(Path(directory))
            if library is None:
                parser.exit(2, "a C compiler (cc) on Linux is required\n")
            command = [sys.executable, "-m", "tests.faults.sweep", *sys.argv[1:]]
            code = subprocess.call(command, env=environment(Path(directory), library))
            failed = sorted(Path(directory).glob("case-*"))
            if failed:
                kept = tempfile.mkdtemp(prefix="sweep-failed-")
                for path in failed:
                    shutil.move(path, kept)
                print(f"Outputs of the failed cases: {kept}")
            return code
    return sweep_here(options)


def sweep_here(options: argparse.Namespace) -> int:
    """Run the cases in this process, print one line for each stage and each fault."""
    all_stages = stages()
    problem = problem_of(options, [stage.name for stage in all_stages])
    if problem:
        print(problem, file=sys.stderr)
        return 2
    import tests._warm  # noqa: F401

    logging.disable(logging.CRITICAL)
    directory = Path(os.environ[CONTROL_VARIABLE]).parent
    sweep = Sweep(directory, all_stages)
    if options.case:
        case = parse_case(options.case, sweep.stages)
        assert case is not None
        under = case.mode in CONDITIONS
        case = sweep.run_under(case.stage, case.mode) if under else sweep.run(case)
        print(json.dumps(asdict(case), indent=2).replace("\\n", "\n"))
        return bool(case.faults)
    cases: list[Case] = []
    for name in options.stage or sweep.stages:
        started = time.monotonic()
        draw = random.Random(f"{options.seed}-{name}")
        conditions = CONDITIONS if options.conditions else (draw.choice(CONDITIONS[:3]),)
        ran = []
        for case in itertools.chain(
            (sweep.run_under(name, condition) for condition in conditions),
            map(sweep.run, selected(sweep, name, options.share, options.seed)),
        ):
            ran.append(case)
            if case.faults:
                text = f"{case.name}: {case.call} {case.path}: {' / '.join(case.faults)}"
                print(text, flush=True)
        counts = Counter(case.outcome for case in ran)
        print(
            f"{name}: {len(sweep.calls(name))} calls, {len(sweep.reads(name))} reads, "
            f"{len(ran)} cases, {dict(counts)}, {sum(bool(case.faults) for case in ran)} faults, "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )
        cases += ran
        if options.out:
            text = json.dumps([asdict(case) for case in cases], indent=1)
            options.out.write_text(text, encoding="utf-8")
    return any(case.faults for case in cases)


if __name__ == "__main__":
    sys.exit(main())
