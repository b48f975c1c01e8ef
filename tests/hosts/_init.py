"""First process of a simulated host, which prepares its file system and runs until stdin closes.

It is started in separate mount, UTS, IPC, PID and network namespaces with one JSON argument:
`name`, `hosts` (its /etc/hosts), `shadow` (replacement of /etc/shadow, or null), `binds` (mounted
path: path on this machine) and `sshd` (the configuration of its sshd).
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
    # The old /sys shows the network outside of the namespaces; its control groups are still valid.
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
    for path, source in binds.items():
        mount("--bind", source, path)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def main() -> None:
    options = json.loads(sys.argv[1])
    prepare(options["name"], options["hosts"], options["shadow"], options["binds"])
    server = subprocess.Popen(
        ["/usr/sbin/sshd", "-D", "-e", "-f", options["sshd"]], stdin=subprocess.DEVNULL
    )

    def exit_with_the_rig() -> None:
        while sys.stdin.buffer.read(1):
            pass
        os._exit(0)  # the kernel then ends every process of this namespace

    threading.Thread(target=exit_with_the_rig, daemon=True).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:  # like init, the parent of orphaned processes
        pid, _ = os.waitpid(-1, 0)
        if pid == server.pid:
            os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
