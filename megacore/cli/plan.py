"""`megacore plan`: division of a model over ranks, its predicted time, and the fastest layout."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megacore.cli._terminal import write_line, write_table
from megacore.errors import ConfigError, HostsSilentError
from megacore.observe.logging import counted

if TYPE_CHECKING:
    from rich.table import Table

    from megacore.config.run import RunConfig
    from megacore.hardware import Hardware
    from megacore.plan.machine import Machine
    from megacore.plan.prediction import Prediction
    from megacore.plan.search_result import SearchResult

_ONE_DEVICE = {
    "train.micro_batch_size": 1,
    "parallel.tensor_model_parallel_size": 1,
    "parallel.sequence_parallel": False,
    "parallel.context_parallel_size": 1,
    "parallel.pipeline_model_parallel_size": 1,
    "parallel.virtual_pipeline_model_parallel_size": 1,
    "parallel.pipeline_partition": "balanced",
    "parallel.delay_weight_gradients": False,
    "parallel.data_parallel_sharding": "none",
    "launch.nproc_per_node": "auto",
}
"""Layout that every model and batch can have."""
_TOP = 10
_MOST_GPUS = 1_000_000
"""Most GPUs of a search, ten times those of the largest cluster; it takes seconds."""


def plan(
    conf: Annotated[
        str | None, typer.Argument(help="name in conf/, or path of a YAML file")
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--override", "-o", help="key=value, as in parallel.pipeline_schedule=gpipe"),
    ] = None,
    draw: Annotated[
        Path | None, typer.Option(help="write the schedule as a picture: FILE.svg or FILE.png")
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            help="name in conf/hardware/, or path of a YAML file; default: that of the hosts of "
            "launch.hostfile, else this machine's"
        ),
    ] = None,
    search: Annotated[bool, typer.Option("--search", help="find the fastest layouts")] = False,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, max=_MOST_GPUS, help="with --search: number of GPUs, or of CPU cores"),
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0, help="with --search: price of a GPU for an hour")
    ] = None,
    top: Annotated[
        int | None, typer.Option(min=1, help=f"with --search: layouts to show; default {_TOP}")
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(help="with --search: write the fastest layout as a new configuration"),
    ] = None,
    chart: Annotated[
        Path | None,
        typer.Option(help="with --search: draw time against memory, as FILE.svg or FILE.png"),
    ] = None,
    table: Annotated[
        Path | None, typer.Option(help="predict the runs of a CSV file instead; needs --output")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="with --table: CSV file to write")] = None,
) -> None:
    """Show the division of a model over pipeline stages and its time, or find a faster one.

    The tables include memory, the pipeline bubble, and the predicted time of an iteration by part.
    """
    searching = {"--gpus": gpus, "--price": price, "--top": top, "--write": write, "--chart": chart}
    _check_options(
        conf,
        table,
        {"--override": override or None, "--draw": draw, "--hardware": hardware}
        | {"--search": search or None}
        | searching,
    )
    if table is not None or output is not None:
        _predict_table(table, output)
        return
    from megacore.config import load_config
    from megacore.config.load import parse_overrides

    assert conf is not None
    overrides = parse_overrides(override or [])
    if search:
        _check_search(gpus, draw, chart, write)
        config, overrides = _searchable(conf, overrides)
        if write is not None:
            _check_slots(config, gpus or 1)
        result = _searched(config, hardware, gpus or 1, top=top or _TOP, front=chart is not None)
        write_table(result.table(price))
        write_line(result.summary())
        if chart is not None:
            from megacore.plan.draw import draw_search

            write_line(f"wrote {draw_search(result, chart, config.name)}")
        if write is not None:
            write_line(_write_layout(conf, overrides, config, result, write))
        return
    extra = [name for name, value in searching.items() if value is not None]
    if extra:
        raise ConfigError(f"{', '.join(extra)} given without --search: add it, or remove them")
    _show(load_config(conf, overrides), hardware, draw)


def _check_options(conf: str | None, table: Path | None, others: Mapping[str, Any]) -> None:
    """Raise ConfigError unless exactly one of CONF and --table is given, with its options."""
    if (conf is None) == (table is None):
        raise ConfigError(
            "give either the name of a configuration, as in `megacore plan gpt2-tiny`, or "
            f"--table FILE.csv{'' if conf is None else ', not both'}"
        )
    extra = [name for name, value in others.items() if value is not None]
    if table is not None and extra:
        raise ConfigError(f"{', '.join(extra)} given with --table, whose rows say it: remove them")


def _check_search(
    gpus: int | None, draw: Path | None, chart: Path | None, write: Path | None
) -> None:
    """Raise ConfigError for options that a search cannot fulfil, before it begins."""
    from megacore.cli._options import check_output_file
    from megacore.cli.init import check_new
    from megacore.plan.draw import check_drawable

    if gpus is None:
        raise ConfigError("--search needs the number of GPUs, as in --gpus 1024")
    if draw is not None:
        raise ConfigError("--draw shows the schedule of one layout: use --chart with --search")
    if chart is not None:
        check_drawable(chart, "--chart")
        check_output_file(chart, "--chart")
    if write is not None:
        check_new(write, "--write")


def _predict_table(table: Path | None, output: Path | None) -> None:
    from megacore.cli._options import check_output_file
    from megacore.plan.table import predict_table

    if table is None:
        raise ConfigError("--output given without --table: name the table of runs to predict")
    if output is None:
        raise ConfigError("--table needs --output FILE.csv, the table with the predictions")
    check_output_file(output, "--output")
    rows, refused = predict_table(table, output)
    write_line(f"{counted(rows, 'row')}, {refused} refused, wrote {output}")


def _show(config: "RunConfig", name: str | None, picture: Path | None) -> None:
    """Print the plan of one layout with its predicted time, or draw its schedule."""
    from megacore.cli._options import check_output_file
    from megacore.plan import draw as pictures
    from megacore.plan.machine import load_machine
    from megacore.plan.pipeline import plan_pipeline
    from megacore.plan.vocabulary import expected_vocab_size

    if picture is not None:
        pictures.check_drawable(picture)
        check_output_file(picture, "--draw")
    machine = None if name is None else load_machine(name)
    hardware = _hardware_of_hosts(config) if machine is None else _hardware_of(machine, config)
    vocab_size = expected_vocab_size(config.data.tokenizer)
    planned = plan_pipeline(config, vocab_size, hardware, machine)
    if picture is not None:
        pictures.draw(planned.timeline, picture, planned.name)
        write_line(f"wrote {picture}")
        return
    write_line(planned.summary())
    write_table(planned.table())
    if planned.lighter is not None:
        write_line(planned.lighter)
    if planned.faster is not None:
        write_line(planned.faster)
    run, ranks = planned.time, planned.layout.world_size
    precision = hardware.resolve_precision(config.train.precision)
    write_line(
        f"predicted time of an iteration on {ranks} x {run.hardware}"
        f"{'' if hardware.host is None else f' of {hardware.owner}'} in {precision}: "
        f"{run.iteration.seconds:.4g} s, of {config.train.train_iters:,} iterations with "
        f"validations {run.duration}"
    )
    write_table(_time_table(run.iteration))
    if config.data.seq_length_schedule is not None:
        write_line(
            f"all numbers are at data.seq_length {config.data.seq_length}: the shorter sequences "
            "of data.seq_length_schedule have as many tokens per batch, take less time for "
            "attention, and need no more memory"
        )
    if not hardware.gpus:
        write_line(
            f"memory is that of CPU ranks in {precision}"
            f"{f': {hardware.owner} has no GPU' if name is None else ''}"
        )
    if name is None and config.launch.has_scheduler:
        write_line(_unseen(config.launch.kind))


def _time_table(prediction: "Prediction") -> "Table":
    """Return a table of the parts of an iteration; rare ones only if they take time."""
    from dataclasses import asdict

    from rich.table import Table

    table, parts = Table(), asdict(prediction)
    for rare in ("context", "embedding"):
        if not parts[rare]:
            del parts[rare]
    for part in parts:
        table.add_column(part, justify="right")
    table.add_row(*(f"{seconds:.4g} s" for seconds in parts.values()))
    table.add_row(*(f"{seconds / prediction.seconds:.1%}" for seconds in parts.values()))
    return table


def _hardware_of_hosts(config: "RunConfig") -> "Hardware":
    """Return the hardware by which a start of the run is judged, too.

    Raises HostsSilentError if no host of the hostfile answers.
    """
    from megacore.cluster.hosts.hardware import hardware_of

    try:
        return hardware_of(config.launch)
    except HostsSilentError as error:
        raise HostsSilentError(f"{error}, or name their hardware with --hardware") from error


def _unseen(scheduler: str) -> str:
    return (
        f"the hosts of {scheduler} are not known before a job starts: time and memory are those of "
        "this machine's devices; name the hosts' with --hardware"
    )


def _hardware_of(machine: "Machine", config: "RunConfig") -> "Hardware":
    """Return hardware for the ranks of one replica on a machine other than this one."""
    from megacore.hardware import Gpu, Hardware

    memory = int(machine.memory_gib * 2**30)
    ranks = config.parallel.ranks_per_replica
    gpus = (Gpu(machine.name, memory, machine.processors),) * ranks
    if machine.device == "cpu":
        gpus = ()
    host = memory * machine.devices_per_node
    return Hardware(machine.devices_per_node, host, gpus, native_bf16=machine.native_bf16)


def _searched(
    config: "RunConfig", name: str | None, gpus: int, *, top: int, front: bool
) -> "SearchResult":
    """Return the result of the search for a layout of a configuration."""
    from megacore.plan.machine import load_machine, machine_of
    from megacore.plan.search import search
    from megacore.plan.vocabulary import expected_vocab_size

    if name is None:
        hardware = _hardware_of_hosts(config)
        machine = machine_of(hardware, hardware.resolve_precision(config.train.precision))
        if hardware.host is not None:
            write_line(f"the devices are those of {hardware.owner} of {config.launch.hostfile}")
        elif config.launch.has_scheduler:
            write_line(_unseen(config.launch.kind))
    else:
        machine = load_machine(name)
    vocab_size = expected_vocab_size(config.data.tokenizer)
    return search(config, vocab_size, machine, gpus, top=top, front=front)


def _searchable(conf: str, overrides: Mapping[str, Any]) -> tuple["RunConfig", dict[str, Any]]:
    """Return the configuration whose layout is searched, and its overrides.

    A layout of the file that contradicts an override, such as that of the batch, is replaced: the
    search chooses another one. Raises ConfigError, which names an override of a value that the
    search chooses itself.
    """
    from megacore.config import load_config
    from megacore.plan.search_result import CHOSEN

    try:
        return load_config(conf, overrides), dict(overrides)
    except ConfigError as error:
        for stage in ({}, {"deepspeed.zero_stage": 1}):
            others = {**_ONE_DEVICE, **stage, **overrides}
            with contextlib.suppress(ConfigError):
                return load_config(conf, others), others
        for key in CHOSEN:
            if key in overrides and key in str(error):
                raise ConfigError(
                    f"{error}; --search chooses {key} itself: leave -o {key} out"
                ) from error
        raise


def _check_slots(config: "RunConfig", gpus: int) -> None:
    """Raise ConfigError if a hostfile starts another number of ranks than is searched for."""
    from megacore.config.hostfile import hosts_of

    slots = sum(hosts_of(config.launch).values())
    if slots and slots != gpus:
        raise ConfigError(
            f"--gpus is {gpus} and {config.launch.hostfile} has {slots} slots, which a run of the "
            f"written configuration would start: give --gpus {slots}, or another launch.hostfile"
        )


def _write_layout(
    conf: str,
    overrides: Mapping[str, Any],
    config: "RunConfig",
    result: "SearchResult",
    target: Path,
) -> str:
    """Write a configuration with the fastest layout, and return a sentence about it."""
    import yaml

    from megacore.cli.init import check_new, write_new
    from megacore.config import load_config
    from megacore.config.load import conf_path
    from megacore.foreign.files import nested
    from megacore.plan.search import launch_values

    best, machine = result.best[0], result.machine
    chosen = best.choice.values(config) | launch_values(config, machine, result.ranks)
    values = {**overrides, **chosen}
    hosts = -(-result.ranks // machine.devices_per_node)
    named = config.launch.hostfile is not None or config.launch.has_scheduler
    hostfile = None if named or hosts == 1 else target.with_suffix(".hosts")
    if hostfile is not None:
        values["launch.hostfile"] = str(hostfile)
        check_new(hostfile, "--write")
    load_config(conf, values)  # a value that the file could not have is refused before it exists
    base = os.path.relpath(conf_path(conf).resolve(), target.parent.resolve())
    comment = (
        f"# The fastest of {result.total:,} layouts on {result.ranks:,} x {machine.name}: "
        f"{best.seconds:.4g} s for an iteration\n"
        f"# predicted, {best.memory / 2**30:.1f} GiB on the rank that needs most.\n"
    )
    text = yaml.safe_dump({"extends": base} | nested(values), sort_keys=False, width=100)
    advice = ""
    if hostfile is not None:
        write_new(hostfile, _hosts(result.ranks, machine.devices_per_node), "--write")
        advice = f", and {hostfile}: replace its {hosts:,} names before a start"
    write_new(target, comment + text, "--write")
    return f"wrote {target}, which extends {base}{advice}"


def _hosts(ranks: int, slots: int) -> str:
    """Return a hostfile for `ranks` ranks whose names are to be replaced."""
    full, rest = divmod(ranks, slots)
    sizes = [slots] * full + [rest] * (rest > 0)
    lines = (f"host-{number} slots={size}" for number, size in enumerate(sizes, 1))
    return "\n".join(["# Replace the names by those of the hosts.", *lines, ""])
