"""What BERT and T5 read of a sample: its words masked, or its spans replaced by sentinels."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.artifact.manifest import MANIFEST_NAME, Manifest
from megacore.config.data import MaskedLmConfig, SpanCorruptionConfig
from megacore.data.index_directory import IndexDescription, member_directory
from megacore.data.masked_lm_dataset import MaskedLmDataset
from megacore.data.sentence_maps import sentences_of
from megacore.data.t5_dataset import T5Dataset
from megacore.data.vocabulary import Vocabulary
from megacore.inspect.index import Sample
from megacore.tokenizer.load import TOKENIZER_CONFIG_NAME, Tokenizer, load_tokenizer
from megacore.tokenizer.roles import special_tokens
from megacore.tokenizer.words import continues_word

Made = dict[str, Any]


def made_of(directory: Path, index: IndexDescription, sample: Sample, tokenizer_directory: Path) -> Made | None:
    """The row that training reads, as text; None for samples of tokens, and without a directory of a tokenizer.

    The options of `data.masked_lm` and `data.span_corruption` are those of the manifest beside the maps, else the
    defaults. Raises DataFormatError.
    """
    sentences = index.options.sentences
    if sentences is None or not (tokenizer_directory / TOKENIZER_CONFIG_NAME).exists():
        return None
    tokenizer = load_tokenizer(tokenizer_directory)
    vocabulary = Vocabulary(special_tokens(tokenizer), continues_word(tokenizer).astype(np.uint8))
    place = directory if index.single else member_directory(directory, sample.member)
    make = _bert if sentences.kind == "bert" else _t5
    return make(place, index, sample, vocabulary, tokenizer, _parameters(directory))


def _bert(
    place: Path, index: IndexDescription, sample: Sample, vocabulary: Vocabulary, tokenizer: Tokenizer, given: Made
) -> Made | None:
    special, options = vocabulary.special, index.options
    if special.cls is None or special.sep is None or special.mask is None:
        return None
    values = dict(given.get("masked_lm", {}))
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
            {"place": int(at), "token": names[labels[at]], "read": names[tokens[at]]} for at in places.tolist()
        ],
        "sentence_label": int(row[-1]),
    }


def _t5(
    place: Path, index: IndexDescription, sample: Sample, vocabulary: Vocabulary, tokenizer: Tokenizer, given: Made
) -> Made | None:
    options = index.options
    config = SpanCorruptionConfig.model_validate(given.get("span_corruption", {}))
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
    """Ids as text, special tokens between spaces."""
    special, names = tokenizer.special_ids(), tokenizer.tokens()
    bounds = np.flatnonzero(np.isin(ids, list(special)))
    parts = []
    for part in np.split(ids, np.unique(np.concatenate([bounds, bounds + 1]))):
        if len(part):
            parts.append(names[part[0]] if int(part[0]) in special else tokenizer.decode(part).strip())
    return " ".join(part for part in parts if part)


def _parameters(directory: Path) -> Made:
    """What decided the maps, if a manifest says it."""
    if not (directory / MANIFEST_NAME).exists():
        return {}
    return dict(Manifest.read(directory).parameters)
