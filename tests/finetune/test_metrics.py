"""Metrics of fine-tuning, compared with values computed by hand."""

import math
from pathlib import Path
from typing import Any

import pytest

from megacore.config.finetune_task import (
    GLUE,
    CausalLmConfig,
    ClassificationConfig,
    Seq2SeqConfig,
    best_metric,
    classification_settings,
    metric_names,
)
from megacore.errors import ArtifactError, ConfigError
from megacore.finetune.metrics import (
    check_installed,
    classification_metrics,
    read_answers,
    text_metrics,
    write_answers,
)
from megacore.finetune.seq2seq import sentence_splitter
from tests._dist import run_distributed
from tests.finetune import _rank_cases
from tests.finetune._tiny_models import tiny_config

SPLIT = sentence_splitter("rules", Path())


def test_metrics_of_two_classes_equal_values_by_hand() -> None:
    """2 true positives, 1 false positive, 1 false negative, 1 true negative."""
    metrics = classification_metrics(
        ["accuracy", "f1", "matthews_correlation"], [1, 1, 0, 0, 1], [1, 0, 0, 1, 1], classes=2
    )
    assert metrics == pytest.approx({"accuracy": 3 / 5, "f1": 4 / 6, "matthews_correlation": 1 / 6})


def test_f1_of_more_classes_is_their_mean() -> None:
    metrics = classification_metrics(["f1"], [0, 1, 2, 2], [0, 1, 1, 2], classes=3)
    assert metrics["f1"] == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)


def test_correlations_equal_values_by_hand() -> None:
    metrics = classification_metrics(
        ["pearson", "spearmanr"], [1.0, 2.0, 3.0], [1.0, 2.0, 4.0], classes=1
    )
    assert metrics == pytest.approx({"pearson": 3 / math.sqrt(2 * 14 / 3), "spearmanr": 1.0})
    constant = classification_metrics(["pearson", "spearmanr"], [2.0, 2.0], [1.0, 3.0], classes=1)
    assert constant == {"pearson": 0.0, "spearmanr": 0.0}


def test_bleu_counts_n_grams_over_the_corpus() -> None:
    assert text_metrics(["bleu"], ["the cat sat here"], ["the cat sat here"], SPLIT)[
        "bleu"
    ] == pytest.approx(100)
    one = text_metrics(["bleu"], ["the cat sat on the mat"], ["the cat sat on a mat"], SPLIT)[
        "bleu"
    ]
    assert one == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)
    pooled = text_metrics(
        ["bleu"], ["the cat sat on the mat", "a b c d"], ["the cat sat on a mat", "a b c d"], SPLIT
    )["bleu"]
    assert pooled == pytest.approx(100 * (9 / 10 * 6 / 8 * 4 / 6 * 2 / 4) ** 0.25)


def test_rouge_equals_values_by_hand() -> None:
    written, target = "the cat sat", "the dog sat down"
    metrics = text_metrics(["rouge1", "rouge2", "rougeL"], [written], [target], SPLIT)
    assert metrics == pytest.approx({"rouge1": 100 * 4 / 7, "rouge2": 0.0, "rougeL": 100 * 4 / 7})
    mean = text_metrics(["rouge1"], [written, "same"], [target, "same"], SPLIT)
    assert mean["rouge1"] == pytest.approx((400 / 7 + 100) / 2)


def test_rouge_lsum_compares_sentences_in_any_order() -> None:
    """The longest common subsequence of the whole texts is only one sentence."""
    written, target = "A cat sat. Two dogs ran.", "Two dogs ran. A cat sat."
    metrics = text_metrics(["rougeL", "rougeLsum"], [written], [target], SPLIT)
    assert metrics == pytest.approx({"rougeL": 50.0, "rougeLsum": 100.0})


def test_first_metric_selects_the_best_model(tmp_path: Path) -> None:
    def best(kind: str, name: str | None = None, **task: Any) -> tuple[str, bool]:
        config = tiny_config("x", tmp_path, kind, task=task)
        return best_metric(config.task, name)

    assert best("classification") == ("accuracy", True)
    assert best("classification", "f1") == ("f1", True)
    assert best("classification", "loss") == ("loss", False)
    assert best("classification", glue="cola") == ("matthews_correlation", True)
    assert best("seq2seq", metrics=["rougeL", "bleu"]) == ("rougeL", True)
    assert best("causal_lm") == ("ppl", False)


def test_each_task_has_its_metrics() -> None:
    assert metric_names(Seq2SeqConfig(kind="seq2seq", source_column="a", target_column="b")) == (
        "bleu",
    )
    assert metric_names(CausalLmConfig(kind="causal_lm")) == ("ppl",)
    for name, glue in GLUE.items():
        settings = classification_settings(ClassificationConfig(kind="classification", glue=name))
        assert settings.metrics == glue.metrics
        assert (settings.sentence1, settings.sentence2) == glue.columns
        assert settings.regression == (name == "stsb") == (settings.labels is None)


@pytest.mark.parametrize(
    ("train", "task", "message"),
    [
        (
            {"best_metric": "bleu"},
            {},
            r"best_metric is 'bleu', which this task does not measure: .* accuracy, f1, loss",
        ),
        (
            {},
            {"metrics": ["pearson"]},
            r"pearson, which measures numbers, but the task predicts classes",
        ),
        (
            {},
            {"metrics": ["f1"], "regression": True},
            r"f1, which measures classes, but the task predicts numbers",
        ),
        (
            {},
            {"glue": "stsb", "labels": ["a", "b"]},
            r"names classes but task\.glue stsb predicts a number",
        ),
        (
            {},
            {"glue": "mnli", "labels": ["a", "b"]},
            r"names 2 classes \(a, b\) but task\.glue mnli has 3",
        ),
        (
            {},
            {"glue": "sst2", "regression": True},
            r"task\.glue sst2 has the classes negative, positive",
        ),
    ],
)
def test_metrics_of_another_task_are_refused(
    train: dict[str, Any], task: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config("x", tmp_path, "classification", train=train, task=task)


def test_metric_with_missing_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("x", tmp_path, "seq2seq", task={"metrics": ["bleu", "rougeL"]})
    check_installed(config)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "rouge_score" else name
    )
    with pytest.raises(
        ConfigError,
        match=r"rougeL of task\.kind seq2seq is computed by rouge_score, .*not installed",
    ):
        check_installed(config)


@pytest.mark.slow
def test_two_ranks_score_like_one(tmp_path: Path) -> None:
    """The last batch of the two ranks is padded."""
    _rank_cases.write_cases(tmp_path)
    serial = _rank_cases.run(tmp_path)
    first, second = run_distributed(2, _rank_cases.run, tmp_path)
    assert first == second
    assert first.keys() == serial.keys()
    for case, metrics in serial.items():
        assert first[case] == pytest.approx(metrics, rel=1e-5), case
    assert 0 < serial["seq2seq 9"]["rouge1"] < 100


def test_damaged_answers_cost_only_their_own_file(tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    write_answers(path, 1, 1, [])
    assert read_answers(path, 1) == []
    path.write_text("{")
    with pytest.raises(ArtifactError, match=rf": delete {path}$"):
        read_answers(path, 1)
