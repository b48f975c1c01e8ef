"""Search for the kernel's count of out-of-memory kills."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from megacore.launch.watch import RECENT, KillCounter, memory_text, oom_kills

V1 = "9:name=systemd:/\n4:cpu,memory:/job/7\n0::/\n"


@pytest.mark.parametrize(
    ("files", "count"),
    [
        (
            {
                "proc/self/cgroup": "0::/job/7\n",
                "sys/fs/cgroup/job/7/memory.events": "oom 5\noom_kill 3\n",
            },
            3,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.events": "oom_kill 4\n"}, 4),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/memory/job/7/memory.oom_control": "under_oom 0\noom_kill 6\n",
            },
            6,
        ),
        ({"proc/self/cgroup": V1, "sys/fs/cgroup/memory/memory.oom_control": "oom_kill 2\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.events": "oom_kill 0\n"}, 0),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/memory/job/7/memory.oom_control": "under_oom 0\n",
            },
            9,
        ),
        ({}, 9),
    ],
)
def test_count_of_the_control_group_precedes_the_count_of_the_host(
    tmp_path: Path, files: dict[str, str], count: int
) -> None:
    for name, text in {"proc/vmstat": "pgfault 1\noom_kill 9\n", **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert oom_kills(tmp_path) == count


def test_missing_count_never_rises(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) is None
    counter = KillCounter(lambda: None)
    assert not counter.counts
    assert not counter.rose


@pytest.mark.parametrize(
    ("counts", "rose"),
    [((1, 1), False), ((1, 2), True), ((1, None), False), ((None, 1), False)],
)
def test_counter_rises_only_with_a_higher_count(counts: Sequence[int | None], rose: bool) -> None:
    assert KillCounter(iter(counts).__next__).rose is rose


@pytest.mark.parametrize(("age", "rose"), [(30, True), (90, False)])
def test_an_old_kill_is_not_the_reason_for_a_lost_rank(age: int, rose: bool) -> None:
    now, count = 1000.0, 4
    counter = KillCounter(lambda: count, clock=lambda: now)
    for second in range(200):
        now += 1.0
        count = 5 if second >= 200 - age else 4
        counter.look()
    assert counter.rose is rose


def test_a_kill_while_nothing_was_read_is_recent() -> None:
    now, count = 1000.0, 4
    counter = KillCounter(lambda: count, clock=lambda: now)
    now, count = 1500.0, 5
    counter.look()
    assert counter.rose


def test_a_kill_that_grew_old_since_the_last_reading_does_not_count() -> None:
    now, counts = 1000.0, iter([4, 5, 5])
    counter = KillCounter(counts.__next__, clock=lambda: now)
    now += 1.0
    counter.look()
    now += RECENT
    assert not counter.rose


def test_a_count_that_cannot_be_read_for_a_moment_is_left_out() -> None:
    now, counts = 1000.0, iter([4, None, 5])
    counter = KillCounter(counts.__next__, clock=lambda: now)
    now += 1.0
    counter.look()
    now += RECENT
    assert counter.rose


def test_memory_text_gives_host_memory_in_gib() -> None:
    assert memory_text().endswith(" GiB of host memory")
