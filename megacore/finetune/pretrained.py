"""Stage `pretrained`: the files of a model and their lineage.

The source is a local directory or the Hugging Face hub.
"""

import fnmatch
import os
import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megacore.artifact.files import (
    access_errors,
    is_stored_zip,
    read_json,
    reason_of,
    unreadable,
    workspace_errors,
    write_json,
)
from megacore.artifact.manifest import MANIFEST_NAME, Manifest, file_digest
from megacore.artifact.workspace import MODEL_DIRECTORY
from megacore.config.finetune import PretrainedConfig
from megacore.corpus.fetch import first_sentence
from megacore.corpus.hub import broken_connections, disk_errors
from megacore.errors import ArtifactError, ConfigError, DownloadError, FileAccessError, one_line
from megacore.paths import exists, glob, is_dir, is_file
from megacore.redact import redact

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONFIG_NAME = "config.json"

T = TypeVar("T")


def read_model_config(model: PretrainedConfig, pretrained_directory: Path) -> Any:
    """Return the transformers configuration of a collected model. Raises ConfigError."""
    from transformers import AutoConfig

    directory = pretrained_directory / MODEL_DIRECTORY
    refuse_remote_code(model.path, directory)
    refuse_quantized(model.path, directory)
    return _loaded(
        model.path, "configuration", lambda: AutoConfig.from_pretrained(directory, **LOCAL_ONLY)
    )


def is_encoder_decoder(model: PretrainedConfig, pretrained_directory: Path) -> bool:
    """Return True if config.json of a collected model says that it is an encoder-decoder.

    Raises ConfigError if the file cannot be read.
    """
    values = _config_values(model.path, pretrained_directory / MODEL_DIRECTORY)
    return bool(values.get("is_encoder_decoder"))


def read_model_type(model: PretrainedConfig, pretrained_directory: Path) -> str | None:
    """Return the `model_type` in config.json of a collected model, or None without one.

    Raises ConfigError if the file cannot be read.
    """
    return _config_values(model.path, pretrained_directory / MODEL_DIRECTORY).get("model_type")


def _config_values(path: str, directory: Path) -> dict[str, Any]:
    """Return the content of config.json; {} if it holds no object. Raises ConfigError."""
    try:
        values = read_json(directory / CONFIG_NAME)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path {path} has no readable {CONFIG_NAME} ({reason_of(error)}): give a "
            "directory that save_pretrained wrote"
        ) from error
    return values if isinstance(values, dict) else {}


def refuse_remote_code(path: str, directory: Path) -> None:
    """Raise ConfigError for a model whose class transformers does not have.

    `path` is the model's name in error messages.
    """
    from transformers import CONFIG_MAPPING

    values = _config_values(path, directory)
    kind = values.get("model_type")
    if kind in CONFIG_MAPPING:
        return
    if "auto_map" in values:
        raise ConfigError(
            f"model.path {path} is of model_type {kind!r} and needs code of its own, which is "
            "never run here: give a model whose class transformers has"
        )
    raise ConfigError(
        f"model.path {path} has model_type {kind!r} in its {CONFIG_NAME}, which transformers does "
        "not know: give a model whose class it has"
    )


def refuse_quantized(path: str, directory: Path) -> None:
    """Raise ConfigError for a model with quantized weights, which no optimizer can change.

    transformers reads 8-bit weights without a word, and ignores their scales if config.json names
    none. `path` is the model's name in error messages.
    """
    from safetensors import SafetensorError, safe_open

    advice = "give the model's version before quantization"
    kind = _config_values(path, directory).get("quantization_config")
    if kind is not None:
        method = kind.get("quant_method") if isinstance(kind, dict) else kind
        raise ConfigError(
            f"model.path {path} has a quantization_config of {method!r} in its {CONFIG_NAME}, and "
            f"quantized weights cannot be trained: {advice}"
        )
    for file in sorted(glob(directory, "*.safetensors")):
        try:
            with access_errors(file), safe_open(file, "pt") as tensors:
                names = tensors.keys()
                types = {name: tensors.get_slice(name).get_dtype() for name in names}
        except SafetensorError as error:
            raise ConfigError(
                f"model.path {path}: {file.name} is damaged ({one_line(error, 200)}): get the "
                "model again"
            ) from error
        for name, dtype in types.items():
            if dtype.startswith(("F8", "F4")):
                raise ConfigError(f"model.path {path} has {name} in {dtype}, quantized: {advice}")


