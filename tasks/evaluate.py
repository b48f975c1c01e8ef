"""Stage `evaluate`: perplexities of every kept checkpoint, each with a cached task run.

One start of the ranks scores all checkpoints that lack a score. Each score is a separate artifact,
whose key contains the checkpoint's digest, so later runs of a flow score only new checkpoints.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from prefect import State, get_run_logger
from prefect.states import Completed

from megacore.artifact import Artifact, StageKey, file_digest
from megacore.artifact.files import read_object, write_json
from megacore.artifact.workspace import CHECKPOINTS_NAME
from megacore.checkpoint.format import MARKER_NAME, complete_checkpoints, protected
from megacore.config import RunConfig
from megacore.config.keys import key_parameters
from megacore.errors import (
    CheckpointError,
    ConfigError,
    MegacoreError,
    RankLostError,
    TrackingError,
)
from megacore.jobs.run import EvaluateJob
from megacore.observe.logging import short_number
from megacore.paths import exists, is_file
from megacore.ranks import stages
from megacore.ranks.evaluate import UNIGRAM, result_file
from tasks._cache import StageResult, artifact_problem, build, fresh_scratch, stage_task
from tasks._checkpoint_models import log_losses_by_position, log_perplexities
from tasks._devices import devices
from tasks._mlflow import STORE_ERRORS, Dataset, Tracking, log_datasets, recorded_run_id
from tasks._monitor import LogTail, log_tail
from tasks._perplexity import PerplexityTable
from tasks._stage_runner import DELETED, StageRunner, summary_table
from tasks.index import RunData, held_out_digest, split_data, split_datasets, split_digests
from tasks.train import make_job

REPORT = "evaluation.json"
SCORE = "score.json"
PERPLEXITIES = ("valid_ppl", "test_ppl")
_HEAD_LOSSES = ("_sop_loss", "_nsp_loss")
"""Endings of the losses of BERT's binary head."""
_DEFINITION = 2
"""Version of the definition of `test_ppl`."""
_POLL = 0.1
"""Seconds between two looks for a score."""


@dataclass(frozen=True)
class Target:
    """A model to score: a checkpoint, or the unigram model."""

    name: str
    """Name of the checkpoint's directory, or UNIGRAM."""
    path: str = ""
    """Directory of the checkpoint."""
    digest: str = ""
    """Digest of the checkpoint's marker, which contains the digests of its files."""

    @property
    def exists(self) -> bool:
        """False if retention deleted the checkpoint."""
        return not self.path or is_file(Path(self.path, MARKER_NAME))

    @property
    def inputs(self) -> dict[str, str]:
        """Inputs of the key of a score."""
        return {"checkpoint": self.digest} if self.digest else {}


@contextmanager
def kept_checkpoints(run_directory: Path) -> Iterator[tuple[Target, ...]]:
    """Yield the complete checkpoints of a run, oldest first; a training may be in progress.

    During the block retention does not delete them: a training goes on, and deletes them when it
    saves again.
    """
    targets = []
    with ExitStack() as readers:
        for path in complete_checkpoints(run_directory / CHECKPOINTS_NAME):
            try:
                readers.enter_context(protected(path))
                targets.append(Target(path.name, str(path), file_digest(path / MARKER_NAME)))
            except (CheckpointError, FileNotFoundError):
                continue  # deleted since it was listed
        yield tuple(targets)


def score_key(
    config: RunConfig, index: Artifact, target: Target, scoring: "Scoring | None" = None
) -> StageKey:
    """Return the key of one model's perplexities."""
    return StageKey(
        "evaluate-checkpoint",
        stages.EVALUATE_VERSION,
        key_parameters(config, "evaluate"),
        {"index": held_out_digest(index), **target.inputs},
    )


