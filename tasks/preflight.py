"""Before anything runs: is the configuration possible here, what is cached, what will it cost."""

import itertools
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from prefect import get_run_logger
from prefect.artifacts import create_table_artifact
from rich.console import Console
from rich.table import Table

from megacore.artifact import Artifact, StageKey, Workspace, open_artifact
from megacore.config import RunConfig, load_config
from megacore.convert.exportable import exportable
from megacore.errors import MegacoreError
from megacore.launch.job import RankJob
from megacore.launch.start import check_launcher, shown_commands
from megacore.plan.hardware import Hardware
from megacore.plan.preflight import preflight, resolve_launch
from megacore.plan.vocabulary import expected_vocab_size
from tasks._cache import artifact_directory, artifact_problem
from tasks._pipeline import numbered
from tasks._resume import check_resumed, tell_of_other_runs
from tasks._tokens import tokenize_key
from tasks.convert import convert_key
from tasks.download import collect_key, needs_punkt, punkt_key
from tasks.evaluate import evaluate_key
from tasks.index import index_key
from tasks.publish import publication_problem, publish_key
from tasks.tokenize import blend_key, tokenizer_key
from tasks.train import check_pretrained, run_directory, train_key, training_problem
from tasks.zeroshot import text_digests, zeroshot_key

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"


def load_checked_config(conf: str, overrides: Mapping[str, Any] | None, *, trains: bool = True) -> RunConfig:
    """Load `conf`, apply `overrides`, and refuse what cannot work on this machine.

    Raises ConfigError, ParallelLayoutError, WorkspaceError, LaunchError or ConversionError before any stage starts.
    """
    config = load_config(conf, overrides, conf_dir=CONF_DIR)
    Workspace.of()
    if trains:
        get_run_logger().info("preflight: %s", check_machine(config))
        tell_of_other_runs(config)
    return config


def check_machine(config: RunConfig) -> str:
    """Memory per rank and days of a training here, in one sentence.

    Raises ConfigError, ParallelLayoutError, LaunchError or ConversionError when it cannot work.
    """
    check_pretrained(config)
    check_resumed(config)
    check_launcher(config.launch)
    exportable(config)
    text_digests(config)
    return preflight(config, expected_vocab_size(config), Hardware.detect()).summary()


class PlannedStage(NamedTuple):
    """A line of the dry run."""

    name: str
    """The stage, numbered where there are several."""
    key_of: Callable[..., StageKey]
    inputs: tuple[str | tuple[str, ...] | None, ...] = ()
    """Names of the stages it reads, in the order of its task's arguments; None where it reads nothing."""

    @property
    def stage(self) -> str:
        """The stage's own name."""
        return self.name.partition(" ")[0]

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of all stages it reads."""
        groups = [(each,) if isinstance(each, str) else each or () for each in self.inputs]
        return tuple(itertools.chain.from_iterable(groups))


def planned_stages(config: RunConfig) -> list[PlannedStage]:
    """The stages of `pretrain` for this configuration, in order."""
    sources = config.data.sources
    several = len(sources) > 1
    corpora = tuple(numbered("collect", number) for number in range(len(sources)))
    members = tuple(numbered("tokenize", number) for number in range(len(sources)))
    punkt = "punkt" if needs_punkt(config) else None
    tokens = "blend" if several else members[0]
    data = (tokens, "tokenizer", "index")
    return [
        *(PlannedStage(name, partial(collect_key, source=one)) for name, one in zip(corpora, sources, strict=True)),
        PlannedStage("tokenizer", tokenizer_key, (corpora,)),
        *([PlannedStage("punkt", punkt_key)] if punkt else []),
        *(
            PlannedStage(name, tokenize_key, (corpus, "tokenizer", punkt))
            for name, corpus in zip(members, corpora, strict=True)
        ),
        *([PlannedStage("blend", blend_key, (members,))] if several else []),
        PlannedStage("index", index_key, (tokens,)),
        PlannedStage("train", train_key, data),
        PlannedStage("evaluate", evaluate_key, ("train", *data)),
        *(
            [PlannedStage("zeroshot", zeroshot_key, ("train", "evaluate", *data))]
            if config.evaluate.zero_shot.wanted
            else []
        ),
        PlannedStage("convert", convert_key, ("train", "evaluate", *data)),
        PlannedStage("publish", publish_key, ("train", "evaluate", "convert", *data)),
    ]


def dry_run_report(conf: str, overrides: Mapping[str, Any] | None) -> None:
    """Print (and store) each stage's key, whether it is cached, and what the training would cost; run nothing.

    A key is unknown until its inputs exist. What the machine cannot do is shown too, then raised.
    """
    config = load_checked_config(conf, overrides, trains=False)
    refusal: MegacoreError | None = None
    try:
        cost = check_machine(config)
    except MegacoreError as error:
        refusal, cost = error, str(error)
    known: dict[str, Artifact] = {}
    rows = [_planned_row(planned, config, known) for planned in planned_stages(config)]
    create_table_artifact(rows, key="dry-run", description=f"what {config.name} would do; {cost}")
    table = Table(title=f"dry run of {config.name}: nothing was started")
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print(f"training: {cost}", soft_wrap=True, highlight=False)
    if refusal is None:
        for line in launch_commands(config, known):
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    if refusal is not None:
        raise refusal


def launch_commands(config: RunConfig, known: Mapping[str, Artifact]) -> list[str]:
    """What would start the training on each host; the run's key is left open while its inputs are not there."""
    tokens = known.get("blend" if len(config.data.sources) > 1 else "tokenize")
    directory = Workspace.of().folder("train") / "<key>"
    if tokens is not None and "tokenizer" in known:
        directory = run_directory(config, tokens, known["tokenizer"])
    ranks, threads = resolve_launch(config, Hardware.detect())
    job = RankJob(exit_directory=str(directory / "exit"), ranks=ranks, threads_per_rank=threads)
    return ["launch:", *shown_commands(config.launch, "megacore.launch.pretrain", job, directory / "run.json")]


def _planned_row(planned: PlannedStage, config: RunConfig, known: dict[str, Artifact]) -> dict[str, str]:
    missing = [name for name in planned.reads if name not in known]
    if missing:
        return {"stage": planned.name, "key": f"known after {missing[0]}", "state": "would run", "why": "new input"}
    inputs: list[Any] = [
        tuple(known[name] for name in each) if isinstance(each, tuple) else known[each] if each else None
        for each in planned.inputs
    ]
    key = planned.key_of(config, *inputs)
    try:
        directory = artifact_directory(key)
        if planned.stage == "train":
            tokens, tokenizer, index = inputs
            directory = run_directory(config, tokens, tokenizer)
            problem = training_problem(config, tokens, tokenizer, index)
        elif planned.stage == "publish":
            problem = publication_problem(config, *inputs)
        else:
            problem = artifact_problem(key, config)
        if problem is None:
            known[planned.name] = open_artifact(directory)
    except MegacoreError as error:
        problem = str(error)
    state = "cached" if problem is None else "would run"
    return {"stage": planned.name, "key": key.key, "state": state, "why": problem or ""}
