"""Stage `publish`: the run, its checkpoints and the exported model in MLflow."""

import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prefect import get_run_logger

from megacore.artifact import Artifact, StageKey
from megacore.artifact.files import replace_file, workspace_errors
from megacore.artifact.workspace import EVENTS_FILE, SAMPLE_FILE
from megacore.config import RunConfig
from megacore.config.keys import key_parameters
from megacore.observe.logging import short_number
from megacore.paths import exists
from megacore.token_files.indexed_dataset import token_prefixes
from tasks._aliases import Measurement
from tasks._cache import StageResult, fresh_scratch, stage_task
from tasks._checkpoint_models import (
    Datasets,
    log_losses_by_position,
    log_perplexities,
    log_scores,
)
from tasks._mlflow import STORE_ERRORS, Tracking
from tasks._plots import LENGTHS_FILE, plot_run
from tasks._publication import REPORT, build_publication, publication_check, result_lines
from tasks._registry import publish_model
from tasks._run_history import RunHistory
from tasks._stage_runner import numbered
from tasks.contamination import REPORT as CONTAMINATION
from tasks.contamination import contamination_metrics, contamination_rows, withheld
from tasks.contamination import warnings as contamination_warnings
from tasks.evaluate import REPORT as EVALUATION
from tasks.evaluate import (
    evaluation_summary,
    log_score,
    measured_data,
    perplexities_of,
    read_evaluation,
)
from tasks.index import RunData, epochs_summary, split_datasets
from tasks.lm_eval import scores_of
from tasks.train import run_facts
from tasks.zeroshot import named_scores, read_scores, shown_scores, without_hidden

if TYPE_CHECKING:
    from tasks._report import ReportFacts

VERSION = 2
METRICS = (
    "valid_ppl",
    "test_ppl",
    "unigram_valid_ppl",
    "unigram_test_ppl",
    "valid_sop_loss",
    "test_sop_loss",
    "valid_nsp_loss",
    "test_nsp_loss",
)
"""Metrics of the exported model: its perplexities, and the losses of BERT's binary head."""


def publish_key(
    config: RunConfig,
    trained: Artifact,
    evaluation: Artifact,
    export: Artifact,
    data: RunData[Artifact],
    scored: tuple[Artifact, ...] = (),
    contamination: Artifact | None = None,
) -> StageKey:
    """Return the key of a publication: its inputs and the registered name."""
    parameters = key_parameters(config, "publish", {"registered_model": config.registered_model})
    scores = {f"{each.stage} {each.counts['checkpoint']}": each for each in scored}
    if contamination is not None:
        scores["contamination"] = contamination
    return StageKey.of(
        "publish",
        VERSION,
        parameters,
        trained=trained,
        evaluation=evaluation,
        export=export,
        tokens=data.tokens,
        **scores,
    )


@dataclass(frozen=True)
class _Inputs:
    """Artifacts of a publication."""

    trained: Artifact
    evaluation: Artifact
    export: Artifact
    data: RunData[Artifact]
    scored: tuple[Artifact, ...]
    """Scores of the stages zeroshot and lm-eval, by iteration."""
    contamination: Artifact | None


@stage_task("publish", publish_key, check=publication_check(publish_key))
def publish(
    config: RunConfig,
    trained: Artifact,
    evaluation: Artifact,
    export: Artifact,
    data: RunData[Artifact],
    scored: tuple[Artifact, ...] = (),
    contamination: Artifact | None = None,
) -> StageResult:
    """Send the missing parts of the run to MLflow; register the exported model.

    `scored` are the scores of the stages zeroshot and lm-eval, by iteration. Those of evaluation
    sets that `contamination` withholds are left out.
    """
    inputs = _Inputs(trained, evaluation, export, data, scored, contamination)
    key = publish_key(config, trained, evaluation, export, data, scored, contamination)
    result = build_publication(
        config,
        key,
        trained.directory,
        lambda: run_facts(config, trained.directory.name, data),
        lambda tracking, run_id: _send(config, tracking, run_id, inputs),
    )
    tracking, datasets = Tracking.of(config), split_datasets(config, data)
    if tracking.keeps_answers:  # the scores are there, which the next run then knows without mlflow
        with suppress(*STORE_ERRORS):
            for row in read_evaluation(evaluation)["checkpoints"]:
                log_score(tracking, result.artifact.counts["run_id"], row, datasets)
    return result


def _send(config: RunConfig, tracking: Tracking, run_id: str, inputs: _Inputs) -> dict[str, str]:
    """Write the report, send what MLflow lacks, and register the model; return the receipt."""
    from tasks._report import write_report

    trained, evaluation, export = inputs.trained, inputs.evaluation, inputs.export
    tokens, contamination = inputs.data.tokens, inputs.contamination
    scratch = fresh_scratch(trained.directory, f"publish-{export.key}")
    history = RunHistory(trained.directory / EVENTS_FILE)
    pictures = [
        *plot_run(history, scratch, config.name),
        *_length_pictures(tokens, scratch),
    ]
    facts = _report_facts(config, run_id, inputs)
    page = write_report(scratch / REPORT, trained.directory.name, history, facts)
    with workspace_errors(trained.directory):
        replace_file(trained.directory / REPORT, page.read_bytes())
    datasets = split_datasets(config, inputs.data)
    _log_evaluation(config, tracking, run_id, inputs, datasets)
    counts = evaluation.counts
    return publish_model(
        tracking,
        run_id,
        export.directory,
        config.registered_model,
        digest=export.digest,
        iteration=counts["iteration"],
        metrics={
            **{name: counts[name] for name in METRICS if name in counts},
            **facts.lm_eval.get(counts["iteration"], {}),
            **contamination_metrics(contamination),
        },
        tags={
            "run": trained.directory.name,
            "evaluate": evaluation.key,
            "convert": export.key,
            "tokenize": tokens.key,
        },
        datasets=datasets,
        measurement=Measurement.of(
            "test_ppl", counts["test_ppl"], measured_data(config, tokens, inputs.data.tokenizer)
        ),
        force_alias=config.tracking.force_alias,
        pictures=pictures,
        report=page,
    )


