"""`python -m megacore.ranks.finetune_probe --config job.json`, on each rank.

Does a micro batch fit?
"""

from collections.abc import Sequence
from pathlib import Path

from megacore.artifact.files import write_json
from megacore.jobs.finetune import ProbeJob
from megacore.ranks.finetune import joined_ranks
from megacore.ranks.rank import run_rank

MODULE = "megacore.ranks.finetune_probe"


def probe(job: ProbeJob) -> None:
    """Take the job's optimizer steps with its micro batch; write peak memory to `job.output`.

    Raises:
        MemoryExhaustedError: the micro batch does not fit.
        ConfigError: the memory limit is less than what a rank has before it builds the model, or
            beyond its GPU.
        DataFormatError: samples or the pretrained model are missing or damaged.
        WorkspaceError: the output cannot be written.
    """
    with joined_ranks(job) as (rank, device, heartbeat):
        from megacore.finetune.probe import run_probe

        peak = run_probe(job, device, lambda step: heartbeat.beat("probe", step))
        if rank == 0:
            write_json(Path(job.output), {"peak_memory": peak})


def main(arguments: Sequence[str] | None = None) -> None:
    """Probe on this rank, and report why it ended if it fails."""
    run_rank(ProbeJob, probe, arguments)


if __name__ == "__main__":
    main()
