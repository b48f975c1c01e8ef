"""A directory that is whole or not there: filled under another name, measured, marked last, renamed. For all ranks."""

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from megacore.artifact.files import sync_directory, sync_tree, workspace_errors
from megacore.checkpoint.collective import RankGroup
from megacore.checkpoint.format import STALE_SUFFIX, FileRecord, Marker, directory_name, finite_or_none
from megacore.checkpoint.retain import rename_away
from megacore.checkpoint.save import sync_file
from megacore.errors import WorkspaceError

_TORN = ("pytorchstreamwriter failed", "unexpected pos", "os error", "i/o error")
"""What torch and safetensors say instead of an OSError when a disk takes no more."""


class WholeDirectory:
    """Writes `iter_*` directories below one root; every rank calls the same methods in the same order."""

    def __init__(self, root: Path, ranks: RankGroup) -> None:
        """Nothing is written yet."""
        self.root, self._ranks = root, ranks

    def stage(self, iteration: int) -> Path:
        """An empty directory to fill, the same on every rank. Collective. Raises WorkspaceError."""

        def make() -> Path:
            path = self.root / f"{directory_name(iteration)}{STALE_SUFFIX}{secrets.token_hex(4)}"
            with workspace_errors(path):
                path.mkdir(parents=True)
            return path

        return self._ranks.on_first(make)

    def finish(self, staged: Path, iteration: int, validation_loss: float | None) -> Marker:
        """Make what all ranks have written into `staged` the one directory of its iteration. Collective.

        Each rank hashes and syncs a share of the files. Until the last rename nothing has the final name; what had it
        before, and was not believed, is moved away first.
        """
        final = self.root / directory_name(iteration)
        names = self._ranks.on_first(lambda: _names(staged))
        own = names[self._ranks.rank :: self._ranks.size]
        records = {
            name: record for part in self._ranks.everywhere(lambda: _measure(staged, own)) for name, record in part
        }

        def complete() -> Marker:
            marker = Marker(iteration, finite_or_none(validation_loss), {name: records[name] for name in names})
            with workspace_errors(staged):
                sync_tree(staged)
                marker.write(staged)
                if final.exists():
                    shutil.rmtree(rename_away(final))
                staged.rename(final)
                sync_directory(self.root)
            return marker

        return self._ranks.on_first(complete)


def _names(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def _measure(directory: Path, names: list[str]) -> list[tuple[str, FileRecord]]:
    with workspace_errors(directory):
        for name in names:
            sync_file(directory / name)
        return [(name, FileRecord.of(directory / name)) for name in names]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn every way in which a library says that the disk takes no more into WorkspaceError."""
    try:
        with workspace_errors(path):
            yield
    except WorkspaceError:
        raise
    except Exception as error:
        if not any(phrase in str(error).lower() for phrase in _TORN):
            raise
        raise WorkspaceError(
            f"cannot write {path}: {str(error).splitlines()[0]}: free some space, or write elsewhere "
            "(MEGACORE_WORKSPACE names another workspace)"
        ) from error


def barrier() -> None:
    """Wait for the other ranks, if there are any."""
    if dist.is_initialized():
        dist.barrier()


def silent(phase: str) -> None:
    """Called with each phase where nobody watches."""


Beat = Callable[[str], None]
