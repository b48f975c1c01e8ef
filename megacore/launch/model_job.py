"""Jobs on a model by itself, apart from any run: generation and zero-shot evaluation."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.config.launch import LaunchConfig
from megacore.config.train import Precision
from megacore.generate.options import GenerateOptions
from megacore.generate.source import ModelSource
from megacore.launch.hosts.hostfile import hosts_of, is_only_here
from megacore.launch.hosts.ssh import check_ssh
from megacore.launch.job import RankJob
from megacore.launch.start import ssh_of, start_ranks
from megacore.launch.supervise import supervise
from megacore.parallel.rank_layout import RankLayout

if TYPE_CHECKING:
    import torch

    from megacore.models.base import Model
    from megacore.parallel.mesh import ProcessMesh

_OUTPUT = "result.json"


class ModelJob(RankJob):
    """What every rank needs to know of a job on a finished model."""

    source: ModelSource
    """Where the weights are, and of which model."""
    tensor_model_parallel_size: int
    """Ranks that share each layer; what they leave of the ranks is data parallel."""
    precision: Precision
    """Compute type; auto takes bf16 where the hardware multiplies it natively, else fp32."""
    batch_size: int
    """Sequences per forward pass."""
    output: str
    """JSON file to write."""

    @property
    def layout(self) -> RankLayout:
        """The layout of the job's ranks. Raises ParallelLayoutError when they do not divide."""
        return RankLayout.of_world(self.ranks, tensor=self.tensor_model_parallel_size)


class GenerateJob(ModelJob):
    """Continuations of prompts."""

    prompts: tuple[tuple[int, ...], ...]
    """Ids of each."""
    options: GenerateOptions
    """How tokens are chosen, and how many."""
    end: int | None
    """Id of the token that ends a text; null lets every prompt have all its tokens."""


class ZeroShotJob(ModelJob):
    """Scores of a model on texts that it was not trained for."""

    tokenizer_directory: str
    """Directory with tokenizer.json."""
    wikitext: str | None
    """Path of WikiText's test split; null leaves it out."""
    lambada: str | None
    """Path of LAMBADA's test split; null leaves it out."""
    seq_length: int
    """Tokens of a window."""
    overlapping_eval: int | None
    """Tokens between the starts of windows; null means seq_length."""


def run_job(
    module: str,
    job: ModelJob,
    scratch: Path,
    *,
    launch: LaunchConfig = LaunchConfig(),  # noqa: B008  it is frozen
    on_poll: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Start the job's ranks and return what they wrote to `job.output`.

    Args:
        module: entry point of each rank.
        job: what they do.
        scratch: directory for the job file and the log.
        launch: what starts the ranks, and where.
        on_poll: called a few times a second.

    Raises the typed error of the rank that failed first, or RankLostError, and LaunchError for a host that lacks what
    its ranks read.
    """
    job_file = scratch / "job.json"
    job.write(job_file)
    hosts = job.hosts or hosts_of(launch)
    if not is_only_here(hosts):
        from megacore.launch.placement.prepare import prepare_model_hosts

        check_ssh(hosts)
        prepare_model_hosts(job, hosts, ssh_of(launch), launch)
    start = start_ranks(launch, module, job, job_file)
    supervise(
        start.command,
        log=scratch / log_name(module),
        exit_directory=Path(job.exit_directory),
        env=start.env,
        stop_grace=launch.stop_grace,
        hosts=start.hosts,
        stop_margin=start.stop_margin,
        on_poll=on_poll,
    )
    result: dict[str, Any] = json.loads(Path(job.output).read_text(encoding="utf-8"))
    return result


def log_name(module: str) -> str:
    """Name of the file with the ranks' output."""
    return f"{module.rpartition('.')[2]}.log"


def places(scratch: Path) -> dict[str, Any]:
    """Where a job in `scratch` puts its result and the reasons of ranks that fail."""
    return {"exit_directory": str(scratch / "exit"), "output": str(scratch / _OUTPUT)}


@contextmanager
def joined_model(job: ModelJob) -> "Iterator[tuple[Model, ProcessMesh, torch.device]]":
    """This rank's part of the job's model, among the others; left when the body has succeeded.

    Raises:
        ParallelLayoutError: another number of processes was started than the job says, or they cannot share the
            model.
        CheckpointError: the weights are damaged or of another model.
    """
    import torch.distributed as dist

    from megacore.engine.native import DTYPES
    from megacore.engine.precision import resolve_precision
    from megacore.generate.weights import load_model
    from megacore.launch.process import choose_device, set_up_arithmetic, started_ranks
    from megacore.parallel.mesh import ProcessMesh

    world_size, layout = started_ranks(job), job.layout
    set_up_arithmetic(job.threads_per_rank)
    device = choose_device()
    mesh = ProcessMesh.serial()
    if world_size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        mesh = ProcessMesh.build(layout, device_type=device.type)
    dtype = DTYPES[resolve_precision(job.precision, device.type)]
    yield load_model(job.source, mesh, device=device, dtype=dtype), mesh, device
    if world_size > 1:
        dist.destroy_process_group()
