"""Comparison of two models or two runs that names the cause of a difference.

The package's modules import torch and transformers; this one does not.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from megacore.errors import ConfigError
from megacore.paths import is_file

if TYPE_CHECKING:
    from megacore.compare.models import Options
    from megacore.compare.report import Report


def compare_paths(
    a: str,
    b: str,
    *,
    kind: str | None = None,
    options: "Options | None" = None,
    workspace: Path | None = None,
) -> "Report":
    """Compare two models or two runs.

    Args:
        a: path of a model or run, the key of an artifact, or the key or name of a run.
        b: the one that is compared with it.
        kind: models or runs; None compares two runs as runs, and all others as models.
        options: options of a comparison of models.
        workspace: root of the workspace in which keys and names are looked up; None means
            MEGACORE_WORKSPACE, or ./workspace.

    Raises:
        MegacoreError: if one of them cannot be read, or they cannot be compared.
        ConfigError: if `options` are given for two runs.
    """
    from megacore.artifact.workspace import RUN_FILE
    from megacore.compare.runs import compare_runs
    from megacore.observe.runs import named_directory

    if kind not in (None, "models", "runs"):
        raise ConfigError(f"--as is {kind}: give models or runs")
    first, second = (named_directory(each, workspace) for each in (a, b))
    lacking = [name for name, place in ((a, first), (b, second)) if not is_file(place / RUN_FILE)]
    if kind == "runs" or (kind is None and not lacking):
        if lacking:
            raise ConfigError(
                f"{lacking[0]} is no run: give a directory with run.json, or the key or name of a "
                "run that `megacore runs` lists"
            )
        if options is not None and (unread := options.given()):
            raise ConfigError(
                f"{unread[0]} is for models, and {a} and {b} are runs: leave it out, or give --as "
                "models"
            )
        return compare_runs(first, second)
    from megacore.compare.models import compare_models

    return compare_models(first, second, options)
