"""Reading of Megatron-LM files of all versions, without running code in them."""

import argparse
import enum
import os
import random
import shutil
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megacore.config.rope import LinearRope, Llama3Rope
from megacore.convert.megatron.checkpoint import open_megatron
from megacore.convert.megatron.files import write_rank_file
from megacore.errors import CheckpointError, ConversionError
from tests.convert._megatron import ITERATION, change, load, megatron_spec, written

Edit = Callable[[dict[str, Any]], None]
HEAD_DIM = 8


def assert_read(directory: Path, tensors: dict[str, Tensor]) -> None:
    read = open_megatron(directory).tensors
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], value) for name, value in tensors.items())


def encoder_of(state: dict[str, Any]) -> dict[str, Tensor]:
    encoder: dict[str, Tensor] = state["model"]["language_model"]["encoder"]
    return encoder


def setting(**values: Any) -> Edit:
    """Return an edit that changes args."""

    def edit(state: dict[str, Any]) -> None:
        state["args"].update(values)
        vars(state["args"]).update(values)

    return edit


def in_order(version: float | None) -> Edit:
    """Return an edit that reorders rows of query_key_value for a `checkpoint_version`.

    None stands for files without that entry.
    """

    def edit(state: dict[str, Any]) -> None:
        state.pop("checkpoint_version")
        if version is not None:
            state["checkpoint_version"] = version
        for name, tensor in encoder_of(state).items():
            if "query_key_value" in name:
                heads = tensor.reshape(-1, 3, HEAD_DIM, *tensor.shape[1:])
                if not version:
                    heads = heads.transpose(0, 1)
                elif version == 1.0:
                    heads = heads.transpose(1, 2)
                encoder_of(state)[name] = heads.reshape(tensor.shape)

    return edit


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("version", [None, 0, 1.0, 2.0, 3.0])
def test_every_order_of_query_key_value_is_read(
    tmp_path: Path, version: float | None, tensor: int
) -> None:
    iteration, tensors = written(tmp_path, tensor=tensor)
    for folder in iteration.iterdir():
        change(folder, in_order(version))
    assert_read(tmp_path, tensors)


def test_an_unknown_version_is_refused(tmp_path: Path) -> None:
    iteration, _ = written(tmp_path)
    change(iteration / "mp_rank_00", lambda state: state.update(checkpoint_version=4.0))
    with pytest.raises(
        ConversionError, match=r"checkpoint_version 4\.0, known are 0\.0, 1\.0, 2\.0, 3\.0"
    ):
        open_megatron(tmp_path)


@pytest.fixture
def megatron_enum(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a member of an enumeration that pickles as `megatron.core.enums.ModelType`.

    The enumeration cannot be imported.
    """
    module = types.ModuleType("megatron.core.enums")
    kind = enum.Enum("ModelType", {"encoder_or_decoder": 1}, module=module.__name__)
    module.ModelType = kind  # type: ignore[attr-defined]
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return kind["encoder_or_decoder"]


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before-1.6"])
@pytest.mark.parametrize("container", [argparse.Namespace, types.SimpleNamespace])
def test_other_content_of_a_training_checkpoint_is_ignored(
    tmp_path: Path,
    megatron_enum: Any,
    container: Any,
    zipped: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    iteration, tensors = written(tmp_path, "bert", tensor=2)

    def as_in_training(state: dict[str, Any]) -> None:
        extra = (
            {"model_type": megatron_enum, "lr": 1e-4, "data_path": ["a"], "rank": 0}
            if zipped
            else {}
        )
        extra["params_dtype"] = torch.float32
        # Torch's old form has no list of names before reading; it is older than the enumerations.
        state["args"] = container(**{**vars(state["args"]), **extra})
        parameters = [torch.nn.Parameter(torch.ones(3))]
        state["optimizer"] = {
            "fp32_from_fp16": [parameters],
            "optimizer": torch.optim.Adam(parameters).state_dict(),
        }
        state["rng_state"] = [
            {
                "random_rng_state": random.getstate(),
                "np_rng_state": np.random.RandomState(1).get_state(),
                "torch_rng_state": torch.get_rng_state(),
                "lr": np.float64(1.0),
            }
        ]

    for folder in iteration.iterdir():
        change(folder, as_in_training, _use_new_zipfile_serialization=zipped)
    for name in ("megatron", "megatron.core", "megatron.core.enums"):
        monkeypatch.delitem(sys.modules, name)
    assert_read(tmp_path, tensors)
    assert open_megatron(tmp_path).spec == megatron_spec("bert")


class Malicious:
    """An object that creates a directory when `pickle` unpickles it."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before-1.6"])
