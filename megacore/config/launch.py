"""Processes: what starts them, on which machines, how they are watched and ended."""

import re
from typing import Any, Literal, Self

from pydantic import NonNegativeInt, field_validator, model_validator

from megacore.config.base import Section, keyed, unkeyed

LaunchKind = Literal["torchrun", "deepspeed", "slurm", "kubernetes"]

_RANGE = re.compile(r"([1-9]\d*)(?::([1-9]\d*))?", re.ASCII)


class SlurmConfig(Section):
    """What a batch job asks Slurm for; with launch.kind slurm."""

    template: str | None = unkeyed(None, min_length=1)
    """Batch script with {{ placeholders }}, as megacore/cluster/batch/templates/train.sbatch.j2;
    null takes that one."""
    partition: str | None = unkeyed(None, min_length=1)
    """Partition (queue); null takes the cluster's default."""
    account: str | None = unkeyed(None, min_length=1)
    """Account that is charged; null takes the user's default."""
    qos: str | None = unkeyed(None, min_length=1)
    """Quality of service; null takes the default."""
    time_limit: str | None = unkeyed(None, min_length=1)
    """Wall-clock limit of each attempt, as sbatch takes it (`12:00:00`, `2-00:00:00`); null takes
    the partition's."""
    gpus_per_node: NonNegativeInt | Literal["auto"] = unkeyed("auto")
    """GPUs asked of each machine (--gpus-per-node); auto asks for one per rank, and for none with
    launch.allow_cpu; 0 asks for none, as where machines are given whole."""
    arguments: tuple[str, ...] = unkeyed(())
    """Further options of sbatch, each as one word, as `--exclusive` or `--constraint=h100`."""
    signal_before: int = unkeyed(120, ge=0)
    """Seconds before the time limit at which ranks are told to save and end; 0 tells nobody."""


class KubernetesConfig(Section):
    """What a JobSet asks Kubernetes for; with launch.kind kubernetes."""

    template: str | None = unkeyed(None, min_length=1)
    """JobSet with {{ placeholders }}, as megacore/cluster/batch/templates/jobset.yaml.j2; null
    takes that one."""
    image: str | None = unkeyed(None, min_length=1)
    """Container image that every node runs, this project's with its environment; required."""
    python: str = unkeyed("/app/.venv/bin/python", min_length=1)
    """Interpreter in the image, by default where this project's Dockerfile puts it."""
    namespace: str = unkeyed("default", min_length=1)
    """Namespace of the JobSet."""
    workspace_claim: str | None = unkeyed(None, min_length=1)
    """PersistentVolumeClaim (ReadWriteMany) with the workspace, mounted at the workspace's path;
    required."""
    service_account: str | None = unkeyed(None, min_length=1)
    """Service account of the pods; null takes the namespace's default."""
    queue: str | None = unkeyed(None, min_length=1)
    """Kueue's local queue; null asks none."""
    gpu_resource: str = unkeyed("nvidia.com/gpu", min_length=1)
    """Resource name of a GPU, of which each pod asks as many as it has ranks; for none with
    launch.allow_cpu."""
    cpus: int | None = unkeyed(None, gt=0)
    """CPU cores of a pod; null asks for ranks x threads_per_rank, for one per rank where that is
    null."""
    memory: str | None = unkeyed(None, min_length=1)
    """Main memory of a pod, as `512Gi`; null sets none."""
    shared_memory: str = unkeyed("16Gi", min_length=1)
    """Size of /dev/shm in a pod."""
    node_selector: dict[str, str] = unkeyed({})
    """Labels of the nodes that pods may run on."""


