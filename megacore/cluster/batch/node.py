"""Entry point of each node of a batch job.

    python -m megacore.cluster.batch.node slurm --spec FILE --token TOKEN
    python -m megacore.cluster.batch.node kubernetes --spec FILE --token TOKEN --jobset NAME

It finds the number of this node, meets the other nodes, and starts the node's ranks under the
guard. It ends with the ranks: when they have finished or one of them failed, when the scheduler
requests it (SIGTERM), or when the job has no follower any more. It passes SIGUSR1, from the
scheduler or from the follower, on to the ranks.
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

from megacore.artifact.files import (
    read_json,
    read_object,
    reason_of,
    workspace_errors,
    write_json,
)
from megacore.cluster.batch.kubernetes import GROUP, PORT
from megacore.cluster.batch.meeting import CalledOffError, Meeting, meet, meeting_place
from megacore.cluster.batch.spec import BatchSpec, FollowerWatch
from megacore.cluster.hosts.network import (
    INTERFACE_VARIABLES,
    interface_problem,
    interface_to,
    local_address,
)
from megacore.cluster.hosts.plan import torchrun_command
from megacore.cluster.start import local_torchrun_command, rank_environment
from megacore.config.run import RunConfig, with_current_names
from megacore.errors import LaunchError, MegacoreError, ParallelLayoutError, RankLostError
from megacore.launch.exit_reason import LAUNCHER_REASON, remove_rank_files, write_launcher_reason
from megacore.launch.guard import KILL_LIMIT, catches, guarded
from megacore.plan.layouts import dividing_hosts

_POLL = 0.5
_NAME_SECONDS = 45.0
"""Seconds to wait until the DNS resolves a new name; it caches a failed lookup for up to 30 s."""
_SCONTROL_SECONDS = 60.0
_STOPPED = 128 + signal.SIGTERM


def main(arguments: list[str] | None = None) -> int:
    """Run this node's part of the batch job and return the exit code."""
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
        # Without the reason the flow would retry an error that stays.
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, MegacoreError):
            # Another version's specification has the directory, too.
            write_launcher_reason(read_json(options.spec)["exit_directory"], error)
        parser.exit(error.exit_code, f"{error}\n")


@dataclass(frozen=True)
class JobNode:
    """This node of the batch job."""

    rank: int
    """Number of this node."""
    names: list[str]
    """Names of all nodes, by number."""
    cpus: int
    """Number of CPU cores for the ranks of this node."""
    address: str
    """Address of this node for a rendezvous of the ranks."""
    port: int

    @property
    def name(self) -> str:
        """Name of this node."""
        return self.names[self.rank]


def slurm_node(spec: BatchSpec, environment: Mapping[str, str]) -> JobNode:
    """Return this process's node, from Slurm's variables. Raises LaunchError."""
    try:
        rank, nodes = int(environment["SLURM_NODEID"]), int(environment["SLURM_JOB_NUM_NODES"])
        tasks, listed = int(environment["SLURM_NTASKS"]), environment["SLURM_JOB_NODELIST"]
    except (KeyError, ValueError) as error:
        raise LaunchError(
            f"this process must be started by srun, and {error} is not as srun sets it"
        ) from error
    names = _hostnames(listed)
    if len(names) != nodes or tasks != nodes:
        raise LaunchError(
            f"Slurm started {tasks} processes on {nodes} machines ({listed}): the batch script "
            "must let srun start one on each (--ntasks-per-node=1)"
        )
    cores = len(os.sched_getaffinity(0))
    cpus = min(cores, int(environment.get("SLURM_CPUS_ON_NODE", cores)))
    # srun runs on the first node and sets its address for the other nodes.
    first = environment.get("SLURM_LAUNCH_NODE_IPADDR") or names[0]
    if rank == 0:
        return JobNode(rank, names, cpus, *meeting_place(spec.launch.rdzv_endpoint, first))
    return JobNode(rank, names, cpus, _own_address(names[rank], first), 0)


def _own_address(name: str, first: str) -> str:
    """Return this node's address on the route to the first node.

    Nodes need not resolve each other's names.
    """
    try:
        return local_address(first)
    except OSError as error:
        raise LaunchError(
            f"{name} finds no way to {first}, the job's first machine: {reason_of(error)}"
        ) from error


def _hostnames(listed: str) -> list[str]:
    """Return the names in a node list such as `node[1-3]`."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", listed],
            capture_output=True,
            text=True,
            timeout=_SCONTROL_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(
            f"scontrol cannot say which machines {listed} are: {reason_of(error)}"
        ) from error
    return done.stdout.split()


def kubernetes_node(spec: BatchSpec, jobset: str, environment: Mapping[str, str]) -> JobNode:
    """Return this pod's node, from the completion index of its Job. Raises LaunchError."""
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
    # A pod sees all cores of its node, but should use only the requested ones.
    cpus = min(len(os.sched_getaffinity(0)), spec.cpus_per_node)
    return JobNode(rank, names, cpus, address, port)


def run_node(spec: BatchSpec, token: str, node: JobNode) -> int:
    """Run this node's ranks to their end and return the exit code.

    An error before their start is written as the launcher's reason.

    Args:
        spec: specification of the batch job.
        token: token of the submission, which is in its follower's beat.
        node: this node.
    """
    exit_directory = Path(spec.exit_directory)
    with _Signals() as signals:
        try:
            if node.rank == 0:
                # The files of an earlier start of this job, which the scheduler preempted.
                with workspace_errors(exit_directory):
                    exit_directory.mkdir(parents=True, exist_ok=True)
                    remove_rank_files(exit_directory, f"{LAUNCHER_REASON}*")
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
    """Requests of the scheduler through signals: to stop, or to save."""

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


