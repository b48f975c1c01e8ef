"""What crosses the process boundary.

A stage writes one JSON file, the processes it starts read it.
"""

from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from megacore.artifact.files import write_json
from megacore.config.base import Section
from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.errors import ConfigError
from megacore.redact import redact_values


class RankJob(Section):
    """What every process of any job needs to know."""

    exit_directory: str
    """Where each rank writes why it ended."""
    ranks: int
    """Processes of this job."""
    threads_per_rank: int
    """CPU threads of each process."""
    hosts: dict[str, int] = Field({})
    """Machines that take part and the ranks of each, in their order; empty: those that `launch`
    names, if any."""

    def write(self, path: Path) -> None:
        """Write the job as JSON, atomically, without the credentials of what was downloaded.

        No rank needs them.
        """
        write_json(path, self._shown())

    def _shown(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a job back. Raises ConfigError."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:  # ValidationError is a ValueError
            raise ConfigError(
                f"{path} is not a job written by this version of megacore: {_reason(error)}"
            ) from error


def _reason(error: Exception) -> str:
    """In one line: of several values that are wrong the first."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))


class Job(RankJob):
    """What every process of a run's stage needs to know."""

    config: RunConfig
    """The merged, validated configuration."""
    token_prefixes: tuple[str, ...]
    """Paths of the token files without .bin/.idx, in the order of `config.data.sources`."""
    index_directory: str
    """Directory of the index maps."""
    tokenizer_directory: str
    """Directory with tokenizer.json."""
    vocab_size: int
    """Entries of the tokenizer's vocabulary, before padding."""
    special_tokens: SpecialTokens
    """Ids of the tokens that have a role."""
    run_directory: str
    """Directory of the run: run.json, events.jsonl, checkpoints."""
    attempt: int = 1
    """How often this run was started, this time included."""

    @model_validator(mode="before")
    @classmethod
    def _of_an_earlier_version(cls, values: Any) -> Any:
        """In the files of runs that began before launch.kind had its name it is launch.launcher."""
        config = values.get("config") if isinstance(values, dict) else None
        launch = config.get("launch") if isinstance(config, dict) else None
        if not isinstance(config, dict) or not isinstance(launch, dict) or "launcher" not in launch:
            return values
        kept = {name: value for name, value in launch.items() if name != "launcher"}
        return values | {"config": config | {"launch": {"kind": launch["launcher"]} | kept}}

    @property
    def spec(self) -> ModelSpec:
        """The model by itself."""
        return ModelSpec.of(
            self.config, self.vocab_size, self.special_tokens, self.tokenizer_directory
        )

    def _shown(self) -> dict[str, Any]:
        """Only of `config.data` is everything hidden that may be a secret.

        The ranks read back the paths elsewhere.
        """
        values = super()._shown()
        config = values["config"]
        values["config"] = redact_values(config, environment=False) | {
            "data": redact_values(config["data"])
        }
        return values


class TrainJob(Job):
    """Distributed pretraining; resumes from the newest complete checkpoint in `run_directory`."""


class EvaluateJob(Job):
    """Perplexity of one or more checkpoints on a split."""

    checkpoints: tuple[str, ...]
    """Checkpoint directories (iter_*)."""
    output: str
    """JSON file to write."""


class ConvertJob(Job):
    """One checkpoint to a transformers directory, with its gate."""

    checkpoint: str
    """Checkpoint directory (iter_*)."""
    output_directory: str
    """Empty directory to fill."""
    card: dict[str, str]
    """Facts for the model card: data, perplexities, lineage."""

    def _shown(self) -> dict[str, Any]:
        """The card is published, and names where the data is from."""
        return super()._shown() | {"card": redact_values(self.card)}
