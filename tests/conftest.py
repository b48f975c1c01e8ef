"""Fixtures that the tests of all packages share; it imports nothing heavy."""

import errno
import faulthandler
import fcntl
import gc
import os
import pickle
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

# A shell starts its background jobs with SIGINT ignored. The processes that tests start and
# interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# With one worker of pytest-xdist per core, more threads would only wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


_LONGEST = (
    "flows",
    "finetune",
    "faults",
    "parity",
    "hosts",
    "deploy",
    "cluster",
    "gpu_emulated",
    "scripts",
    "train",
    "cli",
)
"""Directories whose files run first, so that no worker is left with a long file at the end."""


_SLOW = re.compile(r"slow|\branks: ", re.IGNORECASE)
"""Text of the files with slow tests: they name the mark, or take the fixture `ranks`."""
_ONLY_SLOW = ("slow", "slow and not long")
OVERLOOKED = pytest.StashKey[list[Path]]()
"""Collected files with slow tests but without that text, which `-m slow` leaves out."""
HANG_LIMIT = 1000
"""Seconds for a test with its fixtures, more than any limit of pytest-timeout."""
_STDERR = pytest.StashKey[int]()
"""Standard error that pytest does not capture."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(2)
    if config.getoption("numprocesses", None):
        config.pluginmanager.register(RunningTests(config.stash[_STDERR]))


class RunningTests:
    """Names the running tests and has the workers write their stacks when SIGTERM arrives.

    So the time limit of a machine that runs the tests shows what did not end.
    """

    def __init__(self, stderr: int) -> None:
        """Handle the signal in pytest-xdist's controller, which runs no test."""
        self._stderr = stderr
        self._names: list[str] = []
        signal.signal(signal.SIGTERM, self._end)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._names.append(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._names.remove(nodeid)

    def _end(self, number: int, frame: object) -> None:
        lines = [f"running: {name}" for name in self._names]
        workers = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        for worker in workers:
            with suppress(OSError):  # it has ended
                state = Path("/proc", worker, "status").read_text().splitlines()[2]
                lines.append(f"worker {worker}: {state}")
        os.write(self._stderr, "\n".join(["", *lines, ""]).encode())
        for worker in workers:
            with suppress(OSError):
                os.kill(int(worker), signal.SIGABRT)  # pytest's handler writes the stacks
                os.kill(int(worker), signal.SIGCONT)
        time.sleep(2)
        os._exit(128 + number)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """End the process with the stacks of all threads if the test hangs in code without Python.

    There the signal of pytest-timeout is not handled.
    """
    faulthandler.dump_traceback_later(HANG_LIMIT, exit=True, file=item.config.stash[_STDERR])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Limit the end of the fixtures, too: a test that fails cancels all limits for a debugger."""
    pytest_runtest_setup(item)


def _may_have_slow_tests(path: Path) -> bool:
    return _SLOW.search(path.read_text(encoding="utf-8")) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files without slow tests where only those run.

    Each worker of pytest-xdist would import them all.
    """
    if config.option.markexpr not in _ONLY_SLOW or not collection_path.match("test_*.py"):
        return None
    return None if _may_have_slow_tests(collection_path) else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import all files without the garbage collector, which finds nothing there.

    Later collections need not look through the imported modules and collected tests, which stay.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the files by the time that they take, before a mark deselects some."""
    items.sort(key=lambda item: _rank_of_directory(item.path))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    config.stash[OVERLOOKED] = sorted(path for path in slow if not _may_have_slow_tests(path))


def _rank_of_directory(path: Path) -> int:
    directory = path.relative_to(Path(__file__).parent).parts[0]
    return _LONGEST.index(directory) if directory in _LONGEST else len(_LONGEST)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print one line for each reason for which tests were skipped, such as a missing program."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
    )
    for reason, count in reasons.most_common():
        terminalreporter.line(f"skipped {count}: {reason}")


_ONE_THREAD = ("convert", "engine", "generate", "models", "parity", "train")
"""Directories whose tests compute small tensors, which gain nothing from more threads."""


@pytest.fixture(autouse=True, scope="module")
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compute with one thread in some directories, since busy cores make more threads slow."""
    if request.path.relative_to(Path(__file__).parent).parts[0] not in _ONE_THREAD:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def denormals() -> Iterator[None]:
    """Turn denormal numbers on again after tests that do a rank's work, which turns them off."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)


@pytest.fixture(autouse=True, scope="session")
def rmtree_as_on_nfs() -> Iterator[None]:
    """Let the code delete no directory with a file that this process has open or mapped.

    NFS keeps such a file as .nfs… in its directory, which then cannot be removed.
    """
    rmtree = shutil.rmtree

    def remove(path: "str | os.PathLike[str]", ignore_errors: bool = False, **options: Any) -> None:
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.startswith(("megacore.", "tasks.")) and not ignore_errors:
            _refuse_open_files(os.path.realpath(path) + os.sep)
        rmtree(path, ignore_errors, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove)
        yield


def _refuse_open_files(directory: str) -> None:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if directory in line:
            raise OSError(errno.ENOTEMPTY, "Directory not empty: mapped", line.split(maxsplit=5)[5])
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:  # of the directory that is listed, and closed meanwhile
            continue
        if path.startswith(directory):
            raise OSError(errno.ENOTEMPTY, "Directory not empty: open", path)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the directory of golden files (MEGACORE_SHARED, else ../shared).

    The test is skipped without it.
    """
    default = Path(__file__).resolve().parents[2] / "shared"
    directory = Path(os.environ.get("MEGACORE_SHARED") or default)
    if not directory.is_dir():
        pytest.skip(f"no shared data at {directory}: set MEGACORE_SHARED")
    return directory


@pytest.fixture(scope="session")
def computed_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Provide a function that lets only one worker of pytest-xdist compute a result.

    The others wait for it and read it from a file. Arguments: the result's name, the function, and
    its arguments.
    """
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent

    def computed(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        path = directory / f"{name}.result"
        with open(directory / f"{name}.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not path.exists():
                partial = path.with_suffix(".partial")
                partial.write_bytes(pickle.dumps(function(*arguments)))
                partial.rename(path)
        return pickle.loads(path.read_bytes())

    return computed


@pytest.fixture
def compiler_cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let Inductor keep its files in one directory for the tests that request it."""
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(directory / "compiled"))


