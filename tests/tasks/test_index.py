"""Keys of index maps, with the sentence options of BERT and T5."""

from pathlib import Path
from typing import Any

import pytest

from megacore.artifact import Artifact
from megacore.config import RunConfig, load_config
from megacore.data.index_directory import read_description
from megacore.data.index_maps import build_index_maps
from megacore.data.index_options import SentenceOptions
from megacore.data.sentence_maps import build_sentence_maps
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