class Scoring:
    """One start of ranks that score all missing models, in order.

    The ranks start when the first missing score is requested. They run under a thread, so that each
    task run ends when its own score is there.
    """

    def __init__(
        self,
        config: RunConfig,
        run_directory: Path,
        targets: Sequence[Target],
        data: RunData[Artifact],
    ) -> None:
        self._config = config
        self._run_directory = run_directory
        self._targets = tuple(targets)
        self._data = data
        self._requested: tuple[Target, ...] = ()
        self._output = run_directory
        self._devices = ExitStack()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._tail: LogTail | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for the ranks to end; after an error, end them."""
        if error is not None:
            self._stop.set()
        self._join()
        if error is None and self._error is not None:
            get_run_logger().warning(
                "the ranks failed after their last score, which is complete: %s", self._error
            )

    def score(self, target: Target) -> dict[str, Any]:
        """Return the scores of `target`, which the ranks may still have to compute.

        Raises the typed error of the ranks.
        """
        if target not in self._requested:
            self._join()
            self._start(target)
        path = result_file(self._output, target.name)
        while not exists(path):
            ended = self._thread is None or not self._thread.is_alive()
            if ended and not exists(path):
                self._fail(target)
            self._poll_log()
            time.sleep(_POLL)
        self._poll_log()
        return read_object(path)

    def _start(self, first: Target) -> None:
        """Start the ranks for `first` and the later models that exist and lack a score."""
        index = self._data.index
        later = self._targets[self._targets.index(first) + 1 :]
        self._requested = (
            first,
            *(
                target
                for target in later
                if target.exists
                and artifact_problem(score_key(self._config, index, target), self._config)
            ),
        )
        key = score_key(self._config, index, first).key
        scratch = fresh_scratch(self._run_directory, f"evaluate-{key}")
        self._output = scratch / "results"
        self._output.mkdir()
        self._tail = log_tail(stages.evaluation_log(scratch))
        self._stop.clear()
        self._error = None
        job = EvaluateJob(
            **make_job(self._config, self._run_directory, self._data).model_dump()
            | {
                "exit_directory": str(scratch / "exit"),
                "checkpoints": tuple(each.path for each in self._requested if each.path),
                "unigram": any(each.name == UNIGRAM for each in self._requested),
                "output": str(self._output),
            }
        )
        self._devices.enter_context(devices(self._config.launch, trains=False))
        thread = threading.Thread(
            target=self._supervise, args=(job, scratch), name="evaluate", daemon=True
        )
        thread.start()
        self._thread = thread  # only one that runs can be waited for

    def _supervise(self, job: EvaluateJob, scratch: Path) -> None:
        try:
            stages.evaluate(job, scratch, self._check)
        except BaseException as error:  # raised again in the task run that waits
            self._error = error

    def _check(self) -> None:
        if self._stop.is_set():
            raise _StoppedError

    def _fail(self, target: Target) -> None:
        """Raise the error that ended the ranks before the score of `target`."""
        error = self._error or RankLostError(
            f"the ranks ended without scores for {target.name}: see {self._output.parent}"
        )
        self._join()
        self._requested, self._error = (), None
        raise error

    def _poll_log(self) -> None:
        if self._tail is not None:
            self._tail.poll()

    def _join(self) -> None:
        """Wait for the end of the ranks, and free their devices."""
        with self._devices:
            if self._thread is not None:
                self._thread.join()
                self._thread = None
                self._poll_log()


class _StoppedError(Exception):
    """The flow needs no more scores."""


@stage_task("evaluate", score_key)
def evaluate_checkpoint(
    config: RunConfig, index: Artifact, target: Target, scoring: Scoring
) -> StageResult | State[Any]:
    """Compute one checkpoint's perplexities, or those of a unigram model on the same tokens.

    A checkpoint that retention deletes meanwhile ends the task run in the state Deleted.
    """

    def fill(directory: Path) -> dict[str, Any]:
        scores = scoring.score(target)
        row = scores if target.name == UNIGRAM else {"checkpoint": target.name, **scores}
        write_json(directory / SCORE, row)
        if target.name == UNIGRAM:
            return {f"{split}_ppl": row[split] for split in ("valid", "test")}
        return {name: row[name] for name in ("checkpoint", "iteration", *PERPLEXITIES)}

    return unless_deleted(target, lambda: build(config, score_key(config, index, target), fill))


def unless_deleted(target: Target, work: Callable[[], StageResult]) -> StageResult | State[Any]:
    """Return the result of `work()`, or the state Deleted if the checkpoint was deleted.

    An error counts only while the checkpoint exists.
    """
    try:
        if target.exists:
            return work()
    except MegacoreError:
        if target.exists:
            raise
    message = f"{target.name} was deleted by the training's retention before it was scored"
    get_run_logger().info(message)
    return Completed(name=DELETED, message=message)


@dataclass(frozen=True)
class Scores:
    """Scores of a run's checkpoints, and of a unigram model."""

    checkpoints: tuple[Target, ...]
    """The scored checkpoints, oldest first."""
    rows: tuple[Artifact, ...]
    """Score of each checkpoint, in the same order."""
    unigram: Artifact


