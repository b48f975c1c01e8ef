"""Writers of document files in every supported format."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard


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
