"""Checks before a start: the checkpoint to resume from, and other runs of the same name."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import get_run_logger

from megacore.artifact import Workspace
from megacore.artifact.files import read_json
from megacore.artifact.manifest import MANIFEST_NAME, file_digest
from megacore.artifact.workspace import CHECKPOINTS_NAME, CONFIG_KEY
from megacore.checkpoint.format import MARKER_NAME, complete_checkpoints, read_state, verify
from megacore.checkpoint.spec import check_same_model, read_spec
from megacore.config import RunConfig
from megacore.config.difference import (
    OPTIMIZER,
    Change,
    changed_warmup,
    check_resume,
    compare_configurations,
    compare_finetunings,
    described,
)
from megacore.config.spec import ModelSpec
from megacore.errors import CheckpointError, ConfigError, FileAccessError
from megacore.jobs.finetune import FinetuneJob
from megacore.paths import glob, is_file

if TYPE_CHECKING:
    from megacore.train.state import TrainState

_SHOWN = 8
"""Most changes that a hint lists."""


def checkpoint_digest(option: str, checkpoint: str | None) -> str | None:
    """Return the digest of the checkpoint that the configuration's `option` names, None without.

    Raises ConfigError if the checkpoint does not exist.
    """
    if checkpoint is None:
        return None
    marker = Path(checkpoint) / MARKER_NAME
    if not is_file(marker):
        raise ConfigError(
            f"{option} is {checkpoint}, which has no {MARKER_NAME}: give the directory of a "
            "complete checkpoint, as in runs/KEY/checkpoints/iter_0001000"
        )
    return file_digest(marker)


def resumed_digest(config: RunConfig) -> str | None:
    """Return the digest of the other run's checkpoint that this run continues from, or None."""
    return checkpoint_digest("resume.checkpoint", config.resume.checkpoint)


def pretrained_digest(config: RunConfig) -> str | None:
    """Return the digest of the initial weights, or None if the run starts with random weights."""
    return checkpoint_digest("train.pretrained_checkpoint", config.train.pretrained_checkpoint)


def resumed_state(config: RunConfig) -> "TrainState | None":
    """Return the training state in the other run's checkpoint that this run continues from.

    None without such a checkpoint, and if it has no readable state: `check_resumed` and the
    training refuse it.
    """
    from megacore.train.state import TrainState

    if config.resume.checkpoint is None:
        return None
    try:
        return TrainState.from_json(read_state(Path(config.resume.checkpoint))["train"])
    except (CheckpointError, KeyError):
        return None


def planned_before(config: RunConfig, directory: Path | None) -> int | None:
    """Return the samples for which the order of samples was planned before this start.

    The newest complete checkpoint in the run's `directory` has them; before the first one, the
    checkpoint of another run from which this run continues.

    None for a run without either, which begins at sample 0; if the samples of the other run have
    another data.seq_length; and if no state is readable: `check_resumed` and the training refuse
    it. Raises FileAccessError if a file cannot be read now.
    """
    from megacore.train.state import planned_samples

    if directory is not None:
        for path in reversed(complete_checkpoints(directory / CHECKPOINTS_NAME)):
            try:
                return planned_samples(read_state(path))
            except CheckpointError:
                continue  # damaged, or deleted meanwhile: the training also takes an earlier one
    if config.resume.checkpoint is None:
        return None
    try:
        saved = read_state(Path(config.resume.checkpoint))
        same_length = saved[CONFIG_KEY]["data"]["seq_length"] == config.data.seq_length
        return planned_samples(saved) if same_length else None
    except (CheckpointError, KeyError, TypeError):
        return None


def check_resumed(config: RunConfig) -> None:
    """Log the differences to the checkpoint's configuration.

    Refuse to continue from it if a change was not allowed.

    Raises ConfigError, CheckpointError.
    """
    if resumed_digest(config) is None:
        return
    path = Path(str(config.resume.checkpoint))
    verify(path, "quick")
    saved_config = read_state(path).get(CONFIG_KEY)
    if saved_config is None:
        raise ConfigError(
            f"resume.checkpoint is {path}, which holds no configuration, unlike those that a "
            "training wrote: begin with its weights through train.pretrained_checkpoint"
        )
    changes = compare_configurations(saved_config, config, another_run=True)
    get_run_logger().info("resuming from %s; changed since: %s", path, described(changes))
    check_resume(changes, config.resume.override, str(path))
    state = resumed_state(config)
    if state is not None:
        warmup = changed_warmup(
            saved_config,
            config,
            str(path),
            consumed_samples=state.consumed_samples,
            applied_iterations=state.applied_iterations,
        )
        if warmup is not None:
            get_run_logger().warning("%s", warmup)
    check_model(path, config)


def check_model(checkpoint: Path, config: RunConfig, *, extends: bool = False) -> None:
    """Refuse a checkpoint of another model than the configuration's.

    Its vocabulary is compared with the tokenizer when training starts. `extends` is True for a new
    training, whose sequences may be longer than the checkpoint's. Raises CheckpointError.
    """
    spec = read_spec(checkpoint)
    check_same_model(checkpoint, spec, ModelSpec.of(config, spec.vocab_size), extends=extends)


