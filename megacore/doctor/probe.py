"""The probe of a host: `python -m megacore.doctor.probe` reads a request, writes a line per check.

Each check has a time limit, and its line is written when it ends: a check that hangs costs only its
own answer.
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
"""Checks of any machine that read a few files."""
SLOW = ("gpus", "torch", "speed")
"""Checks of any machine that take seconds, and longer from a cold file share."""
QUICK_LIMIT = 8.0
"""Seconds for a check that reads a few files."""
TORCH_LIMIT = 30.0
"""Seconds for a check that imports torch and opens a GPU."""
TOKEN_SECONDS = 12.0
"""Seconds for reading token files."""
TOKEN_RESERVE = 2.0
"""Seconds that the last block may take beyond that."""
_LIMITS = {
    "gpus": 2 * QUICK_LIMIT,
    "torch": TORCH_LIMIT,
    "speed": TORCH_LIMIT,
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
        left = deadline - time.monotonic()
        if left <= 0:
            say({"check": check, "problem": NOT_BEGUN, "seconds": 0.0})
            continue
        work, limit = work_of(check, request, left)
        say(answer(check, work, min(limit, left)))
    leave()


def work_of(check: str, request: Request, left: float) -> tuple[Callable[[], Any], float]:
    """Return the function that makes a check in the seconds `left`, and its time limit.

    The function imports what it needs, since an import may hang as well.
    """
    if check == "network":
        work: Callable[[], Any] = partial(_look_at_network, request)
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
    }
    return checks[check]()


def _look_at_network(request: Request) -> Any:
    from megacore.doctor.network import look_at_network

    return look_at_network(request.peers, request.interface)


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
