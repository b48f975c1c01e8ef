"""Entry point of the ranks that measure the perplexities of finished checkpoints.

python -m megacore.ranks.evaluate --config job.json
"""

from pathlib import Path

from megacore.artifact.files import write_json
from megacore.jobs.run import EvaluateJob
from megacore.ranks.rank import run_rank

UNIGRAM = "unigram"
"""Name of the result of the unigram model."""


def evaluate_checkpoints(job: EvaluateJob) -> None:
    """Write both perplexities of each checkpoint of the job into `job.output` when it is scored.

    A checkpoint's file contains iteration, test_loss, test_ppl, test_samples, test_by_position (the
    loss by position in the sample), and the same of the validation split. For a model with a binary
    head it also contains test_sop_loss and valid_sop_loss, or nsp_loss; for a blend test_by_source
    and valid_by_source. The file of the unigram model contains the perplexity of the train split's
    token frequencies on the same tokens, by split. Losses are in nats per token.
    `evaluate.max_samples` samples of each split are scored, or all.

    Raises:
        DataFormatError: tokens or index maps are missing or damaged, or a split has no sample.
        CheckpointError: a checkpoint is damaged or of another model.
        TrainingError: memory is insufficient.
        WorkspaceError: the output cannot be written.
    """
    from megacore.observe.logging import configure_logging
    from megacore.ranks.process import joined
    from megacore.train.memory import scoring_memory_errors
    from megacore.train.score import CheckpointScorer

    with joined(job) as (mesh, device):
        configure_logging(mesh.rank)
        batch, parts = job.config.evaluate.micro_batch_size, mesh.tensor_parallel.size
        with scoring_memory_errors(batch, mesh.rank, parts):
            scorer = CheckpointScorer(job, mesh, device)
        for checkpoint in map(Path, job.checkpoints):
            with scoring_memory_errors(batch, mesh.rank, parts):
                result = scorer.score(checkpoint)
            if mesh.rank == 0:
                write_json(result_file(job.output, checkpoint.name), result)
        if job.unigram and mesh.rank == 0:
            write_json(result_file(job.output, UNIGRAM), scorer.unigram())


def result_file(output: str | Path, name: str) -> Path:
    """Return the path of the result `name` in the output directory of a job."""
    return Path(output) / f"{name}.json"


if __name__ == "__main__":
    run_rank(EvaluateJob, evaluate_checkpoints)
