"""Building an artifact once, atomically, whoever asks."""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from megacore.artifact.files import canonical_json, sync_directory, sync_tree, workspace_errors
from megacore.artifact.manifest import Manifest, list_files
from megacore.errors import ArtifactError

KEY_LENGTH = 16
"""Hex digits of a key: 64 bits."""


class Artifact(BaseModel):
    """A complete stage output on disk: small enough to be a task's return value."""

    model_config = ConfigDict(frozen=True)

    stage: str
    key: str
    path: str
    digest: str
    """Identity of the content."""
    counts: dict[str, Any]

    @property
    def directory(self) -> Path:
        """Where its files are."""
        return Path(self.path)


@dataclass(frozen=True)
class StageKey:
    """What decides a stage's output: the artifact's key is the hash of these four."""

    stage: str
    version: int
    """Raised by whoever changes what the stage produces."""
    parameters: dict[str, Any]
    inputs: dict[str, str]
    """Digest of each input artifact, by role."""

    @classmethod
    def of(
        cls, stage: str, version: int, parameters: dict[str, Any], **inputs: Artifact
    ) -> "StageKey":
        """The key of a stage that reads the given artifacts."""
        return cls(
            stage, version, parameters, {role: artifact.digest for role, artifact in inputs.items()}
        )

    @property
    def key(self) -> str:
        """Hex digits that name the artifact's directory."""
        content = [self.stage, self.version, self.parameters, self.inputs]
        return hashlib.sha256(canonical_json(content)).hexdigest()[:KEY_LENGTH]


def open_artifact(directory: Path, mode: Literal["quick", "full"] = "quick") -> Artifact:
    """The artifact in `directory`, after its files were checked. Raises ArtifactError."""
    manifest = Manifest.read(directory)
    problem = manifest.problem(directory, mode)
    if problem:
        raise ArtifactError(f"{directory}: {problem}")
    return Artifact(
        stage=manifest.stage,
        key=manifest.key,
        path=str(directory),
        digest=manifest.digest,
        counts=manifest.counts,
    )


def build_artifact(
    folder: Path,
    key: StageKey,
    build: Callable[[Path], Mapping[str, Any]],
    *,
    verify: Literal["quick", "full"] = "quick",
) -> tuple[Artifact, bool]:
    """Return the artifact `folder/<key>` and whether `build` ran for it.

    `build` fills an empty directory and returns counts. It runs in `<key>.tmp-<pid>`, which is
    synced, given its manifest and renamed: a crash at any instruction leaves the whole artifact or
    none. Of two callers one builds and the other waits for it. A damaged artifact is replaced.
    """
    target = folder / key.key
    with workspace_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with lock(target):
            if target.exists():
                try:
                    return open_artifact(target, verify), False
                except ArtifactError:
                    remove_tree(target)
            for stale in folder.glob(f"{key.key}.tmp-*"):
                shutil.rmtree(stale)
            temporary = folder / f"{key.key}.tmp-{os.getpid()}"
            temporary.mkdir()
            try:
                started = time.monotonic()
                counts = dict(build(temporary))
                seal(temporary, key, counts, time.monotonic() - started)
                os.rename(temporary, target)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            sync_directory(folder)
    return open_artifact(target), True


def seal(
    directory: Path,
    key: StageKey,
    counts: dict[str, Any],
    duration: float,
    pattern: str = "**/*",
) -> Manifest:
    """Sync every file of `directory`, then write its manifest: from now on it counts as complete.

    The manifest lists the files that match `pattern`.
    """
    sync_tree(directory)
    files = list_files(directory, pattern)
    manifest = Manifest(
        key.stage,
        key.version,
        key.key,
        key.parameters,
        key.inputs,
        files,
        counts,
        round(duration, 3),
    )
    manifest.write(directory)
    return manifest


def remove_tree(directory: Path) -> None:
    """Delete a directory so that no reader sees half of it: renamed away first."""
    doomed = directory.with_name(f"{directory.name}.tmp-{os.getpid()}-deleted")
    os.rename(directory, doomed)
    shutil.rmtree(doomed)


@contextmanager
def lock(target: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock of `target`, a file `.<name>.lock` beside it.

    The kernel frees it when the holder dies.

    Any number may hold it `shared`, to read what nobody may change meanwhile.
    """
    path = target.with_name(f".{target.name}.lock")
    with open(path, "w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