def perplexity_report(unigram: Artifact, rows: Sequence[Artifact]) -> dict[str, Any]:
    """Return the report: `checkpoints`, one row each by iteration, and `unigram`."""
    return {
        "checkpoints": [read_object(row.directory / SCORE) for row in rows],
        "unigram": read_object(unigram.directory / SCORE),
    }


def score_checkpoints(
    pipeline: StageRunner[RunConfig],
    run_directory: Path,
    kept: Sequence[Target],
    data: RunData[Artifact],
) -> Scores:
    """Score each checkpoint in a task run of its own, and show each score when it is there.

    The training may be finished, running or stopped; nothing that it needs is locked. Raises
    ConfigError if there is no complete checkpoint.
    """
    config = pipeline.config
    targets = (*kept, Target(UNIGRAM)) if kept else ()
    display = _Display(config, run_directory, split_datasets(config, data))
    results: dict[str, StageResult] = {}
    with Scoring(config, run_directory, targets, data) as scoring:
        for target in targets:
            result = pipeline.checkpoint_stage(
                evaluate_checkpoint, target.name, data.index, target, scoring
            )
            if result is not None:
                results[target.name] = result
                display.show(target, result)
    scored = tuple(target for target in kept if target.name in results)
    if not scored:
        raise ConfigError(
            f"{config.name} has no complete checkpoint in {run_directory / 'checkpoints'}: run "
            f"pretrain/{config.name} until it has saved one (checkpoint.save_interval is "
            f"{config.checkpoint.save_interval})"
        )
    return Scores(
        scored,
        tuple(results[target.name].artifact for target in scored),
        results[UNIGRAM].artifact,
    )


class _Display:
    """The scores so far in Prefect's table and on MLflow's LoggedModels.

    What cannot be stored is a warning, because the scores themselves are on disk.
    """

    def __init__(
        self, config: RunConfig, run_directory: Path, datasets: Mapping[str, Dataset]
    ) -> None:
        self._tracking = Tracking.of(config)
        self._run_directory = run_directory
        self._datasets = datasets
        self._table = PerplexityTable(run_directory)
        self._logs = True

    def show(self, target: Target, result: StageResult) -> None:
        """Show one score; a score of an earlier flow run announces nothing."""
        if target.name == UNIGRAM:
            return
        row = read_object(result.artifact.directory / SCORE)
        if result.ran:
            self._table.evaluated(row)
        else:
            self._table.known(row)
        try:
            if self._logs:
                self._log(row)
        except STORE_ERRORS as error:
            self._logs = False  # the next rows must not wait for it, too
            get_run_logger().warning("%s; the publication sends what MLflow lacks", error)

    def _log(self, row: dict[str, Any]) -> None:
        run_id = recorded_run_id(self._run_directory)
        if run_id is None:
            raise TrackingError(f"{self._run_directory} has no MLflow run yet")
        log_score(self._tracking, run_id, row, self._datasets)


