import math
from pathlib import Path

import numpy as np
import pytest

from megacore.data.indexed_dataset import IndexedDatasetWriter
from megacore.data.unigram import UnigramModel
from megacore.errors import DataFormatError


def write(prefix: Path, documents: list[list[int]]) -> str:
    with IndexedDatasetWriter(prefix, "u2") as writer:
        for ids in documents:
            writer.add_document(ids)
    return str(prefix)


def test_perplexity_of_smoothed_frequencies(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[0, 0, 0, 1], [0, 2]])
    # P(0) = 4/7, P(1) = 2/7, P(2) = 1/7
    model = UnigramModel(prefix, "1,1", 3)
    assert model.perplexity(np.array([[0, 2]])) == pytest.approx(math.sqrt(7 / 4 * 7))


def test_id_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataFormatError, match="token id 3, but the vocabulary has 3"):
        UnigramModel(write(tmp_path / "a", [[0, 3], [1]]), "1,1", 3)
