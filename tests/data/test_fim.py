"""Tests of fill-in-the-middle on samples of text."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from megacore.config.data import FimConfig, TrainBpeTokenizer
from megacore.corpus.documents import CorpusWriter
from megacore.data.build import open_split
from megacore.data.fim import FimDataset
from megacore.data.index_maps import build_index_maps
from megacore.data.index_options import IndexOptions, Mixture
from megacore.data.samples import Batch, Dataset, Indices, as_array
from megacore.errors import ConfigError
from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter
from megacore.tokenizer import Tokenizer, load_tokenizer
from megacore.tokenizer.build import build_tokenizer
from tests.data._config import run_config

SEQ_LENGTH = 32
TOKENS = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>")
TEXTS = [
    f"def größe_{n}(wert):\n    return wert * {n} + größe_{n - 1}(wert - {n})  # 💡\n"
    for n in range(60)
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a tokenizer with the special tokens, token files and index maps."""
    root = tmp_path_factory.mktemp("fim")
    for name in ("corpus", "tokenizer", "index"):
        (root / name).mkdir()
    with CorpusWriter(root / "corpus") as writer:
        for text in TEXTS:
            writer.add(text, "test")
    choice = TrainBpeTokenizer(kind="train-bpe", vocab_size=350, special_tokens=TOKENS)
    build_tokenizer(choice, root / "corpus", root / "tokenizer")
    tokenizer = load_tokenizer(root / "tokenizer")
    with IndexedDatasetWriter(root / "tokens", "u2") as writer:
        for ids in tokenizer.encode_batch(TEXTS):
            writer.add_document([*ids.tolist(), tokenizer.eod_id])
    options = IndexOptions(split="80,10,10", seq_length=SEQ_LENGTH, seed=1)
    build_index_maps(Mixture.single(str(root / "tokens")), root / "index", options, (50, 5, 5))
    return root


def open_dataset(root: Path, name: str = "train", *, seed: int = 7, **fim: object) -> Dataset:
    config = run_config(seed=seed, seq_length=SEQ_LENGTH, split="80,10,10", fim=fim)
    return open_split(
        [str(root / "tokens")], root / "index", name, config, tokenizer_directory=root / "tokenizer"
    )


class FixedSamples:
    """A data set of given samples, all from one source."""

    sources = (0,)

    def __init__(self, rows: list[list[int]], columns: int) -> None:
        self.seq_length, self.width = columns - 1, columns
        self.rows = np.full((len(rows), columns), -1, np.int64)
        for row, values in zip(self.rows, rows, strict=True):
            row[: len(values)] = values

    def __len__(self) -> int:
        return len(self.rows)

    def source_places(self, indices: Indices) -> npt.NDArray[np.int64]:
        return np.zeros(len(indices), np.int64)

    def gather(self, indices: Indices, out: Batch | None = None) -> Batch:
        out = np.empty((len(indices), self.width), np.int64) if out is None else out
        out[:] = self.rows[as_array(indices)]
        return out


def rearrange(
    tokenizer: Tokenizer, texts: list[str], *, columns: int = 400, **fim: float
) -> list[int]:
    """Return one sample of the documents with every document rearranged and enough room."""
    ids = [
        token
        for text in texts
        for token in [*tokenizer.encode_batch([text])[0].tolist(), tokenizer.eod_id]
    ]
    config = FimConfig.model_validate({"rate": 1.0, **fim})
    dataset = FimDataset(FixedSamples([ids], columns), tokenizer, config, seed=3, capacity=columns)
    sample: list[int] = dataset.gather([0])[0].tolist()
    return sample


def original(tokenizer: Tokenizer, ids: list[int]) -> tuple[str, bool]:
    """Return the original text of a rearranged document, and True if its suffix is first."""
    prefix, middle, suffix = (ids.index(tokenizer.token_id(name)) for name in TOKENS)  # type: ignore[arg-type]
    assert prefix == 0
    if suffix == 1:
        return tokenizer.decode(ids[middle + 1 :]) + tokenizer.decode(ids[2:middle]), True
    return "".join(
        tokenizer.decode(part)
        for part in (ids[1:suffix], ids[middle + 1 :], ids[suffix + 1 : middle])
    ), False


