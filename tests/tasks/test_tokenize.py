"""Checks of the tokenizer, and division of the cores among corpora that are tokenized at once."""

from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from megacore.artifact import Artifact
from megacore.config import RunConfig, load_config
from megacore.errors import ConfigError
from tasks._cache import artifact_directory
from tasks.tokenize import make_tokenizer, share_cores, tokenize_key
from tests.tokenizer._corpora import TEXTS, train_tokenizer, write_corpus


def config(**data: Any) -> RunConfig:
    blend = [
        {"weight": 1, "source": {"kind": "jsonl", "files": [f"/data/{name}.jsonl"]}}
        for name in "abc"
    ]
    values = {f"data.{name}": value for name, value in data.items()}
    return load_config("gpt2-tiny", {"data.source": None, "data.blend": blend, **values})


def inputs(*sizes: int) -> list[tuple[Artifact, Artifact, None]]:
    tokenizer = Artifact(stage="tokenizer", key="", path="", digest="t", counts={})
    corpora = (
        Artifact(stage="collect", key=str(size), path="", digest=f"c{size}", counts={"bytes": size})
        for size in sizes
    )
    return [(corpus, tokenizer, None) for corpus in corpora]


@pytest.mark.parametrize(
    ("cores", "sizes", "data", "expected"),
    [
        (8, (600, 150, 50), {}, (8, [6, 2, 1])),
        (2, (10, 10, 10), {}, (2, [1, 1, 1])),
        (8, (600, 150, 50), {"workers": 3}, (2, [3, 3, 3])),
        (2, (600, 150, 50), {"workers": 3}, (1, [3, 3, 3])),
        (8, (600, 150, 50), {"shard_mb": 1}, (1, [None] * 3)),
    ],
)
def test_corpora_share_the_cores_by_size(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cores: int,
    sizes: tuple[int, ...],
    data: dict[str, int],
    expected: tuple[int, list[int | None]],
) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    at_once, configs = share_cores(config(**data), inputs(*sizes))
    assert (at_once, [each.data.workers for each in configs]) == expected


def test_a_tokenized_corpus_needs_no_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    each = inputs(600, 150, 150)
    artifact_directory(tokenize_key(config(), *each[0])).mkdir(parents=True)
    _, configs = share_cores(config(), each)
    assert [each.data.workers for each in configs] == [1, 4, 4]


def test_a_vocabulary_without_the_tokens_of_fim_is_refused_before_it_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))
    directory = train_tokenizer(tmp_path / "given", write_corpus(tmp_path / "corpus", TEXTS))
    tokenizer = {"kind": "hf", "name": str(directory)}
    with disable_run_logger():
        make_tokenizer.fn(config(tokenizer=tokenizer), ())
        with pytest.raises(ConfigError, match=r"^data\.fim needs the tokens <fim_prefix>, <fim_m"):
            make_tokenizer.fn(config(tokenizer=tokenizer, fim={}), ())
