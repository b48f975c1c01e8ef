"""Reports of `megacore inspect` as JSON: on token files, on index maps, and on one sample.

Token ids are decoded with the tokenizer that produced them. The report on a sample of BERT or T5
includes the model's input, with words masked or spans replaced by sentinels.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megacore.artifact.files import read_json
from megacore.artifact.manifest import MANIFEST_NAME, Manifest
from megacore.artifact.workspace import FOLDERS
from megacore.config.data import MaskedLmConfig, SpanCorruptionConfig
from megacore.data.index_directory import IndexDescription, member_directory
from megacore.data.index_options import SPLIT_NAMES, IndexOptions
from megacore.data.sentence_dataset import MaskedLmDataset, T5Dataset
from megacore.data.sentence_maps import sentences_of
from megacore.errors import ArtifactError, DataFormatError
from megacore.inspect.index import Part, Sample, describe_index, find_sample
from megacore.inspect.provenance import Origins, find_origins, read_document
from megacore.inspect.tokens import Lengths, LengthSummary, bin_lengths, describe, document_tokens
from megacore.paths import exists, glob, is_dir, is_file
from megacore.token_files.indexed_dataset import IndexedDataset
from megacore.tokenizer.load import (
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    Tokenizer,
    load_tokenizer,
    read_backend,
)
from megacore.tokenizer.vocabulary import Vocabulary, continues_word, special_tokens

if TYPE_CHECKING:
    import tokenizers

Decode = Callable[[npt.NDArray[Any]], str]
"""Function from an array of ids to their text, including special tokens."""
_EDGE = "\N{REPLACEMENT CHARACTER}"
"""Decoded form of a character of which the first or last token contains only a part."""
_NAMED_DOCUMENTS = 6
"""Maximum number of documents that an error message names."""
JsonReport = dict[str, Any]


def report_tokens(
    prefix: str, documents: int, tokenizer: Path | None, limit: int | None = None
) -> JsonReport:
    """Return statistics of a pair of token files and its first documents, cut at `limit` tokens.

    Documents are decoded with `tokenizer` (see `open_decoder`), by default the one recorded for the
    files; without a tokenizer the report has their ids. Raises DataFormatError.
    """
    dataset = IndexedDataset(prefix)
    origins = find_origins(prefix, dataset.documents)
    tokenizer_path = tokenizer or find_tokenizer(prefix, origins)
    decode = open_decoder(tokenizer_path) if tokenizer_path is not None and documents else None
    facts = describe(dataset)
    return {
        **asdict(facts),
        "lengths": None if facts.lengths is None else _lengths(facts.lengths, dataset.lengths),
        "tokenizer": None if tokenizer_path is None else str(tokenizer_path),
        "first_documents": [
            _document(dataset, number, origins, decode, limit)
            for number in range(min(documents, dataset.documents))
        ],
    }


def report_index(directory: Path) -> JsonReport:
    """Return the contents of a directory's `index.json`. Raises DataFormatError."""
    index = describe_index(directory)
    return {
        "path": str(directory),
        "options": _options(index.options),
        "members": [
            {"prefix": member.prefix, "splits": _by_split(member.weights)}
            for member in index.members
        ],
        "samples": _by_split(index.samples),
        "padding": _by_split(index.padding),
    }


def describe_samples(directory: Path, samples: Sequence[int]) -> str:
    """Return in one clause the documents of training samples, and the command that shows them.

    A document has the file and line that it was read from, if `documents.json` names them. At most
    `_NAMED_DOCUMENTS` documents are named. Files that cannot be read raise nothing, because the
    clause is part of an error message.

    Args:
        directory: directory of the index maps.
        samples: numbers in the order of training, at least one.
    """
    command = f"`megacore inspect {shlex.quote(str(directory))} --sample {samples[0]}` shows "
    if len(samples) > 1:
        command += f"sample {samples[0]}, and so on to --sample {samples[-1]}"
    else:
        command += "it"
    try:
        names = list(islice(_document_names(directory, samples), _NAMED_DOCUMENTS + 1))
    except Exception as error:  # the bad loss is what ends the run
        return f"their documents are unknown ({error}); {command}"
    more = " and others" if len(names) > _NAMED_DOCUMENTS else ""
    return f"they are from {', '.join(names[:_NAMED_DOCUMENTS])}{more}; {command}"


