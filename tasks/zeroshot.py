"""Stage `zeroshot`: scores of checkpoints on texts that they were not trained on."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import State

from megacore.artifact import Artifact, StageKey, file_digest
from megacore.artifact.files import read_object, write_json
from megacore.checkpoint.format import iteration_of
from megacore.checkpoint.spec import read_spec
from megacore.cluster.hosts.elastic import choose_hosts
from megacore.cluster.hosts.hardware import hardware_of
from megacore.config import RunConfig
from megacore.config.keys import key_parameters
from megacore.errors import ConfigError, TrackingError
from megacore.jobs.model import ModelSource, ZeroShotJob, places
from megacore.observe.logging import short_number
from megacore.plan.preflight import resolve_launch, unseen_gpus
from megacore.ranks.stages import log_name, run_job
from megacore.tokenizer import load_tokenizer
from megacore.zeroshot.texts import check_passkeys
from tasks._cache import StageResult, build, fresh_scratch, stage_task
from tasks._checkpoint_models import log_scores
from tasks._devices import devices
from tasks._mlflow import Tracking, end_trained_run, recorded_run_id
from tasks._mlflow_events import Forwarder
from tasks._monitor import log_tail
from tasks._stage_runner import StageRunner, summary_table
from tasks.evaluate import Target, unless_deleted
from tasks.index import RunData
from tasks.train import precision_of, run_facts

VERSION = 3
REPORT = "zeroshot.json"


def zeroshot_key(
    config: RunConfig, tokenizer: Artifact, target: Target, run: "ScoredRun | None" = None
) -> StageKey:
    """Return the key of one checkpoint's scores. Raises ConfigError when a text does not exist."""
    parameters = key_parameters(config, "zeroshot", text_digests(config))
    inputs = {"checkpoint": target.digest, "tokenizer": tokenizer.digest}
    return StageKey("zeroshot", VERSION, parameters, inputs)


def text_digests(config: RunConfig) -> dict[str, str | None]:
    """Return the digest of each text's content, None for a text that is not requested.

    Raises ConfigError when one cannot be read.
    """
    digests: dict[str, str | None] = {}
    for name in ("wikitext", "lambada"):
        path = getattr(config.evaluate.zero_shot, name)
        try:
            digests[name] = None if path is None else file_digest(Path(path))
        except OSError as error:
            raise ConfigError(
                f"evaluate.zero_shot.{name} is {path}, which cannot be read: {error.strerror}: "
                "correct the path, or remove it"
            ) from error
    return digests


@dataclass(frozen=True)
class ScoredRun:
    """The training whose checkpoints are scored, with its data."""

    directory: Path
    finished: bool
    """False while the training runs, and after it was stopped."""
    data: RunData[Artifact]
    hidden: frozenset[str] = frozenset()
    """Evaluation sets whose scores are not published, because they are contaminated."""


@stage_task("zeroshot", zeroshot_key)
def zeroshot_checkpoint(
    config: RunConfig, tokenizer: Artifact, target: Target, run: ScoredRun
) -> StageResult | State[Any]:
    """Score one checkpoint, and log the scores to MLflow.

    A retry logs the scores that MLflow lacks. A checkpoint that retention deletes meanwhile ends
    the task run in the state Deleted.
    """
    key = zeroshot_key(config, tokenizer, target)

    def fill(directory: Path) -> dict[str, Any]:
        scratch = fresh_scratch(run.directory, f"zeroshot-{key.key}")
        job = _job(config, Path(target.path), tokenizer, scratch)
        passkey = config.evaluate.zero_shot.passkey
        if passkey.lengths:
            check_passkeys(load_tokenizer(tokenizer.path), passkey, config.max_position_embeddings)
        module = "megacore.ranks.zeroshot"
        poll = log_tail(scratch / log_name(module)).poll
        with devices(config.launch, trains=False):
            scores = run_job(module, job, scratch, launch=config.launch, on_poll=poll)
        write_json(directory / REPORT, scores)
        iteration = iteration_of(Path(target.path))
        totals = {name: value for name, value in named_scores(scores).items() if "/" not in name}
        return {"checkpoint": target.name, "iteration": iteration, **totals}

    def score() -> StageResult:
        result = build(config, key, fill)
        scores = named_scores(read_scores(result.artifact))
        log_to_run(config, run, result.artifact.counts["iteration"], scores)
        return result

    return unless_deleted(target, score)


def zeroshot(
    pipeline: StageRunner[RunConfig],
    checkpoints: Sequence[Target],
    best: str,
    run: ScoredRun,
) -> tuple[Artifact, ...]:
    """Score the kept checkpoints, or only the best, on the texts of `evaluate.zero_shot`.

    Each is scored in a task run of its own. Returns the scores by iteration, none without texts.
    """
    zero_shot = pipeline.config.evaluate.zero_shot
    results = [
        pipeline.checkpoint_stage(zeroshot_checkpoint, target.name, run.data.tokenizer, target, run)
        for target in checkpoints
        if zero_shot.requested and (zero_shot.checkpoints == "all" or target.name == best)
    ]
    return tuple(result.artifact for result in results if result is not None)


