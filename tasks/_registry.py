"""Publication of the exported model as a LoggedModel and a version in the model registry.

`mlflow.transformers.save_model` would load the model, ask the hub for a card and import libraries
that transformers merely supports. Instead, this module writes the few files that make a directory
an MLflow model. `mlflow.transformers.load_model` and `mlflow.pyfunc.load_model` load it like any
other model.
"""

import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlparse

import yaml

from megacore.artifact.files import canonical_json, read_object
from megacore.artifact.manifest import MANIFEST_NAME, Manifest, list_files
from megacore.artifact.workspace import MODEL_DIRECTORY, PARITY_FILE, SAMPLE_FILE
from megacore.errors import ConversionError
from megacore.paths import is_file, rglob
from tasks._aliases import Measurement, move_aliases
from tasks._checkpoint_models import Datasets, link_model, log_model_metrics, logged_point
from tasks._mlflow import Tracking

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.models.signature import ModelSignature

MODEL_TYPE = "transformers"
DIGEST_TAG = "export_digest"
"""Tag with the digest of the export that a version was first published from."""
CONTENT_TAG = "model_digest"
"""Tag with the digest of a version's files, which with its run identifies the version."""
MODEL_TAG = "logged_model_id"
REPORT_FILES = (PARITY_FILE, SAMPLE_FILE)
"""Files of an export, in addition to `model/`, that become artifacts of the run."""
REPORT_FOLDER = "report"
"""Folder of a run's report among its artifacts."""

_CARD = "README.md"
_DESCRIPTION = "MLmodel"
"""Name of the file that describes an MLflow model; it is uploaded last."""
_CONFIGS = ("config.json", "generation_config.json")
_NO_TOKENIZER = (".safetensors", ".safetensors.index.json", ".md")
"""Endings of files in `model/` that are not the tokenizer's; the names of a tokenizer's files
differ between its classes."""
_REQUIREMENTS = ("mlflow", "torch", "transformers")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
_NEW_TOKENS = 256
"""Most tokens that a pipeline generates, the default of transformers. It can exceed a small
position table."""


def publish_model(
    tracking: Tracking,
    run_id: str,
    export_directory: Path,
    name: str,
    *,
    digest: str,
    iteration: int,
    metrics: Mapping[str, float],
    tags: Mapping[str, str],
    datasets: Datasets | None = None,
    measurement: Measurement | None = None,
    force_alias: bool = False,
    pictures: Sequence[Path] = (),
    report: Path | None = None,
    pairs: bool = False,
) -> dict[str, str]:
    """Register an export as a version of model `name`, and move the aliases that it deserves.

    Publishing the same model again returns the same version, also if other files of the export
    changed: reports, the model card and the description of the model's inputs are then replaced.
    Without a `measurement` on test data, the aliases cannot choose between versions. `pairs` is
    true for a classifier of pairs of texts.

    Returns the receipt: model_name, version, uri, model_id, run_id, digest and model_digest. Raises
    TrackingError, and ConversionError if the export lacks a file.
    """
    _check_export(export_directory)
    with tracking.errors(f"publish {export_directory} as model {name!r}"):
        for file in REPORT_FILES:
            tracking.client.log_artifact(run_id, str(export_directory / file), "export")
        for picture in pictures:
            tracking.client.log_artifact(run_id, str(picture), "plots")
        if report is not None:
            tracking.client.log_artifact(run_id, str(report), REPORT_FOLDER)
        content = model_digest(export_directory)
        lineage = {**tags, DIGEST_TAG: digest, CONTENT_TAG: content}
        model = _ensure_model(
            tracking, run_id, export_directory / MODEL_DIRECTORY, name, iteration, lineage, pairs
        )
        _log_metrics(tracking, run_id, model, metrics, datasets, iteration)
        version = _ensure_version(tracking, run_id, model, name, lineage)
        _show_version(tracking, model.model_id, version)
        move_aliases(tracking, version, measurement, force=force_alias)
    return {
        "model_name": name,
        "version": str(version.version),
        "uri": f"models:/{name}/{version.version}",
        "model_id": model.model_id,
        "run_id": run_id,
        "digest": digest,
        "model_digest": content,
    }


