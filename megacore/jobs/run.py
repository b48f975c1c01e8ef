"""Job files of the stages of a run.

A stage writes one JSON file, and the processes that it starts read it.
"""

from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from megacore.artifact.files import read_json, reason_of, write_json
from megacore.config.base import Section
from megacore.config.run import RunConfig, with_current_names
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.errors import ConfigError, dotted
from megacore.hardware import SHARED_PACKAGES
from megacore.paths import glob
from megacore.redact import redact_values

_LOGS = "logs"
"""Folder in a run's directory with the logs of its attempts."""


class RankJob(Section):
    """Common fields of all jobs."""

    exit_directory: str
    """Directory of the ranks' exit reasons."""
    ranks: int
    """Number of ranks."""
    threads_per_rank: int
    """CPU threads of each rank."""
    hosts: dict[str, int] = Field({})
    """Number of ranks of each host, in the order of the hosts; empty means the hosts that `launch`
    names, if any."""

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages whose versions must be the same on all hosts."""
        return SHARED_PACKAGES

    @property
    def trace_prefix(self) -> Path:
        """Path of the files with the last collectives of NCCL, without the rank at its end."""
        return Path(self.exit_directory).absolute() / "nccl_trace_rank_"

    def write(self, path: Path) -> None:
        """Write the job as JSON, atomically.

        Credentials for downloads are left out, because no rank needs them.
        """
        write_json(path, self._shown())

    def _shown(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a job file. Raises ConfigError if it is missing or invalid, or FileAccessError."""
        try:
            return cls.model_validate(read_json(path))
        except FileNotFoundError as error:
            raise ConfigError(
                f"{path} does not exist: give the job file of a stage, such as run.json in a "
                "run's directory"
            ) from error
        except (OSError, ValueError) as error:  # ValidationError is a ValueError
            raise ConfigError(
                f"{path} is not a job written by this version of megacore: {_reason(error)}"
            ) from error


def _reason(error: Exception) -> str:
    """Return the error as one line, with only the first of several invalid values."""
    if not isinstance(error, ValidationError):
        return reason_of(error)
    first = error.errors()[0]
    return ": ".join(filter(None, [dotted(first["loc"]), first["msg"]]))


class RunJob(RankJob):
    """Common fields of the jobs on a pretraining or a fine-tuning."""

    run_directory: str
    """Directory of the run: run.json, events.jsonl, checkpoints."""
    attempt: int = 1
    """Number of this attempt, counted from 1."""
    precision: str | None = None
    """Compute type (fp32, bf16 or fp16), which the run's key contains; None means
    `config.train.precision`, in files of earlier versions."""

    @property
    def attempt_log(self) -> Path:
        """Path of this attempt's log."""
        return Path(self.run_directory) / _LOGS / f"attempt-{self.attempt:03d}.log"

    @property
    def attempt_traces(self) -> Path:
        """The `trace_prefix` next to this attempt's log.

        The next attempt empties the exit directory.
        """
        log = self.attempt_log.absolute()
        return log.with_name(f"{log.stem}-nccl_trace_rank_")


def attempt_logs(run_directory: Path) -> list[Path]:
    """Return the paths of a run's logs (`RunJob.attempt_log`) in the order of the attempts."""
    logs = glob(run_directory / _LOGS, "attempt-*.log")
    return sorted(logs, key=lambda path: (len(path.name), path.name))  # 1000 comes after 999


class Job(RunJob):
    """Common fields of the jobs of a run's stages."""

    config: RunConfig
    """Merged, validated configuration."""
    token_prefixes: tuple[str, ...]
    """Paths of the token files without .bin/.idx, in the order of `config.data.sources`."""
    index_directory: str
    """Directory of the index maps."""
    tokenizer_directory: str
    """Directory with tokenizer.json."""
    vocab_size: int
    """Size of the tokenizer's vocabulary, before padding."""
    special_tokens: SpecialTokens
    """Ids of the special tokens."""

    @model_validator(mode="before")
    @classmethod
    def _rename_earlier_values(cls, values: Any) -> Any:
        """Rename values in files of earlier versions."""
        config = values.get("config") if isinstance(values, dict) else None
        return (
            values | {"config": with_current_names(config)} if isinstance(config, dict) else values
        )

    @property
    def spec(self) -> ModelSpec:
        """Specification of the model, without the rest of the configuration."""
        return ModelSpec.of(
            self.config, self.vocab_size, self.special_tokens, self.tokenizer_directory
        )

    def _shown(self) -> dict[str, Any]:
        """Return the fields without credentials.

        Values of secret environment variables are redacted only in `config.data`: the ranks read
        the paths in the other sections, which must not change.
        """
        values = super()._shown()
        config = values["config"]
        values["config"] = redact_values(config, environment=False) | {
            "data": redact_values(config["data"])
        }
        return values


class TrainJob(Job):
    """Distributed pretraining; resumes from the newest complete checkpoint in `run_directory`."""

    planned_samples: int | None = None
    """Samples of the train split for which the order of the samples was planned, before the epochs
    that follow it; None in files of earlier versions."""

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages whose versions must be the same on all hosts."""
        engine = ("deepspeed",) if self.config.engine == "deepspeed" else ()
        return (*super().packages, *engine)

    @property
    def trace_prefix(self) -> Path:
        """Path among the logs."""
        return self.attempt_traces


class EvaluateJob(Job):
    """Measurement of the perplexity of checkpoints on the test and valid splits."""

    checkpoints: tuple[str, ...]
    """Checkpoint directories (iter_*), in the order in which they are scored."""
    unigram: bool
    """True if the unigram model is scored as well, after the checkpoints."""
    output: str
    """Existing directory for the results: `<name of the checkpoint>.json` and `unigram.json`, each
    written when it is complete."""


class ConvertJob(Job):
    """Export of one checkpoint to a transformers directory, with its gate."""

    checkpoint: str
    """Checkpoint directory (iter_*)."""
    output_directory: str
    """Empty directory to fill."""
    card: dict[str, str]
    """Facts for the model card: data, perplexities, lineage."""

    def _shown(self) -> dict[str, Any]:
        """Return the fields without credentials in the card, which is published."""
        return super()._shown() | {"card": redact_values(self.card)}
