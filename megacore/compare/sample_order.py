"""The first consumed sample in which two runs read other tokens."""

import time
from pathlib import Path

import numpy as np

from megacore.compare.run_record import RunRecord
from megacore.data.build import open_split
from megacore.data.samples import Dataset
from megacore.errors import MegacoreError

_AT_ONCE = 64
"""Samples that are read together."""
_SECONDS = 30.0
"""Time after which the comparison stops."""


def first_other_sample(a: RunRecord, b: RunRecord) -> tuple[int | None, str | None]:
    """Return the first consumed sample with other tokens, and a note if it was not compared.

    Runs that read the same files in the same order are not read.
    """
    if _same_files(a, b):
        return None, None
    consumed = min(_consumed(a), _consumed(b))
    try:
        ours, theirs = _open(a), _open(b)
    except (MegacoreError, OSError, ValueError) as error:
        return None, f"the order of the samples was not compared: {error}"
    if ours.width != theirs.width:
        return 0, None
    count = min(len(ours), len(theirs), consumed or len(ours))
    started = time.monotonic()
    for start in range(0, count, _AT_ONCE):
        rows = range(start, min(start + _AT_ONCE, count))
        different = np.any(ours.gather(rows) != theirs.gather(rows), axis=1)
        if different.any():
            return start + int(different.argmax()), None
        if time.monotonic() - started > _SECONDS:
            return None, f"the first {rows.stop:,} of {count:,} consumed samples are equal"
    return None, None


def _same_files(a: RunRecord, b: RunRecord) -> bool:
    """Return True if index maps, tokens and seed are the same."""
    if a.values.get("seed") != b.values.get("seed") or a.values.get("data") != b.values.get("data"):
        return False
    digests = [(record.inputs.get("index"), record.inputs.get("tokens")) for record in (a, b)]
    if None not in digests[0] and digests[0] == digests[1]:
        return True
    places = [
        (
            str(Path(str(record.job.get("index_directory"))).resolve()),
            [str(Path(each).resolve()) for each in record.job.get("token_prefixes") or ()],
        )
        for record in (a, b)
    ]
    return places[0] == places[1]


def _consumed(record: RunRecord) -> int:
    last = record.steps.get(record.last_iteration)
    return 0 if last is None else int(last.get("consumed_samples") or 0)


def _open(record: RunRecord) -> Dataset:
    assert record.config is not None
    return open_split(
        record.job["token_prefixes"],
        record.job["index_directory"],
        "train",
        record.config,
        tokenizer_directory=record.job["tokenizer_directory"],
    )