def _document_names(directory: Path, samples: Sequence[int]) -> Iterator[str]:
    """Yield each document of the samples once, with its place. Raises DataFormatError."""
    named: set[tuple[str, int]] = set()
    origins: dict[str, Origins | None] = {}
    for number in samples:
        sample = find_sample(directory, SPLIT_NAMES[0], number)
        prefix = sample.prefix
        if prefix not in origins:
            origins[prefix] = find_origins(prefix, IndexedDataset(prefix).documents)
        for part in sample.parts:
            if (prefix, part.document) in named:
                continue
            named.add((prefix, part.document))
            origin = origins[prefix]
            place = None if origin is None else origin.place(part.document)
            yield f"document {part.document} " + (
                f"of {prefix}" if place is None else f"({place.path}:{place.line})"
            )


def report_sample(
    directory: Path, split: str, number: int, tokenizer: Path | None, sources: int | None = None
) -> JsonReport:
    """Return the documents and source lines of a sample.

    Source lines are read for its first `sources` parts, by default for all. A line that can no
    longer be read is reported as a problem of its part. Raises DataFormatError.
    """
    sample = find_sample(directory, split, number)
    dataset = IndexedDataset(sample.prefix)
    origins = find_origins(sample.prefix, dataset.documents)
    tokenizer_path = tokenizer or find_tokenizer(sample.prefix, origins)
    decode = None if tokenizer_path is None else open_decoder(tokenizer_path)
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
        "tokenizer": None if tokenizer_path is None else str(tokenizer_path),
        "documents_json": None if origins is None else str(origins.path),
        "parts": parts,
        "made": None
        if tokenizer_path is None
        else made_of(directory, index, sample, tokenizer_path),
    }


def _options(options: IndexOptions) -> JsonReport:
    """Return the options of the maps, with the sentence options on the same level."""
    values = asdict(options)
    return values | (values.pop("sentences") or {})


def _padding(options: IndexOptions, tokens: int) -> int:
    room = options.seq_length + options.extra
    if options.sentences is not None:
        room = options.seq_length - options.sentences.special_tokens
    return max(0, room - tokens)


def _by_split(values: Mapping[str, Any]) -> JsonReport:
    return {name: values[name] for name in SPLIT_NAMES if name in values}


def _lengths(summary: LengthSummary, lengths: Lengths) -> JsonReport:
    bins = bin_lengths(lengths)
    rows = zip(
        bins.edges[:-1].tolist(), bins.edges[1:].tolist(), bins.sequences.tolist(), strict=True
    )
    return {
        **asdict(summary),
        "mean": summary.mean,
        "bins": [{"from": low, "to": high - 1, "sequences": count} for low, high, count in rows],
    }


def _document(
    dataset: IndexedDataset,
    number: int,
    origins: Origins | None,
    decode: Decode | None,
    limit: int | None,
) -> JsonReport:
    ids = document_tokens(dataset, number)
    shown = ids[:limit]
    place = None if origins is None else origins.place(number)
    return {
        "document": number,
        "tokens": len(ids),
        "cut": len(shown) < len(ids),
        "source": None
        if place is None
        else {"path": place.path, "line": place.line, "key": place.key},
        **({"ids": shown.tolist()} if decode is None else {"text": decode(shown)}),
    }


def _part(
    dataset: IndexedDataset, part: Part, origins: Origins | None, decode: Decode | None
) -> JsonReport:
    ids = dataset.get(part.sequence, part.start, part.stop - part.start)
    report: JsonReport = {
        **asdict(part),
        "ids": ids.tolist(),
        "text": None if decode is None else decode(ids),
        "source": None,
    }
    place = None if origins is None else origins.place(part.document)
    if origins is None or place is None:
        return report
    source: JsonReport = {"path": place.path, "line": place.line, "key": place.key, "problem": None}
    try:
        document = read_document(place)
    except DataFormatError as error:
        return {**report, "source": {**source, "problem": str(error)}}
    span = None if decode is None else _span(dataset, part, origins, decode, document.text)
    return {
        **report,
        "source": {
            **source,
            "named_source": document.source,
            "text": document.text,
            "characters": span,
        },
    }


