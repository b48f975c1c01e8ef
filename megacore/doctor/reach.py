"""Whether hosts reach each other's ports: `python -m megacore.doctor.reach` listens, and connects to the others.

Every host listens at one port until those that were told to connect have done so, or the time is up. The first host's
port is the one at which the ranks meet.
"""

import json
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from megacore.doctor.limited import leave, say

CONNECT_SECONDS = 6.0
"""In which a port must be reached; the host at the other end may start a little later."""
_TRY_SECONDS = 2.0
_PAUSE = 0.1


def main() -> None:
    """Read {"host", "port", "expected", "targets": {host: [address, port]}, "seconds"}; write what was reached."""
    said = json.loads(sys.stdin.buffer.read())
    ends = time.monotonic() + float(said["seconds"])
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    problem, heard = None, threading.Semaphore(0)
    try:
        server.bind(("", int(said["port"])))
        server.listen(128)
        threading.Thread(target=_serve, args=(server, heard), daemon=True).start()
    except OSError as error:
        problem = error.strerror or str(error)
    reached = connect_to_all(said["host"], said["targets"], min(CONNECT_SECONDS, float(said["seconds"])))
    for _ in range(0 if problem else int(said["expected"])):
        if not heard.acquire(timeout=max(0.0, ends - time.monotonic())):
            break
    say({"check": "reach", "value": {"port": said["port"], "listens": problem, "reached": reached}})
    leave()


def connect_to_all(
    host: str, targets: Mapping[str, tuple[str, int]], limit: float = CONNECT_SECONDS
) -> dict[str, dict[str, Any]]:
    """Connect to each target at the same time: seconds of the connection, or why there is none within `limit`."""
    reached: dict[str, dict[str, Any]] = {}

    def run(name: str, address: str, port: int) -> None:
        reached[name] = _connect(host, address, port, limit)

    threads = [threading.Thread(target=run, args=(name, *target), daemon=True) for name, target in targets.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return reached


def _connect(host: str, address: str, port: int, limit: float) -> dict[str, Any]:
    """Try until it is reached; what was in the way last says why it is not."""
    ends = time.monotonic() + limit
    problem = ""
    while time.monotonic() < ends:
        started = time.monotonic()
        try:
            with socket.create_connection((address, port), timeout=_TRY_SECONDS) as connection:
                seconds = time.monotonic() - started
                connection.sendall(f"{host}\n".encode())
            return {"seconds": round(seconds, 6), "address": address, "port": port, "problem": None}
        except TimeoutError:
            problem = "no answer, as behind a firewall that drops packets"
        except ConnectionRefusedError:
            problem = "connection refused: nothing listens there, or a firewall rejects it"
        except OSError as error:
            problem = error.strerror or str(error)
        time.sleep(_PAUSE)
    return {"seconds": None, "address": address, "port": port, "problem": problem}


def _serve(server: socket.socket, heard: threading.Semaphore) -> None:
    """Count the hosts that connect and say their name."""
    while True:
        connection, _ = server.accept()
        connection.settimeout(_TRY_SECONDS)
        with connection:
            try:
                said = connection.recv(256)
            except OSError:
                continue
            if said.endswith(b"\n"):
                heard.release()


if __name__ == "__main__":
    main()