@pytest.fixture(scope="session")
def written_once(
    computed_once: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Callable[[Path], object]], Path]:
    """Provide a function that lets only one worker write a file, and returns a copy's path.

    Arguments: the file's name, and a function that writes it to a path.
    """

    def written(name: str, write: Callable[[Path], object]) -> Path:
        path = tmp_path_factory.mktemp("written") / name

        def content() -> bytes:
            write(path)
            return path.read_bytes()

        path.write_bytes(computed_once(name, content))
        return path

    return written


@pytest.fixture(scope="session")
def empty_store(written_once: Callable[..., Path]) -> Path:
    """Provide an mlflow.db with tables and without content; creating it takes seconds."""
    from tasks._mlflow import create_store

    return written_once("mlflow.db", lambda path: create_store(f"sqlite:///{path}"))


@pytest.fixture(scope="session")
def prefect_database(written_once: Callable[..., Path]) -> Path:
    """Provide a prefect.db with tables and without content; creating it takes many seconds."""
    from tests._prefect import write_database

    return written_once("prefect.db", write_database)


@pytest.fixture(scope="session")
def one_rank() -> list[dict[str, Any]]:
    """Return the results of a single rank, by case of `tests/_tensor_ranks.py`."""
    from tests import _tensor_ranks

    return [_tensor_ranks.run(1)]


@pytest.fixture(scope="session")
def two_ranks(computed_once: Callable[..., Any]) -> Any:
    """Return the results of each of two tensor-parallel ranks."""
    from tests import _tensor_ranks
    from tests._dist import run_distributed

    return computed_once("two-ranks", run_distributed, 2, _tensor_ranks.run, 2)


@pytest.fixture(scope="session")
def four_ranks(computed_once: Callable[..., Any]) -> Any:
    """Return the results of each of four tensor-parallel ranks."""
    from tests import _tensor_ranks
    from tests._dist import run_distributed

    return computed_once("four-ranks", run_distributed, 4, _tensor_ranks.run, 4)


@pytest.fixture(
    params=["one_rank", "two_ranks", pytest.param("four_ranks", marks=pytest.mark.slow)],
    ids=["tp1", "tp2", "tp4"],
)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return the results of each of 1, 2 and 4 ranks."""
    results: list[dict[str, Any]] = request.getfixturevalue(request.param)
    return results
