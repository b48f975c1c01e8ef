"""Scores of a run's checkpoints: keys, one start of the ranks, retries, deletion and data sets."""

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.artifact import Artifact, Workspace
from megacore.artifact.build import build_artifact
from megacore.artifact.files import write_json
from megacore.checkpoint.retain import apply_retention
from megacore.checkpoint.save import save_checkpoint
from megacore.config import RunConfig
from megacore.errors import CheckpointError, RankLostError
from megacore.jobs.run import EvaluateJob
from megacore.ranks import stages
from megacore.ranks.evaluate import UNIGRAM, result_file
from tasks import evaluate as module
from tasks._checkpoint_models import log_perplexities
from tasks._mlflow import Dataset, RunFacts, Tracking, log_datasets, recorded_run_id
from tasks._mlflow_events import Forwarder
from tasks.evaluate import (
    Scoring,
    Target,
    evaluation_summary,
    kept_checkpoints,
    score_key,
    unless_deleted,
)
from tasks.index import RunData
from tests.tasks.events import EventLog

DATASETS = {
    split: Dataset(f"{split}-abc", split * 20, "/tokenized/abc", {"tokens": 10})
    for split in ("train", "valid", "test")
}


def artifact(stage: str, **counts: Any) -> Artifact:
    return Artifact(stage=stage, key="ab" * 8, path="/", digest=stage * 8, counts=counts)


class Ranks:
    """Replacement of the ranks: writes results, and fails where it is told to."""

    def __init__(self) -> None:
        self.jobs: list[list[str]] = []
        self.fails_at = ""
        self.hangs_at = ""
        self.stopped = False

    def __call__(self, job: EvaluateJob, scratch: Path, on_poll: Callable[[], None]) -> None:
        names = [Path(path).name for path in job.checkpoints] + [UNIGRAM] * job.unigram
        self.jobs.append(names)
        for name in names:
            if name == self.fails_at:
                raise RankLostError("a rank died")
            if name == self.hangs_at:
                self.hang(on_poll)
            write_json(result_file(job.output, name), {"iteration": len(name)})

    def hang(self, on_poll: Callable[[], None]) -> None:
        try:
            while True:
                on_poll()
        except Exception:
            self.stopped = True
            raise


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ranks:
    ranks = Ranks()
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path / "workspace"))
    monkeypatch.setattr(stages, "evaluate", ranks)
    monkeypatch.setattr(module, "make_job", make_job)
    monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("test"))
    return ranks


def make_job(config: RunConfig, directory: Path, data: RunData[Artifact]) -> EvaluateJob:
    return EvaluateJob(
        config=config,
        token_prefixes=(),
        index_directory="/",
        tokenizer_directory="/",
        vocab_size=8,
        special_tokens={},
        run_directory=str(directory),
        exit_directory=str(directory),
        ranks=1,
        threads_per_rank=1,
        checkpoints=(),
        unigram=False,
        output="/",
    )


@pytest.fixture
def kept(run_directory: Path) -> Iterator[tuple[Target, ...]]:
    for iteration in (10, 20, 30):
        save(run_directory, iteration)
    with kept_checkpoints(run_directory) as kept:
        yield kept


def save(run_directory: Path, iteration: int) -> None:
    save_checkpoint(run_directory / "checkpoints", iteration, {"model.a": torch.ones(3)}, {})


def scoring_of(config: RunConfig, run_directory: Path, targets: tuple[Target, ...]) -> Scoring:
    data = RunData(artifact("tokenize"), artifact("tokenizer"), artifact("index"))
    return Scoring(config, run_directory, targets, data)


def test_key_is_that_of_the_checkpoint_and_not_of_the_training(
    config: RunConfig, run_directory: Path, kept: tuple[Target, ...]
) -> None:
    longer = config.model_copy(update={"train": config.train.model_copy(update={"train_iters": 9})})
    index = artifact("index")
    keys = [score_key(config, index, target).key for target in kept]
    assert len(set(keys)) == 3
    save(run_directory, 40)
    with kept_checkpoints(run_directory) as extended:
        assert [score_key(longer, index, target).key for target in extended][:3] == keys


def test_ranks_start_once_for_all_missing_scores(
    config: RunConfig, run_directory: Path, kept: tuple[Target, ...], ranks: Ranks
) -> None:
    first, second, third = kept
    folder = Workspace.of().folder("evaluate-checkpoint")
    build_artifact(folder, score_key(config, artifact("index"), second), lambda directory: {})
    with scoring_of(config, run_directory, (*kept, Target(UNIGRAM))) as scoring:
        for target in (first, third, Target(UNIGRAM)):
            assert scoring.score(target) == {"iteration": len(target.name)}
    assert ranks.jobs == [[first.name, third.name, UNIGRAM]]


def test_retry_after_lost_ranks_scores_only_the_rest(
    config: RunConfig, run_directory: Path, kept: tuple[Target, ...], ranks: Ranks
) -> None:
    ranks.fails_at = kept[1].name
    with scoring_of(config, run_directory, kept) as scoring:
        scoring.score(kept[0])
        with pytest.raises(RankLostError, match="a rank died"):
            scoring.score(kept[1])
        ranks.fails_at = ""
        scoring.score(kept[1])
        scoring.score(kept[2])
    names = [target.name for target in kept]
    assert ranks.jobs == [names, names[1:]]


