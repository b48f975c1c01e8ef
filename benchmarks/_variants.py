"""Variants of the same optimizer step, compared by `benchmarks/layouts.py`."""

from dataclasses import dataclass, field
from typing import Any, Literal

from megacore.config.load import parse_config
from megacore.config.run import RunConfig

MODEL = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
SEQ_LENGTH = 256
VOCAB_SIZE = 8192
SAMPLES = 8


@dataclass(frozen=True)
class Variant:
    """One layout of one step."""

    ranks: int
    threads: int
    micro_batch_size: int
    """Samples of a micro batch; each variant has its own, since pipelines need many small ones."""
    parallel: dict[str, Any] = field(default_factory=dict)
    ddp: Literal["same model", "plain model"] | None = None
    """Model that torch's DistributedDataParallel and fused AdamW train, instead of megacore's
    engine: megacore's, or the compiled one in nanoGPT's style."""
    samples: int = SAMPLES
    """Samples of a step on all ranks."""
    seq_length: int = SEQ_LENGTH
    """Tokens of a sample."""
    vocab_size: int = VOCAB_SIZE
    model: dict[str, Any] = field(default_factory=lambda: MODEL)

    def config(self, precision: str) -> RunConfig:
        """Return the run configuration for this variant's steps."""
        values = {
            "name": "benchmark",
            "data": {
                "source": {"kind": "source_tree"},
                "tokenizer": {"kind": "train-bpe", "vocab_size": self.vocab_size},
                "seq_length": self.seq_length,
            },
            "model": self.model,
            "optim": {"lr": 1e-4, "clip_grad": 1.0, "weight_decay": 0.01},
            "train": {
                "micro_batch_size": self.micro_batch_size,
                "global_batch_size": self.samples,
                "train_iters": 1_000_000,
                "precision": precision,
            },
            "checkpoint": {"save_interval": 1_000_000},
            "parallel": self.parallel,
            "launch": {"nproc_per_node": self.ranks, "threads_per_rank": self.threads},
        }
        return parse_config(values, origin="benchmarks/layouts.py")


TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
DELAYED = {"delay_weight_gradients": True}
REFERENCE = "serial"
VARIANTS = {
    REFERENCE: Variant(1, 2, 8),
    "serial, 1 thread": Variant(1, 1, 8),
    "tp2": Variant(2, 1, 8, TP2),
    "tp2 sp": Variant(2, 1, 8, TP2 | {"sequence_parallel": True}),
    "pp2": Variant(2, 1, 1, PP2),
    "pp2 interleaved": Variant(2, 1, 1, PP2 | {"virtual_pipeline_model_parallel_size": 2}),
    "pp2 delayed": Variant(2, 1, 1, PP2 | DELAYED),
    "pp2 interleaved, delayed": Variant(
        2, 1, 1, PP2 | DELAYED | {"virtual_pipeline_model_parallel_size": 2}
    ),
    "dp2": Variant(2, 1, 4),
    "dp2 distributed optimizer": Variant(2, 1, 4, {"data_parallel_sharding": "optimizer"}),
    "torch ddp": Variant(2, 1, 4, ddp="same model"),
    "torch ddp, plain model": Variant(2, 1, 4, ddp="plain model"),
}

WEAK = {f"dp{ranks}": Variant(ranks, 1, 4, samples=4 * ranks) for ranks in (1, 2, 4)}
"""Data-parallel ranks with one thread and 4 samples each, for `benchmarks/scaling.py`."""
PIPELINES = {f"pp2, m {count}": Variant(2, 1, 1, PP2, samples=count) for count in (2, 4, 8, 16)} | {
    "pp2 interleaved, m 8": Variant(
        2, 1, 1, PP2 | {"virtual_pipeline_model_parallel_size": 2}, samples=8
    )
}
"""Two pipeline stages and m micro batches of one sample."""
LLAMA = MODEL | {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_query_groups": 1,
    "position_embedding_type": "rope",
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "add_bias_linear": False,
}


def parts(ranks: int, tokens: int) -> Variant:
    """Return ranks of one thread that divide one sequence of a small Llama."""
    divided = {"context_parallel_size": ranks}
    return Variant(ranks, 1, 1, divided, samples=1, seq_length=tokens, vocab_size=512, model=LLAMA)


CONTEXT = {f"cp{ranks}": parts(ranks, 16_384) for ranks in (1, 2, 4)}
"""Ranks that divide one sequence, for `benchmarks/scaling.py`."""
LONG = {"cp2, long": parts(2, 131_072)}
ALL = VARIANTS | WEAK | PIPELINES | CONTEXT | LONG
