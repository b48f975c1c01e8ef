"""The entry point of each machine of a batch job.

It finds this machine's number, meets the others, starts its ranks under the guard, and ends with
them: when they have done their work or one of them failed, when the scheduler asks for it
(SIGTERM), or when nobody follows the job any more. SIGUSR1, from the scheduler or through the
follower, is passed on to them.

    python -m megacore.cluster.batch.node slurm --spec FILE --token TOKEN
    python -m megacore.cluster.batch.node kubernetes --spec FILE --token TOKEN --jobset NAME
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from megacore.artifact.files import read_json, workspace_errors, write_json
from megacore.cluster import rank_commands
from megacore.cluster.batch.kubernetes import GROUP, PORT
from megacore.cluster.batch.meeting import CalledOffError, Meeting, meet, meeting_place
from megacore.cluster.batch.spec import BatchSpec, FollowerWatch
from megacore.cluster.hosts.network import interface_problem, interface_to, local_address
from megacore.cluster.hosts.plan import torchrun_command
from megacore.config.run import RunConfig
from megacore.errors import LaunchError, MegacoreError, ParallelLayoutError, RankLostError
from megacore.launch.exit_reason import LAUNCHER_REASON, write_launcher_reason
from megacore.launch.guard import KILL_LIMIT, catches
from megacore.plan.layouts import layout_of

_POLL = 0.5
_NAME_SECONDS = 45.0
"""In which a cluster's DNS must know a new name: it remembers for up to 30 s that it did not."""
_SCONTROL_SECONDS = 60.0
_STOPPED = 128 + signal.SIGTERM
_LEFT_BEHIND = ("rank_*.json*", "rank_*.beat*", "rank_*.stack", f"{LAUNCHER_REASON}*")


