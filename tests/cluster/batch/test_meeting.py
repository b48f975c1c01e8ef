import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megacore.cluster.batch import meeting
from megacore.cluster.batch.meeting import CalledOffError, Meeting, meet, meeting_place
from megacore.errors import ConfigError, HostLostError, LaunchError

NAMES = ["one", "two", "three"]
MINE = [Meeting(f"10.0.0.{rank}", 4000 + rank, "") for rank in range(3)]


def test_all_learn_where_the_first_one_is(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        jobs = [
            pool.submit(meet, tmp_path / "nodes", rank, NAMES, MINE[rank], limit=20)
            for rank in range(3)
        ]
        found = [job.result() for job in jobs]
    assert {(place.address, place.port) for place in found} == {("10.0.0.0", 4000)}
    assert [place.peer for place in found] == ["10.0.0.1", "10.0.0.0", "10.0.0.0"]


def test_what_an_earlier_start_left_behind_is_no_greeting(tmp_path: Path) -> None:
    test_all_learn_where_the_first_one_is(tmp_path)
    folder = tmp_path / "nodes"
    with pytest.raises(
        HostLostError, match=r"two, three did not begin within 1 s, or does not see .*nodes as"
    ):
        meet(folder, 0, NAMES, MINE[0], limit=1.0)
    with pytest.raises(HostLostError, match="one did not begin within 1 s"):
        meet(folder, 1, NAMES, MINE[1], limit=1.0)


def test_other_versions_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = threading.local()
    monkeypatch.setattr(meeting, "_versions", lambda: {"Python": "3.11.2", "torch": own.torch})
    over = threading.Event()

    def start(rank: int, torch: str) -> None:
        own.torch = torch
        try:
            meet(tmp_path, rank, NAMES[:2], MINE[rank], called_off=over.is_set, limit=20)
        finally:
            over.set()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(start, 0, "2.13.0"), pool.submit(start, 1, "2.12.1")
        with pytest.raises(
            LaunchError,
            match=r"two has torch 2\.12\.1 and one has 2\.13\.0: install the same on both",
        ):
            first.result()
        with pytest.raises(CalledOffError):
            second.result()


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        (None, ("10.0.0.1", 77)),
        ("master", ("master", 77)),
        ("master:88", ("master", 88)),
    ],
)
def test_the_endpoint_of_the_configuration_goes_first(
    setting: str | None, found: tuple[str, int]
) -> None:
    assert meeting_place(setting, "10.0.0.1", 77) == found
    assert meeting_place(None, "10.0.0.1")[1] > 1024
    with pytest.raises(ConfigError, match=re.escape("launch.rdzv_endpoint is 'master:x'")):
        meeting_place("master:x", "10.0.0.1")
