"""Stage `collect`: documents from their source into the workspace."""

from pathlib import Path
from typing import Any

from megacore.artifact import StageKey
from megacore.config import RunConfig
from tasks._cache import StageResult, build, stage_task


def collect_key(config: RunConfig) -> StageKey:
    """The key of the corpus: what the source holds."""
    from megacore.corpus.collect import VERSION, fingerprint

    return StageKey.of("collect", VERSION, fingerprint(config.data.source))


@stage_task("collect", collect_key)
def download(config: RunConfig) -> StageResult:
    """Collect the documents of `data.source`."""
    from megacore.corpus.collect import collect

    def fill(directory: Path) -> dict[str, Any]:
        return collect(config.data.source, directory)

    return build(config, collect_key(config), fill)
