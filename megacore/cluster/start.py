"""Command, hosts and environment of the launcher that starts a job's ranks, on this host or others.

DeepSpeed is started as a program and not imported. megacore uses only its inner program
`deepspeed.launcher.launch`, which starts the ranks of one host. The outer program (`deepspeed`,
`deepspeed.launcher.runner`) passes on few variables, and it ends a job by killing all DeepSpeed
launchers of the user on all hosts, including those of other jobs. `fanout` replaces it.
"""

import os
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megacore.cluster.hosts.connection import agent_words, mark_on
from megacore.cluster.hosts.hardware import hardware_of
from megacore.cluster.hosts.network import free_port
from megacore.cluster.hosts.plan import (
    LOOPBACK,
    Plan,
    after_retry,
    deepspeed_command,
    endpoint,
    env_file_of,
    meeting_addresses,
    plan_ssh,
    read_env_file,
    visible_devices,
)
from megacore.cluster.hosts.ssh import check_ssh, python
from megacore.config.hostfile import devices_of, hosts_of, is_only_here, is_this_machine
from megacore.config.launch import LaunchConfig
from megacore.errors import ConfigError, HostsSilentError
from megacore.hardware import DEVICE_VARIABLE, Hardware
from megacore.jobs.model import ResultJob
from megacore.jobs.run import RankJob
from megacore.launch.failure import REPEATS
from megacore.paths import glob, is_file

PLAN_NAME = "hosts.json"
"""Name of the plan's file, next to the job file."""
_STOP_MARGIN = 4.0
"""Seconds by which the hosts may end later than the stop grace of their ranks."""


@dataclass(frozen=True)
class Start:
    """A command for the supervisor, with its environment and hosts."""

    command: list[str]
    env: dict[str, str]
    """Variables in addition to those of this process."""
    hosts: tuple[str, ...] = ()
    """Hosts whose agents watch their ranks; empty if the supervisor itself watches them."""
    stop_margin: float = 0.0
    """Seconds that the command needs to stop, in addition to the stop grace of the ranks."""
    again: str = REPEATS
    """Verb phrase on a retry of the ranks, to follow a subject."""


def start_ranks(
    launch: LaunchConfig,
    module: str,
    job: RankJob,
    job_file: Path,
    env: Mapping[str, str] | None = None,
) -> Start:
    """Build the command that starts the job's ranks, on this host or on the hosts of `launch`.

    `module` is the entry point of each rank, and `env` has additional variables for it.

    Raises:
        ConfigError: the hostfile or the file of variables cannot be read, or a selected GPU of
            this host is hidden.
        LaunchError: there are other hosts and ssh is not installed.
    """
    hosts = job.hosts or hosts_of(launch)
    _check_devices(launch)
    env = {**_device_of(launch), **(env or {})}
    if launch.has_scheduler:
        from megacore.cluster.batch.start import start_batch

        return start_batch(launch, module, job, job_file, env)
    if not is_only_here(hosts):
        check_ssh(hosts)
        variables = {
            **rank_environment(job.threads_per_rank, one_machine=len(hosts) == 1),
            **env,
        }
        plan_path = job_file.absolute().with_name(PLAN_NAME)
        plan_of(launch, module, job, job_file, hosts, own_env=[*variables]).write(plan_path)
        return Start(
            python("megacore.cluster.hosts.fanout", "--plan", str(plan_path)),
            variables,
            tuple(hosts),
            _STOP_MARGIN,
            again=after_retry(module),
        )
    return _start_locally(launch, module, job, job_file, env)


def _device_of(launch: LaunchConfig) -> dict[str, str]:
    """Return the variable with which ranks refuse a host whose GPUs cannot be used.

    Without it they would compute on the CPUs of such a host. It is empty if the hosts have no GPU.
    """
    try:
        gpus = launch.requests_gpus or (
            not launch.has_scheduler and hardware_of(launch).device_type == "cuda"
        )
    except HostsSilentError:  # the start that follows names the silent host
        gpus = False
    return {DEVICE_VARIABLE: "cuda"} if gpus else {}


def _start_locally(
    launch: LaunchConfig,
    module: str,
    job: RankJob,
    job_file: Path,
    env: Mapping[str, str],
    *,
    shown: bool = False,
) -> Start:
    """Build the command that starts the job's ranks on this host, without ssh."""
    variables = {**rank_environment(job.threads_per_rank), **env}
    hosts = job.hosts or hosts_of(launch)
    devices = next((slots for host, slots in devices_of(launch).items() if host in hosts), None)
    if devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    # If this host is the only one left of several, it keeps the variables that all hosts had.
    several = not is_only_here(hosts_of(launch))
    env_file = env_file_of(launch.env_file) if several else launch.env_file
    if env_file is not None:
        variables |= read_env_file(Path(env_file))
    if launch.kind == "torchrun" or job.ranks == 1:
        return Start(
            local_torchrun_command(module, job_file, job.ranks, shown=shown),
            variables,
            again=after_retry(module),
        )
    if not Hardware.detect().gpus:
        variables["DS_ACCELERATOR"] = os.environ.get("DS_ACCELERATOR", "cpu")
    command = local_deepspeed_command(module, job_file, job.ranks, devices=devices, shown=shown)
    return Start(command, variables, again=after_retry(module))


