"""Keys of index maps, with the sentence options of BERT and T5."""

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.artifact import Artifact
from megacore.artifact.build import seal
from megacore.artifact.files import write_json
from megacore.checkpoint.format import Marker, directory_name
from megacore.config import RunConfig, load_config
from megacore.data.index_directory import map_path, member_directory, read_description
from megacore.data.index_maps import build_index_maps
from megacore.data.index_options import SentenceOptions
from megacore.data.sentence_maps import build_sentence_maps
from megacore.errors import WorkspaceError
from megacore.token_files.indexed_dataset import write_members
from megacore.train.state import PLANNED_KEY, TrainState
from tasks import _cache, _retry, train
from tasks._plan import DryRun
from tasks._resume import planned_before
from tasks.contamination import contamination_key
from tasks.evaluate import Target, score_key
from tasks.index import (
    RunData,
    build_index,
    consumed_samples,
    epochs_summary,
    index_key,
    index_options,
    mixture,
    requested_samples,
)
from tests.data._sentences import write_lengths


def config(name: str, **changes: Any) -> RunConfig:
    return load_config(
        name,
        {
            "data.split": "2,1,1",
            **{key.replace("__", "."): value for key, value in changes.items()},
        },
    )


def tokens(tmp_path: Path) -> Artifact:
    lengths = [[4, 5, 3, 6, 2], [7, 8], [], [3, 3, 3]] * 6
    write_lengths(tmp_path / "tokens_text_sentence", lengths)
    counts = {"documents": len(lengths), "tokens": sum(map(sum, lengths))}
    return Artifact(stage="tokenize", key="k", digest="d", path=str(tmp_path), counts=counts)


def test_key_of_gpt_has_no_sentence_options(tmp_path: Path) -> None:
    run = config("gpt2-tiny", data__seq_length=8)
    assert set(index_key(run, tokens(tmp_path), None).parameters) == {
        "split",
        "seq_length",
        "seed",
        "index_style",
        "packing",
        "add_extra_token",
        "drop_last_partial",
        "plan",
    }
    assert index_options(run).sentences is None


@pytest.mark.parametrize(
    ("name", "section", "change"),
    [
        ("bert-tiny", "masked_lm", {"data.masked_lm.masked_lm_prob": 0.2}),
        ("bert-tiny", "masked_lm", {"data.masked_lm.use_geometric_distribution": True}),
        ("bert-tiny", "masked_lm", {"model.bert_binary_head": False}),
        ("t5-tiny", "span_corruption", {"data.span_corruption.noise_density": 0.1}),
    ],
)
def test_key_contains_the_sentence_options(
    tmp_path: Path, name: str, section: str, change: dict[str, Any]
) -> None:
    run, other, artifact = config(name), config(name, **change), tokens(tmp_path)
    assert section in index_key(run, artifact, None).parameters
    assert index_key(run, artifact, None).key != index_key(other, artifact, None).key
    more = config(name, **{"train.train_iters": run.train.train_iters * 20})
    assert index_key(run, artifact, None).key != index_key(more, artifact, None).key  # more passes
    few = config(name, **{"train.log_interval": 7})
    assert index_key(run, artifact, None).key == index_key(few, artifact, None).key


def test_stage_builds_the_requested_samples(tmp_path: Path) -> None:
    artifact, directory = tokens(tmp_path), tmp_path / "maps"
    directory.mkdir()
    run = config("bert-tiny", train__train_iters=2, train__eval_iters=1)
    counts = build_sentence_maps(
        mixture(run, artifact), directory, index_options(run), requested_samples(run)
    )
    description = read_description(directory)
    assert description.options.sentences == SentenceOptions("bert", 2, 0.1)
    assert (
        counts["train"]["samples"]
        == description.samples["train"]
        >= 2 * run.train.global_batch_size
    )


def test_stage_packs_by_best_fit_and_its_summary_says_the_padding(tmp_path: Path) -> None:
    artifact, directory = tokens(tmp_path), tmp_path / "maps"
    directory.mkdir()
    values = {"data__seq_length": 8, "train__train_iters": 2, "train__eval_iters": 1}
    run = config("gpt2-tiny", data__packing="best_fit", **values)
    counts = build_index_maps(
        mixture(run, artifact), directory, index_options(run), requested_samples(run)
    )
    assert counts["train"]["samples"] >= 2 * run.train.global_batch_size
    padding = counts["train"]["padding"]
    assert 0 < padding < 0.2
    index = Artifact(stage="index", key="k", digest="d", path=str(directory), counts=counts)
    assert f"; {100 * padding:.3g} % of the tokens of its samples are padding" in epochs_summary(
        run, index
    )
    packed = config("gpt2-tiny", **values)
    assert index_key(run, artifact, None).key != index_key(packed, artifact, None).key


