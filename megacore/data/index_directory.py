"""Directory of index maps: paths of the maps, and `index.json`, which describes them.

    index.json
    {train,valid,test}_{document,sample,shuffle}_index.npy          a single data set
    member-NN/{train,valid,test}_{document,sample,shuffle}_index.npy      each data set of a blend
    {train,valid,test}_dataset_index.npy (i16), …_dataset_sample_index.npy (i64)      their blend

For samples of whole sentences, `{train,valid,test}_sentence_index.npy` replaces the three maps.

`index.json`: format 1; the options seq_length, seed, split, style, packing, add_extra_token,
drop_last_partial, and for samples of sentences `sentences` (kind, minimum_sentences,
short_seq_prob); `members`, each with its prefix (relative to the directory) and its weight in each
of its splits; `blends`, for each split the numbers of its members in the order in which the dataset
index numbers them; `steps`, the later weights of the train split with their first sample, if there
are any; `samples` per split, and for samples of whole documents `padding`, its share of
their tokens. Maps are checked when they are read.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.artifact.files import (
    access_error,
    read_json,
    save_array,
    workspace_errors,
    write_json,
)
from megacore.data.index_options import (
    SPLIT_NAMES,
    IndexOptions,
    Mixture,
    SentenceOptions,
    WeightStep,
)
from megacore.errors import ConfigError, DataFormatError, one_line

_MAP_DTYPES = ("<i4", "<u4", "<i8")
FORMAT = 1
INDEX_NAME = "index.json"
MAP_NAMES = ("document", "sample", "shuffle")
SENTENCE_MAP_NAME = "sentence"
BLEND_MAP_NAMES = ("dataset", "dataset_sample")


@dataclass(frozen=True)
class IndexMaps:
    """Index maps of one split of one data set."""

    document_index: npt.NDArray[np.int32]
    sample_index: npt.NDArray[Any]
    shuffle_index: npt.NDArray[Any]


@dataclass(frozen=True)
class IndexMember:
    """A data set of an index directory."""

    prefix: str
    """Path of the token files without .bin/.idx."""
    weights: Mapping[str, float | None]
    """Weight in each of its splits; None to use each of its samples once."""


@dataclass(frozen=True)
class IndexDescription:
    """Contents of `index.json`."""

    options: IndexOptions
    members: tuple[IndexMember, ...]
    blends: Mapping[str, tuple[int, ...]]
    """Numbers of the members of each split, in the order of its dataset index."""
    samples: Mapping[str, int]
    """Number of samples of each split."""
    single: bool
    """True if there is one data set, with its maps directly in the directory and no blend."""
    steps: tuple[WeightStep, ...] = ()
    """Later weights of the train split."""
    padding: Mapping[str, float] = field(default_factory=dict)
    """Share of padding in the tokens of each split's samples, 0 … 1; empty for samples without
    padding and for maps of an older version."""

    @property
    def counting_map(self) -> str:
        """Name of the map that has an entry for each sample of a data set."""
        return MAP_NAMES[-1] if self.options.sentences is None else SENTENCE_MAP_NAME


def map_path(directory: str | Path, split_name: str, map_name: str) -> Path:
    """Return the path of a map: `{train,valid,test}_{document,sample,shuffle}_index.npy`."""
    return Path(directory, f"{split_name}_{map_name}_index.npy")


def member_directory(directory: str | Path, number: int) -> Path:
    """Return the directory with the maps of one data set of a blend."""
    return Path(directory, f"member-{number:02d}")


def make_map_directory(directory: str | Path, mixture: Mixture, number: int) -> Path:
    """Create the directory with the maps of one data set of a mixture. Raises WorkspaceError."""
    folder = Path(directory) if mixture.is_single else member_directory(directory, number)
    with workspace_errors(folder):
        folder.mkdir(exist_ok=True)
    return folder


def save_blend(
    directory: str | Path,
    split_name: str,
    indices: Sequence[npt.NDArray[Any]],
) -> None:
    """Write the dataset index and the dataset sample index of a split. Raises WorkspaceError."""
    for map_name, values in zip(BLEND_MAP_NAMES, indices, strict=True):
        save_array(map_path(directory, split_name, map_name), values)


def save_maps(maps: IndexMaps, directory: str | Path, split_name: str) -> None:
    """Write a split's three `.npy` files. Raises WorkspaceError."""
    arrays = (maps.document_index, maps.sample_index, maps.shuffle_index)
    for map_name, values in zip(MAP_NAMES, arrays, strict=True):
        save_array(map_path(directory, split_name, map_name), values)


