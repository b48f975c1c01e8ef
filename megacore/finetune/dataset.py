"""The stage `dataset`.

The rows of each split as they come, from local files or a data set of the hub.
"""

import glob
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.artifact.files import workspace_errors
from megacore.config.finetune import FileRows, FinetuneDataConfig, HubRows
from megacore.corpus.documents import SourceFile
from megacore.corpus.formats import file_format_of, pieces
from megacore.corpus.hub import disk_errors, loading
from megacore.errors import DataFormatError

if TYPE_CHECKING:
    from datasets import Dataset

DATASET_VERSION = 1
"""Of the stage; raised when it produces something else."""
SPLITS = ("train", "valid", "test")


def dataset_fingerprint(data: FinetuneDataConfig, seed: int) -> dict[str, Any]:
    """What decides the rows.

    The source, sizes and times of local files, and the share that is held out.

    Raises DataFormatError for files that do not exist.
    """
    source = data.source
    identity: dict[str, Any] = {"source": source.model_dump(mode="json")}
    if isinstance(source, FileRows):
        # What is not there is left out; a pattern that names no training file is refused.
        paths = {split: list_files(getattr(source, split), split) for split in SPLITS}
        identity["files"] = {split: _identities(files) for split, files in paths.items() if files}
        held_out = not source.valid
    else:
        if Path(source.dataset).is_dir():
            identity["files"] = _identities(
                sorted(path for path in Path(source.dataset).rglob("*") if path.is_file())
            )
        held_out = source.valid is None
    if held_out:
        identity["held_out"] = {"share": data.valid_share, "seed": seed}
    return identity


def _identities(paths: list[Path]) -> list[list[Any]]:
    return [[file.path, file.size, file.mtime_ns] for file in map(SourceFile.of, paths)]


def list_files(patterns: tuple[str, ...], split: str) -> list[Path]:
    """The files that paths and globs name, those of a glob sorted.

    Raises DataFormatError when one names nothing.
    """
    found: list[Path] = []
    for pattern in patterns:
        matches = [
            Path(name)
            for name in sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))
        ]
        files = [path for path in matches if path.is_file()]
        if not files:
            what = "is a directory" if matches else "names no file"
            raise DataFormatError(
                f"data.source.{split} has {pattern}, which {what}: check the path or glob"
            )
        found += files
    return list(dict.fromkeys(found))


def collect_rows(
    data: FinetuneDataConfig, directory: Path, cache_directory: Path, *, seed: int
) -> dict[str, Any]:
    """Fill the empty `directory` with `train/`, `valid/` and, if there is one, `test/`.

    They are as `datasets` saves them.

    Every row is kept, in its order; where the source has no validation split, `data.valid_share` of
    the training rows, drawn with `seed`, becomes one. All files are downloaded into
    `cache_directory` before.

    Returns:
        Counts: rows of each split.

    Raises:
        DataFormatError: files, splits or columns that are missing, damaged or empty.
        DownloadError: a lost connection.
        WorkspaceError: the disk refuses.
    """
    splits = _read(data.source, cache_directory)
    for name, rows in splits.items():
        if not len(rows):
            raise DataFormatError(
                f"the {name} split of {_origin(data.source, name)} has no rows: check data.source"
            )
    if "valid" not in splits:
        splits = {
            **_hold_out(data, splits["train"], seed),
            **{k: v for k, v in splits.items() if k != "train"},
        }
    for name, rows in splits.items():
        save_split(rows, directory / name)
    return {name: len(rows) for name, rows in splits.items()}


def _read(source: FileRows | HubRows, cache_directory: Path) -> "dict[str, Dataset]":
    from megacore.finetune.pretrained import quiet

    with quiet():
        if isinstance(source, FileRows):
            wanted = {name: list_files(getattr(source, name), name) for name in SPLITS}
            return {
                name: read_files(files, name, cache_directory)
                for name, files in wanted.items()
                if files
            }

        return read_hub(source, cache_directory)


def _hold_out(data: FinetuneDataConfig, rows: "Dataset", seed: int) -> "dict[str, Dataset]":
    import numpy as np

    count = round(len(rows) * data.valid_share)
    if not 0 < count < len(rows):
        raise DataFormatError(
            f"the training split has {len(rows)} rows, of which data.valid_share "
            f"{data.valid_share:g} holds {count} out for validation: give a validation split, or a "
            "share that leaves rows on both sides"
        )
    held = np.sort(np.random.default_rng(seed).permutation(len(rows))[:count])
    kept = np.setdiff1d(np.arange(len(rows)), held)
    return {"train": rows.select(kept), "valid": rows.select(held)}


def save_split(rows: "Dataset", directory: Path) -> None:
    """Save rows so that the same rows give the same bytes, wherever they were read.

    Raises WorkspaceError.
    """
    from datasets import Dataset, DatasetInfo

    from megacore.finetune.pretrained import quiet

    # Its own description names files and caches of this machine.
    plain = Dataset(
        rows.data,
        info=DatasetInfo(features=rows.features),
        indices_table=rows._indices,
        fingerprint="rows",
    )
    with workspace_errors(directory), quiet():
        plain.save_to_disk(str(directory))


def open_split(directory: Path, name: str) -> "Dataset | None":
    """The rows of a split that `save_split` wrote; None where there is none.

    Raises DataFormatError.
    """
    import datasets

    path = directory / name
    if not path.is_dir():
        return None
    try:
        return datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataFormatError(
            f"{path} is damaged ({error}): delete {directory} to build it again"
        ) from error


