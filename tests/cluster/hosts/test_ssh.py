"""Commands on other hosts: input, time limit and interruption."""

import signal
import time
from types import FrameType

import pytest

from megacore.cluster.hosts.ssh import Ssh, run_on_hosts


def test_each_host_gets_its_command_and_its_stdin() -> None:
    commands = {"localhost": ["cat"], "127.0.0.1": ["sh", "-c", "echo no >&2; exit 3"]}
    first, second = run_on_hosts(
        Ssh(), [*commands], commands, stdin={"localhost": b"in", "127.0.0.1": b""}, timeout=10
    )
    assert (first.output, first.problem) == (b"in", None)
    assert second.problem == "the command ended with code 3: no"


def test_host_that_exceeds_the_time_limit_has_a_problem() -> None:
    (result,) = run_on_hosts(Ssh(), ["localhost"], ["sleep", "60"], timeout=0.2)
    assert result.problem == "it did not answer in time"


def test_interruption_ends_the_commands() -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    started = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            run_on_hosts(Ssh(), ["localhost", "127.0.0.1"], ["sleep", "60"], timeout=60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - started < 10
