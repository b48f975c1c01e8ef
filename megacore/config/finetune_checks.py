"""Checks that cross the sections of a fine-tuning's configuration; each raises ValueError with one sentence."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megacore.config.finetune import FinetuneConfig


def check_finetune(config: "FinetuneConfig") -> None:
    """Raise ValueError for sections that contradict each other."""
    if config.launch.elastic:
        raise ValueError(
            f"launch.nnodes is {config.launch.nnodes}, a range: a fine-tuning's checkpoints are for one number of "
            "ranks; give one number"
        )
    if config.launch.data_placement == "node_local":
        raise ValueError(
            "launch.data_placement is node_local: a fine-tuning reads and writes one directory that all its machines "
            "see; set it to shared"
        )
