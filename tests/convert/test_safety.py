"""Malicious files of every kind that the package reads: each is refused, and none executes code."""

import builtins
import errno
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megacore.artifact.manifest import MANIFEST_NAME, Manifest
from megacore.checkpoint.format import MARKER_NAME, STATE_NAME, Marker, read_state
from megacore.checkpoint.save import save_checkpoint
from megacore.convert.hf import directory as hf_directory
from megacore.convert.hf.config import HfConfig
from megacore.convert.hf.directory import open_hf
from megacore.convert.hf.forms import FORMS, read_spec
from megacore.convert.inert import load_inert
from megacore.convert.source import CheckpointTensors
from megacore.data.index_directory import load_map
from megacore.errors import CheckpointError, ConversionError, FileAccessError, MegacoreError
from megacore.finetune import pretrained
from megacore.token_files.indexed_dataset import IndexedDataset
from megacore.tokenizer.load import TOKENIZER_CONFIG_NAME, load_tokenizer
from tests.checkpoint._examples import Payload

HF_CONFIG = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 64,
    "n_positions": 16,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
}


def pickled(path: Path, payload: Payload) -> None:
    """Write a plain pickle, whatever the name of the file."""
    path.write_bytes(pickle.dumps(payload, protocol=2))


def zipped(path: Path, payload: Payload) -> None:
    """Write torch's form, with the payload next to a tensor."""
    torch.save({"w": torch.ones(3), "x": payload}, path)


def legacy(path: Path, payload: Payload) -> None:
    """Write torch's form before version 1.6."""
    torch.save({"w": torch.ones(3), "x": payload}, path, _use_new_zipfile_serialization=False)


def array(path: Path, payload: Payload) -> None:
    """Write NumPy's form with an array of objects."""
    np.save(path, np.array([payload], dtype=object), allow_pickle=True)


def hf(directory: Path) -> Any:
    (directory / "config.json").write_text(json.dumps(HF_CONFIG))
    return open_hf(directory).tensors["embedding.word.weight"]


def hf_of_several(directory: Path) -> Any:
    index = {"weight_map": {"wte.weight": "pytorch_model-00001-of-00001.bin"}}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return hf(directory)


def tokenizer(directory: Path) -> Any:
    if not (directory / TOKENIZER_CONFIG_NAME).exists():
        (directory / TOKENIZER_CONFIG_NAME).write_text('{"eos_token": "<|endoftext|>"}')
    return load_tokenizer(directory)


Plant = Callable[[Path, Payload], None]
Read = Callable[[Path], Any]
CASES: list[tuple[str, Plant, Read]] = [
    ("pytorch_model.bin", pickled, hf),
    ("pytorch_model.bin", zipped, hf),
    ("pytorch_model.bin", legacy, hf),
    ("pytorch_model-00001-of-00001.bin", zipped, hf_of_several),
    ("pytorch_model.bin.index.json", pickled, hf),
    ("model.safetensors", pickled, hf),
    ("model.safetensors", zipped, hf),
    ("model.safetensors.index.json", pickled, hf),
    ("model_optim_rng.pt", pickled, lambda directory: load_inert(directory / "model_optim_rng.pt")),
    ("model_optim_rng.pt", zipped, lambda directory: load_inert(directory / "model_optim_rng.pt")),
    (
        "mp_rank_00_model_states.pt",
        legacy,
        lambda directory: load_inert(directory / "mp_rank_00_model_states.pt"),
    ),
    ("document_index.npy", pickled, lambda directory: load_map(directory / "document_index.npy")),
    ("document_index.npy", array, lambda directory: load_map(directory / "document_index.npy")),
    ("tokens.idx", pickled, lambda directory: IndexedDataset(directory / "tokens")),
    ("tokenizer.json", pickled, tokenizer),
    ("tokenizer.model", pickled, tokenizer),
    (TOKENIZER_CONFIG_NAME, pickled, tokenizer),
    (STATE_NAME, pickled, read_state),
    (MARKER_NAME, pickled, Marker.read),
    (MANIFEST_NAME, pickled, Manifest.read),
]


@pytest.mark.parametrize(
    ("name", "plant", "read"), CASES, ids=[f"{case[0]}-{case[1].__name__}" for case in CASES]
)
def test_a_malicious_file_is_refused_and_not_run(
    tmp_path: Path, name: str, plant: Plant, read: Read
) -> None:
    trap = tmp_path / "executed"
    directory = tmp_path / "files"
    directory.mkdir()
    plant(directory / name, Payload(trap))
    with pytest.raises(MegacoreError) as caught:
        read(directory)
    assert name in str(caught.value), "the error must name the file"
    assert not trap.exists(), "the pickle was executed"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (torch.Tensor.to_sparse, r"is sparse \(torch.sparse_coo\)"),
        (lambda tensor: tensor.to("meta"), "is without data"),
    ],
)
def test_a_tensor_that_is_not_dense_is_refused_by_name(
    tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor], kind: str
) -> None:
    weight = change(torch.ones(64, 8))
    torch.save({"wte.weight": weight}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConversionError, match=rf"pytorch_model.bin: wte.weight {kind}"):
        hf(tmp_path)
    torch.save({"model": {"layers": [torch.ones(2), weight]}}, tmp_path / "model_optim_rng.pt")
    with pytest.raises(CheckpointError, match=rf"model_optim_rng.pt: model.layers.1 {kind}"):
        load_inert(tmp_path / "model_optim_rng.pt")