class LaunchConfig(Section):
    """Processes and their supervision."""

    kind: LaunchKind = unkeyed("torchrun")
    """What starts the ranks, with either engine; a single rank on this machine needs neither
    torchrun nor deepspeed."""
    hostfile: str | None = keyed(None, resolved=("finetune", "find-batch-size"), min_length=1)
    """File with a line `host slots=ranks` for each machine, reached through ssh; null means this
    machine alone, and with slurm and kubernetes the machines that those give."""
    include: tuple[str, ...] = keyed((), resolved=("finetune", "find-batch-size"))
    """Hosts of the hostfile that take part, as `worker-1` or, with slots by number, `worker-1:0,2`;
    [] takes all."""
    exclude: tuple[str, ...] = keyed((), resolved=("finetune", "find-batch-size"))
    """Hosts, or slots of a host, that do not take part, in the same form; not together with
    include."""
    nnodes: int | str | None = keyed(None, resolved=("finetune", "find-batch-size"))
    """Machines of the job: a number, or `min:max`, by which a run goes on with those that are left
    when some are lost, down to min; null takes every host of the hostfile, else one."""
    nproc_per_node: int | Literal["auto"] = keyed("auto", resolved=("finetune", "find-batch-size"))
    """Ranks on each machine; auto means the hostfile's slots, else one per GPU, without a GPU one
    replica's (tensor x pipeline)."""
    rdzv_endpoint: str | None = unkeyed(None, min_length=1)
    """`host:port`, or `host`, at which the ranks of several machines meet; null takes the first
    host's address as the others reach it and a port that is free there."""
    ssh_config: str | None = unkeyed(None, min_length=1)
    """File that ssh reads for port, user and identity of each host; null takes the user's own."""
    forward_env: tuple[str, ...] = unkeyed(
        ("NCCL_*", "GLOO_*", "UCX_*", "TORCH_*", "PYTHON*", "DS_*", "MEGACORE_*")
    )
    """Environment variables that the other machines get as they are here, by name or with * at the
    end."""
    env_file: str | None = unkeyed(None, min_length=1)
    """File with lines NAME=VALUE for the ranks of every machine; null takes `.deepspeed_env` of the
    working or the home directory where there is one, as DeepSpeed's launcher does."""
    interface: str = unkeyed("auto", min_length=1)
    """Network interface of the traffic between machines; auto takes, on each, the one that leads to
    the others."""
    data_placement: Literal["shared", "node_local"] = unkeyed("shared")
    """shared: all machines see the workspace at one path, which is proven before the start;
    node_local: each has one of its own, and what is read there is copied from this machine where it
    is missing."""
    preflight: Literal["quick", "full", "off"] = unkeyed("quick")
    """What `megacore doctor` examines of several machines before a training starts there: all but
    the bandwidths between them, all, or nothing. A machine that is not fit ends the start."""
    host_timeout: float = unkeyed(20.0, ge=5.0, le=30.0)
    """Seconds without a word from a machine after which it is lost, and the run ends on all of
    them."""
    slurm: SlurmConfig = unkeyed(SlurmConfig())
    """Slurm's batch job."""
    kubernetes: KubernetesConfig = unkeyed(KubernetesConfig())
    """Kubernetes' JobSet."""
    threads_per_rank: int | None = keyed(None, resolved="find-batch-size", gt=0)
    """CPU threads of each rank; null divides the cores evenly."""
    allow_cpu: bool = unkeyed(False)
    """Whether a job that is sized for GPUs may start without one."""
    stop_grace: float = unkeyed(20.0, gt=0, lt=30)
    """Seconds between asking ranks to stop and killing them."""
    timeout_minutes: float | None = unkeyed(None, gt=0)
    """Limit of the training stage, in minutes; null means none."""
    stall_limit: float | None = unkeyed(600.0, gt=0)
    """Seconds without any progress of a rank after which the job is ended; null waits for ever."""
    retries: int = unkeyed(2, ge=0)
    """How often a lost rank or a failed download is tried again."""
    retry_delay: float = unkeyed(5.0, ge=0)
    """Seconds before a retry."""

    @model_validator(mode="before")
    @classmethod
    def _launcher_is_called_kind(cls, values: Any) -> Any:
        if isinstance(values, dict) and "launcher" in values:
            raise ValueError("launch.launcher is called launch.kind: rename it")
        return values

    @field_validator("nnodes")
    @classmethod
    def _nodes_are_a_number_or_a_range(cls, value: int | str | None) -> int | str | None:
        found = None if value is None else _RANGE.fullmatch(str(value))
        if value is not None and (found is None or int(found[2] or found[1]) < int(found[1])):
            raise ValueError(
                f"launch.nnodes is {value!r}: give a number of machines, as 2, or a range, as 2:4"
            )
        return value

    @property
    def node_range(self) -> tuple[int, int] | None:
        """Least and largest number of machines; None where nothing is said."""
        found = None if self.nnodes is None else _RANGE.fullmatch(str(self.nnodes))
        return None if found is None else (int(found[1]), int(found[2] or found[1]))

    @property
    def elastic(self) -> bool:
        """Whether a run goes on with fewer machines when some are lost."""
        return self.node_range is not None and self.node_range[0] < self.node_range[1]

    @model_validator(mode="after")
    def _hosts_come_from_one_place(self) -> Self:
        if self.hostfile is not None and self.kind in ("slurm", "kubernetes"):
            raise ValueError(
                f"launch.hostfile is {self.hostfile!r}, and {self.kind} chooses the machines "
                "itself: set launch.hostfile to null, or launch.kind to torchrun or deepspeed"
            )
        if self.include and self.exclude:
            raise ValueError("launch.include and launch.exclude are both given: keep one of them")
        chosen = [name for name in ("include", "exclude", "ssh_config") if getattr(self, name)]
        if chosen and self.hostfile is None:
            raise ValueError(
                f"launch.{chosen[0]} is given without launch.hostfile, which lists the hosts: set "
                f"launch.hostfile, or leave launch.{chosen[0]} out"
            )
        if self.data_placement == "node_local" and self.hostfile is None:
            raise ValueError(
                "launch.data_placement is node_local without launch.hostfile, whose hosts are "
                "reached to copy files there: set launch.hostfile, or launch.data_placement to "
                "shared"
            )
        chooses = self.hostfile is not None or self.kind in ("slurm", "kubernetes")
        if self.node_range not in (None, (1, 1)) and not chooses:
            raise ValueError(
                f"launch.nnodes is {self.nnodes} without launch.hostfile, which lists the hosts: "
                "set launch.hostfile"
            )
        return self
