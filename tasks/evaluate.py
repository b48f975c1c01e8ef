"""Stage `evaluate`: perplexity of the test split for every kept checkpoint."""

import shutil
from pathlib import Path
from typing import Any

from megacore.artifact import Artifact, Manifest, StageKey, lock
from megacore.artifact.files import read_json, write_json
from megacore.config import RunConfig
from megacore.config.keys import key_parameters
from megacore.jobs.run import EvaluateJob
from megacore.ranks import stages
from tasks._cache import StageResult, build, stage_task
from tasks._devices import devices
from tasks._launch import LogTail
from tasks._perplexity import PerplexityTable
from tasks.index import mixture, resolved_samples, without_other_families
from tasks.train import make_job

REPORT = "evaluation.json"
_TRAINING_ONLY = ("fim", "weights", "reset_position_ids", "reset_attention_mask")
"""Values that determine samples, but not which tokens of the test split are predicted."""


def evaluate_key(
    config: RunConfig, trained: Artifact, tokens: Artifact, tokenizer: Artifact, index: Artifact
) -> StageKey:
    """Return the key of the perplexities."""
    parameters = key_parameters(config, "evaluate")
    return StageKey.of(
        "evaluate", stages.EVALUATE_VERSION, parameters, trained=trained, index=index
    )


@stage_task("evaluate", evaluate_key)
def evaluate(
    config: RunConfig, trained: Artifact, tokens: Artifact, tokenizer: Artifact, index: Artifact
) -> StageResult:
    """Compute each checkpoint's perplexity, and that of a unigram model on the same tokens."""
    key = evaluate_key(config, trained, tokens, tokenizer, index)

    def fill(directory: Path) -> dict[str, Any]:
        scratch = fresh_scratch(trained.directory, f"evaluate-{key.key}")
        job = EvaluateJob(
            **make_job(config, trained.directory, tokens, tokenizer, index).model_dump()
            | {
                "exit_directory": str(scratch / "exit"),
                "checkpoints": tuple(
                    str(trained.directory / item["path"]) for item in trained.counts["checkpoints"]
                ),
                "output": str(scratch / REPORT),
            }
        )
        with devices(config.launch, trains=False):
            scores = stages.evaluate(job, scratch, log_tail(scratch / "evaluate.log").poll)
        return _report(directory, scores["checkpoints"], scores["unigram"])

    with lock(trained.directory, shared=True):
        result = build(config, key, fill)
    if result.ran:
        rows = read_evaluation(result.artifact)["checkpoints"]
        PerplexityTable(trained.directory).evaluated(rows)
    return result


def _report(directory: Path, scores: dict[str, Any], unigram: dict[str, float]) -> dict[str, Any]:
    """Write the report by iteration; return counts with the best checkpoint by validation loss."""
    rows = [{"checkpoint": Path(path).name, **score} for path, score in scores.items()]
    rows.sort(key=lambda row: row["iteration"])
    best = min(rows, key=lambda row: row["valid_loss"])
    write_json(directory / REPORT, {"checkpoints": rows, "unigram": unigram})
    sentence_losses = {
        name: value for name, value in best.items() if name.endswith(("_sop_loss", "_nsp_loss"))
    }
    return {
        "checkpoints": len(rows),
        "best": best["checkpoint"],
        "iteration": best["iteration"],
        "valid_ppl": best["valid_ppl"],
        "test_ppl": best["test_ppl"],
        "unigram_valid_ppl": unigram["valid"],
        "unigram_test_ppl": unigram["test"],
        **sentence_losses,
    }


def read_evaluation(artifact: Artifact) -> dict[str, Any]:
    """Read the report of an evaluation: `checkpoints` (one row each) and `unigram`."""
    report: dict[str, Any] = read_json(artifact.directory / REPORT)
    return report


def measured_data(config: RunConfig, tokens: Artifact, tokenizer: Artifact) -> dict[str, Any]:
    """Return what determines the tokens over which `test_ppl` is the mean.

    Runs with equal values have comparable perplexities. The train and validation splits do not
    count, so the number of iterations and the weights of a blend may differ.
    """
    resolved = {f"samples.{name}": value for name, value in resolved_samples(config).items()}
    samples = without_other_families(config, key_parameters(config, "run", resolved)["samples"])
    members = mixture(config, tokens).of("test")
    return {
        "version": stages.EVALUATE_VERSION,
        "family": config.family,
        "samples": {name: value for name, value in samples.items() if name not in _TRAINING_ONLY},
        "max_samples": config.evaluate.max_samples,
        "tokens": [Manifest.read(Path(member.prefix).parent).digest for member in members],
        "tokenizer": tokenizer.digest,
    }


def fresh_scratch(run_directory: Path, name: str) -> Path:
    """Create an empty directory for the job file, log and exit reasons of one artifact's stage."""
    scratch = run_directory / "jobs" / name
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    return scratch


def log_tail(path: Path) -> LogTail:
    """Return a reader that streams a job's log into the task's log."""
    from prefect import get_run_logger

    return LogTail(path, get_run_logger().info)


def evaluation_summary(evaluation: Artifact) -> str:
    """Return the perplexities of each checkpoint as a markdown table."""
    report = read_evaluation(evaluation)
    lines = ["| checkpoint, best first | validation PPL | test PPL |", "| --- | ---: | ---: |"]
    lines += [
        f"| {row['checkpoint']} | {row['valid_ppl']:.2f} | {row['test_ppl']:.2f} |"
        for row in sorted(report["checkpoints"], key=lambda row: row["valid_ppl"])
    ]
    unigram = report["unigram"]
    lines.append(f"| unigram model | {unigram['valid']:.1f} | {unigram['test']:.1f} |")
    disagreements = [row["disagreement"] for row in report["checkpoints"] if row["disagreement"]]
    lines += ["", *disagreements] if disagreements else []
    return "\n".join(lines) + "\n"
