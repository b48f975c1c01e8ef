"""Stage `dataset`: the rows that a fine-tuning learns from and is measured with, as they come."""

from pathlib import Path
from typing import Any

from megacore.artifact import StageKey, Workspace
from megacore.artifact.workspace import DOWNLOADS
from megacore.config.finetune import FinetuneConfig
from megacore.config.keys import key_parameters
from megacore.errors import DataFormatError
from tasks._cache import StageResult, build, stage_task


def dataset_key(config: FinetuneConfig) -> StageKey:
    """The key of the rows: what their source holds.

    Raises DataFormatError for a source that is not there.
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