def _log_metrics(
    tracking: Tracking,
    run_id: str,
    model: "LoggedModel",
    metrics: Mapping[str, float],
    datasets: Datasets | None,
    iteration: int,
) -> None:
    """Log the metrics of an exported model, each at the run's point of the same value if it has it.

    The checkpoint has been measured before its export: MLflow drops the same point of the run, and
    its curve has each iteration once.
    """
    now = round(1000 * time.time())
    for name, value in metrics.items():
        point = logged_point(tracking, run_id, name, value, iteration)
        log_model_metrics(
            tracking,
            run_id,
            model,
            {name: point.value if point else value},
            datasets=datasets,
            step=iteration,
            timestamp_ms=point.timestamp if point else now,
        )


def published_exists(tracking: Tracking, receipt: Mapping[str, str]) -> bool:
    """Return True if the registry still has the published version of a receipt, with its files.

    Raises TrackingError when the store does not answer.
    """
    if not tracking.exists:
        return False
    location = tracking.recall(["published", dict(receipt)], lambda: _location(tracking, receipt))
    if location is None:
        return False
    scheme = urlparse(location).scheme
    if scheme in ("", "file"):
        path = unquote(urlparse(location).path) if scheme else location
        return os.path.isfile(Path(path, _DESCRIPTION))
    with tracking.errors(f"look up {receipt['uri']}"):
        return _has_files(tracking, receipt["model_id"])


def _location(tracking: Tracking, receipt: Mapping[str, str]) -> str | None:
    """Return the location of a published version's files; None if the registry lacks it."""
    from mlflow.exceptions import MlflowException

    with tracking.errors(f"look up {receipt['uri']}"):
        try:
            version = tracking.client.get_model_version(receipt["model_name"], receipt["version"])
            model = tracking.client.get_logged_model(receipt["model_id"])
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
    # A receipt that was written before there was a digest of the model has only the export's.
    tag, digest = (
        (CONTENT_TAG, receipt["model_digest"])
        if "model_digest" in receipt
        else (DIGEST_TAG, receipt["digest"])
    )
    return str(model.artifact_location) if version.tags.get(tag) == digest else None


def model_digest(export_directory: Path) -> str:
    """Return the digest of the files in `model/` without the model card.

    The card repeats facts about the run and shows the sample prompt: neither makes another model.
    """
    files = (
        Manifest.read(export_directory).files
        if is_file(export_directory / MANIFEST_NAME)
        else list_files(export_directory, f"{MODEL_DIRECTORY}/**/*")
    )
    content = {
        name: entry.sha256
        for name, entry in files.items()
        if name.startswith(f"{MODEL_DIRECTORY}/") and name != f"{MODEL_DIRECTORY}/{_CARD}"
    }
    return hashlib.sha256(canonical_json(content)).hexdigest()


def _check_export(directory: Path) -> None:
    model = directory / MODEL_DIRECTORY
    required = [*(directory / name for name in REPORT_FILES), model / "config.json"]
    missing = [path for path in required if not is_file(path)]
    if missing:
        raise ConversionError(
            f"{missing[0]} is missing: delete {directory} to export the model again"
        )


def _ensure_model(
    tracking: Tracking,
    run_id: str,
    directory: Path,
    name: str,
    iteration: int,
    tags: Mapping[str, str],
    pairs: bool,
) -> "LoggedModel":
    """Return the LoggedModel of this run and content with all its files.

    An interrupted upload is repeated; card and description of a complete upload are replaced.
    """
    model = _find_model(tracking, run_id, tags) or tracking.client.create_logged_model(
        tracking.experiment_of(run_id),
        name=name.replace(".", "-"),
        source_run_id=run_id,
        tags=dict(tags),
        params={"step": str(iteration)},
        model_type=MODEL_TYPE,
    )
    if model.status == "READY" and _has_files(tracking, model.model_id):
        if is_file(directory / _CARD):
            tracking.client.log_model_artifact(
                model.model_id, str(directory / _CARD), directory.name
            )
        _describe(tracking, model, directory, pairs)
        return model
    _upload(tracking, model, directory)
    _describe(tracking, model, directory, pairs)
    link_model(tracking, run_id, model.model_id, iteration)
    return tracking.client.finalize_logged_model(model.model_id, "READY")


