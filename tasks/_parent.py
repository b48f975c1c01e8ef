"""Look-ups of the model from which a fine-tuning starts: its files and its lineage."""

import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

from megacore.artifact import Manifest, Workspace, lock
from megacore.artifact.files import read_object, sync_tree, workspace_errors, write_json
from megacore.artifact.manifest import MANIFEST_NAME
from megacore.artifact.workspace import DOWNLOADS, MODEL_DIRECTORY
from megacore.config.finetune import FinetuneConfig
from megacore.errors import ArtifactError, ConfigError
from megacore.finetune.pretrained import CONFIG_NAME, LINEAGE_NAME, local_directory
from megacore.paths import is_dir, is_file
from megacore.redact import redact
from tasks._aliases import ABSENT
from tasks._mlflow import Tracking
from tasks._registry import CONTENT_TAG, DIGEST_TAG, MODEL_TAG, model_digest

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

SCHEME = "models:/"
_NAMED = 8
"""Maximum number of registered models that an error message lists."""
_FORM = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>[0-9]+))")


@dataclass(frozen=True)
class Parent:
    """Lineage of a fine-tuned model's initial model; unknown fields are None."""

    model: str
    """`models:/NAME/VERSION`, a directory, or a name on the hub with its revision."""
    name: str | None = None
    """Name in the registry."""
    version: str | None = None
    run_id: str | None = None
    """MLflow run that trained the model."""
    model_id: str | None = None
    """Id of its LoggedModel."""
    digest: str | None = None
    """Digest of the export, from the manifest of its artifact."""
    random_weights: bool = False
    """True if only the architecture and the tokenizer are used."""

    def tags(self) -> dict[str, str]:
        """Return the tags of MLflow's run, LoggedModel and registered version."""
        values = {
            "parent_model": redact(self.model),
            "parent_name": self.name,
            "parent_version": self.version,
            "parent_run_id": self.run_id,
            "parent_model_id": self.model_id,
            "parent_digest": self.digest,
            "parent_weights": "not taken: drawn at random" if self.random_weights else None,
        }
        return {name: value for name, value in values.items() if value is not None}


def pinned(config: FinetuneConfig) -> FinetuneConfig:
    """Return the configuration with an alias replaced by its current version.

    The alias may be moved while this configuration runs.

    Raises ConfigError for a model that the registry does not have, and TrackingError.
    """
    if not config.model.path.startswith(SCHEME):
        return config
    version = _registered(config)
    model = config.model.model_copy(update={"path": f"{SCHEME}{version.name}/{version.version}"})
    return config.model_copy(update={"model": model})


def parent_directory(config: FinetuneConfig) -> Path | None:
    """Return the transformers directory of the initial model, or None for a model of the hub.

    A registered model whose files are on a server is downloaded once into the workspace.

    Raises ConfigError for a model that is missing or is not a transformers model, and
    TrackingError.
    """
    if not config.model.path.startswith(SCHEME):
        return local_directory(config.model.path)
    version = _registered(config)
    location = _location(Tracking.of(config), version)
    parsed = urlparse(location)
    root = (
        Path(unquote(parsed.path))
        if parsed.scheme in ("", "file")
        else _downloaded(config, version, location)
    )
    for candidate in (root / MODEL_DIRECTORY, root):
        if is_file(candidate / CONFIG_NAME):
            return candidate
    raise ConfigError(
        f"model.path is {config.model.path}, whose files at {redact(location)} have no "
        f"{MODEL_DIRECTORY}/{CONFIG_NAME}:"
        " it is not a transformers model that a flow published, or its files were deleted"
    )


def parent_of(config: FinetuneConfig) -> Parent:
    """Return the lineage of the initial model, from the registry and an export's manifest.

    Raises ConfigError, TrackingError.
    """
    return replace(_known_parent(config), random_weights=config.model.random_weights)


def _known_parent(config: FinetuneConfig) -> Parent:
    path = config.model.path
    if path.startswith(SCHEME):
        return _of_version(path, _registered(config))
    directory = local_directory(path)
    if directory is None:
        return Parent(path if config.model.revision is None else f"{path}@{config.model.revision}")
    digest = _export_digest(directory)
    if digest is None:
        return Parent(path)
    version = _version_of_export(Tracking.of(config), directory.parent, digest)
    return Parent(path, digest=digest) if version is None else _of_version(path, version)


