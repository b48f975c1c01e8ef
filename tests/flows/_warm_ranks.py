"""Single ranks forked from a server that has imported torch and transformers already.

`python -m` would import them again for each rank, which takes longer than the work of a tiny model.
"""

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megacore.artifact.build import lock_file
from megacore.launch import supervise as real
from megacore.launch.failure import Attempt
from megacore.launch.watch import KillCounter
from megacore.observe.heartbeat import read_heartbeats
from tests._limits import HANG

_POLL = 0.05
_WITH_LOCK = ("megacore.ranks.pretrain", "megacore.ranks.finetune")
"""Entry points of ranks that must not outlive the lock of their run."""


def supervise(
    command: list[str],
    *,
    log: Path,
    exit_directory: Path,
    env: dict[str, str],
    on_poll: Callable[[], None],
    inherited: Sequence[int] = (),
    **values: Any,
) -> None:
    """Run the rank of `python -m MODULE ARGUMENTS` to its end, without a guard.

    Errors are those of `megacore.launch.supervise`, which also runs commands with several ranks.
    """
    interpreter, option, module, *arguments = command
    run = exit_directory.absolute().parent
    if module in _WITH_LOCK and run.name != "epoch":  # of a batch size search, which has no lock
        held = [Path(os.readlink(f"/proc/self/fd/{descriptor}")) for descriptor in inherited]
        assert held == [lock_file(run)]
    if (interpreter, option) != (sys.executable, "-m") or not module.startswith("megacore.ranks."):
        real.supervise(
            command,
            log=log,
            exit_directory=exit_directory,
            env=env,
            on_poll=on_poll,
            inherited=inherited,
            **values,
        )
        return
    real._prepare(log, exit_directory)
    written = log.stat().st_size if log.exists() else 0
    attempt = Attempt(module, log, written, exit_directory, 1, KillCounter())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests._warm"])
    rank = context.Process(
        target=_run, args=(module, arguments, os.environ | env, os.getcwd(), log), daemon=True
    )
    deadline, changes = time.monotonic() + HANG, -1
    rank.start()
    try:
        while rank.is_alive():
            on_poll()
            if (now := sum(beat.changes for beat in read_heartbeats(exit_directory))) != changes:
                changes, deadline = now, time.monotonic() + HANG
            assert time.monotonic() < deadline, f"{module} has not beaten for {HANG:.0f} s"
            rank.join(_POLL)
    finally:
        rank.kill()
        rank.join()
    on_poll()
    if error := real._verdict(attempt, rank.exitcode):
        raise error


def _run(
    module: str, arguments: list[str], environment: dict[str, str], directory: str, log: Path
) -> None:
    with open(log, "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)  # it runs as `python -m` runs it, not as it was imported
    runpy.run_module(module, run_name="__main__", alter_sys=True)
