"""Comparison of two models or two runs that names the cause of a difference.

The package's modules import torch and transformers; this one does not.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from megacore.errors import ConfigError

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
        a: path of a model; or path, key or name of a run.
        b: the one that is compared with it.
        kind: models or runs; None compares two runs as runs, and all others as models.
        options: options of a comparison of models.
        workspace: root of the workspace in which keys and names of runs are looked up; None means
            MEGACORE_WORKSPACE, or ./workspace.

    Raises:
        MegacoreError: if one of them cannot be read, or they cannot be compared.
    """
    from megacore.compare.run_record import find_run_directory
    from megacore.compare.runs import compare_runs

    if kind not in (None, "models", "runs"):
        raise ConfigError(f"--as is {kind}: give models or runs")
    directories = [find_run_directory(each, workspace) for each in (a, b)]
    if kind == "runs" or (kind is None and None not in directories):
        first, second = directories
        if first is None or second is None:
            lacking = a if first is None else b
            raise ConfigError(
                f"{lacking} is no run: give a directory with run.json, or the key or name of a run "
                "that `megacore runs` lists"
            )
        return compare_runs(first, second)
    from megacore.compare.models import compare_models

    first, second = directories
    return compare_models(first or Path(a), second or Path(b), options)
