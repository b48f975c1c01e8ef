"""Megatron-DeepSpeed's files of tensor-parallel ranks and pipelines, compared with Megatron-LM."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.config.spec import ModelSpec
from megacore.convert.deepspeed.read import open_deepspeed
from megacore.convert.megatron.checkpoint import open_megatron, write_megatron
from megacore.errors import CheckpointError, ConversionError
from tests.convert._megatron import ITERATION
from tests.convert._megatron_deepspeed import (
    as_deepspeeds,
    written_pipeline,
    written_universal,
    written_zero1,
)

LLAMA: dict[str, Any] = {
    "num_query_groups": 2,
    "activation": "swiglu",
    "normalization": "rmsnorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
}


def assert_read(
    directory: Path, spec: ModelSpec, tensors: dict[str, Tensor], *, moments: bool = True
) -> None:
    read = open_deepspeed(directory)
    assert read.iteration == ITERATION
    assert read.tensors.keys() == tensors.keys()
    assert all(torch.equal(read.tensors[name], value) for name, value in tensors.items())
    assert set(read.moments) == ({"exp_avg", "exp_avg_sq"} if moments else set())
    if moments:
        assert read.optimizer_steps == ITERATION
        for kind, factor in (("exp_avg", 2.0), ("exp_avg_sq", 4.0)):
            assert read.moments[kind].keys() == tensors.keys()
            assert all(
                torch.equal(read.moments[kind][name], factor * value)
                for name, value in tensors.items()
            )
    assert read.spec.model == spec.model
    assert read.spec.vocab_size == spec.vocab_size


@pytest.mark.parametrize(
    "model",
    [{}, LLAMA, {"untie_embeddings_and_output_weights": True}],
    ids=["gpt", "llama", "untied"],
)
def test_tensor_parallel_ranks_with_zero1_are_joined(tmp_path: Path, model: dict[str, Any]) -> None:
    spec, tensors = written_zero1(tmp_path, **model)
    assert_read(tmp_path, spec, tensors)


def test_the_model_equals_that_of_megatron_lms_files(tmp_path: Path) -> None:
    spec, tensors = written_zero1(tmp_path / "ds")
    write_megatron(spec, tensors, tmp_path / "megatron", iteration=ITERATION, tensor=2)
    ours, theirs = open_deepspeed(tmp_path / "ds"), open_megatron(tmp_path / "megatron")
    assert ours.spec == theirs.spec
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(ours.tensors[name], theirs.tensors[name]) for name in theirs.tensors)


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize(
    "model", [{}, {**LLAMA, "untie_embeddings_and_output_weights": True}], ids=["gpt", "llama"]
)
def test_pipeline_stages_are_joined(tmp_path: Path, model: dict[str, Any], zero: bool) -> None:
    spec, tensors = written_pipeline(tmp_path, zero=zero, **model)
    assert_read(tmp_path, spec, tensors, moments=zero)


def test_the_vocabulary_of_a_universal_checkpoint_is_padded(tmp_path: Path) -> None:
    spec, tensors = written_universal(tmp_path)
    table = "embedding.word_embeddings.weight"
    tensors[table][spec.vocab_size :] = 0
    assert_read(tmp_path, spec, tensors)


def test_a_file_without_args_is_refused(tmp_path: Path) -> None:
    written_zero1(tmp_path, tensor=1)
    path = tmp_path / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    del state["args"]
    torch.save(state, path)
    with pytest.raises(
        ConversionError, match=r"mp_rank_00_model_states\.pt has no args, which nothing else says"
    ):
        open_deepspeed(tmp_path)


def test_a_step_that_is_no_number_is_refused(tmp_path: Path) -> None:
    written_zero1(tmp_path, tensor=1)
    path = tmp_path / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    with as_deepspeeds():
        state = torch.load(path, weights_only=False)
        moments = state["optimizer_state_dict"]["base_optimizer_state"]["state"]
        moments[0]["step"] = torch.tensor(torch.inf)
        torch.save(state, path)
    with pytest.raises(CheckpointError, match=r"is not as DeepSpeed writes it \(OverflowError"):
        open_deepspeed(tmp_path)


def test_a_shape_that_is_no_shape_is_refused(tmp_path: Path) -> None:
    written_zero1(tmp_path, tensor=1)
    path = tmp_path / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    state["param_shapes"][0][next(iter(state["param_shapes"][0]))] = "text"
    torch.save(state, path)
    with pytest.raises(CheckpointError, match=r"is not as DeepSpeed writes it \(TypeError"):
        open_deepspeed(tmp_path)


def test_names_of_another_program_are_refused(tmp_path: Path) -> None:
    state = {"module": {"transformer.wte.weight": torch.ones(2, 2)}, "global_steps": 1}
    torch.save(state, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(
        ConversionError, match=r"has parameters transformer\.wte\.weight, which are neither"
    ):
        open_deepspeed(tmp_path)


def test_tied_tables_that_differ_are_refused(tmp_path: Path) -> None:
    written_pipeline(tmp_path, tensor=1)
    path = tmp_path / "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt"
    with as_deepspeeds():
        state = torch.load(path, weights_only=False)
    flat = state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
    address = state["optimizer_state_dict"]["param_slice_mappings"][0][
        "tied_modules.embed.word_embeddings.weight"
    ]
    flat[address.start] += 1
    with as_deepspeeds():
        torch.save(state, path)
    with pytest.raises(
        CheckpointError, match=r"word_embeddings\.weight differs between pipeline stages"
    ):
        open_deepspeed(tmp_path)


def test_weights_that_are_no_numbers_are_not_taken_for_copies_that_differ(tmp_path: Path) -> None:
    spec, tensors = written_zero1(tmp_path, tensor=1)
    name = "encoder.final_layernorm.weight"
    for path in tmp_path.glob("*optim_states.pt"):
        with as_deepspeeds():
            state = torch.load(path, weights_only=False)
            for flat in state["optimizer_state_dict"]["single_partition_of_fp32_groups"]:
                flat[torch.isin(flat, tensors[name])] = torch.nan
            torch.save(state, path)
    read = open_deepspeed(tmp_path)
    assert read.spec.model == spec.model
    assert read.tensors[name].isnan().all()
