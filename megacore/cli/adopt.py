"""`megacore adopt`: a configuration from scripts and settings of other programs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megacore.errors import AdoptionError, ConfigError
from megacore.observe.logging import counted

if TYPE_CHECKING:
    from megacore.adopt.adopt import Adoption
    from megacore.adopt.rules import Draft

_SHOWN = 40
"""Most lines of a list in the report."""


def adopt(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="a shell script of Megatron-LM or Megatron-DeepSpeed, YAML files of GPT-NeoX, a "
            "YAML of nanotron or Accelerate, DeepSpeed's JSON; files of one run together"
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(help="file to write; default: conf/NAME.yaml in a clone")
    ] = None,
    partial: Annotated[
        bool,
        typer.Option(
            "--partial", help="write the file without refused features, listed at its top"
        ),
    ] = False,
    run: Annotated[
        bool, typer.Option("--run", help="start the flow pretrain with the written file")
    ] = False,
    values: Annotated[
        list[str] | None,
        typer.Option("--set", help="value of a script's variable, as in DATA_PATH=/data/a or 1=/c"),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="number of GPUs, where the files do not say it")
    ] = None,
    program: Annotated[
        str | None,
        typer.Option(
            help="megatron, megatron-deepspeed, neox, nanotron, accelerate or deepspeed, where the "
            "files do not say which one reads them"
        ),
    ] = None,
) -> None:
    """Write one commented configuration from the files of another program's run.

    Each flag or key becomes a value, is listed as without effect, or is refused with the nearest
    thing. Nothing is executed. With refused features nothing is written, unless --partial is given,
    and the exit status is 13.
    """
    from megacore.adopt.adopt import adopt as translate
    from megacore.adopt.read import PROGRAMS
    from megacore.cli.init import check_new, next_commands, write_new

    if program is not None and program not in PROGRAMS:
        raise ConfigError(f"--program is {program}: give one of {', '.join(PROGRAMS)}")
    result = translate(files, _given(values or []), program=program, ranks=ranks, partial=partial)
    shown = ", ".join(map(str, files))
    if result.draft is None:
        raise ConfigError(f"{shown}: nothing to adopt. {result.other}")
    target = output or _default(result.name)
    _check_missing(result.draft, shown)
    if result.text:
        check_new(target, "--output")
    _report(result)
    refused = len(result.draft.refused)
    features = f"{counted(refused, 'feature')} of {shown} "
    features += "are refused" if refused != 1 else "is refused"
    if not result.text:
        hint = "--partial writes the rest" if not partial else "the rest is no valid configuration"
        raise AdoptionError(f"{features}, see above: {hint}")
    write_new(target, result.text, "--output")
    sys.stdout.write(f"wrote {target}\n")
    if run:
        _run(target, result.draft)
    else:
        if result.draft.questions:
            sys.stdout.write(f"first answer the questions marked with ? in {target}, then\n")
        sys.stdout.write(next_commands(target))
    if refused:
        raise AdoptionError(f"{features} and not in {target}")


def _given(pairs: list[str]) -> dict[str, str]:
    values = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise ConfigError(f"--set {pair!r} is not NAME=VALUE, as in DATA_PATH=/data/corpus")
        values[name] = value
    return values


def _default(name: str) -> Path:
    from megacore.cli.init import in_clone
    from megacore.config.load import CONF_DIR

    return (CONF_DIR if in_clone() else Path()) / f"{name}.yaml"


def _check_missing(draft: "Draft", shown: str) -> None:
    if not draft.missing:
        return
    lines = "; ".join(f"{setting} for {name}" for setting, name in draft.missing[:_SHOWN])
    raise ConfigError(
        f"{shown}: values are missing: {lines}: give those of a script's variables with --set "
        "NAME=VALUE, and write the others into the file, or give the file that has them"
    )


def _report(result: "Adoption") -> None:
    """Print what became of the settings."""
    draft = result.draft
    assert draft is not None
    lines = []
    if draft.refused:
        lines.append("refused:")
        lines += [f"  {refused.text}" for refused in draft.refused]
    if draft.questions:
        lines.append("questions, marked with ? in the file:")
        lines += [f"  {name}: {question}" for name, question in draft.questions]
    remarks = [*(result.settings.remarks if result.settings else []), *draft.remarks]
    if remarks:
        lines.append("remarks:")
        lines += [f"  {remark}" for remark in dict.fromkeys(remarks)]
    lines.append(
        f"{counted(len(draft.values), 'value')}, "
        f"{counted(len(draft.without_effect), 'setting')} without effect here, "
        f"{len(draft.refused)} refused"
    )
    if result.comparison is not None:
        lines.append(result.comparison.text)
    sys.stdout.write("\n".join(lines) + "\n")


def _run(target: Path, draft: "Draft") -> None:
    """Start the flow in the clone, and end with its exit status if it fails."""
    import subprocess

    from megacore.cli.init import clone_directory

    if draft.questions:
        names = ", ".join(name for name, _ in draft.questions)
        raise ConfigError(
            f"{target} is written and not started: it has questions ({names}): answer them there, "
            f"then start the flow with --conf {target}"
        )
    clone = clone_directory()
    if clone is None:
        raise ConfigError(
            f"{target} is written and not started: --run needs a clone of megacore, which has the "
            "flows; clone it, and start python -m flows.pretrain --conf FILE there"
        )
    command = [sys.executable, "-m", "flows.pretrain", "--conf", str(target.absolute())]
    sys.stdout.flush()
    status = subprocess.run(command, cwd=clone, check=False).returncode
    if status:
        raise typer.Exit(status if status > 0 else 128 - status)
