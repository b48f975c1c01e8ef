"""Location of a model's weights and tokenizer. Imports torch only if needed."""

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megacore.artifact.workspace import BEST_NAME, CHECKPOINTS_NAME, MODEL_DIRECTORY, Workspace
from megacore.checkpoint.format import (
    METADATA_NAME,
    checkpoint_directories,
    complete_checkpoints,
    verify,
)
from megacore.checkpoint.spec import read_spec
from megacore.config.model import Family
from megacore.config.spec import ModelSpec
from megacore.convert.hf.config import CONFIG_NAME
from megacore.errors import CheckpointError, ConfigError, DataFormatError
from megacore.jobs.model import ModelSource
from megacore.paths import exists, glob, is_dir, is_file
from megacore.tokenizer import Tokenizer, load_tokenizer
from megacore.tokenizer.load import TOKENIZER_CONFIG_NAME

TOKENIZER_DIRECTORY = "tokenizer"
"""Directory with the tokenizer of an imported model, next to its checkpoint."""
_WHAT_OTHERS_DO = {"bert": "fills in masked words", "t5": "answers a text instead of continuing it"}


def find_model(path: Path) -> ModelSource:
    """Find the model at `path`.

    `path` is a checkpoint, a directory of checkpoints (the newest complete one is used), a
    transformers directory, or the directory of an export or a fine-tuning with such a directory.

    Raises:
        CheckpointError: if there is no checkpoint, its files were changed, or it does not describe
            its model.
        ConversionError: if the transformers directory contains a model without counterpart here.
    """
    exported = transformers_directory(path)
    if exported is not None:
        from megacore.convert.hf.directory import spec_of_directory

        _, spec = spec_of_directory(exported)
        return ModelSource(directory=str(exported.absolute()), exported=True, spec=spec)
    checkpoint = _checkpoint(path)
    verify(checkpoint, "quick")
    checkpoint = checkpoint.absolute()
    spec = _with_moved_tokenizer(checkpoint, read_spec(checkpoint))
    return ModelSource(directory=str(checkpoint), exported=False, spec=spec)


def _with_moved_tokenizer(checkpoint: Path, spec: ModelSpec) -> ModelSpec:
    """Return the specification with the tokenizer that was moved with the checkpoint, if any.

    A checkpoint names the path that its tokenizer had when it was written. That of an imported
    model is next to the checkpoint and comes first: another import may be at the old path. That of
    a run (`runs/KEY/checkpoints/iter_*`) is in the workspace, under a name that tells its content.
    """
    named = spec.tokenizer_directory
    if named is None:
        return spec
    moved = checkpoint.parent / TOKENIZER_DIRECTORY
    if Path(named).name != TOKENIZER_DIRECTORY or not is_dir(moved):
        if is_dir(named) or len(checkpoint.parents) < 4:
            return spec
        moved = Workspace(checkpoint.parents[3]).folder("tokenizer") / Path(named).name
    return spec.model_copy(update={"tokenizer_directory": str(moved)}) if is_dir(moved) else spec


def transformers_directory(path: Path) -> Path | None:
    """Return the transformers directory at `path`; None if there is none.

    It is `path` itself, the model of an export (`exports/KEY`), or the best model of a fine-tuning
    (`finetuned/KEY`).
    """
    pattern = f"{BEST_NAME}/iter_*/{MODEL_DIRECTORY}"
    best = [place for place in glob(path, pattern) if ".tmp-" not in place.parent.name]
    places = (path, path / MODEL_DIRECTORY, *sorted(best, reverse=True))
    models = (place for place in places if is_file(place / CONFIG_NAME))
    return next((place for place in models if not exists(place / METADATA_NAME)), None)


