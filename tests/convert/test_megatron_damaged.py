"""Refusals of Megatron-LM files that do not form one model, with both sides of the conflict."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.convert.megatron.checkpoint import open_megatron
from megacore.errors import CheckpointError, ConversionError, MegacoreError
from tests.convert._megatron import change, written
from tests.convert.test_megatron_read import encoder_of, setting

Edit = Callable[[dict[str, Any]], None]


def refusal(directory: Path, kind: type[MegacoreError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        open_megatron(directory)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_rank_is_refused_with_the_sizes(tmp_path: Path) -> None:
    iteration, _ = written(tmp_path, tensor=2, pipeline=2)
    shutil.rmtree(iteration / "mp_rank_01_001")
    assert (
        "lacks mp_rank_01_001/model_optim_rng.pt: a tensor parallel size of 2 and a pipeline"
        in refusal(tmp_path)
    )
    assert "make 4 files, and 3 are there" in refusal(tmp_path)


def test_surplus_ranks_are_refused_by_name(tmp_path: Path) -> None:
    iteration, _ = written(tmp_path, tensor=2)
    shutil.copytree(iteration / "mp_rank_01", iteration / "mp_rank_02")
    assert "has too many: mp_rank_02_000/model_optim_rng.pt" in refusal(tmp_path)
    shutil.rmtree(iteration / "mp_rank_02")
    shutil.copytree(iteration / "mp_rank_01", iteration / "mp_rank_01_000")
    assert "are both of tensor rank 1 and pipeline rank 0" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (setting(num_attention_heads=8), "has num_attention_heads 4 and "),
        (lambda state: state.update(iteration=7), "has iteration 1000 and "),
        (lambda state: state.update(checkpoint_version=2.0), "has checkpoint_version 3.0 and "),
    ],
)
def test_files_of_different_runs_are_refused(tmp_path: Path, edit: Edit, sentence: str) -> None:
    iteration, _ = written(tmp_path, tensor=2)
    change(iteration / "mp_rank_01", edit)
    assert f"mp_rank_00/model_optim_rng.pt {sentence}" in refusal(tmp_path)
    assert "they are of different checkpoints" in refusal(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, share: float) -> None:
    iteration, _ = written(tmp_path)
    path = iteration / "mp_rank_00" / "model_optim_rng.pt"
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert "mp_rank_00/model_optim_rng.pt cannot be read (" in refusal(tmp_path)


def test_files_without_a_model_are_refused_with_their_content(tmp_path: Path) -> None:
    iteration, _ = written(tmp_path)
    change(iteration / "mp_rank_00", lambda state: state.update(optimizer=state.pop("model")))
    assert "has no model, but args, checkpoint_version, iteration, optimizer" in refusal(tmp_path)
    (iteration / "mp_rank_00" / "model_optim_rng.pt").rename(iteration / "mp_rank_00" / "optim.pt")
    assert "has no model_optim_rng.pt or model_rng.pt in any mp_rank directory" in refusal(tmp_path)


def test_ranks_that_differ_in_a_replicated_tensor_are_refused(tmp_path: Path) -> None:
    iteration, _ = written(tmp_path, tensor=2)

    def drift(state: dict[str, Any]) -> None:
        encoder_of(state)["layers.2.input_layernorm.weight"][3] += 2

    change(iteration / "mp_rank_01", drift)
    sentence = (
        "layers.2.input_layernorm.weight of tensor rank 1 differs from that of tensor rank 0 by up "
        "to 2"
    )
    assert sentence in refusal(tmp_path)


def shortened(state: dict[str, Any]) -> None:
    name = "layers.1.mlp.dense_h_to_4h.bias"
    encoder_of(state)[name] = encoder_of(state)[name][:-1]


def without_layer(state: dict[str, Any]) -> None:
    for name in [name for name in encoder_of(state) if name.startswith("layers.3.")]:
        del encoder_of(state)[name]


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (
            shortened,
            "mlp.dense_h_to_4h.bias of shape (127,) on tensor rank 0, where its args say (128,)",
        ),
        (without_layer, "holds 3 layers where its args say num_layers 4"),
        (
            setting(num_layers=10**12),
            "describe no model: num_layers is 1000000000000: input should be less than or equal to",
        ),
        (
            lambda state: encoder_of(state).pop("final_layernorm.bias"),
            "lacks language_model.encoder.final_layernorm.b",
        ),
        (
            lambda state: encoder_of(state).update(extra=torch.ones(1)),
            "it has no place for language_model.encoder.extra",
        ),
        (
            lambda state: encoder_of(state).update({"final_layernorm.bias": 3}),
            "holds int as language_model.encoder",
        ),
        (
            lambda state: encoder_of(state).update({"final_layernorm.bias": torch.ones(32) > 0}),
            "holds torch.bool as language_model.encoder.final_layernorm.bias where a tensor of fl",
        ),
        (
            lambda state: state["model"]["language_model"].pop("embedding"),
            "no language_model.embedding.word_emb",
        ),
        (
            lambda state: state.pop("args"),
            "does not say num_layers, hidden_size, num_attention_heads, max_position",
        ),
        (setting(num_attention_heads=0), "describe no model"),
        (setting(hidden_size="32"), "describe no model"),
        (
            setting(group_query_attention=True, num_query_groups=3),
            "num_attention_heads 4 is not a multiple of num_query",
        ),
        (setting(position_embedding_type="alibi"), "position_embedding_type 'alibi' is none of"),
        (setting(normalization="ScaleNorm"), "describe no model"),
        (
            setting(orig_vocab_size=400),
            "table of 304 tokens where its args say padded_vocab_size 304 and orig_vocab_si",
        ),
        (
            setting(padded_vocab_size=320),
            "table of 304 tokens where its args say padded_vocab_size 320",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_args_are_refused(
    tmp_path: Path, edit: Edit, sentence: str
) -> None:
    iteration, _ = written(tmp_path)
    change(iteration / "mp_rank_00", edit)
    assert sentence in refusal(tmp_path)


def as_t5(state: dict[str, Any]) -> None:
    state["model"]["language_model"]["decoder"] = {
        "layers.0.input_layernorm.weight": torch.ones(32)
    }


def as_core(state: dict[str, Any]) -> None:
    state["model"] = {"decoder.layers.0.self_attention.linear_qkv.weight": torch.ones(96, 32)}


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (as_t5, "holds a model with a decoder after an encoder, as T5's"),
        (
            as_core,
            "has no model.language_model, but decoder.layers.0.self_attention.linear_qkv.weight",
        ),
        (setting(num_experts=8), "was trained with num_experts 8, which no model of megacore has"),
        (
            setting(apply_layernorm_1p=True, squared_relu=True),
            "with squared_relu True, apply_layernorm_1p True",
        ),
        (setting(ds_sequence_parallel_fpdt=False), "rows of query_key_value are in another order"),
    ],
)
def test_unsupported_models_are_refused_by_name(tmp_path: Path, edit: Edit, sentence: str) -> None:
    iteration, _ = written(tmp_path)
    change(iteration / "mp_rank_00", edit)
    assert sentence in refusal(tmp_path, ConversionError)


def test_rotary_dimensions_of_odd_size_are_refused(tmp_path: Path) -> None:
    iteration, _ = written(tmp_path, "llama")
    change(iteration / "mp_rank_00", setting(rotary_percent=0.4))
    assert "rotary_percent 0.4 of heads of 8, an odd number" in refusal(tmp_path, ConversionError)


def test_query_groups_in_an_old_checkpoint_version_are_refused(tmp_path: Path) -> None:
    iteration, _ = written(tmp_path, "llama")
    change(iteration / "mp_rank_00", lambda state: state.update(checkpoint_version=1.0))
    assert "num_query_groups 2 and checkpoint_version 1.0" in refusal(tmp_path, ConversionError)


def test_other_megatron_forms_are_refused_by_name(tmp_path: Path) -> None:
    iteration, _ = written(tmp_path)
    (iteration / "mp_rank_00").rename(iteration / "mp_rank_00_000_001")
    assert "divided by a third number" in refusal(tmp_path, ConversionError)


def test_directories_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    assert "is no directory" in refusal(tmp_path / "nowhere")
    assert (
        "is no checkpoint of Megatron-LM: it has neither latest_checkpointed_iteration.txt"
        in refusal(tmp_path)
    )
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("12\n")
    assert "names iter_0000012, which is not there" in refusal(tmp_path)
    tracker.write_text("later")
    assert "neither latest_checkpointed_iteration.txt with an iteration" in refusal(tmp_path)
