"""What `megacore inspect` tells, as JSON: of token files, of index maps, and of one sample."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megacore.data.index_options import IndexOptions
from megacore.data.indexed_dataset import IndexedDataset
from megacore.data.splits import SPLIT_NAMES
from megacore.errors import DataFormatError
from megacore.inspect.index import Part, describe_index, find_sample
from megacore.inspect.lengths import Lengths, LengthSummary, bin_lengths
from megacore.inspect.made import made_of
from megacore.inspect.provenance import Origins, find_origins
from megacore.inspect.source import read_document
from megacore.inspect.text import Decode, find_text, find_tokenizer, open_decoder
from megacore.inspect.tokens import describe, document_tokens

Report = dict[str, Any]


def report_tokens(prefix: str, documents: int, tokenizer: Path | None, limit: int | None = None) -> Report:
    """A pair of token files in numbers, and its first documents, each cut at `limit` tokens.

    They are decoded by `tokenizer` (see `open_decoder`), by default the one that the files name; without any their
    ids are given. Raises DataFormatError.
    """
    dataset = IndexedDataset(prefix)
    origins = find_origins(prefix, dataset.documents)
    found = tokenizer or find_tokenizer(prefix, origins)
    decode = open_decoder(found) if found is not None and documents else None
    facts = describe(dataset)
    return {
        **asdict(facts),
        "lengths": None if facts.lengths is None else _lengths(facts.lengths, dataset.lengths),
        "tokenizer": None if found is None else str(found),
        "first_documents": [
            _document(dataset, number, origins, decode, limit) for number in range(min(documents, dataset.documents))
        ],
    }


def report_index(directory: Path) -> Report:
    """What `index.json` says. Raises DataFormatError."""
    index = describe_index(directory)
    return {
        "path": str(directory),
        "options": _options(index.options),
        "members": [{"prefix": member.prefix, "splits": _by_split(member.weights)} for member in index.members],
        "samples": _by_split(index.samples),
    }


def report_sample(
    directory: Path, split: str, number: int, tokenizer: Path | None, sources: int | None = None
) -> Report:
    """The documents and source lines of a sample; of its first `sources` parts (default: all) the lines are read.

    Raises DataFormatError; a line that cannot be read any more is told as a problem of its part.
    """
    sample = find_sample(directory, split, number)
    dataset = IndexedDataset(sample.prefix)
    origins = find_origins(sample.prefix, dataset.documents)
    found = tokenizer or find_tokenizer(sample.prefix, origins)
    decode = None if found is None else open_decoder(found)
    index = describe_index(directory)
    parts = []
    for place, part in enumerate(sample.parts):
        read = origins if sources is None or place < sources else None
        parts.append(_part(dataset, part, read, decode))
    return {
        "path": str(directory),
        "split": split,
        "sample": number,
        "member": sample.member,
        "prefix": sample.prefix,
        "member_sample": sample.member_sample,
        "row": sample.row,
        "map": "sample index" if index.options.sentences is None else "sentence map",
        "tokens": sample.tokens,
        "padding": _padding(index.options, sample.tokens),
        "tokenizer": None if found is None else str(found),
        "documents_json": None if origins is None else str(origins.path),
        "parts": parts,
        "made": None if found is None else made_of(directory, index, sample, found),
    }


def _options(options: IndexOptions) -> Report:
    """The options that the maps have: those of sentences stand beside the others."""
    values = asdict(options)
    return values | (values.pop("sentences") or {})


def _padding(options: IndexOptions, tokens: int) -> int:
    room = options.seq_length + options.extra
    if options.sentences is not None:
        room = options.seq_length - options.sentences.special_tokens
    return max(0, room - tokens)


def _by_split(values: Mapping[str, Any]) -> Report:
    return {name: values[name] for name in SPLIT_NAMES if name in values}


def _lengths(summary: LengthSummary, lengths: Lengths) -> Report:
    bins = bin_lengths(lengths)
    rows = zip(bins.edges[:-1].tolist(), bins.edges[1:].tolist(), bins.sequences.tolist(), strict=True)
    return {
        **asdict(summary),
        "mean": summary.mean,
        "bins": [{"from": low, "to": high - 1, "sequences": count} for low, high, count in rows],
    }


def _document(
    dataset: IndexedDataset, number: int, origins: Origins | None, decode: Decode | None, limit: int | None
) -> Report:
    ids = document_tokens(dataset, number)
    shown = ids[:limit]
    place = None if origins is None else origins.place(number)
    return {
        "document": number,
        "tokens": len(ids),
        "cut": len(shown) < len(ids),
        "source": None if place is None else {"path": place.path, "line": place.line, "key": place.key},
        **({"ids": shown.tolist()} if decode is None else {"text": decode(shown)}),
    }


def _part(dataset: IndexedDataset, part: Part, origins: Origins | None, decode: Decode | None) -> Report:
    ids = dataset.get(part.sequence, part.start, part.stop - part.start)
    report: Report = {
        **asdict(part),
        "ids": ids.tolist(),
        "text": None if decode is None else decode(ids),
        "source": None,
    }
    place = None if origins is None else origins.place(part.document)
    if origins is None or place is None:
        return report
    source: Report = {"path": place.path, "line": place.line, "key": place.key, "problem": None}
    try:
        found = read_document(place)
    except DataFormatError as error:
        return {**report, "source": {**source, "problem": str(error)}}
    span = None if decode is None else _span(dataset, part, origins, decode, found.text)
    return {
        **report,
        "source": {**source, "named_source": found.source, "text": found.text, "characters": span},
    }


def _span(dataset: IndexedDataset, part: Part, origins: Origins, decode: Decode, source: str) -> tuple[int, int] | None:
    """The characters of the source text that a part's tokens stand for, if they are found there."""
    ids = dataset.get(part.sequence, part.start, part.stop - part.start)
    if origins.append_eod and int(ids[-1]) == origins.tokenizer.get("eod_id"):
        ids = ids[:-1]  # the source has no end-of-document token
    first = int(dataset.document_indices[part.document])
    passed = dataset.count_tokens(first, part.sequence) + part.start
    return find_text(decode(ids), source, decode(document_tokens(dataset, part.document, passed)))
