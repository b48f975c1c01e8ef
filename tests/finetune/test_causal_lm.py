"""Fine-tuning of decoders on running text."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.errors import ConfigError
from megacore.finetune.task import build_task
from tests.finetune._tiny_models import (
    learn,
    prepare,
    scores,
    tiny_config,
    write_data,
    write_export,
    write_model,
)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gpt2")
    write_model(root / "model", "gpt2")
    write_data(root / "data", "causal_lm")
    prepare(tiny_config(root / "model", root / "data", "causal_lm"), root)
    return root


def task_of(root: Path, **sections: dict[str, Any]) -> Any:
    config = tiny_config(root / "model", root / "data", "causal_lm", **sections)
    return build_task(config, root / "examples", root / "pretrained")


def test_perplexity_is_over_all_tokens(gpt2: Path, accelerator: Any) -> None:
    task = task_of(gpt2)
    model = task.build_model().eval()
    rows = task.split("valid")
    with torch.no_grad():
        ids = torch.tensor([row["input_ids"] for row in rows])
        chosen = torch.log_softmax(model(ids).logits[:, :-1], -1).gather(-1, ids[:, 1:, None])
    metrics = scores(task, model, accelerator)
    assert metrics["loss"] == pytest.approx(-float(chosen.mean()), rel=1e-5)
    assert metrics["ppl"] == pytest.approx(math.exp(metrics["loss"]))
    assert (task.metric, task.larger_is_better) == ("ppl", False)


def test_batch_contains_complete_blocks(gpt2: Path) -> None:
    task = task_of(gpt2)
    batch = task.collate(task.largest_rows(2))
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == dict.fromkeys(
        ("input_ids", "attention_mask", "labels"), (2, 16)
    )
    assert torch.equal(batch["input_ids"], batch["labels"])


@pytest.mark.parametrize("source", ["gpt2", "export"])
def test_decoders_learn(source: str, gpt2: Path, tmp_path: Path, accelerator: Any) -> None:
    if source == "export":
        config = tiny_config(write_export(tmp_path / "export", "gpt"), gpt2 / "data", "causal_lm")
        task: Any = build_task(config, *prepare(config, tmp_path))
    else:
        task = task_of(gpt2)
    model = task.build_model()
    start = scores(task, model, accelerator)
    learn(task, model, 5)
    assert scores(task, model, accelerator)["ppl"] < 0.8 * start["ppl"]


def test_model_without_head_weights_is_refused(gpt2: Path, tmp_path: Path) -> None:
    """Missing weights of an untied head would be random without a warning."""
    write_model(tmp_path / "model", "gpt2", tie_word_embeddings=False)
    from safetensors.torch import load_file, save_file

    path = tmp_path / "model/model.safetensors"
    tensors = load_file(path)
    tensors.pop("lm_head.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    config = tiny_config("bare", gpt2 / "data", "causal_lm")
    with pytest.raises(
        ConfigError, match=r"bare lacks 1 of the weights of GPT2LMHeadModel, lm_head\.weight first"
    ):
        build_task(config, gpt2 / "examples", tmp_path).build_model()
