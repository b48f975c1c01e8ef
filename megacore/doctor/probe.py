"""The doctor on one host: `python -m megacore.doctor.probe` reads a request and writes a line for each check.

Each check has a time limit, and its line is written as soon as it is done: what hangs costs its own answer alone.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacore.doctor.limited import NOT_BEGUN, answer, leave, say
from megacore.doctor.protocol import Request
from megacore.errors import LaunchError

QUICK_LIMIT = 8.0
"""Seconds of a check that reads a few files."""
TORCH_LIMIT = 30.0
"""Seconds of one that imports torch and opens a GPU."""
TOKEN_SECONDS = 12.0
"""Seconds of reading token files."""
TOKEN_RESERVE = 2.0
"""Seconds that the last block may take beyond that."""
QUICK = ("packages", "limits", "memory", "disk")
"""Checks of any machine that read a few files."""
SLOW = ("gpus", "torch", "speed")
"""Checks of any machine that take seconds, and longer from a cold file share."""


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
    """What makes a check in the seconds that are left, and its time limit, within which it imports what it needs."""
    works: dict[str, tuple[Callable[[Request], Any], float]] = {
        "packages": (_packages, QUICK_LIMIT),
        "limits": (_limits, QUICK_LIMIT),
        "memory": (_memory, QUICK_LIMIT),
        "disk": (_disk, QUICK_LIMIT),
        "workspace": (_workspace, QUICK_LIMIT),
        "network": (_network, QUICK_LIMIT),
        "gpus": (_gpus, 2 * QUICK_LIMIT),
        "torch": (_torch, TORCH_LIMIT),
        "speed": (_speed, TORCH_LIMIT),
        "tokens": (lambda request: _tokens(request, left), TOKEN_SECONDS + QUICK_LIMIT),
        "index": (_index, QUICK_LIMIT),
    }
    work, limit = works[check]
    return lambda: work(request), limit


def _packages(request: Request) -> Any:
    from megacore.doctor.packages import look_at_packages

    return look_at_packages()


def _limits(request: Request) -> Any:
    from megacore.doctor.machine import look_at_limits

    return look_at_limits()


def _memory(request: Request) -> Any:
    from megacore.doctor.machine import look_at_memory

    return look_at_memory()


def _disk(request: Request) -> Any:
    from megacore.doctor.machine import look_at_disk

    return look_at_disk(Path(request.workspace))


def _workspace(request: Request) -> Any:
    from megacore.doctor.shared import look_at_workspace

    return look_at_workspace(Path(request.workspace), request.token, request.host)


def _network(request: Request) -> Any:
    from megacore.doctor.network import look_at_network

    return look_at_network(request.peers, request.interface)


def _gpus(request: Request) -> Any:
    from megacore.doctor.gpus import look_at_gpus

    return look_at_gpus()


def _torch(request: Request) -> Any:
    from megacore.doctor.compute import look_at_torch

    return look_at_torch(request.precision, request.kernels, request.compile)


def _speed(request: Request) -> Any:
    from megacore.doctor.compute import measure_speed

    return measure_speed()


def _tokens(request: Request, left: float) -> Any:
    from megacore.doctor.tokens import look_at_tokens

    seconds = min(TOKEN_SECONDS, left - TOKEN_RESERVE)
    return look_at_tokens(request.prefixes, request.vocab_size, request.share, seconds)


def _index(request: Request) -> Any:
    from megacore.doctor.tokens import look_at_index

    return look_at_index(Path(str(request.index_directory)), request.prefixes)


if __name__ == "__main__":
    main()