def test_code_in_a_file_is_refused_and_not_run(tmp_path: Path, zipped: bool) -> None:
    iteration, _ = written(tmp_path)
    target = tmp_path / "was-here"
    change(
        iteration / "mp_rank_00",
        lambda state: state.update(rng_state=Malicious(target)),
        _use_new_zipfile_serialization=zipped,
    )
    with pytest.raises(
        CheckpointError, match=r"model_optim_rng\.pt asks for posix\.mkdir, which"
    ) as caught:
        open_megatron(tmp_path)
    assert "\n" not in str(caught.value)
    assert not target.exists()
    torch.load(iteration / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
    assert target.exists()


def test_tensor_names_of_other_versions_are_read(tmp_path: Path) -> None:
    iteration, tensors = written(tmp_path, "bert")
    swaps = {
        "self_attention": "attention",
        "input_layernorm": "input_norm",
        "final_layernorm": "final_norm",
    }
    swaps["post_attention_layernorm"] = "post_attention_norm"

    def old(state: dict[str, Any]) -> None:
        language_model = state["model"]["language_model"]
        encoder = language_model.pop("encoder")
        for new, name in swaps.items():
            encoder = OrderedDict((key.replace(new, name), value) for key, value in encoder.items())
        language_model["transformer"] = encoder
        encoder["layers.0.input_norm._extra_state"] = None
        embedding = language_model["embedding"]
        language_model["embedding"] = {
            f"{name}.weight": table["weight"] for name, table in embedding.items()
        }
        head = state["model"]["lm_head"]
        state["model"]["lm_head"] = {
            key.replace("layernorm", "norm"): value for key, value in head.items()
        }

    change(iteration / "mp_rank_00", old)
    assert (
        "layers.1.attention.dense.bias"
        in load(iteration / "mp_rank_00")["model"]["language_model"]["transformer"]
    )
    assert_read(tmp_path, tensors)


def test_args_of_old_versions_are_read(tmp_path: Path) -> None:
    iteration, tensors = written(tmp_path, tensor=2)

    def old(state: dict[str, Any]) -> None:
        names = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
        state["args"] = argparse.Namespace(
            **{name: state["args"][name] for name in names}, model_parallel_size=2
        )
        state.pop("iteration")

    for folder in iteration.iterdir():
        change(folder, old)
    assert_read(tmp_path, tensors)
    read = open_megatron(tmp_path)
    assert (read.spec.vocab_size, read.spec.padded_vocab_size, read.spec.model.activation) == (
        304,
        304,
        "gelu_tanh",
    )
    assert read.iteration == ITERATION
    assert len(read.remarks) == 1
    assert "how many rows of the padded vocabulary" in read.remarks[0]


def test_scaled_rotary_positions_of_the_args_are_read(tmp_path: Path) -> None:
    iteration, _ = written(tmp_path, "llama")
    rank = iteration / "mp_rank_00"
    change(rank, setting(use_rope_scaling=True))
    scaling = open_megatron(tmp_path).spec.model.rope_scaling
    assert scaling == Llama3Rope(kind="llama3", factor=8.0)
    change(rank, setting(rotary_seq_len_interpolation_factor=4))
    with pytest.raises(ConversionError, match="both use_rope_scaling and rotary_seq_len_inter"):
        open_megatron(tmp_path)
    change(rank, setting(use_rope_scaling=False))
    scaling = open_megatron(tmp_path).spec.model.rope_scaling
    assert scaling == LinearRope(kind="linear", factor=4.0)
    change(rank, setting(rotary_seq_len_interpolation_factor=1))
    assert open_megatron(tmp_path).spec.model.rope_scaling is None


def test_a_fused_bias_gelu_is_read_as_approximate_with_a_remark(tmp_path: Path) -> None:
    iteration, _ = written(tmp_path, "bert")
    change(iteration / "mp_rank_00", setting(bias_gelu_fusion=True))
    read = open_megatron(tmp_path)
    assert read.spec.model.activation == "gelu_tanh"
    assert [remark for remark in read.remarks if "masked LM's head" in remark] == list(read.remarks)


def test_chunks_of_a_virtual_pipeline_are_ordered(tmp_path: Path) -> None:
    iteration, tensors = written(tmp_path, pipeline=4)
    models = [load(iteration / f"mp_rank_00_00{stage}")["model"] for stage in range(4)]

    def two_chunks(stage: int) -> Edit:
        def edit(state: dict[str, Any]) -> None:
            del state["model"]
            state.update(model0=models[stage], model1=models[stage + 2])
            setting(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)(state)

        return edit

    for stage in (0, 1):
        change(iteration / f"mp_rank_00_00{stage}", two_chunks(stage))
        shutil.rmtree(iteration / f"mp_rank_00_00{stage + 2}")
    assert_read(tmp_path, tensors)


def test_half_precision_is_read_in_float32(tmp_path: Path) -> None:
    iteration, tensors = written(tmp_path)

    def halve(state: dict[str, Any]) -> None:
        encoder = encoder_of(state)
        encoder.update({name: (tensor % 2048).half() for name, tensor in encoder.items()})

    change(iteration / "mp_rank_00", halve)
    name = "encoder.layers.3.self_attention.query_key_value.weight"
    read = open_megatron(tmp_path).tensors[name]
    assert read.dtype == torch.float32
    assert torch.equal(read, tensors[name] % 2048)


def test_root_iteration_and_release_directories_are_read(tmp_path: Path) -> None:
    iteration, tensors = written(tmp_path / "root")
    assert open_megatron(iteration).iteration == ITERATION
    release = tmp_path / "released"
    shutil.copytree(iteration, release / "release")
    (release / "latest_checkpointed_iteration.txt").write_text("release")
    folder = release / "release" / "mp_rank_00"
    change(folder, lambda state: state.pop("iteration"))
    (folder / "model_optim_rng.pt").rename(folder / "model_rng.pt")
    assert_read(release, tensors)
    assert open_megatron(release).iteration == 0
    assert open_megatron(release).spec == megatron_spec("gpt")


def test_a_copy_of_the_embedding_in_the_only_stage_must_be_equal(tmp_path: Path) -> None:
    iteration, tensors = written(tmp_path)
    table = tensors["embedding.word_embeddings.weight"]
    change(
        iteration / "mp_rank_00",
        lambda state: state["model"].update(word_embeddings_for_head={"weight": table}),
    )
    assert_read(tmp_path, tensors)
    other = {"word_embeddings_for_head": {"weight": table + 2}}
    change(iteration / "mp_rank_00", lambda state: state["model"].update(other))
    with pytest.raises(
        CheckpointError,
        match=r"word_embeddings_for_head\.weight of tensor rank 0 differs .* by up to 2",
    ):
        open_megatron(tmp_path)


def test_changing_a_read_tensor_does_not_change_later_reads(tmp_path: Path) -> None:
    _, tensors = written(tmp_path)
    read = open_megatron(tmp_path).tensors
    name = "encoder.final_layernorm.bias"
    read[name].zero_()
    assert torch.equal(read[name], tensors[name])


def test_a_full_disk_raises_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "mp_rank_00").mkdir()
    path = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        write_rank_file(path, {"model": torch.zeros(100_000)})
