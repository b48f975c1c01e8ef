"""Files that every host needs, and their copies to other hosts.

rsync copies them over the user's ssh, under a guard that ends rsync with this process.
"""

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megacore.cluster.hosts.ssh import Ssh
from megacore.errors import HostLostError, LaunchError
from megacore.launch.guard import guarded

COPY_MARK = "copied"
"""Name of the file that marks a checkpoint as copied to this host.

A marked checkpoint may be deleted when the run resumes from another one.
"""
_SILENCE = 60
"""Seconds without a byte after which rsync gives up."""
_LOST = frozenset({10, 12, 30, 35, 255})
"""Exit codes of rsync for a failed, broken or silent connection, and ssh's exit code."""
_POLL = 0.5
_GRACE = 1.0


@dataclass
class Entry:
    """State of one file on this host."""

    size: int
    """Size in bytes."""
    mtime_ns: int
    """Modification time in nanoseconds; a file with this size and time counts as equal, unless
    `full` is set."""
    sha256: str | None
    """Hex digest of the content; None if it is not recorded."""


@dataclass
class Item:
    """Files of one directory that belong together."""

    role: str
    """Description of the files, for messages."""
    directory: Path
    """Directory of the files, at the same path on every host."""
    whole: bool
    """True if the directory contains no other files and is renamed into place as a whole; False if
    each file is renamed separately."""
    entries: dict[str, Entry]
    """Files by path relative to `directory`, in the order of their renaming."""
    full: bool = False
    """True to compare all digests, False to compare sizes and times."""
    checkpoint: bool = False
    """True if the directory is a checkpoint."""

    def to_json(self) -> dict[str, Any]:
        """Return the item as JSON values, for another host."""
        entries = {
            name: [entry.size, entry.mtime_ns, entry.sha256] for name, entry in self.entries.items()
        }
        return {**vars(self), "directory": str(self.directory), "entries": entries}

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """Build an item from the values of `to_json`."""
        entries = {name: Entry(*entry) for name, entry in values["entries"].items()}
        return cls(**{**values, "directory": Path(values["directory"]), "entries": entries})


@dataclass(frozen=True)
class Transfer:
    """Copy of files from a directory on this host to a directory on another host."""

    host: str
    source: Path
    names: tuple[str, ...]
    """Paths of the files relative to `source` and to `target`."""
    target: Path
    size: int
    """Total size of the files in bytes."""


class Copier:
    """Copier of files to several hosts in parallel; an error ends all its rsync processes."""

    def __init__(self, ssh: Ssh) -> None:
        """Keep the settings of ssh; nothing is copied yet."""
        self._ssh = ssh
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def copy(self, transfers: dict[str, list[Transfer]]) -> None:
        """Make the transfers, one after the other for each host, and for all hosts in parallel.

        Raises LaunchError if a file cannot be copied, and HostLostError if a connection broke.
        """
        with ThreadPoolExecutor(max(1, len(transfers))) as pool:
            pending = {pool.submit(self._to_host, batch) for batch in transfers.values()}
            try:
                while pending:
                    done, pending = wait(pending, timeout=_POLL, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()
            except BaseException:
                self._stop()
                raise

    def _to_host(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            with tempfile.NamedTemporaryFile(prefix="megacore-files-") as listing:
                listing.write(b"".join(name.encode() + b"\0" for name in transfer.names))
                listing.flush()
                self._run(transfer, rsync_command(self._ssh, transfer, Path(listing.name)))

    def _run(self, transfer: Transfer, command: list[str]) -> None:
        pipe = subprocess.PIPE
        with subprocess.Popen(
            guarded(command, _GRACE), stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT
        ) as process:
            self._running.add(process)
            if self._stopped:
                process.terminate()
            assert process.stdout is not None
            # Read to the end. stdin stays open: the guard ends rsync when it is closed.
            output = process.stdout.read()
        self._running.discard(process)
        if process.returncode == 0 or self._stopped:
            return
        kind = HostLostError if process.returncode in _LOST else LaunchError
        last = " ".join(output.decode(errors="replace").split())[-300:]
        raise kind(
            f"host {transfer.host}: {transfer.source} cannot be copied to {transfer.target} by "
            f"rsync (code {process.returncode}): {last or 'no message'}"
        )

    def _stop(self) -> None:
        self._stopped = True
        for process in list(self._running):
            process.terminate()


def check_rsync(host: str, *, there: bool) -> None:
    """Raise LaunchError unless rsync is installed on this host and, by `there`, on `host`."""
    for name, missing in (
        ("this machine", shutil.which("rsync") is None),
        (f"host {host}", not there),
    ):
        if missing:
            raise LaunchError(
                f"{name} has no rsync, by which files are copied to {host}: install it there "
                "(apt-get install rsync), or put the files there by hand, at the same paths"
            )


def rsync_command(ssh: Ssh, transfer: Transfer, listing: Path) -> list[str]:
    """Return the rsync command that copies the listed files, with their times, over ssh."""
    return [
        "rsync",
        "--times",
        "--perms",
        "--whole-file",
        "--protect-args",
        f"--timeout={_SILENCE}",
        "--from0",
        f"--files-from={listing}",
        f"--rsh={' '.join(map(_rsh_word, ['ssh', *ssh.options()]))}",
        f"{transfer.source}/",
        f"{transfer.host}:{transfer.target}/",
    ]


def _rsh_word(word: str) -> str:
    """Quote a word of the ssh command in rsync's --rsh.

    rsync splits that command at spaces outside of quotes; quotes inside of quotes are doubled.
    """
    return '"' + word.replace('"', '""') + '"' if set(word) & set(" \"'") else word