def read_tokenizer(
    model: PretrainedConfig, pretrained_directory: Path
) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a collected model, with `model.pad_token` as padding if set.

    Raises ConfigError when transformers refuses it, or the padding token is not in its vocabulary.
    """
    from transformers import AutoTokenizer

    directory = pretrained_directory / MODEL_DIRECTORY
    load: Callable[[], Any] = lambda: AutoTokenizer.from_pretrained(directory, **LOCAL_ONLY)  # noqa: E731
    tokenizer = _loaded(model.path, "tokenizer", load)
    if not len(tokenizer):
        raise ConfigError(
            f"model.path {model.path} has no tokenizer: copy its tokenizer.json next to config.json"
        )
    token = model.pad_token
    if token is not None:
        if token not in tokenizer.get_vocab():
            raise ConfigError(
                f"model.pad_token is {token!r}, which the tokenizer of {model.path} lacks: name "
                f"one of its {len(tokenizer)} tokens, such as its end of text "
                f"{tokenizer.eos_token!r}"
            )
        tokenizer.pad_token = token
    result: PreTrainedTokenizerBase = tokenizer
    return result


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the progress bars and warnings of transformers and datasets in the body.

    This package checks the relevant conditions itself.
    """
    import datasets
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging  # untyped

    bars = (logging.is_progress_bar_enabled(), not datasets.are_progress_bars_disabled())
    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars[0]:
            logging.enable_progress_bar()
        if bars[1]:
            datasets.enable_progress_bars()


LOCAL_ONLY: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Options that prevent downloads and the execution of code that comes with a model."""


def _loaded(path: str, part: str, load: Callable[[], T]) -> T:
    try:
        with quiet():
            return load()
    except MemoryError:
        raise
    except Exception as error:  # safetensors and tokenizers raise plain Exception
        raise ConfigError(
            f"transformers cannot load the {part} of model.path {path}: {one_line(error, 300)}"
        ) from error


PRETRAINED_VERSION = 1
"""Version of the stage; raised when its output changes."""
LINEAGE_NAME = "lineage.json"
TORCH_NAME = "pytorch_model.bin"
TORCH_INDEX_NAME = "pytorch_model.bin.index.json"
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
    "bpe.codes",
    "byte_maps.json",
    "dict.txt",
    "emoji.json",
    "entity_vocab.json",
    "prophetnet.tokenizer",
    "target_vocab.json",
    "vocab-src.json",
    "vocab-tgt.json",
    "word_pronunciation.json",
    "word_shape.json",
)
"""Files of the configuration and the tokenizer."""


def local_directory(path: str) -> Path | None:
    """Return the transformers directory `path` or `path/model`, or None for a name on the hub.

    Raises ConfigError for a directory that does not exist or contains no model.
    """
    directory = Path(path).expanduser()
    if is_dir(directory):
        for candidate in (directory, directory / MODEL_DIRECTORY):
            if is_file(candidate / CONFIG_NAME):
                return candidate
        raise ConfigError(
            f"model.path {path} is a directory without {CONFIG_NAME}: give one that "
            "save_pretrained or an export wrote"
        )
    if path.startswith("models:/"):
        return None
    # Names on the hub have at most one slash.
    if exists(directory) or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ConfigError(
            f"model.path {path} is not a directory: check it, or give a name on the hub"
        )
    return None


def pretrained_digests(directory: Path, *, weights: bool = True) -> dict[str, str]:
    """Return the sha256 of each used file of a transformers directory, by file name.

    Weights are included if `weights` is true. Digests of an export come from its manifest if the
    files' sizes and times are unchanged.

    Raises FileAccessError for files that cannot be read.
    """
    known = _find_manifest(directory)
    try:
        return {
            name: _digest(directory / name, known)
            for name in used_files(_names(directory), weights=weights)
        }
    except OSError as error:
        raise unreadable(error, directory) or error from error


def _digest(path: Path, manifest: Manifest | None) -> str:
    entry = None if manifest is None else manifest.files.get(f"{path.parent.name}/{path.name}")
    status = path.stat()
    if entry is not None and (entry.size, entry.mtime_ns) == (status.st_size, status.st_mtime_ns):
        return entry.sha256
    return file_digest(path)


def used_files(names: Iterable[str], *, weights: bool) -> list[str]:
    """Return the sorted names of the files needed from a transformers directory.

    PyTorch's own weight files are needed only if there are no safetensors.
    """
    names = list(names)
    patterns: tuple[str, ...] = _OTHERS
    if weights:
        patterns += _WEIGHTS if _matching(names, _WEIGHTS[:2]) else _TORCH_WEIGHTS
    return _matching(names, patterns)


def _matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    return sorted(
        name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    )


def collect_pretrained(
    model: PretrainedConfig, directory: Path, cache_directory: Path, *, local: Path | None
) -> dict[str, Any]:
    """Fill the empty `directory` with `model/` and `lineage.json`.

    Files of a local directory are hard-linked, or copied if that is impossible. Files of the hub
    are downloaded into `cache_directory` first, where interrupted downloads resume. Weights that
    exist only in PyTorch's own format are written as safetensors.

    Args:
        model: name of the model, and whether its weights are used.
        directory: directory of the artifact.
        cache_directory: directory of downloads, on the same disk if possible.
        local: transformers directory, or None for the hub.

    Returns:
        Counts: files and bytes.

    Raises:
        ConfigError: the model does not exist, its weights cannot be read, or transformers does not
            have its class.
        DownloadError: the hub cannot be reached.
        WorkspaceError: a file cannot be written.
    """
    weights = not model.random_weights
    lineage: dict[str, Any] = {"path": redact(model.path), "random_weights": model.random_weights}
    if local is None:
        source, commit = download_model(model, cache_directory)
        lineage |= {"revision": model.revision, "commit": commit}
    else:
        source = local
        manifest = _find_manifest(local)
        if manifest is not None:
            lineage["parent"] = {
                "stage": manifest.stage,
                "key": manifest.key,
                "digest": manifest.digest,
            }
    available = _names(source)
    names = used_files(available, weights=weights)
    if weights:
        require_weights(model.path, available)
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
    refuse_quantized(model.path, target)
    lineage["files"] = pretrained_digests(target, weights=weights)
    write_json(directory / LINEAGE_NAME, lineage)
    sizes = [path.stat().st_size for path in target.iterdir()]
    return {"files": len(sizes), "bytes": sum(sizes)}


def require_weights(path: str, names: Iterable[str]) -> None:
    """Raise ConfigError for a model with neither safetensors nor PyTorch's own weight files."""
    names = list(names)
    if _matching(names, (*_WEIGHTS[:2], *_TORCH_WEIGHTS)):
        return
    if foreign := _matching(names, _FOREIGN):
        raise ConfigError(
            f"model.path {path} has its weights only as {foreign[0]}, which is not torch's: save "
            "the model as safetensors, which save_pretrained does"
        )
    raise ConfigError(
        f"model.path {path} has no weights (no model.safetensors): give a whole model, or set "
        "model.random_weights to true"
    )


