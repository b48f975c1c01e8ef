"""The stage `dataset`: the rows of each split as they come, from local files or a data set of the hub."""

import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.artifact.files import workspace_errors
from megacore.config.finetune import FileRows, FinetuneDataConfig, HubRows
from megacore.corpus.documents import SourceFile
from megacore.errors import DataFormatError

if TYPE_CHECKING:
    from datasets import Dataset

DATASET_VERSION = 1
"""Of the stage; raised when it produces something else."""
SPLITS = ("train", "valid", "test")


def dataset_fingerprint(data: FinetuneDataConfig, seed: int) -> dict[str, Any]:
    """What decides the rows: the source, sizes and times of local files, and the share that is held out.

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
            identity["files"] = _identities(sorted(path for path in Path(source.dataset).rglob("*") if path.is_file()))
        held_out = source.valid is None
    if held_out:
        identity["held_out"] = {"share": data.valid_share, "seed": seed}
    return identity


def _identities(paths: list[Path]) -> list[list[Any]]:
    return [[file.path, file.size, file.mtime_ns] for file in map(SourceFile.of, paths)]


def list_files(patterns: tuple[str, ...], split: str) -> list[Path]:
    """The files that paths and globs name, those of a glob sorted. Raises DataFormatError when one names nothing."""
    found: list[Path] = []
    for pattern in patterns:
        matches = [Path(name) for name in sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))]
        files = [path for path in matches if path.is_file()]
        if not files:
            what = "is a directory" if matches else "names no file"
            raise DataFormatError(f"data.source.{split} has {pattern}, which {what}: check the path or glob")
        found += files
    return list(dict.fromkeys(found))


def collect_rows(data: FinetuneDataConfig, directory: Path, cache_directory: Path, *, seed: int) -> dict[str, Any]:
    """Fill the empty `directory` with `train/`, `valid/` and, if there is one, `test/`, as `datasets` saves them.

    Every row is kept, in its order; where the source has no validation split, `data.valid_share` of the training
    rows, drawn with `seed`, becomes one. All files are downloaded into `cache_directory` before.

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
            raise DataFormatError(f"the {name} split of {_origin(data.source, name)} has no rows: check data.source")
    if "valid" not in splits:
        splits = {**_hold_out(data, splits["train"], seed), **{k: v for k, v in splits.items() if k != "train"}}
    for name, rows in splits.items():
        save_split(rows, directory / name)
    return {name: len(rows) for name, rows in splits.items()}


def _read(source: FileRows | HubRows, cache_directory: Path) -> "dict[str, Dataset]":
    from megacore.finetune.models import quiet

    with quiet():
        if isinstance(source, FileRows):
            from megacore.finetune.row_files import read_files

            wanted = {name: list_files(getattr(source, name), name) for name in SPLITS}
            return {name: read_files(files, name, cache_directory) for name, files in wanted.items() if files}
        from megacore.finetune.hub_rows import read_hub

        return read_hub(source, cache_directory)


def _hold_out(data: FinetuneDataConfig, rows: "Dataset", seed: int) -> "dict[str, Dataset]":
    import numpy as np

    count = round(len(rows) * data.valid_share)
    if not 0 < count < len(rows):
        raise DataFormatError(
            f"the training split has {len(rows)} rows, of which data.valid_share {data.valid_share:g} holds {count} "
            "out for validation: give a validation split, or a share that leaves rows on both sides"
        )
    held = np.sort(np.random.default_rng(seed).permutation(len(rows))[:count])
    kept = np.setdiff1d(np.arange(len(rows)), held)
    return {"train": rows.select(kept), "valid": rows.select(held)}


def save_split(rows: "Dataset", directory: Path) -> None:
    """Save rows so that the same rows give the same bytes, wherever they were read. Raises WorkspaceError."""
    from datasets import Dataset, DatasetInfo

    from megacore.finetune.models import quiet

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
    """The rows of a split that `save_split` wrote; None where there is none. Raises DataFormatError."""
    import datasets

    path = directory / name
    if not path.is_dir():
        return None
    try:
        return datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataFormatError(f"{path} is damaged ({error}): delete {directory} to build it again") from error


def _origin(source: FileRows | HubRows, split: str) -> str:
    if isinstance(source, FileRows):
        return ", ".join(getattr(source, split))
    return f"{source.dataset} {getattr(source, split)}"
