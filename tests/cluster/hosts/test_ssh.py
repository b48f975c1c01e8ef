"""Commands on other machines: what interrupts the waiting ends them."""

import signal
import time
from types import FrameType

import pytest

from megacore.cluster.hosts.ssh import Ssh, run_on_hosts


def test_each_host_has_its_words_and_its_stdin() -> None:
    words = {"localhost": ["cat"], "127.0.0.1": ["sh", "-c", "echo no >&2; exit 3"]}
    first, second = run_on_hosts(
        Ssh(), [*words], words, stdin={"localhost": b"in", "127.0.0.1": b""}, timeout=10
    )
    assert (first.output, first.problem) == (b"in", None)
    assert second.problem == "the command ended with code 3: no"


def test_a_host_that_does_not_answer_in_time_is_left() -> None:
    (found,) = run_on_hosts(Ssh(), ["localhost"], ["sleep", "60"], timeout=0.2)
    assert found.problem == "it did not answer in time"


def test_what_interrupts_the_waiting_ends_the_commands() -> None:
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
