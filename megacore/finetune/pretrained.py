"""The stage `pretrained`: a model's files, from a local directory or the Hugging Face hub, and where they come from."""

import fnmatch
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megacore.artifact.files import workspace_errors, write_json
from megacore.artifact.manifest import MANIFEST_NAME, Manifest, file_digest
from megacore.config.finetune import PretrainedConfig
from megacore.errors import ArtifactError, ConfigError
from megacore.finetune.models import CONFIG_NAME, MODEL_DIRECTORY, refuse_remote_code
from megacore.finetune.torch_weights import TORCH_INDEX_NAME, TORCH_NAME, convert_torch_weights
from megacore.redact import redact

PRETRAINED_VERSION = 1
"""Of the stage; raised when it produces something else."""
LINEAGE_NAME = "lineage.json"
_WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")
_TORCH_WEIGHTS = (TORCH_NAME, "pytorch_model-*.bin", TORCH_INDEX_NAME)
_FOREIGN = ("*.ckpt", "*.h5", "*.msgpack")
_OTHERS = (
    CONFIG_NAME,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "*.model",
    "*.spm",
)
"""What architecture and tokenizer are read from."""


def local_directory(path: str) -> Path | None:
    """The transformers directory that `path` names, itself or its `model/`; None for a name on the hub.

    Raises ConfigError for a directory that does not exist or holds no model.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        for candidate in (directory, directory / MODEL_DIRECTORY):
            if (candidate / CONFIG_NAME).is_file():
                return candidate
        raise ConfigError(
            f"model.path {path} is a directory without {CONFIG_NAME}: give one that save_pretrained or an export wrote"
        )
    if path.startswith("models:/"):
        return None
    # The hub's names have no more than one slash.
    if directory.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ConfigError(f"model.path {path} is not a directory: check it, or give a name on the hub")
    return None


def pretrained_digests(directory: Path, *, weights: bool = True) -> dict[str, str]:
    """sha256 of each file of a transformers directory that is used, by name; weights only if asked for.

    Of an export they are taken from its manifest, where the files are as they were then.
    """
    known = _manifest_beside(directory)
    return {name: _digest(directory / name, known) for name in used_files(_names(directory), weights=weights)}


def _digest(path: Path, manifest: Manifest | None) -> str:
    entry = None if manifest is None else manifest.files.get(f"{path.parent.name}/{path.name}")
    status = path.stat()
    if entry is not None and (entry.size, entry.mtime_ns) == (status.st_size, status.st_mtime_ns):
        return entry.sha256
    return file_digest(path)


def used_files(names: Iterable[str], *, weights: bool) -> list[str]:
    """Which of a directory's files are used, sorted; of the weights torch's own only where there are no safetensors."""
    names = list(names)
    patterns: tuple[str, ...] = _OTHERS
    if weights:
        patterns += _WEIGHTS if _matching(names, _WEIGHTS[:2]) else _TORCH_WEIGHTS
    return _matching(names, patterns)


def _matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    return sorted(name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))


def collect_pretrained(
    model: PretrainedConfig, directory: Path, cache_directory: Path, *, local: Path | None
) -> dict[str, Any]:
    """Fill the empty `directory` with `model/` and `lineage.json`.

    Files of a local directory are hard-linked, or copied where that cannot be; those of the hub are downloaded into
    `cache_directory` before, where an attempt that broke off left what it had. Weights that come in torch's own files
    alone are written as safetensors.

    Args:
        model: which, and whether its weights are wanted.
        directory: of the artifact.
        cache_directory: of downloads, of the same disk if possible.
        local: the transformers directory, or None for the hub.

    Returns:
        Counts: files and bytes.

    Raises:
        ConfigError: no such model, weights that cannot be read, or a class that transformers does not have.
        DownloadError: the hub cannot be reached.
        WorkspaceError: the disk refuses.
    """
    weights = not model.random_weights
    lineage: dict[str, Any] = {"path": redact(model.path), "random_weights": model.random_weights}
    if local is None:
        from megacore.finetune.hub_model import download_model

        source, commit = download_model(model, cache_directory)
        lineage |= {"revision": model.revision, "commit": commit}
    else:
        source = local
        manifest = _manifest_beside(local)
        if manifest is not None:
            lineage["parent"] = {"stage": manifest.stage, "key": manifest.key, "digest": manifest.digest}
    names = used_files(_names(source), weights=weights)
    if weights:
        require_weights(model.path, _names(source))
    target = directory / MODEL_DIRECTORY
    torch_files = _matching(names, _TORCH_WEIGHTS)
    with workspace_errors(target):
        target.mkdir()
        for name in names:
            if name not in torch_files:
                _link(source / name, target / name)
    if torch_files:
        convert_torch_weights(model.path, source, torch_files, target)
        lineage["converted"] = {name: file_digest(source / name) for name in torch_files}
    refuse_remote_code(model.path, target)
    lineage["files"] = pretrained_digests(target, weights=weights)
    write_json(directory / LINEAGE_NAME, lineage)
    sizes = [path.stat().st_size for path in target.iterdir()]
    return {"files": len(sizes), "bytes": sum(sizes)}


def require_weights(path: str, names: Iterable[str]) -> None:
    """Raise ConfigError for a model with neither safetensors nor torch's own files."""
    names = list(names)
    if _matching(names, (*_WEIGHTS[:2], *_TORCH_WEIGHTS)):
        return
    if foreign := _matching(names, _FOREIGN):
        raise ConfigError(
            f"model.path {path} has its weights only as {foreign[0]}, which is not torch's: save the model as "
            "safetensors, which save_pretrained does"
        )
    raise ConfigError(
        f"model.path {path} has no weights (no model.safetensors): give a whole model, or set model.random_weights to "
        "true"
    )


def _link(source: Path, target: Path) -> None:
    """One file in a second place; the hub's client keeps links to its files, so that the file itself is linked."""
    source = source.resolve()
    try:
        os.link(source, target)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(source, target)


def _names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.is_file()]


def _manifest_beside(directory: Path) -> Manifest | None:
    """The manifest of the artifact whose `model/` this is."""
    if directory.name != MODEL_DIRECTORY or not (directory.parent / MANIFEST_NAME).is_file():
        return None
    try:
        return Manifest.read(directory.parent)
    except ArtifactError as error:
        raise ConfigError(f"model.path names a damaged export: {error}") from error
