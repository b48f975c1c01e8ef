"""Checks with a time limit each: what hangs, as on a dead file share, is left behind and named."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from megacore.errors import MegacoreError

NO_ANSWER = "no answer"
"""With which a problem begins that is a want of time."""
NOT_BEGUN = f"{NO_ANSWER}: the time was up before it was begun"


def limited(work: Callable[[], Any], seconds: float) -> Any:
    """What `work` returns, in a thread that nobody waits for longer than this.

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


def answer(check: str, work: Callable[[], Any], seconds: float) -> dict[str, Any]:
    """A check's line: its value, or why there is none."""
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


def say(line: Mapping[str, Any]) -> None:
    """Write a line to stdout at once: what follows may hang."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def leave(code: int = 0) -> NoReturn:
    """End without waiting for a thread that hangs; who reads the output sees its end even so."""
    for descriptor in (0, 1, 2):
        with suppress(OSError):
            os.close(descriptor)
    os._exit(code)
