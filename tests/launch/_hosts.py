"""Stand-ins for other machines: a server that runs what a fake pdsh sends, apart from the job's own processes."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

PDSH = """#!{python}
import os, socket, sys, threading

def run(rank, host, line, codes):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect({address!r})
        line = line.replace("%%", "\\0").replace("%n", str(rank)).replace("%h", host).replace("\\0", "%")
        connection.sendall(line.encode() + b"\\0")
        said = b""
        while part := connection.recv(65536):
            said += part
        output, _, code = said.rpartition(b"\\0")
        os.write(1, b"".join(host.encode() + b": " + text for text in output.splitlines(keepends=True)))
        codes.append(int(code))

assert sys.argv[1:6] == ["-S", "-R", "ssh", "-f", str(sys.argv[7].count(",") + 1)] and sys.argv[6] == "-w"
codes, (hosts, line) = [], sys.argv[7:]
threads = [threading.Thread(target=run, args=(*item, line, codes)) for item in enumerate(hosts.split(","))]
for thread in threads: thread.start()
for thread in threads: thread.join()
sys.exit(max(codes))
"""


class Hosts:
    """Runs command lines as sshd does: its own children, whose stdin ends with the connection."""

    def __init__(self, directory: Path) -> None:
        self.lines: list[str] = []
        self.programs = directory / "bin"
        self.programs.mkdir()
        address = str(directory / "hosts.socket")
        for name, text in (
            ("pdsh", PDSH.format(python=sys.executable, address=address)),
            ("ssh", "#!/bin/sh\nexit 1\n"),
        ):
            (self.programs / name).write_text(text)
            (self.programs / name).chmod(0o755)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(address)
        self._server.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        line = b""
        while not line.endswith(b"\0"):
            line += connection.recv(65536)
        self.lines.append(line[:-1].decode())
        environment = {name: value for name, value in os.environ.items() if name in ("HOME", "PATH", "LANG")}
        with subprocess.Popen(
            ["sh", "-c", self.lines[-1]],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=connection.fileno(),
            stderr=connection.fileno(),
            start_new_session=True,
        ) as process:
            assert process.stdin is not None
            stdin = process.stdin
            threading.Thread(target=lambda: connection.recv(1) == b"" and stdin.close(), daemon=True).start()
            code = process.wait()
        try:
            connection.sendall(f"\0{code}".encode())
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # it was closed on the other side
            pass
        connection.close()
