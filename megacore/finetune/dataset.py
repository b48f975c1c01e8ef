"""Stage `dataset`: the unchanged rows of each split.

The source is local files or a data set of the Hugging Face hub.
"""

import csv
import json
import re
import sys
from collections.abc import Iterator, Set
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from megacore.artifact.files import parse_json, reason_of, workspace_errors
from megacore.config.finetune import FileRows, FinetuneDataConfig, HubRows
from megacore.corpus.documents import SourceFile
from megacore.corpus.formats import decompress, file_format_of, lines, unreadable
from megacore.corpus.hub import disk_errors, loading
from megacore.errors import DataFormatError
from megacore.finetune.pretrained import quiet
from megacore.foreign.files import shortened
from megacore.paths import is_dir, is_file, matches, rglob

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from datasets import Dataset, Features

DATASET_VERSION = 2
"""Version of the stage; raised when its output changes."""
SPLITS = ("train", "valid", "test")


def dataset_fingerprint(data: FinetuneDataConfig, seed: int) -> dict[str, Any]:
    """Return the values that determine the rows.

    These are the source, sizes and times of local files, and the share held out for validation.

    Raises DataFormatError for files that do not exist, or a directory that cannot be listed;
    FileAccessError.
    """
    source = data.source
    identity: dict[str, Any] = {"source": source.model_dump(mode="json")}
    if isinstance(source, FileRows):
        # Splits without files are left out; `list_files` refuses a pattern that matches nothing.
        paths = {split: list_files(getattr(source, split), split) for split in SPLITS}
        identity["files"] = {split: _identities(files) for split, files in paths.items() if files}
    elif is_dir(source.dataset):
        try:
            found = sorted(path for path in rglob(source.dataset, "*") if is_file(path))
        except OSError as error:
            raise unreadable(error.filename or source.dataset, error) from error
        identity["files"] = _identities(found)
    if not source.valid:
        identity["held_out"] = {"share": data.valid_share, "seed": seed}
    return identity


def _identities(paths: list[Path]) -> list[list[Any]]:
    return [[file.path, file.size, file.mtime_ns] for file in map(SourceFile.of, paths)]


def list_files(patterns: tuple[str, ...], split: str) -> list[Path]:
    """Return the files that match paths and globs, sorted within each glob, without duplicates.

    Raises DataFormatError when a pattern matches no file, or a folder cannot be listed;
    FileAccessError.
    """
    files: list[Path] = []
    for pattern in patterns:
        try:
            found = sorted(matches(str(Path(pattern).expanduser())), key=str)
        except OSError as error:
            raise unreadable(error.filename or pattern, error) from error
        matching_files = [path for path in found if is_file(path)]
        if not matching_files:
            there = "is a directory" if any(map(is_dir, found)) else "is not a file"
            problem = there if found else "names no file"
            raise DataFormatError(
                f"data.source.{split} has {pattern}, which {problem}: check the path or glob"
            )
        files += matching_files
    return list(dict.fromkeys(files))


def collect_rows(
    data: FinetuneDataConfig, directory: Path, cache_directory: Path, *, seed: int
) -> dict[str, Any]:
    """Fill the empty `directory` with `train/`, `valid/` and, if the source has one, `test/`.

    Each is in the format of `Dataset.save_to_disk`.

    All rows are kept, in their order. If the source has no validation split, `data.valid_share` of
    the training rows, drawn with `seed`, becomes one. Downloads are stored in `cache_directory`
    first.

    Returns:
        Counts: rows of each split.

    Raises:
        DataFormatError: files, splits or columns are missing, damaged or empty.
        DownloadError: the connection was lost.
        WorkspaceError: a file cannot be written.
    """
    splits = _read(data.source, cache_directory)
    for name, rows in splits.items():
        if not len(rows):
            raise DataFormatError(
                f"the {name} split of {_origin(data.source, name)} has no rows: check data.source"
            )
    if "valid" not in splits:
        splits = _hold_out(data, splits.pop("train"), seed) | splits
    for name, rows in splits.items():
        save_split(rows, directory / name)
    return {name: len(rows) for name, rows in splits.items()}


def _read(source: FileRows | HubRows, cache_directory: Path) -> "dict[str, Dataset]":
    with quiet():
        if isinstance(source, FileRows):
            files_by_split = {name: list_files(getattr(source, name), name) for name in SPLITS}
            return {
                name: read_files(files, name, cache_directory)
                for name, files in files_by_split.items()
                if files
            }
        return read_hub(source, cache_directory)


