"""The workspace: the directory with all artifacts, and the names of files in its artifacts.

This module does not import torch.
"""

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megacore.artifact.files import workspace_errors
from megacore.errors import WorkspaceError
from megacore.paths import exists, is_dir, is_symlink

FOLDERS = {
    "collect": "corpora",
    "curate": "curated",
    "search": "searches",
    "decontaminate": "decontaminated",
    "punkt": "corpora",
    "tokenizer": "tokenizers",
    "tokenize-shard": "tokenized",
    "tokenize": "tokenized",
    "blend": "tokenized",
    "index": "index",
    "contamination": "contamination",
    "train": "runs",
    "evaluate-checkpoint": "scores",
    "evaluate": "evaluations",
    "zeroshot": "zeroshot",
    "convert": "exports",
    "lm-eval": "lm-eval",
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

_COMPILED, _MLFLOW, _PREFECT = _OTHER_FOLDERS = ("compiled", "mlartifacts", "prefect")
DOWNLOADS = ".downloads"
"""Subfolder with downloaded files, complete and partial."""
RUN_FILE = "run.json"
"""File in a run's directory with the job of its ranks."""
EVENTS_FILE = "events.jsonl"
"""File in a run's directory with its events."""
RESULT_FILE = "result.json"
"""File in a fine-tuning's directory that its ranks write last: the metrics and the best model."""
CHECKPOINTS_NAME = "checkpoints"
"""Folder of the checkpoints in a run's directory."""
BEST_NAME = "best"
"""Folder of the best models in a fine-tuning's directory."""
MODEL_DIRECTORY = "model"
"""Folder with the transformers directory in an export, in a best model, and in an artifact of the
stage `pretrained`."""
STOP_FILE = "stop"
"""File in a run's directory that asks the training to save and end."""
PARITY_FILE = "parity.json"
"""File in an export's directory with the report of its gate."""
SAMPLE_FILE = "sample.txt"
"""File in an export's directory with a text that the model wrote."""
WEIGHTS_PREFIX = "model."
"""Prefix of the names of the weights in a checkpoint."""
CONFIG_KEY = "config"
"""Key in a checkpoint's state of the configuration it was written with, in JSON."""


def require_working_directory() -> None:
    """Raise WorkspaceError if the working directory was deleted, to which paths are relative."""
    try:
        os.getcwd()
    except OSError as error:
        raise WorkspaceError(
            f"the working directory cannot be found ({error.strerror}), it may have been deleted: "
            "change to another one with cd, then run the same command again"
        ) from error


def workspace_root() -> Path:
    """Return the absolute path of MEGACORE_WORKSPACE, else of ./workspace; it need not exist."""
    return Path(os.environ.get("MEGACORE_WORKSPACE") or "workspace").absolute()


@dataclass(frozen=True)
class Workspace:
    """Paths below the workspace's root."""

    root: Path

    @classmethod
    def of(cls, root: str | Path | None = None) -> "Workspace":
        """Create the workspace if it is missing, and check that it is writable.

        The root is `root`, else MEGACORE_WORKSPACE, else ./workspace. A folder that is missing is
        made by the first stage that writes to it; one that can never be made is refused here,
        before hours of training.

        Raises:
            WorkspaceError: the directory cannot be created or written, or the name of one of its
                folders is taken by a file or a broken link.
        """
        root = Path(root).absolute() if root else workspace_root()
        probe = root / f".write-test-{os.getpid()}-{threading.get_ident()}"
        try:
            with workspace_errors(root):
                if os.path.lexists(root) and not is_dir(root):
                    raise WorkspaceError(
                        f"workspace {root} is {kind_of(root)}: set MEGACORE_WORKSPACE to a "
                        "directory"
                    )
                root.mkdir(parents=True, exist_ok=True)
                try:
                    probe.write_bytes(b"x")
                except OSError:  # a full disk may have taken the file without its content
                    with suppress(OSError):
                        probe.unlink()
                    raise
                probe.unlink()
        except OSError as error:
            raise WorkspaceError(
                f"workspace {root} cannot be used: {error.strerror}: set MEGACORE_WORKSPACE to "
                "another directory"
            ) from error
        for name in (*dict.fromkeys(FOLDERS.values()), *_OTHER_FOLDERS):
            folder = root / name
            if os.path.lexists(folder) and not is_dir(folder):
                raise WorkspaceError(
                    f"{folder} is {kind_of(folder)}, and the workspace needs a directory there: "
                    "move it away, or set MEGACORE_WORKSPACE to another directory"
                )
        return cls(root)

    def folder(self, stage: str) -> Path:
        """Return the folder with the artifacts of `stage`."""
        return self.root / FOLDERS[stage]

    @property
    def compiled(self) -> Path:
        """Cache of torch.compile, kept for the next run."""
        return self.root / _COMPILED

    @property
    def mlflow_artifacts(self) -> Path:
        """Directory of MLflow's files."""
        return self.root / _MLFLOW

    @property
    def prefect_home(self) -> Path:
        """Directory of Prefect's database, results and settings."""
        return self.root / _PREFECT


def kind_of(path: Path) -> str:
    """Return what is at a path that is no directory, as a message names it."""
    return "a link to a missing directory" if is_symlink(path) and not exists(path) else "a file"