def _taking_part(spec: BatchSpec, node: JobNode) -> JobNode:
    """Return `node` with `names` reduced to the nodes that take part, usually all of them.

    Raises LaunchError for another number of nodes than requested, ParallelLayoutError if no number
    divides the model and its batch.
    """
    minimum, maximum = spec.nodes
    if not minimum <= len(node.names) <= maximum:
        raise LaunchError(
            f"the scheduler gave {len(node.names)} machines and launch.nnodes is "
            f"{spec.launch.nnodes or 1}: remove what else asks for machines "
            "(launch.slurm.arguments, the template)"
        )
    values = read_object(Path(spec.job_file))
    if "config" not in values or minimum == maximum:
        return node
    config = RunConfig.model_validate(with_current_names(values["config"]))
    ranks = [spec.ranks_per_node] * len(node.names)
    try:
        nodes = dividing_hosts(config, ranks, minimum, values.get("vocab_size"))
    except ParallelLayoutError as error:
        raise ParallelLayoutError(
            f"the scheduler gave {len(node.names)} machines, and no number of machines from "
            f"{minimum} to {len(node.names)} gives ranks by which the model and its batch divide: "
            "correct launch.nnodes or train.global_batch_size"
        ) from error
    return replace(node, names=node.names[:nodes])


def _meet(spec: BatchSpec, node: JobNode, signals: _Signals) -> Meeting | None:
    """Meet the other nodes and return the rendezvous; None for a single node."""
    if len(node.names) == 1:
        return None
    own_meeting = Meeting(node.address, node.port, "")
    return meet(
        spec.folder / "nodes",
        node.rank,
        node.names,
        own_meeting,
        packages=spec.packages,
        called_off=lambda: signals.stop,
    )


def _job_of(
    spec: BatchSpec, node: JobNode, meeting: Meeting | None
) -> tuple[list[str], dict[str, str]]:
    """Return the command of this node's ranks and their environment."""
    threads = spec.launch.threads_per_rank or max(1, node.cpus // spec.ranks_per_node)
    job_file = _own_job_file(spec, node, threads)
    single = meeting is None
    environment = spec.environment | rank_environment(
        threads, one_machine=single, environment=os.environ | spec.environment
    )
    if meeting is None:
        return local_torchrun_command(spec.module, job_file, spec.ranks_per_node), environment
    hosts = dict.fromkeys(node.names, spec.ranks_per_node)
    command = torchrun_command(
        hosts, node.rank, spec.module, job_file, master=meeting.address, port=meeting.port
    )
    return command, environment | _interfaces(spec, node, meeting)


def _own_job_file(spec: BatchSpec, node: JobNode, threads: int) -> Path:
    """Write the job for the actual number of nodes and this node's cores; return the path."""
    path = spec.folder / f"job_{node.rank:05d}.json"
    values = {
        **read_object(Path(spec.job_file)),
        "ranks": len(node.names) * spec.ranks_per_node,
        "threads_per_rank": threads,
    }
    write_json(path, values)
    return path


def _interfaces(spec: BatchSpec, node: JobNode, meeting: Meeting) -> dict[str, str]:
    """Return the variables with this node's network interface, unless the user set them."""
    name = spec.launch.interface
    unset = [
        variable
        for variable in INTERFACE_VARIABLES
        if not (spec.environment.get(variable) or os.environ.get(variable))
    ]
    if unset and name == "auto":
        detected = _way_to(meeting.peer)
        if detected is None:
            raise LaunchError(
                f"{node.name} finds no interface that leads to {meeting.peer}: set launch.interface"
            )
        name = detected
    elif unset and (problem := interface_problem(name)):
        raise LaunchError(f"{node.name}: {problem}: correct launch.interface")
    return dict.fromkeys(unset, name)


def _way_to(peer: str) -> str | None:
    """Return the interface of the route to `peer`; None if there is none.

    Retry for `_NAME_SECONDS`, because the name of a new pod may be unknown at first.
    """
    deadline = time.monotonic() + _NAME_SECONDS
    while (interface := interface_to(peer)) is None and time.monotonic() < deadline:
        time.sleep(_POLL)
    return interface


@contextlib.contextmanager
def _guarded(
    command: list[str], environment: dict[str, str], grace: float
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run the guard with the ranks inside the block; end all of their processes after it."""
    guard = subprocess.Popen(
        guarded(command, grace),
        stdin=subprocess.PIPE,
        start_new_session=True,  # the scheduler's signals go only to this process
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
    notified = False
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = guard.wait(timeout=_POLL)
            return code if code >= 0 else 128 - code
        if signals.stop:
            _say(f"{node.name}: asked to stop")
            return _STOPPED
        lost = watch.lost()
        if watch.over:
            _say(f"{node.name}: the job has ended for its follower, so it ends here too")
            return _STOPPED
        if lost:
            error = RankLostError(
                f"nobody followed the batch job for {spec.follower_limit:g} s, so its machines "
                f"ended it: start the same command again, it {spec.again}"
            )
            _say(f"{node.name}: {error}")
            write_launcher_reason(spec.exit_directory, error)
            return error.exit_code
        if (signals.save or watch.save) and not notified and catches(guard.pid, signal.SIGUSR1):
            notified = True
            guard.send_signal(signal.SIGUSR1)


def _say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