def _hold_out(data: FinetuneDataConfig, rows: "Dataset", seed: int) -> "dict[str, Dataset]":
    count = round(len(rows) * data.valid_share)
    if not 0 < count < len(rows):
        raise DataFormatError(
            f"the training split has {len(rows)} rows, of which data.valid_share "
            f"{data.valid_share:g} holds {count} out for validation: give a validation split, or a "
            "share that leaves rows on both sides"
        )
    return {
        name: rows.select(numbers) for name, numbers in split_rows(len(rows), count, seed).items()
    }


def split_rows(rows: int, count: int, seed: int) -> "dict[str, npt.NDArray[np.int64]]":
    """Return the numbers of the rows that stay for training and of `count` held out ones."""
    import numpy as np

    held_out = np.sort(np.random.default_rng(seed).permutation(rows)[:count])
    return {"train": np.setdiff1d(np.arange(rows), held_out), "valid": held_out}


def save_split(rows: "Dataset", directory: Path) -> None:
    """Save rows so that equal rows give equal bytes, regardless of where they were read.

    Raises WorkspaceError.
    """
    from datasets import Dataset, DatasetInfo

    # The original description names files and caches of this host.
    plain = Dataset(
        rows.data,
        info=DatasetInfo(features=rows.features),
        indices_table=rows._indices,
        fingerprint="rows",
    )
    with workspace_errors(directory), quiet():
        plain.save_to_disk(str(directory))


def open_split(directory: Path, name: str) -> "Dataset | None":
    """Return the rows of a split written by `save_split`, or None if the split does not exist.

    Raises DataFormatError.
    """
    import datasets

    path = directory / name
    if not is_dir(path):
        return None
    try:
        return datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataFormatError(
            f"{path} is damaged ({reason_of(error)}): delete {directory} to build it again"
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
    # Only running text is read from .txt files, and there line breaks are significant.
    ".txt": ("text", {"keep_linebreaks": True, "encoding": "utf-8-sig"}),
}
"""Reader of `datasets` and its options, by suffix."""
_COMPRESSED = (".gz", ".zst")
_ROW_BYTES = 10**9
"""Maximum size of a row of JSON Lines; `datasets` holds it in memory several times."""
_ADVICE = "shorten or split the row"
_ENDED = re.compile(r"[^\r]+\r?|\r")
"""Line of a .csv file, which may end with only a carriage return."""
_SHOWN = 80
_NO_ROWS = "corresponds to no data"
"""Part of the message that `datasets` raises for files without rows."""
_TIME = re.compile(rb'(?<!\\)"(?=\d{4}-\d\d-\d\d(?:[ T][\d:.,Z+-]*)?"(?!\s*:))')
"""Opening quote of a JSON text, not a key, that `datasets` reads as a date or a point in time."""
_MARKED = re.compile(r"\0(?=\d{4}-\d\d-\d\d)")
"""Beginning of such a text while `datasets` reads it, so that it stays a text: with a NUL before
it."""


def read_files(files: list[Path], split: str, cache_directory: Path) -> "Dataset":
    """Return the rows of all files, concatenated in order.

    Raises DataFormatError for files of different formats, and for a file that is empty, damaged or
    has other columns.
    """
    suffix = _common_suffix(files, split)
    times = False
    kinds: _Kinds = {}

    def checked(path: Path) -> Iterator[bytes]:
        nonlocal times
        for number, part in enumerate(_content(path, suffix), 1):
            if _is_unsafe(part, number, suffix):
                _check_line(path, number, part)
            times = times or _TIME.search(part) is not None
            yield part

    for path in files:
        if not path.stat().st_size:
            raise DataFormatError(f"{path} is empty: remove it from data.source.{split}")
        if _READERS[suffix][0] == "csv":
            _check_csv(path, _READERS[suffix][1].get("delimiter", ","))
        elif _is_json(suffix):
            for row in _json_rows(checked(path), suffix):
                _note_kinds(row, (), kinds)
        else:
            for _ in _content(path, suffix):  # a damaged one is refused
                pass
    load = _load_times_as_text if times else _load
    try:
        mixed = {path for path, of_texts in kinds.items() if len(of_texts) == 2}
        if not mixed:
            return load(files, suffix, cache_directory)
        features = load(files[:1], suffix, cache_directory).features
        return load(files, suffix, cache_directory, _with_mixed(features, mixed))
    except DataFormatError:
        for path in files:
            _refuse_unreadable(path, suffix, cache_directory)
        raise


