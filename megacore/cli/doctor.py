"""`megacore doctor`: checks of the hosts of a run."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megacore.cli._options import check_output_file
from megacore.cli.workspace import WorkspaceOption
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
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="measure this host's devices for `megacore plan`, and write a hardware file: "
            "FILE, or conf/hardware/local.yaml",
        ),
    ] = False,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="hardware file of --calibrate")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
    output: Annotated[Path | None, typer.Option(help="write the JSON to this file too")] = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Examine every host of a job, in parallel.

    Report each problem, its place and its remedy.
    """
    if calibrate:
        others = {
            "--hostfile": hostfile,
            "--conf": conf,
            "--ssh-config": ssh_config,
            "--tokens": tokens,
            "--vocab-size": vocab_size,
            "--override": override,
            "--quick": quick or None,
            "--json": as_json or None,
            "--output": output,
        }
        _calibrate(file, workspace, [name for name, value in others.items() if value])
        return
    if file is not None:
        raise ConfigError(f"{file} is given without --calibrate, which writes it: add the option")

    if vocab_size is not None and tokens is None:
        raise ConfigError(
            f"--vocab-size is {vocab_size}, and is only for --tokens: give both, or neither"
        )

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
    if output is not None:
        check_output_file(output, "--output")
    examination = examine(Subject.of_launch(launch, place.root, config, data), full=not quick)
    if output is not None:
        write_json(output, examination.as_json())
    if as_json:
        sys.stdout.write(examination.as_text())
    else:
        show(examination, Console(width=None if sys.stdout.isatty() else 160, emoji=False))
    if examination.verdict == "error":
        raise typer.Exit(EXIT_CODE)


def _calibrate(file: Path | None, workspace: Path | None, others: list[str]) -> None:
    """Write the hardware file of this host, and print its name and main rates.

    Raises ConfigError, LaunchError or FileAccessError.
    """
    from megacore.artifact import Workspace
    from megacore.doctor.calibrate import calibrate
    from megacore.plan.machine import HARDWARE_DIR, LOCAL_FILE

    if others:
        raise ConfigError(
            f"{others[0]} has no effect with --calibrate, which measures only this host: leave one "
            "of them out"
        )
    path = file or HARDWARE_DIR / LOCAL_FILE
    check_output_file(path, "the hardware file")
    machine = calibrate(path, Workspace.of(workspace).root)
    rates = ", ".join(f"{name} {rate:.4g} TFLOP/s" for name, rate in machine.tflops.items())
    sys.stdout.write(
        f"{path}: {machine.name}, {machine.devices_per_node} of them, {rates}, memory "
        f"{machine.memory_gbs:.4g} GB/s, links {machine.node.gbs:.4g} GB/s\n"
    )


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
