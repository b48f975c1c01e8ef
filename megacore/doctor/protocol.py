"""How the doctor talks to its programs on the hosts: a JSON object in, a JSON line per check out.

On a host each check has a time limit. A check that hangs, for example on a dead file share, is left
behind and named.
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
"""How a problem begins whose cause is a lack of time."""
NOT_BEGUN = f"{NO_ANSWER}: the time was up before it was begun"


@dataclass(frozen=True)
class Request:
    """The question to the probe of one host."""

    host: str
    """Its name in the hostfile."""
    workspace: str
    """Directory below which everything is written."""
    checks: tuple[str, ...]
    """Names of the probe's checks, in the order in which they are made."""
    seconds: float = 40.0
    """Time after which no further check begins."""
    peers: Mapping[str, str] = field(default_factory=dict)
    """Addresses of the other hosts, by name."""
    interface: str = "auto"
    """`launch.interface`."""
    token: str | None = None
    """Directory of the proof that all hosts see one workspace; None if each has its own."""
    prefixes: tuple[str, ...] = ()
    """Token files without .bin/.idx."""
    vocab_size: int | None = None
    """Entries of the vocabulary that the tokens are of."""
    share: tuple[int, int] = (0, 1)
    """Part of the tokens that this host reads, as (k, n): every n-th block from the k-th on."""
    index_directory: str | None = None
    """Directory of the index maps."""
    precision: str = "auto"
    """`train.precision`, on which the kernels depend."""
    kernels: str = "auto"
    """`train.kernels`."""
    compile: str = "auto"
    """`train.compile`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the ranks will get."""

    def to_json(self) -> bytes:
        """Return the text for the probe's stdin."""
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
    """Return the line of a check: its value, or why there is none."""
    started = time.monotonic()
    line: dict[str, Any] = {"check": check}
    try:
        line["value"] = limited(work, seconds)
    except TimeoutError as error:
        line["problem"] = str(error)
    except (MegacoreError, OSError) as error:
        line["problem"] = str(error)
    except Exception as error:  # one check must not cost the others
        line["problem"] = f"{type(error).__name__}: {error}"
    line["seconds"] = round(time.monotonic() - started, 3)
    return line


def limited(work: Callable[[], Any], seconds: float) -> Any:
    """Run `work` in a thread and return its result, waiting no longer than `seconds`.

    Raises what `work` raises, and TimeoutError.
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
    """Write a line to stdout at once: what follows may hang."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def leave(code: int = 0) -> NoReturn:
    """End the process without waiting for a thread that hangs; its output is closed first."""
    for descriptor in (0, 1, 2):
        with suppress(OSError):
            os.close(descriptor)
    os._exit(code)


@dataclass(frozen=True)
class HostProbe:
    """The answers of one host."""

    host: str
    values: Mapping[str, Any] = field(default_factory=dict)
    """Answers by check."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Why a check has no answer, by check."""
    unreachable: str | None = None
    """Why ssh did not reach it."""
    failed: str | None = None
    """Why the probe did not start there."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """How long each check took."""

    def get(self, check: str, *keys: str) -> Any:
        """Return the answer to a check, or what `keys` lead to in it; None if there is none."""
        value: Any = self.values.get(check)
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def as_json(self) -> dict[str, Any]:
        """Return the answers for the examination's JSON."""
        return asdict(self)


def lines_of(output: bytes) -> list[dict[str, Any]]:
    """Read the lines of a program; other output and a line that was cut off are skipped."""
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
    """Read what a probe wrote, also if it was cut off: a check without an answer did not end.

    Args:
        host: the host that answered.
        output: the probe's output.
        asked: the checks that the probe had to make.
        failed: why the command failed; None if it did not.
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
        return HostProbe(host, failed=failed or "the probe said nothing")
    for name in asked:
        if name not in values and name not in problems:
            problems[name] = f"{NO_ANSWER} ({failed or 'the probe ended early'})"
    return HostProbe(host, values, problems, seconds=seconds)
