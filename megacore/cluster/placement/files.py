"""Files that have to be on every machine, and their copies there.

They are copied by rsync over the user's own ssh, under a guard that ends it with this process.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megacore.cluster.hosts.ssh import Ssh
from megacore.errors import HostLostError, LaunchError

COPY_MARK = "copied"
"""A file in a checkpoint that was copied to this machine, and may be deleted when the run goes on
from another."""
_SILENCE = 60
"""Seconds without a byte after which rsync gives up."""
_LOST = frozenset({10, 12, 30, 35, 255})
"""rsync's exit codes of a connection that failed, broke or went silent, and ssh's."""
_POLL = 0.5
_GRACE = 1.0


@dataclass
class Entry:
    """One file as it is on this machine."""

    size: int
    """Bytes."""
    mtime_ns: int
    """Modification time: a file with this size and time is taken to be the same, unless `full` is
    asked for."""
    sha256: str | None
    """Hex digest of the content; None where nothing has recorded it."""


@dataclass
class Item:
    """Files that belong together in one directory."""

    role: str
    """What they are, in words."""
    directory: Path
    """Where they lie, at the same path on every machine."""
    whole: bool
    """Whether the directory holds nothing else and appears, whole, under its name; else each file
    for itself."""
    entries: dict[str, Entry]
    """By path relative to `directory`, in the order in which they are put there."""
    full: bool = False
    """Whether every hash is compared, else sizes and times."""
    checkpoint: bool = False
    """Whether it is one."""

    def to_json(self) -> dict[str, Any]:
        """For another machine."""
        entries = {
            name: [entry.size, entry.mtime_ns, entry.sha256] for name, entry in self.entries.items()
        }
        return {**vars(self), "directory": str(self.directory), "entries": entries}

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """What `to_json` returned."""
        entries = {name: Entry(*entry) for name, entry in values["entries"].items()}
        return cls(**{**values, "directory": Path(values["directory"]), "entries": entries})


@dataclass(frozen=True)
class Transfer:
    """Files of one directory here for one directory there."""

    host: str
    source: Path
    names: tuple[str, ...]
    """Relative to `source`, and below `target` likewise."""
    target: Path
    size: int
    """Bytes of all."""


class Copier:
    """Copies to several machines at a time; ends what it started when it is left by an error."""

    def __init__(self, ssh: Ssh) -> None:
        """Nothing is copied yet."""
        self._ssh = ssh
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def copy(
        self, transfers: dict[str, list[Transfer]], *, poll: Callable[[], None] = lambda: None
    ) -> None:
        """Make the transfers of each host in turn, those of different hosts at the same time.

        `poll` is called meanwhile from this thread. Raises LaunchError, or HostLostError where the
        connection broke.
        """
        with ThreadPoolExecutor(max(1, len(transfers))) as pool:
            pending = {pool.submit(self._to_host, each) for each in transfers.values()}
            try:
                while pending:
                    done, pending = wait(pending, timeout=_POLL, return_when=FIRST_COMPLETED)
                    poll()
                    for each in done:
                        each.result()
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
        guard = [sys.executable, "-m", "megacore.launch.guard", f"--grace={_GRACE}", "--"]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            [*guard, *command], stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT
        ) as process:
            self._running.add(process)
            if self._stopped:
                process.terminate()
            assert process.stdout is not None
            # to its end; stdin stays open, by whose end the guard knows of ours
            said = process.stdout.read()
        self._running.discard(process)
        if process.returncode == 0 or self._stopped:
            return
        kind = HostLostError if process.returncode in _LOST else LaunchError
        last = " ".join(said.decode(errors="replace").split())[-300:]
        raise kind(
            f"host {transfer.host}: {transfer.source} cannot be copied to {transfer.target} by "
            f"rsync (code {process.returncode}): {last or 'nothing was said'}"
        )

    def _stop(self) -> None:
        self._stopped = True
        for process in list(self._running):
            process.terminate()


def check_rsync(host: str, *, there: bool) -> None:
    """Raise LaunchError unless rsync is installed on this machine and on the other."""
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
    """The words that copy the listed files, with their times, over ssh as elsewhere."""
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
    """A word of rsync's own command line for ssh, which it splits at spaces outside quotes.

    A quote is doubled.
    """
    return '"' + word.replace('"', '""') + '"' if set(word) & set(" \"'") else word
