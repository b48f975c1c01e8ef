"""A few validation samples with what the model says of them, for a reader."""

from collections.abc import Iterator
from typing import Any

import torch

from megacore.config.finetune import FinetuneConfig
from megacore.finetune.gate import Exported
from megacore.finetune.scoring import rows_of
from megacore.finetune.seq2seq import Seq2SeqTask
from megacore.finetune.task import FinetuneTask

_COUNT = 5
_TOKENS = 32
"""New tokens of a continuation."""


def sample_text(config: FinetuneConfig, task: FinetuneTask, exported: Exported) -> str:
    """Input, target and prediction of the first validation samples."""
    rows = rows_of(task, "valid")
    parts = []
    for number in range(min(_COUNT, len(rows))):
        lines = _lines(config, task, exported, rows[number])
        parts.append("\n".join(f"{name}: {' '.join(text.split())}" for name, text in lines))
    return "\n\n".join(parts) + "\n"


def _lines(config: FinetuneConfig, task: FinetuneTask, exported: Exported, row: Any) -> Iterator[tuple[str, str]]:
    model, tokenizer = exported.model, exported.tokenizer
    device = next(model.parameters()).device
    batch = {name: tensor.to(device) for name, tensor in task.collate([row]).items()}
    labels = batch.pop("labels")[0]

    def text(ids: torch.Tensor) -> str:
        kept = ids[ids >= 0]
        return str(tokenizer.decode(kept, skip_special_tokens=True))

    with torch.no_grad():
        match config.task.kind:
            case "classification":
                yield "text", text(batch["input_ids"][0])
                logits = model(**batch).logits[0].float()
                names = model.config.id2label
                if config.task.regression or len(logits) == 1:
                    yield "label", f"{float(labels):g}"
                    yield "prediction", f"{float(logits[0]):.3f}"
                else:
                    chosen = int(logits.argmax())
                    yield "label", str(names[int(labels)])
                    yield "prediction", f"{names[chosen]} ({float(logits.softmax(0)[chosen]):.2f})"
            case "seq2seq":
                ids = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
                assert isinstance(task, Seq2SeqTask)
                written = model.generate(**ids, generation_config=task.generation(model))  # as its scores were made
                yield "source", text(batch["input_ids"][0])
                yield "target", text(labels)
                yield "prediction", text(written[0])
            case "causal_lm":
                half = max(1, batch["input_ids"].shape[1] // 2)
                begun = batch["input_ids"][:, :half]
                rest = batch["input_ids"][0, half:][:_TOKENS]
                written = model.generate(
                    begun,
                    attention_mask=torch.ones_like(begun),
                    max_new_tokens=max(1, len(rest)),
                    do_sample=False,
                    pad_token_id=tokenizer.pad_token_id
                    if tokenizer.pad_token_id is not None
                    else tokenizer.eos_token_id,
                )
                yield "text", text(begun[0])
                yield "target", text(rest)
                yield "prediction", text(written[0, half:])
