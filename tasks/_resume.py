"""What a run goes on from, compared with its configuration before anything starts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefect import get_run_logger

from megacore.artifact import Workspace
from megacore.artifact.files import read_json
from megacore.artifact.manifest import file_digest
from megacore.artifact.workspace import CHECKPOINTS_NAME, CONFIG_KEY
from megacore.checkpoint.format import MARKER_NAME, complete_checkpoints, read_state, verify
from megacore.config import RunConfig
from megacore.config.difference import Change, changes_of, check_resume, described
from megacore.errors import CheckpointError, ConfigError

_SHOWN = 8
"""Changes that a hint names."""


def resumed_digest(config: RunConfig) -> str | None:
    """Identity of the checkpoint of another run that this one goes on from.

    None where there is none.

    Raises ConfigError when it is not there.
    """
    if config.resume.checkpoint is None:
        return None
    marker = Path(config.resume.checkpoint) / MARKER_NAME
    if not marker.is_file():
        raise ConfigError(
            f"resume.checkpoint is {config.resume.checkpoint}, which has no {MARKER_NAME}: give "
            "the directory of a complete checkpoint, as in runs/KEY/checkpoints/iter_0001000"
        )
    return file_digest(marker)


def check_resumed(config: RunConfig) -> None:
    """Show what differs from the checkpoint's configuration.

    Refuse to go on from it with what was not allowed.

    Raises ConfigError, CheckpointError.
    """
    from megacore.checkpoint.spec import check_same_model, read_spec
    from megacore.config.spec import ModelSpec

    if resumed_digest(config) is None:
        return
    path = Path(str(config.resume.checkpoint))
    verify(path, "quick")
    before = read_state(path).get(CONFIG_KEY)
    if before is None:
        raise ConfigError(
            f"resume.checkpoint is {path}, which holds no configuration, as those do that a "
            "training wrote: begin with its weights by train.pretrained_checkpoint"
        )
    changes = changes_of(before, config, another_run=True)
    get_run_logger().info("going on from %s; changed since: %s", path, described(changes))
    check_resume(changes, config.resume.override, str(path))
    there = read_spec(path)
    check_same_model(path, there, ModelSpec.of(config, there.vocab_size))


def tell_of_other_runs(config: RunConfig) -> None:
    """Say, where a run is new, that another of its name stands in the workspace.

    Say in what they differ, and how to go on.

    A changed value that a training's result depends on makes another run: whoever wanted to go on
    would start all over.
    """
    if config.resume.checkpoint is not None:
        return
    newest: tuple[float, Path, list[Change], str | None] | None = None
    for job, before in _runs_of_name(config.name):
        keyed = [change for change in changes_of(before, config, another_run=True) if change.keyed]
        begun = before.get("resume", {}).get("checkpoint")
        if not keyed and begun is None:
            return  # this very run
        checkpoint = max(complete_checkpoints(job.parent / CHECKPOINTS_NAME), default=None)
        if checkpoint is not None and (newest is None or job.stat().st_mtime > newest[0]):
            newest = (job.stat().st_mtime, checkpoint, keyed, begun)
    if newest is not None:
        get_run_logger().warning("this is a new run: %s", _how_to_go_on(config, *newest[1:]))


def _how_to_go_on(
    config: RunConfig, checkpoint: Path, keyed: list[Change], begun: str | None
) -> str:
    """What there is of another run, which began at the checkpoint `begun`, if at one."""
    if not keyed:
        return (
            f"the last one of the same name went on from {begun}; to go on with it, set "
            "resume.checkpoint to that"
        )
    shown = described(keyed[:_SHOWN]) + (
        f" and {len(keyed) - _SHOWN} more" if len(keyed) > _SHOWN else ""
    )
    differs = f"it differs from the last one of the same name ({shown})"
    if not _has_this_model(checkpoint, config):
        return f"{differs}, whose checkpoints are of another model"
    names = ", ".join(dict.fromkeys(change.to_allow for change in keyed))
    return (
        f"{differs}; to go on from that one, set resume.checkpoint to {checkpoint} and "
        f"resume.override to [{names}]"
    )


def _has_this_model(checkpoint: Path, config: RunConfig) -> bool:
    from megacore.checkpoint.spec import check_same_model, read_spec
    from megacore.config.spec import ModelSpec

    try:
        there = read_spec(checkpoint)
        check_same_model(checkpoint, there, ModelSpec.of(config, there.vocab_size))
    except CheckpointError:
        return False
    return True


def _runs_of_name(name: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The job file and the configuration of each run of this name."""
    for job in Workspace.of().folder("train").glob("*/run.json"):
        try:
            before = read_json(job)["config"]
            if before["name"] == name:
                yield job, before
        except (OSError, ValueError, KeyError, TypeError):
            continue  # the run's own business