def _link(source: Path, target: Path) -> None:
    """Hard-link `source` as `target`, or copy it.

    The hub's cache contains symbolic links; the link is made to the file they point to.
    """
    source = source.resolve()
    try:
        os.link(source, target)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(source, target)


def _names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if is_file(path)]


def _find_manifest(directory: Path) -> Manifest | None:
    """Return the manifest of the artifact whose `model/` is `directory`, or None."""
    if directory.name != MODEL_DIRECTORY or not is_file(directory.parent / MANIFEST_NAME):
        return None
    try:
        return Manifest.read(directory.parent)
    except ArtifactError as error:
        raise ConfigError(f"model.path names a damaged export: {error}") from error


def convert_torch_weights(path: str, source: Path, files: Sequence[str], target: Path) -> None:
    """Convert PyTorch's own weight files to safetensors in `target`.

    The weights are written as bf16 if all of them are bf16, otherwise as fp32. Integer tensors,
    such as position ids, are left out. Tensors that share memory are written once for each name.

    Args:
        path: name of the model as given by the user.
        source: directory of the files.
        files: `pytorch_model.bin`, or several files and their index.
        target: directory to write into.

    Raises:
        ConfigError: a file is missing or damaged, or contains more than tensors.
        WorkspaceError: a file cannot be written.
    """
    import torch

    from megacore.convert.hf.write import write_safetensors

    shapes, kinds = dict[str, tuple[int, ...]](), set[torch.dtype]()
    names = _parts(path, source, files)
    for name, tensor in _tensors(path, source, names):
        shapes[name] = tuple(tensor.shape)
        kinds.add(tensor.dtype)
        if tensor.dtype.itemsize == 1:
            raise ConfigError(
                f"model.path {path} has {name} in {tensor.dtype}, quantized: give the model's "
                "version before quantization"
            )
    if not shapes:
        raise ConfigError(
            f"model.path {path} has no weights in {', '.join(names)}: give a whole model"
        )
    dtype = "bfloat16" if kinds == {torch.bfloat16} else "float32"
    write_safetensors(target, shapes, _tensors(path, source, names), dtype=dtype)  # type: ignore[arg-type]


