"""Section `launch`: launcher, hosts, and supervision of the processes."""

import re
from typing import Any, Literal, Self

from pydantic import NonNegativeInt, field_validator, model_validator

from megacore.config.base import Section, keyed, unkeyed
from megacore.config.hostfile import MOST_HOSTS, MOST_SLOTS

LaunchKind = Literal["torchrun", "deepspeed", "slurm", "kubernetes"]

_RANGE = re.compile(r"([1-9]\d{0,8})(?::([1-9]\d{0,8}))?", re.ASCII)


class SlurmConfig(Section):
    """Options of a Slurm batch job; used with launch.kind slurm."""

    template: str | None = unkeyed(None, min_length=1)
    """Path of a batch script with {{ placeholders }}; null means the template
    megacore/cluster/batch/templates/train.sbatch.j2."""
    partition: str | None = unkeyed(None, min_length=1)
    """Partition (queue); null means the cluster's default."""
    account: str | None = unkeyed(None, min_length=1)
    """Account to charge; null means the user's default."""
    qos: str | None = unkeyed(None, min_length=1)
    """Quality of service of the job (--qos); null means the user's default."""
    time_limit: str | None = unkeyed(None, min_length=1)
    """Wall-clock limit of each attempt in sbatch's format (`12:00:00`, `2-00:00:00`); null means
    the limit of the partition."""
    gpus_per_node: NonNegativeInt | Literal["auto"] = unkeyed("auto")
    """GPUs requested per Slurm node (--gpus-per-node). auto requests one per rank, and none with
    launch.allow_cpu; 0 requests none, for clusters that allocate whole nodes."""
    arguments: tuple[str, ...] = unkeyed(())
    """Additional options of sbatch, one word each, such as `--exclusive` or `--constraint=h100`."""
    signal_before: int = unkeyed(120, ge=0)
    """Seconds before the time limit at which the ranks are told to save and end; 0 disables the
    signal."""


class KubernetesConfig(Section):
    """Options of a Kubernetes JobSet; used with launch.kind kubernetes."""

    template: str | None = unkeyed(None, min_length=1)
    """Path of a JobSet with {{ placeholders }}; null means the template
    megacore/cluster/batch/templates/jobset.yaml.j2."""
    image: str | None = unkeyed(None, min_length=1)
    """Container image for all nodes, which contains this project and its environment; required
    with launch.kind kubernetes."""
    python: str = unkeyed("/app/.venv/bin/python", min_length=1)
    """Path of the Python interpreter in the image; the default is its place in the image of this
    project's Dockerfile."""
    namespace: str = unkeyed("default", min_length=1)
    """Namespace of the JobSet."""
    workspace_claim: str | None = unkeyed(None, min_length=1)
    """PersistentVolumeClaim (ReadWriteMany) with the workspace, which is mounted at the workspace's
    path; required with launch.kind kubernetes."""
    service_account: str | None = unkeyed(None, min_length=1)
    """Service account for the pods; null means the namespace's default."""
    queue: str | None = unkeyed(None, min_length=1)
    """Local queue of Kueue; null means no queue."""
    gpu_resource: str = unkeyed("nvidia.com/gpu", min_length=1)
    """Resource name of a GPU. Each pod requests one GPU per rank, and none with
    launch.allow_cpu."""
    cpus: int | None = unkeyed(None, gt=0)
    """CPU cores of a pod; null means ranks x threads_per_rank, or one per rank if that is null
    too."""
    memory: str | None = unkeyed(None, min_length=1)
    """Host memory of a pod, such as `512Gi`; null means no request."""
    shared_memory: str = unkeyed("16Gi", min_length=1)
    """Size of /dev/shm in a pod, as a Kubernetes quantity in bytes."""
    node_selector: dict[str, str] = unkeyed({})
    """Labels that a node must have to run pods, by name; {} means any node."""


