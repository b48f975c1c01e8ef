"""Greedy generation compared with transformers, by wall time.

    python -m benchmarks.generate [--case NAME …] [--rounds 9] [--seconds 25] [--prompt 128]
        [--tokens 32] [--threads N]

Models of both programs have the same random weights in fp32 and generate the same tokens; if the
tokens differ, the case has no figures and misses its goal. Reading the prompts counts. transformers
runs with its cache and scaled_dot_product_attention, with the dynamic or the static cache,
whichever was faster in the warm-up. Both take turns, in reverse order every other round; the median
of the rounds' ratios counts. A case takes at most `--seconds`, but at least three rounds.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks._turns import progress
from benchmarks._verdict import Check, table, verdict
from megacore.config.model import ModelConfig
from megacore.config.spec import ModelSpec
from megacore.convert.hf.write import write_model
from megacore.generate.generate import generate
from megacore.jobs.model import GenerateOptions
from megacore.models.build import build_bare
from megacore.models.gpt import GPTModel
from megacore.models.t5 import T5Model
from megacore.parallel.mesh import ProcessMesh

Tokens = list[list[int]]
Writer = Callable[[Tokens, int], Tokens]
"""Function that returns a number of new ids for each prompt."""

GPT2_TINY = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4}
GPT2_SMALL = {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12}
LLAMA = {
    "num_layers": 6,
    "hidden_size": 384,
    "num_attention_heads": 6,
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
T5_SMALL = {
    "num_layers": 6,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "kv_channels": 64,
    "ffn_hidden_size": 2048,
    "position_embedding_type": "relative",
    "normalization": "rmsnorm",
    "activation": "relu",
    "add_bias_linear": False,
}


@dataclass(frozen=True)
class Case:
    """One model and batch size, and the least ratio to transformers' rate."""

    name: str
    family: str
    model: dict[str, Any]
    vocab_size: int
    batch: int
    goal: float


CASES = (
    Case("124M-1", "gpt", GPT2_SMALL, 50257, 1, 1.2),
    Case("124M-16", "gpt", GPT2_SMALL, 50257, 16, 1.2),
    Case("tiny-1", "gpt", GPT2_TINY, 8192, 1, 1.5),
    Case("tiny-16", "gpt", GPT2_TINY, 8192, 16, 1.5),
    Case("llama-1", "gpt", LLAMA, 8192, 1, 1.0),
    Case("llama-8", "gpt", LLAMA, 8192, 8, 1.0),
    Case("t5-small-1", "t5", T5_SMALL, 32128, 1, 1.0),
    Case("t5-small-8", "t5", T5_SMALL, 32128, 8, 1.0),
)


def writers(case: Case, positions: int) -> dict[str, Writer]:
    """Return megacore's writer and transformers' two, with the same weights."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    spec = ModelSpec.model_validate(
        {
            "family": case.family,
            "model": ModelConfig.model_validate(
                case.model | {"max_position_embeddings": positions}
            ),
            "vocab_size": case.vocab_size,
            "special_tokens": {"pad": 0},
        }
    )
    ours = build_bare(spec, ProcessMesh.serial(), device="cpu").eval()
    assert isinstance(ours, (GPTModel, T5Model))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(0.0, 0.05, generator=generator)
    auto_class = AutoModelForSeq2SeqLM if case.family == "t5" else AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), spec, dict(ours.named_parameters()))
        theirs = auto_class.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
    theirs.generation_config.eos_token_id = None

    def megacore(prompts: Tokens, count: int) -> Tokens:
        options, size = GenerateOptions(count), len(prompts)
        results = generate(ours, prompts, options, vocab_size=case.vocab_size, batch_size=size)
        return [list(result.tokens) for result in results]

    def transformers(cache: str) -> Writer:
        @torch.inference_mode()
        def write(prompts: Tokens, count: int) -> Tokens:
            ids = torch.tensor(prompts)
            start = {"decoder_start_token_id": 0} if case.family == "t5" else {}
            generated = theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                pad_token_id=0,
                cache_implementation=cache,
                **start,
            )
            return [row[-count:] for row in generated.tolist()]

        return write

    return {
        "megacore": megacore,
        "dynamic cache": transformers("dynamic"),
        "static cache": transformers("static"),
    }


@dataclass(frozen=True)
class Result:
    """Seconds of each round of one case."""

    ours: list[float]
    theirs: list[float]
    cache: str
    """Cache of transformers."""

    @property
    def ratios(self) -> list[float]:
        """Ratio of megacore's rate to transformers' in each round."""
        return [theirs / ours for ours, theirs in zip(self.ours, self.theirs, strict=True)]


def measure(case: Case, options: argparse.Namespace) -> Result | None:
    """Run the rounds of a case; return None if the programs write other tokens."""
    ways = writers(case, options.prompt + options.tokens)
    generator = torch.Generator().manual_seed(case.batch)
    shape = (case.batch, options.prompt)
    prompts = torch.randint(1, case.vocab_size, shape, generator=generator).tolist()

    def seconds(name: str) -> float:
        started = time.perf_counter()
        ways[name](prompts, options.tokens)
        return time.perf_counter() - started

    started = time.monotonic()
    outputs = {name: way(prompts, options.tokens) for name, way in ways.items()}
    for name, output in outputs.items():
        if output != outputs["megacore"]:
            progress(f"{case.name}: transformers with its {name} writes other tokens")
            return None
    cache = min(("dynamic cache", "static cache"), key=seconds)
    taken: dict[str, list[float]] = {"megacore": [], cache: []}
    for number in range(options.rounds):
        round_started = time.monotonic()
        for name in taken if number % 2 == 0 else reversed(taken):
            taken[name].append(seconds(name))
        now = time.monotonic()
        if number >= 2 and now + (now - round_started) > started + options.seconds:
            break
    return Result(taken["megacore"], taken[cache], cache)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("rounds", 9), ("seconds", 25), ("prompt", 128), ("tokens", 32)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--case", nargs="+", choices=[case.name for case in CASES])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    header = [
        "model-batch",
        "megacore, tokens/s",
        "transformers",
        "with",
        "ratio",
        "range",
        "rounds",
    ]
    _show(table(header, []))
    checks = []
    for case in CASES:
        if options.case and case.name not in options.case:
            continue
        result = measure(case, options)
        if result is None:
            checks.append(Check(f"{case.name}, with equal tokens", math.nan, case.goal))
            continue
        count = case.batch * options.tokens
        ratio = statistics.median(result.ratios)
        checks.append(Check(case.name, ratio, case.goal))
        row = [
            case.name,
            f"{count / statistics.median(result.ours):,.1f}",
            f"{count / statistics.median(result.theirs):,.1f}",
            result.cache,
            f"{ratio:.2f}",
            f"{min(result.ratios):.2f} to {max(result.ratios):.2f}",
            str(len(result.ratios)),
        ]
        _show(f"| {' | '.join(row)} |\n")
    return verdict("generate", checks)


if __name__ == "__main__":
    sys.exit(main())
