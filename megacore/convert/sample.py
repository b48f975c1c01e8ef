"""A text that shows what an exported model writes, or fills in."""

from pathlib import Path
from typing import Any

import torch

from megacore.artifact.files import workspace_errors

_CANDIDATES = 5
"""Tokens that are shown for a mask."""
_SENTINEL = "<extra_id_0>"


def write_sample(
    path: Path, family: str, model: Any, tokenizer: Any, *, prompt: str, new_tokens: int, seed: int
) -> str:
    """Write what a transformers model makes of `prompt` to `path`, and return it; the same seed gives the same text.

    A causal model continues it by `new_tokens` tokens, sampled as its generation config says. BERT's best tokens for
    each mask are shown, and what T5 writes for its sentinels; without one in the prompt it stands at the end. Raises
    WorkspaceError.
    """
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(seed)
        match family:
            case "bert":
                text = _filled_masks(model, tokenizer, prompt)
            case "t5":
                text = _filled_spans(model, tokenizer, prompt, new_tokens)
            case _:
                text = _continued(model, tokenizer, prompt, new_tokens)
    with workspace_errors(path):
        path.write_text(text + "\n", encoding="utf-8")
    return text


def _continued(model: Any, tokenizer: Any, prompt: str, new_tokens: int) -> str:
    """The end-of-document token is not drawn.

    The text may be longer than the model's positions: it then sees the last half of them.
    """
    positions = model.config.max_position_embeddings
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]
    wanted = len(ids) + new_tokens
    while len(ids) < wanted:
        seen = torch.tensor([ids[-max(1, positions // 2) :]])
        count = min(wanted - len(ids), positions - seen.shape[1])
        written = model.generate(seen, attention_mask=torch.ones_like(seen), max_new_tokens=count, min_new_tokens=count)
        ids = ids + written[0, seen.shape[1] :].tolist()
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def _filled_masks(model: Any, tokenizer: Any, prompt: str) -> str:
    """The prompt, and for each of its masks the most likely tokens."""
    if tokenizer.mask_token not in prompt:
        prompt = f"{prompt.rstrip()} {tokenizer.mask_token}"
    positions = model.config.max_position_embeddings
    words = tokenizer(prompt, add_special_tokens=False)["input_ids"][-(positions - 2) :]
    ids = torch.tensor([[tokenizer.cls_token_id, *words, tokenizer.sep_token_id]])
    found = model(ids)
    logits = found.prediction_logits if hasattr(found, "prediction_logits") else found.logits
    lines = [prompt]
    for place in (ids[0] == tokenizer.mask_token_id).nonzero().flatten().tolist():
        shares, tokens = logits[0, place].float().softmax(-1).topk(_CANDIDATES)
        named = (
            f"{tokenizer.decode([token])!r} {share:.1%}"
            for token, share in zip(tokens.tolist(), shares.tolist(), strict=True)
        )
        lines.append(f"{tokenizer.mask_token}: {', '.join(named)}")
    return "\n".join(lines)


def _filled_spans(model: Any, tokenizer: Any, prompt: str, new_tokens: int) -> str:
    """The prompt, and what the decoder writes for its sentinels."""
    if _SENTINEL not in prompt:
        prompt = f"{prompt.rstrip()} {_SENTINEL}"
    words = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([[*words, model.config.eos_token_id]])
    written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return f"{prompt}\n{tokenizer.decode(written[0], skip_special_tokens=False)}"
