"""Runs of BERT and T5 that are resumed in one layout after another."""

from pathlib import Path
from typing import Any

import pytest

from megacore.config.model import Family
from megacore.config.spec import ModelSpec
from megacore.data.samples import Batch, Indices
from megacore.engine.native import NativeEngine
from megacore.models.stage import Stage
from megacore.observe.recorder import Recorder
from megacore.parallel.mesh import ProcessMesh
from megacore.train.loop import Datasets, Trainer
from tests._dist import own_groups, run_distributed, still_alive
from tests.checkpoint._read import tensor_shapes
from tests.parity import _training as parity
from tests.train import _runs

T5 = {"position_embedding_type": "relative", "normalization": "rmsnorm", "add_bias_linear": False}
MODELS: dict[Family, dict[str, Any]] = {"bert": {"num_layers": 2}, "t5": T5 | {"num_layers": 2}}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"pipeline_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"data_parallel_sharding": "optimizer"},
)


class Rows:
    """The samples of the parity tests."""

    seq_length = parity.SEQ_LENGTH
    sources = (0,)

    def __init__(self, family: Family) -> None:
        self._rows = parity.samples(family).numpy()
        self.width = self._rows.shape[1]

    def __len__(self) -> int:
        return len(self._rows)

    def gather(self, indices: Indices, out: Batch | None = None) -> Batch:
        return self._rows[list(indices)]


def train(
    family: Family, parallel: dict[str, Any], train_iters: int, directory: Path, attempt: int = 1
) -> None:
    case = parity.Case(
        parallel,
        train={"train_iters": train_iters, "log_interval": 1},
        model=MODELS[family],
        optim={"lr_decay_iters": 20},
        family=family,
    )
    config = parity.config(case)
    mesh = parity.mesh_of(config) if parallel else ProcessMesh.serial()
    engine = NativeEngine(
        Stage(config, parity.VOCAB, mesh, special_tokens=parity.TOKENS), config, "fp32"
    )
    data, spec = (
        Datasets(Rows(family), Rows(family), Rows(family)),
        ModelSpec.of(config, parity.VOCAB, parity.TOKENS),
    )
    with Recorder(directory, attempt=attempt, rank=mesh.rank, tensorboard=False) as recorder:
        Trainer(config, engine, mesh, data, recorder, directory, spec=spec).run()


def change_layouts(root: Path) -> None:
    for family in MODELS:
        for number, parallel in enumerate(LAYOUTS, 1):
            still_alive()
            with own_groups():
                train(family, parallel, 2 * number, root / family, attempt=number)


@pytest.fixture(scope="module")
def changing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("changing")
    run_distributed(2, change_layouts, root)
    return root


@pytest.mark.parametrize("family", MODELS)
def test_resumed_run_matches_a_serial_run_in_every_layout(
    family: Family, changing: Path, tmp_path: Path
) -> None:
    train(family, {}, 6, tmp_path)
    for kind in ("step", "evaluation"):
        events = {event["iteration"]: event for event in _runs.events(changing / family, kind)}
        for event in _runs.events(tmp_path, kind):
            changed = events[event["iteration"]]
            for name in {"lm_loss", "sop_loss", "grad_norm"} & event.keys():
                assert changed[name] == pytest.approx(event[name], rel=1e-4)
    last = "checkpoints/iter_0000006"
    assert tensor_shapes(changing / family / last) == tensor_shapes(tmp_path / last)
