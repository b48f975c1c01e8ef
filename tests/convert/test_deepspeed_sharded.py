"""megacore's models in DeepSpeed files of tensor-parallel ranks and pipeline stages."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.artifact.files import write_json
from megacore.config.spec import ModelSpec
from megacore.convert.deepspeed import files
from megacore.convert.deepspeed.read import open_deepspeed
from megacore.convert.inert import Record
from megacore.convert.megatron.table import WORD_EMBEDDINGS
from megacore.errors import CheckpointError, ParallelLayoutError
from megacore.models.build import build_bare
from megacore.parallel.mesh import ParallelGroup, ProcessMesh
from megacore.tensor_parallel import partitions
from tests._dist import run_distributed
from tests.checkpoint._read import read_tensors
from tests.convert._deepspeed import LAYOUTS, needs_deepspeed, write_divided
from tests.convert._megatron import ITERATION, megatron_spec, weights
from tests.convert._megatron_deepspeed import REPLICAS, write_zero1

TIED = f"tied_modules.{WORD_EMBEDDINGS.replace('.', '_')}.weight"


def parts(spec: ModelSpec, tensors: dict[str, Tensor], tensor: int) -> list[dict[str, Tensor]]:
    """Return the part of a model on each tensor-parallel rank of megacore."""
    cuts = partitions(build_bare(spec, ProcessMesh(tensor_parallel=ParallelGroup(size=tensor))))
    return [
        {
            name: value.chunk(tensor, cuts[name].dim)[rank].clone() if name in cuts else value
            for name, value in tensors.items()
        }
        for rank in range(tensor)
    ]


def state(ranks: int) -> dict[str, object]:
    return {"global_steps": ITERATION, "mp_world_size": ranks, "dp_world_size": REPLICAS}


def assert_read(directory: Path, tensors: dict[str, Tensor]) -> None:
    read = open_deepspeed(directory)
    assert (read.iteration, read.optimizer_steps) == (ITERATION, ITERATION)
    for loaded, factor in (
        (read.tensors, 1.0),
        (read.moments["exp_avg"], 2.0),
        (read.moments["exp_avg_sq"], 4.0),
    ):
        assert loaded.keys() == tensors.keys()
        assert all(torch.equal(loaded[name], factor * value) for name, value in tensors.items())


def describe(folder: Path, spec: ModelSpec) -> None:
    write_json(folder / "state.json", {"model": spec.model_dump(mode="json")})


@pytest.mark.parametrize("name", ["llama", "bert", "gpt-gated"])
def test_tensor_parallel_ranks_are_joined(tmp_path: Path, name: str) -> None:
    spec = megatron_spec(name)
    tensors = weights(spec)
    describe(tmp_path, spec)
    for rank, rank_part in enumerate(parts(spec, tensors, 2)):
        named = {f"module.model.{key}": value for key, value in rank_part.items()}
        halves = {f"model.{key}": value.bfloat16() for key, value in rank_part.items()}
        write_zero1(tmp_path, rank, named, state(2), halves)
    assert_read(tmp_path, tensors)


def test_pipeline_stages_with_a_tied_table_are_joined(tmp_path: Path) -> None:
    spec = megatron_spec("gpt")
    tensors = weights(spec)
    describe(tmp_path, spec)
    torch.save({"weight": tensors[WORD_EMBEDDINGS]}, tmp_path / "layer_00-model_00-model_states.pt")
    for stage, layers in enumerate(((0, 1), (2, 3))):
        first = (
            {name for name in tensors if name.startswith("embedding.position")}
            if not stage
            else set()
        )
        last = {name for name in tensors if name.startswith("encoder.final")} if stage else set()
        stage_names = (
            {
                n
                for n in tensors
                if any(n.startswith(f"encoder.layers.{layer}.") for layer in layers)
            }
            | first
            | last
        )
        named = {f"{2 * stage + 1}.chunk.{name}": tensors[name] for name in stage_names}
        write_zero1(
            tmp_path, stage, {TIED: tensors[WORD_EMBEDDINGS], **named}, state(2) | DIMENSIONS, None
        )
    assert_read(tmp_path, tensors)


DIMENSIONS = {"checkpoint_parallel_dimensions": {"pp_degree": 2, "tp_degree": 1}}


def test_ranks_that_differ_in_a_replicated_tensor_are_refused(tmp_path: Path) -> None:
    spec = megatron_spec("gpt")
    describe(tmp_path, spec)
    norm = "encoder.final_layernorm.bias"
    for rank, rank_part in enumerate(parts(spec, weights(spec), 2)):
        write_zero1(tmp_path, rank, rank_part | {norm: rank_part[norm] + rank}, state(2), rank_part)
    with pytest.raises(
        CheckpointError, match=r"final_layernorm\.bias of tensor rank 1 differs from that of"
    ):
        open_deepspeed(tmp_path)


def test_a_number_of_ranks_that_cannot_divide_the_model_is_refused(tmp_path: Path) -> None:
    spec = megatron_spec("gpt")
    describe(tmp_path, spec)
    tensors = weights(spec)
    for rank in range(3):
        write_zero1(tmp_path, rank, tensors, state(3), None)
    with pytest.raises(
        ParallelLayoutError, match="is not a multiple of the tensor parallel size 3"
    ):
        open_deepspeed(tmp_path)


def test_flat_main_weights_without_zero_are_read(tmp_path: Path) -> None:
    spec = megatron_spec("gpt")
    tensors = {name: value + 0.001 for name, value in weights(spec).items()}
    describe(tmp_path, spec)
    module = {f"model.{name}": value.bfloat16() for name, value in tensors.items()}
    groups = [
        [name for name, value in tensors.items() if (value.dim() > 1) == matrices]
        for matrices in (True, False)
    ]
    flats = [
        torch.cat([tensors[name].reshape(-1) for name in group] + [torch.zeros(3)])
        for group in groups
    ]
    moments = {
        number: {"step": ITERATION, "exp_avg": 2 * flat, "exp_avg_sq": 4 * flat}
        for number, flat in enumerate(flats)
    }
    optimizer = {
        "fp32_groups_flat": flats,
        "optimizer_state_dict": {"state": moments, "param_groups": []},
    }
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({**state(1), "module": module, "optimizer": optimizer}, path)
    assert_read(tmp_path, tensors)
    flats[1][-4] *= 2
    torch.save({**state(1), "module": module, "optimizer": optimizer}, path)
    with pytest.raises(
        CheckpointError, match=r"main weights in fp32 that are not those of its 52 parameters"
    ):
        open_deepspeed(tmp_path)


def test_weights_only_in_half_precision_are_remarked(tmp_path: Path) -> None:
    spec = megatron_spec("gpt")
    describe(tmp_path, spec)
    module = {name: (value % 128).bfloat16() for name, value in weights(spec).items()}
    torch.save({**state(1), "module": module}, tmp_path / "mp_rank_00_model_states.pt")
    read = open_deepspeed(tmp_path)
    assert "half precision" in read.remarks[0]
    assert "the weights are taken" in read.remarks[1]
    assert all(torch.equal(read.tensors[name], value.float()) for name, value in module.items())


@needs_deepspeed
def test_checkpoints_of_deepspeed_and_of_the_engine_are_equal(tmp_path: Path) -> None:
    (ours, _) = run_distributed(2, write_divided, str(tmp_path))
    for name, (_, zero_stage, _) in LAYOUTS.items():
        expected = read_tensors(Path(ours[name]))
        shutil.copy(Path(ours[name]) / "state.json", tmp_path / name / "state.json")
        read = open_deepspeed(tmp_path / name)
        converted = {f"model.{key}": value for key, value in read.tensors.items()}
        for kind, moments in read.moments.items():
            converted |= {f"optimizer.{kind}.{key}": value for key, value in moments.items()}
        assert len(read.moments) == (2 if zero_stage else 0)
        assert converted.keys() == {
            key for key in expected if zero_stage or key.startswith("model.")
        }
        assert all(torch.equal(value, expected[key]) for key, value in converted.items()), name


@pytest.mark.parametrize("value", [2, Record(2), Record(Record, "gradients")])
def test_a_stage_may_be_a_number_or_a_member_of_an_enumeration(value: Any) -> None:
    assert files.zero_stage(value) == 2


def test_frozen_parameters_of_every_zero_stage_are_read(tmp_path: Path) -> None:
    spec = megatron_spec("gpt")
    tensors = weights(spec)
    describe(tmp_path, spec)
    trained = "encoder.final_layernorm.bias"
    frozen = {f"model.{name}": value for name, value in tensors.items() if name != trained}
    folder = tmp_path / "zero1"
    folder.mkdir()
    write_zero1(folder, 0, {f"model.{trained}": tensors[trained]}, state(1), frozen)
    _write_frozen_stage3(tmp_path / "zero3", f"model.{trained}", tensors[trained], frozen)
    for name in ("zero1", "zero3"):
        read = open_deepspeed(tmp_path / name)
        assert all(torch.equal(read.tensors[key], value) for key, value in tensors.items())
        assert dict(read.moments) == {}
        assert "Adam's moments of every parameter" in read.remarks[0]


def _write_frozen_stage3(
    folder: Path, name: str, trained: Tensor, frozen: dict[str, Tensor]
) -> None:
    """Write two replicas, each with half of a trained parameter and of the frozen ones."""
    folder.mkdir()
    for replica in range(REPLICAS):
        model = {
            "param_shapes": [{name: trained.shape}],
            "frozen_param_shapes": {key: value.shape for key, value in frozen.items()},
            "frozen_param_fragments": {
                key: value.reshape(-1).chunk(2)[replica].clone() for key, value in frozen.items()
            },
        }
        torch.save(
            {**state(1), **model}, folder / f"zero_pp_rank_{replica}_mp_rank_00_model_states.pt"
        )
        half = trained.chunk(2)[replica].clone()
        inner = {"state": {0: {"step": 3, "exp_avg": half, "exp_avg_sq": half}}, "param_groups": []}
        optimizer = {
            "zero_stage": 3,
            "partition_count": 2,
            "fp32_flat_groups": [half],
            "optimizer_state_dict": inner,
        }
        torch.save(
            {"optimizer_state_dict": optimizer},
            folder / f"zero_pp_rank_{replica}_mp_rank_00_optim_states.pt",
        )
