"""Before anything runs: is the configuration possible here, what is cached, what will it cost."""

import sys
from collections.abc import Callable, Mapping
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
from megacore.plan.hardware import Hardware
from megacore.plan.preflight import expected_vocab_size, preflight
from tasks._cache import artifact_directory, artifact_problem
from tasks.convert import convert_key
from tasks.download import collect_key
from tasks.evaluate import evaluate_key
from tasks.index import index_key
from tasks.publish import publication_problem, publish_key
from tasks.tokenize import tokenize_key, tokenizer_key
from tasks.train import run_directory, train_key, training_problem

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"


def load_checked_config(conf: str, overrides: Mapping[str, Any] | None, *, trains: bool = True) -> RunConfig:
    """Load `conf`, apply `overrides`, and refuse what cannot work on this machine.

    Raises ConfigError, ParallelLayoutError, WorkspaceError or ConversionError before any stage starts.
    """
    config = load_config(conf, overrides, conf_dir=CONF_DIR)
    Workspace.of()
    if trains:
        get_run_logger().info("preflight: %s", check_machine(config))
    return config


def check_machine(config: RunConfig) -> str:
    """Memory per rank and days of a training here, in one sentence.

    Raises ConfigError, ParallelLayoutError or ConversionError when it cannot work.
    """
    exportable(config)
    return preflight(config, expected_vocab_size(config), Hardware.detect()).summary()


class PlannedStage(NamedTuple):
    """A line of the dry run."""

    stage: str
    key_of: Callable[..., StageKey]
    inputs: tuple[str, ...]


PLAN = (
    PlannedStage("collect", collect_key, ()),
    PlannedStage("tokenizer", tokenizer_key, ("collect",)),
    PlannedStage("tokenize", tokenize_key, ("collect", "tokenizer")),
    PlannedStage("index", index_key, ("tokenize",)),
    PlannedStage("train", train_key, ("tokenize", "tokenizer", "index")),
    PlannedStage("evaluate", evaluate_key, ("train", "tokenize", "tokenizer", "index")),
    PlannedStage("convert", convert_key, ("train", "evaluate", "tokenize", "tokenizer", "index")),
    PlannedStage("publish", publish_key, ("train", "evaluate", "convert", "tokenize", "tokenizer", "index")),
)
"""The stages of `pretrain` with the stages they read, in the order of their tasks' arguments."""


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
    rows = [_planned_row(planned, config, known) for planned in PLAN]
    create_table_artifact(rows, key="dry-run", description=f"what {config.name} would do; {cost}")
    table = Table(title=f"dry run of {config.name}: nothing was started")
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print(f"training: {cost}", soft_wrap=True, highlight=False)
    if refusal is not None:
        raise refusal


def _planned_row(planned: PlannedStage, config: RunConfig, known: dict[str, Artifact]) -> dict[str, str]:
    missing = [name for name in planned.inputs if name not in known]
    if missing:
        return {"stage": planned.stage, "key": f"known after {missing[0]}", "state": "would run", "why": "new input"}
    inputs = [known[name] for name in planned.inputs]
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
            known[planned.stage] = open_artifact(directory)
    except MegacoreError as error:
        problem = str(error)
    state = "cached" if problem is None else "would run"
    return {"stage": planned.stage, "key": key.key, "state": state, "why": problem or ""}
