"""`megacore doctor`: checks of the hosts of a run."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megacore.errors import ConfigError

if TYPE_CHECKING:
    from megacore.config import RunConfig
    from megacore.config.launch import LaunchConfig

EXIT_CODE = 11
"""Exit code of an examination that found an error."""


def doctor(
    hostfile: Annotated[
        Path | None,
        typer.Option(help="lines `host slots=N`, as in launch.hostfile; else only this machine"),
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
        int | None, typer.Option(min=1, help="for --tokens: entries of the vocabulary")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="do not measure bandwidths between hosts")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
    output: Annotated[Path | None, typer.Option(help="write the JSON to this file too")] = None,
    workspace: Annotated[
        Path | None,
        typer.Option("--workspace", help="root directory of all artifacts (MEGACORE_WORKSPACE)"),
    ] = None,
) -> None:
    """Examine every host of a job, in parallel.

    Report each problem, its place and its remedy.
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
    conf: str | None, override: list[str], path_options: dict[str, Path | None]
) -> "tuple[LaunchConfig, RunConfig | None]":
    """Return the launch options of the configuration and the command line, and the configuration.

    The second value is None without `conf`. Raises ConfigError.
    """
    from megacore.config import load_config
    from megacore.config.launch import LaunchConfig
    from megacore.config.load import parse_overrides

    changes = parse_overrides(override)
    paths = {key: str(path) for key, path in path_options.items() if path is not None}
    if conf is not None:
        config = load_config(conf, changes | {f"launch.{key}": path for key, path in paths.items()})
        return config.launch, config
    if changes:
        raise ConfigError(
            f"-o {next(iter(changes))} changes a configuration, and none is named: give --conf"
        )
    if paths and "hostfile" not in paths:
        raise ConfigError(
            f"--ssh-config is {paths['ssh_config']}, and no host is reached without --hostfile: "
            "give both"
        )
    return LaunchConfig.model_validate(paths), None