def _span(
    dataset: IndexedDataset, part: Part, origins: Origins, decode: Decode, source: str
) -> tuple[int, int] | None:
    """Return the character range of a part's tokens in the source text, or None."""
    ids = dataset.get(part.sequence, part.start, part.stop - part.start)
    if origins.append_eod and int(ids[-1]) == origins.tokenizer.get("eod_id"):
        ids = ids[:-1]  # the source has no end-of-document token
    first = int(dataset.document_indices[part.document])
    preceding = dataset.count_tokens(first, part.sequence) + part.start
    return find_text(
        decode(ids), source, decode(document_tokens(dataset, part.document, preceding))
    )


def open_decoder(path: Path) -> Decode:
    """Return the decoder of a tokenizer.

    `path` is a directory of the tokenizer stage, a tokenizer.json, the vocab.json of GPT-2, the
    vocab.txt of BERT, or a SentencePiece model. Raises DataFormatError; so does the decoder for ids
    outside the vocabulary.
    """
    decode, vocab_size = _open(path)

    def checked(ids: npt.NDArray[Any]) -> str:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise DataFormatError(
                f"the tokens hold the id {bad}, but {path} has {vocab_size} entries: give "
                "--tokenizer the one that they were made with"
            )
        return decode(ids)

    return checked


def _open(path: Path) -> tuple[Decode, int]:
    """Return the decoder of a tokenizer and the size of its vocabulary."""
    if is_file(path) and path.suffix not in (".json", ".txt"):
        from megacore.tokenizer.sentencepiece_model import SentencePieceModel

        model = SentencePieceModel.read(path)
        return model.decode, model.vocab_size
    if exists(path / TOKENIZER_CONFIG_NAME):
        tokenizer = load_tokenizer(path)
        return tokenizer.decode, tokenizer.vocab_size
    backend = _open_backend(path / TOKENIZER_NAME if is_dir(path) else path)
    vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    return lambda ids: str(backend.decode(ids.tolist(), skip_special_tokens=False)), vocab_size


