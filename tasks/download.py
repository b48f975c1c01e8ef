"""Stage `collect`: documents from their source into the workspace."""

from pathlib import Path
from typing import Any

from megacore.artifact import StageKey
from megacore.config import RunConfig
from megacore.errors import DataFormatError
from tasks._cache import StageResult, build, stage_task


def collect_key(config: RunConfig) -> StageKey:
    """The key of the corpus: what the source holds."""
    from megacore.corpus.collect import VERSION, fingerprint

    return StageKey.of("collect", VERSION, fingerprint(config.data.source))


@stage_task("collect", collect_key)
def download(config: RunConfig) -> StageResult:
    """Collect the documents of `data.source`."""
    from megacore.corpus.collect import collect

    key = collect_key(config)

    def fill(directory: Path) -> dict[str, Any]:
        counts = collect(config.data.source, directory)
        if collect_key(config) != key:
            raise DataFormatError("data.source changed while it was read: start again when nobody writes to it")
        return counts

    return build(config, key, fill)
