"""What the agents of other machines report of their ranks, in a file that the supervisor finds."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megacore.artifact.files import workspace_errors, write_json
from megacore.launch.rank_table import StateReport
from megacore.launch.watch import Trouble

REPORT = "launcher_report.json"
"""Beside the ranks' reasons."""


@dataclass(frozen=True)
class Report:
    """Why a job is ended, and where its ranks stood."""

    trouble: Trouble
    """What was wrong."""
    states: Mapping[int, StateReport]
    """By rank; those of machines that did not answer are missing."""


def write_report(directory: Path, report: Report) -> None:
    """Write it atomically. Raises WorkspaceError."""
    path = directory / REPORT
    with workspace_errors(path):
        write_json(
            path,
            {
                "trouble": asdict(report.trouble),
                "states": {str(rank): asdict(state) for rank, state in report.states.items()},
            },
        )


def read_report(directory: Path) -> Report | None:
    """The report; None where there is none."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        said = json.loads((directory / REPORT).read_text(encoding="utf-8"))
        trouble = Trouble(**{name: tuple(ranks) for name, ranks in said["trouble"].items()})
        return Report(trouble, {int(rank): StateReport(**state) for rank, state in said["states"].items()})
    return None
