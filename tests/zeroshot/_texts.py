"""Small texts for WikiText and LAMBADA."""

import json
from pathlib import Path

import numpy as np

WORDS = (
    "the",
    "value",
    "of",
    "step",
    "is",
    "not",
    "sum",
    "@-@",
    ",",
    ".",
    "( 5 )",
    "<unk>",
    "großer",
)


def write_wikitext(path: Path, words: int = 900) -> Path:
    """Write random words, separated by spaces, in lines."""
    random = np.random.RandomState(2)
    lines = [" ".join(random.choice(WORDS, 30)) for _ in range(words // 30)]
    path.write_text(" \n = Title = \n \n " + " \n ".join(lines) + " \n ", encoding="utf-8")
    return path


def write_lambada(path: Path, passages: int = 30) -> Path:
    """Write random passages, the longest of which exceeds a tiny model's positions."""
    random = np.random.RandomState(3)
    lengths = [2, *random.randint(3, 30, passages - 2), 90]
    lines = [json.dumps({"text": " ".join(random.choice(WORDS[:7], length))}) for length in lengths]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
