"""Stages `pretrained`, `dataset` and `examples`: what a fine-tuning starts from.

Each collects or builds its files once for all fine-tunings with the same inputs.
"""

from pathlib import Path
from typing import Any

from megacore.artifact import Artifact, StageKey, Workspace
from megacore.artifact.workspace import DOWNLOADS
from megacore.config.finetune import FinetuneConfig
from megacore.config.keys import key_parameters
from megacore.errors import DataFormatError
from tasks._cache import StageResult, build, stage_task
from tasks._parent import note_parent, parent_directory, parent_of


def pretrained_key(config: FinetuneConfig) -> StageKey:
    """Return the key of a model, determined by the content of its files, not by its name.

    For a model of the hub, its name and revision determine the key.

    Raises ConfigError for a model that does not exist, and TrackingError.
    """
    from megacore.finetune.pretrained import PRETRAINED_VERSION, pretrained_digests

    model, local = config.model, parent_directory(config)
    content: dict[str, Any] = (
        {"name": model.path, "revision": model.revision}
        if local is None
        else {"files": pretrained_digests(local, weights=not model.random_weights)}
    )
    # Always in the key: a directory without weights has the same files either way, but is refused
    # if weights are required.
    parameters = key_parameters(
        config, "pretrained", content | {"weights": not model.random_weights}
    )
    return StageKey.of("pretrained", PRETRAINED_VERSION, parameters)


@stage_task("pretrained", pretrained_key)
def pretrained(config: FinetuneConfig) -> StageResult:
    """Collect the files of `model.path`, and record their origin."""
    from megacore.finetune.pretrained import collect_pretrained

    key = pretrained_key(config)

    def fill(directory: Path) -> dict[str, Any]:
        cache = Workspace.of().folder("pretrained") / DOWNLOADS
        counts = collect_pretrained(config.model, directory, cache, local=parent_directory(config))
        if pretrained_key(config) != key:
            raise DataFormatError(
                "model.path changed while it was read: start again when nobody writes to it"
            )
        note_parent(directory, parent_of(config))
        return counts

    return build(config, key, fill)


def dataset_key(config: FinetuneConfig) -> StageKey:
    """Return the key of the rows, determined by the content of their source.

    Raises DataFormatError for a source that does not exist.
    """
    from megacore.finetune.dataset import DATASET_VERSION, dataset_fingerprint

    parameters = key_parameters(config, "dataset", dataset_fingerprint(config.data, config.seed))
    return StageKey.of("dataset", DATASET_VERSION, parameters)


@stage_task("dataset", dataset_key)
def dataset(config: FinetuneConfig) -> StageResult:
    """Read the splits of `data.source`."""
    from megacore.finetune.dataset import collect_rows

    key = dataset_key(config)

    def fill(directory: Path) -> dict[str, Any]:
        cache = Workspace.of().folder("dataset") / DOWNLOADS
        counts = collect_rows(config.data, directory, cache, seed=config.seed)
        if dataset_key(config) != key:
            raise DataFormatError(
                "data.source changed while it was read: start again when nobody writes to it"
            )
        return counts

    return build(config, key, fill)


def examples_key(config: FinetuneConfig, pretrained: Artifact, dataset: Artifact) -> StageKey:
    """Return the key of the samples: rows, tokenizer, and task options.

    Raises ConfigError if the model's config.json cannot be read.
    """
    from megacore.finetune.examples import examples_version

    version = examples_version(config, pretrained.directory)
    parameters = key_parameters(config, "examples")
    return StageKey.of("examples", version, parameters, dataset=dataset, pretrained=pretrained)


@stage_task("examples", examples_key)
def examples(config: FinetuneConfig, pretrained: Artifact, dataset: Artifact) -> StageResult:
    """Tokenize the rows; refuse rows that a rank could not use."""
    from megacore.finetune.examples import build_examples

    def fill(directory: Path) -> dict[str, Any]:
        return build_examples(config, dataset.directory, pretrained.directory, directory)

    return build(config, examples_key(config, pretrained, dataset), fill)