def _find_model(tracking: Tracking, run_id: str, tags: Mapping[str, str]) -> "LoggedModel | None":
    """Return the run's LoggedModel with this content, or None.

    One that was published before there was a digest of the model is found by its export.
    """
    for tag in (CONTENT_TAG, DIGEST_TAG):
        models = tracking.client.search_logged_models(
            [tracking.experiment_of(run_id)],
            f"source_run_id = '{run_id}' AND model_type = '{MODEL_TYPE}' AND tags.{tag} = "
            f"'{tags[tag]}'",
            max_results=1,
        )
        if models:
            return models[0]
    return None


def _has_files(tracking: Tracking, model_id: str) -> bool:
    return any(
        file.path == _DESCRIPTION for file in tracking.client.list_logged_model_artifacts(model_id)
    )


def _ensure_version(
    tracking: Tracking, run_id: str, model: "LoggedModel", name: str, tags: Mapping[str, str]
) -> "ModelVersion":
    """Return the registered version of this LoggedModel, creating it if absent."""
    from mlflow.exceptions import MlflowException

    client = tracking.client
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    for version in client.search_model_versions(f"name = '{name}'"):
        if version.tags.get(MODEL_TAG) == model.model_id:
            client.set_model_version_tag(name, version.version, CONTENT_TAG, tags[CONTENT_TAG])
            return version
    # MLflow's SQL registry looks models:/<id> up in the process's default store and forgets
    # `model_id`: therefore the source is the location, and the id is a tag.
    return client.create_model_version(
        name,
        source=model.artifact_location,
        run_id=run_id,
        tags={**tags, MODEL_TAG: model.model_id},
        model_id=model.model_id,
    )


def _show_version(tracking: Tracking, model_id: str, version: "ModelVersion") -> None:
    """Record the version on the LoggedModel's page.

    MLflow itself does so only when a server is used.
    """
    from mlflow.utils.mlflow_tags import MLFLOW_MODEL_VERSIONS

    entry = {"name": version.name, "version": str(version.version)}
    versions = json.loads(
        tracking.client.get_logged_model(model_id).tags.get(MLFLOW_MODEL_VERSIONS, "[]")
    )
    if all({key: str(item[key]) for key in entry} != entry for item in versions):
        tracking.client.set_logged_model_tags(
            model_id, {MLFLOW_MODEL_VERSIONS: json.dumps([*versions, entry])}
        )


def _upload(tracking: Tracking, model: "LoggedModel", directory: Path) -> None:
    """Upload the transformers directory as `model/`, and the tokenizer as a component."""
    client, model_id = tracking.client, model.model_id
    client.log_model_artifacts(model_id, str(directory), "model")
    for path in sorted(directory.iterdir()):
        if is_file(path) and path.name not in _CONFIGS and not path.name.endswith(_NO_TOKENIZER):
            client.log_model_artifact(model_id, str(path), "components/tokenizer")


def _describe(tracking: Tracking, model: "LoggedModel", directory: Path, pairs: bool) -> None:
    """Upload the files that describe the uploaded model, MLmodel last."""
    with tempfile.TemporaryDirectory(dir=tracking.workspace.root, prefix="publish.tmp-") as scratch:
        for name, text in _model_files(model, directory, pairs).items():
            path = Path(scratch, name)
            path.write_text(text, encoding="utf-8")
            tracking.client.log_model_artifact(model.model_id, str(path))


