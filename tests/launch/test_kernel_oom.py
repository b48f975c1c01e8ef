"""Where the kernel's count of processes that it killed for memory is found."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from megacore.launch.watch import KillCounter, memory_text, oom_kills

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
def test_the_own_groups_count_comes_before_the_machines(
    tmp_path: Path, files: dict[str, str], count: int
) -> None:
    for name, text in {"proc/vmstat": "pgfault 1\noom_kill 9\n", **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert oom_kills(tmp_path) == count


def test_where_nobody_counts(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) is None
    counter = KillCounter(lambda: None)
    assert not counter.counts
    assert not counter.rose


@pytest.mark.parametrize(("counts", "rose"), [((1, 1), False), ((1, 2), True), ((1, None), False)])
def test_a_kill_meanwhile(counts: Sequence[int | None], rose: bool) -> None:
    assert KillCounter(iter(counts).__next__).rose is rose


def test_this_machines_memory_is_said() -> None:
    assert memory_text().endswith(" GiB of main memory")
