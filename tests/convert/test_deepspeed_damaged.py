"""Refusals of DeepSpeed files that do not form one model, without running code in them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.convert.deepspeed.read import open_deepspeed
from megacore.errors import CheckpointError, ConversionError, MegacoreError
from tests.convert._megatron_deepspeed import (
    as_deepspeeds,
    written_pipeline,
    written_universal,
    written_zero1,
)

MODEL = "mp_rank_00_model_states.pt"
OPTIMIZER = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


def refusal(directory: Path, kind: type[MegacoreError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        open_deepspeed(directory)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Save a file again after `edit`."""
    with as_deepspeeds():
        state = torch.load(path, weights_only=False)
        edit(state)
        torch.save(state, path)


class Malicious:
    """An object that runs a command when `pickle` unpickles it."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER])
def test_code_in_a_file_is_refused_and_not_run(tmp_path: Path, name: str) -> None:
    written_zero1(tmp_path, tensor=1)
    target = tmp_path / "was-here"
    change(tmp_path / name, lambda state: state.update(lr_scheduler=Malicious(target)))
    assert (
        f"{name} asks for posix.system, which no checkpoint of a model needs: nothing of it was run"
        in refusal(tmp_path)
    )
    assert not target.exists()
    with as_deepspeeds():
        torch.load(tmp_path / name, weights_only=False)
    assert target.exists()


def test_code_in_a_universal_checkpoint_is_refused_and_not_run(tmp_path: Path) -> None:
    written_universal(tmp_path)
    target = tmp_path / "was-here"
    path = tmp_path / "zero" / "3.input_layernorm.weight" / "exp_avg.pt"
    torch.save({"param": Malicious(target)}, path)
    assert "exp_avg.pt asks for posix.system" in refusal(tmp_path)
    assert not target.exists()


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("name", [MODEL, OPTIMIZER])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, name: str, share: float) -> None:
    written_zero1(tmp_path, tensor=1)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    assert f"{name} cannot be read (" in refusal(tmp_path)


def test_a_missing_replica_is_refused_by_name(tmp_path: Path) -> None:
    written_zero1(tmp_path)
    first = tmp_path / "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"
    first.rename(tmp_path / "elsewhere")
    message = refusal(tmp_path)
    assert (
        "lacks zero_pp_rank_0_mp_rank_01_optim_states.pt: 2 model ranks and 2 data-parallel ranks"
        in message
    )
    assert "make 4 files, and 3 are there" in message


def test_a_replica_that_all_ranks_lack_is_refused(tmp_path: Path) -> None:
    written_zero1(tmp_path, tensor=1)
    (tmp_path / OPTIMIZER).unlink()
    assert "is one of 2 data-parallel ranks, and 1 files are there" in refusal(tmp_path)


def test_a_missing_model_rank_is_refused_by_name(tmp_path: Path) -> None:
    written_zero1(tmp_path)
    (tmp_path / MODEL).unlink()
    assert "lacks *mp_rank_00_model_states.pt, and has such files of 1 model ranks" in refusal(
        tmp_path
    )
    written_zero1(tmp_path)
    for path in tmp_path.glob("*mp_rank_01*"):
        path.unlink()
    assert "has model files of 1 ranks where" in refusal(tmp_path)


def test_a_missing_layer_is_refused(tmp_path: Path) -> None:
    written_pipeline(tmp_path, zero=False)
    (tmp_path / "layer_05-model_01-model_states.pt").unlink()
    sentence = refusal(tmp_path)
    assert "tensor rank 1, is of another model than its args say: it lacks " in sentence
    assert "lacks language_model.encoder.layers.2." in sentence
    (tmp_path / "layer_05-model_00-model_states.pt").unlink()
    assert "holds 3 layers where its args say num_layers 4" in refusal(tmp_path)


def test_files_of_two_zero_stages_are_refused(tmp_path: Path) -> None:
    written_zero1(tmp_path, tensor=1)
    change(tmp_path / OPTIMIZER, lambda state: state["optimizer_state_dict"].update(zero_stage=2))
    assert "is of ZeRO stage 1 and" in refusal(tmp_path)
    shutil.copy(tmp_path / MODEL, tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    assert "of ZeRO stage 3 and mp_rank_00_model_states.pt of another stage" in refusal(tmp_path)


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    written_zero1(tmp_path, tensor=1)
    shutil.copy(tmp_path / OPTIMIZER, tmp_path / OPTIMIZER.removeprefix("bf16_"))
    assert "are both of data-parallel rank 1 and model rank 0" in refusal(tmp_path)


def test_files_of_different_runs_are_refused(tmp_path: Path) -> None:
    written_zero1(tmp_path)
    change(tmp_path / "mp_rank_01_model_states.pt", lambda state: state.update(global_steps=7))
    assert "has global_steps 1000 and" in refusal(tmp_path)


def shorten(state: dict[str, Any]) -> None:
    state["param_shapes"][1]["language_model.encoder.final_layernorm.bias"] = torch.Size([33])


@pytest.mark.parametrize(
    ("name", "edit", "sentence"),
    [
        (
            MODEL,
            shorten,
            (
                "holds 32 elements of language_model.encoder.final_layernorm.bias (fp32), whose "
                "shape (33,)"
            ),
        ),
        (
            MODEL,
            lambda state: state.pop("param_shapes"),
            f"{MODEL} is not as DeepSpeed writes it (KeyError: ",
        ),
        (OPTIMIZER, lambda state: state.clear(), f"{OPTIMIZER} has no optimizer_state_dict"),
        (
            OPTIMIZER,
            lambda state: state["optimizer_state_dict"].update(single_partition_of_fp32_groups=[]),
            f"{OPTIMIZER} is not as DeepSpeed writes it (ValueError: ",
        ),
        (
            OPTIMIZER,
            lambda state: state["optimizer_state_dict"].update(base_optimizer_state=7),
            f"{OPTIMIZER} is not as DeepSpeed writes it (TypeError: ",
        ),
    ],
)
def test_content_of_another_form_is_refused(
    tmp_path: Path, name: str, edit: Callable[[dict[str, Any]], object], sentence: str
) -> None:
    written_zero1(tmp_path, tensor=1)
    change(tmp_path / name, edit)
    assert sentence in refusal(tmp_path)


def test_files_without_addresses_are_refused(tmp_path: Path) -> None:
    written_zero1(tmp_path, tensor=1)
    change(
        tmp_path / OPTIMIZER,
        lambda state: state["optimizer_state_dict"].pop("param_slice_mappings"),
    )
    assert (
        "does not say where its parameters are (param_slice_mappings), which DeepSpeed None"
        in refusal(tmp_path, ConversionError)
    )


def test_experts_are_refused(tmp_path: Path) -> None:
    written_zero1(tmp_path, tensor=1)
    shutil.copy(tmp_path / MODEL, tmp_path / "layer_0_expert_0_mp_rank_00_model_states.pt")
    assert "holds experts, which no model of megacore has" in refusal(tmp_path, ConversionError)


def test_directories_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    assert "is no directory" in refusal(tmp_path / "missing")
    assert "it has neither *_model_states.pt, nor zero/, nor a file latest" in refusal(tmp_path)
    (tmp_path / "latest").write_text("global_step7")
    assert "latest names 'global_step7', which is not there" in refusal(tmp_path)
    (tmp_path / "global_step7").mkdir()
    assert "has no *_model_states.pt" in refusal(tmp_path)


def test_an_empty_universal_checkpoint_is_refused(tmp_path: Path) -> None:
    written_universal(tmp_path)
    shutil.rmtree(tmp_path / "zero")
    (tmp_path / "zero").mkdir()
    assert "zero has no fp32.pt in any of its directories" in refusal(tmp_path)


def test_moments_without_a_number_of_steps_are_left_out(tmp_path: Path) -> None:
    spec, _ = written_zero1(tmp_path, tensor=1)
    for path in tmp_path.glob("*optim_states.pt"):
        change(
            path,
            lambda state: [
                parameter_state.pop("step")
                for parameter_state in state["optimizer_state_dict"]["base_optimizer_state"][
                    "state"
                ].values()
            ],
        )
    read = open_deepspeed(tmp_path)
    assert read.spec.model == spec.model
    assert (dict(read.moments), read.optimizer_steps) == ({}, None)
    assert "after one number of steps: none is taken" in read.remarks[0]


def test_flat_ranges_in_another_order_than_the_shapes_are_refused(tmp_path: Path) -> None:
    written_zero1(tmp_path, tensor=1)

    def shuffle(state: dict[str, Any]) -> None:
        first, *rest = state["param_shapes"][0].items()
        state["param_shapes"][0] = dict([*rest, first])

    change(tmp_path / MODEL, shuffle)
    assert "with round_robin_gradients DeepSpeed confuses them" in refusal(
        tmp_path, ConversionError
    )
