"""Tests of tokenizing one shard of a corpus as a task."""

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from megacore.artifact import Artifact, StageKey
from megacore.config import RunConfig, load_config
from megacore.corpus.segments import segments
from megacore.errors import DataFormatError
from megacore.tokenizer import tokenize
from tasks import tokenize as stage
from tests._limits import HANG
from tests.corpus._files import collect_changing_file


def artifacts(folder: Path) -> list[Artifact]:
    """Return the artifacts of a corpus and a tokenizer in `folder`."""
    return [
        Artifact(stage=name, key="", path=str(folder / name), digest=name, counts={})
        for name in ("corpus", "tokenizer")
    ]


@pytest.mark.parametrize("before", [True, False])
def test_a_shard_of_a_file_that_changes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    overwrite = collect_changing_file(tmp_path)
    (tmp_path / "out").mkdir()
    parts = tuple(segments(tmp_path / "corpus"))

    def build(
        config: RunConfig, key: StageKey, fill: Callable[[Path], dict[str, Any]]
    ) -> dict[str, Any]:
        return fill(tmp_path / "out")

    monkeypatch.setattr(stage, "build", build)
    monkeypatch.setattr(tokenize, "tokenize_shard", pytest.fail if before else overwrite)
    if before:
        overwrite()
    with pytest.raises(DataFormatError, match=r"a\.jsonl has changed since it was collected"):
        stage.tokenize_shard.fn(load_config("gpt2-tiny"), *artifacts(tmp_path), None, parts)


def test_a_file_that_changes_after_its_shard_is_refused_by_the_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overwrite = collect_changing_file(tmp_path)
    (tmp_path / "out").mkdir()

    class Runner:
        def submit(self, task: Any, parameters: dict[str, Any]) -> Future[None]:
            future = Future[None]()
            future.set_result(None)
            return future

    monkeypatch.setattr(stage, "get_run_logger", logging.getLogger)
    monkeypatch.setattr(stage, "shard_runner", lambda data: nullcontext(Runner()))
    monkeypatch.setattr(tokenize, "merge_shards", overwrite)
    config = load_config("gpt2-tiny", {"data.shard_mb": 1})
    with pytest.raises(DataFormatError, match=r"a\.jsonl has changed since it was collected"):
        stage.tokenize_in_shards(config, *artifacts(tmp_path), None, tmp_path / "out", [])


def test_end_of_the_newest_process_is_seen_while_another_shard_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start: Any = getattr(ProcessPoolExecutor, "_spawn_process")  # noqa: B009 (private)

    def start_slowly(pool: ProcessPoolExecutor) -> None:
        time.sleep(0.5)  # until the pool waits for the processes that it has
        start(pool)

    monkeypatch.setattr(ProcessPoolExecutor, "_spawn_process", start_slowly)
    overrides = {"data.shard_runner": "processes", "data.shard_workers": 2, "data.shard_mb": 1}
    runner: Any = stage.shard_runner(load_config("gpt2-tiny", overrides).data)
    runner.__enter__()
    try:
        runner._executor.submit(time.sleep, 2 * HANG)
        newest = runner._executor.submit(os._exit, 1)
        with pytest.raises(BrokenProcessPool):
            newest.result(HANG)
    finally:
        runner.__exit__(None, None, None)


def test_a_cancelled_flow_does_not_wait_for_its_shards() -> None:
    overrides = {"data.shard_runner": "processes", "data.shard_workers": 1, "data.shard_mb": 1}
    runner: Any = stage.shard_runner(load_config("gpt2-tiny", overrides).data)
    start = time.monotonic()
    runner.__enter__()
    runner._executor.submit(time.sleep, 2 * HANG)
    runner.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert time.monotonic() - start < 120
