"""What crosses the process boundary of a fine-tuning."""

from typing import Any

from megacore.config.finetune import FinetuneConfig
from megacore.jobs.run import RankJob
from megacore.redact import redact_values


class FinetuneJob(RankJob):
    """One fine-tuning, gone on with from the newest complete checkpoint in `run_directory`."""

    config: FinetuneConfig
    """The merged, validated configuration."""
    pretrained_directory: str
    """Artifact of the stage `pretrained`: a transformers directory in `model/`."""
    examples_directory: str
    """Artifact of the stage `examples`: the tokenized splits."""
    run_directory: str
    """Directory of the run: run.json, events.jsonl, checkpoints, best."""
    attempt: int = 1
    """How often this run was started, this time included."""

    def _shown(self) -> dict[str, Any]:
        """Without the credentials that a name of data or model may hold: no rank downloads."""
        values = super()._shown()
        return values | {"config": redact_values(values["config"], environment=False)}


class FinetuneExportJob(FinetuneJob):
    """The best model of a finished fine-tuning as a transformers directory, with its gate."""

    best: str
    """Directory of the best model (best/iter_*)."""
    output_directory: str
    """Empty directory to fill."""
    card: dict[str, str]
    """Facts for the model card: data, metrics, lineage."""

    def _shown(self) -> dict[str, Any]:
        """The card is published, and names where data and model are from."""
        return super()._shown() | {"card": redact_values(self.card)}


class ProbeJob(FinetuneJob):
    """A few optimizer steps with the largest samples there are: does a micro batch fit?"""

    output: str
    """JSON file to write."""
    steps: int
    """Optimizer steps that are taken."""
    memory_limit: int | None
    """Bytes that each rank may have; null means what its GPU has."""
