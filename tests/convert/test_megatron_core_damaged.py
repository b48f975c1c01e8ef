"""Checkpoints of Megatron core that are damaged, hostile or of other models: each is refused."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from megacore.checkpoint.save import save_checkpoint
from megacore.convert.imported import import_model
from megacore.convert.megatron.checkpoint import open_megatron
from megacore.convert.megatron.core import OFF
from megacore.errors import CheckpointError, ConversionError, MegacoreError
from tests.checkpoint._examples import Payload
from tests.convert._megatron import megatron_spec, weights
from tests.convert._megatron_core import (
    Sharded,
    core_args,
    core_state,
    packed,
    write_core,
    written_core,
)

QKV = "decoder.layers.self_attention.linear_qkv.weight"


def refusal(root: Path, error: type[MegacoreError] = CheckpointError) -> str:
    """Return the sentence with which an import is refused; nothing may be left behind."""
    with pytest.raises(error) as caught:
        import_model(open_megatron(root), root, root / "imported")
    assert not (root / "imported").exists()
    message = str(caught.value)
    assert "\n" not in message
    return message


def rewritten(directory: Path, edit: Callable[[Any], None]) -> None:
    """Change the metadata of a checkpoint."""
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


def test_nothing_in_the_files_is_executed(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    directory, ours, spec = written_core(tmp_path / "metadata")
    rewritten(directory, lambda metadata: setattr(metadata, "all_local_plans", [Payload(trap)]))
    assert "asks for posix.mkdir" in refusal(tmp_path / "metadata")
    args = core_args(spec, spec=Payload(trap))
    write_core(tmp_path / "object", core_state(spec, ours), args)
    assert "asks for posix.mkdir" in refusal(tmp_path / "object")
    write_core(tmp_path / "file", core_state(spec, ours), args, common_file=True)
    assert "asks for posix.mkdir" in refusal(tmp_path / "file")
    directory, _, _ = written_core(tmp_path / "slice")
    archive = packed([torch.ones(32), Payload(trap)]).getvalue()
    (directory / "__9_0.distcp").write_bytes(archive)

    def divert(metadata: Any) -> None:
        index = MetadataIndex("decoder.final_layernorm.weight", torch.Size([0]))
        place = metadata.storage_data[index]
        place.relative_path, place.offset, place.length = "__9_0.distcp", 0, len(archive)

    rewritten(directory, divert)
    assert "cannot be read: UnpicklingError" in refusal(tmp_path / "slice")
    assert not trap.exists()


def remove_file(directory: Path) -> None:
    next(directory.glob("*.distcp")).unlink()


def truncate(directory: Path) -> None:
    for path in directory.glob("*.distcp"):
        os.truncate(path, path.stat().st_size // 2)


def remove_metadata(directory: Path) -> None:
    (directory / ".metadata").unlink()


def cut_metadata(directory: Path) -> None:
    path = directory / ".metadata"
    path.write_bytes(path.read_bytes()[:-40])


def drop_chunk(directory: Path) -> None:
    rewritten(directory, lambda metadata: metadata.state_dict_metadata[QKV].chunks.pop())


def repeat_chunk(directory: Path) -> None:
    def edit(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata[QKV].chunks
        chunks[1] = chunks[0]

    rewritten(directory, edit)


def lose_place(directory: Path) -> None:
    def edit(metadata: Any) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == QKV)
        del metadata.storage_data[index]

    rewritten(directory, edit)


def leave_directory(directory: Path) -> None:
    def edit(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.relative_path = f"../{place.relative_path}"

    rewritten(directory, edit)


def shrink_place(directory: Path) -> None:
    def edit(metadata: Any) -> None:
        for index, place in metadata.storage_data.items():
            if index.fqn == QKV:
                place.length = 100

    rewritten(directory, edit)


def forget_common(directory: Path) -> None:
    rewritten(
        directory, lambda metadata: metadata.state_dict_metadata.pop("common_state/shard_0_1")
    )


def other_type(directory: Path) -> None:
    def edit(metadata: Any) -> None:
        properties = metadata.state_dict_metadata[QKV].properties
        metadata.state_dict_metadata[QKV].properties = type(properties)(dtype=torch.int64)

    rewritten(directory, edit)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_file, "cannot be read (No such file or directory)"),
        (truncate, ".distcp ends before "),
        (remove_metadata, "has no .metadata, so it was not saved to its end"),
        (cut_metadata, ".metadata cannot be read"),
        (drop_chunk, f"does not hold every number of {QKV} exactly once"),
        (repeat_chunk, f"does not hold every number of {QKV} exactly once"),
        (lose_place, f"does not say where {QKV} is"),
        (leave_directory, "outside the checkpoint"),
        (shrink_place, f"has fewer bytes of {QKV} than its metadata says"),
        (forget_common, "has neither common.pt nor an object common_state/shard_0_1"),
        (other_type, f"has {QKV} of torch.int64, which are no weights"),
    ],
)
def test_damaged_checkpoints_are_refused(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    directory, _, _ = written_core(tmp_path)
    damage(directory)
    assert message in refusal(tmp_path)


def changed(root: Path, edit: Callable[[dict[str, Any]], object], **args: Any) -> Path:
    """Write a checkpoint of other tensors or arguments."""
    spec = megatron_spec("llama")
    state = core_state(spec, weights(spec), tensor=2)
    edit(state)
    write_core(root, state, core_args(spec, tensor=args.pop("tensor", 2), **args))
    return root


def tensor(*shape: int) -> Sharded:
    return Sharded(shape, {(0,) * len(shape): torch.zeros(shape)})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("decoder.final_layernorm.weight", None, "it lacks decoder.final_layernorm.weight"),
        ("decoder.final_layernorm.weight", tensor(33), "of shape (33,), where its args say (32,)"),
        ("extra.weight", tensor(3), "it has extra.weight, for which there is no place"),
        ("decoder.layers.input_layernorm.weight", tensor(4, 32), "it has more than one of"),
        ("embedding.word_embeddings.weight", None, "has no table embedding.word_embeddings"),
    ],
)
def test_every_tensor_is_used_exactly_once(
    tmp_path: Path, name: str, value: Sharded | None, message: str
) -> None:
    def edit(state: dict[str, Any]) -> None:
        state.pop(name, None)
        state.update({} if value is None else {name: value})

    assert message in refusal(changed(tmp_path, edit))


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("decoder.layers.mlp.experts.experts.linear_fc1.weight", "experts"),
        ("decoder.layers.mlp.router.weight", "experts"),
        ("mtp.layers.0.eh_proj.weight", "multi-token prediction"),
        ("decoder.layers.mixer.in_proj.weight", "Mamba or hybrid layers"),
        ("decoder.layers.self_attention.linear_q_down_proj.weight", "multi-head latent attention"),
    ],
)
def test_modules_that_no_model_has_are_refused_by_name(
    tmp_path: Path, name: str, module: str
) -> None:
    root = changed(tmp_path, lambda state: state.update({name: tensor(4, 3)}))
    assert f"no model of megacore has {module}" in refusal(root, ConversionError)


@pytest.mark.parametrize("name", [*OFF])
def test_arguments_that_change_the_model_are_refused_by_name(tmp_path: Path, name: str) -> None:
    root = changed(tmp_path, lambda state: None, **{name: 3})
    assert f"trained with {name}" in refusal(root, ConversionError)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ({"window_size": (3, 5)}, ConversionError, "attend to later ones"),
        ({"window_size": "wide"}, CheckpointError, "no pair of numbers"),
        ({"num_layers": 5}, CheckpointError, "holds 4 layers where its args say num_layers 5"),
        ({"hidden_size": 10**12}, CheckpointError, "hidden_size is 1000000000000"),
        ({"ffn_hidden_size": 2**20}, CheckpointError, "where its args say (4, 2097152, 32)"),
        (
            {"window_size": (3, 0), "window_attn_skip_freq": [1, 0]},
            ConversionError,
            "trained with window_attn_skip_freq [1, 0]",
        ),
        (
            {"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2},
            ConversionError,
            "both use_rope_scaling and rotary_seq_len_interpolation_factor",
        ),
        ({"add_qkv_bias": True}, CheckpointError, "linear_qkv.bias"),
        ({"tensor": 3}, ConversionError, "does not tell the order of its two halves"),
        ({"num_attention_heads": None}, CheckpointError, "does not say num_attention_heads"),
        ({"position_embedding_type": "yarn"}, CheckpointError, "'yarn' is none of"),
    ],
)
def test_arguments_that_contradict_the_tensors_are_refused(
    tmp_path: Path, args: dict[str, Any], error: type[MegacoreError], message: str
) -> None:
    assert message in refusal(changed(tmp_path, lambda state: None, **args), error)


def test_training_in_eight_bits_is_a_remark(tmp_path: Path) -> None:
    root = changed(tmp_path, lambda state: None, fp8="hybrid")
    assert "trained with fp8 hybrid" in " ".join(open_megatron(root).remarks)


def test_other_forms_are_refused_by_name(tmp_path: Path) -> None:
    directory, _, _ = written_core(tmp_path / "core")
    (directory / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    assert "is in the form 'zarr'" in refusal(tmp_path / "core", ConversionError)
    (directory / "metadata.json").write_text("{")
    assert "metadata.json cannot be read" in refusal(tmp_path / "core")
    (directory / "metadata.json").unlink()
    for root in (tmp_path / "core", directory):
        assert "torch_dcp or fsdp_dtensor" in refusal(root, ConversionError)
    save_checkpoint(tmp_path / "ours", 1, {"model.a": torch.ones(2)}, {})
    assert "is a checkpoint of megacore already" in refusal(tmp_path / "ours", ConversionError)
    state = core_state(megatron_spec("gpt"), weights(megatron_spec("gpt")))
    encoder = {name.replace("decoder.", "encoder."): value for name, value in state.items()}
    write_core(tmp_path / "t5", state | encoder, core_args(megatron_spec("gpt")))
    assert "both encoder and decoder layers" in refusal(tmp_path / "t5", ConversionError)
