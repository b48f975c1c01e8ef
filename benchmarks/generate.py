"""Greedy generation in tokens per second of CPU time, compared with transformers.

    python -m benchmarks.generate [--rounds 3] [--prompt 128] [--tokens 64] [--layers 6]
        [--hidden 384]

megacore runs with and without its cache of keys and values. The models are a GPT-2 and a Llama with
random weights; transformers loads the same weights from an export. All ways take turns on one
thread with the same prompts, and reading the prompts counts. The best round of each counts, because
other processes only ever slow a round down. All ways must generate the same tokens.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks._verdict import Check, verdict
from megacore.config.model import ModelConfig
from megacore.config.spec import ModelSpec
from megacore.convert.hf.write import write_model
from megacore.generate.generate import generate
from megacore.jobs.model import GenerateOptions
from megacore.models.build import build_bare
from megacore.models.gpt import GPTModel
from megacore.parallel.mesh import ProcessMesh

VOCAB_SIZE = 8192
HEADS = 6
GOAL = 0.85
"""Least ratio of megacore's rate with the cache to transformers' rate."""
MODELS: dict[str, dict[str, Any]] = {
    "GPT-2": {},
    "Llama": {
        "position_embedding_type": "rope",
        "normalization": "rmsnorm",
        "activation": "swiglu",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "num_query_groups": 2,
    },
}

Tokens = list[list[int]]


@dataclass
class Way:
    """One way to generate text."""

    name: str
    write: Callable[[Tokens], Tokens]
    rate: float = 0.0
    """Tokens per second of processor time in the best round."""

    def run(self, prompts: Tokens, count: int) -> Tokens:
        """Run one round."""
        started = time.process_time()
        generated = self.write(prompts)
        self.rate = max(self.rate, len(prompts) * count / (time.process_time() - started))
        return generated


def ways(spec: ModelSpec, count: int) -> list[Way]:
    """Return megacore's ways and transformers', with the same weights."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    ours = build_bare(spec, ProcessMesh.serial(), device="cpu")
    assert isinstance(ours, GPTModel)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(0.0, 0.05, generator=generator)
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), spec, dict(ours.named_parameters()))
        hf_model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def own(use_cache: bool) -> Callable[[Tokens], Tokens]:
        options = GenerateOptions(count)
        return lambda prompts: [
            list(result.tokens)
            for result in generate(
                ours,
                prompts,
                options,
                vocab_size=VOCAB_SIZE,
                batch_size=len(prompts),
                use_cache=use_cache,
            )
        ]

    @torch.inference_mode()
    def transformers(prompts: Tokens) -> Tokens:
        ids = torch.tensor(prompts)
        generated = hf_model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            temperature=1.0,
            top_k=50,
            max_new_tokens=count,
            min_new_tokens=count,
            pad_token_id=0,
        )
        return [row[len(prompts[0]) :] for row in generated.tolist()]

    return [
        Way("transformers", transformers),
        Way("ours", own(True)),
        Way("ours, no cache", own(False)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (
        ("rounds", 3),
        ("prompt", 128),
        ("tokens", 64),
        ("layers", 6),
        ("hidden", 384),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(1)
    checks: list[Check] = []
    print(
        "| model | batch | way | tokens/s | to transformers |\n| --- | ---: | --- | ---: | ---: |"
    )
    for name, values in MODELS.items():
        positions = options.prompt + options.tokens
        config = ModelConfig(
            num_layers=options.layers,
            hidden_size=options.hidden,
            num_attention_heads=HEADS,
            max_position_embeddings=positions,
            **values,
        )
        all_ways = ways(
            ModelSpec(family="gpt", model=config, vocab_size=VOCAB_SIZE), options.tokens
        )
        for batch in (1, 8):
            generator = torch.Generator().manual_seed(batch)
            prompts = torch.randint(
                VOCAB_SIZE, (batch, options.prompt), generator=generator
            ).tolist()
            for way in all_ways:
                way.rate = 0.0
            for _ in range(options.rounds):
                outputs = [way.run(prompts, options.tokens) for way in all_ways]
                assert all(each == outputs[0] for each in outputs), "the ways write other tokens"
            checks.append(
                Check(
                    f"{name}, batch {batch}, to transformers",
                    all_ways[1].rate / all_ways[0].rate,
                    GOAL,
                )
            )
            for way in all_ways:
                print(
                    f"| {name} | {batch} | {way.name} | {way.rate:,.1f} | "
                    f"{way.rate / all_ways[0].rate:.2f} |"
                )

    return verdict("generate", checks)


if __name__ == "__main__":
    sys.exit(main())
