"""Shares of contaminated items: what is warned of, withheld, logged and shown."""

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from megacore.artifact import Artifact, StageKey
from megacore.artifact.files import write_json
from megacore.config import RunConfig, load_config
from megacore.errors import ConfigError, WorkspaceError
from tasks import _cache
from tasks.contamination import (
    REPORT,
    contamination_metrics,
    contamination_rows,
    contamination_summary,
    over_limit,
    warnings,
    withheld,
)
from tasks.zeroshot import without_hidden

SHARES = {
    "wikitext": (100, 2),
    "lambada": (50, 0),
    "lm_eval/arc": (10, 5),
    "lm_eval/arc_easy": (10, 0),
    "lm_eval/short": (0, 0),
    "test": (10, 9),
}


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    rows = {
        name: {
            "items": 100,
            "searched": searched,
            "contaminated": found,
            "share": found / searched if searched else None,
            "examples": [],
        }
        for name, (searched, found) in SHARES.items()
    }
    write_json(tmp_path / REPORT, {"removed": False, "benchmarks": rows})
    return Artifact(stage="contamination", key="k", path=str(tmp_path), digest="d", counts={})


def config_with(**values: Any) -> RunConfig:
    changes = {f"evaluate.{name}": value for name, value in values.items()}
    return load_config("gpt2-tiny", changes)


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))
    monkeypatch.setattr(_cache, "get_run_logger", lambda: logging.getLogger("test"))
    mkdir = Path.mkdir

    def refuse(path: Path, *arguments: Any, **values: Any) -> None:
        if path.name == "searches":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        mkdir(path, *arguments, **values)

    monkeypatch.setattr(Path, "mkdir", refuse)
    key = StageKey("search", 1, {}, {})
    message = f"cannot write {tmp_path}/searches: No space left on device: free some space"
    with pytest.raises(WorkspaceError, match=message):
        _cache.build_in_shards(config_with(), key, lambda directory, work: {})


def test_scores_above_the_limit_are_withheld_if_refused(artifact: Artifact) -> None:
    refuse = config_with(contamination="refuse")
    assert over_limit(refuse, artifact) == {"wikitext": 0.02, "lm_eval/arc": 0.5, "test": 0.9}
    assert withheld(refuse, artifact) == {"wikitext", "lm_eval/arc"}
    assert withheld(config_with(contamination="report"), artifact) == set()
    assert withheld(config_with(), None) == set()
    higher = config_with(contamination="refuse", contamination_limit=0.02)
    assert withheld(higher, artifact) == {"lm_eval/arc"}
    scores = {
        "wikitext_ppl": 1.0,
        "wikitext_token_ppl": 2.0,
        "lambada_ppl": 3.0,
        "lm_eval/arc/acc": 4.0,
        "lm_eval/arc_easy/acc": 5.0,
    }
    assert set(without_hidden(scores, withheld(refuse, artifact))) == {
        "lambada_ppl",
        "lm_eval/arc_easy/acc",
    }
    assert without_hidden(scores, ()) == scores


def test_share_has_one_name_everywhere(artifact: Artifact) -> None:
    config = config_with(contamination="refuse")
    assert contamination_metrics(artifact) == {
        "contamination/wikitext": 0.02,
        "contamination/lambada": 0.0,
        "contamination/lm_eval/arc": 0.5,
        "contamination/lm_eval/arc_easy": 0.0,
        "contamination/test": 0.9,
    }
    notes = {row[0]: (row[-2], row[-1]) for row in contamination_rows(config, artifact)}
    assert notes == {
        "wikitext": ("2.00%", "not published"),
        "lambada": ("0.00%", ""),
        "lm_eval/arc": ("50.00%", "not published"),
        "lm_eval/arc_easy": ("0.00%", ""),
        "lm_eval/short": ("–", ""),
        "test": ("90.00%", "above the limit"),
    }
    sentences = warnings(config, artifact)
    assert len(sentences) == 4
    assert any("lm_eval/short" in each and "cannot be searched" in each for each in sentences)
    summary = contamination_summary(config, artifact)
    assert all(f"**Warning:** {sentence}" in summary for sentence in sentences)
    assert "| wikitext | 100 | 100 | 2 | 2.00% | not published |" in summary
    assert contamination_summary(config, None) == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"evaluate.contamination_ngram": 8},
            "contamination_ngram is 8 but",
        ),
        ({"data.curate_workers": 2}, "curate_workers is 2 but data.curate has no steps"),
        (
            {
                "evaluate.contamination": "report",
                "data.source": {"kind": "prefix", "prefix": "a"},
                "data.tokenizer": {"kind": "hf", "name": "gpt2"},
            },
            "a source of kind prefix has tokens instead of text",
        ),
    ],
)
def test_values_without_effect_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("gpt2-tiny", changes)
    assert (
        load_config(
            "gpt2-tiny", {"evaluate.contamination": "remove", "data.curate_workers": 2}
        ).data.curate_workers
        == 2
    )
