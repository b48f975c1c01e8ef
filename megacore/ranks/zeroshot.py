"""Entry point of the ranks that score a model on WikiText, LAMBADA and passkeys.

python -m megacore.ranks.zeroshot --config job.json
"""

from dataclasses import asdict
from pathlib import Path

from megacore.artifact.files import write_json
from megacore.jobs.model import ZeroShotJob
from megacore.ranks.rank import run_rank


def evaluate_zero_shot(job: ZeroShotJob) -> None:
    """Write the scores of the job's model to `job.output`, atomically.

    The file has one entry for each configured text, and `passkey` if it has lengths.

    Raises:
        DataFormatError: a text is missing or malformed.
        CheckpointError: the weights are damaged or of another model.
        ParallelLayoutError: the ranks cannot share the model.
        WorkspaceError: the output cannot be written.
    """
    from megacore.models.gpt import GPTModel
    from megacore.observe.logging import configure_logging
    from megacore.ranks.process import joined_model
    from megacore.tokenizer import load_tokenizer
    from megacore.zeroshot.score import ZeroshotScorer
    from megacore.zeroshot.texts import read_lambada, read_wikitext

    tokenizer = load_tokenizer(job.tokenizer_directory)
    with joined_model(job) as (model, mesh, device):
        assert isinstance(model, GPTModel), (
            f"{job.source.directory} is of family {job.source.spec.family}"
        )
        configure_logging(mesh.rank)
        scorer = ZeroshotScorer(
            model, mesh, device, vocab_size=job.source.spec.vocab_size, batch_size=job.batch_size
        )
        scores, settings, length = {}, job.settings, job.seq_length
        if settings.wikitext is not None:
            text = read_wikitext(Path(settings.wikitext), tokenizer)
            scores["wikitext"] = asdict(scorer.wikitext(text, length, settings.overlapping_eval))
        if settings.lambada is not None:
            passages = read_lambada(Path(settings.lambada), tokenizer)
            scores["lambada"] = asdict(scorer.lambada(passages, length))
        if settings.passkey.lengths:
            scores["passkey"] = asdict(scorer.passkey(tokenizer, settings.passkey))
        if mesh.rank == 0:
            write_json(Path(job.output), scores)


if __name__ == "__main__":
    run_rank(ZeroShotJob, evaluate_zero_shot)