def _parts(path: str, source: Path, files: Sequence[str]) -> list[str]:
    """Return the names of the files that contain tensors, in the order of the index."""
    if TORCH_INDEX_NAME not in files:
        if TORCH_NAME not in files:
            raise ConfigError(
                f"model.path {path} has {files[0]} and lacks {TORCH_INDEX_NAME}, which names all "
                "parts: get the model again"
            )
        return [TORCH_NAME]
    try:
        index = read_json(source / TORCH_INDEX_NAME)
        names = list(dict.fromkeys(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"model.path {path}: {TORCH_INDEX_NAME} is damaged ({reason_of(error)}): get the "
            "model again"
        ) from error
    missing = [name for name in names if name not in files]
    if missing:
        raise ConfigError(
            f"model.path {path} lacks {missing[0]}, which {TORCH_INDEX_NAME} names: get the model "
            "again"
        )
    return names


def _tensors(path: str, source: Path, names: Sequence[str]) -> "Iterator[tuple[str, Any]]":
    """Yield the name and value of every weight, file by file.

    A repeated name is yielded once.
    """
    seen = set[str]()
    for name in names:
        for key, tensor in _read(path, source / name).items():
            if tensor.is_floating_point() and key not in seen:
                seen.add(key)
                yield key, tensor


def _read(path: str, file: Path) -> "Mapping[str, Any]":
    import torch

    from megacore.convert.inert import not_dense

    try:
        # Memory-mapped, so that a weight is in memory only while it is written. Files from before
        # torch 1.6 cannot be mapped.
        with access_errors(file):
            zipped = is_stored_zip(file)
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"model.path {path}: {file.name} holds more than tensors, which could run code and is "
            "never read: save the model as safetensors, which save_pretrained does"
        ) from error
    except (MemoryError, FileAccessError):
        raise
    except Exception as error:  # a damaged pickle has many ways to fail
        raise ConfigError(
            f"model.path {path}: {file.name} is damaged ({one_line(error, 200)}): "
            "get the model again"
        ) from error
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in content.items()
    ):
        raise ConfigError(
            f"model.path {path}: {file.name} is no mapping of names to weights: give a whole model"
        )
    if (problem := not_dense(content)) is not None:
        raise ConfigError(
            f"model.path {path}: {file.name}: {problem}: save the model as safetensors"
        )
    return content


def download_model(model: PretrainedConfig, cache_directory: Path) -> tuple[Path, str]:
    """Download the used files of a model; return their directory and the commit.

    Raises ConfigError for a model that does not exist, is not accessible, or has no weights that
    PyTorch reads; DownloadError for a lost connection.
    """
    # Imported here because only models of the hub need it.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    lost: tuple[type[Exception], ...] = (
        LocalEntryNotFoundError,
        HfHubHTTPError,
        *broken_connections(),
    )
    name = model.path if model.revision is None else f"{model.path} at {model.revision}"
    try:
        with disk_errors(cache_directory):
            info = HfApi().model_info(model.path, revision=model.revision)
            names = [file.rfilename for file in info.siblings or ()]
            if not model.random_weights:
                require_weights(model.path, names)
            commit = str(info.sha)
            used = used_files(names, weights=not model.random_weights)
            directory = snapshot_download(
                model.path, revision=commit, allow_patterns=used, cache_dir=str(cache_directory)
            )
        return Path(directory), commit
    except GatedRepoError as error:
        raise ConfigError(
            f"model.path {name} is closed on the hub: accept its terms there and set HF_TOKEN, or "
            "give a local directory"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(
            f"model.revision {model.revision} is none of model.path {model.path} on the hub"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            f"model.path {name} is neither a local directory nor a model on the hub (or it is "
            "private: set HF_TOKEN)"
        ) from error
    except lost as error:
        raise DownloadError(
            f"model.path {name} cannot be downloaded: {first_sentence(error)}: check the network, "
            "or give a local directory"
        ) from error
    except OSError as error:
        raise DownloadError(
            f"model.path {name} cannot be downloaded: {first_sentence(error)}: try again"
        ) from error