def resumed(name: str, checkpoint: Path, state: dict[str, Any], **changes: Any) -> RunConfig:
    """Return a configuration that resumes from a checkpoint with this state."""
    checkpoint.mkdir()
    write_json(checkpoint / "state.json", state)
    return config(name, resume__checkpoint=str(checkpoint), **changes)


@pytest.mark.parametrize("name", ["gpt2-tiny", "bert-tiny"])
def test_run_that_resumes_from_another_one_draws_the_rest_of_its_order(
    tmp_path: Path, name: str
) -> None:
    artifact = tokens(tmp_path)
    build = build_index_maps if name == "gpt2-tiny" else build_sentence_maps
    values = {"data__seq_length": 16, "train__micro_batch_size": 1, "train__eval_iters": 1}
    batch = {"train__global_batch_size": 2, "train__train_iters": 4}
    first = config(name, **values, **batch)
    state = {
        "train": TrainState(iteration=3, consumed_samples=6).to_json(),
        "config": first.model_dump(mode="json"),
    }
    values |= {"train__global_batch_size": 4}
    second = resumed(name, tmp_path / "a", state, **values, train__train_iters=30)
    assert requested_samples(second)[0] == 6 + 27 * 4, "the batches before were smaller"
    assert planned_before(second, None) == 4 * 2
    # A checkpoint of the second run has the plan with which its order began.
    state = {
        "train": TrainState(iteration=20, consumed_samples=6 + 17 * 4).to_json(),
        "config": second.model_dump(mode="json"),
        PLANNED_KEY: 8,
    }
    third = resumed(name, tmp_path / "b", state, **values, train__train_iters=60)
    maps = []
    for number, run in enumerate((first, second, third)):
        directory = tmp_path / f"maps-{number}"
        directory.mkdir()
        build(
            mixture(run, artifact),
            directory,
            index_options(run),
            requested_samples(run),
            planned_before=planned_before(run, None),
        )
        dataset = read_order(directory)
        assert len(dataset) >= requested_samples(run)[0]
        maps.append(dataset)
    assert len(maps[0]) < len(maps[1]) < len(maps[2])
    for before, after in itertools.pairwise(maps):
        np.testing.assert_array_equal(before, after[: len(before)])
    runs = (first, second, third)
    keys = {index_key(run, artifact, planned_before(run, None)).key for run in runs}
    assert len(keys) == 3
    # A shorter run reads the maps of the first one.
    checkpoint = str(tmp_path / "a")
    shorter = config(name, **values, train__train_iters=3, resume__checkpoint=checkpoint)
    plain = config(name, **values, train__train_iters=2)
    planned = planned_before(shorter, None)
    assert index_key(shorter, artifact, planned).key == index_key(plain, artifact, None).key
    values |= {"data__seq_length": 32}
    longer = config(name, **values, resume__checkpoint=checkpoint)
    assert planned_before(longer, None) is None


def read_order(directory: Path) -> Any:
    """Return the order of the train samples in the maps of a single data set or a blend of two."""
    description = read_description(directory)
    if len(description.members) > 1:
        members = [read_maps(member_directory(directory, number)) for number in range(2)]
        drawn, samples = (
            np.load(map_path(directory, "train", kind)) for kind in ("dataset", "dataset_sample")
        )
        return np.array(
            [
                (number, *members[number][sample])
                for number, sample in zip(drawn, samples, strict=True)
            ]
        )
    return read_maps(directory, description.counting_map)


def read_maps(directory: Path, counting_map: str = "shuffle") -> Any:
    """Return the order of the train samples of a data set."""
    rows = np.load(map_path(directory, "train", counting_map))
    if counting_map == "sentence":
        return rows
    starts = np.load(map_path(directory, "train", "sample"))[rows]
    documents = np.load(map_path(directory, "train", "document"))
    return np.stack([documents[starts[:, 0]], starts[:, 1]], axis=1)


VALUES = {
    "data__seq_length": 16,
    "train__micro_batch_size": 1,
    "train__global_batch_size": 2,
    "train__eval_iters": 1,
}


