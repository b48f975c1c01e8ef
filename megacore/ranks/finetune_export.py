"""Entry point of the rank that exports the best model of a fine-tuning, with its gate.

python -m megacore.ranks.finetune_export --config job.json
"""

from megacore.jobs.finetune import FinetuneExportJob
from megacore.ranks.finetune import joined_ranks
from megacore.ranks.rank import require_one_rank, run_rank


def export_finetuned(job: FinetuneExportJob) -> None:
    """Fill the job's output directory with `model/`, `parity.json` and `sample.txt`.

    Raises:
        ConfigError: the job asks for more than one rank.
        ConversionError: the export differs from the trained model.
        CheckpointError: the best model is damaged or incomplete.
        DataFormatError: the validation split has no sample.
        WorkspaceError: the output cannot be written.
    """
    require_one_rank(job, "an export")
    with joined_ranks(job) as (_, device, heartbeat):
        from megacore.finetune.export import export

        export(job, device, heartbeat.beat)


if __name__ == "__main__":
    run_rank(FinetuneExportJob, export_finetuned)