def _origin(source: FileRows | HubRows, split: str) -> str:
    if isinstance(source, FileRows):
        return ", ".join(getattr(source, split))
    return f"{source.dataset} {getattr(source, split)}"


_READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"delimiter": "\t"}),
    ".parquet": ("parquet", {}),
    # Only running text is read from such files, in which a line break means something.
    ".txt": ("text", {"keep_linebreaks": True}),
}
"""By suffix, the reader of `datasets` and its options."""
_COMPRESSED = (".gz", ".zst")
_SHOWN = 80
_NO_ROWS = "corresponds to no data"
"""In what `datasets` says of files that hold none."""


def read_files(files: list[Path], split: str, cache_directory: Path) -> "Dataset":
    """The rows of all files, one after another.

    Raises DataFormatError for files of several forms, and for one that is empty, damaged or has
    other columns.
    """
    suffix = _common_suffix(files, split)
    for path in files:
        if not path.stat().st_size:
            raise DataFormatError(f"{path} is empty: remove it from data.source.{split}")
    try:
        return _load(files, suffix, cache_directory)
    except DataFormatError:
        for path in files:
            _load_alone(path, suffix, cache_directory)
        raise


def _common_suffix(files: list[Path], split: str) -> str:
    by_suffix: dict[str, Path] = {}
    for path in files:
        by_suffix.setdefault(suffix_of(path), path)
    if len(by_suffix) > 1:
        shown = " and ".join(
            f"{path.name} ({suffix or 'no suffix'})" for suffix, path in list(by_suffix.items())[:2]
        )
        raise DataFormatError(f"data.source.{split} mixes forms, {shown}: give files of one form")
    (suffix,) = by_suffix
    if suffix not in _READERS:
        raise DataFormatError(
            f"data.source.{split} has {by_suffix[suffix]}, which is none of {', '.join(_READERS)} "
            f"(or one of them with {' or '.join(_COMPRESSED)}): convert it"
        )
    return suffix


def suffix_of(path: Path) -> str:
    """The suffix that tells the form, whatever the file is compressed with."""
    return (path.with_suffix("") if path.suffix in _COMPRESSED else path).suffix.lower()


def _load(files: list[Path], suffix: str, cache_directory: Path) -> "Dataset":
    import datasets
    from datasets.exceptions import DatasetsError

    reader, options = _READERS[suffix]
    try:
        with disk_errors(cache_directory):
            return datasets.load_dataset(
                reader,
                data_files=[str(path.absolute()) for path in files],
                split="train",
                cache_dir=str(cache_directory / "datasets"),
                **options,
            )
    except (DatasetsError, OSError, ValueError, RuntimeError, EOFError) as error:
        named = ", ".join(map(str, files[:3])) + (", …" if len(files) > 3 else "")
        if _NO_ROWS in str(error):
            raise DataFormatError(f"{named} has no rows: check data.source") from error
        raise DataFormatError(
            f"{named} cannot be read as {suffix}: {_reason(error)}: repair it, or give files with "
            "the same columns"
        ) from error


def _load_alone(path: Path, suffix: str, cache_directory: Path) -> None:
    """Raise DataFormatError that names `path`, and the line if found, when it is unreadable."""
    file_format_of(path)
    if suffix in (".jsonl",):
        _check_lines(path)
    _load([path], suffix, cache_directory)


def _check_lines(path: Path) -> None:
    rest, number = b"", 0
    for piece in pieces(path, file_format_of(path)):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            number += 1
            _check_line(path, number, line)
    _check_line(path, number + 1, rest)


def _check_line(path: Path, number: int, line: bytes) -> None:
    if not line.strip():
        return
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataFormatError(
            f"{path}, line {number}: not JSON ({error}): "
            f"{line[:_SHOWN].decode('utf-8', 'replace')!r}"
        ) from error
    if not isinstance(row, dict):
        raise DataFormatError(
            f"{path}, line {number}: a {type(row).__name__} where an object belongs"
        )


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause.

    What `datasets` itself says is only that reading failed.
    """
    cause: BaseException = error
    while cause.__cause__ is not None or cause.__context__ is not None:
        cause = cause.__cause__ or cause.__context__ or cause
    lines = str(cause).strip().splitlines() or [type(cause).__name__]
    return lines[0].rstrip(". ")


_MATCHED = "validation_matched"
"""What MNLI of GLUE has in the place of one validation split: texts of the genres of the training
split."""


def read_hub(source: HubRows, cache_directory: Path) -> "dict[str, Dataset]":
    """The splits by our names: train, valid and test.

    Raises DataFormatError for a data set or split that does not exist, DownloadError for a lost
    connection.
    """
    import datasets

    parts = [source.dataset, source.config, source.revision]
    name = "the data set " + " ".join(part for part in parts if part)
    with loading(name, cache_directory):
        known = datasets.get_dataset_split_names(
            source.dataset,
            source.config,
            revision=source.revision,
            cache_dir=str(cache_directory / "datasets"),
        )
    valid = source.valid
    if valid == "validation" and valid not in known and _MATCHED in known:
        valid = _MATCHED
    wanted = {"train": source.train, "valid": valid, "test": source.test}
    splits = {}
    for ours, split in wanted.items():
        if split is None:
            continue
        if split not in known:
            others = "" if ours == "train" else " or null"
            raise DataFormatError(
                f"{name} has no split {split!r}, only {', '.join(known)}: set data.source.{ours} "
                f"to one of them{others}"
            )
        with loading(name, cache_directory):
            splits[ours] = datasets.load_dataset(
                source.dataset,
                source.config,
                split=split,
                revision=source.revision,
                cache_dir=str(cache_directory / "datasets"),
            )
    return splits