def main(arguments: list[str] | None = None) -> int:
    """Run this machine's part of the batch job; what to exit with."""
    parser = argparse.ArgumentParser(prog="megacore.cluster.batch.node", description=main.__doc__)
    schedulers = parser.add_subparsers(dest="scheduler", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--spec", type=Path, required=True, help="the batch job, as JSON")
    common.add_argument("--token", required=True, help="of the submission")
    schedulers.add_parser("slurm", parents=[common], help="started by srun, once on each machine")
    pod = schedulers.add_parser("kubernetes", parents=[common], help="started in each pod")
    pod.add_argument(
        "--jobset", required=True, help="name of the JobSet, and of its headless service"
    )
    options = parser.parse_args(arguments)
    try:
        spec = BatchSpec.read(options.spec)
        if options.scheduler == "slurm":
            node = slurm_node(spec, os.environ)
        else:
            node = kubernetes_node(spec, options.jobset, os.environ)
        return run_node(spec, options.token, node)
    except MegacoreError as error:
        parser.exit(error.exit_code, f"{error}\n")


@dataclass(frozen=True)
class JobNode:
    """This machine among those of the batch job."""

    rank: int
    """Number of this machine."""
    names: list[str]
    """Of all machines, by number."""
    cpus: int
    """Cores that the ranks of this machine may use."""
    address: str
    """Where the ranks would meet on this machine."""
    port: int

    @property
    def name(self) -> str:
        """This machine's name."""
        return self.names[self.rank]


def slurm_node(spec: BatchSpec, environment: Mapping[str, str]) -> JobNode:
    """Return this process's node, from Slurm's variables. Raises LaunchError."""
    try:
        rank, nodes = int(environment["SLURM_NODEID"]), int(environment["SLURM_JOB_NUM_NODES"])
        tasks, listed = int(environment["SLURM_NTASKS"]), environment["SLURM_JOB_NODELIST"]
    except (KeyError, ValueError) as error:
        raise LaunchError(
            f"this process is to be started by srun, and {error} is not as srun sets it"
        ) from error
    names = _hostnames(listed)
    if len(names) != nodes or tasks != nodes:
        raise LaunchError(
            f"Slurm started {tasks} processes on {nodes} machines ({listed}): the batch script "
            "must let srun start one on each (--ntasks-per-node=1)"
        )
    cores = len(os.sched_getaffinity(0))
    cpus = min(cores, int(environment.get("SLURM_CPUS_ON_NODE", cores)))
    # srun runs on the first machine, and says under which address the others reach it.
    first = environment.get("SLURM_LAUNCH_NODE_IPADDR") or names[0]
    if rank == 0:
        return JobNode(rank, names, cpus, *meeting_place(spec.launch.rdzv_endpoint, first))
    return JobNode(rank, names, cpus, _own_address(names[rank], first), 0)


def _own_address(name: str, first: str) -> str:
    """This machine's address on the way to the first one.

    No name of a machine need be known to others.
    """
    try:
        return local_address(first)
    except OSError as error:
        raise LaunchError(
            f"{name} finds no way to {first}, the job's first machine: {error}"
        ) from error


def _hostnames(listed: str) -> list[str]:
    """The machines of a list as `node[1-3]`, one by one."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", listed],
            capture_output=True,
            text=True,
            timeout=_SCONTROL_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"scontrol cannot say which machines {listed} are: {error}") from error
    return done.stdout.split()


def kubernetes_node(spec: BatchSpec, jobset: str, environment: Mapping[str, str]) -> JobNode:
    """Return this pod's node, by the index that an indexed Job gives it. Raises LaunchError."""
    nodes = spec.nodes[1]
    index = environment.get("JOB_COMPLETION_INDEX", "")
    if not index.isdecimal() or int(index) >= nodes:
        raise LaunchError(
            f"JOB_COMPLETION_INDEX is {index!r} in this pod, and launch.nnodes is {nodes}: the "
            "template must make an indexed Job (completionMode: Indexed) of as many completions"
        )
    names = [f"{jobset}-{GROUP}-0-{number}.{jobset}" for number in range(nodes)]
    rank = int(index)
    address, port = (
        meeting_place(spec.launch.rdzv_endpoint, names[0], PORT) if rank == 0 else (names[rank], 0)
    )
    # A pod sees all cores of its node; what it asked for is what it should use.
    cpus = min(len(os.sched_getaffinity(0)), spec.cpus_per_node)
    return JobNode(rank, names, cpus, address, port)


def run_node(spec: BatchSpec, token: str, node: JobNode) -> int:
    """Run this machine's ranks to their end; what to exit with.

    What cannot be done before they start is written as the launcher's reason.

    Args:
        spec: the batch job.
        token: of the submission, which its follower shows.
        node: this machine among the others.
    """
    with _Signals() as signals:
        try:
            if node.rank == 0:
                _clear(Path(spec.exit_directory))
            node = _taking_part(spec, node)
            if node.rank >= len(node.names):
                _say(
                    f"machine {node.rank} is not needed: the model and its batch do not divide by "
                    "the ranks of more"
                )
                return 0
            meeting = _meet(spec, node, signals)
            command, environment = _job_of(spec, node, meeting)
        except CalledOffError:
            return _STOPPED
        except MegacoreError as error:
            _say(f"{node.name}: {error}")
            write_launcher_reason(spec.exit_directory, error)
            return error.exit_code
        watch = FollowerWatch(spec.folder, token, spec.follower_limit)
        with _guarded(command, environment, spec.launch.stop_grace) as guard:
            return _wait(guard, signals, watch, spec, node)


class _Signals:
    """What the scheduler has asked for."""

    def __init__(self) -> None:
        self.stop = self.save = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.save = True
        else:
            self.stop = True


def _clear(exit_directory: Path) -> None:
    """Forget the ranks of an earlier start of this job, which the scheduler preempted.

    No rank has begun yet.
    """
    with workspace_errors(exit_directory):
        exit_directory.mkdir(parents=True, exist_ok=True)
        for pattern in _LEFT_BEHIND:
            for old in exit_directory.glob(pattern):
                old.unlink(missing_ok=True)


def _taking_part(spec: BatchSpec, node: JobNode) -> JobNode:
    """The same machine among the first machines by whose ranks the model and its batch divide.

    Mostly those are all of them.
    """
    least, most = spec.nodes
    if not least <= len(node.names) <= most:
        raise LaunchError(
            f"the scheduler gave {len(node.names)} machines and launch.nnodes is "
            f"{spec.launch.nnodes or 1}: remove what else asks for machines "
            "(launch.slurm.arguments, the template)"
        )
    values = _job_values(spec)
    if "config" not in values or least == most:
        return node
    config = RunConfig.model_validate(values["config"])
    for nodes in range(len(node.names), least - 1, -1):
        with contextlib.suppress(ParallelLayoutError):
            layout_of(config, nodes * spec.ranks_per_node, values.get("vocab_size"))
            return replace(node, names=node.names[:nodes])
    raise ParallelLayoutError(
        f"the scheduler gave {len(node.names)} machines, and by the ranks of none of {least} to "
        f"{len(node.names)} the model and its batch divide: correct launch.nnodes or "
        "train.global_batch_size"
    )


def _job_values(spec: BatchSpec) -> dict[str, Any]:
    values: dict[str, Any] = read_json(Path(spec.job_file))
    return values


def _meet(spec: BatchSpec, node: JobNode, signals: _Signals) -> Meeting | None:
    """Where the ranks of several machines meet; None of one alone."""
    if len(node.names) == 1:
        return None
    mine = Meeting(node.address, node.port, "")
    return meet(spec.folder / "nodes", node.rank, node.names, mine, called_off=lambda: signals.stop)


def _job_of(
    spec: BatchSpec, node: JobNode, meeting: Meeting | None
) -> tuple[list[str], dict[str, str]]:
    """The command of this machine's ranks and their environment."""
    threads = spec.launch.threads_per_rank or max(1, node.cpus // spec.ranks_per_node)
    job_file = _own_job_file(spec, node, threads)
    one = meeting is None
    environment = {**spec.environment, **rank_commands.rank_environment(threads, one_machine=one)}
    if meeting is None:
        return rank_commands.torchrun_alone(spec.module, job_file, spec.ranks_per_node), environment
    hosts = dict.fromkeys(node.names, spec.ranks_per_node)
    command = torchrun_command(
        hosts, node.rank, spec.module, job_file, master=meeting.address, port=meeting.port
    )
    return command, environment | _interfaces(spec, node, meeting)


def _own_job_file(spec: BatchSpec, node: JobNode, threads: int) -> Path:
    """The job for as many machines as there are and for this one's cores, in a file of its own."""
    own = spec.folder / f"job_{node.rank:05d}.json"
    values = {
        **_job_values(spec),
        "ranks": len(node.names) * spec.ranks_per_node,
        "threads_per_rank": threads,
    }
    write_json(own, values)
    return own


def _interfaces(spec: BatchSpec, node: JobNode, meeting: Meeting) -> dict[str, str]:
    """The variables that name this machine's way to the others, unless the user set them."""
    name, wanted = spec.launch.interface, ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    unset = [
        variable
        for variable in wanted
        if not (spec.environment.get(variable) or os.environ.get(variable))
    ]
    if unset and name == "auto":
        found = _way_to(meeting.peer)
        if found is None:
            raise LaunchError(
                f"{node.name} finds no interface that leads to {meeting.peer}: set launch.interface"
            )
        name = found
    elif unset and (problem := interface_problem(name)):
        raise LaunchError(f"{node.name}: {problem}: correct launch.interface")
    return dict.fromkeys(unset, name)


def _way_to(peer: str) -> str | None:
    """The interface that leads there.

    The name of a pod that has just begun may be unknown for a moment.
    """
    deadline = time.monotonic() + _NAME_SECONDS
    while (found := interface_to(peer)) is None and time.monotonic() < deadline:
        time.sleep(_POLL)
    return found


@contextlib.contextmanager
def _guarded(
    command: list[str], environment: dict[str, str], grace: float
) -> Iterator["subprocess.Popen[bytes]"]:
    """The guard with the ranks; after the block nothing of them is left."""
    guard = subprocess.Popen(
        [sys.executable, "-m", "megacore.launch.guard", f"--grace={grace}", "--", *command],
        stdin=subprocess.PIPE,
        start_new_session=True,  # what the scheduler signals is this process
        env={**os.environ, **environment},
    )
    assert guard.stdin is not None
    try:
        yield guard
    finally:
        guard.stdin.close()
        try:
            guard.wait(timeout=grace + KILL_LIMIT + 0.5)
        except subprocess.TimeoutExpired:
            guard.kill()
            guard.wait()


def _wait(
    guard: "subprocess.Popen[bytes]",
    signals: _Signals,
    watch: FollowerWatch,
    spec: BatchSpec,
    node: JobNode,
) -> int:
    told = False
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = guard.wait(timeout=_POLL)
            return code if code >= 0 else 128 - code
        if signals.stop:
            _say(f"{node.name}: asked to stop")
            return _STOPPED
        lost = watch.lost()
        if watch.over:
            _say(f"{node.name}: the job has ended for its follower, and so it does here")
            return _STOPPED
        if lost:
            error = RankLostError(
                f"nobody followed the batch job for {spec.follower_limit:g} s, so that its "
                "machines ended it: start the same command again, it goes on from the last "
                "complete checkpoint"
            )
            _say(f"{node.name}: {error}")
            write_launcher_reason(spec.exit_directory, error)
            return error.exit_code
        if (signals.save or watch.save) and not told and catches(guard.pid, signal.SIGUSR1):
            told = True
            guard.send_signal(signal.SIGUSR1)


def _say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
