import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megacore.cluster.batch import meeting
from megacore.cluster.batch.meeting import CalledOffError, Meeting, meet, meeting_place
from megacore.errors import ConfigError, HostLostError, LaunchError
from tests._limits import HANG
from tests.launch._processes import wait_until

NAMES = ["one", "two", "three"]
MEETINGS = [Meeting(f"10.0.0.{rank}", 4000 + rank, "") for rank in range(3)]


def meet_all(tmp_path: Path) -> list[Meeting]:
    """Return the meeting that each of three nodes learns."""
    with ThreadPoolExecutor(3) as pool:
        jobs = [
            pool.submit(meet, tmp_path / "nodes", rank, NAMES, MEETINGS[rank], limit=HANG)
            for rank in range(3)
        ]
        return [job.result() for job in jobs]


def test_all_nodes_learn_the_address_of_the_first(tmp_path: Path) -> None:
    meetings = meet_all(tmp_path)
    assert {(meeting.address, meeting.port) for meeting in meetings} == {("10.0.0.0", 4000)}
    assert [meeting.peer for meeting in meetings] == ["10.0.0.1", "10.0.0.0", "10.0.0.0"]


def test_files_of_an_earlier_start_are_ignored(tmp_path: Path) -> None:
    meet_all(tmp_path)
    folder = tmp_path / "nodes"
    with pytest.raises(
        HostLostError, match=r"two, three did not begin within 1 s, or does not see .*nodes as"
    ):
        meet(folder, 0, NAMES, MEETINGS[0], limit=1.0)
    with pytest.raises(HostLostError, match="one, three did not begin within 1 s"):
        meet(folder, 1, NAMES, MEETINGS[1], limit=1.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_node_names_the_node_that_is_absent(rank: int, tmp_path: Path) -> None:
    """The reason of the node that gives up first is the flow's error."""
    folder, other, done = tmp_path / "nodes", 1 - rank, threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            meet, folder, other, NAMES, MEETINGS[other], called_off=done.is_set, limit=HANG
        )
        try:
            wait_until(meeting._greeting_path(folder, other).exists, HANG, "the other node")
            with pytest.raises(HostLostError, match=r"^three did not begin within 1\.5 s"):
                meet(folder, rank, NAMES, MEETINGS[rank], limit=1.5)
        finally:
            done.set()
        with pytest.raises(CalledOffError):
            waiting.result()


def test_different_versions_are_refused_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = threading.local()
    monkeypatch.setattr(
        meeting, "shared_versions", lambda: {"Python": "3.11.2", "torch": local.torch}
    )
    called_off = threading.Event()

    def start(rank: int, torch: str) -> None:
        local.torch = torch
        try:
            meet(
                tmp_path, rank, NAMES[:2], MEETINGS[rank], called_off=called_off.is_set, limit=HANG
            )
        finally:
            called_off.set()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(start, 0, "2.13.0"), pool.submit(start, 1, "2.12.1")
        with pytest.raises(
            LaunchError,
            match=r"two has torch 2\.12\.1 and one has 2\.13\.0: install the same",
        ):
            first.result()
        with pytest.raises(CalledOffError):
            second.result()


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, ("10.0.0.1", 77)),
        ("master", ("master", 77)),
        ("master:88", ("master", 88)),
    ],
)
def test_configured_endpoint_precedes_the_first_node(
    setting: str | None, expected: tuple[str, int]
) -> None:
    assert meeting_place(setting, "10.0.0.1", 77) == expected


def test_meeting_place_has_a_free_port_by_default() -> None:
    assert meeting_place(None, "10.0.0.1")[1] > 1024


def test_invalid_rdzv_endpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match=re.escape("launch.rdzv_endpoint is 'master:x'")):
        meeting_place("master:x", "10.0.0.1")