def _report_facts(config: RunConfig, run_id: str, inputs: _Inputs) -> "ReportFacts":
    """Return what the report shows besides the run's history."""
    from tasks._report import ReportFacts

    contamination, scored = inputs.contamination, inputs.scored
    hidden = withheld(config, contamination)
    searches = () if contamination is None else (contamination,)
    data = (inputs.data.tokenizer, inputs.data.tokens, inputs.data.index)
    outputs = (inputs.trained, inputs.evaluation, inputs.export)
    return ReportFacts(
        config=config,
        evaluation=read_evaluation(inputs.evaluation),
        exported=inputs.evaluation.counts["iteration"],
        sample=read_sample(inputs.export),
        artifacts=(*data, *searches, *outputs, *scored),
        lm_eval={
            each.counts["iteration"]: scores_of(each, hidden)
            for each in scored
            if each.stage == "lm-eval"
        },
        mlflow_run=run_id,
        zero_shot={
            each.counts["checkpoint"]: shown_scores(each, hidden)
            for each in scored
            if each.stage == "zeroshot"
        },
        contamination=contamination_rows(config, contamination),
        contamination_warnings=contamination_warnings(config, contamination),
    )


def _log_evaluation(
    config: RunConfig, tracking: Tracking, run_id: str, inputs: _Inputs, datasets: Datasets
) -> None:
    """Log the perplexities, the other scores and the contamination, if there are any."""
    evaluation = inputs.evaluation
    with tracking.errors("take the evaluation"):
        tracking.client.log_artifact(run_id, str(evaluation.directory / EVALUATION))
    checkpoints, now = read_evaluation(evaluation)["checkpoints"], round(1000 * time.time())
    log_perplexities(
        tracking, run_id, perplexities_of(checkpoints), datasets=datasets, timestamp_ms=now
    )
    log_losses_by_position(tracking, run_id, checkpoints, timestamp_ms=now)
    _send_scores(config, tracking, run_id, inputs.scored, inputs.contamination)


def _send_scores(
    config: RunConfig,
    tracking: Tracking,
    run_id: str,
    scored: tuple[Artifact, ...],
    contamination: Artifact | None,
) -> None:
    """Log the scores that MLflow lacks, and the shares of contaminated items.

    A stage logs its scores only when it measures them: MLflow lacks them if another store is used
    since then, or if an earlier limit withheld them.
    """
    hidden = withheld(config, contamination)
    now = round(1000 * time.time())
    if contamination is not None:
        with tracking.errors("take the contamination"):
            tracking.client.log_artifact(run_id, str(contamination.directory / CONTAMINATION))
    for each in scored:
        scores = scores_of(each) if each.stage == "lm-eval" else named_scores(read_scores(each))
        values = without_hidden(scores, hidden) | contamination_metrics(contamination)
        log_scores(tracking, run_id, each.counts["iteration"], values, timestamp_ms=now)


def _length_pictures(tokens: Artifact, scratch: Path) -> list[Path]:
    """Copy the plots of document lengths from the tokenize stages, numbered if several."""
    pictures = [Path(prefix).with_name(LENGTHS_FILE) for prefix in token_prefixes(tokens.directory)]
    copies = []
    for number, picture in enumerate(pictures):
        if exists(picture):
            stem = numbered(picture.stem, number).replace(" ", "-")
            copies.append(Path(shutil.copy(picture, scratch / f"{stem}{picture.suffix}")))
    return copies


def read_sample(export: Artifact) -> str:
    """Read the text that the exported model wrote."""
    return (export.directory / SAMPLE_FILE).read_text(encoding="utf-8")


def outcome(
    config: RunConfig,
    trained: Artifact,
    evaluation: Artifact,
    export: Artifact,
    published: Artifact,
    index: Artifact,
) -> str:
    """Return the final markdown of the flow.

    It shows perplexities, epochs, a text of the model, and the locations of the results.
    """
    counts = evaluation.counts
    names = ("valid_ppl", "unigram_valid_ppl", "test_ppl", "unigram_test_ppl")
    valid, unigram_valid, test, unigram_test = (short_number(counts[name]) for name in names)
    get_run_logger().info("validation PPL: %s (unigram %s)", valid, unigram_valid)
    get_run_logger().info("test PPL: %s (unigram %s)", test, unigram_test)
    sample = read_sample(export)
    lines = [
        f"## {config.name}: test PPL {test}, validation PPL {valid}",
        "",
        evaluation_summary(read_evaluation(evaluation)),
        epochs_summary(config, index),
        "What it writes:",
        "",
        "```",
        sample.rstrip(),
        "```",
        "",
        *result_lines(
            Tracking.of(config), trained.directory, export.directory, published.directory
        ),
    ]
    return "\n".join(lines)
