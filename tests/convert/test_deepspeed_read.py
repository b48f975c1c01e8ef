"""DeepSpeed checkpoints of megacore's models, read bit for bit at every ZeRO stage."""

import shutil
from pathlib import Path

import pytest
import torch

from megacore.artifact.files import write_json
from megacore.checkpoint.format import verify
from megacore.checkpoint.load import load_checkpoint
from megacore.checkpoint.spec import read_spec
from megacore.convert.deepspeed.read import open_deepspeed
from megacore.convert.imported import import_model
from megacore.errors import CheckpointError, ConversionError
from megacore.jobs.run import TrainJob
from tests._dist import run_distributed
from tests.checkpoint._read import read_tensors
from tests.convert._deepspeed import (
    CASES,
    STEPS,
    TAG,
    UNIVERSAL,
    VOCAB_SIZE,
    EngineState,
    needs_deepspeed,
    spec_and_config,
    write_all,
)

pytestmark = [needs_deepspeed, pytest.mark.slow]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, EngineState]]:
    """Return a directory of checkpoints with the model's description, and the engines' states."""
    root = tmp_path_factory.mktemp("deepspeed")
    states = run_distributed(2, write_all, str(root))
    assert states[0].keys() == CASES.keys()
    write_json(root / "state.json", {"model": spec_and_config()[0].model_dump(mode="json")})
    return root, states[0]


def assert_read(directory: Path, state: EngineState) -> None:
    read = open_deepspeed(directory)
    assert read.spec == spec_and_config()[0]
    kinds = {"weights": read.tensors, **read.moments}
    assert kinds.keys() == {"weights", "exp_avg", "exp_avg_sq"}
    for kind, tensors in kinds.items():
        expected = getattr(state, kind)
        assert tensors.keys() == expected.keys()
        for name, value in expected.items():
            assert tensors[name].dtype == torch.float32
            assert torch.equal(tensors[name], value), f"{kind} {name}"
    assert read.iteration == STEPS
    assert read.remarks == ()


@pytest.mark.parametrize("name", CASES)
def test_every_stage_and_precision_is_read_exactly(
    checkpoints: tuple[Path, dict[str, EngineState]], name: str
) -> None:
    root, states = checkpoints
    assert_read(root / name, states[name])  # through the file `latest`
    assert_read(root / name / TAG, states[name])


@pytest.mark.parametrize("name", UNIVERSAL)
def test_universal_checkpoints_are_read_exactly(
    checkpoints: tuple[Path, dict[str, EngineState]], name: str
) -> None:
    root, states = checkpoints
    directory = root / name / f"{TAG}_universal"
    assert_read(directory, states[name])
    assert open_deepspeed(directory).optimizer_steps == STEPS


def test_half_precision_weights_differ_from_the_main_weights(
    checkpoints: tuple[Path, dict[str, EngineState]],
) -> None:
    root, states = checkpoints
    state = torch.load(root / "zero1-bf16" / TAG / "mp_rank_00_model_states.pt", weights_only=True)
    name = "embedding.word_embeddings.weight"
    assert state["module"][f"model.{name}"].dtype == torch.bfloat16
    assert not torch.equal(
        state["module"][f"model.{name}"].float(), states["zero1-bf16"].weights[name]
    )


def test_an_import_is_a_checkpoint_with_moments(
    checkpoints: tuple[Path, dict[str, EngineState]], tmp_path: Path
) -> None:
    root, states = checkpoints
    source = root / "zero2-bf16"
    checkpoint = import_model(open_deepspeed(source), source, tmp_path / "out")
    assert checkpoint == tmp_path / "out" / f"iter_{STEPS:07d}"
    verify(checkpoint)
    assert read_spec(checkpoint) == spec_and_config()[0]
    tensors = read_tensors(checkpoint)
    expected = {f"model.{name}": value for name, value in states["zero2-bf16"].weights.items()}
    for kind in ("exp_avg", "exp_avg_sq"):
        expected |= {
            f"optimizer.{kind}.{name}": value
            for name, value in getattr(states["zero2-bf16"], kind).items()
        }
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())
    # A run that starts from these weights loads only them.
    weights = {
        name: torch.zeros_like(value)
        for name, value in expected.items()
        if name.startswith("model.")
    }
    state = load_checkpoint(checkpoint, weights, prefix="model.")
    assert state["engine"] == {"optimizer_steps": STEPS, "loss_scaler": None}
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())


def test_the_model_is_described_by_the_runs_job_file(
    checkpoints: tuple[Path, dict[str, EngineState]], tmp_path: Path
) -> None:
    root, states = checkpoints
    shutil.copytree(root / "zero1", tmp_path / "run" / "ds")
    with pytest.raises(
        ConversionError,
        match=r"does not say which: put the run\.json of its run, or the state\.json",
    ):
        open_deepspeed(tmp_path / "run" / "ds")
    spec, config = spec_and_config()
    TrainJob(
        exit_directory="x",
        ranks=2,
        threads_per_rank=1,
        config=config,
        token_prefixes=("x",),
        index_directory="x",
        tokenizer_directory="tok",
        vocab_size=VOCAB_SIZE,
        special_tokens=spec.special_tokens,
        run_directory="x",
    ).write(tmp_path / "run" / "run.json")
    read = open_deepspeed(tmp_path / "run" / "ds")
    assert read.spec == spec.model_copy(update={"tokenizer_directory": "tok"})
    assert read.tensors.keys() == states["zero1"].weights.keys()


def test_a_description_of_another_model_is_refused(
    checkpoints: tuple[Path, dict[str, EngineState]], tmp_path: Path
) -> None:
    root, _ = checkpoints
    shutil.copytree(root / "zero3" / TAG, tmp_path / TAG)
    spec, _ = spec_and_config()
    other = spec.model_copy(update={"model": spec.model.model_copy(update={"num_layers": 4})})
    write_json(tmp_path / "state.json", {"model": other.model_dump(mode="json")})
    with pytest.raises(
        CheckpointError, match=r"it lacks encoder\.layers\.3\.input_layernorm\.weight.* and 8 more"
    ):
        open_deepspeed(tmp_path / TAG)
