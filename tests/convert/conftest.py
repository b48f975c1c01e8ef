"""An export that is built once; tests that damage it work on a copy."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megacore.convert.export import export
from megacore.convert.hf.forms import hf_form_of
from megacore.convert.key_map import KeyMap
from megacore.convert.report import ParityReport
from megacore.jobs.run import ConvertJob
from megacore.models.gpt import GPTModel
from tests.convert._tiny import tiny_config, tiny_job

POSITIONS = 64


@dataclass(frozen=True)
class Exported:
    """A finished export and its inputs."""

    job: ConvertJob
    model: GPTModel
    table: KeyMap
    report: ParityReport

    @property
    def directory(self) -> Path:
        """Path of the transformers directory."""
        return Path(self.job.output_directory) / "model"

    def copy(self, target: Path) -> "Exported":
        """Return the same export with its output directory copied to `target`."""
        shutil.copytree(self.job.output_directory, target / "export")
        paths = {"output_directory": str(target / "export"), "exit_directory": str(target / "exit")}
        return replace(self, job=self.job.model_copy(update=paths))


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Return an export that passed the gate; tests only read it."""
    config = tiny_config(max_position_embeddings=POSITIONS)
    job, model = tiny_job(tmp_path_factory.mktemp("tiny"), config)
    table = hf_form_of(job.spec)[1].key_map(job.spec)
    return Exported(job, model, table, export(job))


@pytest.fixture
def exported(original: Exported, tmp_path: Path) -> Exported:
    """Return a copy of the export that a test may damage."""
    return original.copy(tmp_path)
