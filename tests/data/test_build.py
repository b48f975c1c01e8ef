"""Tests of opening splits for training: single data sets, blends and one epoch of each member."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megacore.config.data import BertWordPieceTokenizer
from megacore.config.run import RunConfig
from megacore.config.spec import SpecialTokens
from megacore.data.build import MemberOpener, open_split, sentence_options
from megacore.data.gpt_dataset import GPTDataset
from megacore.data.index_directory import map_path, member_directory, read_description
from megacore.data.index_maps import build_index_maps, index_plan
from megacore.data.index_options import (
    IndexOptions,
    IndexStyle,
    Member,
    Mixture,
    Packing,
    WeightStep,
)
from megacore.data.one_epoch import one_epoch, train_tokens
from megacore.data.samples import BlendedDataset, Dataset
from megacore.data.sentence_maps import build_sentence_maps, sentence_plan
from megacore.errors import ConfigError, DataFormatError
from megacore.inspect.verify import examine
from megacore.token_files.indexed_dataset import IndexedDataset
from megacore.tokenizer.build import build_tokenizer
from megacore.tokenizer.vocabulary import check_roles
from megacore.tokenizer.wordpiece import SPECIAL
from tests.data._config import run_config
from tests.data._files import write_tokens
from tests.data._sentences import FIRST_SENTINEL, FIRST_TEXT, SEP, write_lengths

SEQ_LENGTH = 8
LENGTHS = (
    [30, 0, 9, 41, 12, 25, 33, 18, 7, 60],
    [50, 3, 44, 20, 31, 12],
    [9, 9, 70, 15, 26, 34, 40],
)
WEIGHTS = (0.5, 0.3, 0.2)


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    return [
        write_tokens(tmp_path / f"tokens-{number}", lengths)
        for number, lengths in enumerate(LENGTHS)
    ]


@pytest.fixture
def blend(prefixes: list[str], tmp_path: Path) -> Path:
    directory = tmp_path / "index"
    directory.mkdir()
    mixture = Mixture.blend(
        [Member(prefix, weight) for prefix, weight in zip(prefixes, WEIGHTS, strict=True)]
    )
    build_index_maps(mixture, directory, options("50,25,25"), (90, 6, None))
    return directory


def options(split: str | None) -> IndexOptions:
    return IndexOptions(split=split, seq_length=SEQ_LENGTH, seed=5)


def open_dataset(prefixes: list[str], directory: Path, name: str, **changes: object) -> Dataset:
    config = run_config(**{"split": "50,25,25", **changes})
    return open_split(prefixes, directory, name, config, tokenizer_directory=directory)


def test_a_blend_returns_its_members_samples_in_the_order_of_the_maps(
    prefixes: list[str], blend: Path
) -> None:
    dataset = open_dataset(prefixes, blend, "train")
    assert isinstance(dataset, BlendedDataset)
    members = [
        GPTDataset(prefix, member_directory(blend, number), "train", SEQ_LENGTH)
        for number, prefix in enumerate(prefixes)
    ]
    numbers, samples = (
        np.load(map_path(blend, "train", name)) for name in ("dataset", "dataset_sample")
    )
    assert len(dataset) == len(numbers) >= 90
    assert set(numbers) == {0, 1, 2}
    expected = np.stack(
        [members[number][sample] for number, sample in zip(numbers, samples, strict=True)]
    )
    np.testing.assert_array_equal(dataset.gather(range(len(dataset))), expected)
    indices = np.array([41, 3, 3, 88, 0])
    out = np.zeros((5, SEQ_LENGTH + 1), np.int64)
    assert dataset.gather(indices, out) is out
    np.testing.assert_array_equal(out, expected[indices])


def test_an_index_outside_a_blend_is_refused(prefixes: list[str], blend: Path) -> None:
    dataset = open_dataset(prefixes, blend, "train")
    with pytest.raises(IndexError, match=r"dataset_index\.npy has no sample 1000"):
        dataset.gather([1000])
    with pytest.raises(IndexError, match="has no sample -1"):
        dataset.gather([-1])


def test_a_split_without_data_sets_is_empty(prefixes: list[str], tmp_path: Path) -> None:
    mixture = Mixture.per_split(
        [Member(prefixes[0])], [Member(prefixes[1], 1.0), Member(prefixes[2], 2.0)], []
    )
    build_index_maps(mixture, tmp_path, options(None), (4, 4, 0))
    assert [
        len(open_dataset(prefixes, tmp_path, name, split=None)) >= 4
        for name in ("train", "valid", "test")
    ] == [
        True,
        True,
        False,
    ]
    empty = open_dataset(prefixes, tmp_path, "test", split=None)
    assert empty.gather([]).shape == (0, SEQ_LENGTH + 1)
    with pytest.raises(IndexError, match="this split has no sample 0: it has 0"):
        empty.gather([0])
    [(prefix, tokens)] = train_tokens(
        prefixes, tmp_path, run_config(split=None), tokenizer_directory=tmp_path
    )
    assert (prefix, len(tokens)) == (prefixes[0], sum(LENGTHS[0]))


@pytest.mark.parametrize("name", ["valid", "test"])
def test_one_epoch_has_the_samples_of_each_members_split_once(
    prefixes: list[str], blend: Path, tmp_path: Path, name: str
) -> None:
    # Packing loses less than one sample per member.
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    dataset = one_epoch(
        prefixes, blend, name, run_config(split="50,25,25"), scratch, tokenizer_directory=tmp_path
    )
    assert list(scratch.iterdir()) == []
    bounds = [
        {"valid": (5, 8), "test": (8, 10)},
        {"valid": (2, 4), "test": (4, 6)},
        {"valid": (4, 5), "test": (5, 7)},
    ]
    counts = [
        sum([length for length in lengths if length][slice(*bound[name])])
        for lengths, bound in zip(
            ([30, 9, 41, 12, 25, 33, 18, 7, 60], *LENGTHS[1:]), bounds, strict=True
        )
    ]
    assert len(dataset) > 3
    assert abs(len(dataset) - sum((count - 1) // SEQ_LENGTH for count in counts)) <= 3
    # As many samples as are read, they are divided among the members by their sizes.
    places = dataset.source_places(range(len(dataset)))
    sizes = np.bincount(places, minlength=3)
    for count in range(len(dataset) + 1):
        drawn = np.bincount(places[:count], minlength=3)
        assert np.abs(drawn - count * sizes / len(dataset)).max() <= 1


def test_one_epoch_of_a_single_data_set_equals_its_split(
    prefixes: list[str], tmp_path: Path
) -> None:
    config = run_config(split="50,25,25")
    build_index_maps(Mixture.single(prefixes[0]), tmp_path, options("50,25,25"), (20, None, None))
    expected = open_dataset(prefixes[:1], tmp_path, "valid").gather(range(3))
    dataset = one_epoch(
        prefixes[:1], tmp_path, "valid", config, tmp_path, tokenizer_directory=tmp_path
    )
    np.testing.assert_array_equal(dataset.gather(range(3)), expected)


def test_one_epoch_accepts_a_folder_that_nfs_cannot_remove_yet(
    prefixes: list[str], blend: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, **options: object) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)

    config = run_config(split="50,25,25")
    expected = one_epoch(prefixes, blend, "valid", config, tmp_path, tokenizer_directory=tmp_path)
    monkeypatch.setattr(os, "rmdir", refuse)
    dataset = one_epoch(prefixes, blend, "valid", config, tmp_path, tokenizer_directory=tmp_path)
    samples = range(len(expected))
    np.testing.assert_array_equal(dataset.gather(samples), expected.gather(samples))


def test_train_tokens_are_the_tokens_of_the_train_split(prefixes: list[str], blend: Path) -> None:
    streams = list(
        train_tokens(prefixes, blend, run_config(split="50,25,25"), tokenizer_directory=blend)
    )
    assert [prefix for prefix, _ in streams] == prefixes
    assert [len(tokens) for _, tokens in streams] == [92, 97, 103]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_length": 9}, r"built for data\.seq_length 8, not 9"),
        ({"packing": "unpacked"}, r"built for data\.packing packed, not unpacked"),
        ({"add_extra_token": False}, r"built for data\.add_extra_token True, not False"),
    ],
)
def test_maps_of_another_configuration_are_refused(
    prefixes: list[str], blend: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(DataFormatError, match=message):
        open_dataset(prefixes, blend, "train", **changes)


def test_maps_of_other_data_sets_are_refused(prefixes: list[str], blend: Path) -> None:
    with pytest.raises(DataFormatError, match="built for 3 pairs of token files, not for 2"):
        open_dataset(prefixes[:2], blend, "train")


@pytest.mark.parametrize("change", ["negative", "beyond", "float", "shorter", "missing"])
@pytest.mark.parametrize("name", ["dataset", "dataset_sample"])
def test_a_damaged_blend_is_refused(
    prefixes: list[str], blend: Path, name: str, change: str
) -> None:
    path = map_path(blend, "train", name)
    values = np.load(path)
    if change == "missing":
        path.unlink()
    else:
        if change in ("negative", "beyond"):
            values[3] = -1 if change == "negative" else 1000
        np.save(path, {"float": values.astype(float), "shorter": values[:-1]}.get(change, values))
    with pytest.raises(DataFormatError, match=r"dataset_index\.npy|dataset_sample_index\.npy"):
        open_dataset(prefixes, blend, "train").gather(range(90))


def write_tokenizer(directory: Path) -> Path:
    """Write a tokenizer with the special tokens of BERT and T5, and 60 sentinels."""
    letters = [
        *SPECIAL,
        *(f"{'##' * (number % 3 == 0)}t{number}" for number in range(FIRST_TEXT, FIRST_SENTINEL)),
    ]
    (directory / "vocab.txt").write_text("".join(f"{token}\n" for token in letters))
    choice = {
        "kind": "bert-wordpiece",
        "vocab_file": str(directory / "vocab.txt"),
        "vocab_extra_ids": 60,
    }
    place = directory / "tokenizer"
    place.mkdir()
    build_tokenizer(BertWordPieceTokenizer.model_validate(choice), [], place)
    return place


def sentence_run(family: str, **data: object) -> RunConfig:
    return run_config(family=family, split="2,1,1", seq_length=32, **data)


def sentence_index_options(run: RunConfig) -> IndexOptions:
    return IndexOptions(
        split="2,1,1",
        seq_length=32,
        seed=run.seed,
        sentences=sentence_options(run.family, run.model, run.data),
    )


@pytest.fixture
def sentences(tmp_path: Path) -> list[str]:
    random = np.random.default_rng(1)
    documents = [random.integers(2, 9, random.integers(3, 9)).tolist() for _ in range(40)]
    return [
        write_lengths(tmp_path / name, documents[place:]).prefix for place, name in enumerate("ab")
    ]


@pytest.mark.parametrize(("family", "width"), [("bert", 97), ("t5", 32 + 128)])
def test_samples_of_sentences_are_blended(
    sentences: list[str], tmp_path: Path, family: str, width: int
) -> None:
    run, tokenizer = sentence_run(family), write_tokenizer(tmp_path)
    mixture = Mixture.blend([Member(sentences[0], 1.0), Member(sentences[1], 2.0)])
    directory = tmp_path / "index"
    directory.mkdir()
    build_sentence_maps(mixture, directory, sentence_index_options(run), (30, 6, None))
    dataset = open_split(sentences, directory, "train", run, tokenizer_directory=tokenizer)
    assert isinstance(dataset, BlendedDataset)
    assert (len(dataset), dataset.width, dataset.seq_length) == (30, width, 32)
    opener = MemberOpener.of(sentences, directory, run, tokenizer)
    members = [
        opener.member(number, member_directory(directory, number), "train") for number in range(2)
    ]
    numbers, samples = (
        np.load(map_path(directory, "train", name)) for name in ("dataset", "dataset_sample")
    )
    expected = [
        members[number].gather([sample])[0] for number, sample in zip(numbers, samples, strict=True)
    ]
    np.testing.assert_array_equal(dataset.gather(range(30)), expected)
    epoch = one_epoch(sentences, directory, "test", run, tmp_path, tokenizer_directory=tokenizer)
    tests = [
        opener.member(number, member_directory(directory, number), "test") for number in range(2)
    ]
    places = epoch.source_places(range(len(epoch)))
    assert len(epoch) == sum(map(len, tests))
    for number, test in enumerate(tests):
        rows = epoch.gather(np.flatnonzero(places == number))
        np.testing.assert_array_equal(rows, test.gather(range(len(test))))


STEP = (WeightStep(20, (0.0, 1.0, 3.0)),)
LATER = (WeightStep(70, (1.0, 0.0, 9.0)),)
EVERY_PACKING = pytest.mark.parametrize(
    ("packing", "style"),
    [
        ("packed", "megatron"),
        ("packed", "neox"),
        ("best_fit", "megatron"),
        ("pack_until_overflow", "megatron"),
        ("unpacked", "megatron"),
    ],
)
"""Each way to lay out samples, and both styles of an index for packed ones."""


@EVERY_PACKING
def test_a_later_weight_changes_no_sample_before_it(
    prefixes: list[str], tmp_path: Path, packing: Packing, style: IndexStyle
) -> None:
    members = [Member(prefix, weight) for prefix, weight in zip(prefixes, WEIGHTS, strict=True)]
    chosen = replace(options("50,25,25"), packing=packing, style=style)
    rows = {}
    for number, steps in enumerate(((), STEP, STEP + LATER)):
        directory = tmp_path / str(number)
        directory.mkdir()
        counts = build_index_maps(Mixture.blend(members, steps), directory, chosen, (150, 6, None))
        dataset = open_dataset(prefixes, directory, "train", packing=packing, index_style=style)
        rows[number] = dataset.gather(range(150))
        for name in ("valid", "test"):
            np.testing.assert_array_equal(
                *(
                    np.load(map_path(tmp_path / each, name, "dataset"))
                    for each in ("0", str(number))
                )
            )
        assert read_description(directory).steps == steps
        assert len(list(examine(directory))) >= 9
    assert counts["train"]["members"][2]["epochs"] > 3  # further epochs were appended
    np.testing.assert_array_equal(rows[0][:20], rows[1][:20])
    np.testing.assert_array_equal(rows[1][:70], rows[2][:70])
    assert (rows[0] != rows[1]).any()
    assert (rows[1] != rows[2]).any()
    drawn = np.load(map_path(tmp_path / "1", "train", "dataset"))
    assert 0 in drawn[:20]
    assert 0 not in drawn[20:]  # its weight is 0 from the step on


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_a_later_weight_changes_no_sample_of_sentences_before_it(
    sentences: list[str], tmp_path: Path, family: str
) -> None:
    run, tokenizer = sentence_run(family), write_tokenizer(tmp_path)
    members = [Member(sentences[0], 1.0), Member(sentences[1], 2.0)]
    rows, epochs = [], []
    for number, steps in enumerate(
        (
            (),
            (WeightStep(40, (9.0, 1.0)),),
            (WeightStep(40, (9.0, 1.0)), WeightStep(90, (0.0, 1.0))),
        )
    ):
        directory = tmp_path / str(number)
        directory.mkdir()
        mixture = Mixture.blend(members, steps)
        counts = build_sentence_maps(mixture, directory, sentence_index_options(run), (300, 6, 0))
        plan = sentence_plan(mixture, sentence_index_options(run), (300, 6, 0))
        epochs.append([member["epochs"] for member in plan["train"]["members"]])
        assert epochs[-1] == [member["epochs"] for member in counts["train"]["members"]]
        dataset = open_split(sentences, directory, "train", run, tokenizer_directory=tokenizer)
        rows.append(dataset.gather(range(300)))
    np.testing.assert_array_equal(rows[0][:40], rows[1][:40])
    np.testing.assert_array_equal(rows[1][:90], rows[2][:90])
    assert (rows[0] != rows[1]).any()
    assert epochs[1][0] > epochs[0][0]


@pytest.mark.parametrize("blended", [False, True])
@EVERY_PACKING
def test_more_samples_than_an_earlier_plan_follow_after_its_samples(
    prefixes: list[str], tmp_path: Path, packing: Packing, style: IndexStyle, *, blended: bool
) -> None:
    chosen = replace(options("50,25,25"), packing=packing, style=style)
    weighted = [Member(prefix, weight) for prefix, weight in zip(prefixes, WEIGHTS, strict=True)]
    mixture = Mixture.blend(weighted, LATER) if blended else Mixture.single(prefixes[0])
    names = prefixes if blended else prefixes[:1]
    rows = []
    for number, (samples, before) in enumerate(((40, None), (90, 40), (200, 40), (30, 40))):
        directory = tmp_path / str(number)
        directory.mkdir()
        build_index_maps(mixture, directory, chosen, (samples, 6, None), planned_before=before)
        dataset = open_dataset(names, directory, "train", packing=packing, index_style=style)
        rows.append(dataset.gather(range(samples)))
        assert len(list(examine(directory))) >= 6
    np.testing.assert_array_equal(rows[0][:40], rows[1][:40])
    np.testing.assert_array_equal(rows[1][:90], rows[2][:90])
    np.testing.assert_array_equal(rows[0][:30], rows[3])
    plans = [
        index_plan(mixture, chosen, (samples, 6, None), planned_before=before)
        for samples, before in ((40, None), (40, 40), (30, 40), (200, 40), (200, None))
    ]
    assert plans[0] == plans[1] == plans[2]
    assert (plans[3] == plans[4]) == (packing == "best_fit")  # its epochs always only append


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_more_samples_of_sentences_follow_after_those_of_an_earlier_plan(
    sentences: list[str], tmp_path: Path, family: str
) -> None:
    run, tokenizer = sentence_run(family), write_tokenizer(tmp_path)
    chosen, mixture = sentence_index_options(run), Mixture.single(sentences[0])
    rows, plans = [], []
    for number, (samples, before) in enumerate(((40, None), (400, 40), (400, None), (40, 40))):
        directory = tmp_path / str(number)
        directory.mkdir()
        counts = build_sentence_maps(
            mixture, directory, chosen, (samples, 6, 0), planned_before=before
        )
        assert counts["train"]["samples"] >= samples
        plans.append(sentence_plan(mixture, chosen, (samples, 6, 0), planned_before=before))
        dataset = open_split(sentences[:1], directory, "train", run, tokenizer_directory=tokenizer)
        rows.append(dataset.gather(range(samples)))
    np.testing.assert_array_equal(rows[0], rows[1][:40])
    assert (rows[0] != rows[2][:40]).any()
    assert plans[0] == plans[3]
    # The maps of both have as many epochs, in another order.
    assert plans[1] != plans[2]
    assert sum(plans[1]["train"].values()) == plans[2]["train"]["epochs"]


@pytest.mark.parametrize("packing", ["packed", "best_fit", "unpacked"])
def test_a_source_beyond_its_epochs_is_refused(
    prefixes: list[str], tmp_path: Path, packing: Packing
) -> None:
    chosen = replace(options("50,25,25"), packing=packing)
    limited = [Member(prefixes[0], 0.5, max_epochs=2), Member(prefixes[1], 0.5)]
    build_index_maps(Mixture.blend(limited), tmp_path, chosen, (10, 0, 0))
    with pytest.raises(ConfigError, match=r"epochs of .* but its max_epochs is 2"):
        index_plan(Mixture.blend(limited), chosen, (200, 0, 0))
    index_plan(
        Mixture.blend(limited, (WeightStep(8, (0.0, 1.0)),)), chosen, (200, 0, 0)
    )  # it is left out before it reaches its limit


def test_train_tokens_of_bert_are_the_tokens_of_the_split(
    sentences: list[str], tmp_path: Path
) -> None:
    run, tokenizer = sentence_run("bert"), write_tokenizer(tmp_path)
    mixture = Mixture.single(sentences[0])
    build_sentence_maps(mixture, tmp_path, sentence_index_options(run), (20, 0, 0))
    [(prefix, tokens)] = train_tokens(sentences[:1], tmp_path, run, tokenizer_directory=tokenizer)
    assert prefix == sentences[0]
    dataset = IndexedDataset(prefix)
    np.testing.assert_array_equal(tokens, dataset.token_range(0, int(dataset.document_indices[20])))


def test_train_tokens_of_t5_are_the_labels(sentences: list[str], tmp_path: Path) -> None:
    run, tokenizer = sentence_run("t5"), write_tokenizer(tmp_path)
    mixture = Mixture.single(sentences[0])
    build_sentence_maps(mixture, tmp_path, sentence_index_options(run), (20, 0, 0))
    [(prefix, tokens)] = train_tokens(sentences[:1], tmp_path, run, tokenizer_directory=tokenizer)
    assert prefix == sentences[0]
    dataset = open_split(sentences[:1], tmp_path, "train", run, tokenizer_directory=tokenizer)
    labels = dataset.gather(range(len(dataset)))[:, 32:]
    np.testing.assert_array_equal(tokens, labels[labels >= 0])
    assert (tokens == SEP).sum() == len(dataset)


def test_token_maps_are_refused_for_a_sentence_model(
    prefixes: list[str], blend: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        DataFormatError, match="was built for family gpt, not bert: build the index maps again"
    ):
        open_split(
            prefixes, blend, "train", run_config(family="bert"), tokenizer_directory=tmp_path
        )


def test_sentence_maps_of_another_family_or_configuration_are_refused(
    sentences: list[str], tmp_path: Path
) -> None:
    run, tokenizer = sentence_run("t5"), write_tokenizer(tmp_path)
    mixture = Mixture.single(sentences[0])
    build_sentence_maps(mixture, tmp_path, sentence_index_options(run), (5, 0, 0))
    with pytest.raises(DataFormatError, match="was built for family t5, not gpt"):
        open_split(
            sentences[:1], tmp_path, "train", sentence_run("gpt"), tokenizer_directory=tokenizer
        )
    changed = sentence_run("t5", span_corruption={"short_seq_prob": 0.5})
    with pytest.raises(DataFormatError, match=r"was built for short_seq_prob 0\.1, not 0\.5"):
        open_split(sentences[:1], tmp_path, "train", changed, tokenizer_directory=tokenizer)


def test_a_vocabulary_without_the_tokens_of_the_family_is_refused() -> None:
    many = sentence_run("t5", span_corruption={"noise_density": 0.9, "mean_span_length": 1.0})
    special = SpecialTokens(eod=3, pad=0, sentinels=(7, 8))
    with pytest.raises(
        ConfigError, match=r"needs 27 sentinels .* but the vocabulary has 2: set .* to at least 27"
    ):
        check_roles(special, "t5", many.data)
    with pytest.raises(
        ConfigError, match=r"family bert needs the tokens \[CLS\], \[SEP\], \[MASK\], which the"
    ):
        check_roles(special, "bert", many.data)
    check_roles(SpecialTokens(), "gpt", many.data)