class LaunchConfig(Section):
    """Options of starting and supervising processes."""

    kind: LaunchKind = unkeyed("torchrun")
    """Launcher of the ranks, for both engines: torchrun or deepspeed on this host or those of the
    hostfile, slurm or kubernetes as a job of the cluster. A single rank on this host starts without
    torchrun or deepspeed."""
    hostfile: str | None = keyed(None, resolved=("finetune", "find-batch-size"), min_length=1)
    """Path of a file with a line `host slots=ranks` for each host, which is reached through ssh;
    null means only this host, or with slurm and kubernetes the hosts that they allocate."""
    include: tuple[str, ...] = keyed((), resolved=("finetune", "find-batch-size"))
    """Hosts of the hostfile to use, such as `worker-1` or, with selected slots, `worker-1:0,2`; []
    means all."""
    exclude: tuple[str, ...] = keyed((), resolved=("finetune", "find-batch-size"))
    """Hosts, or slots of hosts, to leave out, in the same form as include; not together with
    include."""
    nnodes: int | str | None = keyed(None, resolved=("finetune", "find-batch-size"))
    """Number of hosts: a number, or a range `min:max`, with which a run continues on the remaining
    hosts after a loss as long as at least min remain; null means all hosts of the hostfile, else
    one."""
    nproc_per_node: int | Literal["auto"] = keyed("auto", resolved=("finetune", "find-batch-size"))
    """Ranks per host; auto means the hostfile's slots, else one per GPU, else (without a GPU) the
    ranks of one replica: tensor x context x pipeline for a pretraining, one for a fine-tuning. A
    hostfile in an extending file or override removes an inherited number."""
    rdzv_endpoint: str | None = unkeyed(None, min_length=1)
    """Address `host:port` or `host` at which the ranks of several hosts connect; null means the
    first host's address as the other hosts reach it, and a free port there."""
    ssh_config: str | None = unkeyed(None, min_length=1)
    """Path of ssh's configuration with port, user and identity of each host; null means the user's
    configuration."""
    forward_env: tuple[str, ...] = unkeyed(
        (
            *("CUDA_*", "NCCL_*", "GLOO_*", "UCX_*", "TORCH_*", "PYTORCH_*"),
            *("PYTHON*", "DS_*", "MEGACORE_*"),
        )
    )
    """Environment variables to forward to the other hosts: names, or prefixes with * at the end. No
    prefix includes CUDA_VISIBLE_DEVICES, because each host numbers its own GPUs."""
    env_file: str | None = unkeyed(None, min_length=1)
    """Path of a file with lines NAME=VALUE, the environment of the ranks on all hosts; null means
    `.deepspeed_env` of the working or the home directory if it exists, like DeepSpeed's
    launcher."""
    interface: str = unkeyed("auto", min_length=1)
    """Network interface of the communication between hosts; auto selects on each host the interface
    that leads to the others."""
    data_placement: Literal["shared", "node_local"] = unkeyed("shared")
    """Access to the workspace: shared, all hosts see it at the same path, which is verified before
    the start; node_local, each host has its own, and missing inputs are copied from this host."""
    preflight: Literal["quick", "full", "off"] = unkeyed("quick")
    """Checks of `megacore doctor` before a training on several hosts: quick runs all checks except
    the bandwidths between hosts, full runs all, off runs none. An unfit host ends the start."""
    host_timeout: float = unkeyed(20.0, ge=5.0, le=30.0)
    """Seconds without a message from a host after which it counts as lost and the run ends on all
    hosts."""
    slurm: SlurmConfig = unkeyed(SlurmConfig())
    """Options of Slurm's batch job."""
    kubernetes: KubernetesConfig = unkeyed(KubernetesConfig())
    """Options of Kubernetes' JobSet."""
    threads_per_rank: int | None = keyed(None, resolved="find-batch-size", gt=0)
    """CPU threads per rank; null divides the cores evenly among the ranks."""
    allow_cpu: bool = unkeyed(False)
    """If true, a job sized for GPUs may start on a host without GPUs."""
    stop_grace: float = unkeyed(20.0, gt=0, lt=30)
    """Seconds between the request to stop and the killing of the ranks."""
    timeout_minutes: float | None = unkeyed(None, gt=0)
    """Time limit of the training stage in minutes; null means no limit."""
    stall_limit: float | None = unkeyed(600.0, gt=0)
    """Seconds without progress of a rank after which the job is ended; null disables the check."""
    retries: int = unkeyed(6, ge=0)
    """Number of retries after a lost rank, a failed download or a disk that failed for a cause that
    may pass; in a training, in a row without a new checkpoint."""
    retry_delay: float = unkeyed(5.0, ge=0)
    """Seconds before the first retry; before each further one in a row twice as long, up to 300."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_earlier_name(cls, values: Any) -> Any:
        if isinstance(values, dict) and "launcher" in values:
            raise ValueError("launch.launcher is called launch.kind: rename it")
        return values

    @field_validator("nproc_per_node")
    @classmethod
    def _ranks_are_in_range(cls, value: int | Literal["auto"]) -> int | Literal["auto"]:
        if value != "auto" and not 1 <= value <= MOST_SLOTS:
            raise ValueError(
                f"launch.nproc_per_node is {value}: give the ranks of a host, at least 1 and "
                f"at most {MOST_SLOTS:,}, or auto"
            )
        return value

    @field_validator("nnodes")
    @classmethod
    def _nodes_are_a_number_or_a_range(cls, value: int | str | None) -> int | str | None:
        match = None if value is None else _RANGE.fullmatch(str(value))
        ends = () if match is None else (int(match[1]), int(match[2] or match[1]))
        if value is not None and (not ends or ends[1] < ends[0] or ends[1] > MOST_HOSTS):
            raise ValueError(
                f"launch.nnodes is {value!r}: give a number of machines, such as 2, or a range, "
                f"such as 2:4, of at most {MOST_HOSTS:,}"
            )
        return value

    @property
    def node_range(self) -> tuple[int, int] | None:
        """Minimum and maximum number of hosts; None if `nnodes` is null."""
        match = None if self.nnodes is None else _RANGE.fullmatch(str(self.nnodes))
        return None if match is None else (int(match[1]), int(match[2] or match[1]))

    @property
    def elastic(self) -> bool:
        """True if a run continues with fewer hosts when some are lost."""
        return self.node_range is not None and self.node_range[0] < self.node_range[1]

    @property
    def has_scheduler(self) -> bool:
        """True if a scheduler allocates the hosts and starts the ranks: Slurm or Kubernetes."""
        return self.kind in ("slurm", "kubernetes")

    @property
    def job_gpus(self) -> int | Literal["auto"]:
        """GPUs that a scheduler's job requests on each host; auto means one for each rank."""
        gpus = self.slurm.gpus_per_node if self.kind == "slurm" else "auto"
        return 0 if gpus == "auto" and self.allow_cpu else gpus

    @property
    def requests_gpus(self) -> bool:
        """True if the ranks run as a scheduler's job that requests GPUs."""
        return self.has_scheduler and self.job_gpus != 0

    @model_validator(mode="after")
    def _hosts_come_from_one_place(self) -> Self:
        if self.hostfile is not None and self.has_scheduler:
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
        chooses = self.hostfile is not None or self.has_scheduler
        if self.node_range not in (None, (1, 1)) and not chooses:
            raise ValueError(
                f"launch.nnodes is {self.nnodes} without launch.hostfile, which lists the hosts: "
                "set launch.hostfile"
            )
        return self
