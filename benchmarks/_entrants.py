"""Sizes of GPT-2 and Llama, and ways to train them, for `benchmarks.step` and `benchmarks.gpu`."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from megacore.config.load import parse_config
from megacore.config.run import RunConfig
from megacore.observe.flops import TransformerShape, step_flops

LR, WEIGHT_DECAY, BETAS, CLIP = 3e-4, 0.1, (0.9, 0.95), 1.0
STD = 0.02
"""Standard deviation of the initial weights."""
OUT_OF_MEMORY = 66
"""Exit status of a process whose GPU memory was exhausted."""


@dataclass(frozen=True)
class Case:
    """A model and its micro batch; every step is one micro batch."""

    layers: int
    hidden: int
    heads: int
    seq_length: int
    vocab_size: int
    micro_batch_size: int
    precision: Literal["fp32", "bf16", "fp16"]
    model: Literal["gpt2", "llama"] = "gpt2"
    groups: int | None = None
    """Heads of keys and values; None means as many as heads of queries."""
    inner: int | None = None
    """Width of the MLP; None means 4 times that of the model."""

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.micro_batch_size * self.seq_length

    @property
    def first_loss(self) -> float:
        """Expected loss of the initial weights, in nats.

        The features of the last norm have variance 1, so the logits have variance h STD², and the
        logarithm of the sum of their exponentials is ln(v) plus half of it.
        """
        return math.log(self.vocab_size) + self.hidden * STD**2 / 2

    @property
    def flops(self) -> int:
        """Model FLOPs of a step, without recomputation."""
        shape = TransformerShape.of(Work(self, ENTRANTS["megacore"]).config(), self.vocab_size)
        return step_flops(shape, self.micro_batch_size, "none")


CASES = {
    "tiny-fp32": Case(4, 256, 8, 256, 8192, 8, "fp32"),
    "tiny-bf16": Case(4, 256, 8, 256, 8192, 8, "bf16"),
    "124m-fp32": Case(12, 768, 12, 1024, 50304, 1, "fp32"),
    "124m-bf16": Case(12, 768, 12, 1024, 50304, 1, "bf16"),
    "345m-bf16": Case(24, 1024, 16, 1024, 50304, 16, "bf16"),
    "llama-1b-bf16": Case(22, 2048, 32, 2048, 32000, 4, "bf16", "llama", 4, 5632),
    "smoke-fp32": Case(2, 32, 2, 32, 512, 2, "fp32"),
    "smoke-bf16": Case(2, 32, 2, 32, 512, 2, "bf16"),
    "smoke-llama-bf16": Case(2, 32, 2, 32, 512, 2, "bf16", "llama", 1, 64),
}


@dataclass(frozen=True)
class Entrant:
    """One way to train a case."""

    kind: Literal["megacore", "nanogpt", "transformers", "fsdp2"]
    compiled: bool = False
    fused: bool = False
    """True if torch's fused AdamW is also used on a CPU; on a GPU nanoGPT always uses it."""
    tuned_malloc: bool = False
    """True if glibc keeps freed blocks, as configured by megacore's launcher."""


ENTRANTS = {
    "megacore": Entrant("megacore", tuned_malloc=True),
    "nanoGPT": Entrant("nanogpt"),
    "nanoGPT, tuned malloc": Entrant("nanogpt", tuned_malloc=True),
    "nanoGPT, fused AdamW": Entrant("nanogpt", fused=True),
    "nanoGPT, fused AdamW, tuned malloc": Entrant("nanogpt", fused=True, tuned_malloc=True),
    "nanoGPT compiled": Entrant("nanogpt", compiled=True),
    "nanoGPT compiled, tuned malloc": Entrant("nanogpt", compiled=True, tuned_malloc=True),
    "nanoGPT compiled, fused AdamW": Entrant("nanogpt", compiled=True, fused=True),
    "nanoGPT compiled, fused AdamW, tuned malloc": Entrant(
        "nanogpt", compiled=True, fused=True, tuned_malloc=True
    ),
    "FSDP2 compiled": Entrant("fsdp2", compiled=True, fused=True),
    "transformers": Entrant("transformers", fused=True),
    "transformers, tuned malloc": Entrant("transformers", fused=True, tuned_malloc=True),
}
"""Entrants by name. nanoGPT is our plain torch model in its style, unless a work names a
checkout. FSDP2 is torch's `fully_shard` over that model, or over transformers' Llama."""
_LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}


@dataclass(frozen=True)
class Work:
    """Task of a measuring process, passed as JSON."""

    case: Case
    entrant: Entrant
    device: str = "cpu"
    threads: int = 2
    checkout: str | None = None
    """Checkout of nanoGPT, whose model.py is then trained."""
    train: dict[str, Any] = field(default_factory=dict)
    """Values of megacore's section `train`, in addition to the defaults."""
    reference: bool = False
    """True if megacore computes in fp32, whatever the precision of the case."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> "Work":
        case, entrant = Case(**values.pop("case")), Entrant(**values.pop("entrant"))
        return cls(case, entrant, **values)

    @property
    def precision(self) -> str:
        return "fp32" if self.reference else self.case.precision

    def config(self) -> RunConfig:
        """Return the run configuration for megacore's steps."""
        case = self.case
        values = {
            "name": "benchmark",
            "data": {
                "source": {"kind": "source_tree"},
                "tokenizer": {"kind": "train-bpe", "vocab_size": case.vocab_size},
                "seq_length": case.seq_length,
            },
            "model": {
                "num_layers": case.layers,
                "hidden_size": case.hidden,
                "num_attention_heads": case.heads,
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
                "num_query_groups": case.groups,
                "ffn_hidden_size": case.inner,
                **(_LLAMA if case.model == "llama" else {}),
            },
            "optim": {
                "lr": LR,
                "clip_grad": CLIP,
                "weight_decay": WEIGHT_DECAY,
                "adam_beta1": BETAS[0],
                "adam_beta2": BETAS[1],
            },
            "train": {
                "micro_batch_size": case.micro_batch_size,
                "global_batch_size": case.micro_batch_size,
                "train_iters": 1_000_000,
                "precision": self.precision,
                **self.train,
            },
            "checkpoint": {"save_interval": 1_000_000},
            "launch": {"nproc_per_node": 1, "threads_per_rank": self.threads},
        }
        return parse_config(values, origin="benchmarks")
