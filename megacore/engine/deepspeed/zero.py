"""The engine that DeepSpeed carries out: ZeRO 0 to 3 with offload (Rajbhandari et al. 2020, Ren et al. 2021).

Models, data, events and checkpoints are those of the native engine.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megacore.engine.deepspeed.engine import DeepSpeedBase
from megacore.engine.deepspeed.mpu import MeshUnit
from megacore.engine.deepspeed.setup import import_deepspeed
from megacore.models.base import Model
from megacore.models.inputs import InputRules


class MicroBatch(nn.Module):
    """A model as DeepSpeed calls it: the ids of a micro batch in, what is minimised out."""

    def __init__(self, model: Model, rules: InputRules) -> None:
        super().__init__()
        self.model = model
        self._rules = rules

    def forward(self, batch: Tensor, dropout_seed: int | None = None) -> tuple[Tensor, Tensor]:
        """The sum of the mean losses, and each of them [terms]; in evaluation 0, and sums and numbers [terms, 2].

        Args:
            batch: ids [b, width].
            dropout_seed: of the micro batch.
        """
        losses = self.model.run(self._rules.read(batch), dropout_seed=dropout_seed)
        assert isinstance(losses, dict)
        if not self.training:
            return batch.new_zeros(()), torch.stack([term.total() for term in losses.values()])
        means = torch.stack([term.mean() for term in losses.values()])
        return means.sum(), means.detach()


class DeepSpeedEngine(DeepSpeedBase):
    """Implements `megacore.engine.base.Engine` for models without pipeline stages."""

    def _initialize(self, mpu: MeshUnit, vocab_size: int) -> tuple[Any, Any]:
        (model,) = self._stage.chunks
        engine, optimizer, _, _ = import_deepspeed().initialize(
            model=MicroBatch(model, self._stage.rules), optimizer=self._adam, mpu=mpu, config=self._settings
        )
        return engine, optimizer

    def forward_backward(self, batches: Iterator[Tensor], seeds: Sequence[int]) -> None:
        """Accumulate the gradient of one global batch: ids [b, width] for each seed."""
        engine, mesh = self._engine, self._mesh
        self._set_batch(len(seeds))
        self._losses = []
        for number, seed in enumerate(seeds, start=1):
            batch = next(batches)
            engine.set_gradient_accumulation_boundary(number == len(seeds))
            with mesh.time("forward-compute"):
                loss, means = engine(batch, seed)
            with mesh.time("backward-compute"):
                engine.backward(loss)
            self._losses.append(means)

    def _step(self) -> int:
        """Let DeepSpeed clip and step."""
        with self._mesh.time("optimizer"):
            self._engine.step()
        return len(self._losses)

    def loss_sum(self, batches: Iterator[Tensor], sizes: Sequence[int]) -> Tensor:
        """Of each loss the sum over all that counts, and its number, without dropout: fp64 [terms, 2]."""
        total = torch.zeros(len(self.loss_names), 2, dtype=torch.float64, device=self.device)
        self._engine.eval()
        try:
            # In inference mode ZeRO-3 would gather weights that no later backward pass may use.
            with torch.no_grad():
                for batch in batches:
                    total += self._engine(batch)[1]
        finally:
            self._engine.train()
        return total
