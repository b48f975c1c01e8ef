"""`megacore init`: a configuration for a user's own text."""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from megacore.cli._options import check_output_file
from megacore.errors import ConfigError
from megacore.paths import is_dir, is_file

_SCHEMA = "schema.json"
_EDITORS = "# yaml-language-server: $schema="
"""Beginning of the comment from which editors with the YAML language server take the schema."""


def init(
    paths: Annotated[
        list[Path],
        typer.Argument(help="files or directories: text, code, JSON Lines or parquet"),
    ],
    name: Annotated[
        str | None, typer.Option(help="name of the configuration and of the model")
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="time from text to model that the sizes are chosen for")
    ] = 10.0,
) -> None:
    """Write a commented configuration for text of your own, and print how to train on it.

    In a clone it is written to conf/, elsewhere to the current directory. An existing file is never
    overwritten.
    """
    from megacore.config.load import CONF_DIR, name_of
    from megacore.corpus.survey import survey
    from megacore.hardware import Hardware
    from megacore.plan.starter import propose

    name = name_of(Path(f"{paths[0].absolute().name}")) if name is None else name
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
        raise ConfigError(
            f"--name is {name!r}: give lower-case letters, digits, dots and dashes, with a letter "
            "or digit first"
        )
    target = (CONF_DIR if in_clone() else Path()) / f"{name}.yaml"
    check_new(target)
    surveyed = survey(paths)
    starter = propose(surveyed, name, minutes, Hardware.detect())
    write_new(target, _schema_line(target) + starter.text)
    remarks = "".join(f"{remark}\n" for remark in surveyed.remarks)
    sys.stdout.write(f"wrote {target}: {starter.summary}\n{remarks}{next_commands(target)}")


def in_clone() -> bool:
    """Return True if the current directory is a clone, which has conf/ and the flows."""
    from megacore.config.load import CONF_DIR

    return is_file("flows/pretrain.py") and is_dir(CONF_DIR)


def clone_directory() -> Path | None:
    """Return the clone that has the flows: the current directory or that of the package."""
    import megacore

    for directory in (Path(), Path(megacore.__file__).resolve().parent.parent):
        if is_file(directory / "flows" / "pretrain.py"):
            return directory.absolute()
    return None


def check_new(target: Path, option: str = "--name") -> None:
    """Raise ConfigError if the file that an option names exists, or its directory does not."""
    if os.path.lexists(target):
        raise ConfigError(
            f"{target} exists and is not overwritten: give another {option}, or remove it first"
        )
    check_output_file(target, option)


def write_new(target: Path, text: str, option: str = "--name") -> None:
    """Write a file that is complete or absent after a crash, and never replaces another."""
    from megacore.artifact.files import replace_file, temporary_of, workspace_errors

    temporary = temporary_of(target)
    with workspace_errors(target, f"give another {option}"):
        try:
            replace_file(temporary, text.encode("utf-8"))
            try:
                os.link(temporary, target)
            except FileExistsError:
                check_new(target, option)
                raise
        finally:
            temporary.unlink(missing_ok=True)


def _schema_line(target: Path) -> str:
    """Return a comment that names the JSON schema to editors; "" if there is none."""
    import megacore

    if is_file(target.parent / _SCHEMA):
        return f"{_EDITORS}{_SCHEMA}\n"
    schema = Path(megacore.__file__).resolve().parent.parent / "conf" / _SCHEMA
    return f"{_EDITORS}{schema.as_uri()}\n" if is_file(schema) else ""


def next_commands(target: Path) -> str:
    """Return the commands that check a configuration and that train with it."""
    clone, here = clone_directory(), in_clone()
    in_conf = here and target.parent == Path("conf")
    conf = target.stem if in_conf else str(target.absolute())
    start = f"{shlex.quote(sys.executable)} -m flows.pretrain --conf {shlex.quote(conf)}"
    if not here:
        start = f"cd {'CLONE' if clone is None else shlex.quote(str(clone))} && {start}"
    elif re.fullmatch(r"[\w./-]+", conf):
        start = f"make pretrain CONF={conf}"
    check = f'{start} ARGS="--dry-run"' if start.startswith("make ") else f"{start} --dry-run"
    return f"check it:  {check}\ntrain:     {start}\n"
