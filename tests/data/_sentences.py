"""Token files of sentences, a vocabulary, and Megatron core's BERT and T5 samples in Python."""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from megacore.config.spec import SpecialTokens
from megacore.token_files.indexed_dataset import IndexedDataset
from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter
from megacore.tokenizer.vocabulary import Vocabulary

PAD, UNK, CLS, SEP, MASK = range(5)
FIRST_TEXT, FIRST_SENTINEL, VOCAB_SIZE = 5, 400, 500
SENTINELS = tuple(range(FIRST_SENTINEL, FIRST_SENTINEL + 60))


def vocabulary(seed: int = 0, **changes: Any) -> Vocabulary:
    """Return a vocabulary of five special tokens, text and sentinels.

    About a third of the text tokens continue a word.
    """
    continues = (np.random.default_rng(seed).random(VOCAB_SIZE) < 0.35).astype(np.uint8)
    continues[:FIRST_TEXT] = continues[FIRST_SENTINEL:] = 0
    defaults = {
        "eod": SEP,
        "pad": PAD,
        "cls": CLS,
        "sep": SEP,
        "mask": MASK,
        "unk": UNK,
        "sentinels": SENTINELS,
    }
    return Vocabulary(SpecialTokens(**defaults | changes), continues)


def write_lengths(prefix: Path, documents: Sequence[Sequence[int]]) -> IndexedDataset:
    """Write sentences of these lengths with random text tokens."""
    random = np.random.default_rng(len(documents))
    with IndexedDatasetWriter(prefix, "u2") as writer:
        for lengths in documents:
            ids = random.integers(FIRST_TEXT, FIRST_SENTINEL, sum(lengths))
            writer.add_batch(
                ids.astype("u2"), np.array(lengths, np.int64), np.array([len(lengths)])
            )
    return IndexedDataset(prefix)


def joined(lists: Sequence[list[int]]) -> list[int]:
    """Return the concatenation of the lists."""
    return list(chain.from_iterable(lists))


def draw_spans(
    tokens: list[int],
    target: int,
    random: np.random.RandomState,
    words: Vocabulary,
    *,
    share: float,
    whole_words: bool,
    draw_length: Callable[[], int],
    select: Callable[[int], None] = lambda place: None,
) -> list[list[int]]:
    """Return the positions of the tokens to predict, in the order of the draws.

    Source: masked_dataset.py of Megatron core.
    """
    candidates: list[list[int]] = []
    for place, token in enumerate(tokens):
        if token in (words.special.cls, words.special.sep):
            continue
        if whole_words and words.continues[token] and candidates:
            candidates[-1].append(place)
        else:
            candidates.append([place])
    limit = min(share * target, max(1, round(len(tokens) * share)))
    order = list(range(len(candidates)))
    random.shuffle(order)
    spans: list[list[int]] = []
    selected: set[int] = set()
    for first in order:
        if len(selected) >= limit:
            break
        length = draw_length()
        while length:
            places = joined(candidates[first : first + length])
            if len(selected) + len(places) <= limit:
                break
            length -= 1
        if not length or selected & set(places):
            continue
        for place in places:
            select(place)
        selected |= set(places)
        spans.append(places)
    return spans


def bert_row(
    sentences: list[list[int]],
    target: int,
    seed: int,
    seq_length: int,
    words: Vocabulary,
    *,
    share: float = 0.15,
    whole_words: bool = True,
    ngram: int = 3,
    geometric: bool = False,
    pairs: bool = True,
) -> list[int]:
    """Return a row of the BERT data set (bert_dataset.py of Megatron core)."""
    random = np.random.RandomState(seed % 2**32)
    pivot, swapped = len(sentences), False
    if pairs:
        pivot = random.randint(low=1, high=len(sentences)) if len(sentences) >= 3 else 1
        swapped = random.random() < 0.5
    a, b = joined(sentences[:pivot]), joined(sentences[pivot:])
    if swapped:
        a, b = b, a
    while len(a) + len(b) > target:
        longer = a if len(a) > len(b) else b
        del longer[0 if random.random() < 0.5 else -1]
    tokens = [CLS, *a, SEP]
    segments = [0] * len(tokens)
    if b:
        tokens += [*b, SEP]
        segments += [1] * (len(b) + 1)
    numbers = np.arange(ngram) + 1
    probability = (1.0 / numbers) / (1.0 / numbers).sum()
    labels = [-1] * len(tokens)
    read = list(tokens)

    def select(place: int) -> None:
        labels[place] = tokens[place]
        if random.random() < 0.8:
            read[place] = MASK
        elif random.random() >= 0.5:
            read[place] = random.randint(0, len(words.continues))

    def draw_length() -> int:
        if geometric:
            return min(random.geometric(0.2), ngram)
        return int(random.choice(numbers, p=probability / probability.sum()))

    draw_spans(
        tokens,
        target,
        random,
        words,
        share=share,
        whole_words=whole_words,
        draw_length=draw_length,
        select=select,
    )
    parts = [part + [-1] * (seq_length - len(part)) for part in (read, labels, segments)]
    return [*parts[0], *parts[1], *parts[2], int(swapped)]


def t5_row(
    sentences: list[list[int]],
    target: int,
    seed: int,
    seq_length: int,
    decoder_seq_length: int,
    words: Vocabulary,
    *,
    share: float = 0.15,
) -> list[int] | None:
    """Return a row of the T5 data set (t5_dataset.py of Megatron core).

    None if the spans do not fit into the decoder.
    """
    random = np.random.RandomState(seed % 2**32)
    tokens = joined(sentences)[:target]

    def draw_length() -> int:
        return min(random.geometric(0.2), 10)

    spans = draw_spans(
        tokens, target, random, words, share=share, whole_words=True, draw_length=draw_length
    )
    encoder: list[int] = []
    decoder: list[int] = []
    begin = 0
    for sentinel, places in zip(words.special.sentinels, sorted(spans), strict=False):
        encoder += [*tokens[begin : places[0]], sentinel]
        decoder += [sentinel, *(tokens[place] for place in places)]
        begin = places[-1] + 1
    encoder += tokens[begin:]
    decoder.append(SEP)
    if len(decoder) > decoder_seq_length:
        return None
    return [
        *encoder,
        *[-1] * (seq_length - len(encoder)),
        *decoder,
        *[-1] * (decoder_seq_length - len(decoder)),
    ]
