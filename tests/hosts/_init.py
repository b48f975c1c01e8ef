"""The first process of a stand-in for a machine: prepares its view of the files, and lives as long
as its stdin.

Started in mount, UTS, IPC, PID and network namespaces of its own, with one JSON word: `name`,
`hosts` (its /etc/hosts), `shadow` (what replaces /etc/shadow, or null), `binds` (path: what lies
there on this machine) and `sshd` (the configuration of its sshd).
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def prepare(name: str, hosts: str, shadow: str | None, binds: dict[str, str]) -> None:
    socket.sethostname(name)
    # The old /sys shows the network of the machine outside; its control groups are still the right
    # ones.
    mount("-t", "tmpfs", "none", "/run")
    os.makedirs("/run/cgroup")
    mount("--rbind", "/sys/fs/cgroup", "/run/cgroup")
    mount("-t", "sysfs", "none", "/sys")
    mount("--rbind", "/run/cgroup", "/sys/fs/cgroup")
    mount("-t", "proc", "proc", "/proc")
    mount("-t", "tmpfs", "none", "/dev/shm")
    os.makedirs("/run/sshd", mode=0o755)
    mount("--bind", hosts, "/etc/hosts")
    if shadow is not None:
        mount("--bind", shadow, "/etc/shadow")
    for path, there in binds.items():
        mount("--bind", there, path)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def main() -> None:
    said = json.loads(sys.argv[1])
    prepare(said["name"], said["hosts"], said["shadow"], said["binds"])
    server = subprocess.Popen(
        ["/usr/sbin/sshd", "-D", "-e", "-f", said["sshd"]], stdin=subprocess.DEVNULL
    )

    def leave_with_the_rig() -> None:
        while sys.stdin.buffer.read(1):
            pass
        os._exit(0)  # and the kernel ends every process of this namespace

    threading.Thread(target=leave_with_the_rig, daemon=True).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:  # as init does: it is the parent of whoever lost theirs
        pid, _ = os.waitpid(-1, 0)
        if pid == server.pid:
            os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
