"""The comparison that selects the best model of a fine-tuning."""

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megacore.checkpoint.collective import RankGroup
from megacore.checkpoint.format import checkpoint_directories
from megacore.checkpoint.retain import remove_stale
from megacore.errors import TrainingError
from megacore.finetune.best import Best, BestModelStore
from megacore.finetune.checkpoints import AtomicDirectory


def store(tmp_path: Path, *, larger_is_better: bool, best: float | None) -> BestModelStore:
    """Return a store without files, whose best model after 10 steps has the metric `best`."""
    task: Any = SimpleNamespace(metric="score", larger_is_better=larger_is_better)
    unused: Any = None
    result = BestModelStore(task, unused, unused, tmp_path)
    if best is not None:
        result.best = Best(10, best, {"score": best}, None)
    return result


@pytest.mark.parametrize("larger_is_better", [True, False])
def test_a_model_is_best_in_the_direction_of_its_metric(
    tmp_path: Path, larger_is_better: bool
) -> None:
    models = store(tmp_path, larger_is_better=larger_is_better, best=0.5)
    assert models.beats(20, {"score": 0.6}) is larger_is_better
    assert models.beats(20, {"score": 0.4}) is not larger_is_better
    assert not models.beats(20, {"score": 0.5})


def test_a_first_model_and_one_after_nan_are_best(tmp_path: Path) -> None:
    assert store(tmp_path, larger_is_better=True, best=None).beats(10, {"score": -1.0})
    assert store(tmp_path, larger_is_better=True, best=float("nan")).beats(20, {"score": -1.0})


def test_a_repeated_iteration_is_not_better(tmp_path: Path) -> None:
    assert not store(tmp_path, larger_is_better=True, best=0.5).beats(10, {"score": 0.9})


def test_a_missing_metric_is_refused_with_the_existing_ones(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"train\.best_metric is score .* gave f1, loss"):
        store(tmp_path, larger_is_better=True, best=None).beats(10, {"loss": 1.0, "f1": 0.5})


def test_an_earlier_best_model_that_cannot_be_deleted_is_out_of_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = store(tmp_path, larger_is_better=True, best=0.5)
    finished = AtomicDirectory(models.root, RankGroup())
    for iteration in (5, 10):
        finished.finish(finished.stage(iteration), iteration, None)

    def busy(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        models._remove_others()
        finished.finish(finished.stage(10), 10, None)  # in place of the one before
        assert [path.name for path in checkpoint_directories(models.root)] == ["iter_0000010"]
        assert len(list(models.root.iterdir())) == 3
    assert len(remove_stale(models.root)) == 2
