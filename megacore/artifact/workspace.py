"""The one directory below which everything is written, and the names in a run's directory.

Imports no torch.
"""

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from megacore.artifact.files import workspace_errors
from megacore.errors import WorkspaceError

FOLDERS = {
    "collect": "corpora",
    "punkt": "corpora",
    "tokenizer": "tokenizers",
    "tokenize-shard": "tokenized",
    "tokenize": "tokenized",
    "blend": "tokenized",
    "index": "index",
    "train": "runs",
    "evaluate": "evaluations",
    "zeroshot": "zeroshot",
    "convert": "exports",
    "publish": "published",
    "operator": "extensions",
    "pretrained": "pretrained",
    "dataset": "datasets",
    "examples": "examples",
    "finetune": "finetuned",
    "finetune-export": "exports",
    "finetune-publish": "published",
    "find-batch-size": "batch-sizes",
}
"""Where each stage's artifacts lie."""

DOWNLOADS = ".downloads"
"""Folder among the corpora with the files of web servers, whole and begun."""
CHECKPOINTS_NAME = "checkpoints"
"""Below the run directory."""
STOP_FILE = "stop"
"""In the run directory: whoever writes it asks the training to save and end."""
WEIGHTS_PREFIX = "model."
"""Of the names of a checkpoint's weights."""
CONFIG_KEY = "config"
"""Of a checkpoint's state: the configuration that it was written with, as JSON."""


@dataclass(frozen=True)
class Workspace:
    """Paths below the workspace's root."""

    root: Path

    @classmethod
    def of(cls, root: str | Path | None = None) -> "Workspace":
        """The given root, else MEGACORE_WORKSPACE, else ./workspace; made if absent, and writable.

        Raises WorkspaceError.
        """
        root = Path(root or os.environ.get("MEGACORE_WORKSPACE") or "workspace").absolute()
        probe = root / f".write-test-{os.getpid()}-{threading.get_ident()}"
        try:
            with workspace_errors(root):
                root.mkdir(parents=True, exist_ok=True)
                probe.write_bytes(b"x")
                probe.unlink()
        except FileExistsError as error:
            raise WorkspaceError(
                f"workspace {root} is a file: set MEGACORE_WORKSPACE to a directory"
            ) from error
        except OSError as error:
            raise WorkspaceError(
                f"workspace {root} cannot be used: {error.strerror}: set MEGACORE_WORKSPACE to "
                "another directory"
            ) from error
        return cls(root)

    def folder(self, stage: str) -> Path:
        """Where the artifacts of `stage` lie."""
        return self.root / FOLDERS[stage]

    @property
    def compiled(self) -> Path:
        """What torch.compile has made, for the next run."""
        return self.root / "compiled"

    @property
    def tracking_uri(self) -> str:
        """MLflow's SQLite store."""
        return f"sqlite:///{self.root / 'mlflow.db'}"

    @property
    def mlflow_artifacts(self) -> Path:
        """Where MLflow keeps files."""
        return self.root / "mlartifacts"

    @property
    def prefect_home(self) -> Path:
        """Prefect's database, results and settings."""
        return self.root / "prefect"
