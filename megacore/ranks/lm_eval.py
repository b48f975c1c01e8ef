"""Entry point of the process that scores an exported model with lm-evaluation-harness.

python -m megacore.ranks.lm_eval --config job.json
"""

import os
from pathlib import Path

from megacore.artifact.files import write_json
from megacore.jobs.model import LmEvalJob
from megacore.ranks.rank import require_one_rank, run_rank


def score_export(job: LmEvalJob) -> None:
    """Write the scores of the job's model to `job.output`, atomically.

    Raises:
        ConfigError: the job asks for more than one rank, or lm_eval is not installed.
        DownloadError: the data of a task were not found.
        DataFormatError: lm_eval refused a task or its data.
        WorkspaceError: the output cannot be written.
    """
    require_one_rank(job, "lm_eval")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch

    from megacore.ranks.process import choose_device
    from megacore.zeroshot.harness import score_model

    torch.set_num_threads(job.threads_per_rank)
    scores = score_model(
        Path(job.model_directory),
        job.settings.tasks,
        include_path=job.settings.include_path,
        num_fewshot=job.settings.num_fewshot,
        limit=job.settings.limit,
        batch_size=job.batch_size,
        device=str(choose_device()),
    )
    write_json(Path(job.output), scores)


if __name__ == "__main__":
    run_rank(LmEvalJob, score_export)
