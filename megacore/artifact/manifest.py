"""`manifest.json`: the stage, inputs and file digests of an artifact.

It is written last, so its presence means that the artifact is complete.
"""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megacore.artifact.files import canonical_json, read_json, regular, unreadable, write_json
from megacore.errors import ArtifactError
from megacore.redact import redact_values

MANIFEST_NAME = "manifest.json"
_CHUNK = 1 << 22
Verification = Literal["quick", "once", "full"]
"""Check of artifacts in a configuration; `once` is `quick` with the comparison of all digests when
a training first reads an artifact (`megacore.artifact.first_read`)."""


def depth_of(verification: Verification) -> Literal["quick", "full"]:
    """Return how an artifact is checked before a stage uses it."""
    return "full" if verification == "full" else "quick"


@dataclass(frozen=True)
class FileEntry:
    """One file of an artifact."""

    size: int
    """Size in bytes."""
    sha256: str
    """Hex digest of the content."""
    mtime_ns: int
    """Modification time when the digest was computed; a quick check hashes files changed since."""

    def problem(
        self,
        directory: Path,
        name: str,
        mode: Literal["quick", "full"],
        on_read: Callable[[int], None] | None = None,
    ) -> str | None:
        """Compare the file `directory/name` and return the problem as a clause, or None.

        See `Manifest.problem` for the mode and `file_digest` for `on_read`. Raises FileAccessError
        if the file cannot be read now, for this is no reason to delete it.
        """
        path = directory / name
        try:
            status = path.stat()
            if status.st_size != self.size:
                return f"{name} has {status.st_size} bytes instead of {self.size}"
            if mode == "quick" and status.st_mtime_ns == self.mtime_ns:
                return None
            digest = file_digest(path, on_read)
        except (FileNotFoundError, NotADirectoryError):
            return f"{name} is missing"
        except OSError as error:
            if (fault := unreadable(error, path)) is not None:
                raise fault from error
            return f"{name} cannot be read: {error.strerror}"
        if digest == self.sha256:
            return None
        return (
            f"{name} has other content than when it was written (its sha256 is {digest} instead of "
            f"{self.sha256})"
        )


@dataclass(frozen=True)
class Manifest:
    """Description of an artifact: its stage, key, inputs, files and counts."""

    stage: str
    version: int
    key: str
    parameters: dict[str, Any]
    inputs: dict[str, str]
    """Digest of each input's manifest, by role."""
    files: dict[str, FileEntry]
    """Files by path relative to the artifact's directory."""
    counts: dict[str, Any]
    """Numbers of documents, tokens, samples and so on."""
    duration: float
    """Duration of the build in seconds."""

    @property
    def digest(self) -> str:
        """Hash that identifies the content.

        It stays the same if an artifact is deleted and rebuilt with the same content.
        """
        files = {name: [entry.size, entry.sha256] for name, entry in self.files.items()}
        content = [self.stage, self.version, self.key, self.inputs, files]
        return hashlib.sha256(canonical_json(content)).hexdigest()

    def write(self, directory: Path) -> None:
        """Write `manifest.json` into `directory` atomically, without credentials in parameters."""
        write_json(
            directory / MANIFEST_NAME,
            {**asdict(self), "parameters": redact_values(self.parameters)},
        )

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read a directory's manifest.

        Raises ArtifactError if it is missing or damaged, FileAccessError if it cannot be read now.
        """
        path = directory / MANIFEST_NAME
        try:
            values = read_json(path)
            values["files"] = {name: FileEntry(**entry) for name, entry in values["files"].items()}
            return cls(**values)
        except FileNotFoundError as error:
            raise ArtifactError(
                f"{directory} has no {MANIFEST_NAME}: it is not a complete artifact"
            ) from error
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, OSError) and (fault := unreadable(error, path)) is not None:
                raise fault from error
            raise ArtifactError(
                f"{path} is damaged ({error}): delete {directory} to build it again"
            ) from error

    def problem(self, directory: Path, mode: Literal["quick", "full"]) -> str | None:
        """Check the files and return the first problem as a clause, or None.

        Mode "quick" compares sizes, and digests only where the modification time changed. Mode
        "full" compares every digest. Raises FileAccessError if a file cannot be read now.
        """
        problems = (entry.problem(directory, name, mode) for name, entry in self.files.items())
        return next(filter(None, problems), None)


def file_digest(path: Path, on_read: Callable[[int], None] | None = None) -> str:
    """Return the hex SHA-256 digest of a file's content.

    `on_read` receives the number of bytes of each block; an error that it raises ends the reading.
    """
    digest = hashlib.sha256()
    with open(regular(path), "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            if on_read is not None:
                on_read(len(chunk))
    return digest.hexdigest()


def list_files(directory: Path, pattern: str = "**/*") -> dict[str, FileEntry]:
    """Return the files below `directory` that match the glob `pattern`, without the manifest."""
    entries: dict[str, FileEntry] = {}
    for path in sorted(directory.glob(pattern)):
        if path == directory / MANIFEST_NAME or not path.is_file():
            continue
        status = path.stat()
        entries[path.relative_to(directory).as_posix()] = FileEntry(
            status.st_size, file_digest(path), status.st_mtime_ns
        )
    return entries


def verified_record(directory: Path) -> Path:
    """Return the path of the record that all digests of the artifact in `directory` were right.

    It is next to the directory, because other programs read and copy what is inside.
    """
    return directory.with_name(f".{directory.name}.verified.json")