def _content(path: Path, suffix: str) -> Iterator[bytes]:
    """Yield the lines of JSON, and what other compressed files unpack to.

    `datasets` bounds neither.
    """
    if _is_json(suffix):
        return lines(path, _ROW_BYTES if suffix == ".jsonl" else sys.maxsize, _ADVICE)
    return decompress(path, file_format_of(path)) if path.suffix in _COMPRESSED else iter(())


def _is_unsafe(line: bytes, number: int, suffix: str) -> bool:
    """Return True for a line of JSON that `datasets` does not refuse but cannot handle.

    It takes texts that are not UTF-8, which fail when they are used, and crashes if a file begins
    with the row `null`.
    """
    if (suffix == ".jsonl" or number == 1) and line.strip() == b"null":
        return True
    try:
        line.decode()
    except UnicodeDecodeError:
        return True
    return False


def _is_json(suffix: str) -> bool:
    return _READERS[suffix][0] == "json"


def _check_csv(path: Path, delimiter: str) -> None:
    """Raise DataFormatError, with the line, for a file that `datasets` would read otherwise.

    It takes the first fields of rows with more fields than the header as names of the rows, ends
    a quoted field at any later quote, and renames the second of two columns of one name.
    """
    limit = csv.field_size_limit(_ROW_BYTES)
    rows = csv.reader(_csv_lines(path), delimiter=delimiter, strict=True)
    columns: list[str] | None = None
    start = 1
    try:
        for row in rows:
            if columns is None and row:
                columns = row
                _check_header(path, start, columns)
            if columns is not None and len(row) > len(columns):
                raise DataFormatError(
                    f"{path}, line {start}: {len(row)} fields, but the header has {len(columns)} "
                    f"({shortened(delimiter.join(columns))}): put a field with {delimiter!r} in "
                    "double quotes, or name each column"
                )
            start = rows.line_num + 1
    except csv.Error as error:
        raise DataFormatError(
            f"{path}, line {start}: {str(error).expandtabs(1)}: a field that begins with a double "
            "quote ends with the next single one, so write it in double quotes as a whole, and its "
            "own quotes twice"
        ) from error
    finally:
        csv.field_size_limit(limit)


def _check_header(path: Path, line: int, columns: list[str]) -> None:
    twice = next((name for name in columns if name and columns.count(name) > 1), None)
    if twice is not None:
        raise DataFormatError(
            f"{path}, line {line}: two columns have the name {twice!r}: rename or remove one"
        )


def _csv_lines(path: Path) -> Iterator[str]:
    for number, line in enumerate(lines(path, _ROW_BYTES, _ADVICE), 1):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise DataFormatError(
                f"{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start}): convert "
                "the file to UTF-8"
            ) from error
        if number == 1 and "\0" in text:
            raise DataFormatError(
                f"{path}, line 1: it has zero bytes, as UTF-16 does: convert the file to UTF-8"
            )
        yield from _ENDED.findall(text) or ("",)


_Path = tuple[str | int, ...]
"""Keys that lead to a value of a row, with 0 for the elements of a list."""
_Kinds = dict[_Path, set[bool]]
"""Kinds of the values at each path, True for texts: {True}, {False}, or both."""


def _json_rows(parts: Iterator[bytes], suffix: str) -> Iterator[Any]:
    """Yield the rows in all parts of a JSON file, and None for a line that is no JSON."""
    first = next((part for part in parts if part.strip()), b"")
    row = _parsed(first)
    if suffix == ".json" and not isinstance(row, dict):
        document = _parsed(b"\n".join((first, *parts)))
        yield from document if isinstance(document, list) else [document]
        return
    yield row
    yield from map(_parsed, parts)


def _parsed(part: bytes) -> Any:
    try:
        return json.loads(part)
    except (ValueError, RecursionError):
        return None


def _note_kinds(value: Any, path: _Path, kinds: _Kinds) -> None:
    if value is None:
        return
    kinds.setdefault(path, set()).add(isinstance(value, str))
    if isinstance(value, dict):
        for name, each in value.items():
            _note_kinds(each, (*path, name), kinds)
    elif isinstance(value, list):
        for each in value:
            _note_kinds(each, (*path, 0), kinds)


def _with_mixed(features: "Features", mixed: Set[_Path]) -> "Features":
    """Return features that keep texts and other values of one column apart, as JSON.

    `datasets` chooses them by the beginning of the first file. Where text is followed by another
    value later, it would write all texts from there on with quotes.
    """
    from datasets import Features, Json, List

    def changed(feature: Any, path: _Path) -> Any:
        if path in mixed:
            return Json()
        if isinstance(feature, dict):
            return {name: changed(each, (*path, name)) for name, each in feature.items()}
        if isinstance(feature, List):
            return List(changed(feature.feature, (*path, 0)), length=feature.length)
        return feature

    return Features({name: changed(feature, (name,)) for name, feature in features.items()})