def _job(config: RunConfig, checkpoint: Path, tokenizer: Artifact, scratch: Path) -> ZeroShotJob:
    """Build the job on the ranks that train.

    Pipeline stages become replicas, because a model without optimizer state needs little memory.

    Raises ParallelLayoutError.
    """
    hardware, zero_shot = hardware_of(config.launch), config.evaluate.zero_shot
    vocab_size = tokenizer.counts["vocab_size"]
    hosts = choose_hosts(config, vocab_size)
    ranks, threads = resolve_launch(config, hardware, vocab_size, hosts=hosts)
    paths = {name: _absolute(getattr(zero_shot, name)) for name in ("wikitext", "lambada")}
    on_gpus = bool(hardware.gpus) or unseen_gpus(config.launch, hardware) is not None
    return ZeroShotJob(
        source=ModelSource(directory=str(checkpoint), exported=False, spec=read_spec(checkpoint)),
        tensor_model_parallel_size=config.parallel.tensor_model_parallel_size,
        # Same as for perplexities: GPUs use the training's precision; on a CPU fp32 costs little.
        precision=precision_of(config) if on_gpus else "fp32",
        batch_size=config.evaluate.micro_batch_size,
        tokenizer_directory=tokenizer.path,
        settings=zero_shot.model_copy(update=paths),
        seq_length=config.data.seq_length,
        ranks=ranks,
        threads_per_rank=threads,
        hosts=hosts,
        **places(scratch),
    )


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


def named_scores(scores: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the scores by their names in MLflow."""
    metrics = {}
    if "wikitext" in scores:
        metrics = {
            "wikitext_ppl": scores["wikitext"]["word_ppl"],
            "wikitext_token_ppl": scores["wikitext"]["token_ppl"],
        }
    if "lambada" in scores:
        metrics |= {
            "lambada_accuracy": scores["lambada"]["accuracy"],
            "lambada_ppl": scores["lambada"]["target_ppl"],
        }
    if "passkey" in scores:
        result = scores["passkey"]
        for name in ("accuracy", "ranked_accuracy"):
            metrics[f"passkey_{name}"] = result[name]
            metrics |= {
                f"passkey_{name}/{cell['length']:07d}/{cell['depth']:g}": cell[name]
                for cell in result["cells"]
            }
    return metrics


def without_hidden(scores: Mapping[str, float], hidden: Iterable[str]) -> dict[str, float]:
    """Return the scores, by their names in MLflow, of all but the `hidden` evaluation sets."""
    # wikitext_ppl and lambada_accuracy belong to wikitext and lambada, lm_eval/TASK/acc to a task.
    starts = tuple(f"{name}/" if "/" in name else f"{name}_" for name in hidden)
    return {name: value for name, value in scores.items() if not name.startswith(starts)}


def log_to_run(
    config: RunConfig, run: ScoredRun, iteration: int, scores: Mapping[str, float]
) -> None:
    """Log a checkpoint's scores to the MLflow run of the training, without hidden ones.

    Raises TrackingError.
    """
    tracking = Tracking.of(config)
    if run.finished:
        facts = run_facts(config, run.directory.name, run.data)
        run_id: str | None = Forwarder(tracking, run.directory, config, facts).flush()
    else:  # only the trainer may send events and set the state of the run
        run_id = recorded_run_id(run.directory)
    if run_id is None:
        raise TrackingError(
            f"{run.directory} has no MLflow run yet, so its scores were not logged: start again "
            "when the training has reached MLflow"
        )
    try:
        log_scores(
            tracking,
            run_id,
            iteration,
            without_hidden(scores, run.hidden),
            timestamp_ms=round(1000 * time.time()),
        )
    finally:
        if run.finished:
            end_trained_run(tracking, run_id, run.directory)


def read_scores(artifact: Artifact) -> dict[str, dict[str, Any]]:
    """Read the scores on each text."""
    return read_object(artifact.directory / REPORT)


def shown_scores(artifact: Artifact, hidden: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Read the scores on each text that is not hidden."""
    scores = read_scores(artifact)
    return {name: scores[name] for name in scores if name not in hidden}


def zeroshot_summary(scored: Sequence[Artifact], hidden: Iterable[str] = ()) -> str:
    """Return the scores that are not hidden as a markdown table, or an empty string without."""
    rows = [_columns(shown_scores(artifact, hidden)) for artifact in scored]
    if not any(rows):
        return ""
    names = [artifact.counts["checkpoint"] for artifact in scored]
    cells = [(name, *row.values()) for name, row in zip(names, rows, strict=True)]
    return "\n".join(["", *summary_table(["zero-shot", *rows[0]], cells)]) + "\n"


def _columns(scores: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the scores of one checkpoint as text, by title of the column."""
    columns = {}
    if "wikitext" in scores:
        result = scores["wikitext"]
        stride = (
            f", windows {result['overlapping_eval']} apart"
            if result["overlapping_eval"] < result["seq_length"]
            else ""
        )
        columns[f"WikiText PPL per word{stride}"] = short_number(result["word_ppl"], ",.2f")
        columns[f"WikiText PPL per token{stride}"] = short_number(result["token_ppl"], ",.2f")
    if "lambada" in scores:
        result = scores["lambada"]
        columns[f"LAMBADA accuracy of {result['passages']:,}"] = f"{result['accuracy']:.2%}"
    if "passkey" in scores:
        result = scores["passkey"]
        columns[f"passkey accuracy of {result['prompts']:,}"] = f"{result['accuracy']:.2%}"
        chance = f"passkey ranked accuracy, chance {result['chance']:.2%}"
        columns[chance] = f"{result['ranked_accuracy']:.2%}"
    return columns
