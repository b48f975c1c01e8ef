"""Continuations and scores of each of two ranks, with halves of the layers or of the batches."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megacore.convert.model_source import find_model
from megacore.generate.generate import generate
from megacore.generate.weights import load_model
from megacore.jobs.model import GenerateOptions
from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.rank_layout import RankLayout
from megacore.tokenizer import load_tokenizer
from megacore.zeroshot.score import ZeroshotScorer
from megacore.zeroshot.texts import read_lambada, read_wikitext
from tests._dist import still_alive
from tests.generate import _tiny

VOCAB = 300
OPTIONS = (
    GenerateOptions(max_new_tokens=20),
    GenerateOptions(max_new_tokens=20, top_p=0.9, seed=8),
)


def run(root: Path) -> dict[str, Any]:
    """Return continuations of each model below `root` and scores of the first, for every layout."""
    if not dist.is_initialized():
        return on_mesh(root, ProcessMesh.serial())
    meshes = {"tensor": RankLayout(tensor=2), "data": RankLayout(data=2)}
    results = {}
    for name, layout in meshes.items():
        results[name] = on_mesh(root, ProcessMesh.build(layout))
        still_alive()
    return results


def on_mesh(root: Path, mesh: ProcessMesh) -> dict[str, Any]:
    """Return continuations and scores on one mesh."""
    device, results = torch.device("cpu"), {}
    for kind in _tiny.KINDS:
        model = load_model(find_model(root / kind), mesh, device=device, dtype=torch.float32)
        prompts = _tiny.prompts((5, 1, 17), VOCAB)
        results[kind] = [
            [
                continuation.tokens
                for continuation in generate(
                    model, prompts, options, vocab_size=VOCAB, ends=[_tiny.EOD]
                )
            ]
            for options in OPTIONS
        ]
    model = load_model(find_model(root / "gpt2"), mesh, device=device, dtype=torch.float32)
    tokenizer = load_tokenizer(root / "tokenizer")
    scorer = ZeroshotScorer(model, mesh, device, vocab_size=VOCAB, batch_size=4)
    results["wikitext"] = scorer.wikitext(
        read_wikitext(root / "wiki", tokenizer), _tiny.POSITIONS, 40
    )
    results["lambada"] = scorer.lambada(
        read_lambada(root / "lambada.jsonl", tokenizer), _tiny.POSITIONS
    )
    return results
