"""Atomically written stage outputs: keys, manifests and the workspace."""

from megacore.artifact.build import Artifact, StageKey, build_artifact, lock, open_artifact
from megacore.artifact.manifest import Manifest, file_digest
from megacore.artifact.workspace import Workspace

__all__ = [
    "Artifact",
    "Manifest",
    "StageKey",
    "Workspace",
    "build_artifact",
    "file_digest",
    "lock",
    "open_artifact",
]
