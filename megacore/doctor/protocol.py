"""Protocol between the doctor and its programs on the hosts.

A program reads a JSON object from stdin and writes a JSON line per check to stdout. Each check has
a time limit. A check that hangs, for example on a dead file share, is abandoned and reported.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn, Self

from megacore.errors import LaunchError, MegacoreError

NO_ANSWER = "no answer"
"""Prefix of problems that are caused by a lack of time."""
NOT_BEGUN = f"{NO_ANSWER}: the time was up before it began"
PAIR_BYTES = {"mb_1": 10**6, "mb_64": 64 * 10**6}
"""Bytes of the all-reduces that measure the bandwidth of two ranks, by name."""


@dataclass(frozen=True)
class Request:
    """Request to the probe of one host."""

    host: str
    """Name of the host in the hostfile."""
    workspace: str
    """Directory below which all files are written."""
    checks: tuple[str, ...]
    """Names of the probe's checks, in the order of their execution."""
    seconds: float = 40.0
    """Time after which no further check begins."""
    peers: Mapping[str, str] = field(default_factory=dict)
    """Addresses of the other hosts, by name."""
    interface: str = "auto"
    """`launch.interface`."""
    token: str | None = None
    """Directory of the proof that all hosts see one workspace; None if each host has its own."""
    prefixes: tuple[str, ...] = ()
    """Paths of the token files without .bin/.idx."""
    vocab_size: int | None = None
    """Number of vocabulary entries, the upper bound of the token ids."""
    share: tuple[int, int] = (0, 1)
    """Part of the tokens that this host reads, as (k, n): every n-th block from the k-th on."""
    index_directory: str | None = None
    """Directory of the index maps."""
    precision: str = "auto"
    """`train.precision`, on which the kernels depend."""
    kernels: str | Mapping[str, str] = "auto"
    """`train.kernels`, as `KernelsConfig.written`."""
    compile: str = "auto"
    """`train.compile`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the ranks."""

    def to_json(self) -> bytes:
        """Return the request as JSON for the probe's stdin."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Read a request. Raises LaunchError if another version of megacore wrote it."""
        try:
            values = json.loads(text)
            for name in ("checks", "prefixes", "share"):
                values[name] = tuple(values[name])
            return cls(**values)
        except (ValueError, TypeError, KeyError) as error:
            raise LaunchError(
                f"the probe does not understand what it is asked ({error}): install the same "
                "version of megacore on all hosts"
            ) from error


def answer(check: str, work: Callable[[], Any], seconds: float) -> dict[str, Any]:
    """Run a check; return its line with the value, or with the problem that prevented it."""
    started = time.monotonic()
    line: dict[str, Any] = {"check": check}
    try:
        line["value"] = limited(work, seconds)
    except TimeoutError as error:
        line["problem"] = str(error)
    except (MegacoreError, OSError) as error:
        line["problem"] = str(error)
    except Exception as error:  # one check must not prevent the others
        line["problem"] = f"{type(error).__name__}: {error}"
    line["seconds"] = round(time.monotonic() - started, 3)
    return line


def limited(work: Callable[[], Any], seconds: float) -> Any:
    """Run `work` in a thread and return its result, waiting at most `seconds`.

    Raises the exceptions of `work`, and TimeoutError.
    """
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not outcome:
        raise TimeoutError(f"{NO_ANSWER} within {seconds:g} s")
    return outcome[0]


def say(line: Mapping[str, Any]) -> None:
    """Write a line to stdout and flush it, because the next check may hang."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def leave(code: int = 0) -> NoReturn:
    """Close the standard streams and exit without waiting for threads that hang."""
    for descriptor in (0, 1, 2):
        with suppress(OSError):
            os.close(descriptor)
    os._exit(code)


@dataclass(frozen=True)
class HostProbe:
    """Answers of one host."""

    host: str
    values: Mapping[str, Any] = field(default_factory=dict)
    """Answers by check."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Reason why a check has no answer, by check."""
    unreachable: str | None = None
    """Reason why ssh did not reach the host."""
    failed: str | None = None
    """Reason why the probe did not start on the host."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Duration of each check."""

    def get(self, check: str, *keys: str) -> Any:
        """Return the answer to a check, or its nested value at `keys`; None if it is missing."""
        value: Any = self.values.get(check)
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def as_json(self) -> dict[str, Any]:
        """Return the answers for the examination's JSON."""
        return asdict(self)


def lines_of(output: bytes) -> list[dict[str, Any]]:
    """Return the JSON lines of a program; other output and incomplete lines are skipped."""
    lines = []
    for text in output.splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "check" in line:
            lines.append(line)
    return lines


def read_answers(host: str, output: bytes, asked: Iterable[str], failed: str | None) -> HostProbe:
    """Parse the output of a probe, which may be incomplete.

    A check without an answer gets a problem.

    Args:
        host: name of the host.
        output: output of the probe.
        asked: names of the requested checks.
        failed: reason why the command failed, or None.
    """
    values: dict[str, Any] = {}
    problems: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for line in lines_of(output):
        name = str(line["check"])
        seconds[name] = float(line.get("seconds", 0.0))
        if "problem" in line:
            problems[name] = str(line["problem"])
        else:
            values[name] = line["value"]
    if not values and not problems:
        return HostProbe(host, failed=failed or "the probe gave no answer")
    for name in asked:
        if name not in values and name not in problems:
            problems[name] = f"{NO_ANSWER} ({failed or 'the probe ended early'})"
    return HostProbe(host, values, problems, seconds=seconds)
