"""An output directory that appears whole, or not at all."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megacore.artifact.files import remove_dead_temporaries, sync_directory, sync_tree, workspace_errors
from megacore.errors import ConfigError, WorkspaceError


def check_output(output: Path) -> None:
    """Refuse an output that is a file or holds something. Raises ConfigError."""
    for place in (output.absolute(), *output.absolute().parents):
        if place.exists() and not place.is_dir():
            raise ConfigError(f"{place} is a file: give another --output")
    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty: give another --output, or remove it")


@contextmanager
def staged(output: Path) -> Iterator[Path]:
    """A directory that takes the name `output` when the block ends well, and is removed when it does not.

    Raises ConfigError when `output` holds something, WorkspaceError when the disk refuses.
    """
    check_output(output)
    target = output.absolute()
    staging = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    made = [path for path in target.parents if not path.exists()]
    with workspace_errors(target):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_dead_temporaries(target)
            staging.mkdir()
        except OSError as error:
            _remove_empty(made)
            raise WorkspaceError(f"--output {output} cannot be made ({error.strerror}): write elsewhere") from error
        try:
            yield staging
            sync_tree(staging)
            os.rename(staging, target)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            _remove_empty(made)
            raise
        sync_directory(target.parent)


def _remove_empty(directories: Sequence[Path]) -> None:
    """Remove those that hold nothing, the innermost first."""
    for path in directories:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
