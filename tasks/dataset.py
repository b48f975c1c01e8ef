"""Stage `dataset`: raw rows on which a fine-tuned model is trained and evaluated."""

from pathlib import Path
from typing import Any

from megacore.artifact import StageKey, Workspace
from megacore.artifact.workspace import DOWNLOADS
from megacore.config.finetune import FinetuneConfig
from megacore.config.keys import key_parameters
from megacore.errors import DataFormatError
from tasks._cache import StageResult, build, stage_task


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