def test_error_of_the_flow_ends_the_ranks(
    config: RunConfig, run_directory: Path, kept: tuple[Target, ...], ranks: Ranks
) -> None:
    ranks.hangs_at = kept[1].name

    def flow() -> None:
        with scoring_of(config, run_directory, kept) as scoring:
            scoring.score(kept[0])
            raise KeyError

    with pytest.raises(KeyError):
        flow()
    assert ranks.stopped


def test_a_thread_that_cannot_start_is_the_error(
    config: RunConfig,
    run_directory: Path,
    kept: tuple[Target, ...],
    ranks: Ranks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    with (
        pytest.raises(RuntimeError, match="can't start new thread"),
        scoring_of(config, run_directory, kept) as scoring,
    ):
        scoring.score(kept[0])


def test_retention_spares_a_checkpoint_until_it_is_scored(run_directory: Path) -> None:
    root = run_directory / "checkpoints"
    save(run_directory, 10)
    with kept_checkpoints(run_directory) as kept:
        save(run_directory, 20)
        assert apply_retention(root, keep_last=1, keep_best=False) == []
        assert kept[0].exists
    deleted = apply_retention(root, keep_last=1, keep_best=False)
    assert [path.name for path in deleted] == ["iter_0000010"]


def test_deleted_checkpoint_is_one_line_and_no_failure(
    run_directory: Path, ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    save(run_directory, 10)
    with kept_checkpoints(run_directory) as (target,):
        pass

    def fail(*, deletes: bool) -> Any:
        if deletes:
            Path(target.path).rename(run_directory / "gone")
        raise CheckpointError("it has no complete.json")

    with pytest.raises(CheckpointError):
        unless_deleted(target, lambda: fail(deletes=False))
    with caplog.at_level(logging.INFO):
        state = unless_deleted(target, lambda: fail(deletes=True))
    assert getattr(state, "name", None) == module.DELETED
    assert [record.getMessage() for record in caplog.records if record.name == "test"] == [
        "iter_0000010 was deleted by the training's retention before it was scored"
    ]


def test_perplexities_refer_to_the_splits_of_the_run(
    tracking: Tracking, log: EventLog, run_directory: Path, config: RunConfig
) -> None:
    facts = RunFacts("0123456789abcdef", DATASETS)
    log.checkpoint(100, 1.0)
    run_id = Forwarder(tracking, run_directory, config, facts).flush()
    assert recorded_run_id(run_directory) == run_id
    for moment in (1, 2):
        log_datasets(tracking, run_id, DATASETS)
        log_perplexities(
            tracking, run_id, {100: {"test_ppl": 3.0}}, datasets=DATASETS, timestamp_ms=moment
        )
    inputs = tracking.client.get_run(run_id).inputs.dataset_inputs
    roles = {each.tags[0].value: (each.dataset.name, each.dataset.digest) for each in inputs}
    assert len(inputs) == 3
    assert roles == {
        split: (dataset.name, dataset.recorded_digest) for split, dataset in DATASETS.items()
    }
    (model,) = tracking.client.search_logged_models([tracking.experiment_id])
    references = {each.key: (each.dataset_name, each.dataset_digest) for each in model.metrics}
    assert references["test_ppl"] == roles["test"]
    assert references["valid_ppl"] == references["valid_loss"] == roles["valid"]
    assert len(model.metrics) == 3


def test_perplexity_without_a_data_set_is_not_logged_again(
    tracking: Tracking, log: EventLog, run_directory: Path, config: RunConfig
) -> None:
    log.checkpoint(100, None)
    run_id = Forwarder(tracking, run_directory, config, RunFacts("0123456789abcdef")).flush()
    for datasets in ({}, DATASETS):
        log_perplexities(
            tracking, run_id, {100: {"test_ppl": 3.0}}, datasets=datasets, timestamp_ms=1
        )
    (model,) = tracking.client.search_logged_models([tracking.experiment_id])
    assert [(each.key, each.dataset_name) for each in model.metrics] == [("test_ppl", None)]


def test_report_has_a_row_for_each_checkpoint_and_names_the_best(tmp_path: Path) -> None:
    rows = []
    for number, loss in ((1, 2.0), (2, 1.0)):
        name = f"iter_000000{number}"
        row = {"checkpoint": name, "iteration": number, "valid_loss": loss}
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / module.SCORE, row)
        rows.append(artifact("row").model_copy(update={"path": str(tmp_path / name)}))
    (tmp_path / UNIGRAM).mkdir()
    write_json(tmp_path / UNIGRAM / module.SCORE, {"valid": 5.0, "test": 6.0})
    unigram = artifact("unigram").model_copy(update={"path": str(tmp_path / UNIGRAM)})
    report = module.perplexity_report(unigram, rows)
    assert [row["checkpoint"] for row in report["checkpoints"]] == ["iter_0000001", "iter_0000002"]
    assert module.best_row(report)["checkpoint"] == "iter_0000002"
    assert report["unigram"] == {"valid": 5.0, "test": 6.0}


def test_summary_shortens_perplexities_of_a_diverged_run() -> None:
    row = {"checkpoint": "iter_0000010", "valid_ppl": 3.05e51, "test_ppl": math.inf}
    summary = evaluation_summary(
        {
            "checkpoints": [{**row, "disagreement": None}],
            "unigram": {"valid": 738.2, "test": 653.3},
        }
    )
    assert "| iter_0000010 | 3.05e+51 | inf |" in summary
    assert "| unigram model | 738.20 | 653.30 |" in summary
