"""Job files of a fine-tuning."""

from pathlib import Path
from typing import Any

from megacore.config.finetune import FinetuneConfig
from megacore.jobs.run import RunJob
from megacore.redact import redact_values


class FinetuneJob(RunJob):
    """One fine-tuning; resumes from the newest complete checkpoint in `run_directory`."""

    config: FinetuneConfig
    """Merged, validated configuration."""
    pretrained_directory: str
    """Artifact of the stage `pretrained`: a transformers directory in `model/`."""
    examples_directory: str
    """Artifact of the stage `examples`: the tokenized splits."""

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages whose versions must be the same on all hosts."""
        engine = ("deepspeed",) if self.config.launch.distributed.startswith("zero") else ()
        return (*super().packages, *engine)

    @property
    def trace_prefix(self) -> Path:
        """Path among the logs."""
        return self.attempt_traces

    def _shown(self) -> dict[str, Any]:
        """Return the fields without credentials in names of data and models.

        The ranks do not need them, because no rank downloads anything.
        """
        values = super()._shown()
        return values | {"config": redact_values(values["config"], environment=False)}


class FinetuneExportJob(FinetuneJob):
    """Export of a fine-tuning's best model to a transformers directory, with its gate."""

    best: str
    """Directory of the best model (best/iter_*)."""
    output_directory: str
    """Empty directory to fill."""
    card: dict[str, str]
    """Facts for the model card: data, metrics, lineage."""

    def _shown(self) -> dict[str, Any]:
        """Return the fields without credentials in the card, which is published."""
        return super()._shown() | {"card": redact_values(self.card)}


class ProbeJob(FinetuneJob):
    """Memory test of a micro batch: a few optimizer steps with the largest samples."""

    output: str
    """JSON file to write."""
    steps: int
    """Number of optimizer steps."""
    memory_limit: int | None
    """Memory limit of each rank in bytes; null means the memory of its GPU."""
