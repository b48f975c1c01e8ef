"""Tests of tokenizing one shard of a corpus as a task."""

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from megacore.artifact import Artifact, StageKey
from megacore.config import RunConfig, load_config
from megacore.config.data import JsonlSource
from megacore.corpus.collect import collect
from megacore.corpus.segments import segments
from megacore.errors import DataFormatError
from megacore.tokenizer import tokenize
from tasks import shards


@pytest.mark.parametrize("before", [True, False])
def test_a_shard_of_a_file_that_changes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n')
    for name in ("corpus", "out"):
        (tmp_path / name).mkdir()
    collect(JsonlSource(kind="jsonl", files=(str(file),)), tmp_path / "corpus")
    parts = tuple(segments(tmp_path / "corpus"))

    def overwrite(*arguments: Any, **options: Any) -> dict[str, int]:
        file.write_text('{"text": "two"}\n')
        os.utime(file, (1, 1))
        return {}

    def build(
        config: RunConfig, key: StageKey, fill: Callable[[Path], dict[str, Any]]
    ) -> dict[str, Any]:
        return fill(tmp_path / "out")

    monkeypatch.setattr(shards, "build", build)
    monkeypatch.setattr(tokenize, "tokenize_shard", pytest.fail if before else overwrite)
    if before:
        overwrite()
    corpus, tokenizer = (
        Artifact(stage=name, key="", path=str(tmp_path / name), digest=name, counts={})
        for name in ("corpus", "tokenizer")
    )
    with pytest.raises(DataFormatError, match=r"a\.jsonl has changed since it was collected"):
        shards.tokenize_shard.fn(load_config("gpt2-tiny"), corpus, tokenizer, None, parts)


def test_a_file_that_changes_after_its_shard_is_refused_by_the_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n')
    for name in ("corpus", "out"):
        (tmp_path / name).mkdir()
    collect(JsonlSource(kind="jsonl", files=(str(file),)), tmp_path / "corpus")

    def overwrite(*arguments: Any) -> dict[str, int]:
        file.write_text('{"text": "two"}\n')
        os.utime(file, (1, 1))
        return {}

    class Runner:
        def submit(self, task: Any, parameters: dict[str, Any]) -> Future[None]:
            future = Future[None]()
            future.set_result(None)
            return future

    monkeypatch.setattr(shards, "get_run_logger", logging.getLogger)
    monkeypatch.setattr(shards, "shard_runner", lambda data: nullcontext(Runner()))
    monkeypatch.setattr(tokenize, "merge_shards", overwrite)
    corpus, tokenizer = (
        Artifact(stage=name, key="", path=str(tmp_path / name), digest=name, counts={})
        for name in ("corpus", "tokenizer")
    )
    config = load_config("gpt2-tiny", {"data.shard_mb": 1})
    with pytest.raises(DataFormatError, match=r"a\.jsonl has changed since it was collected"):
        shards.tokenize_in_shards(config, corpus, tokenizer, None, tmp_path / "out", [])