def _load_times_as_text(
    files: list[Path], suffix: str, cache_directory: Path, features: "Features | None" = None
) -> "Dataset":
    """Return the rows of JSON files in which texts are dates or points in time, as written.

    `datasets` would convert the column of a file, or of a part of it, that has only such texts.
    """
    with workspace_errors(cache_directory):
        cache_directory.mkdir(parents=True, exist_ok=True)
        temporary = TemporaryDirectory(prefix="marked-", dir=cache_directory)
    with temporary as folder:
        copies = [Path(folder, f"{number}{suffix}") for number in range(len(files))]
        for path, copy in zip(files, copies, strict=True):
            with workspace_errors(copy), open(copy, "wb") as file:
                for number, line in enumerate(_content(path, suffix)):
                    file.write(b"\n" * bool(number) + _TIME.sub(rb'"\\u0000', line))
        rows = _load(copies, suffix, cache_directory, features, files)
    with disk_errors(cache_directory):
        return rows.map(
            lambda batch: {name: _unmarked(batch[name]) for name in batch},
            batched=True,
            features=rows.features,
        )


def _unmarked(value: Any) -> Any:
    if isinstance(value, str):
        return value[1:] if _MARKED.match(value) else value
    if isinstance(value, list):
        return [_unmarked(each) for each in value]
    if isinstance(value, dict):
        return {name: _unmarked(each) for name, each in value.items()}
    return value


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
    """Return the suffix that determines the format, without the suffix of the compression."""
    return (path.with_suffix("") if path.suffix in _COMPRESSED else path).suffix.lower()


def _load(
    files: list[Path],
    suffix: str,
    cache_directory: Path,
    features: "Features | None" = None,
    originals: list[Path] | None = None,
) -> "Dataset":
    """Return the rows of files, with `features` or those of the first file.

    Errors name `originals`, if `files` are copies of them.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    reader, options = _READERS[suffix]
    if features is not None:
        options = {**options, "features": features}
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
        named = ", ".join(map(str, (originals or files)[:3])) + (", …" if len(files) > 3 else "")
        if _NO_ROWS in str(error):
            raise DataFormatError(f"{named} has no rows: check data.source") from error
        raise DataFormatError(
            f"{named} cannot be read as {suffix}: {_reason(error)}: repair it, or give files with "
            "the same columns"
        ) from error


def _refuse_unreadable(path: Path, suffix: str, cache_directory: Path) -> None:
    """Raise DataFormatError with `path`, and the line if known, if the file is unreadable."""
    file_format_of(path)
    if suffix == ".jsonl":
        for number, line in enumerate(lines(path, _ROW_BYTES, _ADVICE), 1):
            _check_line(path, number, line)
    _load([path], suffix, cache_directory)


def _check_line(path: Path, number: int, line: bytes) -> None:
    if not line.strip():
        return
    try:
        row = parse_json(line)
        json.dumps(row, ensure_ascii=False).encode()  # refuses half of a surrogate pair
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
    """Return the first line of the innermost cause.

    The outer error of `datasets` only reports that reading failed.
    """
    cause: BaseException = error
    while cause.__cause__ is not None or cause.__context__ is not None:
        cause = cause.__cause__ or cause.__context__ or cause
    lines = str(cause).strip().splitlines() or [type(cause).__name__]
    return lines[0].rstrip(". ")


_MATCHED = "validation_matched"
"""Name of MNLI's validation split in GLUE with texts of the genres of the training split."""


def read_hub(source: HubRows, cache_directory: Path) -> "dict[str, Dataset]":
    """Read the splits of a data set of the hub, under the names train, valid and test.

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
    requested = {"train": source.train, "valid": valid, "test": source.test}
    splits = {}
    for split, hub_split in requested.items():
        if hub_split is None:
            continue
        if hub_split not in known:
            others = "" if split == "train" else " or null"
            raise DataFormatError(
                f"{name} has no split {hub_split!r}, only {', '.join(known)}: set "
                f"data.source.{split} to one of them{others}"
            )
        with loading(name, cache_directory):
            splits[split] = datasets.load_dataset(
                source.dataset,
                source.config,
                split=hub_split,
                revision=source.revision,
                cache_dir=str(cache_directory / "datasets"),
            )
    return splits
