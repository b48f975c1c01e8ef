"""The workspace: the directory with all artifacts, and names within a run's directory.

This module does not import torch.
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
    "evaluate-checkpoint": "scores",
    "evaluate": "evaluations",
    "zeroshot": "zeroshot",
    "convert": "exports",
    "publish": "published",
    "push": "pushed",
    "operator": "extensions",
    "pretrained": "pretrained",
    "dataset": "datasets",
    "examples": "examples",
    "finetune": "finetuned",
    "finetune-export": "exports",
    "finetune-publish": "published",
    "find-batch-size": "batch-sizes",
}
"""Folder of each stage's artifacts, below the workspace's root."""

DOWNLOADS = ".downloads"
"""Subfolder with downloaded files, complete and partial."""
CHECKPOINTS_NAME = "checkpoints"
"""Folder of the checkpoints in a run's directory."""
STOP_FILE = "stop"
"""File in a run's directory that asks the training to save and end."""
WEIGHTS_PREFIX = "model."
"""Prefix of the names of the weights in a checkpoint."""
CONFIG_KEY = "config"
"""Key in a checkpoint's state of the configuration it was written with, in JSON."""


@dataclass(frozen=True)
class Workspace:
    """Paths below the workspace's root."""

    root: Path

    @classmethod
    def of(cls, root: str | Path | None = None) -> "Workspace":
        """Create the workspace if it is missing, and check that it is writable.

        The root is `root`, else MEGACORE_WORKSPACE, else ./workspace.

        Raises:
            WorkspaceError: the directory cannot be created or written.
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
        """Return the folder with the artifacts of `stage`."""
        return self.root / FOLDERS[stage]

    @property
    def compiled(self) -> Path:
        """Cache of torch.compile, kept for the next run."""
        return self.root / "compiled"

    @property
    def tracking_uri(self) -> str:
        """URI of MLflow's SQLite store."""
        return f"sqlite:///{self.root / 'mlflow.db'}"

    @property
    def mlflow_artifacts(self) -> Path:
        """Directory of MLflow's files."""
        return self.root / "mlartifacts"

    @property
    def prefect_home(self) -> Path:
        """Directory of Prefect's database, results and settings."""
        return self.root / "prefect"