def write_description(
    directory: str | Path,
    mixture: Mixture,
    options: IndexOptions,
    samples: Mapping[str, int],
    padding: Mapping[str, float] | None = None,
) -> None:
    """Write `index.json`. Raises WorkspaceError."""
    numbers = {prefix: number for number, prefix in enumerate(mixture.prefixes)}
    weights: list[dict[str, float | None]] = [{} for _ in numbers]
    steps = mixture.steps_before(samples.get(SPLIT_NAMES[0], 0))
    for name in SPLIT_NAMES:
        for member in mixture.of(name):
            weights[numbers[member.prefix]][name] = member.weight
    content = {
        "format": FORMAT,
        **{
            name: value
            for name, value in asdict(options).items()
            if name != "sentences" or value is not None
        },
        "single": mixture.is_single,
        "members": [
            {"prefix": os.path.relpath(prefix, directory), "splits": weights[number]}
            for prefix, number in numbers.items()
        ],
        "blends": {
            name: [numbers[member.prefix] for member in mixture.of(name)]
            for name in SPLIT_NAMES
            if mixture.of(name)
        },
        **({"steps": [asdict(step) for step in steps]} if steps else {}),
        "samples": dict(samples),
        **({"padding": dict(padding)} if padding else {}),
    }
    write_json(Path(directory, INDEX_NAME), content)


def read_description(directory: str | Path) -> IndexDescription:
    """Read `index.json`. Raises DataFormatError if it is missing or damaged."""
    path = Path(directory, INDEX_NAME)
    try:
        content = read_json(path)
        if content["format"] != FORMAT:
            raise DataFormatError(
                f"{path} has format {content['format']!r}; only {FORMAT} is known: build it again"
            )
        members = tuple(
            IndexMember(
                os.path.normpath(Path(directory, member["prefix"])), _weights(member["splits"])
            )
            for member in content["members"]
        )
        blends = {name: tuple(map(int, numbers)) for name, numbers in content["blends"].items()}
        samples = {name: int(count) for name, count in content["samples"].items()}
        padding = {name: float(share) for name, share in content.get("padding", {}).items()}
        steps = tuple(
            WeightStep(int(step["samples"]), tuple(map(float, step["weights"])))
            for step in content.get("steps", ())
        )
        options = _options(content)
        description = IndexDescription(
            options, members, blends, samples, bool(content["single"]), steps, padding
        )
        _check(description)
    except FileNotFoundError as error:
        raise DataFormatError(f"{path} does not exist: build the index maps first") from error
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
        ConfigError,
    ) as error:
        raise DataFormatError(
            f"{path} is damaged ({error!r}): build the index maps again"
        ) from error
    return description


def _options(content: Mapping[str, Any]) -> IndexOptions:
    plain = {
        name: content[name] for name in IndexOptions.__dataclass_fields__ if name != "sentences"
    }
    sentences = content.get("sentences")
    return IndexOptions(
        **plain, sentences=None if sentences is None else SentenceOptions(**sentences)
    )


def _weights(splits: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: None if weight is None else float(weight) for name, weight in splits.items()}


def _check(description: IndexDescription) -> None:
    """Raise ValueError if a blend refers to members that do not exist."""
    named: Sequence[int] = [number for numbers in description.blends.values() for number in numbers]
    if any(not 0 <= number < len(description.members) for number in named):
        raise ValueError(
            f"its blends name the members {sorted(set(named))} of {len(description.members)}"
        )


def load_map(path: Path) -> npt.NDArray[Any]:
    """Open an index map as a memory map. Raises DataFormatError and FileAccessError."""
    try:
        with np.errstate(over="raise"):  # for a shape whose size exceeds 64 bits
            return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)  # type: ignore[no-any-return]
    except FileNotFoundError as error:
        raise DataFormatError(f"{path} does not exist: build the index maps first") from error
    except Exception as error:
        if isinstance(error, OSError) and (fault := access_error(error, path)) is not None:
            raise fault from error
        # NumPy parses the header as Python source, so any error may occur.
        reason = one_line(error)
        raise DataFormatError(
            f"{path} is not a readable index map ({reason}): build the index maps again"
        ) from error


def check_form(
    path: Path, values: npt.NDArray[Any], dimensions: int, dtypes: Sequence[str] = _MAP_DTYPES
) -> None:
    """Check type, dimensions and contiguity of a map. Raises DataFormatError."""
    if (
        values.dtype not in map(np.dtype, dtypes)
        or values.ndim != dimensions
        or not values.flags.c_contiguous
    ):
        raise DataFormatError(
            f"{path} is an array of {values.dtype} with shape {values.shape}, which is not that "
            "map's form: build the index maps again"
        )


def check_range(path: Path, values: npt.NDArray[Any], limit: int, reason: str) -> None:
    """Check that the values of a map are in 0 … limit-1. Raises DataFormatError."""
    if values.size and (values.min() < 0 or values.max() >= limit):
        raise DataFormatError(
            f"{path} points to {values.min()} … {values.max()} where only 0 … {limit - 1} exists: "
            f"{reason}"
        )
