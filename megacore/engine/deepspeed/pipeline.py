"""Pipeline stages through DeepSpeed's PipelineModule, with ZeRO 0 or 1.

A stage is one layer to DeepSpeed, the chunk of the model that the native engine would give it, and
beside it the parameters that other stages hold too, which DeepSpeed ties.
"""

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megacore.engine.deepspeed.engine import DeepSpeedBase
from megacore.engine.deepspeed.join import MeshUnit, import_deepspeed
from megacore.models.stage import Stage


class StageLayer(nn.Module):
    """A stage's chunk as PipelineModule calls it.

    Hidden states in and out, at the end what is minimised.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        (self.chunk,) = stage.chunks
        self._rules = stage.rules
        self._reads = stage.reads_tokens
        self._batches: Iterator[Tensor] = iter(())
        self._seeds: Iterator[int] = iter(())
        self.losses: list[Tensor] = []
        """Mean losses [terms] of each micro batch, on the last stage."""

    def start(self, batches: Iterator[Tensor], seeds: Sequence[int]) -> None:
        """Begin an iteration.

        Micro batches and their dropout seeds, in the order in which they pass.
        """
        self._batches, self._seeds, self.losses = batches, iter(seeds), []

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states of the stage before, [b, s, h].

        On the first stage what is given is not looked at.
        """
        given = self._rules.read(next(self._batches)) if self._reads else None
        first = self.chunk.has_embedding
        output = self.chunk.run(given, None if first else hidden, dropout_seed=next(self._seeds))
        if isinstance(output, Tensor):
            return output
        means = torch.stack([term.mean() for term in output.values()])
        self.losses.append(means.detach())
        return means.sum()


class TiedParameter(nn.Module):
    """A parameter that several stages hold, for DeepSpeed to sum its gradients.

    What passes it is left alone.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        """The same."""
        return hidden


class DeepSpeedPipelineEngine(DeepSpeedBase):
    """Implements `megacore.engine.base.Engine` for models with pipeline stages."""

    _seeds: Sequence[int] = ()

    def _initialize(self, mpu: MeshUnit) -> tuple[Any, Any]:
        # With sequence parallelism tensor-parallel ranks do not hold the same, of which each could
        # send a part.
        same = not self._config.parallel.sequence_parallel
        self._settings["pipeline"] = {"pipe_partitioned": same, "grad_partitioned": same}
        self._layer = StageLayer(self._stage)
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its layers
            module = self._module()
        engine, optimizer, _, _ = import_deepspeed().initialize(
            model=module, optimizer=self._adam, config=self._settings
        )
        return engine, optimizer

    def forward_backward(self, batches: Iterator[Tensor], seeds: Sequence[int]) -> None:
        """Take the micro batches of one global batch.

        DeepSpeed's schedule ends with the optimizer's step.
        """
        self._set_batch(len(seeds))
        self._layer.start(batches, seeds)
        self._seeds = seeds

    def _step(self) -> int:
        """Run the schedule: all micro batches' passes, clipping, and one optimizer step."""
        # Each stage reads its own micro batches: DeepSpeed would give them to the first and the
        # last alone.
        nothing = torch.zeros(1, device=self.device)
        self._engine.train_batch(iter([(nothing, nothing)] * len(self._seeds)))
        self._losses = self._layer.losses
        return len(self._seeds)

    def loss_sum(self, batches: Iterator[Tensor], sizes: Sequence[int]) -> Tensor:
        """Of each loss its sum over all that counts, and its number: fp64 [terms, 2].

        Dropout is off.
        """
        return self._stage.loss_sum(batches, sizes)

    def _module(self) -> Any:
        """The stages as PipelineModule wants them.

        Of every stage as many layers, of which this rank's are real.
        """
        import_deepspeed()
        from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

        layout, own = self._mesh.layout, self._mesh.pipeline_parallel.rank
        parameters, copied = self._stage.named_parameters, self._stage.copied_parameters
        layers: list[Any] = []
        for stage in range(layout.pipeline):
            for name, holders in copied.items():
                if stage in holders:
                    weight = parameters[name] if stage == own else None
                    layers.append(TiedLayerSpec(name.replace(".", "_"), TiedParameter, weight))
                else:
                    layers.append(LayerSpec(nn.Identity))
            layers.append(self._layer if stage == own else LayerSpec(nn.Identity))
        topology = PipeModelDataParallelTopology(
            num_pp=layout.pipeline, num_mp=layout.tensor, num_dp=layout.data
        )
        # It broadcasts tied weights, of which torch would warn in each backward pass.
        with torch.no_grad():
            return PipelineModule(layers=layers, topology=topology, partition_method="uniform")
