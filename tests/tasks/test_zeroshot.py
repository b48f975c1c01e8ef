"""Keys, refusals and reports of zero-shot scores."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.artifact import Artifact
from megacore.checkpoint.save import save_checkpoint
from megacore.config import RunConfig
from megacore.config.checks import _check_zero_shot
from megacore.config.load import parse_config
from megacore.errors import ConfigError
from tasks._checkpoint_models import log_scores
from tasks._mlflow import RunFacts, Tracking
from tasks._mlflow_events import Forwarder
from tasks._plan import DryRun, UnbuiltArtifact
from tasks.evaluate import Target, score_key
from tasks.index import RunData
from tasks.preflight import plan_publication
from tasks.publish import _send_scores
from tasks.zeroshot import REPORT, named_scores, text_digests, zeroshot_key, zeroshot_summary
from tests.tasks.conftest import make_config
from tests.tasks.events import EventLog
from tests.zeroshot import _texts

SCORES = """{
 "wikitext": {"word_ppl": 1234.5, "token_ppl": 67.89, "overlapping_eval": 8, "seq_length": 16},
 "lambada": {"accuracy": 0.25, "correct": 1288, "passages": 5152, "target_ppl": 40.0},
 "passkey": {"accuracy": 0.5, "ranked_accuracy": 0.75, "chance": 0.1, "prompts": 40, "cells": [
  {"length": 512, "depth": 0.0, "prompts": 20, "accuracy": 0.25, "ranked_accuracy": 0.5},
  {"length": 512, "depth": 1.0, "prompts": 20, "accuracy": 0.75, "ranked_accuracy": 1.0}]}
}"""


def config_with(**zero_shot: Any) -> RunConfig:
    values = make_config().model_dump(mode="json")
    return parse_config(values | {"evaluate": {"zero_shot": zero_shot}}, origin="test")


def artifact(stage: str, **counts: Any) -> Artifact:
    return Artifact(stage=stage, key="ab" * 8, path="/", digest=stage * 8, counts=counts)


def keys(config: RunConfig) -> tuple[str, str]:
    """Return the keys of a checkpoint's scores and of its perplexities."""
    target = Target("iter_0000010", "/", "digest")
    return (
        zeroshot_key(config, artifact("tokenizer"), target).key,
        score_key(config, artifact("index"), target).key,
    )


def test_key_depends_on_the_content_of_a_text_and_not_its_name(tmp_path: Path) -> None:
    text = _texts.write_wikitext(tmp_path / "wiki")
    copy = Path(shutil.copy(text, tmp_path / "copy"))
    first = keys(config_with(wikitext=str(text)))
    assert keys(config_with(wikitext=str(copy))) == first
    assert keys(config_with(wikitext=str(text), overlapping_eval=8))[0] != first[0]
    copy.write_text("another text", encoding="utf-8")
    assert keys(config_with(wikitext=str(copy)))[0] != first[0]
    assert keys(config_with(lambada=str(text)))[0] != first[0]


def test_perplexity_key_ignores_the_text(tmp_path: Path) -> None:
    text = _texts.write_wikitext(tmp_path / "wiki")
    assert keys(config_with(wikitext=str(text)))[1] == keys(config_with())[1]


def test_stage_is_planned_only_with_a_text(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    for iteration in (10, 20):
        save_checkpoint(checkpoints, iteration, {"model.a": torch.ones(3)}, {})
    missing = UnbuiltArtifact.of("index")
    finished = artifact("train").model_copy(update={"path": str(tmp_path)})

    def names(trained: Artifact = finished, **zero_shot: Any) -> list[str]:
        plan = DryRun(config_with(**zero_shot))
        plan_publication(plan, trained, RunData(missing, missing, missing))
        return [row["stage"] for row in plan.planned]

    text = str(tmp_path / "lambada")
    perplexities = ["evaluate iter_0000010", "evaluate iter_0000020", "evaluate unigram"]
    rest = ["convert", "publish"]
    assert names(lambada=text) == [
        *perplexities,
        "evaluate",
        "zeroshot iter_0000010",
        "zeroshot iter_0000020",
        *rest,
    ]
    assert names(lambada=text, checkpoints="best") == [
        *perplexities,
        "evaluate",
        "zeroshot",
        *rest,
    ]
    assert names() == [*perplexities, "evaluate", *rest]
    unknown = names(UnbuiltArtifact.of("train"), lambada=text)
    assert unknown == ["evaluate unigram", "evaluate", "zeroshot", *rest]


def test_a_passkey_needs_no_text() -> None:
    without, short = keys(config_with()), keys(config_with(passkey={"lengths": [8]}))
    assert config_with(passkey={"lengths": [8]}).evaluate.zero_shot.requested
    assert short[0] != without[0]
    assert short[1] == without[1]
    seeded = {"lengths": [8], "seed": 1}
    assert keys(config_with(passkey=seeded))[0] != short[0]


def test_each_passkey_cell_is_a_metric() -> None:
    metrics = named_scores(json.loads(SCORES))
    passkeys = {name: value for name, value in metrics.items() if name.startswith("passkey")}
    assert passkeys == {
        "passkey_accuracy": 0.5,
        "passkey_accuracy/0000512/0": 0.25,
        "passkey_accuracy/0000512/1": 0.75,
        "passkey_ranked_accuracy": 0.75,
        "passkey_ranked_accuracy/0000512/0": 0.5,
        "passkey_ranked_accuracy/0000512/1": 1.0,
    }


def test_missing_text_is_refused(tmp_path: Path) -> None:
    config = config_with(wikitext=str(tmp_path / "nowhere"))
    with pytest.raises(
        ConfigError,
        match=r"evaluate.zero_shot.wikitext is .*nowhere, which cannot be read: No such",
    ):
        text_digests(config)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"overlapping_eval": 8},
            "overlapping_eval is 8 but there is no evaluate.zero_shot.wikitext",
        ),
        (
            {"wikitext": "a", "overlapping_eval": 17},
            "overlapping_eval 17 exceeds data.seq_length 16",
        ),
        ({"wikitext": ""}, "evaluate.zero_shot.wikitext"),
        (
            {"passkey": {"lengths": [8, 17]}},
            "passkey.lengths has 17 but the model has 16 positions",
        ),
        ({"passkey": {"lengths": [8, 8]}}, "8 is given more than once"),
        ({"passkey": {"lengths": [8], "depths": [1.5]}}, "evaluate.zero_shot.passkey.depths"),
    ],
)
def test_contradictory_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_with(**values)


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_other_families_are_refused(family: str) -> None:
    config = config_with(lambada="a").model_copy(update={"family": family})
    passkey = config_with(passkey={"lengths": [8]}).model_copy(update={"family": family})
    with pytest.raises(ValueError, match=r"passkey.lengths is \[8\] but family is"):
        _check_zero_shot(passkey)
    with pytest.raises(
        ValueError, match=f"zero_shot.lambada is a but family is {family}: only gpt predicts a text"
    ):
        _check_zero_shot(config)


