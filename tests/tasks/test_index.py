"""Keys of index maps, with the sentence options of BERT and T5."""

import itertools
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megacore.artifact import Artifact
from megacore.artifact.build import build_artifact
from megacore.artifact.files import write_json
from megacore.config import RunConfig, load_config
from megacore.data.index_directory import map_path, read_description
from megacore.data.index_maps import build_index_maps
from megacore.data.index_options import SentenceOptions
from megacore.data.sentence_maps import build_sentence_maps
from megacore.train.state import PLANNED_KEY, TrainState
from tasks import train
from tasks._resume import planned_before
from tasks.index import epochs_summary, index_key, index_options, mixture, requested_samples
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
    write_lengths(tmp_path / "tokens_text_sentence", [[4, 5, 3, 6, 2], [7, 8], [], [3, 3, 3]] * 6)
    return Artifact(stage="tokenize", key="k", digest="d", path=str(tmp_path), counts={})


def test_key_of_gpt_has_no_sentence_options(tmp_path: Path) -> None:
    run = config("gpt2-tiny", data__seq_length=8)
    assert set(index_key(run, tokens(tmp_path)).parameters) == {
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
    assert section in index_key(run, artifact).parameters
    assert index_key(run, artifact).key != index_key(other, artifact).key
    more = config(name, **{"train.train_iters": run.train.train_iters * 20})
    assert index_key(run, artifact).key != index_key(more, artifact).key  # more passes
    few = config(name, **{"train.log_interval": 7})
    assert index_key(run, artifact).key == index_key(few, artifact).key


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
    assert index_key(run, artifact).key != index_key(packed, artifact).key


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
    assert planned_before(second) == 4 * 2
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
            planned_before=planned_before(run),
        )
        dataset = read_order(directory)
        assert len(dataset) >= requested_samples(run)[0]
        maps.append(dataset)
    assert len(maps[0]) < len(maps[1]) < len(maps[2])
    for before, after in itertools.pairwise(maps):
        np.testing.assert_array_equal(before, after[: len(before)])
    assert len({index_key(run, artifact).key for run in (first, second, third)}) == 3
    # A shorter run reads the maps of the first one.
    checkpoint = str(tmp_path / "a")
    shorter = config(name, **values, train__train_iters=3, resume__checkpoint=checkpoint)
    plain = config(name, **values, train__train_iters=2)
    assert index_key(shorter, artifact).key == index_key(plain, artifact).key
    values |= {"data__seq_length": 32}
    assert planned_before(config(name, **values, resume__checkpoint=checkpoint)) is None


def read_order(directory: Path) -> Any:
    """Return the order of the train samples in the maps of a single data set."""
    description = read_description(directory)
    rows = np.load(map_path(directory, "train", description.counting_map))
    if description.counting_map == "sentence":
        return rows
    starts = np.load(map_path(directory, "train", "sample"))[rows]
    documents = np.load(map_path(directory, "train", "document"))
    return np.stack([documents[starts[:, 0]], starts[:, 1]], axis=1)


def test_extension_warns_of_a_new_order_only_if_the_maps_begin_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(train, "get_run_logger", lambda: logging.getLogger("train"))
    artifact = tokens(tmp_path)
    values = {"data__seq_length": 16, "train__micro_batch_size": 1, "train__eval_iters": 1}
    values |= {"train__global_batch_size": 2, "optim__lr_decay_iters": 4}
    first = config("gpt2-tiny", **values, train__train_iters=4)
    state = {
        "train": TrainState(iteration=3, consumed_samples=6).to_json(),
        "config": first.model_dump(mode="json"),
    }
    run = resumed("gpt2-tiny", tmp_path / "a", state, **values, train__train_iters=10)
    checkpoint = str(tmp_path / "a")
    longer = config("gpt2-tiny", **values, train__train_iters=40, resume__checkpoint=checkpoint)
    plain, more = (
        config("gpt2-tiny", **values, train__train_iters=iterations) for iterations in (10, 40)
    )
    for before, after, expected in ((run, longer, False), (plain, more, True), (more, more, False)):
        previous, index = (index_artifact(tmp_path, each, artifact) for each in (before, after))
        assert (previous.path == index.path) == (before is after)
        job = SimpleNamespace(config=before, index_directory=previous.path)
        monkeypatch.setattr(train.TrainJob, "read", lambda path, job=job: job)
        assert train._planned_samples(before) == (8 if before is run else None)
        caplog.clear()
        train._warn_of_changed_schedule(after, tmp_path, index)
        assert ("drawn in a new order" in caplog.text) == expected


def index_artifact(tmp_path: Path, run: RunConfig, artifact: Artifact) -> Artifact:
    """Build the maps of a run as the stage does."""

    def fill(directory: Path) -> dict[str, Any]:
        return build_index_maps(
            mixture(run, artifact),
            directory,
            index_options(run),
            requested_samples(run),
            planned_before=planned_before(run),
        )

    built, _ = build_artifact(tmp_path / "index", index_key(run, artifact), fill)
    return built
