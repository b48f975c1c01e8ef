"""A real Slurm cluster on this host: munge, a controller and two node daemons.

All have separate keys, files and ports.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests._limits import HANG

PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scontrol",
    "squeue",
    "scancel",
    "sinfo",
)
PORTS = range(47800, 47960, 3)

CONF = """\
ClusterName=trial
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=3
MinJobAge=120
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=node-1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 State=UNKNOWN
NodeName=node-2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 State=UNKNOWN
PartitionName=normal Nodes=ALL Default=YES PriorityTier=1 State=UP
PartitionName=spot Nodes=ALL PriorityTier=1 PreemptMode=CANCEL State=UP
PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A running cluster."""

    folder: Path

    @property
    def conf(self) -> str:
        """Path of slurm.conf, the value of SLURM_CONF."""
        return str(self.folder / "slurm.conf")

    def run(self, *words: str) -> str:
        """Run one of Slurm's commands and return its output."""
        environment = {**os.environ, "SLURM_CONF": self.conf}
        result = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=HANG, check=False
        )
        assert result.returncode == 0, f"{words}: {result.stderr}"
        return result.stdout

    def jobs(self) -> dict[str, str]:
        """Return the state of each job in the queue, by job id."""
        lines = self.run("squeue", "--noheader", "--format=%A %T").splitlines()
        return {line.split()[0]: line.split()[1] for line in lines}

    def cancel_all(self) -> None:
        """Cancel all jobs and wait until the queue is empty."""
        for job in self.jobs():
            self.run("scancel", job)
        started = time.monotonic()
        while self.jobs() and time.monotonic() - started < HANG:
            time.sleep(0.2)


def require_slurm() -> None:
    """Skip the test if Slurm cannot run on this host."""
    for program in PROGRAMS:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("only root can run slurmd for others, and the test's Slurm runs as root")


@contextlib.contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    """Run a cluster of two nodes, both this host; all its processes end with the block."""
    require_slurm()
    folder.chmod(0o755)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    ports = _free_ports()
    values = {
        "folder": folder,
        "host": socket.gethostname(),
        "port": ports[0],
        "first": ports[1],
        "second": ports[2],
    }
    (folder / "slurm.conf").write_text(CONF.format(**values))
    slurm = Slurm(folder)
    with contextlib.ExitStack() as stack:
        munge = [
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={folder}/munge.socket",
            "--num-threads=2",
        ]
        munge += [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
        stack.enter_context(_daemon(slurm, "munged", *munge))
        _wait(lambda: (folder / "munge.socket").exists(), slurm)
        stack.enter_context(_daemon(slurm, "slurmctld", "-D", "-c"))
        for node in ("node-1", "node-2"):
            (folder / f"spool-{node}").mkdir()
            stack.enter_context(_daemon(slurm, "slurmd", "-D", "-N", node))
        _wait(lambda: _idle(slurm) == 2, slurm)
        try:
            yield slurm
        finally:
            slurm.cancel_all()


@contextlib.contextmanager
def _daemon(slurm: Slurm, *words: str) -> Iterator[None]:
    with open(
        slurm.folder / f"{words[0]}{words[-1] if words[0] == 'slurmd' else ''}.out", "wb"
    ) as output:
        environment = {**os.environ, "SLURM_CONF": slurm.conf}
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _idle(slurm: Slurm) -> int:
    result = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--partition=normal", "--format=%T"],
        env={**os.environ, "SLURM_CONF": slurm.conf},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    return result.stdout.split().count("idle")


def _wait(condition: Callable[[], bool], slurm: Slurm) -> None:
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > 120:  # a busy machine must not hide these tests
            logs = "".join(
                path.read_text(errors="replace")[-2000:]
                for path in sorted(slurm.folder.glob("*.out"))
            )
            pytest.skip(f"Slurm does not run on this machine: {logs}")
        time.sleep(0.1)


def _free_ports() -> list[int]:
    """Return three consecutive free ports."""
    for first in PORTS:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in (first, first + 1, first + 2):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return [first, first + 1, first + 2]
    pytest.skip("no three ports in a row are free for Slurm")
