"""Reports of a run with several losses, in one attempt and after a resume."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megacore.checkpoint.format import read_state
from megacore.config.load import parse_config
from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.data.samples import Batch, Indices
from megacore.engine.native import NativeEngine
from megacore.models.stage import Stage
from megacore.observe.recorder import Recorder
from megacore.parallel.mesh import ProcessMesh
from megacore.train.loop import Datasets, Trainer
from tests.train import _runs

LENGTH, VOCAB = 16, 61
TOKENS = SpecialTokens(pad=0, cls=1, sep=2, mask=3)


class Pairs:
    """BERT samples that depend only on their index.

    Every fourth token is predicted, and the end may be padding.
    """

    seq_length, width = LENGTH, 3 * LENGTH + 1
    sources = (0,)

    def __len__(self) -> int:
        return 64

    def gather(self, indices: Indices, out: Batch | None = None) -> Batch:
        return np.stack([self._row(int(index)) for index in indices])

    def _row(self, index: int) -> Batch:
        positions = np.arange(LENGTH)
        padding = positions >= LENGTH - index % 5
        tokens = 4 + (index + 3 * positions) % (VOCAB - 4)
        predicted = (positions % 4 == 1) & ~padding
        row = [
            np.where(padding, -1, np.where(predicted, 3, tokens)),
            np.where(predicted, tokens, -1),
            np.where(padding, -1, positions >= LENGTH // 2),
            [index % 2],
        ]
        return np.concatenate(row).astype(np.int64)


def config(train_iters: int, **data: Any) -> RunConfig:
    values = _runs.config().model_dump(exclude_unset=True)
    values["data"] |= {
        "tokenizer": {"kind": "hf", "name": "any"},
        "split_sentences": True,
        "append_eod": False,
        **data,
    }
    values["train"] |= {"train_iters": train_iters, "log_interval": 4, "eval_interval": 3}
    return parse_config({**values, "family": "bert"}, origin="tests")


def train(run: RunConfig, directory: Path, attempt: int = 1) -> None:
    mesh = ProcessMesh.serial()
    engine = NativeEngine(Stage(run, VOCAB, mesh, special_tokens=TOKENS), run, "fp32")
    with Recorder(directory, attempt=attempt, rank=0, tensorboard=False) as recorder:
        spec = ModelSpec.of(run, VOCAB, TOKENS)
        data = Datasets(Pairs(), Pairs(), Pairs())
        Trainer(run, engine, mesh, data, recorder, directory, spec=spec).run()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    train(config(6), directory)
    return directory


@pytest.mark.parametrize("kind", ["step", "evaluation"])
def test_each_loss_is_reported_under_its_name(whole: Path, kind: str) -> None:
    for event in _runs.events(whole, kind):
        assert event["lm_loss"] == pytest.approx(np.log(VOCAB), rel=0.2)
        assert event["sop_loss"] == pytest.approx(np.log(2), rel=0.3)
        assert "nsp_loss" not in event


def test_sentence_task_determines_the_name_of_its_loss(tmp_path: Path) -> None:
    train(config(1, masked_lm={"sentence_task": "nsp"}), tmp_path)
    assert {"lm_loss", "nsp_loss"} <= _runs.events(tmp_path, "step")[-1].keys()
    assert "sop_loss" not in _runs.events(tmp_path, "evaluation")[-1]


def test_interval_means_survive_a_stop_within_the_interval(whole: Path, tmp_path: Path) -> None:
    train(config(3), tmp_path)
    assert set(
        read_state(tmp_path / "checkpoints/iter_0000003")["train"]["interval"]["losses"]
    ) == {
        "lm_loss",
        "sop_loss",
    }
    train(config(6), tmp_path, attempt=2)
    expected, resumed = (
        [
            (event["iteration"], event["lm_loss"], event["sop_loss"])
            for event in _runs.events(path, "step")
            if event["iteration"] > 3
        ]
        for path in (whole, tmp_path)
    )
    assert resumed == expected
    assert len(expected) == 2


def test_minimised_loss_is_the_sum_of_all_losses() -> None:
    run = config(1)
    engine = NativeEngine(
        Stage(run, VOCAB, ProcessMesh.serial(), special_tokens=TOKENS), run, "fp32"
    )
    engine.forward_backward(iter([torch.from_numpy(Pairs().gather(range(2)))] * 2), [1, 2])
    update = engine.update(0.0, 0.0)
    assert update.losses[0] == pytest.approx(sum(update.terms.values()), rel=1e-6)
    assert update.loss == pytest.approx(
        update.terms["lm_loss"] + update.terms["sop_loss"], rel=1e-6
    )
    assert list(update.terms) == ["lm_loss", "sop_loss"]