def _checkpoint(path: Path) -> Path:
    if str(path).startswith("models:/"):
        raise CheckpointError(
            f"{path} is a model of MLflow, and megacore reads directories: download it with "
            f"`mlflow artifacts download -u {path} -d DIRECTORY`, and give DIRECTORY"
        )
    if not is_dir(path):
        raise CheckpointError(
            f"{path} is no directory: give a run that `megacore runs` lists, a checkpoint "
            "(iter_*), or a transformers directory"
        )
    for root in (path, path / CHECKPOINTS_NAME):
        if checkpoint_directories(root):
            complete = complete_checkpoints(root)
            if not complete:
                _refuse(root, newest=checkpoint_directories(root)[-1])
            return list(complete)[-1]
    return path


def _refuse(root: Path, *, newest: Path) -> NoReturn:
    """Raise CheckpointError with the defect of the newest checkpoint, when none is complete."""
    if any(glob(newest, "mp_rank_*")):
        raise CheckpointError(
            f"{newest} is a checkpoint of Megatron-LM: make one of it with `megacore import` first"
        )
    try:
        verify(newest, "quick")
    except CheckpointError as error:
        raise CheckpointError(
            f"none of the checkpoints in {root} is complete; of the newest: {error}"
        ) from error
    raise CheckpointError(f"the checkpoints in {root} were being written: try again")


def require_family(source: ModelSource, families: Sequence[Family], purpose: str) -> None:
    """Check that the model's family can serve `purpose`.

    Raises:
        ConfigError: if the family is not in `families`.
    """
    family = source.spec.family
    if family not in families:
        raise ConfigError(
            f"{source.directory} holds a model of family {family}, which "
            f"{_WHAT_OTHERS_DO[family]}: {purpose} needs one of family {' or '.join(families)}"
        )


def find_tokenizer(source: ModelSource, requested: Path | None) -> Tokenizer:
    """Load the tokenizer in `requested`, or else the model's own; see `tokenizer_directory`.

    Raises:
        ConfigError: if there is none, or its vocabulary is not the model's.
        DataFormatError: if its files are missing or damaged.
    """
    directory = tokenizer_directory(source, requested)
    tokenizer = load_tokenizer(directory)
    check_vocabulary(source, directory, tokenizer.vocab_size)
    return tokenizer


def check_vocabulary(source: ModelSource, directory: Path, size: int) -> None:
    """Check that a tokenizer of `size` entries in `directory` can be the model's.

    It may be smaller than the model's vocabulary if the model's own tokenizer is, too: imported
    models can have unused rows.

    Raises:
        ConfigError: if it cannot.
    """
    entries = source.spec.vocab_size
    if size == entries or (size < entries and _own_size(source) in (None, size)):
        return
    raise ConfigError(
        f"the tokenizer in {directory} has a vocabulary of {size} entries and the model in "
        f"{source.directory} one of {entries}: give --tokenizer the one that the model was trained "
        "with"
    )


def _own_size(source: ModelSource) -> int | None:
    """Return the size of the tokenizer that the model names; None if it cannot be loaded."""
    named = _named_tokenizer(source)
    try:
        return None if named is None else load_tokenizer(Path(named)).vocab_size
    except DataFormatError:
        return None


def _named_tokenizer(source: ModelSource) -> str | None:
    """Return the directory of the model's own tokenizer; None if the model names none."""
    return source.directory if source.exported else source.spec.tokenizer_directory


def tokenizer_directory(source: ModelSource, requested: Path | None) -> Path:
    """Return the tokenizer's directory.

    It is `requested` if set, else the directory of the export, or that named by the checkpoint.

    Raises:
        ConfigError: if there is none.
        DataFormatError: if the directory does not exist or has no tokenizer.
    """
    if requested is not None:
        if not is_dir(requested):
            raise DataFormatError(
                f"the tokenizer {requested} is no directory: give one with tokenizer.json"
            )
        return requested
    named = _named_tokenizer(source)
    if named is None:
        raise ConfigError(
            f"{source.directory} came without a tokenizer: give --tokenizer its directory"
        )
    if not is_file(Path(named, TOKENIZER_CONFIG_NAME)):
        raise DataFormatError(
            f"{source.directory} names the tokenizer in {named}, where there is none: give "
            "--tokenizer its directory"
        )
    return Path(named)
