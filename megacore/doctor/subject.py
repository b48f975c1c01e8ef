"""Subject of an examination: the hosts, and the known facts of the run planned on them."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from megacore.artifact.workspace import Workspace
from megacore.config.data import PrefixSource
from megacore.config.hostfile import hosts_of
from megacore.config.launch import LaunchConfig
from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec
from megacore.doctor.findings import Needs
from megacore.doctor.storage import TOKENS_ACCEPTED
from megacore.engine.deepspeed.operators import needed_operators
from megacore.errors import ConfigError
from megacore.inspect.tokens import find_prefixes, prefix_of
from megacore.jobs.run import Job, TrainJob
from megacore.models.parameters import parameter_count
from megacore.paths import glob, is_dir
from megacore.plan.layouts import layout_of
from megacore.plan.memory import estimate_memory
from megacore.plan.preflight import checkpoints_on_disk
from megacore.plan.vocabulary import expected_vocab_size, is_on_the_hub

_GRADIENT_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class RunData:
    """Token files and index maps of a run."""

    prefixes: tuple[str, ...] = ()
    """Paths of the token files without .bin/.idx."""
    vocab_size: int | None = None
    index_directory: str | None = None


@dataclass(frozen=True)
class Subject:
    """Hosts and the run planned on them."""

    hosts: Mapping[str, int]
    """Ranks of each host; 0 if their number is unknown."""
    workspace: Path
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    config: RunConfig | None = None
    data: RunData = field(default_factory=RunData)

    @classmethod
    def of_run(cls, job: Job) -> Self:
        """Return the subject of a job that is about to start. Raises ConfigError."""
        launch = job.config.launch
        hosts = job.hosts or hosts_of(launch) or {own_name(): job.ranks}
        data = RunData(job.token_prefixes, job.vocab_size, job.index_directory)
        return cls(hosts, Workspace.of().root, launch, job.config, data)

    @classmethod
    def of_launch(
        cls, launch: LaunchConfig, workspace: Path, config: RunConfig | None, data: RunData
    ) -> Self:
        """Return the subject with the hosts of `launch`, or this host. Raises ConfigError."""
        local_ranks = launch.nproc_per_node if isinstance(launch.nproc_per_node, int) else 0
        return cls(hosts_of(launch) or {own_name(): local_ranks}, workspace, launch, config, data)

    def with_ranks(self, gpus: Mapping[str, int]) -> Self:
        """Return the subject with the ranks that a start would have where their number is unknown.

        They are one for each of a host's visible `gpus`; without any, those of one replica.
        """
        if self.launch.has_scheduler:  # this host is not one of the job's
            return self
        replica = 0 if self.config is None else self.config.parallel.ranks_per_replica
        hosts = {host: ranks or gpus.get(host) or replica for host, ranks in self.hosts.items()}
        return replace(self, hosts=hosts)

    def ranks_on(self, nodes: int) -> int:
        """Return the ranks on the `nodes` hosts with the fewest; 0 if their number is unknown."""
        if self.launch.has_scheduler:  # whose hosts are equal, and of which none is known
            return nodes * sum(self.hosts.values())
        return sum(sorted(self.hosts.values())[:nodes])

    @property
    def shared(self) -> bool:
        """True if all hosts must see the same workspace."""
        return len(self.hosts) > 1 and self.launch.data_placement == "shared"


def own_name() -> str:
    """Return the host name of this host."""
    return socket.gethostname()


def data_of(config: RunConfig, workspace: Workspace) -> RunData:
    """Return the data of the newest run with this configuration's data section.

    Without such a run, return the existing token files that the configuration names, if any. Raises
    ConfigError.
    """
    files = sorted(
        glob(workspace.folder("train"), "*/run.json"),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    for path in files:
        try:
            job = TrainJob.read(path)
        except ConfigError:
            continue  # written by another version of megacore
        if job.config.name == config.name and job.config.data == config.data:
            return RunData(job.token_prefixes, job.vocab_size, job.index_directory)
    ready = tuple(
        source.prefix for source in config.data.sources if isinstance(source, PrefixSource)
    )
    if not ready:
        return RunData()
    # The size of a tokenizer on the hub is known only when it has been downloaded.
    choice = config.data.tokenizer
    return RunData(ready, None if is_on_the_hub(choice) else expected_vocab_size(choice))


def data_at(path: Path, vocab_size: int | None) -> RunData:
    """Return the token files at a prefix or in a directory, whether or not the prefix exists.

    Raises ConfigError without `vocab_size`, or DataFormatError for a directory without token files.
    """
    if vocab_size is None:
        raise ConfigError(
            f"--tokens is {path}: give --vocab-size too, the entries of the vocabulary they must "
            "be below"
        )
    if is_dir(path):
        return RunData(find_prefixes(path, TOKENS_ACCEPTED), vocab_size)
    return RunData((prefix_of(path),), vocab_size)  # the check `tokens` reports missing files


def needs_of(subject: Subject, device_type: str, precision: str) -> Needs | None:
    """Return the estimated needs of the run; None without a configuration.

    Raises ParallelLayoutError.
    """
    config = subject.config
    if config is None:
        return None
    vocab_size = subject.data.vocab_size or expected_vocab_size(config.data.tokenizer)
    parallel = config.parallel
    replica = parallel.ranks_per_replica
    nodes = (subject.launch.node_range or (1, 1))[1]
    ranks = subject.ranks_on(max(nodes, len(subject.hosts))) or replica
    if subject.launch.elastic:
        data = _least_replicas(subject, replica)
    else:
        data = layout_of(config, ranks, vocab_size).data
    memory = estimate_memory(config, vocab_size, precision, device_type, data)
    parameters = parameter_count(ModelSpec.of(config, vocab_size))
    count, checkpoint = checkpoints_on_disk(config, vocab_size)
    return Needs(
        name=config.name,
        device=memory.total,
        host=memory.host,
        checkpoint=checkpoint,
        checkpoints=count * checkpoint,
        gradients=_GRADIENT_BYTES[parallel.grad_reduce_dtype] * parameters,
        deepspeed=config.engine == "deepspeed",
        # torch's Adam replaces a missing cpu_adam.
        operators=tuple(
            name
            for name in needed_operators(config)
            if name != "cpu_adam" or config.deepspeed.cpu_adam != "auto"
        ),
    )


def _least_replicas(subject: Subject, replica: int) -> int:
    """Return the number of replicas of an elastic run on the fewest hosts.

    A rank needs the most memory there. As at the start of a run, the number must divide the batch.
    """
    config, nodes = subject.config, subject.launch.node_range
    assert config is not None
    assert nodes is not None
    largest = subject.ranks_on(nodes[0]) // replica
    batches = config.train.global_batch_size // config.train.micro_batch_size
    return next((count for count in range(largest, 0, -1) if batches % count == 0), 1)
