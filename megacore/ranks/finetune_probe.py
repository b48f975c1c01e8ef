"""Entry point of the ranks that test whether a micro batch fits in memory.

python -m megacore.ranks.finetune_probe --config job.json
"""

from pathlib import Path

from megacore.artifact.files import write_json
from megacore.jobs.finetune import ProbeJob
from megacore.ranks.finetune import joined_ranks
from megacore.ranks.rank import run_rank


def probe(job: ProbeJob) -> None:
    """Take the job's optimizer steps with its micro batch and write peak memory to `job.output`.

    Raises:
        MemoryExhaustedError: the micro batch does not fit.
        ConfigError: the memory limit is below the memory of a rank before it builds the model, or
            above the memory of its GPU.
        DataFormatError: samples or the pretrained model are missing or damaged.
        WorkspaceError: the output cannot be written.
    """
    with joined_ranks(job) as (rank, device, heartbeat):
        from megacore.finetune.probe import run_probe

        peak = run_probe(job, device, lambda step: heartbeat.beat("probe", step))
        if rank == 0:
            write_json(Path(job.output), {"peak_memory": peak})


if __name__ == "__main__":
    run_rank(ProbeJob, probe)
