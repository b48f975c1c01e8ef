"""Where a model's weights and tokenizer lie. Imports torch only if it must."""

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megacore.checkpoint.format import (
    METADATA_NAME,
    checkpoint_directories,
    complete_checkpoints,
    verify,
)
from megacore.checkpoint.spec import read_spec
from megacore.config.model import Family
from megacore.errors import CheckpointError, ConfigError, DataFormatError
from megacore.jobs.model import ModelSource
from megacore.tokenizer import Tokenizer, load_tokenizer

_WHAT_OTHERS_DO = {"bert": "fills in masked words", "t5": "answers a text instead of continuing it"}


def find_model(path: Path) -> ModelSource:
    """The model that a path names.

    A checkpoint, the newest of a directory of them, or a transformers directory.

    Raises:
        CheckpointError: there is none, its files are not as they were written, or it does not say
            what it is.
        ConversionError: the transformers directory holds a model that has no counterpart here.
    """
    if (path / "config.json").is_file() and not (path / METADATA_NAME).exists():
        from megacore.convert.hf.config import HfConfig
        from megacore.convert.hf.forms import read_spec as spec_of_class

        _, spec = spec_of_class(HfConfig.read(path))
        return ModelSource(directory=str(path.absolute()), exported=True, spec=spec)
    checkpoint = _checkpoint(path)
    verify(checkpoint, "quick")
    return ModelSource(
        directory=str(checkpoint.absolute()), exported=False, spec=read_spec(checkpoint)
    )


def _checkpoint(path: Path) -> Path:
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is no directory: give a checkpoint (iter_*) or a transformers directory"
        )
    for root in (path, path / "checkpoints"):
        if checkpoint_directories(root):
            whole = complete_checkpoints(root)
            if not whole:
                _refuse(root, newest=checkpoint_directories(root)[-1])
            return list(whole)[-1]
    return path


def _refuse(root: Path, *, newest: Path) -> NoReturn:
    """Say what is wrong with the newest of checkpoints of which none is whole.

    Raises CheckpointError.
    """
    if any(newest.glob("mp_rank_*")):
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


def require_family(source: ModelSource, wanted: Sequence[Family], purpose: str) -> None:
    """Refuse a model that cannot serve `purpose`. Raises ConfigError."""
    family = source.spec.family
    if family not in wanted:
        raise ConfigError(
            f"{source.directory} holds a model of family {family}, which "
            f"{_WHAT_OTHERS_DO[family]}: {purpose} needs one of family {' or '.join(wanted)}"
        )


def find_tokenizer(source: ModelSource, given: Path | None) -> Tokenizer:
    """The tokenizer in `given`, else the model's own; see `tokenizer_directory`.

    Raises:
        ConfigError: there is none, or its vocabulary is not the model's.
        DataFormatError: its files are missing or damaged.
    """
    directory = tokenizer_directory(source, given)
    tokenizer = load_tokenizer(directory)
    check_vocabulary(source, directory, tokenizer.vocab_size)
    return tokenizer


def check_vocabulary(source: ModelSource, directory: Path, size: int) -> None:
    """Refuse the tokenizer in `directory`, of `size` entries, when it cannot be the model's.

    Raises ConfigError.

    A model of other makers may have rows that their own tokenizer never names.
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
    """Entries of the tokenizer that the model names, as long as it is there."""
    own = source.directory if source.exported else source.spec.tokenizer_directory
    try:
        return None if own is None else load_tokenizer(Path(own)).vocab_size
    except DataFormatError:
        return None


def tokenizer_directory(source: ModelSource, given: Path | None) -> Path:
    """Where the tokenizer lies.

    `given`, else what an export has beside its weights or a checkpoint names.

    Raises:
        ConfigError: there is none.
        DataFormatError: what was given, or is named, is not there.
    """
    if given is not None:
        if not given.is_dir():
            raise DataFormatError(
                f"the tokenizer {given} is no directory: give one with tokenizer.json"
            )
        return given
    own = source.directory if source.exported else source.spec.tokenizer_directory
    if own is None:
        raise ConfigError(
            f"{source.directory} came without a tokenizer: give --tokenizer its directory"
        )
    if not Path(own, "tokenizer_config.json").is_file():
        raise DataFormatError(
            f"{source.directory} names the tokenizer in {own}, where there is none: give "
            "--tokenizer its directory"
        )
    return Path(own)
