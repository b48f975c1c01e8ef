"""Probe of a host: `python -m megacore.doctor.probe` reads a request, writes a line per check.

Each check has a time limit, and its line is written when it ends, so that a check that hangs loses
only its own answer.
"""

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megacore.doctor.protocol import NOT_BEGUN, Request, answer, leave, say
from megacore.errors import LaunchError

QUICK = ("packages", "limits", "memory", "disk")
"""Checks of every host that read a few files."""
SLOW = ("gpus", "torch", "toolchain", "speed")
"""Checks of every host that take seconds, and longer with a cold file share."""
FULL = ("storage", "operators")
"""Checks of every host that a quick examination leaves out."""
QUICK_LIMIT = 8.0
"""Time limit in seconds of a check that reads a few files."""
TORCH_LIMIT = 30.0
"""Time limit in seconds of a check that imports torch and opens a GPU."""
TOKEN_SECONDS = 12.0
"""Seconds for reading token files."""
TOKEN_RESERVE = 2.0
"""Additional seconds for the last block of token files."""
_LIMITS = {
    "gpus": 2 * QUICK_LIMIT,
    "torch": TORCH_LIMIT,
    "toolchain": 2 * QUICK_LIMIT,
    "speed": TORCH_LIMIT,
    "storage": 2 * QUICK_LIMIT,
    "operators": TORCH_LIMIT,
    "tokens": TOKEN_SECONDS + QUICK_LIMIT,
}
"""Time limits of the checks that may take longer than QUICK_LIMIT."""


def main() -> None:
    """Answer the request on stdin."""
    try:
        request = Request.from_json(sys.stdin.buffer.read())
    except LaunchError as error:
        sys.stderr.write(f"{error}\n")
        leave(error.exit_code)
    os.environ.update(request.environment)
    deadline = time.monotonic() + request.seconds
    for check in request.checks:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            say({"check": check, "problem": NOT_BEGUN, "seconds": 0.0})
            continue
        work, limit = work_of(check, request, remaining)
        say(answer(check, work, min(limit, remaining)))
    leave()


def work_of(check: str, request: Request, left: float) -> tuple[Callable[[], Any], float]:
    """Return the function that performs a check within `left` seconds, and its time limit.

    The function does its own imports, since an import may hang, too.
    """
    if check == "network":
        work: Callable[[], Any] = partial(_look_at_network, request)
    elif check in ("toolchain", "operators"):
        work = partial(_look_at_toolchain, check, request)
    elif check in ("workspace", "disk", "tokens", "index"):
        work = partial(_look_at_storage, check, request, left)
    else:
        work = partial(_look_at_machine, check, request)
    return work, _LIMITS.get(check, QUICK_LIMIT)


def _look_at_machine(check: str, request: Request) -> Any:
    from megacore.doctor import machine

    checks: dict[str, Callable[[], Any]] = {
        "packages": machine.look_at_packages,
        "limits": machine.look_at_limits,
        "memory": machine.look_at_memory,
        "gpus": machine.look_at_gpus,
        "torch": lambda: machine.look_at_torch(request.precision, request.kernels, request.compile),
        "speed": machine.measure_speed,
        "storage": lambda: machine.measure_storage(Path(request.workspace)),
    }
    return checks[check]()


def _look_at_network(request: Request) -> Any:
    from megacore.doctor.network import look_at_network

    return look_at_network(request.peers, request.interface)


def _look_at_toolchain(check: str, request: Request) -> Any:
    from megacore.doctor import toolchain

    if check == "toolchain":
        return toolchain.look_at_toolchain()
    os.environ["MEGACORE_WORKSPACE"] = request.workspace
    return toolchain.look_at_operators(Path(request.workspace))


def _look_at_storage(check: str, request: Request, left: float) -> Any:
    from megacore.doctor import storage

    workspace = Path(request.workspace)
    if check == "workspace":
        return storage.look_at_workspace(workspace, request.token, request.host)
    if check == "disk":
        return storage.look_at_disk(workspace)
    if check == "index":
        return storage.look_at_index(Path(str(request.index_directory)), request.prefixes)
    seconds = min(TOKEN_SECONDS, left - TOKEN_RESERVE)
    return storage.look_at_tokens(request.prefixes, request.vocab_size, request.share, seconds)


if __name__ == "__main__":
    main()
