"""Speedup of each kernel: a training step with it, and with plain torch instead.

    python -m benchmarks.kernels [--precision bf16|fp32] [--rounds 20] [--steps 2] [--threads 2]
        [--device cpu|cuda]

Four models, tiny ones on a CPU, use all operations. A kernel counts in the model where it
brings most. Engines that differ in one operation take
turns in one process. The ratio is taken within each round, and the median counts.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks._turns import environment, progress
from benchmarks._variants import SAMPLES, SEQ_LENGTH, VOCAB_SIZE, Variant
from benchmarks._verdict import Check, table, verdict
from megacore.config.load import parse_config
from megacore.config.spec import SpecialTokens
from megacore.engine.native import NativeEngine
from megacore.kernels.choice import Kernels, choose_kernels, plain_kernels
from megacore.kernels.implementation import DTYPES, Setting
from megacore.models.stage import Stage
from megacore.parallel.mesh import ProcessMesh
from megacore.ranks.process import set_up_arithmetic

LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
FEW = {"hidden_size": 768, "num_attention_heads": 12}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "GPT-2": (
        {},
        (
            "packed_attention",
            "cross_entropy",
            "weight_gradient",
            "bias_activation",
            "layer_norm",
            "bias_dropout_add",
            "optimizer",
        ),
    ),
    "Wide GPT-2, few tokens": (FEW, ("optimizer", "layer_norm", "weight_gradient")),
    "Llama": (LLAMA, ("attention", "rms_norm", "gated", "rotate")),
    "GPT-2 with dropout": (DROPOUT, ("attention", "dropout", "bias_dropout_add")),
}
"""Options of each model that differ from the tiny GPT of benchmarks/_variants.py, and the
operations measured with it."""
WIDE = {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 16}
"""Sizes on a GPU, where the kernels of a tiny model take less time than their launches."""
GAIN = 1.02
"""Least ratio of a kernel: one that brings no more is not worth its code."""
WARMUP = 2


@dataclass
class Entrant:
    """An engine and the seconds of its steps, by round."""

    step: Callable[[], object]
    seconds: list[float] = field(default_factory=list)

    def run(self, steps: int) -> None:
        """Make steps, and record the seconds of one."""
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.seconds.append((time.perf_counter() - start) / steps)


def entrant(model: dict[str, Any], options: argparse.Namespace, kernels: Kernels) -> Entrant:
    """Return a new engine with its initial weights."""
    device, samples = torch.device(options.device), 1 if model is FEW else SAMPLES
    values = Variant(1, 1, samples).config(options.precision).model_dump()
    values["model"] |= model | (WIDE if device.type == "cuda" else {})
    values["train"]["compile"] = "off"
    config = parse_config(values, origin="benchmarks/kernels.py")
    tokens = SpecialTokens(eod=VOCAB_SIZE - 1)
    mesh = ProcessMesh.serial()
    stage = Stage(config, VOCAB_SIZE, mesh, special_tokens=tokens, device=device, kernels=kernels)
    engine = NativeEngine(stage, config, options.precision)
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB_SIZE, (samples, SEQ_LENGTH + 1), generator=random).to(device)

    def step() -> object:
        engine.forward_backward(iter([ids]), [0])
        return engine.update(1e-4, 0.01)

    return Entrant(step)


def compete(name: str, options: argparse.Namespace) -> tuple[list[list[str]], list[Check]]:
    """Return the table rows and checks of one model."""
    model, operations = MODELS[name]
    chosen, plain = (
        choose_kernels(Setting(torch.device(options.device), DTYPES[options.precision])),
        plain_kernels(),
    )
    without = {
        operation: replace(chosen, **{operation: getattr(plain, operation)})
        for operation in operations
    }
    entrants = {
        "all": entrant(model, options, chosen),
        "none": entrant(model, options, plain),
    }
    entrants |= {
        operation: entrant(model, options, kernels) for operation, kernels in without.items()
    }
    for each in entrants.values():
        each.run(WARMUP)
        each.seconds.clear()
    for number in range(options.rounds):
        turns = list(entrants.values())
        for each in turns if number % 2 == 0 else reversed(turns):
            each.run(options.steps)
    rows, checks = [], []
    with_kernels = entrants.pop("all").seconds
    for operation, each in entrants.items():
        ratio = statistics.median(
            without_kernel / with_kernel
            for without_kernel, with_kernel in zip(each.seconds, with_kernels, strict=True)
        )
        same = operation != "none" and chosen.names[operation] == plain.names[operation]
        implementation = "" if operation == "none" else chosen.names[operation]
        label = (
            "all of them"
            if operation == "none"
            else operation + " (the same twice: the noise)" * same
        )
        before, after = (
            f"{1000 * statistics.median(seconds):.1f}" for seconds in (each.seconds, with_kernels)
        )
        rows.append([f"{name}: {label}", implementation, before, after, f"{ratio:.3f}"])
        if not same:
            checks.append(Check(f"{name} {label}" if operation == "none" else label, ratio, GAIN))
    return rows, checks


def best_of(checks: list[Check]) -> list[Check]:
    """Return for each name the check of the largest value: the model where a kernel brings most."""
    best: dict[str, Check] = {}
    for check in checks:
        if check.name not in best or check.value > best[check.name].value:
            best[check.name] = check
    return list(best.values())


def main() -> int:
    """Measure all models, print the table and give the verdict."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2, help="of each engine in a round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    launched = environment(options.threads)
    # restart with the environment of a rank of megacore's launcher
    if any(os.environ.get(name) != value for name, value in launched.items()):
        os.execve(
            sys.executable, [sys.executable, "-m", "benchmarks.kernels", *sys.argv[1:]], launched
        )
    set_up_arithmetic(options.threads)
    rows, checks = [], []
    for name in MODELS:
        progress(name)
        result = compete(name, options)
        rows += result[0]
        checks += result[1]
    header = [
        "operation",
        "computed by",
        "ms a step with plain torch instead",
        "ms a step",
        "ratio",
    ]
    sys.stdout.write(table(header, rows))
    return verdict(f"kernels {options.precision}", best_of(checks))


if __name__ == "__main__":
    sys.exit(main())