class Workplace:
    """A workspace with tokens and one run, whose data stage and checkpoints the test writes."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = path / "runs" / "key"
        self.directory.mkdir(parents=True)
        monkeypatch.setenv("MEGACORE_WORKSPACE", str(path))
        monkeypatch.setattr(_cache, "get_run_logger", lambda: logging.getLogger("index"))
        monkeypatch.setattr(train, "run_directory", lambda *inputs: self.directory)
        self.tokens = tokens(path)

    def blend(self) -> dict[str, Any]:
        """Divide the tokens among two sources; return the values of a blend of them."""
        members = [self.directory / name for name in ("a", "b")]
        for number, member in enumerate(members, start=1):
            member.mkdir()
            write_lengths(member / "tokens_text_document", [[9, 5], [8, 2], [7]] * 3 * number)
        path = self.directory / "blend"
        path.mkdir()
        write_members(path, members)
        self.tokens = self.tokens.model_copy(update={"path": str(path)})
        parts = [
            {
                "name": each.name,
                "weight": weight,
                "source": {"kind": "source_tree", "path": str(each)},
            }
            for each, weight in zip(members, (3.0, 1.0), strict=True)
        ]
        return {"data__source": None, "data__blend": parts}

    def index(self, run: RunConfig) -> Artifact:
        """Build the maps of a start as the flow does, and check that a dry run finds them."""
        planned = train.planned_order(run, self.tokens, self.tokens)
        index = build_index.fn(run, self.tokens, planned).artifact
        plan = DryRun(run)
        before = plan.value(train.planned_order, self.tokens, self.tokens)
        assert plan.stage(build_index, self.tokens, before) == index
        return index

    def data(self, index: Artifact) -> RunData[Artifact]:
        """Return the inputs of the training with these maps."""
        return RunData(self.tokens, self.tokens, index)

    def save(self, run: RunConfig, iteration: int, **state: Any) -> Path:
        """Write a checkpoint of the run, by default as a training would."""
        state = state or {PLANNED_KEY: train._planned_samples(run, self.directory)}
        path = self.directory / "checkpoints" / directory_name(iteration)
        path.mkdir(parents=True)
        consumed = iteration * run.train.global_batch_size
        values = {
            "train": TrainState(iteration, consumed).to_json(),
            "config": run.model_dump(mode="json"),
        }
        write_json(path / "state.json", values | state)
        Marker(iteration, None, {}).write(path)
        return path


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    return Workplace(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("name", "blended"),
    [("gpt2-tiny", False), ("gpt2-tiny", True), ("bert-tiny", False), ("t5-tiny", False)],
)
def test_extensions_of_a_run_draw_the_rest_of_its_order(
    workplace: Workplace, name: str, *, blended: bool
) -> None:
    values = VALUES | (workplace.blend() if blended else {})
    first, longer, longest = (
        config(name, **values, train__train_iters=iterations) for iterations in (10, 40, 90)
    )
    indexes = [workplace.index(first)]
    assert indexes[0].key == index_key(first, workplace.tokens, None).key
    for number, (run, iteration) in enumerate(((first, 10), (longer, 40), (longest, 90))):
        index = workplace.index(run)
        # It may be interrupted, and started with fewer iterations, before its first checkpoint.
        assert workplace.index(run) == index
        assert workplace.index(first) == indexes[0]
        workplace.save(run, iteration)
        assert workplace.index(run) == index
        assert workplace.index(first) == indexes[0]
        indexes[number:] = [index]
    assert len({index.key for index in indexes}) == 3
    assert workplace.index(longer) == indexes[1]
    orders = [read_order(index.directory) for index in indexes]
    for before, after in itertools.pairwise(orders):
        np.testing.assert_array_equal(before, after[: len(before)])
    for run, order in zip((first, longer, longest), orders, strict=True):
        assert len(order) >= consumed_samples(run)
    # Evaluations depend on none of what differs.
    target = Target("iter_0000010", "/", "e" * 64)
    assert len({score_key(first, index, target).key for index in indexes}) == 1
    shares = [contamination_key(first, (), workplace.tokens, index).key for index in indexes]
    assert len({*shares}) == 1


def test_each_sample_of_an_appended_epoch_comes_once(workplace: Workplace) -> None:
    first, longer = (
        config("gpt2-tiny", **VALUES, train__train_iters=iterations) for iterations in (10, 40)
    )
    before = workplace.index(first)
    workplace.save(first, 10)
    after = workplace.index(longer)
    documents, samples, shuffle = (
        [np.load(map_path(index.directory, "train", kind)) for index in (before, after)]
        for kind in ("document", "sample", "shuffle")
    )
    old, new = map(len, shuffle)
    assert consumed_samples(first) <= old < consumed_samples(longer) <= new
    # The samples that were consumed are the same, token by token.
    np.testing.assert_array_equal(shuffle[0], shuffle[1][:old])
    np.testing.assert_array_equal(samples[0], samples[1][: old + 1])
    np.testing.assert_array_equal(documents[0], documents[1][: len(documents[0])])
    # Each document comes once in an appended epoch, and each sample once in its order.
    count = before.counts["train"]["sequences"]
    appended = documents[1][len(documents[0]) :].reshape(-1, count)
    assert len(appended) == after.counts["train"]["epochs"] - before.counts["train"]["epochs"] > 0
    for epoch in appended:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(count))
    np.testing.assert_array_equal(np.sort(shuffle[1]), np.arange(new))


def test_run_of_an_earlier_version_stays_in_the_order_of_its_last_checkpoint(
    workplace: Workplace,
) -> None:
    first, longer, longest = (
        config("gpt2-tiny", **VALUES, train__train_iters=iterations) for iterations in (10, 40, 90)
    )
    plain, other = (index_key(run, workplace.tokens, None).key for run in (first, longer))
    workplace.save(first, 10, version=1)
    assert workplace.index(first).key == plain
    assert workplace.index(longer).key not in (plain, other)
    # An earlier version extended it in the order of a run that had the new length at once.
    newest = workplace.save(longer, 40, version=1)
    assert workplace.index(longer).key == other
    assert train._planned_samples(longest, workplace.directory) == consumed_samples(longer)
    (newest / "state.json").write_text("{")
    assert train._planned_samples(longest, workplace.directory) == consumed_samples(first)


def test_extended_run_says_where_its_training_ended(workplace: Workplace) -> None:
    first, longer = (
        config("gpt2-tiny", **VALUES, train__train_iters=iterations) for iterations in (10, 40)
    )

    def problem(run: RunConfig) -> str | None:
        return train.training_problem(run, workplace.data(index))

    index = workplace.index(first)
    key = train.train_key(first, workplace.data(index))
    counts = train.training_counts(workplace.directory, first, index)
    seal(workplace.directory, key, counts, 1.0, train.SEALED)
    assert problem(first) is None
    assert problem(longer) == "it ended at iteration 10 of 40"
    other = config("gpt2-tiny", **VALUES, train__train_iters=10, seed=7)
    assert problem(other) == f"it was built with key {key.key}"


def test_run_without_a_checkpoint_is_planned_from_its_first_sample(workplace: Workplace) -> None:
    (workplace.directory / "run.json").write_text('{"planned_samples": 20}')
    unfinished = workplace.directory / "checkpoints" / directory_name(10)
    unfinished.mkdir(parents=True)
    longer = config("gpt2-tiny", **VALUES, train__train_iters=40)
    assert workplace.index(longer).key == index_key(longer, workplace.tokens, None).key
    assert train._planned_samples(longer, workplace.directory) == consumed_samples(longer) == 80


def test_checkpoint_of_another_flow_run_with_another_order_is_refused(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_retry, "get_run_logger", lambda: logging.getLogger("train"))
    monkeypatch.setattr(train, "training_problem", lambda *inputs: "it is not finished")
    first, longer = (
        config("gpt2-tiny", **VALUES, train__train_iters=iterations) for iterations in (10, 40)
    )
    short, index = workplace.index(first), workplace.index(longer)
    train._refuse_other_order(longer, workplace.directory, workplace.data(index))
    workplace.save(first, 5)
    with pytest.raises(WorkspaceError, match=r"planned for 20 samples.*start this run again"):
        train.train.fn(longer, workplace.data(index))
    train._refuse_other_order(first, workplace.directory, workplace.data(short))
    train._refuse_other_order(longer, workplace.directory, workplace.data(workplace.index(longer)))


def test_data_is_prepared_without_the_checkpoint_that_the_run_begins_with(tmp_path: Path) -> None:
    changes = {"train__pretrained_checkpoint": str(tmp_path / "missing")}
    run = config("gpt2-tiny", **VALUES, **changes)
    artifact = tokens(tmp_path)
    assert train.planned_order(run, artifact, artifact) is None
