"""Examples at the limits of a model: the shortest lengths, names of sample fields, and XLNet."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from megacore.errors import ConfigError
from megacore.finetune.task import build_task
from tests.finetune._tiny_models import (
    prepare,
    tiny_config,
    write_data,
    write_export,
    write_model,
    write_rows,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide models of three kinds and rows of each task."""
    directory = tmp_path_factory.mktemp("fit")
    for kind in ("bert", "blenderbot", "xlnet"):
        write_model(directory / kind, kind)
    for kind in ("classification", "multiple_choice", "seq2seq", "causal_lm"):
        write_data(directory / "data" / kind, kind, 8, 4)
    return directory


@pytest.mark.parametrize(
    ("kind", "model", "task", "message"),
    [
        (
            "classification",
            "bert",
            {"max_length": 4},
            r"task\.max_length is 4, .* of model\.path .*bert .* to 5 or more",
        ),
        (
            "classification",
            "bert",
            {"max_length": 2, "sentence2_column": None},
            "max_length is 2, .* to 3 or more",
        ),
        (
            "seq2seq",
            "blenderbot",
            {"max_source_length": 1},
            r"task\.max_source_length is 1, .* to 2 or more",
        ),
    ],
)
def test_length_without_room_for_text_is_refused(
    root: Path, tmp_path: Path, kind: str, model: str, task: dict[str, Any], message: str
) -> None:
    """The library would truncate nothing, or leave only special tokens."""
    with pytest.raises(ConfigError, match=message):
        prepare(
            tiny_config(root / model, root / "data" / kind, kind, task=task), tmp_path / "refused"
        )
    (name, length), *_ = task.items()
    config = tiny_config(root / model, root / "data" / kind, kind, task=task | {name: length + 1})
    accepted = build_task(config, *prepare(config, tmp_path / "accepted"))
    assert {len(row["input_ids"]) for row in accepted.split("train") or []} == {length + 1}


def test_length_needs_room_for_an_added_end_token(root: Path, tmp_path: Path) -> None:
    export = write_export(tmp_path / "export", "t5")
    task = {"sentence2_column": None, "max_length": 1}
    with pytest.raises(ConfigError, match=r"max_length is 1, .* to 2 or more"):
        prepare(
            tiny_config(export, root / "data/classification", "classification", task=task),
            tmp_path / "refused",
        )


def test_columns_may_have_the_names_of_sample_fields(root: Path, tmp_path: Path) -> None:
    rows = [{"labels": "the cat", "input_ids": "runs", "label": number} for number in (0, 1)]
    for split in ("train", "valid"):
        write_rows(tmp_path / f"data/{split}.jsonl", rows)
    columns = {"sentence1_column": "labels", "sentence2_column": "input_ids"}
    config = tiny_config(root / "bert", tmp_path / "data", "classification", task=columns)
    rows_read = build_task(config, *prepare(config, tmp_path)).split("train")
    assert [(row["labels"], row["input_ids"]) for row in rows_read or []] == [
        (0, [2, 4, 12, 3, 20, 3]),
        (1, ANY),
    ]


@pytest.mark.parametrize("kind", ["classification", "multiple_choice"])
def test_padding_leaves_text_at_the_end_for_xlnet(root: Path, tmp_path: Path, kind: str) -> None:
    config = tiny_config(root / "xlnet", root / "data" / kind, kind)
    task = build_task(config, *prepare(config, tmp_path))
    model: Any = task.build_model().eval()
    rows = list(task.split("train") or [])
    assert len({len(row["input_ids"]) for row in rows}) > 1

    def logits(rows: list[Any]) -> torch.Tensor:
        batch = task.collate(rows)
        with torch.no_grad():
            outputs: torch.Tensor = model(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
            ).logits
        return outputs

    torch.testing.assert_close(
        logits(rows), torch.cat([logits([row]) for row in rows]), rtol=1e-4, atol=1e-5
    )


def test_xlnet_is_refused_for_causal_lm(root: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"is XLNetLMHeadModel, an encoder, .*takes a decoder.*classification"
    ):
        prepare(tiny_config(root / "xlnet", root / "data/causal_lm", "causal_lm"), tmp_path)


def test_only_kinds_that_fit_a_model_are_proposed(root: Path, tmp_path: Path) -> None:
    """Whisper is an encoder-decoder, but not of texts."""
    directory = tmp_path / "speech"
    shutil.copytree(root / "bert", directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "whisper"}))
    config = tiny_config(directory, root / "data/classification", "classification")
    with pytest.raises(ConfigError, match=r"is whisper, an encoder-decoder, .*give such a model$"):
        prepare(config, tmp_path)