def note_parent(artifact: Path, parent: Parent) -> None:
    """Add the registry's information to the lineage file of a collected model."""
    path = artifact / LINEAGE_NAME
    write_json(path, read_object(path) | {"registry": parent.tags()})


def noted_parent(artifact: Path) -> dict[str, str]:
    """Return the tags that `note_parent` added to a collected model."""
    tags: dict[str, str] = read_object(artifact / LINEAGE_NAME)["registry"]
    return tags


def _of_version(model: str, version: "ModelVersion") -> Parent:
    return Parent(
        model=model,
        name=version.name,
        version=str(version.version),
        run_id=version.run_id or None,
        model_id=version.tags.get(MODEL_TAG) or version.model_id,
        digest=version.tags.get(DIGEST_TAG),
    )


def _registered(config: FinetuneConfig) -> "ModelVersion":
    path, tracking = config.model.path, Tracking.of(config)
    match = _FORM.fullmatch(path)
    if match is None:
        raise ConfigError(
            f"model.path is {path}: give models:/NAME@candidate, or models:/NAME/3 for a version"
        )
    if not tracking.exists:
        raise ConfigError(
            f"model.path is {path}, and there is no MLflow store at {redact(tracking.uri)}: "
            "pretrain the model first, or set MLFLOW_TRACKING_URI"
        )
    from mlflow.exceptions import MlflowException

    client, name = tracking.client, match["name"]
    with tracking.errors(f"look up {path}"):
        try:
            if match["alias"]:
                return client.get_model_version_by_alias(name, match["alias"])
            return client.get_model_version(name, match["version"])
        except MlflowException as error:
            if error.error_code not in ABSENT:
                raise
        names = [model.name for model in client.search_registered_models(max_results=_NAMED)]
    raise ConfigError(
        f"model.path is {path}, which the model registry at {redact(tracking.uri)} does not have "
        f"(it has {', '.join(names) or 'none'}): pretrain and publish it first, or correct "
        "model.path"
    )


def _location(tracking: Tracking, version: "ModelVersion") -> str:
    """Return the location of a version's files."""
    source = str(version.source)
    if not source.startswith(SCHEME):
        return source
    with tracking.errors(f"look up {source}"):
        return str(tracking.client.get_logged_model(source.removeprefix(SCHEME)).artifact_location)


def _downloaded(config: FinetuneConfig, version: "ModelVersion", location: str) -> Path:
    """Return the workspace directory with a server's files, downloading them if absent.

    A version never changes, so a complete download is not repeated.
    """
    tracking = Tracking.of(config)
    folder = Workspace.of().folder("pretrained") / DOWNLOADS
    target = folder / f"{version.name}-{version.version}-{version.creation_timestamp}"
    with workspace_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with lock(target):
            if not is_dir(target):
                temporary = target.with_name(f"{target.name}.tmp")
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
                from mlflow.artifacts import download_artifacts

                with tracking.errors(f"give the files of {config.model.path}"):
                    download_artifacts(
                        artifact_uri=location, dst_path=str(temporary), tracking_uri=tracking.uri
                    )
                sync_tree(temporary)
                temporary.rename(target)
    inner = [path for path in target.iterdir() if is_dir(path) and is_dir(path / MODEL_DIRECTORY)]
    return inner[0] if len(inner) == 1 else target


def _export_digest(directory: Path) -> str | None:
    """Return the digest of the export whose `model/` is `directory`; None for other directories."""
    if directory.name != MODEL_DIRECTORY or not is_file(directory.parent / MANIFEST_NAME):
        return None
    try:
        return Manifest.read(directory.parent).digest
    except ArtifactError:
        return None  # the stage that collects the files reports the reason


def _version_of_export(tracking: Tracking, export: Path, digest: str) -> "ModelVersion | None":
    """Return the version that was published from an export, or from another with the same model."""
    if not tracking.exists:
        return None
    with tracking.errors("look up the model of an export"):
        for tag, value in ((DIGEST_TAG, digest), (CONTENT_TAG, model_digest(export))):
            versions = tracking.client.search_model_versions(
                f"tag.`{tag}` = '{value}'", max_results=1
            )
            if versions:
                return versions[0]
    return None
