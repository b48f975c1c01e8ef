"""`megacore plan`: division of a configuration's model over ranks."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def plan(
    conf: Annotated[str, typer.Argument(help="name in conf/, or path of a YAML file")],
    override: Annotated[
        list[str] | None,
        typer.Option("--override", "-o", help="key=value, as in parallel.pipeline_schedule=gpipe"),
    ] = None,
    draw: Annotated[
        Path | None, typer.Option(help="write the schedule as a picture: FILE.svg or FILE.png")
    ] = None,
) -> None:
    """Show the division of a model over pipeline stages, or draw its schedule.

    The table includes memory and the pipeline bubble.
    """
    from rich.console import Console

    from megacore.config import load_config
    from megacore.config.load import parse_overrides
    from megacore.hardware import Hardware
    from megacore.plan import draw as pictures
    from megacore.plan.pipeline import plan_pipeline
    from megacore.plan.vocabulary import expected_vocab_size

    if draw is not None:
        pictures.check_drawable(draw)
    config = load_config(conf, parse_overrides(override or []))
    hardware = Hardware.detect()
    planned = plan_pipeline(config, expected_vocab_size(config.data.tokenizer), hardware)
    if draw is not None:
        pictures.draw(planned.timeline, draw, planned.name)
        Console().print(f"wrote {draw}", soft_wrap=True)
        return
    Console().print(planned.summary(), soft_wrap=True)
    Console(width=None if sys.stdout.isatty() else 200).print(planned.table())
    if planned.lighter is not None:
        Console().print(planned.lighter, soft_wrap=True)
    if not hardware.gpus:
        precision = hardware.resolve_precision(config.train.precision)
        Console().print(
            f"memory is that of CPU ranks in {precision}: this machine has no GPU", soft_wrap=True
        )
