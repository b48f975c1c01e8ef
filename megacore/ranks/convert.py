"""Entry point of the rank that exports a checkpoint to a transformers directory, with its gate.

python -m megacore.ranks.convert --config job.json
"""

import os

from megacore.jobs.run import ConvertJob
from megacore.observe.heartbeat import ENDED
from megacore.ranks.rank import OFFLINE, begin_heartbeat, require_one_rank, run_rank


def convert_checkpoint(job: ConvertJob) -> None:
    """Fill the job's output directory with `model/`, `parity.json` and `sample.txt`.

    Raises:
        ConfigError: the job asks for more than one rank.
        ConversionError: the model has no counterpart in transformers, or the export differs from
            it.
        CheckpointError: the checkpoint is damaged or of another model.
        DataFormatError: the validation split has no samples.
        WorkspaceError: the output cannot be written.
    """
    require_one_rank(job, "a conversion")
    heartbeat = begin_heartbeat(job)
    os.environ.update(OFFLINE)
    import torch

    from megacore.convert.export import export

    torch.set_num_threads(job.threads_per_rank)
    export(job, heartbeat.beat)
    heartbeat.beat(ENDED)


if __name__ == "__main__":
    run_rank(ConvertJob, convert_checkpoint)
