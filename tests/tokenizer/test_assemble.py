"""Tests of assembling encoded texts to batches of token files."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.errors import DataFormatError
from megacore.tokenizer.encode import assemble
from megacore.tokenizer.load import Encoded

Document = list[list[int]]


def encoded(documents: list[Document]) -> tuple[Encoded, np.ndarray]:
    pieces = [ids for document in documents for ids in document]
    flat = np.array([i for ids in pieces for i in ids], np.uint32)
    lengths = np.array([len(ids) for ids in pieces], np.int64)
    return Encoded(flat, lengths), np.array([len(document) for document in documents], np.int64)


@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=4), max_size=8),
    eod_id=st.none() | st.integers(0, 99),
)
def test_empty_sentences_are_dropped_and_documents_end_with_eod(
    documents: list[Document], eod_id: int | None
) -> None:
    expected: list[Document] = []
    for document in documents:
        sentences = [list(ids) for ids in document if ids]
        if sentences and eod_id is not None:
            sentences[-1].append(eod_id)
        expected.append(sentences)
    batch = assemble(*encoded(documents), eod_id=eod_id, vocab_size=100, dtype=np.dtype("<u2"))
    expected_batch, counts = encoded(expected)
    assert batch.ids.dtype == np.dtype("<u2")
    assert batch.ids.tolist() == expected_batch.ids.tolist()
    assert batch.lengths.tolist() == expected_batch.lengths.tolist()
    assert batch.sequences.tolist() == counts.tolist()


@given(
    documents=st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=8),
    eod_id=st.none() | st.integers(0, 99),
)
def test_unsplit_documents_equal_documents_of_one_sentence(
    documents: list[list[int]], eod_id: int | None
) -> None:
    values, ones = encoded([[ids] for ids in documents])
    unsplit = assemble(values, None, eod_id=eod_id, vocab_size=100, dtype=np.dtype("<i4"))
    split = assemble(values, ones, eod_id=eod_id, vocab_size=100, dtype=np.dtype("<i4"))
    assert [part.tolist() for part in (unsplit.ids, unsplit.lengths, unsplit.sequences)] == [
        part.tolist() for part in (split.ids, split.lengths, split.sequences)
    ]


@pytest.mark.parametrize("bad", [100, -1])
def test_an_id_outside_the_vocabulary_is_refused(bad: int) -> None:
    values = Encoded(np.array([1, bad], np.int32), np.array([2]))
    with pytest.raises(
        DataFormatError, match=f"the token id {bad}, but its vocabulary has 100 entries"
    ):
        assemble(values, None, eod_id=None, vocab_size=100, dtype=np.dtype("<u2"))
