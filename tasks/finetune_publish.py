"""Stage `finetune-publish`: the run, its checkpoints and the fine-tuned model in MLflow.

The model is tagged with its parent.
"""

import re
import textwrap
from pathlib import Path
from typing import Any

from megacore.artifact import Artifact, Manifest, StageKey
from megacore.config.finetune import FinetuneConfig
from megacore.config.finetune_task import (
    ClassificationConfig,
    best_metric,
    classification_settings,
)
from megacore.config.keys import key_parameters
from megacore.finetune.metrics import ANSWERS_NAME, read_answers
from tasks._aliases import Measurement
from tasks._cache import StageResult, stage_task
from tasks._mlflow import RunFacts, Tracking
from tasks._parent import Parent, parent_of
from tasks._publication import (
    build_publication,
    publication_check,
    result_lines,
    run_url,
    shown_by,
)
from tasks._registry import publish_model
from tasks.finetune import run_facts

VERSION = 2
_CELL_LENGTH = 160
"""Characters of a text in the table of answers."""


def publish_key(
    config: FinetuneConfig,
    pretrained: Artifact,
    examples: Artifact,
    finetuned: Artifact,
    exported: Artifact,
) -> StageKey:
    """Return the key of a publication: its inputs, the registered name and the parent."""
    resolved = {"registered_model": config.registered_model, "parent": parent_of(config).tags()}
    parameters = key_parameters(config, "finetune-publish", resolved)
    return StageKey.of(
        "finetune-publish",
        VERSION,
        parameters,
        pretrained=pretrained,
        examples=examples,
        finetuned=finetuned,
        exported=exported,
    )


@stage_task("finetune-publish", publish_key, check=publication_check(publish_key))
def finetune_publish(
    config: FinetuneConfig,
    pretrained: Artifact,
    examples: Artifact,
    finetuned: Artifact,
    exported: Artifact,
) -> StageResult:
    """Send the missing parts of the run to MLflow; register the exported model."""
    directory, counts = finetuned.directory, finetuned.counts

    def send(tracking: Tracking, run_id: str) -> dict[str, str]:
        return publish_model(
            tracking,
            run_id,
            exported.directory,
            config.registered_model,
            digest=exported.digest,
            iteration=int(counts["best_iteration"]),
            metrics={
                **{f"valid_{name}": value for name, value in counts["metrics"].items()},
                **{f"test_{name}": value for name, value in (counts["test_metrics"] or {}).items()},
            },
            tags={
                "run": directory.name,
                "export": exported.key,
                "examples": examples.key,
                "pretrained": pretrained.key,
                **parent_of(config).tags(),
            },
            measurement=measurement(config, examples, counts),
            force_alias=config.tracking.force_alias,
            pairs=isinstance(config.task, ClassificationConfig)
            and classification_settings(config.task).sentence2 is not None,
        )

    key = publish_key(config, pretrained, examples, finetuned, exported)

    def facts() -> RunFacts:
        return run_facts(config, directory.name, examples, parent_of(config).tags())

    return build_publication(config, key, directory, facts, send)


def measurement(
    config: FinetuneConfig, examples: Artifact, counts: dict[str, Any]
) -> Measurement | None:
    """Return the metric that selects the best model, on the test split; None without that split.

    Fine-tunings are comparable if the tokenized test split and the options of the task are equal.
    """
    name, larger_is_better = best_metric(config.task, config.train.best_metric)
    tested = counts["test_metrics"] or {}
    if name not in tested:
        return None
    files = Manifest.read(examples.directory).files
    content = {
        "metric": name,
        "task": config.task.model_dump(mode="json"),
        "test": {path: entry.sha256 for path, entry in files.items() if path.startswith("test/")},
    }
    return Measurement.of(f"test_{name}", tested[name], content, larger_is_better=larger_is_better)


def outcome(
    config: FinetuneConfig, finetuned: Artifact, exported: Artifact, published: Artifact
) -> str:
    """Return the final markdown of the flow.

    It shows each metric before and after, the best epoch, and the locations of the results.
    """
    counts, parent = finetuned.counts, parent_of(config)
    name = counts["metric"]
    before, after = counts["start_metrics"], counts["metrics"]
    tested = counts["test_metrics"] or {}
    best_epoch = counts["epochs"] * counts["best_iteration"] / counts["iterations"]
    rows = [
        (
            f"| {key} | {before[key]:.4f} | {after[key]:.4f} | "
            f"{f'{tested[key]:.4f}' if key in tested else '-'} |"
        )
        for key in sorted(after)
        if key in before
    ]
    lines = [
        (
            f"## {config.name}: validation {name} {after[name]:.4f}, {before[name]:.4f} before "
            "training"
        ),
        "",
        "| | validation, before | validation, best model | test, best model |",
        "| --- | ---: | ---: | ---: |",
        *rows,
        "",
        (
            f"Best after {round(best_epoch, 2):g} of {counts['epochs']:g} epochs, at step "
            f"{counts['best_iteration']} of {counts['iterations']}."
        ),
        "",
        *_answer_lines(finetuned.directory, int(counts["best_iteration"])),
        f"- begun with: {_initial_model_link(config, parent)}",
        *result_lines(
            Tracking.of(config), finetuned.directory, exported.directory, published.directory
        ),
    ]
    return "\n".join(lines)


def _answer_lines(directory: Path, iteration: int) -> list[str]:
    """Return the texts that the best model generated for validation samples as markdown."""
    answers = read_answers(directory / ANSWERS_NAME, iteration)
    if not answers:
        return []
    rows = [f"| {' | '.join(map(_cell, answer))} |" for answer in answers]
    return ["| question | reference | answer |", "| --- | --- | --- |", *rows, ""]


def _cell(text: str) -> str:
    """Return a text as one cell of a markdown table."""
    shown = textwrap.shorten(text, _CELL_LENGTH, placeholder=" …")
    return re.sub(r"([\\`*_{}\[\]<>|])", r"\\\1", shown)


def _initial_model_link(config: FinetuneConfig, parent: Parent) -> str:
    """Return the parent as markdown, linked to its training run if a server shows it."""
    description = (
        f"`{parent.model}`" if parent.name is None else f"`models:/{parent.name}/{parent.version}`"
    )
    if config.model.random_weights:
        description = f"random weights, shape and tokenizer of {description}"
    if parent.run_id is None:
        return description
    tracking = Tracking.of(config)
    server = shown_by(tracking)
    run = (
        parent.run_id
        if server is None
        else f"[{parent.run_id}]({run_url(tracking, server, parent.run_id)})"
    )
    return f"{description} of MLflow run {run}"