def warn_of_other_runs(config: RunConfig) -> None:
    """Warn about a new run if the workspace has another run with the same name.

    The warning lists the differences and explains how to continue the other run. A changed value
    that affects the result of a training makes a new run: without the warning, a user who meant to
    resume would start from the beginning.
    """
    if config.resume.checkpoint is not None:
        return
    newest: tuple[float, Path, list[Change], str | None] | None = None
    for started, checkpoint, saved_config in _runs_of_name(config.name):
        keyed = [
            change
            for change in compare_configurations(saved_config, config, another_run=True)
            if change.keyed
        ]
        origin = saved_config.get("resume", {}).get("checkpoint")
        if not keyed and origin is None:
            return  # the same run
        if checkpoint is not None and (newest is None or started > newest[0]):
            newest = (started, checkpoint, keyed, origin)
    if newest is not None:
        get_run_logger().warning("this is a new run: %s", _resume_advice(config, *newest[1:]))


def warn_of_other_data(config: RunConfig, directory: Path) -> None:
    """Warn about a new run if another one had the same configuration, but other data.

    Files that were touched or moved are other data to sources that do not read them for their key.
    Without the warning, a user who meant to resume would start from the beginning.
    """
    if config.resume.checkpoint is not None or complete_checkpoints(directory / CHECKPOINTS_NAME):
        return
    newest: tuple[float, Path] | None = None
    for started, checkpoint, saved_config in _runs_of_name(config.name):
        changes = compare_configurations(saved_config, config, another_run=True)
        begun = saved_config.get("resume", {}).get("checkpoint") is None
        if begun and checkpoint is not None and not any(change.keyed for change in changes):
            newest = max(newest or (0.0, checkpoint), (started, checkpoint))
    if newest is not None:
        get_run_logger().warning(
            "this is a new run, although %s has the same configuration: the data, the tokenizer "
            "or the precision of the hosts is another (files of jsonl, parquet, warc and prefix "
            "count as others if they were moved or touched); to resume from that one, set "
            "resume.checkpoint to it",
            newest[1],
        )


def warn_of_unfinished(job: FinetuneJob) -> None:
    """Warn about a new fine-tuning if another one of the same name has not ended.

    A fine-tuning resumes only with the same values, ranks, precision, model and samples. Without
    the warning, a user who meant to resume would start from the beginning.
    """
    directory = Path(job.run_directory)
    if complete_checkpoints(directory / CHECKPOINTS_NAME):
        return
    newest: tuple[float, Path, dict[str, Any]] | None = None
    for path in glob(directory.parent, "*/run.json"):
        try:
            started, saved = path.stat().st_mtime, read_json(path)
            same_name = saved["config"]["name"] == job.config.name
        except (FileAccessError, OSError, ValueError, KeyError, TypeError):
            continue  # it was deleted meanwhile, or is damaged
        checkpoints = complete_checkpoints(path.parent / CHECKPOINTS_NAME)
        ended = is_file(path.with_name(MANIFEST_NAME))
        if same_name and checkpoints and not ended and (newest is None or started > newest[0]):
            newest = started, max(checkpoints), saved
    if newest is None:
        return
    _, checkpoint, saved = newest
    changes = compare_finetunings(saved["config"], job.config)
    changes += [
        Change(name, saved.get(name), value, keyed=True)
        for name, value in (("ranks", job.ranks), ("precision", job.precision))
        if saved.get(name) != value
    ]
    reason = (
        f"it differs from that of {checkpoint}, which has not ended ({_shown(changes)}); with the "
        "earlier values that one resumes"
        if changes
        else f"that of {checkpoint}, which has not ended, has the same configuration, but another "
        "initial model or other samples"
    )
    get_run_logger().warning("this is a new run: %s", reason)


def _shown(changes: list[Change]) -> str:
    more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
    return described(changes[:_SHOWN]) + more


def _resume_advice(
    config: RunConfig, checkpoint: Path, keyed: list[Change], origin: str | None
) -> str:
    """Return how to continue another run, which itself began at checkpoint `origin`, if at one."""
    if not keyed:
        return (
            f"the last one of the same name resumed from {origin}; to continue it, set "
            "resume.checkpoint to that"
        )
    differs = f"it differs from the last one of the same name ({_shown(keyed)})"
    if not _has_this_model(checkpoint, config):
        return f"{differs}, whose checkpoints are of another model"
    if any(change.field == OPTIMIZER for change in keyed):
        return f"{differs}, whose optimizer is another"
    names = ", ".join(dict.fromkeys(change.to_allow for change in keyed))
    return (
        f"{differs}; to resume from that one, set resume.checkpoint to {checkpoint} and "
        f"resume.override to [{names}]"
    )


def _has_this_model(checkpoint: Path, config: RunConfig) -> bool:
    try:
        check_model(checkpoint, config)
    except CheckpointError:
        return False
    return True


def _runs_of_name(name: str) -> Iterator[tuple[float, Path | None, dict[str, Any]]]:
    """Yield last start, newest complete checkpoint and configuration of the runs with this name."""
    for job in glob(Workspace.of().folder("train"), "*/run.json"):
        try:
            started, saved_config = job.stat().st_mtime, read_json(job)["config"]
            if saved_config["name"] != name:
                continue
        except (FileAccessError, OSError, ValueError, KeyError, TypeError):
            continue  # it was deleted meanwhile, or is damaged, which its own run reports
        checkpoints = complete_checkpoints(job.parent / CHECKPOINTS_NAME)
        yield started, max(checkpoints, default=None), saved_config
