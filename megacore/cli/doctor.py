"""`megacore doctor`: is every machine fit for a run, and where is the fault if not."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megacore.errors import ConfigError

if TYPE_CHECKING:
    from megacore.config import RunConfig
    from megacore.config.launch import LaunchConfig

EXIT_CODE = 11
"""Of an examination that found an error."""


def doctor(
    hostfile: Annotated[
        Path | None,
        typer.Option(help="lines `host slots=N`, as launch.hostfile; else this machine alone"),
    ] = None,
    conf: Annotated[
        str | None,
        typer.Option(
            help="name in conf/, or path of a YAML file: what the run needs is checked too"
        ),
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--override", "-o", help="key=value, as in train.micro_batch_size=4"),
    ] = None,
    ssh_config: Annotated[
        Path | None, typer.Option(help="file that ssh reads instead of the user's own")
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(help="token files to check, PREFIX or their directory, instead of the conf's"),
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="of --tokens: entries of the vocabulary")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="leave the bandwidths between hosts out")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
    output: Annotated[Path | None, typer.Option(help="write the JSON to this file too")] = None,
    workspace: Annotated[
        Path | None,
        typer.Option(
            "--workspace", help="root of everything that was produced (MEGACORE_WORKSPACE)"
        ),
    ] = None,
) -> None:
    """Examine every machine of a job, in parallel.

    What is wrong, where, and what to do about it.
    """
    from rich.console import Console

    from megacore.artifact import Workspace
    from megacore.artifact.files import write_json
    from megacore.doctor.examine import examine
    from megacore.doctor.findings import show
    from megacore.doctor.subject import RunData, Subject, data_at, data_of

    launch, config = _launch(conf, override or [], {"hostfile": hostfile, "ssh_config": ssh_config})
    place = Workspace.of(workspace)
    data = RunData()
    if tokens is not None:
        data = data_at(tokens, vocab_size)
    elif config is not None:
        data = data_of(config, place)
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError(
            f"--output is {output}, and its directory does not exist: make it, or name another file"
        )
    examination = examine(Subject.of_launch(launch, place.root, config, data), full=not quick)
    if output is not None:
        write_json(output, examination.as_json())
    if as_json:
        sys.stdout.write(examination.as_text())
    else:
        show(examination, Console(width=None if sys.stdout.isatty() else 160))
    if examination.verdict == "error":
        raise typer.Exit(EXIT_CODE)


def _launch(
    conf: str | None, override: list[str], given: dict[str, Path | None]
) -> "tuple[LaunchConfig, RunConfig | None]":
    """What the configuration, changed by what the command line names, says of the hosts.

    Raises ConfigError.
    """
    from megacore.config import load_config
    from megacore.config.launch import LaunchConfig
    from megacore.config.load import parse_overrides

    changes = parse_overrides(override)
    named = {key: str(path) for key, path in given.items() if path is not None}
    if conf is not None:
        config = load_config(conf, changes | {f"launch.{key}": path for key, path in named.items()})
        return config.launch, config
    if changes:
        raise ConfigError(
            f"-o {next(iter(changes))} changes a configuration, and none is named: give --conf"
        )
    if named and "hostfile" not in named:
        raise ConfigError(
            f"--ssh-config is {named['ssh_config']}, and no host is reached without --hostfile: "
            "give both"
        )
    return LaunchConfig.model_validate(named), None
