"""Stage `lm-eval`: scores of exported checkpoints by lm-evaluation-harness."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megacore.artifact import Artifact, StageKey
from megacore.artifact.files import read_object, write_json
from megacore.artifact.workspace import MODEL_DIRECTORY
from megacore.config import RunConfig
from megacore.config.keys import key_parameters
from megacore.hardware import Hardware
from megacore.jobs.model import LmEvalJob, places
from megacore.ranks.stages import log_name, run_job
from megacore.zeroshot.harness import harness_version, metrics_of, task_files
from tasks._cache import StageResult, build, fresh_scratch, stage_task
from tasks._devices import devices
from tasks._monitor import log_tail
from tasks._stage_runner import StageRunner, summary_table
from tasks.convert import convert
from tasks.evaluate import read_evaluation
from tasks.index import RunData
from tasks.zeroshot import ScoredRun, log_to_run, without_hidden

VERSION = 1
REPORT = "lm-eval.json"


def lm_eval_key(config: RunConfig, export: Artifact, run: ScoredRun | None = None) -> StageKey:
    """Return the key of one export's scores. Raises ConfigError, such as without lm_eval."""
    parameters = key_parameters(config, "lm-eval", task_digests(config))
    return StageKey.of("lm-eval", VERSION, parameters, export=export)


def task_digests(config: RunConfig) -> dict[str, Any]:
    """Return the content of the tasks: their additional files, and the version of lm_eval.

    Raises ConfigError, such as without lm_eval.
    """
    return {
        "task_files": task_files(config.evaluate.lm_eval.include_path),
        "lm_eval": harness_version(),
    }


@stage_task("lm-eval", lm_eval_key)
def lm_eval(config: RunConfig, export: Artifact, run: ScoredRun) -> StageResult:
    """Score one export, and log the scores to MLflow; a retry logs what MLflow lacks."""
    key = lm_eval_key(config, export)

    def fill(directory: Path) -> dict[str, Any]:
        scratch = fresh_scratch(run.directory, f"lm-eval-{key.key}")
        job = _job(config, export.directory / MODEL_DIRECTORY, scratch)
        module = "megacore.ranks.lm_eval"
        poll = log_tail(scratch / log_name(module)).poll
        with devices(config.launch, trains=False):
            scores = run_job(module, job, scratch, on_poll=poll)
        write_json(directory / REPORT, scores)
        checkpoint = {name: export.counts[name] for name in ("checkpoint", "iteration")}
        return checkpoint | metrics_of(scores)

    result = build(config, key, fill)
    log_to_run(config, run, result.artifact.counts["iteration"], scores_of(result.artifact))
    return result


def _job(config: RunConfig, model: Path, scratch: Path) -> LmEvalJob:
    settings = config.evaluate.lm_eval
    if settings.include_path is not None:
        path = str(Path(settings.include_path).absolute())
        settings = settings.model_copy(update={"include_path": path})
    return LmEvalJob(
        model_directory=str(model),
        settings=settings,
        batch_size=config.evaluate.micro_batch_size,
        ranks=1,
        threads_per_rank=config.launch.threads_per_rank or Hardware.detect().cores,
        **places(scratch),
    )


def scores_of(artifact: Artifact, hidden: Iterable[str] = ()) -> dict[str, float]:
    """Return the scores of one export, without hidden ones, by their names in MLflow."""
    return without_hidden(metrics_of(read_object(artifact.directory / REPORT)), hidden)


def lm_eval_exports(
    pipeline: StageRunner[RunConfig],
    trained: Artifact,
    evaluation: Artifact,
    exported: Artifact,
    data: RunData[Artifact],
) -> dict[str, Artifact]:
    """Return the exports to score by checkpoint, oldest first; none without tasks.

    These are `exported`, or all that are kept, each exported in its own task. `kept_checkpoints`
    must protect them.
    """
    options = pipeline.config.evaluate.lm_eval
    if not options.tasks:
        return {}
    if options.checkpoints == "best":
        return {exported.counts["checkpoint"]: exported}
    names = [row["checkpoint"] for row in read_evaluation(evaluation)["checkpoints"]]
    converted = {
        name: pipeline.checkpoint_stage(convert, name, trained, evaluation, data, name)
        for name in names
    }
    return {name: result.artifact for name, result in converted.items() if result}


def lm_eval_stages(
    pipeline: StageRunner[RunConfig], exports: Mapping[str, Artifact], run: ScoredRun
) -> tuple[Artifact, ...]:
    """Score each export in its own task, and return the scores in the same order."""
    results = [
        pipeline.checkpoint_stage(lm_eval, name, export, run) for name, export in exports.items()
    ]
    return tuple(result.artifact for result in results if result is not None)


def lm_eval_summary(scored: Sequence[Artifact], hidden: Iterable[str] = ()) -> str:
    """Return the scores that are not hidden as a markdown table, or an empty string without."""
    rows = {artifact.counts["checkpoint"]: scores_of(artifact, hidden) for artifact in scored}
    if not any(rows.values()):
        return ""
    names = list(dict.fromkeys(name for scores in rows.values() for name in scores))
    titles = [name.removeprefix("lm_eval/").replace("/", " ") for name in names]
    cells = [
        (checkpoint, *(f"{scores[name]:.4g}" if name in scores else "–" for name in names))
        for checkpoint, scores in rows.items()
    ]
    return "\n".join(["", *summary_table(["lm-eval", *titles], cells)]) + "\n"