def start_here(module: str, job: RankJob, job_file: Path) -> Start:
    """Build the command that starts the job's ranks on this host.

    Several ranks start through torchrun, a single one as a plain process.
    """
    return Start(
        local_torchrun_command(module, job_file, job.ranks),
        rank_environment(job.threads_per_rank),
    )


def plan_of(
    launch: LaunchConfig,
    module: str,
    job: RankJob,
    job_file: Path,
    hosts: Mapping[str, int],
    *,
    own_env: list[str],
) -> Plan:
    """Build the plan that the head of a job on `hosts` reads.

    `own_env` contains the names of the variables that megacore sets for the ranks.
    """
    return Plan(
        kind=launch.kind,
        module=module,
        job_file=str(job_file.absolute()),
        hosts=dict(hosts),
        devices={host: [*slots] for host, slots in devices_of(launch).items() if host in hosts},
        ssh_config=None if launch.ssh_config is None else str(Path(launch.ssh_config).absolute()),
        forward_env=[*launch.forward_env],
        own_env=own_env,
        env_file=env_file_of(launch.env_file),
        interface=launch.interface,
        rdzv_endpoint=launch.rdzv_endpoint,
        host_timeout=launch.host_timeout,
        stop_grace=launch.stop_grace,
        # The ranks of such a job write no heartbeat.
        stall_limit=None if isinstance(job, ResultJob) else launch.stall_limit,
        exit_directory=str(Path(job.exit_directory).absolute()),
        copy_files=launch.data_placement == "node_local",
        retried=getattr(job, "attempt", 1) > 1,
        packages=[*job.packages],
    )


def dry_run_commands(launch: LaunchConfig, module: str, job: RankJob, job_file: Path) -> list[str]:
    """Return the command of each host for a dry run, each as one line with the host's name.

    For a scheduler, return its command and its batch job.

    Nothing is written and no host is contacted. The lines show no values of variables except those
    that select GPUs. Values that are known only at the start are placeholders in angle brackets.

    Raises:
        MegacoreError: any error of `start_ranks`.
    """
    if launch.has_scheduler:
        from megacore.cluster.batch.start import show_batch

        command, text = show_batch(launch, module, job, job_file)
        return [shlex.join(command), *text.splitlines()]
    hosts = job.hosts or hosts_of(launch)
    if is_only_here(hosts):
        start = _start_locally(launch, module, job, job_file, {}, shown=True)
        gpus = {name: value for name, value in start.env.items() if name == "CUDA_VISIBLE_DEVICES"}
        return [f"{next(iter(hosts), 'this machine')}: {_line(gpus, start.command)}"]
    check_ssh(hosts)
    variables = rank_environment(job.threads_per_rank, one_machine=len(hosts) == 1)
    plan = plan_of(launch, module, job, job_file, hosts, own_env=[*variables])
    ssh, names = plan_ssh(plan), sorted(plan.variables({**os.environ, **variables}))
    master, _ = meeting_addresses(ssh, hosts, launch.rdzv_endpoint)
    port = endpoint(launch.rdzv_endpoint)[1] or "<free port>"
    lines = []
    for number, host in enumerate(hosts):
        words = agent_words(mark_on(host, number, "<job>"), os.environ)
        lines.append(f"{host}: {shlex.join(ssh.command(host, words))}")
        gpus = plan.gpus(host)
        lines.append(f"{host}: its agent runs {_line(gpus, plan.command(number, master, port))}")
    return [*lines, f"with the variables {', '.join(names)}"]


def _line(variables: Mapping[str, str], command: list[str]) -> str:
    words = [f"{name}={value}" for name, value in variables.items()]
    return shlex.join([*(["env", *words] if words else []), *command])


def check_launcher(launch: LaunchConfig) -> None:
    """Raise the error of `start_ranks` for a missing file or program, before anything runs."""
    if launch.has_scheduler:
        from megacore.cluster.batch.start import check_batch

        check_batch(launch)
    check_ssh(hosts_of(launch))
    _check_devices(launch)
    if launch.ssh_config is not None and not is_file(launch.ssh_config):
        raise ConfigError(
            f"launch.ssh_config {launch.ssh_config} is not there: correct launch.ssh_config"
        )
    endpoint(launch.rdzv_endpoint)
    if launch.env_file is not None:
        read_env_file(Path(launch.env_file))


