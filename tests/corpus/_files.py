"""Writers of document files in every supported format, and of one that changes."""

import gzip
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from megacore.config.data import JsonlSource
from megacore.corpus.collect import collect


def lines(texts: Sequence[str], key: str = "text") -> bytes:
    return b"".join(json.dumps({key: text}).encode() + b"\n" for text in texts)


def write_form(path: Path, texts: Sequence[str], key: str = "text") -> Path:
    """Write `texts` in the format of the path's suffix; parquet gets two rows per row group."""
    match path.suffix:
        case ".gz":
            path.write_bytes(gzip.compress(lines(texts, key)))
        case ".zst":
            path.write_bytes(zstandard.compress(lines(texts, key)))
        case ".parquet":
            table = pa.table({"id": list(range(len(texts))), key: pa.array(texts, pa.string())})
            pq.write_table(table, path, row_group_size=2)
        case _:
            path.write_bytes(lines(texts, key))
    return path


def collect_changing_file(folder: Path) -> Callable[..., dict[str, int]]:
    """Collect `a.jsonl` into `folder/corpus`; return a function that overwrites it at its size.

    The function takes any arguments and returns no counts, so that it can stand for a stage.
    """
    file = folder / "a.jsonl"
    file.write_text('{"text": "one"}\n')
    (folder / "corpus").mkdir()
    collect(JsonlSource(kind="jsonl", files=(str(file),)), folder / "corpus")

    def overwrite(*arguments: Any, **options: Any) -> dict[str, int]:
        file.write_text('{"text": "two"}\n')
        os.utime(file, (1, 1))
        return {}

    return overwrite