def log_score(
    tracking: Tracking, run_id: str, row: dict[str, Any], datasets: Mapping[str, Dataset]
) -> None:
    """Log a checkpoint's perplexities and their data sets, which MLflow may have.

    Raises TrackingError.
    """
    perplexities = perplexities_of([row])

    def log() -> bool:
        log_datasets(tracking, run_id, datasets)
        now = round(1000 * time.time())
        log_perplexities(tracking, run_id, perplexities, datasets=datasets, timestamp_ms=now)
        log_losses_by_position(tracking, run_id, [row], timestamp_ms=now)
        return True

    data = {role: asdict(dataset) for role, dataset in datasets.items()}
    values = [[iteration, scores] for iteration, scores in perplexities.items()]
    tracking.recall(["score", tracking.experiment, run_id, values, data], log)


def perplexities_of(rows: Sequence[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Return the perplexities of a report's rows by iteration and name."""
    return {
        int(row["iteration"]): {name: float(row[name]) for name in PERPLEXITIES} for row in rows
    }


def evaluate_key(
    config: RunConfig, trained: Artifact, unigram: Artifact, rows: tuple[Artifact, ...]
) -> StageKey:
    """Return the key of the report on a finished training's checkpoints."""
    scores = {row.counts["checkpoint"]: row for row in rows}
    return StageKey.of(
        "evaluate", stages.EVALUATE_VERSION, {}, trained=trained, unigram=unigram, **scores
    )


@stage_task("evaluate", evaluate_key)
def evaluate(
    config: RunConfig, trained: Artifact, unigram: Artifact, rows: tuple[Artifact, ...]
) -> StageResult:
    """Write the report on all checkpoints, which names the best by validation loss."""

    def fill(directory: Path) -> dict[str, Any]:
        report = perplexity_report(unigram, rows)
        write_json(directory / REPORT, report)
        best = best_row(report)
        return {
            "checkpoints": len(rows),
            "best": best["checkpoint"],
            **{name: best[name] for name in ("iteration", *PERPLEXITIES)},
            "unigram_valid_ppl": report["unigram"]["valid"],
            "unigram_test_ppl": report["unigram"]["test"],
            **{name: value for name, value in best.items() if name.endswith(_HEAD_LOSSES)},
        }

    return build(config, evaluate_key(config, trained, unigram, rows), fill)


def best_row(report: dict[str, Any]) -> dict[str, Any]:
    """Return the row of the checkpoint with the lowest validation loss."""
    best: dict[str, Any] = min(report["checkpoints"], key=lambda row: row["valid_loss"])
    return best


def read_evaluation(artifact: Artifact) -> dict[str, Any]:
    """Read the report of an evaluation: `checkpoints` (one row each) and `unigram`."""
    return read_object(artifact.directory / REPORT)


def measured_data(config: RunConfig, tokens: Artifact, tokenizer: Artifact) -> dict[str, Any]:
    """Return what determines the tokens over which `test_ppl` is the mean.

    Runs with equal values have comparable perplexities. The train and validation splits do not
    count, so the number of iterations and the weights of a blend may differ.
    """
    digests = split_digests(config, tokens, "test")
    return {
        "version": _DEFINITION,
        **({"order": "mixed by size"} if len(digests) > 1 else {}),
        **split_data(config),
        "max_samples": config.evaluate.max_samples,
        "tokens": digests,
        "tokenizer": tokenizer.digest,
    }


def evaluation_summary(report: dict[str, Any]) -> str:
    """Return the perplexities of each checkpoint as a markdown table."""
    ranked = sorted(report["checkpoints"], key=lambda row: row["valid_ppl"])
    measured = [(row["checkpoint"], row["valid_ppl"], row["test_ppl"]) for row in ranked]
    measured.append(("unigram model", report["unigram"]["valid"], report["unigram"]["test"]))
    rows = [(name, short_number(valid), short_number(test)) for name, valid, test in measured]
    lines = summary_table(("checkpoint, best first", "validation PPL", "test PPL"), rows)
    disagreements = [row["disagreement"] for row in report["checkpoints"] if row["disagreement"]]
    lines += ["", *disagreements] if disagreements else []
    return "\n".join(lines) + "\n"
