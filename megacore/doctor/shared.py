"""The proof that all hosts see one workspace: what each of them writes there is read by the others."""

import secrets
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from megacore.artifact.files import workspace_errors

_HEAD = "head"
_WAIT = 5.0
"""Seconds in which a file share must show a new file to another machine."""
_POLL = 0.05
_STALE = 3600.0
"""Seconds after which a proof is taken for that of a doctor that was killed."""
PREFIX = ".doctor-"


class Proof:
    """A directory of the workspace in which the hosts leave their names; gone with the context."""

    def __init__(self, workspace: Path) -> None:
        """Nothing is written yet."""
        self.directory = workspace / f"{PREFIX}{secrets.token_hex(8)}"

    def __enter__(self) -> "Proof":
        """Write the head's part. Raises WorkspaceError."""
        _remove_stale(self.directory.parent)
        with workspace_errors(self.directory):
            self.directory.mkdir(parents=True)
            (self.directory / _HEAD).write_text(self.directory.name, encoding="ascii")
        return self

    def __exit__(self, *_: object) -> None:
        """Remove all parts that this machine sees."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def seen(self, hosts: Iterable[str]) -> dict[str, bool]:
        """Whether this machine sees what each host has written."""
        deadline = time.monotonic() + _WAIT
        return {host: _appears(self.directory / host, self.directory.name, deadline) for host in hosts}


def look_at_workspace(workspace: Path, token: str | None, host: str) -> dict[str, Any]:
    """Whether a host can write to the workspace, and whether it sees there what the head has written.

    Args:
        workspace: its path.
        token: the proof's directory; None where each host has a workspace of its own.
        host: this one's name.
    """
    if token is None:
        return {"exists": workspace.is_dir(), "writes": _writes(workspace), "sees_head": None}
    directory = Path(token)
    found: dict[str, Any] = {"exists": workspace.is_dir(), "sees_head": False, "writes": None}
    if not found["exists"]:
        return found
    found["sees_head"] = _appears(directory / _HEAD, directory.name, time.monotonic() + _WAIT)
    if found["sees_head"]:
        try:
            (directory / host).write_text(directory.name, encoding="ascii")
            found["writes"] = True
        except OSError as error:
            found["writes"] = False
            found["reason"] = error.strerror
    return found


def _writes(workspace: Path) -> bool | None:
    """Whether a file can be made there; None where the directory is missing."""
    if not workspace.is_dir():
        return None
    probe = workspace / f"{PREFIX}{secrets.token_hex(8)}"
    try:
        probe.write_bytes(b"x")
    except OSError:
        return False
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return True


def _appears(path: Path, content: str, deadline: float) -> bool:
    while True:
        try:
            if path.read_text(encoding="ascii") == content:
                return True
        except (OSError, ValueError):
            pass  # not there yet, or half written
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)


def _remove_stale(workspace: Path) -> None:
    for path in workspace.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
