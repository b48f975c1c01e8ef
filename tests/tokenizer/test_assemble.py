import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.errors import DataFormatError
from megacore.tokenizer.load import Encoded
from megacore.tokenizer.pipeline import assemble

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
def test_sentences_are_stored_as_megatron_stores_them(
    documents: list[Document], eod_id: int | None
) -> None:
    expected: list[Document] = []
    for document in documents:
        kept = [list(ids) for ids in document if ids]
        if kept and eod_id is not None:
            kept[-1].append(eod_id)
        expected.append(kept)
    batch = assemble(*encoded(documents), eod_id=eod_id, vocab_size=100, dtype=np.dtype("<u2"))
    wanted, counts = encoded(expected)
    assert batch.ids.dtype == np.dtype("<u2")
    assert batch.ids.tolist() == wanted.ids.tolist()
    assert batch.lengths.tolist() == wanted.lengths.tolist()
    assert batch.sequences.tolist() == counts.tolist()


@given(
    documents=st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=8),
    eod_id=st.none() | st.integers(0, 99),
)
def test_whole_documents_are_documents_of_one_sentence(
    documents: list[list[int]], eod_id: int | None
) -> None:
    values, ones = encoded([[ids] for ids in documents])
    one = assemble(values, None, eod_id=eod_id, vocab_size=100, dtype=np.dtype("<i4"))
    other = assemble(values, ones, eod_id=eod_id, vocab_size=100, dtype=np.dtype("<i4"))
    assert [part.tolist() for part in (one.ids, one.lengths, one.sequences)] == [
        part.tolist() for part in (other.ids, other.lengths, other.sequences)
    ]


@pytest.mark.parametrize("bad", [100, -1])
def test_id_beyond_the_vocabulary_is_named(bad: int) -> None:
    values = Encoded(np.array([1, bad], np.int32), np.array([2]))
    with pytest.raises(
        DataFormatError, match=f"the token id {bad}, but its vocabulary has 100 entries"
    ):
        assemble(values, None, eod_id=None, vocab_size=100, dtype=np.dtype("<u2"))
