"""Division of T5's layers over pipeline stages, each with layers of either encoder or decoder."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Style = Literal["balanced", "uniform"] | tuple[int, ...]


@dataclass(frozen=True)
class T5Stages:
    """Requested pipeline of an encoder and a decoder."""

    encoder: int
    """Number of encoder layers, model.num_layers."""
    decoder: int
    """Number of decoder layers, model.num_decoder_layers with the default filled in."""
    stages: int
    """Number of pipeline stages, parallel.pipeline_model_parallel_size."""
    split: int | None = None
    """First stage of the decoder, parallel.pipeline_model_parallel_split_rank; None means any."""
    style: Style = "balanced"
    """Layers per stage, parallel.pipeline_partition."""

    def splits(self) -> list[int]:
        """Return the stages at which the decoder may begin; empty if no division works."""
        return [
            split
            for split in range(1, self.stages)
            if split in (self.split or split,) and self._works(split)
        ]

    def problem(self) -> tuple[str, str] | None:
        """Return why no division works, with all the numbers, and a remedy; None if one works."""
        size = f"parallel.pipeline_model_parallel_size {self.stages}"
        if self.split is not None and not 0 < self.split < self.stages:
            what = f"parallel.pipeline_model_parallel_split_rank is {self.split}"
            if self.stages == 1:
                return f"{what} but {size} has no second stage", "set it to null"
            return (
                f"{what} and {size} has the stages 0 to {self.stages - 1}",
                f"use 1 to {self.stages - 1}, or null",
            )
        if isinstance(self.style, tuple) and (refusal := self._list_problem(self.style, size)):
            return refusal
        if self.stages == 1 or self.splits():
            return None
        return self._division_problem(size)

    def _works(self, split: int) -> bool:
        """Return True if the decoder can begin at the pipeline stage `split`."""
        stacks = ((self.encoder, split), (self.decoder, self.stages - split))
        if isinstance(self.style, tuple):
            return sum(self.style[:split]) == self.encoder
        if self.style == "uniform":
            return all(layers % stages == 0 for layers, stages in stacks)
        return all(layers >= stages for layers, stages in stacks)

    def _list_problem(self, sizes: Sequence[int], size: str) -> tuple[str, str] | None:
        name, both = f"parallel.pipeline_partition {list(sizes)}", self.encoder + self.decoder
        layers = f"model.num_layers {self.encoder} and model.num_decoder_layers {self.decoder}"
        if len(sizes) != self.stages:
            return f"{name} has {len(sizes)} entries for {size}", f"give it {self.stages}"
        if min(sizes) < 1:
            return f"{name} has a stage of {min(sizes)} layers", "give each stage of T5 at least 1"
        if sum(sizes) != both:
            return (
                f"{name} adds up to {sum(sizes)} layers and {layers} to {both}",
                f"make it add up to {both}",
            )
        if self.stages == 1 or self.splits():
            return None
        sums = list(accumulate(sizes))
        if self.split is None:
            return (
                (
                    f"{name} has a stage with layers of both stacks: its stages end after "
                    f"{_listed(sums)} layers, and model.num_layers is {self.encoder}"
                ),
                f"let the encoder's stages add up to {self.encoder}",
            )
        return (
            (
                f"{name} has {sums[self.split - 1]} layers before "
                f"parallel.pipeline_model_parallel_split_rank {self.split} and model.num_layers is "
                f"{self.encoder}"
            ),
            f"let the stages before it add up to {self.encoder}, or set it to null",
        )

    def _division_problem(self, size: str) -> tuple[str, str]:
        """Return the problem and the remedy for the partitions balanced and uniform."""
        where = size if self.split is None else f"{size}, split at {self.split}"
        layers = f"model.num_layers {self.encoder} and model.num_decoder_layers {self.decoder}"
        if self.style == "uniform":
            return (
                (
                    f"{layers} cannot be divided evenly over {where}, which "
                    "parallel.pipeline_partition uniform needs"
                ),
                "set parallel.pipeline_partition to balanced",
            )
        return f"{layers} cannot be divided over {where}: each stage needs a layer of one stack", ""


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