def _model_files(model: "LoggedModel", directory: Path, pairs: bool) -> dict[str, str]:
    """Return the files that make the directory an MLflow model of the transformers flavor."""
    from mlflow import pyfunc
    from mlflow.models import Model

    task = task_of(directory)
    size = sum(path.stat().st_size for path in rglob(directory, "*") if is_file(path))
    description = Model(
        artifact_path=model.artifact_location,
        run_id=model.source_run_id,
        model_id=model.model_id,
        signature=_signature(task, pairs),
        model_size_bytes=size,
    )
    description.add_flavor("transformers", **_flavor(task))
    if task.served:
        pyfunc.add_to_model(
            description,
            loader_module="mlflow.transformers",
            python_env="python_env.yaml",
            model_config=task.options or None,
        )
    python_env = {
        "python": platform.python_version(),
        "build_dependencies": ["pip", "setuptools"],
        "dependencies": ["-r requirements.txt"],
    }
    return {
        "requirements.txt": "".join(f"{name}=={_public_version(name)}\n" for name in _REQUIREMENTS),
        "python_env.yaml": yaml.safe_dump(python_env, sort_keys=False),
        "MLmodel": description.to_yaml(),
    }


def _signature(task: "_Task", pairs: bool) -> "ModelSignature":
    """Return the inputs that `pyfunc` takes and the columns that it returns.

    With a signature of one text, MLflow drops the second text of a pair without a word.
    """
    from mlflow.models.signature import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema

    text = Schema([ColSpec(DataType.string)])
    if task.name != "text-classification":
        return ModelSignature(inputs=text, outputs=text)
    pair = Schema([ColSpec(DataType.string, "text"), ColSpec(DataType.string, "text_pair")])
    answer = Schema([ColSpec(DataType.string, "label"), ColSpec(DataType.double, "score")])
    return ModelSignature(inputs=pair if pairs else text, outputs=answer)


class _Task(NamedTuple):
    """A pipeline of transformers."""

    name: str
    pipeline: str
    """Class of the pipeline."""
    model: str
    """Class of the model that the pipeline runs."""
    options: dict[str, Any]
    """Default options of the pipeline's calls."""
    served: bool = True
    """True if transformers has that pipeline."""


def task_of(directory: Path) -> _Task:
    """Return the task of the model in a transformers directory.

    transformers 5 has no pipeline for encoder-decoders and multiple choice: such a model is loaded
    as model and tokenizer (`mlflow.transformers.load_model(uri, return_type="components")`), and
    has no `pyfunc`.
    """
    config = read_object(directory / "config.json")
    architecture: str = config["architectures"][0]
    if architecture.endswith("ForSequenceClassification"):
        return _Task("text-classification", "TextClassificationPipeline", architecture, {})
    if architecture.endswith("ForMultipleChoice"):
        return _Task("multiple-choice", "MultipleChoicePipeline", architecture, {}, served=False)
    if config.get("is_encoder_decoder") or architecture.endswith("ForConditionalGeneration"):
        return _Task(
            "text2text-generation", "Text2TextGenerationPipeline", architecture, {}, served=False
        )
    if architecture.endswith(("ForPreTraining", "ForMaskedLM")):
        masked = architecture.replace("ForPreTraining", "ForMaskedLM")
        return _Task("fill-mask", "FillMaskPipeline", masked, {})
    positions = [int(config[name]) for name in _POSITIONS if config.get(name)]
    new_tokens = min(_NEW_TOKENS, positions[0] // 2) if positions else _NEW_TOKENS
    return _Task(
        "text-generation", "TextGenerationPipeline", architecture, {"max_new_tokens": new_tokens}
    )


def _flavor(task: _Task) -> dict[str, Any]:
    """Return the transformers flavor's section of an MLmodel file."""
    return {
        "transformers_version": metadata.version("transformers"),
        "code": None,
        "task": task.name,
        "instance_type": task.pipeline,
        "pipeline_model_type": task.model,
        "source_model_name": "",
        "model_binary": "model",
        "components": ["tokenizer"],
        "tokenizer_type": "AutoTokenizer",
    }


def _public_version(package: str) -> str:
    """Return a version without its local part (`+cpu`), which package indexes do not have."""
    return metadata.version(package).partition("+")[0]
