from pathlib import Path

import pytest

from megacore.launch.launcher_state import (
    forget_launcher_state,
    launcher_state_path,
    read_launcher_state,
    write_launcher_state,
)


def test_launcher_state_round_trips_until_it_is_forgotten(tmp_path: Path) -> None:
    directory = tmp_path / "exit"
    assert read_launcher_state(directory) is None
    write_launcher_state(directory, "queued", "PENDING (Resources)")
    write_launcher_state(directory, "running", "RUNNING on node-1")
    state = read_launcher_state(directory)
    assert state is not None
    assert (state.state, state.detail) == ("running", "RUNNING on node-1")
    assert not list(directory.glob("rank_*"))
    forget_launcher_state(directory)
    forget_launcher_state(directory)
    assert read_launcher_state(directory) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"state": "lost", "detail": "", "time": 0}', '{"state": "queued"}']
)
def test_torn_launcher_state_is_ignored(text: str, tmp_path: Path) -> None:
    launcher_state_path(tmp_path).write_text(text)
    assert read_launcher_state(tmp_path) is None
