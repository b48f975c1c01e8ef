"""Models and variants compared by `benchmarks/zero.py`.

A variant is a way to keep the model's state on data-parallel ranks.
"""

import os
from dataclasses import dataclass, field
from typing import Any

from megacore.config.load import parse_config
from megacore.config.run import RunConfig


@dataclass(frozen=True)
class Size:
    """Shape of a GPT."""

    layers: int
    hidden: int
    heads: int
    vocab_size: int = 50_257
    seq_length: int = 1024
    """Tokens of a sample; the model has positions for 1024."""


SIZES = {
    "tiny": Size(2, 64, 4, 512, 64),
    "124M": Size(12, 768, 12, seq_length=64),
    "345M": Size(24, 1024, 16),
    "1.5B": Size(48, 1600, 25, seq_length=128),
    "7B-slice": Size(2, 4096, 32, 8192, seq_length=128),
}
"""Models by name; the slice has two layers as those of GPT-2 7B and a smaller vocabulary."""

ZERO_2 = {"zero_stage": 2, "offload_optimizer": "cpu"}
ZERO_3 = {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}
TORCH, COMPILED = {"cpu_adam": "torch"}, {"cpu_adam": "deepspeed"}


@dataclass(frozen=True)
class Variant:
    """One way to keep the state of a model."""

    engine: str = "deepspeed"
    """One of deepspeed, native, and torch's ddp and fully_shard with AdamW over transformers'
    model."""
    parallel: dict[str, Any] = field(default_factory=dict)
    deepspeed: dict[str, Any] = field(default_factory=dict)
    frees_weights: bool = True
    """True if fully_shard frees the weights of a layer after its forward pass, as ZeRO-3 does."""

    @property
    def own(self) -> bool:
        """True if one of this package's engines makes the steps, whose state can be counted."""
        return self.engine in ("native", "deepspeed")

    @property
    def compiled_adam(self) -> bool:
        """True if DeepSpeed's Adam updates the offloaded state, instead of torch's."""
        return self.deepspeed.get("cpu_adam") == "deepspeed"


REFERENCE, DISTRIBUTED = "native", "native, optimizer divided"
GRADIENTS, PARAMETERS = "native, gradients divided", "native, parameters divided"
SAME_STAGE = {DISTRIBUTED: "ZeRO-1", GRADIENTS: "ZeRO-2", PARAMETERS: "ZeRO-3"}
"""DeepSpeed's variant that divides the same state as a native one."""
SAME_IN_TORCH = {GRADIENTS: "fully_shard, weights kept", PARAMETERS: "fully_shard"}
"""The variant of torch's fully_shard that communicates and keeps the same in a pass."""
STATES = {
    REFERENCE: Variant("native"),
    DISTRIBUTED: Variant("native", {"data_parallel_sharding": "optimizer"}),
    GRADIENTS: Variant("native", {"data_parallel_sharding": "gradients"}),
    PARAMETERS: Variant("native", {"data_parallel_sharding": "parameters"}),
    SAME_IN_TORCH[GRADIENTS]: Variant("fully_shard", frees_weights=False),
    SAME_IN_TORCH[PARAMETERS]: Variant("fully_shard"),
    "ZeRO-0": Variant(deepspeed={"zero_stage": 0}),
    "ZeRO-1": Variant(deepspeed={"zero_stage": 1}),
    "ZeRO-2": Variant(deepspeed={"zero_stage": 2}),
    "ZeRO-3": Variant(deepspeed={"zero_stage": 3}),
    "ZeRO-2, optimizer offloaded": Variant(deepspeed=ZERO_2 | TORCH),
    "ZeRO-2, optimizer offloaded, DeepSpeed's Adam": Variant(deepspeed=ZERO_2 | COMPILED),
    "ZeRO-3, all offloaded": Variant(deepspeed=ZERO_3 | TORCH),
    "ZeRO-3, all offloaded, DeepSpeed's Adam": Variant(deepspeed=ZERO_3 | COMPILED),
}
FITS = {
    "torch DDP": Variant("ddp"),
    REFERENCE: STATES[REFERENCE],
    "ZeRO-2": STATES["ZeRO-2"],
    "ZeRO-3, all offloaded": STATES["ZeRO-3, all offloaded"],
    "ZeRO-3, all offloaded, DeepSpeed's Adam": STATES["ZeRO-3, all offloaded, DeepSpeed's Adam"],
}
VARIANTS = STATES | FITS


@dataclass(frozen=True)
class Work:
    """Task of a rank, passed as JSON."""

    variant: str
    size: str
    precision: str
    device: str
    ranks: int
    micro_batch_size: int = 1
    micro_batches: int = 1
    """Micro batches of each rank in one step."""
    recompute: str = "none"
    optimizer: str = "adam"
    limit_mb: int = 0
    """Memory in MiB that a CPU rank may allocate after the model, to simulate a full memory; 0
    means no limit."""

    @property
    def threads(self) -> int:
        """CPU threads of each rank; with a GPU the ranks share all cores, for offloaded state."""
        return 1 if self.device == "cpu" else max(1, (os.cpu_count() or 1) // self.ranks)

    def config(self) -> RunConfig:
        """Return the run configuration for this work's steps."""
        variant, size = VARIANTS[self.variant], SIZES[self.size]
        values = {
            "name": "benchmark",
            "data": {
                "source": {"kind": "source_tree"},
                "tokenizer": {"kind": "hf", "name": "gpt2"},
                "seq_length": size.seq_length,
            },
            "model": {
                "num_layers": size.layers,
                "hidden_size": size.hidden,
                "num_attention_heads": size.heads,
                "max_position_embeddings": 1024,
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
            },
            "optim": {
                "name": self.optimizer,
                "lr": 1e-4,
                "clip_grad": 1.0,
                "weight_decay": 0.01,
            },
            "train": {
                "micro_batch_size": self.micro_batch_size,
                "global_batch_size": self.micro_batch_size * self.micro_batches * self.ranks,
                "train_iters": 1_000_000,
                "precision": self.precision,
                "recompute": self.recompute,
            },
            "checkpoint": {"save_interval": 1_000_000},
            "engine": variant.engine if variant.own else "native",
            "parallel": variant.parallel,
            "deepspeed": variant.deepspeed,
            "launch": {"nproc_per_node": self.ranks, "threads_per_rank": self.threads},
        }
        return parse_config(values, origin="benchmarks/zero.py")
