"""Runs that start from the weights of another checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megacore.checkpoint.format import read_state
from megacore.checkpoint.save import save_checkpoint
from megacore.checkpoint.spec import read_spec
from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec
from megacore.errors import CheckpointError, LaunchError
from megacore.models.build import build_model
from megacore.parallel.mesh import ProcessMesh
from tests._dist import run_distributed, still_alive
from tests.checkpoint._read import read_tensors
from tests.train import _runs

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "dp2": {"data_parallel_sharding": "optimizer", "grad_reduce_bucket_mb": 0.01},
}


def config(
    pretrained: Path | None, parallel: dict[str, Any] | None = None, **train: Any
) -> RunConfig:
    values = _runs.config().train.model_dump() | {"train_iters": 2, "eval_interval": 100} | train
    return _runs.config(
        train=values | {"pretrained_checkpoint": pretrained and str(pretrained)},
        parallel=parallel or {},
        launch={"nproc_per_node": 2 if parallel else 1},
    )


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a checkpoint with only weights, of another seed, as conversion writes it."""
    other = _runs.config().model_copy(update={"seed": 77})
    model = build_model(other, _runs.VOCAB_SIZE, ProcessMesh.serial())
    weights = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    spec = ModelSpec.of(other, _runs.VOCAB_SIZE)
    return save_checkpoint(
        tmp_path_factory.mktemp("imported"), 0, weights, {"model": spec.model_dump(mode="json")}
    )


def train_in_all_layouts(data: Path, imported: Path, root: Path) -> list[str]:
    """Train from the weights in each layout, then with ones that rank 1 does not have.

    Returns the errors of the latter.
    """
    for name, parallel in LAYOUTS.items():
        for precision in ("fp32", "bf16"):
            still_alive()
            _runs.train(
                config(imported, parallel, precision=precision), data, root / name / precision
            )
    path = imported if dist.get_rank() == 0 else imported.with_name("iter_0000009")
    errors = []
    other_run = _runs.config(resume={"checkpoint": str(path)}).resume
    for run in (
        config(path, LAYOUTS["dp2"]),
        config(None, LAYOUTS["dp2"]).model_copy(update={"resume": other_run}),
    ):
        still_alive()
        with pytest.raises(LaunchError) as caught:
            _runs.train(run, data, root / "missing")
        errors.append(str(caught.value))
    return errors


def first_loss(run_directory: Path) -> float:
    return _runs.losses(run_directory)[1]


@pytest.fixture(scope="module")
def serial(data: Path, imported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("serial")
    _runs.train(config(imported), data, directory)
    return directory


def test_run_starts_with_the_weights_and_a_fresh_optimizer(
    data: Path, imported: Path, serial: Path
) -> None:
    unchanged = config(imported, train_iters=1)
    unchanged = unchanged.model_copy(
        update={"optim": unchanged.optim.model_copy(update={"lr": 0.0, "min_lr": 0.0})}
    )
    _runs.train(unchanged, data, serial / "unchanged")
    tensors = read_tensors(serial / "unchanged/checkpoints/iter_0000001")
    for name, weight in read_tensors(imported).items():
        assert torch.equal(tensors[name], weight), name
    state = read_state(serial / "unchanged/checkpoints/iter_0000001")
    assert (state["engine"]["optimizer_steps"], state["train"]["consumed_samples"]) == (1, 8)
    fresh = serial / "fresh"
    _runs.train(config(None), data, fresh)
    assert first_loss(fresh) != first_loss(serial)
    start = _runs.events(serial, "start")[0]
    assert (start["iteration"], start["resumed_from"]) == (0, None)


def test_layouts_and_precisions_start_with_the_same_losses(
    data: Path, imported: Path, serial: Path, tmp_path: Path
) -> None:
    errors = run_distributed(2, train_in_all_layouts, data, imported, tmp_path)
    for name in LAYOUTS:
        assert _runs.losses(tmp_path / name / "fp32") == pytest.approx(
            _runs.losses(serial), rel=1e-5
        )
        assert _runs.losses(tmp_path / name / "bf16") == pytest.approx(
            _runs.losses(serial), rel=1e-2
        )
    assert all("is not on host " in error for of_rank in errors for error in of_rank)


def test_resumed_run_keeps_its_own_weights(data: Path, imported: Path, tmp_path: Path) -> None:
    _runs.train(config(imported, train_iters=3), data, tmp_path / "resumed")
    _runs.train(config(imported, train_iters=6), data, tmp_path / "resumed", attempt=2)
    _runs.train(config(imported, train_iters=6), data, tmp_path / "whole")
    assert _runs.losses(tmp_path / "resumed") == _runs.losses(tmp_path / "whole")
    assert read_spec(tmp_path / "whole/checkpoints/iter_0000006") == ModelSpec.of(
        config(imported), _runs.VOCAB_SIZE, _runs.TOKENS
    )


def test_checkpoint_of_another_model_or_incomplete_is_refused(
    data: Path, imported: Path, tmp_path: Path
) -> None:
    other = _runs.config(
        model={"activation": "relu"},
        train=_runs.config().train.model_dump() | {"pretrained_checkpoint": str(imported)},
    )
    with pytest.raises(
        CheckpointError, match=r"another model: model\.activation is gelu_tanh there and relu here"
    ):
        _runs.train(other, data, tmp_path / "other")
    with pytest.raises(CheckpointError, match="is not complete: use another checkpoint"):
        _runs.train(config(tmp_path / "nothing"), data, tmp_path / "none")
    assert not (tmp_path / "other/checkpoints").exists()


LONG = 4 * _runs.SEQ_LENGTH
SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "linear": {"kind": "linear", "factor": 4.0},
    "yarn": {
        "kind": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": _runs.SEQ_LENGTH,
    },
}


