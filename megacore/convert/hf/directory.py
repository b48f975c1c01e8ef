"""Lazy access to the weights of a transformers directory by the names of our tables."""

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megacore.artifact.files import access_errors, is_stored_zip, read_json, reason_of, regular
from megacore.config.spec import ModelSpec
from megacore.convert.counterparts import Counterpart, counterpart
from megacore.convert.hf.config import CONFIG_NAME, GENERATION_NAME, HfConfig
from megacore.convert.hf.forms import FORMS, HfForm, read_spec
from megacore.convert.hf.write import FILE_NAME, INDEX_NAME
from megacore.convert.inert import not_dense
from megacore.convert.key_map import KeyMap, LazyTensors
from megacore.convert.source import Foreign
from megacore.errors import ConversionError, FileAccessError
from megacore.paths import is_file

_PICKLED = "pytorch_model.bin"
_PICKLED_INDEX = "pytorch_model.bin.index.json"
_BINARY_HEAD = {"bert.pooler.dense.weight", "cls.seq_relationship.weight"}

Reader = Callable[[], Tensor]


def open_hf(directory: Path) -> Foreign:
    """Open a transformers directory. The padding rows of the vocabulary are zero.

    Raises:
        ConversionError: if our models do not support the class or a value of its configuration, or
            files are missing, damaged or of another model.
    """
    hf_class, spec = spec_of_directory(directory)
    form = FORMS[hf_class.model_type]
    table = form.key_map(spec)
    tensors = table.ours(HfTensors(directory, form, table), str(directory))
    in_fp32 = LazyTensors(tensors, lambda name: tensors[name].float())
    return Foreign("hf", hf_class.architecture, spec, in_fp32, _weight_files(directory))


def spec_of_directory(directory: Path) -> tuple[Counterpart, ModelSpec]:
    """Return the class and the spec of a transformers directory, without the tokenizer.

    Raises:
        ConversionError: if our models do not support the class or a value of its configuration,
            generation_config.json is damaged, or the files of a BERT or T5 are missing or damaged.
    """
    hf_class, spec = read_spec(HfConfig.read(directory))
    spec = with_tokens_of_generation(spec, directory)
    if spec.family == "gpt":
        return hf_class, spec
    spec = with_heads_of_files(spec, FORMS[hf_class.model_type], tensor_readers(directory))
    return counterpart(spec.family, spec.model), spec


def with_tokens_of_generation(spec: ModelSpec, directory: Path) -> ModelSpec:
    """Return the spec with the further ends and the padding that generation_config.json names.

    The padding is that of config.json if that has one. The end of a text as padding is left out,
    because exports of models without padding name it.

    Raises:
        ConversionError: if generation_config.json is damaged.
    """
    if not is_file(directory / GENERATION_NAME):
        return spec
    generation = HfConfig.read(directory, GENERATION_NAME)
    special = spec.special_tokens.with_ends(generation.tokens("eos_token_id"), spec.vocab_size)
    pad = generation.token("pad_token_id")
    if spec.family == "gpt" and special.pad is None and pad != special.eod:
        known = pad is not None and pad < spec.vocab_size
        special = special.model_copy(update={"pad": pad if known else None})
    return spec.model_copy(update={"special_tokens": special})


def with_heads_of_files(spec: ModelSpec, form: HfForm, names: Iterable[str]) -> ModelSpec:
    """Return the spec with the heads that the tensors `names` of the files make.

    transformers 5 ties the head of a T5 unless the files have weights for it. Files of a BERT with
    a binary head may be named a masked LM, such as bert-base-uncased; it keeps the head here.
    """
    model = spec.model
    if spec.family == "gpt":
        return spec
    known = form.key_map(spec).their_shapes
    present = {form.name_on_disk(name, known) for name in names}
    changes: dict[str, bool] = {}
    if present >= _BINARY_HEAD:
        changes = {"bert_binary_head": True}
    untied = spec.family == "t5" and model.untie_embeddings_and_output_weights
    if untied and "lm_head.weight" not in present:
        changes = {"untie_embeddings_and_output_weights": False, "scale_decoder_outputs": False}
    return spec.model_copy(update={"model": model.model_copy(update=changes)})


class HfTensors(LazyTensors):
    """Mapping of a transformers directory's tensors in their stored types, by a table's names.

    Files may contain a tensor twice, under a second name (a tied head), with equal values.

    Raises:
        ConversionError: if files are missing or damaged, or the two copies of a tensor differ.
    """

    def __init__(self, directory: Path, form: HfForm, table: KeyMap) -> None:
        self.directory = directory
        self._readers: dict[str, Reader] = {}
        on_disk: dict[str, str] = {}
        for name, reader in tensor_readers(directory).items():
            known = form.name_on_disk(name, table.their_shapes)
            if known is None:
                continue
            if known.endswith(("weight_scale", "weight_scale_inv")):
                raise ConversionError(
                    f"{directory} has {known}: its weights are quantized, and are multiplied by "
                    "scales: save the model without quantization"
                )
            if known in self._readers:
                raise ConversionError(
                    f"{directory} has {on_disk[known]} and {name}, which are both {known}"
                )
            self._readers[known], on_disk[known] = reader, name
        self._unify(form, table)
        super().__init__(self._readers, self._read)

    def _unify(self, form: HfForm, table: KeyMap) -> None:
        """Keep only the table's name of each tensor that the files contain twice."""
        for copy, name in form.copies.items():
            if copy not in table.their_shapes and copy in self._readers:
                reader = self._readers.pop(copy)
                if name not in self._readers:
                    self._readers[name] = reader
                elif not torch.equal(reader(), self._readers[name]()):
                    # of a T5, the key says only whether the head's input is scaled
                    t5 = form is FORMS["t5"]
                    advice = "" if t5 else "set tie_word_embeddings to false there, or "
                    raise ConversionError(
                        f"{self.directory} has {copy} and {name} with different values, but its "
                        f"config.json says that they are one: {advice}repair the weights"
                    )

    def _read(self, name: str) -> Tensor:
        tensor = self._readers[name]()
        if not tensor.is_floating_point():
            raise ConversionError(
                f"{self.directory}: {name} is of {tensor.dtype}, where weights are floating-point "
                "numbers: save the model without quantization"
            )
        if tensor.dtype.itemsize == 1:
            raise ConversionError(
                f"{self.directory}: {name} is of {tensor.dtype} without scales, so its values are "
                "rounded to 8 bits or their scales are lost: give the model's version in fp32, "
                "bf16 or fp16"
            )
        return tensor


