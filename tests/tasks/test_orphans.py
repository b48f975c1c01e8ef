"""What a killed flow leaves of the server that it brought along: nothing."""

import os
import subprocess
import sys
import time
from pathlib import Path

from tasks._orphans import MARK, servers

ROOT = Path(__file__).parents[2]
FLOW = """
import subprocess, sys, time
from tasks._orphans import watch_over_server
watch_over_server()
# A process that looks like the server, and one that does not.
for name in ("prefect.server.api.server:create_app", "another"):
    sleep = [sys.executable, "-c", "import time; time.sleep(60)", name]
    subprocess.Popen(sleep, start_new_session=True)
print("started", flush=True)
time.sleep(60)
"""


def processes_of(token: str) -> list[int]:
    """Ids of the processes that carry a flow's mark."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if f"{MARK}={token}".encode() in Path("/proc", name, "environ").read_bytes().split(
                b"\0"
            ):
                found.append(int(name))
        except OSError:
            continue
    return found


def test_a_killed_flow_takes_its_server_along_and_nothing_else() -> None:
    flow = subprocess.Popen([sys.executable, "-c", FLOW], cwd=ROOT, stdout=subprocess.PIPE)
    assert flow.stdout is not None
    assert flow.stdout.readline() == b"started\n"
    (watcher,) = (
        pid
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))
        if parent_of(pid) == flow.pid and watches(pid)
    )
    token = Path(f"/proc/{watcher}/cmdline").read_bytes().split(b"\0")[-2].decode()
    deadline = time.monotonic() + 30
    while len(processes_of(token)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(servers(token)) == 1
    flow.kill()
    flow.wait()
    flow.stdout.close()
    while servers(token) or watcher in processes_of(token):
        assert time.monotonic() < deadline, "the server outlives its flow"
        time.sleep(0.05)
    (other,) = processes_of(token)
    os.kill(other, 9)


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def watches(pid: int) -> bool:
    try:
        return b"tasks._orphans" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
