"""A text that shows what an exported model writes."""

from pathlib import Path
from typing import Any

import torch

from megacore.artifact.files import workspace_errors


def write_sample(path: Path, model: Any, tokenizer: Any, *, prompt: str, new_tokens: int, seed: int) -> str:
    """Let a transformers model continue `prompt` by `new_tokens` tokens, sampled as its generation config says.

    The end-of-document token is not drawn, and the text may be longer than the model's positions: the model then
    sees the last half of them. Writes prompt and continuation to `path` and returns them; the same seed gives the
    same text. Raises WorkspaceError.
    """
    positions = model.config.max_position_embeddings
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]
    wanted = len(ids) + new_tokens
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(seed)
        while len(ids) < wanted:
            seen = torch.tensor([ids[-max(1, positions // 2) :]])
            count = min(wanted - len(ids), positions - seen.shape[1])
            written = model.generate(
                seen, attention_mask=torch.ones_like(seen), max_new_tokens=count, min_new_tokens=count
            )
            ids = ids + written[0, seen.shape[1] :].tolist()
    text = str(tokenizer.decode(ids, skip_special_tokens=True))
    with workspace_errors(path):
        path.write_text(text + "\n", encoding="utf-8")
    return text
