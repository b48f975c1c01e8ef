"""Checks of the tokenizer, and division of the cores among corpora that are tokenized at once."""

import logging
from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from megacore.artifact import Artifact
from megacore.config import RunConfig, load_config
from megacore.errors import ConfigError
from megacore.token_files.indexed_dataset import TOKENS_NAMES
from tasks import tokenize as module
from tasks._cache import artifact_directory
from tasks._plots import LENGTHS_FILE
from tasks.tokenize import make_tokenizer, share_cores, tokenize_key
from tests.data._files import write_tokens
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


def test_a_server_that_is_down_does_not_fail_a_tokenized_corpus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def fail(*values: object, **options: object) -> None:
        raise ConnectionError("no server")

    monkeypatch.setattr(module, "create_markdown_artifact", fail)
    monkeypatch.setattr("prefect.get_run_logger", lambda: logging.getLogger("test"))
    write_tokens(tmp_path / TOKENS_NAMES[0], [3, 5])
    tokens = Artifact(stage="tokenize", key="k", path=str(tmp_path), digest="", counts={})
    module._show_lengths(config(), tokens)
    assert (tmp_path / LENGTHS_FILE).is_file()
    assert caplog.messages == ["the plot of the lengths was not stored: no server"]