def test_weights_of_integers_or_8_bits_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    shapes = FORMS["gpt2"].key_map(read_spec(HfConfig.read(tmp_path))[1]).their_shapes
    weights = {name: torch.ones(shape) for name, shape in shapes.items()}
    for dtype, problem in (
        (torch.int64, "where weights are"),
        (torch.float8_e4m3fn, "without scales, so its values are rounded to 8 bits"),
        (torch.float8_e5m2, "without scales"),
    ):
        weights["transformer.wpe.weight"] = torch.ones(16, 8).to(dtype)
        torch.save(weights, tmp_path / "pytorch_model.bin")
        with pytest.raises(ConversionError, match=rf"wpe.weight is of {dtype}.* {problem}"):
            dict(open_hf(tmp_path).tensors)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"n_embd": 10**12}, "hidden_size is 1000000000000: Input should be less than or equal"),
        ({"n_layer": 10**9}, "num_layers is 1000000000: Input should be from 1 to 1024"),
        ({"n_embd": 1e300}, "has n_embd 1e\\+300 where a value of type int belongs"),
        ({"n_positions": 10**99}, "Input should be less than or equal to 1073741824"),
    ],
)
def test_a_config_json_with_giant_values_is_refused(
    tmp_path: Path, values: dict[str, Any], sentence: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG | values))
    with pytest.raises(ConversionError, match=sentence) as caught:
        open_hf(tmp_path)
    assert len(str(caught.value)) < 400


DEEP = "[" * 100_000
DIGITS = '{"a": ' + "9" * 6000 + "}"


@pytest.mark.parametrize("text", [DEEP, DIGITS, '{"a": 1, "a": 2}'])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", lambda directory: open_hf(directory)),
        ("model.safetensors.index.json", hf),
        (TOKENIZER_CONFIG_NAME, tokenizer),
        (STATE_NAME, read_state),
        (MARKER_NAME, Marker.read),
        (MANIFEST_NAME, Manifest.read),
    ],
)
def test_json_beyond_the_limits_is_refused_with_its_name(
    tmp_path: Path, name: str, read: Read, text: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(MegacoreError, match=r"64 levels deep|6000 digits|given twice") as caught:
        read(tmp_path)
    assert name in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("plant", [pickled, zipped, legacy, array])
def test_the_payloads_run_in_unsafe_readers(tmp_path: Path, plant: Plant) -> None:
    trap, path = tmp_path / "executed", tmp_path / "file.npy"
    plant(path, Payload(trap))
    if plant is pickled:
        pickle.loads(path.read_bytes())
    elif plant is array:
        np.load(path, allow_pickle=True)
    else:
        torch.load(path, weights_only=False)
    assert trap.is_dir()


def test_a_malicious_checkpoint_is_refused_by_conversion(tmp_path: Path) -> None:
    """Check the separate reader that conversion uses for a checkpoint's archives."""
    trap = tmp_path / "executed"
    checkpoint = save_checkpoint(tmp_path / "root", 1, {"model.w": torch.ones(4, 3)}, {})
    (shard,) = checkpoint.glob("*.distcp")
    buffer = io.BytesIO()
    with zipfile.ZipFile(shard) as old, zipfile.ZipFile(buffer, "w") as new:
        for item in old.infolist():
            is_pickle = item.filename.endswith("data.pkl")
            new.writestr(
                item.filename,
                pickle.dumps(Payload(trap), 2) if is_pickle else old.read(item.filename),
            )
    shard.write_bytes(buffer.getvalue())
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    archive = _StorageInfo(shard.name, 0, shard.stat().st_size)
    metadata.storage_data = dict.fromkeys(metadata.storage_data, archive)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(MegacoreError, match="cannot be read"):
        CheckpointTensors(checkpoint)["w"]
    assert not trap.exists()


def test_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data.pkl", bytes(1 << 24))
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    with pytest.raises(MegacoreError, match="members unpack to 16,777,216 bytes, more than"):
        open_hf(tmp_path)
    with pytest.raises(MegacoreError, match="members unpack to 16,777,216 bytes, more than"):
        load_inert(path)


@pytest.mark.parametrize(
    "read",
    [load_inert, hf_directory._pickled, hf_directory._safetensors, partial(pretrained._read, "")],
    ids=["inert", "pickle", "safetensors", "fine-tuning"],
)
@pytest.mark.parametrize("call", [(os, "stat"), (builtins, "open")], ids=["stat", "open"])
def test_failing_disk_is_no_damage_of_a_model(
    read: Callable[[Path], object],
    call: tuple[object, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, works = tmp_path / "model.bin", getattr(*call)
    path.write_bytes(b"whole")

    def fail(name: object, *values: Any, **options: Any) -> Any:
        if str(name) == str(path):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return works(name, *values, **options)

    monkeypatch.setattr(*call, fail)
    if call[0] is builtins:
        monkeypatch.setattr(io, "open", fail)
    with pytest.raises(FileAccessError, match=r"model\.bin \(Input/output error\): the disk"):
        read(path)