def _check_devices(launch: LaunchConfig) -> None:
    """Raise ConfigError for a selected GPU of this host that CUDA_VISIBLE_DEVICES leaves out.

    The GPU may be another job's: on a shared host a scheduler sets the variable.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if not visible or not Hardware.detect().gpus:
        return
    for host, numbers in devices_of(launch).items():
        hidden = {*map(str, numbers)} - {name.strip() for name in visible.split(",")}
        if hidden and is_this_machine(host):
            raise ConfigError(
                f"launch.include and launch.exclude select GPU {', '.join(sorted(hidden))} of "
                f"{host}, and CUDA_VISIBLE_DEVICES here is {visible}, without it: select GPUs of "
                "the variable, or unset it if they are yours"
            )


_MEETING = ".rendezvous-"
_KEPT_BLOCK = 256 * 2**20
"""Size in bytes below which the process keeps freed blocks."""
TUNABLES = "GLIBC_TUNABLES"
"""Variable with the options of glibc, which may be the user's."""
_HUGE_PAGES = "glibc.malloc.hugetlb"
"""glibc's tunable; 1 asks for transparent huge pages by madvise (glibc 2.35 and newer)."""


def local_torchrun_command(
    module: str,
    config_path: Path,
    ranks: int,
    *,
    shown: bool = False,
) -> list[str]:
    """Return the command for `ranks` processes of `python -m module --config config_path` here.

    Several ranks start through torchrun, on ports that the kernel chooses: no host name is looked
    up and no port can be in use. The rendezvous uses a file next to the config, because torchrun
    unpickles its state, and over TCP anybody who reaches this host could write it. A single rank
    needs no rendezvous and starts as a plain process, which saves the launcher's import of torch. A
    command that is only `shown` touches no file.
    """
    program = [module, "--config", str(config_path)]
    if ranks == 1:
        return python(*program)
    return [
        *python("torch.distributed.run", "--nnodes=1"),
        f"--nproc-per-node={ranks}",
        "--max-restarts=0",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={_meeting_place(config_path.absolute().parent, shown=shown)}",
        # With one node nobody checks for keep-alives, and each one would make the file longer.
        "--rdzv-conf=store_type=file,keep_alive_interval=86400",
        "--local-addr=127.0.0.1",
        # Its own small files, which it would otherwise leave in the temporary directory.
        f"--log-dir={config_path.parent / 'torchrun'}",
        "-m",
        *program,
    ]


def _meeting_place(directory: Path, *, shown: bool) -> Path:
    """Return a new path for the rendezvous file and remove the files of earlier attempts."""
    if shown:
        return directory / f"{_MEETING}<random>"
    for path in glob(directory, f"{_MEETING}*"):
        path.unlink(missing_ok=True)
    return directory / f"{_MEETING}{secrets.token_hex(8)}"


def local_deepspeed_command(
    module: str,
    config_path: Path,
    ranks: int,
    *,
    devices: Sequence[int] | None = None,
    shown: bool = False,
) -> list[str]:
    """Return DeepSpeed's command for `ranks` processes of `module` on this host, at 127.0.0.1.

    `devices` are the GPUs of the ranks, None means the first visible ones. A command that is only
    `shown` has a placeholder instead of a free port.
    """
    port = "<free port>" if shown else free_port()
    gpus = {"localhost": visible_devices(ranks) if devices is None else [*devices]}
    return deepspeed_command(gpus, 0, module, config_path, master=LOOPBACK, port=port)


def rank_environment(
    threads: int, *, one_machine: bool = True, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment variables of every rank.

    They set the number of CPU threads, and the loopback interface for a job on one host. Options of
    glibc in `environment`, by default this process's, are kept.

    They also tell glibc to keep large blocks, and to take huge pages where Linux gives them on
    request. It would otherwise return the logits' memory after each step and fault it in again in
    the next one (8 to 10 % of a small model's step), and small pages cost another 3 to 6 %. Other C
    libraries ignore these variables.
    """
    count = str(threads)
    # Not a default of the argument: datasets replaces os.environ when it maps in processes.
    tunables = (os.environ if environment is None else environment).get(TUNABLES, "")
    if _HUGE_PAGES not in tunables:
        tunables = f"{tunables}:{_HUGE_PAGES}=1".lstrip(":")
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if one_machine else {}
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "NUMEXPR_NUM_THREADS": count,
        "TOKENIZERS_PARALLELISM": "false",
        "MALLOC_MMAP_THRESHOLD_": str(_KEPT_BLOCK),
        "MALLOC_TRIM_THRESHOLD_": str(2 * _KEPT_BLOCK),
        TUNABLES: tunables,
        "PYTHONUNBUFFERED": "1",
        **loopback,
    }