def test_scores_are_logged_once_to_run_and_checkpoint(
    tracking: Tracking, log: EventLog, run_directory: Path, config: RunConfig, facts: RunFacts
) -> None:
    log.checkpoint(100, 3.0)
    run_id = Forwarder(tracking, run_directory, config, facts).flush()
    scores = {"wikitext_ppl": 40.5, "lambada_accuracy": 0.25}
    for moment in (1, 2):
        log_scores(tracking, run_id, 100, scores, timestamp_ms=moment)
    log_scores(tracking, run_id, 100, {"wikitext_ppl": 39.0}, timestamp_ms=3)
    history = tracking.client.get_metric_history(run_id, "wikitext_ppl")
    assert [(metric.value, metric.step) for metric in history] == [(40.5, 100), (39.0, 100)]
    assert len(tracking.client.get_metric_history(run_id, "lambada_accuracy")) == 1
    (model,) = tracking.client.search_logged_models([tracking.experiment_id])
    assert {"lambada_accuracy": 0.25}.items() <= {
        metric.key: metric.value for metric in model.metrics
    }.items()


def test_scores_of_a_checkpoint_that_mlflow_lacks_are_logged_once(
    tracking: Tracking, log: EventLog, run_directory: Path, config: RunConfig, facts: RunFacts
) -> None:
    log.checkpoint(100, 3.0)
    run_id = Forwarder(tracking, run_directory, config, facts).flush()
    for moment, value in enumerate((40.5, 40.5, 39.0, 39.0), 1):
        log_scores(tracking, run_id, 200, {"wikitext_ppl": value}, timestamp_ms=moment)
    history = tracking.client.get_metric_history(run_id, "wikitext_ppl")
    assert [(metric.value, metric.step) for metric in history] == [(40.5, 200), (39.0, 200)]


def test_publication_sends_the_scores_to_a_store_that_lacks_them(
    tracking: Tracking,
    log: EventLog,
    run_directory: Path,
    config: RunConfig,
    facts: RunFacts,
    tmp_path: Path,
) -> None:
    log.checkpoint(100, 3.0)
    run_id = Forwarder(tracking, run_directory, config, facts).flush()
    (tmp_path / REPORT).write_text(SCORES, encoding="utf-8")
    counts = {"checkpoint": "iter_0000100", "iteration": 100}
    scored = artifact("zeroshot", **counts).model_copy(update={"path": str(tmp_path)})
    for _ in range(2):
        _send_scores(config, tracking, run_id, (scored,), None)
    (metric,) = tracking.client.get_metric_history(run_id, "lambada_accuracy")
    assert (metric.value, metric.step) == (0.25, 100)
    (model,) = tracking.client.search_logged_models([tracking.experiment_id])
    assert {metric.key for metric in model.metrics} >= named_scores(json.loads(SCORES)).keys()


def test_summary_is_a_table(tmp_path: Path) -> None:
    (tmp_path / REPORT).write_text(SCORES, encoding="utf-8")
    scored = Artifact(
        stage="zeroshot",
        key="k",
        path=str(tmp_path),
        digest="d",
        counts={"checkpoint": "iter_0000010"},
    )
    later = scored.model_copy(update={"counts": {"checkpoint": "iter_0000020"}})
    words, tokens = (f"WikiText PPL per {unit}, windows 8 apart" for unit in ("word", "token"))
    assert zeroshot_summary([scored, later]).splitlines() == [
        "",
        (
            f"| zero-shot | {words} | {tokens} | LAMBADA accuracy of 5,152 "
            "| passkey accuracy of 40 | passkey ranked accuracy, chance 10.00% |"
        ),
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| iter_0000010 | 1,234.50 | 67.89 | 25.00% | 50.00% | 75.00% |",
        "| iter_0000020 | 1,234.50 | 67.89 | 25.00% | 50.00% | 75.00% |",
    ]
    assert zeroshot_summary([]) == ""
