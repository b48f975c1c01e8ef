"""Entry point of the ranks that measure the perplexities of finished checkpoints.

python -m megacore.ranks.evaluate --config job.json
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.artifact.files import write_json
from megacore.jobs.run import EvaluateJob
from megacore.ranks.rank import run_rank

if TYPE_CHECKING:
    from megacore.parallel.mesh import ProcessMesh
    from megacore.train.score import CheckpointScorer


def evaluate_checkpoints(job: EvaluateJob) -> None:
    """Write both perplexities of every checkpoint of the job to `job.output`, atomically.

    The entry `checkpoints` maps each path to iteration, test_loss, test_ppl, test_samples,
    valid_loss, valid_ppl and valid_samples. For a model with a binary head it also contains
    test_sop_loss and valid_sop_loss, or nsp_loss. The entry `unigram` contains the perplexity of
    the train split's token frequencies on the same tokens. Losses are in nats per token.
    `evaluate.max_samples` samples of each split are scored, or all.

    Raises:
        DataFormatError: tokens or index maps are missing or damaged, or a split has no sample.
        CheckpointError: a checkpoint is damaged or of another model.
        TrainingError: memory is insufficient.
        WorkspaceError: the output cannot be written.
    """
    from megacore.observe.logging import configure_logging
    from megacore.ranks.process import joined
    from megacore.train.score import CheckpointScorer

    with joined(job) as (mesh, device):
        configure_logging(mesh.rank)
        scorer = CheckpointScorer(job, mesh, device)
        results = _score_all(job, scorer, mesh)
        if mesh.rank == 0:
            write_json(Path(job.output), {"checkpoints": results, "unigram": scorer.unigram()})


def _score_all(
    job: EvaluateJob, scorer: "CheckpointScorer", mesh: "ProcessMesh"
) -> dict[str, dict[str, Any]]:
    from megacore.train.memory import scoring_memory_errors

    results = {}
    with scoring_memory_errors(job.config.evaluate.micro_batch_size, mesh.rank):
        for checkpoint in job.checkpoints:
            results[checkpoint] = scorer.score(Path(checkpoint))
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Evaluate on this rank, and write an exit reason if it fails."""
    run_rank(EvaluateJob, evaluate_checkpoints, arguments)


if __name__ == "__main__":
    main()
