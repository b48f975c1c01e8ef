"""Entry point of the ranks that generate continuations of prompts.

python -m megacore.ranks.generate --config job.json
"""

from dataclasses import asdict
from pathlib import Path

from megacore.artifact.files import write_json
from megacore.jobs.model import GenerateJob
from megacore.ranks.rank import run_rank


def continue_prompts(job: GenerateJob) -> None:
    """Write the continuation of every prompt of the job to `job.output`, atomically.

    Raises:
        ConfigError: a prompt is empty or too long, or contains an id outside of the vocabulary.
        CheckpointError: the weights are damaged or of another model.
        ParallelLayoutError: the ranks cannot share the model.
        WorkspaceError: the output cannot be written.
    """
    from megacore.generate.generate import generate
    from megacore.models.gpt import GPTModel
    from megacore.models.t5 import T5Model
    from megacore.ranks.process import joined_model

    with joined_model(job) as (model, mesh, _):
        assert isinstance(model, (GPTModel, T5Model)), f"{job.source.directory} cannot generate"
        continuations = generate(
            model,
            job.prompts,
            job.options,
            vocab_size=job.source.spec.vocab_size,
            ends=job.ends,
            start=job.source.spec.special_tokens.pad or 0,
            batch_size=job.batch_size,
        )
        if mesh.rank == 0:
            write_json(
                Path(job.output),
                {"continuations": [asdict(continuation) for continuation in continuations]},
            )


if __name__ == "__main__":
    run_rank(GenerateJob, continue_prompts)