def _open_backend(path: Path) -> "tokenizers.Tokenizer":
    import tokenizers

    from megacore.tokenizer.wordpiece import read_wordpiece

    if not is_file(path):
        raise DataFormatError(
            f"{path} does not exist: give a tokenizer's directory, tokenizer.json, vocab.json, "
            "vocab.txt or .model"
        )
    if path.suffix == ".txt":
        return read_wordpiece(path, lower_case=True)
    try:
        values = read_json(path)
    except ValueError as error:
        raise DataFormatError(
            f"{path} is neither a tokenizer.json nor a vocab.json: {error}"
        ) from error
    if not isinstance(values, dict) or not all(isinstance(token, int) for token in values.values()):
        return read_backend(path)
    # Decoding needs only GPT-2's vocabulary; merges are needed for encoding.
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(values, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def find_tokenizer(prefix: str, origins: Origins | None) -> Path | None:
    """Return the directory of the tokenizer that produced token files, or None if not found.

    `documents.json` records the directory. Without it, the directory is searched in the workspace,
    by the digest of the tokenizer's manifest in the manifest next to the files.
    """
    if origins is not None and origins.tokenizer_path is not None:
        return origins.tokenizer_path
    directory = Path(prefix).resolve().parent
    if not exists(directory / MANIFEST_NAME):
        return None
    try:
        digest = Manifest.read(directory).inputs.get("tokenizer")
        for candidate in sorted(
            glob(directory.parents[1] / FOLDERS["tokenizer"], f"*/{MANIFEST_NAME}")
        ):
            if Manifest.read(candidate.parent).digest == digest:
                return candidate.parent
    except ArtifactError:
        return None
    return None


def find_text(text: str, source: str, before: str = "") -> tuple[int, int] | None:
    """Return the range of the decoded text in its source (first character, one past the last).

    `before` is the decoded text of the document up to `text`; the search starts after it.
    Incomplete characters of the first and last token are ignored. Returns None if the text is not
    found, for example because the tokenizer lower-cases it.
    """
    stripped = text.strip(_EDGE)
    start = source.find(stripped, len(before.rstrip(_EDGE))) if stripped else -1
    return None if start < 0 else (start, start + len(stripped))


def made_of(
    directory: Path, index: IndexDescription, sample: Sample, tokenizer_directory: Path
) -> JsonReport | None:
    """Return the text of the row that training reads for a sample of sentences.

    The options of `data.masked_lm` and `data.span_corruption` come from the manifest next to the
    maps, or are the defaults. Returns None for samples of tokens, and if `tokenizer_directory` is
    not a tokenizer's directory. Raises DataFormatError.
    """
    sentences = index.options.sentences
    if sentences is None or not exists(tokenizer_directory / TOKENIZER_CONFIG_NAME):
        return None
    tokenizer = load_tokenizer(tokenizer_directory)
    vocabulary = Vocabulary(special_tokens(tokenizer), continues_word(tokenizer).astype(np.uint8))
    place = directory if index.single else member_directory(directory, sample.member)
    make = _bert if sentences.kind == "bert" else _t5
    return make(place, index, sample, vocabulary, tokenizer, _parameters(directory))


def _bert(
    place: Path,
    index: IndexDescription,
    sample: Sample,
    vocabulary: Vocabulary,
    tokenizer: Tokenizer,
    parameters: JsonReport,
) -> JsonReport | None:
    special, options = vocabulary.special, index.options
    if special.cls is None or special.sep is None or special.mask is None:
        return None
    values = dict(parameters.get("masked_lm", {}))
    values.pop("pairs", None)
    config = MaskedLmConfig.model_validate(values)
    dataset = MaskedLmDataset(
        sample.prefix,
        place,
        sample.split,
        seq_length=options.seq_length,
        vocabulary=vocabulary,
        config=config,
        seed=options.seed,
        binary_head=sentences_of(options).minimum_sentences > 1,
    )
    row = dataset[sample.member_sample]
    tokens, labels, _ = row[:-1].reshape(3, -1)
    places = np.flatnonzero(labels >= 0)
    names = tokenizer.tokens()
    return {
        "options": config.model_dump(mode="json"),
        "reads": spelled(tokens[tokens >= 0], tokenizer),
        "predicts": [
            {"place": int(at), "token": names[labels[at]], "read": names[tokens[at]]}
            for at in places.tolist()
        ],
        "sentence_label": int(row[-1]),
    }


def _t5(
    place: Path,
    index: IndexDescription,
    sample: Sample,
    vocabulary: Vocabulary,
    tokenizer: Tokenizer,
    parameters: JsonReport,
) -> JsonReport | None:
    options = index.options
    config = SpanCorruptionConfig.model_validate(parameters.get("span_corruption", {}))
    dataset = T5Dataset(
        sample.prefix,
        place,
        sample.split,
        seq_length=options.seq_length,
        vocabulary=vocabulary,
        config=config,
        seed=options.seed,
    )
    row = dataset[sample.member_sample]
    encoder, decoder = row[: options.seq_length], row[options.seq_length :]
    return {
        "options": config.model_dump(mode="json"),
        "reads": spelled(encoder[encoder >= 0], tokenizer),
        "writes": spelled(decoder[decoder >= 0], tokenizer),
    }


def spelled(ids: npt.NDArray[np.int64], tokenizer: Tokenizer) -> str:
    """Return the text of ids, with spaces around special tokens."""
    special, names = tokenizer.special_ids(), tokenizer.tokens()
    bounds = np.flatnonzero(np.isin(ids, list(special)))
    parts = []
    for part in np.split(ids, np.unique(np.concatenate([bounds, bounds + 1]))):
        if len(part):
            parts.append(
                names[part[0]] if int(part[0]) in special else tokenizer.decode(part).strip()
            )
    return " ".join(part for part in parts if part)


def _parameters(directory: Path) -> JsonReport:
    """Return the parameters of the maps from their manifest, or {} without a manifest."""
    if not exists(directory / MANIFEST_NAME):
        return {}
    return dict(Manifest.read(directory).parameters)