@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
def test_each_document_is_rearranged_separately(directory: Path, spm_rate: float) -> None:
    tokenizer = load_tokenizer(directory / "tokenizer")
    texts = [TEXTS[3], TEXTS[20], "", TEXTS[41]]
    sample = rearrange(tokenizer, texts, spm_rate=spm_rate)
    used = np.array(sample[: sample.index(-1)])
    assert set(sample[len(used) :]) == {-1}
    ends = np.flatnonzero(used == tokenizer.eod_id)
    assert len(ends) == 4
    assert ends[-1] == len(used) - 1
    parts = [
        used[first:last].tolist() for first, last in zip([0, *ends[:-1] + 1], ends, strict=True)
    ]
    if spm_rate == 0.0:
        assert [original(tokenizer, part) if part else ("", False) for part in parts] == [
            (text, False) for text in texts
        ]
    else:
        # The prefix follows the token <fim_middle>, and the middle follows the prefix.
        assert all(part[1] == tokenizer.token_id("<fim_suffix>") for part in parts if part)
        assert all(
            len(original(tokenizer, part)[0]) == len(text)
            for part, text in zip(parts, texts, strict=True)
            if part
        )


def test_rearranged_samples_keep_their_length(directory: Path) -> None:
    plain, changed = open_dataset(directory, "valid"), open_dataset(directory)
    assert not isinstance(plain, FimDataset)
    batch = changed.gather(range(len(changed)))
    assert batch.shape == (len(changed), SEQ_LENGTH + 1)
    assert (batch >= 0).all()  # the tokens beyond the length are cut off
    special = [load_tokenizer(directory / "tokenizer").token_id(name) for name in TOKENS]
    assert all((batch == token).any() for token in special)


def test_a_sample_depends_only_on_seed_and_number(directory: Path) -> None:
    expected = open_dataset(directory).gather(range(40))
    dataset = open_dataset(directory)
    for index in (17, 3, 39, 17):
        np.testing.assert_array_equal(dataset.gather([index])[0], expected[index])
    out = np.empty((3, SEQ_LENGTH + 1), np.int64)
    assert dataset.gather([5, 6, 5], out) is out
    np.testing.assert_array_equal(out, expected[[5, 6, 5]])
    assert not np.array_equal(open_dataset(directory, seed=8).gather(range(40)), expected)


def test_rates_follow_the_configuration(directory: Path) -> None:
    tokenizer = load_tokenizer(directory / "tokenizer")
    rows = [tokenizer.encode_batch([TEXTS[n % 60]])[0].tolist() for n in range(2000)]
    fim = FimConfig(rate=0.3, spm_rate=0.75)
    batch = FimDataset(FixedSamples(rows, 80), tokenizer, fim, seed=5, capacity=80).gather(
        range(2000)
    )
    changed = batch[:, 0] == tokenizer.token_id("<fim_prefix>")
    suffix_first = changed & (batch[:, 1] == tokenizer.token_id("<fim_suffix>"))
    assert changed.mean() == pytest.approx(0.3, abs=0.04)
    # An empty prefix also looks like a suffix that comes first.
    assert suffix_first.sum() / changed.sum() == pytest.approx(0.75, abs=0.06)
    untouched = ~changed
    np.testing.assert_array_equal(batch[untouched], FixedSamples(rows, 80).rows[untouched])


def test_the_last_column_is_empty_without_an_extra_token(directory: Path) -> None:
    tokenizer = load_tokenizer(directory / "tokenizer")
    ids = tokenizer.encode_batch([TEXTS[1]])[0].tolist()[:20]
    dataset = FimDataset(
        FixedSamples([ids], 21), tokenizer, FimConfig(rate=1.0), seed=5, capacity=20
    )
    sample = dataset.gather([0])[0]
    assert sample[-1] == -1
    assert (sample[:-1] >= 0).all()


def test_bytes_of_a_divided_character_are_dropped(directory: Path) -> None:
    tokenizer = load_tokenizer(directory / "tokenizer")
    ids = tokenizer.encode_batch(["💡 abc💡"])[0].tolist()
    inside = ids[1:-1]
    assert "\ufffd" in tokenizer.decode(inside)
    fim = FimConfig(rate=1.0, spm_rate=0.0)
    sample = FimDataset(FixedSamples([inside], 40), tokenizer, fim, seed=5, capacity=40).gather(
        [0]
    )[0]
    assert original(tokenizer, sample[sample >= 0].tolist())[0] == " abc"


def test_missing_special_tokens_are_refused_with_their_names(directory: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.fim needs the tokens <PRE>, <SUF>, which .*special_tokens"
    ):
        open_dataset(directory, prefix_token="<PRE>", suffix_token="<SUF>")
