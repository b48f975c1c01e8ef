"""How many processes and CPU threads a launch comes to, and the layout that they make."""

from collections.abc import Mapping

from megacore.config.hostfile import hosts_of, local_slots
from megacore.config.launch import LaunchConfig
from megacore.config.parallel import check_layout
from megacore.config.run import RunConfig
from megacore.errors import ConfigError, ParallelLayoutError
from megacore.hardware import Hardware
from megacore.parallel.rank_layout import RankLayout


def layout_of(config: RunConfig, ranks: int, vocab_size: int | None = None) -> RankLayout:
    """The layout of `ranks` ranks.

    Tensor and pipeline sizes as configured, data parallel over what they leave.

    Args:
        config: the run.
        ranks: processes of the job.
        vocab_size: entries of the tokenizer before padding, None where they are not known yet.

    Raises:
        ParallelLayoutError: model, batch and ranks do not divide as they must, or not as a
            DeepSpeed JSON says; the message has all the numbers and the nearest layouts of as many
            ranks that work.
    """
    padded = None if vocab_size is None else config.model.padded_vocab_size(vocab_size)
    try:
        layout = check_layout(config, ranks, padded)
        if config.engine == "deepspeed":
            from megacore.config.deepspeed_checks import check_deepspeed

            check_deepspeed(config, layout.data)
    except ValueError as error:
        raise ParallelLayoutError(str(error)) from error
    return RankLayout(data=layout.data, pipeline=layout.pipeline, tensor=layout.tensor)


def launched_ranks(
    launch: LaunchConfig,
    hardware: Hardware,
    *,
    without_gpu: int = 1,
    hosts: Mapping[str, int] | None = None,
) -> tuple[int, int]:
    """Ranks of a job and CPU threads of each.

    Args:
        launch: what starts them, and where.
        hardware: of this machine; the others are taken to be like it.
        without_gpu: ranks that `launch.nproc_per_node: auto` means on a machine without a GPU.
        hosts: that take part and their ranks, None for all that may.

    Raises:
        ParallelLayoutError: there are more ranks than GPUs.
        ConfigError: the hostfile cannot be used, or a scheduler's machines have no number of ranks.
    """
    if launch.kind in ("slurm", "kubernetes"):
        return _of_a_scheduler(launch, hardware)
    ranks = (
        (len(hardware.gpus) or without_gpu)
        if launch.nproc_per_node == "auto"
        else launch.nproc_per_node
    )
    here, setting = ranks, f"launch.nproc_per_node is {ranks}"
    hosts = hosts_of(launch) if hosts is None else hosts
    if hosts:
        ranks, here = sum(hosts.values()), local_slots(hosts)
        setting = f"slots of this machine in {launch.hostfile} is {here}"
    if hardware.gpus and here > len(hardware.gpus):
        raise ParallelLayoutError(
            f"{setting} and this machine has {len(hardware.gpus)} visible "
            f"GPU{'s' if len(hardware.gpus) > 1 else ''}: set it to {len(hardware.gpus)} or to auto"
        )
    # a machine that only starts the others is taken to be like them
    beside = here or max(hosts.values(), default=1)
    return ranks, launch.threads_per_rank or max(1, hardware.cores // beside)


def _of_a_scheduler(launch: LaunchConfig, hardware: Hardware) -> tuple[int, int]:
    """The machines of a scheduler have a number of ranks each, whatever this one has.

    Of a range all are expected.
    """
    if launch.nproc_per_node == "auto":
        raise ConfigError(
            f"launch.nproc_per_node is auto and launch.kind is {launch.kind}, whose machines "
            "nobody has seen yet: give the number of ranks of each, one per GPU"
        )
    nodes = (launch.node_range or (1, 1))[1]
    return nodes * launch.nproc_per_node, launch.threads_per_rank or max(
        1, hardware.cores // launch.nproc_per_node
    )
