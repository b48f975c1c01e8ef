"""Numbers of ranks and CPU threads of a launch, and the resulting layout."""

from collections.abc import Mapping, Sequence

from megacore.config.hostfile import hosts_of, local_slots
from megacore.config.launch import LaunchConfig
from megacore.config.layouts import check_layout
from megacore.config.run import RunConfig
from megacore.errors import ConfigError, ParallelLayoutError
from megacore.hardware import Hardware, owner_of
from megacore.parallel.rank_layout import RankLayout


def layout_of(config: RunConfig, ranks: int, vocab_size: int | None = None) -> RankLayout:
    """Return the layout of `ranks` ranks.

    Tensor, context and pipeline sizes are as configured; the remaining ranks are data parallel.
    `vocab_size` is that of the tokenizer before padding, None if not yet known.

    Raises ParallelLayoutError if model, batch and ranks cannot be divided, or contradict a
    DeepSpeed JSON; the message has all the numbers and the nearest valid layouts of as many ranks.
    """
    padded = None if vocab_size is None else config.model.padded_vocab_size(vocab_size)
    try:
        layout = check_layout(config, ranks, padded)
        if config.engine == "deepspeed":
            from megacore.config.deepspeed_checks import check_deepspeed

            check_deepspeed(config, layout.data)
    except ValueError as error:
        raise ParallelLayoutError(str(error)) from error
    return RankLayout.of(config.parallel, ranks)


def dividing_hosts(
    config: RunConfig, ranks: Sequence[int], least: int, vocab_size: int | None
) -> int:
    """Return the largest number of first hosts whose ranks can share the model and its batch.

    `ranks` are those of each host. Raises ParallelLayoutError, for the ranks of all hosts, if no
    number from `least` on works.
    """
    refused: ParallelLayoutError | None = None
    for number in range(len(ranks), least - 1, -1):
        try:
            layout_of(config, sum(ranks[:number]), vocab_size)
        except ParallelLayoutError as error:
            refused = refused or error
        else:
            return number
    assert refused is not None, f"there are {len(ranks)} hosts, and at least {least} are needed"
    raise refused


def ranks_per_host(launch: LaunchConfig, ranks: int) -> int:
    """Return the number of ranks that share a host."""
    if launch.has_scheduler and launch.nproc_per_node != "auto":
        return launch.nproc_per_node
    return max(hosts_of(launch).values(), default=ranks)


def launched_ranks(
    launch: LaunchConfig,
    hardware: Hardware,
    *,
    without_gpu: int = 1,
    hosts: Mapping[str, int] | None = None,
) -> tuple[int, int]:
    """Return the number of ranks of a job and of CPU threads per rank.

    Args:
        launch: launch options.
        hardware: hardware of a host of the job; the others are assumed to be equal.
        without_gpu: number of ranks for `launch.nproc_per_node: auto` on a host without a GPU.
        hosts: participating hosts and their ranks; None means all hosts of the configuration.

    Raises:
        ParallelLayoutError: there are more ranks than GPUs.
        ConfigError: the hostfile is invalid, or the number of ranks on a scheduler's hosts is
            missing.
    """
    if launch.has_scheduler:
        return _of_a_scheduler(launch, hardware)
    ranks = (
        (len(hardware.gpus) or without_gpu)
        if launch.nproc_per_node == "auto"
        else launch.nproc_per_node
    )
    local_ranks, setting = ranks, f"launch.nproc_per_node is {ranks}"
    hosts = hosts_of(launch) if hosts is None else hosts
    if hosts:
        ranks, local_ranks = sum(hosts.values()), local_slots(hosts)
        compared = hardware.host
        if compared is not None:
            # An elastic attempt may leave out the host that answered, which the others equal.
            compared = compared if compared in hosts else max(hosts, key=hosts.__getitem__)
            local_ranks = hosts[compared]
        setting = f"slots of {owner_of(compared)} in {launch.hostfile} is {local_ranks}"
    if hardware.gpus and local_ranks > len(hardware.gpus):
        raise ParallelLayoutError(
            f"{setting} and {hardware.owner} has {len(hardware.gpus)} visible "
            f"GPU{'s' if len(hardware.gpus) > 1 else ''}: set it to {len(hardware.gpus)} or to auto"
        )
    # A host that only starts the others is assumed to equal them.
    ranks_per_host = local_ranks or max(hosts.values(), default=1)
    return ranks, launch.threads_per_rank or max(1, hardware.cores // ranks_per_host)


def _of_a_scheduler(launch: LaunchConfig, hardware: Hardware) -> tuple[int, int]:
    """Return the ranks and the CPU threads per rank of a scheduler's job.

    For a range of hosts, the maximum is used.
    """
    if launch.nproc_per_node == "auto":
        raise ConfigError(
            f"launch.nproc_per_node is auto and launch.kind is {launch.kind}, whose machines are "
            "not known yet: give the number of ranks of each, one per GPU"
        )
    nodes = (launch.node_range or (1, 1))[1]
    return nodes * launch.nproc_per_node, launch.threads_per_rank or max(
        1, hardware.cores // launch.nproc_per_node
    )
