"""A rank that is killed in the first attempt, as soon as its first checkpoint is complete.

`python -m tests.flows._lost_rank` runs the module in MEGACORE_TEST_RANK with its arguments.
"""

import os
import runpy
import signal
from typing import Any

from megacore.observe.events import EventWriter

MODULE = "MEGACORE_TEST_RANK"
"""Environment variable with the name of the module."""


def main() -> None:
    """Run the module."""
    write = EventWriter.write

    def write_and_die(self: EventWriter, kind: str, **values: Any) -> None:
        write(self, kind, **values)
        if kind == "checkpoint" and self._attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    EventWriter.write = write_and_die  # type: ignore[method-assign]
    runpy.run_module(os.environ[MODULE], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
