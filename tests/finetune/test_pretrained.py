"""Pretrained models from directories, exports and the hub."""

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megacore.artifact.manifest import Manifest, file_digest
from megacore.config.finetune import PretrainedConfig
from megacore.errors import ConfigError, DownloadError, FileAccessError
from megacore.finetune import pretrained
from megacore.finetune.pretrained import (
    collect_pretrained,
    local_directory,
    pretrained_digests,
    read_model_config,
    read_tokenizer,
)
from tests.finetune._tiny_models import write_export, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bert"), "bert")


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_export(tmp_path_factory.mktemp("export"), "gpt")


def collect(
    path: Path | str, tmp_path: Path, **values: Any
) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """Return counts, lineage and directory of a collected model."""
    model = PretrainedConfig(path=str(path), **values)
    directory = tmp_path / "collected"
    directory.mkdir()
    counts = collect_pretrained(
        model, directory, tmp_path / "cache", local=local_directory(str(path))
    )
    return counts, json.loads((directory / "lineage.json").read_text()), directory


def test_files_are_linked_and_recorded_with_digests(model: Path, tmp_path: Path) -> None:
    (model / "optimizer.pt").write_bytes(b"pickle")
    counts, lineage, directory = collect(model, tmp_path)
    names = {path.name for path in (directory / "model").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert os.path.samefile(directory / "model/model.safetensors", model / "model.safetensors")
    assert (
        lineage["files"]
        == {name: file_digest(model / name) for name in names}
        == pretrained_digests(model)
    )
    assert lineage["path"] == str(model)
    assert "parent" not in lineage
    assert counts == {"files": 4, "bytes": sum((model / name).stat().st_size for name in names)}


def test_files_are_copied_where_links_are_impossible(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    _, lineage, directory = collect(model, tmp_path)
    assert not os.path.samefile(directory / "model/config.json", model / "config.json")
    assert lineage["files"] == pretrained_digests(model)


def test_export_is_recorded_as_parent(export: Path, tmp_path: Path) -> None:
    manifest = Manifest.read(export)
    _, lineage, directory = collect(export, tmp_path)
    assert lineage["parent"] == {"stage": "convert", "key": manifest.key, "digest": manifest.digest}
    assert (directory / "model/config.json").is_file()
    assert (
        local_directory(str(export)) == export / "model" == local_directory(str(export / "model"))
    )


def test_digests_of_an_unchanged_export_come_from_its_manifest(
    export: Path, tmp_path: Path
) -> None:
    export = Path(shutil.copytree(export, tmp_path / "export"))  # keeps the files' times
    expected = {
        name: file_digest(export / "model" / name) for name in pretrained_digests(export / "model")
    }
    assert pretrained_digests(export / "model") == expected
    path = export / "manifest.json"
    values = json.loads(path.read_text())
    values["files"]["model/config.json"]["sha256"] = "from the manifest"
    path.write_text(json.dumps(values))
    assert pretrained_digests(export / "model")["config.json"] == "from the manifest"
    os.utime(export / "model/config.json", ns=(1, 1))
    assert pretrained_digests(export / "model") == expected


def test_random_weights_need_no_weight_files(model: Path, tmp_path: Path) -> None:
    _, lineage, directory = collect(model, tmp_path, random_weights=True)
    assert not list((directory / "model").glob("*.safetensors"))
    assert lineage["random_weights"] is True
    assert "model.safetensors" not in pretrained_digests(model, weights=False)


def copy_without_weights(
    model: Path, directory: Path, config: dict[str, Any] | None = None
) -> Path:
    """Copy the model without its weights, with other values in its configuration."""
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((model / name).read_bytes())
    values = json.loads((model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | (config or {})))
    return directory


def convert_to_torch_files(model: Path, directory: Path, parts: int) -> Path:
    """Write the weights as torch's files, with the additional tensors of old checkpoints."""
    weights = {
        **load_file(model / "model.safetensors"),
        "bert.embeddings.position_ids": torch.arange(16),
    }
    copy_without_weights(model, directory)
    names = list(weights)
    if parts == 1:
        torch.save(weights, directory / "pytorch_model.bin")
        return directory
    file_of_tensor = {
        name: f"pytorch_model-{number % parts + 1:05d}-of-{parts:05d}.bin"
        for number, name in enumerate(names)
    }
    for file in set(file_of_tensor.values()):
        torch.save(
            {name: weights[name] for name in names if file_of_tensor[name] == file},
            directory / file,
        )
    (directory / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": file_of_tensor})
    )
    return directory


@pytest.mark.parametrize("parts", [1, 2])
def test_torch_files_are_converted_to_safetensors(model: Path, tmp_path: Path, parts: int) -> None:
    other = convert_to_torch_files(model, tmp_path / "torch", parts)
    _, lineage, directory = collect(other, tmp_path)
    names = {path.name for path in (directory / "model").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    before, after = (
        load_file(model / "model.safetensors"),
        load_file(directory / "model/model.safetensors"),
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert set(lineage["converted"]) == {path.name for path in other.glob("pytorch_model*")}
    assert set(lineage["converted"]) <= pretrained_digests(other).keys()


def test_safetensors_are_preferred_to_torch_files(model: Path, tmp_path: Path) -> None:
    other = copy_without_weights(model, tmp_path / "both")
    (other / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    (other / "pytorch_model.bin").write_bytes(b"never read")
    _, lineage, _ = collect(other, tmp_path)
    assert "converted" not in lineage
    assert "pytorch_model.bin" not in pretrained_digests(other)


class TouchWhenUnpickled:
    """Object whose unpickling runs code."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_code_in_torch_files_is_never_run(model: Path, tmp_path: Path) -> None:
    other = copy_without_weights(model, tmp_path / "pickled")
    torch.save({"weight": TouchWhenUnpickled(tmp_path / "ran")}, other / "pytorch_model.bin")
    with pytest.raises(
        ConfigError, match=r"pytorch_model\.bin holds more than tensors, .*as safetensors"
    ):
        collect(other, tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04 torn", "is damaged"),
        (b"", "is damaged"),
        ([1, 2], "is no mapping"),
        ({1: torch.ones(2)}, "is no mapping"),
    ],
)
def test_torch_files_without_weights_are_refused(
    model: Path, tmp_path: Path, content: Any, message: str
) -> None:
    other = copy_without_weights(model, tmp_path / "odd")
    if isinstance(content, bytes):
        (other / "pytorch_model.bin").write_bytes(content)
    else:
        torch.save(content, other / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=rf"pytorch_model\.bin {message}"):
        collect(other, tmp_path)


def test_missing_part_of_the_weights_is_refused(model: Path, tmp_path: Path) -> None:
    other = convert_to_torch_files(model, tmp_path / "torch", 2)
    (other / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(
        ConfigError, match=r"lacks pytorch_model-00002-of-00002\.bin, which .*index\.json names"
    ):
        collect(other, tmp_path)


def test_parts_without_an_index_are_refused(model: Path, tmp_path: Path) -> None:
    other = convert_to_torch_files(model, tmp_path / "torch", 2)
    index = other / "pytorch_model.bin.index.json"
    index.write_text("[]")
    with pytest.raises(ConfigError, match=r"index\.json is damaged"):
        collect(other, tmp_path)
    index.unlink()
    (tmp_path / "again").mkdir()
    with pytest.raises(
        ConfigError, match=r"has pytorch_model-00001-of-00002\.bin and lacks .*index\.json"
    ):
        collect(other, tmp_path / "again")


def test_weights_of_another_library_are_refused(model: Path, tmp_path: Path) -> None:
    other = copy_without_weights(model, tmp_path / "other")
    (other / "tf_model.h5").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"only as tf_model\.h5, which is not torch's"):
        collect(other, tmp_path)


def test_missing_weights_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no weights .* set model\.random_weights to true"):
        collect(copy_without_weights(model, tmp_path / "bare"), tmp_path)


def test_code_of_a_model_is_never_run(model: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    other = copy_without_weights(
        model,
        tmp_path / "remote",
        {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}},
    )
    (other / "own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises(
        ConfigError, match=r"model_type 'own' and needs code of its own, which is never run"
    ):
        collect(other, tmp_path, random_weights=True)
    assert not marker.exists()


@pytest.mark.parametrize("form", ["config", "safetensors", "torch"])
def test_quantized_weights_are_refused(form: str, model: Path, tmp_path: Path) -> None:
    quantization = {"quantization_config": {"quant_method": "fp8"}} if form == "config" else {}
    directory = copy_without_weights(model, tmp_path / "quantized", quantization)
    weights = load_file(model / "model.safetensors")
    name = "bert.encoder.layer.0.attention.self.query.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    if form == "torch":
        torch.save(weights, directory / "pytorch_model.bin")
    else:
        save_file(weights, directory / "model.safetensors")
    message = "a quantization_config of 'fp8'" if form == "config" else f"{name} in .*, quantized"
    with pytest.raises(ConfigError, match=rf"model.path .* has {message}"):
        collect(directory, tmp_path)


def test_damaged_weights_are_refused(model: Path, tmp_path: Path) -> None:
    other = copy_without_weights(model, tmp_path / "damaged")
    (other / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged .*get the model again"):
        collect(other, tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_cannot_be_read_is_refused(
    name: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path) -> str:
        if path.name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return file_digest(path)

    monkeypatch.setattr(pretrained, "file_digest", denied)
    with pytest.raises(
        FileAccessError, match=rf"cannot read .*{name} \(Permission denied\): make it readable"
    ):
        pretrained_digests(model)


def test_all_files_of_a_tokenizer_are_collected(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    source = tmp_path / "source"
    BertModel(
        BertConfig(
            vocab_size=10,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            intermediate_size=8,
        )
    ).save_pretrained(source)
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "BertweetTokenizer"}')
    (source / "vocab.txt").write_text("the 1\n")
    (source / "bpe.codes").write_text("t h 1\nth e</w> 1\n")
    _, _, directory = collect(source, tmp_path)
    tokenizer = read_tokenizer(PretrainedConfig(path=str(source)), directory)
    assert tokenizer.tokenize("the") == ["the"]


def test_unknown_model_type_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model_type 'perceptron' .*transformers does not know"):
        collect(
            copy_without_weights(model, tmp_path / "unknown", {"model_type": "perceptron"}),
            tmp_path,
            random_weights=True,
        )


def test_damaged_configuration_or_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    other = copy_without_weights(model, tmp_path / "model")
    (other / "tokenizer.json").write_text("{}")
    damaged = PretrainedConfig(path="damaged")
    with pytest.raises(
        ConfigError, match=r"transformers cannot load the tokenizer of model\.path damaged"
    ):
        read_tokenizer(damaged, tmp_path)
    (other / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model.path damaged has no readable config\.json"):
        read_model_config(damaged, tmp_path)


def test_padding_token_outside_the_vocabulary_is_refused(model: Path, tmp_path: Path) -> None:
    copy_without_weights(model, tmp_path / "model")
    assert read_tokenizer(PretrainedConfig(path="x", pad_token="[SEP]"), tmp_path).pad_token_id == 3
    with pytest.raises(
        ConfigError, match=r"model\.pad_token is '<pad>', which the tokenizer of x lacks"
    ):
        read_tokenizer(PretrainedConfig(path="x", pad_token="<pad>"), tmp_path)


@pytest.mark.parametrize("path", ["./none", "/none/at/all", "~/none-at-all", "a/b/c"])
def test_missing_directory_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        local_directory(path)


def test_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a directory without config\.json"):
        local_directory(str(tmp_path))


@pytest.mark.parametrize(
    "path", ["bert-base-uncased", "microsoft/deberta-v3-small", "models:/gpt2@candidate"]
)
def test_hub_and_registry_names_are_not_directories(path: str) -> None:
    assert local_directory(path) is None


class _Hub:
    """A stand-in for the hub's client."""

    files = (
        "config.json",
        "model.safetensors",
        "pytorch_model.bin",
        "tokenizer.json",
        "onnx/model.onnx",
    )
    raises: Exception | None = None

    def model_info(self, name: str, *, revision: str | None) -> Any:
        if self.raises is not None:
            raise self.raises

        siblings = [SimpleNamespace(rfilename=file) for file in self.files]
        return SimpleNamespace(sha="c" * 40, siblings=siblings)


def hub_error(name: str) -> Exception:
    import httpx
    from huggingface_hub import errors

    response = httpx.Response(404, request=httpx.Request("GET", "https://hub.invalid/api"))
    kind = getattr(errors, name)
    return (
        kind("not there", response=response) if name != "OfflineModeIsEnabled" else kind("offline")
    )


def test_only_required_files_are_downloaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        request.update(options)
        return str(model)

    monkeypatch.setattr("huggingface_hub.HfApi", _Hub)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    _, lineage, _ = collect("some/bert", tmp_path, revision="main")
    assert request["allow_patterns"] == ["config.json", "model.safetensors", "tokenizer.json"]
    assert request["revision"] == lineage["commit"] == "c" * 40
    assert request["cache_dir"] == str(tmp_path / "cache")
    assert (lineage["path"], lineage["revision"]) == ("some/bert", "main")


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (
            "RepositoryNotFoundError",
            ConfigError,
            "neither a local directory nor a model on the hub",
        ),
        ("RevisionNotFoundError", ConfigError, "model.revision v1 is none of model.path some/bert"),
        (
            "GatedRepoError",
            ConfigError,
            "is closed on the hub: accept its terms there and set HF_TOKEN",
        ),
        ("HfHubHTTPError", DownloadError, "cannot be downloaded"),
        ("OfflineModeIsEnabled", DownloadError, "cannot be downloaded: offline"),
    ],
)
def test_each_refusal_of_the_hub_has_its_error(
    raised: str,
    kind: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", _Hub)
    monkeypatch.setattr(_Hub, "raises", hub_error(raised))
    with pytest.raises(kind, match=message):
        collect("some/bert", tmp_path, revision="v1")


def test_lost_connection_is_retryable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    monkeypatch.setattr("huggingface_hub.HfApi", _Hub)
    monkeypatch.setattr(_Hub, "raises", httpx.ConnectError("no route to host"))
    with pytest.raises(DownloadError, match="no route to host: check the network") as caught:
        collect("some/bert", tmp_path)
    assert caught.value.retryable


def test_weights_of_another_library_are_refused_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", _Hub)
    monkeypatch.setattr(_Hub, "files", ("config.json", "flax_model.msgpack"))
    with pytest.raises(ConfigError, match="only as flax_model"):
        collect("some/bert", tmp_path)
