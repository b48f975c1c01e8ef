"""Stage `zeroshot`: scores of the best checkpoint on texts that it was not trained on."""

import time
from pathlib import Path
from typing import Any

from megacore.artifact import Artifact, StageKey, Workspace, file_digest, lock
from megacore.artifact.files import read_json, write_json
from megacore.checkpoint.spec import read_spec
from megacore.cluster.hosts.elastic import choose_hosts
from megacore.config import RunConfig
from megacore.config.keys import key_parameters
from megacore.errors import ConfigError
from megacore.hardware import Hardware
from megacore.jobs.model import ModelSource, ZeroShotJob, places
from megacore.plan.preflight import resolve_launch
from megacore.ranks import zeroshot as entry
from megacore.ranks.stages import log_name, run_job
from tasks._cache import StageResult, build, stage_task
from tasks._checkpoint_models import log_scores
from tasks._devices import devices
from tasks._forward import Forwarder
from tasks._mlflow import Tracking, end_run
from tasks.evaluate import fresh_scratch, log_tail
from tasks.train import run_facts

VERSION = 1
REPORT = "zeroshot.json"


def zeroshot_key(
    config: RunConfig,
    trained: Artifact,
    evaluation: Artifact,
    tokens: Artifact,
    tokenizer: Artifact,
    index: Artifact,
) -> StageKey:
    """Return the key of the scores. Raises ConfigError when a text does not exist."""
    resolved = text_digests(config) | {"checkpoint": evaluation.counts["best"]}
    parameters = key_parameters(config, "zeroshot", resolved)
    return StageKey.of("zeroshot", VERSION, parameters, trained=trained, tokenizer=tokenizer)


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


@stage_task("zeroshot", zeroshot_key)
def zeroshot(
    config: RunConfig,
    trained: Artifact,
    evaluation: Artifact,
    tokens: Artifact,
    tokenizer: Artifact,
    index: Artifact,
) -> StageResult:
    """Score the checkpoint with the lowest validation loss, and log the scores to MLflow.

    A retry logs the scores that MLflow lacks.
    """
    key = zeroshot_key(config, trained, evaluation, tokens, tokenizer, index)

    def fill(directory: Path) -> dict[str, Any]:
        scratch = fresh_scratch(trained.directory, f"zeroshot-{key.key}")
        job = make_job(config, trained, evaluation, tokenizer, scratch)
        poll = log_tail(scratch / log_name(entry.MODULE)).poll
        with devices(config.launch, trains=False):
            scores = run_job(entry.MODULE, job, scratch, launch=config.launch, on_poll=poll)
        write_json(directory / REPORT, scores)
        best = {name: evaluation.counts[name] for name in ("best", "iteration")}
        return {"checkpoint": best["best"], "iteration": best["iteration"], **metrics_of(scores)}

    with lock(trained.directory, shared=True):
        result = build(config, key, fill)
    _log(config, trained, tokens, result.artifact)
    return result


def make_job(
    config: RunConfig, trained: Artifact, evaluation: Artifact, tokenizer: Artifact, scratch: Path
) -> ZeroShotJob:
    """Build the job on the ranks that train.

    Pipeline stages become replicas, because a model without optimizer state needs little memory.

    Raises ParallelLayoutError.
    """
    hardware, zero_shot = Hardware.detect(), config.evaluate.zero_shot
    vocab_size = tokenizer.counts["vocab_size"]
    hosts = choose_hosts(config, vocab_size)
    ranks, threads = resolve_launch(config, hardware, vocab_size, hosts=hosts)
    checkpoint = trained.directory / "checkpoints" / evaluation.counts["best"]
    return ZeroShotJob(
        source=ModelSource(directory=str(checkpoint), exported=False, spec=read_spec(checkpoint)),
        tensor_model_parallel_size=config.parallel.tensor_model_parallel_size,
        # Same as for perplexities: GPUs use the training's precision; on a CPU fp32 costs little.
        precision=config.train.precision if hardware.gpus else "fp32",
        batch_size=config.evaluate.micro_batch_size,
        tokenizer_directory=tokenizer.path,
        wikitext=_absolute(zero_shot.wikitext),
        lambada=_absolute(zero_shot.lambada),
        seq_length=config.data.seq_length,
        overlapping_eval=zero_shot.overlapping_eval,
        ranks=ranks,
        threads_per_rank=threads,
        hosts=hosts,
        **places(scratch),
    )


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


def metrics_of(scores: dict[str, dict[str, Any]]) -> dict[str, float]:
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
    return metrics


def _log(config: RunConfig, trained: Artifact, tokens: Artifact, scored: Artifact) -> None:
    """Log the scores to the MLflow run of the training. Raises TrackingError."""
    tracking = Tracking(Workspace.of(), config.tracking.experiment)
    forwarder = Forwarder(
        tracking, trained.directory, config, run_facts(config, trained.directory.name, tokens)
    )
    run_id = forwarder.flush()
    try:
        scores = metrics_of(read_scores(scored))
        log_scores(
            tracking,
            run_id,
            scored.counts["iteration"],
            scores,
            timestamp_ms=round(1000 * time.time()),
        )
    finally:
        end_run(tracking, run_id)


def read_scores(artifact: Artifact) -> dict[str, dict[str, Any]]:
    """Read the scores on each text."""
    scores: dict[str, dict[str, Any]] = read_json(artifact.directory / REPORT)
    return scores


def zeroshot_summary(scored: Artifact | None) -> str:
    """Return the scores as a markdown table, or an empty string without scores."""
    if scored is None:
        return ""
    scores = read_scores(scored)
    lines = ["", f"| zero-shot, {scored.counts['checkpoint']} | |", "| --- | ---: |"]
    if "wikitext" in scores:
        result = scores["wikitext"]
        stride = (
            f", windows {result['overlapping_eval']} apart"
            if result["overlapping_eval"] < result["seq_length"]
            else ""
        )
        lines.append(f"| WikiText PPL per word{stride} | {result['word_ppl']:,.2f} |")
        lines.append(f"| WikiText PPL per token{stride} | {result['token_ppl']:,.2f} |")
    if "lambada" in scores:
        result = scores["lambada"]
        lines.append(
            f"| LAMBADA accuracy ({result['correct']:,} of {result['passages']:,}) | "
            f"{result['accuracy']:.2%} |"
        )
    return "\n".join(lines) + "\n"
