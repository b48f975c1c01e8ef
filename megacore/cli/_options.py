"""Options of the command line that replace configuration keys or take several values.

`--data-prefix 0.3 A 0.7 B` is an option with several values, as in Megatron-LM's tools.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand

from megacore.artifact.files import access_error, temporary_of
from megacore.errors import ConfigError, MegacoreError
from megacore.paths import exists, is_dir, is_file, is_symlink

CheckpointOption = Annotated[Path | None, typer.Option("--checkpoint", help="the same as MODEL")]
_OPTIONS = {
    "data.source.files": "--input",
    "data.source.key": "--json-key",
    "data.source": "--input",
    " (data.source.document_characters cuts text files)": "",
    "data.max_document_mb": "--max-document-mb",
    "data.curate": "--steps",
    "data.curate_shard_mb": "--shard-mb",
    "data.curate_workers": "--workers",
    "data.curate_executor": "--executor",
    "data.tokenizer.vocab_file": "--vocab-file",
    "data.tokenizer.merge_file": "--merge-file",
    "data.tokenizer.model_file": "--tokenizer-file",
    "data.tokenizer.name": "--tokenizer-file",
    "data.tokenizer.eod_token": "--eod-token",
    "data.tokenizer": "--tokenizer",
    "data.sentence_splitter": "--sentence-splitter",
    "data.language": "--language",
    "data.split": "--split",
    "data.seq_length": "--seq-length",
    "data.index_style": "--index-style",
    "data.packing": "--packing",
    "data.add_extra_token": "--add-extra-token",
    "data.drop_last_partial": "--drop-last-partial",
}
"""Option of each key; "" for a remark on a key that no command has."""
_TEXTS = frozenset({"--eod-token", "--prompt", "--text"})
"""Options with a text, which may be empty."""
_WITHOUT_VALUE = re.compile(r"--[a-z-]+=")
_KEYS = re.compile("|".join(map(re.escape, sorted(_OPTIONS, key=len, reverse=True))))


@contextmanager
def options_named() -> Iterator[None]:
    """Replace configuration keys in errors by options, for commands without a configuration."""
    try:
        yield
    except MegacoreError as error:
        raise type(error)(with_options(str(error))) from error


def with_options(text: str) -> str:
    """Return `text` with each configuration key replaced by its option, if it has one."""
    return _KEYS.sub(lambda key: _OPTIONS[key.group()], text)


def check_output_file(path: Path, option: str) -> None:
    """Raise ConfigError if the file that an option names cannot be written for its place.

    A file replaces what is there, and must not replace a device, a pipe, or a link such as
    /dev/stdout. Raises FileAccessError if the disk fails.
    """
    if is_dir(path):
        raise ConfigError(f"{option} is {path}, which is a directory: give a file")
    in_devices = is_symlink(path) and path.absolute().is_relative_to("/dev")
    if in_devices or (exists(path) and not is_file(path)):
        raise ConfigError(f"{option} is {path}, which is no regular file: give a file")
    parent = path.absolute().parent
    if not is_dir(parent):
        raise ConfigError(f"{option} is {path}, but {parent} is no directory: make it first")
    temporary = temporary_of(path)  # permissions do not say it, as in /proc
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o600))
        temporary.unlink()
    except OSError as error:
        raise access_error(error, path) or ConfigError(
            f"{option} is {path}, which cannot be written ({error.strerror}): give another file"
        ) from error


def refuse_sealed(output: Path, option: str) -> None:
    """Raise ConfigError if a new output is in a checkpoint, or in an artifact of the workspace.

    It would change what their last file describes, and would be deleted with them.
    """
    from megacore.artifact.manifest import MANIFEST_NAME
    from megacore.artifact.workspace import workspace_root
    from megacore.checkpoint.format import MARKER_NAME

    root = os.path.realpath(workspace_root())
    for place in Path(os.path.realpath(output)).parents:
        # Elsewhere a file of this name may be another program's.
        names = (MARKER_NAME, MANIFEST_NAME) if place.is_relative_to(root) else (MARKER_NAME,)
        for name in names:
            if is_file(place / name):
                raise ConfigError(
                    f"{option} {output} is in {place}, whose {name} says that it is complete: "
                    f"give another {option}"
                )


def named_model(model: Path | None, checkpoint: Path | None, command: str) -> Path:
    """Return the path of a command's model, given in one of two ways. Raises ConfigError."""
    from megacore.observe.runs import named_directory

    path = model or checkpoint
    if path is None or (model is not None and checkpoint is not None):
        count = "no model is named" if path is None else "MODEL and --checkpoint are both given"
        raise ConfigError(f"{count}: name one, as in megacore {command} KEY")
    return named_directory(path)


def check_utf8(texts: Iterable[str], option: str) -> None:
    """Raise ConfigError for a text whose bytes on the command line were not UTF-8."""
    for text in texts:
        if any("\ud800" <= each <= "\udfff" for each in text):
            raise ConfigError(f"{option} {text!r} has bytes that are not UTF-8: give text in UTF-8")


def check_seed(seed: int) -> None:
    """Raise ConfigError for a --seed that torch's generators do not take."""
    if not -(2**63) <= seed < 2**64:
        raise ConfigError(f"--seed is {seed}: give one of {-(2**63)} … {2**64 - 1}")


class Command(TyperCommand):
    """A command that refuses empty values, such as `--workspace "$UNSET"`.

    As a path, an empty text would be the working directory.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raises ConfigError for an empty one that is no text."""
        for before, argument in pairwise(["", *args]):
            if argument == "" and before not in _TEXTS:
                name = before if before.startswith("-") else "an argument"
                raise ConfigError(f"{name} is empty: give a value, or leave it out")
            if _WITHOUT_VALUE.fullmatch(argument) and argument[:-1] not in _TEXTS:
                raise ConfigError(f"{argument[:-1]} is empty: give a value, or leave it out")
        return super().parse_args(ctx, args)


class VariadicCommand(Command):
    """A command with options that accept several values at once.

    These options may still be given several times.
    """

    variadic: ClassVar[tuple[str, ...]] = ()
    """Names of these options, with both dashes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments after expanding `--name A B` to `--name A --name B`."""
        return super().parse_args(ctx, repeat_options(args, self.variadic))

    def invoke(self, ctx: Any) -> Any:
        """Run the command; its errors name options instead of configuration keys."""
        with options_named():
            return super().invoke(ctx)


def repeat_options(arguments: list[str], names: Collection[str]) -> list[str]:
    """Repeat an option's name before each of its values.

    A negative number counts as a value.
    """
    repeated: list[str] = []
    current: str | None = None
    for position, argument in enumerate(arguments):
        if argument.startswith("-") and not is_number(argument):
            current = argument if argument in names else None
        elif current is not None and arguments[position - 1] != current:
            repeated.append(current)
        repeated.append(argument)
    return repeated


def is_number(text: str) -> bool:
    """Return True for a number, which is a value even if it begins with a dash."""
    try:
        float(text)
    except ValueError:
        return False
    return True
