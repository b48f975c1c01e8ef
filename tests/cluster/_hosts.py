"""Stand-ins for other hosts: a real sshd on 127.0.0.1.

It runs commands in processes that are not descendants of the job's processes.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests._limits import HANG

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def sshd_problem() -> str | None:
    """Return the reason why sshd cannot run on this host, or None if it can."""
    if SSHD is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        return "ssh, sshd and ssh-keygen are not all installed"
    if os.geteuid() == 0:
        if not Path("/run/sshd").is_dir():
            return "sshd needs /run/sshd, which is not there"
        if any(line.startswith("root:!") for line in Path("/etc/shadow").read_text().splitlines()):
            return "sshd lets nobody into a locked account, as root's is"
    return None


class Hosts:
    """Hosts `one` and `two`, which are both this host, and `gone`, where no server listens."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        for name in ("host_key", "identity"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)]
            subprocess.run(command, check=True, timeout=HANG)
        with socket.socket() as probe, socket.socket() as other:
            probe.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", 0))
            self.port, closed = probe.getsockname()[1], other.getsockname()[1]
        self.ssh_config = directory / "ssh_config"
        lines = [
            "Host gone",
            f"  Port {closed}",
            "Host *",
            "  HostName 127.0.0.1",
            f"  Port {self.port}",
        ]
        lines += [
            f"  IdentityFile {directory / 'identity'}",
            "  IdentitiesOnly yes",
            "  StrictHostKeyChecking no",
        ]
        lines += [f"  UserKnownHostsFile {directory / 'known'}", "  LogLevel ERROR"]
        self.ssh_config.write_text("\n".join(lines) + "\n")
        (directory / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {directory / 'host_key'}\n"
            f"AuthorizedKeysFile {directory / 'identity.pub'}\nPermitRootLogin yes\n"
            "PasswordAuthentication no\n"
            "KbdInteractiveAuthentication no\nUsePAM no\nStrictModes no\nUseDNS no\nPidFile none\n"
            "MaxStartups 100\n"
        )
        self._log = open(directory / "sshd.log", "wb")  # noqa: SIM115  open while sshd runs
        self._server = subprocess.Popen(
            [str(SSHD), "-D", "-e", "-f", str(directory / "sshd_config")],
            stderr=self._log,
            start_new_session=True,
        )
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + HANG
        while time.monotonic() < deadline:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), timeout=1),
            ):
                return
            time.sleep(0.05)
        raise AssertionError((self.directory / "sshd.log").read_text())

    def hostfile(self, *names: str, slots: int = 1) -> Path:
        path = self.directory / f"hostfile-{'-'.join(names)}-{slots}"
        path.write_text("".join(f"{name} slots={slots}\n" for name in names))
        return path

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait(timeout=HANG)
        self._log.close()
