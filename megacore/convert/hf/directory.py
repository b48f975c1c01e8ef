"""The weights of a transformers directory by the names of our tables, read one at a time."""

import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megacore.artifact.files import read_json
from megacore.config.spec import ModelSpec
from megacore.convert.counterparts import Counterpart
from megacore.convert.hf.config import HfConfig
from megacore.convert.hf.forms import FORMS, HfForm, read_spec
from megacore.convert.hf.write import FILE_NAME, INDEX_NAME
from megacore.convert.key_map import KeyMap
from megacore.errors import ConversionError

_PICKLED = "pytorch_model.bin"
_PICKLED_INDEX = "pytorch_model.bin.index.json"

Reader = Callable[[], Tensor]


def open_hf(directory: Path) -> tuple[Counterpart, ModelSpec, Mapping[str, Tensor]]:
    """A transformers directory as a model of ours.

    Read are its class, its spec, and its weights under our names, in fp32.

    Each weight is read when it is asked for. The padding of the vocabulary is zero.

    Raises ConversionError: the class or a value of its configuration is none that models here have,
    or files are missing, damaged or of another model.
    """
    found, spec = read_spec(HfConfig.read(directory))
    form = FORMS[found.model_type]
    table = form.key_map(spec)
    return found, spec, _InFp32(table.ours(HfTensors(directory, form, table), str(directory)))


class HfTensors(Mapping[str, Tensor]):
    """Tensors of a transformers directory under the names of a table, in their stored types.

    Files may hold a tensor under a second name (a tied head); it must be the same then. Raises
    ConversionError when files are missing or damaged, or two names that are one tensor have
    different values.
    """

    def __init__(self, directory: Path, form: HfForm, table: KeyMap) -> None:
        self.directory = directory
        self._readers: dict[str, Reader] = {}
        on_disk: dict[str, str] = {}
        for name, reader in _readers(directory).items():
            known = form.name_on_disk(name, table.their_shapes)
            if known is None:
                continue
            if known in self._readers:
                raise ConversionError(
                    f"{directory} has {on_disk[known]} and {name}, which are both {known}"
                )
            self._readers[known], on_disk[known] = reader, name
        self._unify(form, table)

    def _unify(self, form: HfForm, table: KeyMap) -> None:
        """Keep one of the names of a tensor: the table's."""
        for copy, name in form.copies.items():
            if copy in table.their_shapes:
                if form.copies_left_out and copy not in self._readers and name in self._readers:
                    self._readers[copy] = self._readers[name]
            elif copy in self._readers:
                reader = self._readers.pop(copy)
                if name not in self._readers:
                    self._readers[name] = reader
                elif not torch.equal(reader(), self._readers[name]()):
                    raise ConversionError(
                        f"{self.directory} has {copy} and {name} with different values, but its "
                        "config.json says that they are one: set tie_word_embeddings to false "
                        "there, or repair the weights"
                    )

    def __getitem__(self, name: str) -> Tensor:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


class _InFp32(Mapping[str, Tensor]):
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The files of a transformers directory that say what the model is."""
    patterns = (
        "config.json",
        "model*.safetensors",
        INDEX_NAME,
        "pytorch_model*.bin",
        _PICKLED_INDEX,
    )
    return tuple(sorted({path for pattern in patterns for path in directory.glob(pattern)}))


def _readers(directory: Path) -> dict[str, Reader]:
    """How each tensor of a directory is read, by its name in the files."""
    single = ((FILE_NAME, _safetensors), (_PICKLED, _pickled))
    several = ((INDEX_NAME, _safetensors), (_PICKLED_INDEX, _pickled))
    for (file, read), (index, _) in zip(single, several, strict=True):
        if (directory / file).is_file():
            return read(directory / file)
        if (directory / index).is_file():
            return _indexed(directory, directory / index, read)
    names = ", ".join(name for pair in zip(single, several, strict=True) for name, _ in pair)
    raise ConversionError(f"{directory} has no weights: none of {names} is there")


def _indexed(
    directory: Path, index: Path, read: Callable[[Path], dict[str, Reader]]
) -> dict[str, Reader]:
    """The tensors of all files that an index names, each of which must be where the index says."""
    try:
        places: dict[str, str] = read_json(index)["weight_map"]
        files = sorted(set(places.values()))
        plain = all(Path(file).name == file for file in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{index} is damaged ({error}): copy it again") from error
    if not plain:
        raise ConversionError(f"{index} names files outside of {directory}: {', '.join(files)}")
    missing = [file for file in files if not (directory / file).is_file()]
    if missing:
        raise ConversionError(
            f"{index} names {len(files)} files, of which {len(missing)} are missing, {missing[0]} "
            "first: copy them too"
        )
    held = {file: read(directory / file) for file in files}
    lost = next((name for name, file in places.items() if name not in held[file]), None)
    if lost is not None:
        raise ConversionError(
            f"{index} says that {lost} is in {places[lost]}, which lacks it: copy both again"
        )
    return {name: held[file][name] for name, file in places.items()}


def _safetensors(path: Path) -> dict[str, Reader]:
    from safetensors import SafetensorError, safe_open

    _check_readable(path)
    try:
        file = safe_open(path, "pt")
        return {name: partial(file.get_tensor, name) for name in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118 (it is no dict)
    except (SafetensorError, OSError) as error:
        raise ConversionError(
            f"{path} ({path.stat().st_size:,} bytes) is damaged or cut short: {error}: copy it "
            "again"
        ) from error


def _check_readable(path: Path) -> None:
    """Raise ConversionError with the system's reason, which the readers of tensors do not tell."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConversionError(
            f"{path} cannot be read ({error.strerror}): make it readable"
        ) from error


def _pickled(path: Path) -> dict[str, Reader]:
    """Tensors of a pickle, mapped into memory; nothing of it is executed."""
    _check_readable(path)
    try:
        # torch's form before 1.6, which is no zip file, cannot be mapped.
        held = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except Exception as error:  # a damaged pickle raises whatever its next byte asks for
        raise ConversionError(
            f"{path} ({path.stat().st_size:,} bytes) {_pickle_problem(error)}"
        ) from error
    if not isinstance(held, dict) or not all(
        isinstance(tensor, Tensor) for tensor in held.values()
    ):
        raise ConversionError(
            f"{path} holds something else than tensors by name: save the model as safetensors"
        )
    return {name: partial(held.__getitem__, name) for name in held}


def _pickle_problem(error: Exception) -> str:
    """What torch refused, without its advice to execute it."""
    asked = re.search(r"GLOBAL (\S+)", str(error))
    if asked:
        return (
            f"asks for {asked[1]}, which is no tensor: nothing of it was run, save the model as "
            "safetensors"
        )
    return (
        f"cannot be read as tensors alone ({type(error).__name__}): it is damaged or cut short, "
        "copy it again"
    )