def extended(pretrained: Path, positions: str, **model: Any) -> RunConfig:
    """Return a run with sequences of four times the length."""
    short = config(pretrained)
    return _runs.config(
        data={"seq_length": LONG},
        model={"position_embedding_type": positions} | model,
        train=short.train.model_dump(),
    )


@pytest.fixture(scope="module")
def short_rope(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a checkpoint of a model with rotary positions, trained with short sequences."""
    directory = tmp_path_factory.mktemp("short")
    run = _runs.config(
        model={"position_embedding_type": "rope"}, train=config(None).train.model_dump()
    )
    _runs.train(run, data, directory)
    return directory / "checkpoints/iter_0000002"


@pytest.fixture(scope="module")
def long_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("long")
    _runs.write_data(directory, _runs.config(data={"seq_length": LONG}))
    return directory


@pytest.mark.parametrize("scaling", SCALINGS)
def test_context_is_extended_with_other_rotary_frequencies(
    scaling: str, short_rope: Path, long_data: Path, tmp_path: Path
) -> None:
    run = extended(short_rope, "rope", rope_scaling=SCALINGS[scaling])
    _runs.train(run, long_data, tmp_path)
    (step, _) = _runs.events(tmp_path, "step")
    (*_, last) = _runs.events(tmp_path, "perplexity")
    assert step["seq_length"] == LONG
    assert [row["start"] for row in last["by_position"]] == list(range(0, LONG, 4))
    assert not _runs.events(tmp_path, "warning")
    spec = read_spec(tmp_path / "checkpoints/iter_0000002")
    assert (spec.max_position_embeddings, spec.model.rope_scaling) == (LONG, run.model.rope_scaling)
    begun = extended(short_rope, "rope", rope_scaling=SCALINGS[scaling])
    begun = begun.model_copy(update={"optim": begun.optim.model_copy(update={"lr": 1e-9})})
    _runs.train(begun, long_data, tmp_path / "begun")
    name = "model.encoder.layers.0.self_attention.query_key_value.weight"
    weights = read_tensors(tmp_path / "begun/checkpoints/iter_0000002")[name]
    torch.testing.assert_close(weights, read_tensors(short_rope)[name], rtol=0, atol=1e-7)


def test_scaling_for_another_length_is_warned_of(
    short_rope: Path, long_data: Path, tmp_path: Path
) -> None:
    scaling = {"kind": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
    _runs.train(extended(short_rope, "rope", rope_scaling=scaling), long_data, tmp_path)
    (warning,) = _runs.events(tmp_path, "warning")
    assert "original_max_position_embeddings is 32, but" in warning["message"]
    assert "of a model of 16 tokens" in warning["message"]


def test_learned_positions_cannot_be_extended(
    imported: Path, long_data: Path, tmp_path: Path
) -> None:
    sentence = (
        "has a learned table of 16 positions, which cannot be extended to the 64 of this run: set "
        r"data\.seq_length to at most 16"
    )
    with pytest.raises(CheckpointError, match=sentence):
        _runs.train(extended(imported, "learned_absolute"), long_data, tmp_path)


def test_other_frequencies_for_the_same_length_are_another_model(
    short_rope: Path, data: Path, tmp_path: Path
) -> None:
    run = _runs.config(
        model={"position_embedding_type": "rope", "rope_scaling": SCALINGS["linear"]},
        train=config(short_rope).train.model_dump(),
    )
    with pytest.raises(CheckpointError, match=r"another model: model\.rope_scaling is null there"):
        _runs.train(run, data, tmp_path)