def _weight_files(directory: Path) -> tuple[Path, ...]:
    """Return the configurations and the weight files that are read of a transformers directory."""
    weights, _ = _weights_in(directory)
    parts = set(_weight_map(weights).values()) if weights.suffix == ".json" else ()
    names = {CONFIG_NAME, GENERATION_NAME, weights.name, *parts}
    return tuple(directory / name for name in sorted(names) if is_file(directory / name))


def tensor_readers(directory: Path) -> dict[str, Reader]:
    """Return the function that reads each tensor of a directory, by its name in the files."""
    path, read = _weights_in(directory)
    return _indexed(path, read) if path.suffix == ".json" else read(path)


def _weights_in(directory: Path) -> tuple[Path, Callable[[Path], dict[str, Reader]]]:
    """Return the file of a directory's weights, or the index of several, and a file's reader."""
    forms = {
        FILE_NAME: _safetensors,
        INDEX_NAME: _safetensors,
        _PICKLED: _pickled,
        _PICKLED_INDEX: _pickled,
    }
    for name, read in forms.items():
        if is_file(directory / name):
            return directory / name, read
    raise ConversionError(f"{directory} has no weights: none of {', '.join(forms)} is there")


def _weight_map(index: Path) -> dict[str, str]:
    """Return the name of the file of each tensor in an index; all must be next to it."""
    directory = index.parent
    try:
        file_names: dict[str, str] = read_json(index)["weight_map"]
        files = sorted(set(file_names.values()))
        plain = all(Path(file).name == file for file in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{index} is damaged ({reason_of(error)}): copy it again") from error
    if not plain:
        raise ConversionError(f"{index} names files outside of {directory}: {', '.join(files)}")
    missing = [file for file in files if not is_file(directory / file)]
    if missing:
        raise ConversionError(
            f"{index} names {len(files)} files, of which {len(missing)} are missing, {missing[0]} "
            "first: copy them too"
        )
    return file_names


def _indexed(index: Path, read: Callable[[Path], dict[str, Reader]]) -> dict[str, Reader]:
    """Return the readers of all tensors in an index; each must be in the file that it names."""
    file_names = _weight_map(index)
    readers = {file: read(index.parent / file) for file in sorted(set(file_names.values()))}
    lost = next((name for name, file in file_names.items() if name not in readers[file]), None)
    if lost is not None:
        raise ConversionError(
            f"{index} says that {lost} is in {file_names[lost]}, which lacks it: copy both again"
        )
    return {name: readers[file][name] for name, file in file_names.items()}


def _safetensors(path: Path) -> dict[str, Reader]:
    from safetensors import SafetensorError, safe_open

    _check_readable(path)
    try:
        with access_errors(path):
            file = safe_open(path, "pt")
        return {name: partial(file.get_tensor, name) for name in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118 (it is no dict)
    except (SafetensorError, OSError) as error:
        raise ConversionError(
            f"{path} ({path.stat().st_size:,} bytes) is damaged or cut short: {reason_of(error)}: "
            "copy it again"
        ) from error


def _check_readable(path: Path) -> None:
    """Raise ConversionError with the system's error, which the tensor readers do not report.

    Raises FileAccessError for a fault of this machine or a disk.
    """
    try:
        with access_errors(path):
            regular(path).open("rb").close()
    except OSError as error:
        raise ConversionError(
            f"{path} cannot be read ({error.strerror}): make it readable"
        ) from error


def _pickled(path: Path) -> dict[str, Reader]:
    """Return readers of a pickle's tensors, memory-mapped, without executing anything in it."""
    _check_readable(path)
    try:
        # The format of torch before 1.6 is not a zip file and cannot be memory-mapped.
        with access_errors(path):
            zipped = is_stored_zip(path)
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except FileAccessError:
        raise
    except Exception as error:  # a damaged pickle may raise any exception
        raise ConversionError(
            f"{path} ({path.stat().st_size:,} bytes) {_pickle_problem(error)}"
        ) from error
    if not isinstance(tensors, dict) or not all(
        isinstance(tensor, Tensor) for tensor in tensors.values()
    ):
        raise ConversionError(
            f"{path} holds something other than tensors by name: save the model as safetensors"
        )
    if (problem := not_dense(tensors)) is not None:
        raise ConversionError(f"{path}: {problem}: save the model as safetensors")
    return {name: partial(tensors.__getitem__, name) for name in tensors}


def _pickle_problem(error: Exception) -> str:
    """Describe what torch refused, without torch's advice to load the file unsafely."""
    refused = re.search(r"GLOBAL (\S+)", str(error))
    if refused:
        return (
            f"asks for {refused[1]}, which is no tensor: nothing of it was run, save the model as "
            "safetensors"
        )
    reason = str(error) if type(error) is ValueError else type(error).__name__
    return f"cannot be read as tensors only ({reason}): it is damaged or cut short, copy it again"
