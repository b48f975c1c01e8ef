"""Pipeline parallelism with DeepSpeed's PipelineModule and ZeRO 0 or 1.

For DeepSpeed, a pipeline stage is one layer, the same chunk as in the native engine, plus the
parameters shared with other stages, which DeepSpeed ties.
"""

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.engine.deepspeed.engine import DeepSpeedBase
from megacore.engine.deepspeed.join import MeshUnit, import_deepspeed
from megacore.models.base import LossTotals
from megacore.models.stage import Stage
from megacore.parallel.collectives import wait_phase
from megacore.parallel.mesh import ProcessMesh


class StageLayer(nn.Module):
    """Wrapper of a stage's chunk as a layer of PipelineModule.

    It maps hidden states to hidden states; the last stage returns the minimized loss.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        (self.chunk,) = stage.chunks
        self._rules = stage.rules
        self._reads = stage.reads_tokens
        self._time = stage.mesh.time
        self._batches: Iterator[Tensor] = iter(())
        self._seeds: Iterator[int] = iter(())
        self.losses: list[Tensor] = []
        """Mean losses [terms] of each micro batch, on the last stage."""

    def start(self, batches: Iterator[Tensor], seeds: Sequence[int]) -> None:
        """Start an iteration with its micro batches and their dropout seeds, in execution order."""
        self._batches, self._seeds, self.losses = batches, iter(seeds), []

    def forward(self, hidden: Tensor) -> Tensor:
        """Run the chunk on the previous stage's hidden states [b, s, h].

        The first stage ignores `hidden`.
        """
        fields = self._rules.read(next(self._batches)) if self._reads else None
        first = self.chunk.has_embedding
        with self._time("forward-compute"):
            output = self.chunk.run(
                fields, None if first else hidden, dropout_seed=next(self._seeds)
            )
        if isinstance(output, Tensor):
            return output
        means = torch.stack([term.mean() for term in output.values()])
        self.losses.append(means.detach())
        return means.sum()


class TiedParameter(nn.Module):
    """Parameter shared by several stages, whose gradients DeepSpeed sums.

    As a layer it is the identity.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the input unchanged."""
        return hidden


class DeepSpeedPipelineEngine(DeepSpeedBase):
    """Engine for models with pipeline stages."""

    _seeds: Sequence[int] = ()
    _seq_length: int | None = None

    def _initialize(self, mpu: MeshUnit) -> tuple[Any, Any]:
        # With sequence parallelism the tensor-parallel ranks have different hidden states, so they
        # cannot divide the sending of one tensor among them.
        same = not self._config.parallel.sequence_parallel
        self._settings["pipeline"] = {"pipe_partitioned": same, "grad_partitioned": same}
        self._layer = StageLayer(self._stage)
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its layers
            module = self._module()
        engine, optimizer, _, _ = import_deepspeed().initialize(
            model=module, optimizer=self._adam, config=self._settings
        )
        if getattr(optimizer, "use_grad_accum_attribute", False):
            _sum_accumulated(engine)
        _time_instructions(engine, self._mesh)
        return engine, optimizer

    def forward_backward(
        self, batches: Iterator[Tensor], seeds: Sequence[int], *, seq_length: int | None = None
    ) -> None:
        """Store the micro batches of one global batch for `update`.

        DeepSpeed's schedule runs them and ends with the optimizer step.
        """
        if seq_length != self._seq_length:
            # Its stages tell each other the shape of their messages once, and keep the buffers.
            self._engine.reset_activation_shape()
            self._seq_length = seq_length
        self._set_batch(len(seeds))
        self._layer.start(batches, seeds)
        self._seeds = seeds

    def _step(self) -> int:
        """Run the schedule: the passes of all micro batches, clipping, and one optimizer step."""
        # Each stage reads its own micro batches: DeepSpeed would pass them only to the first and
        # the last stage.
        unused = torch.zeros(1, device=self.device)
        self._engine.train_batch(iter([(unused, unused)] * len(self._seeds)))
        self._losses = self._layer.losses
        return len(self._seeds)

    def loss_sum(
        self, batches: Iterator[Tensor], sizes: Sequence[int], totals: LossTotals
    ) -> Tensor:
        """Add the sums of the losses to `totals`, and return them all, without dropout."""
        return self._stage.loss_sum(batches, sizes, totals)

    def _module(self) -> Any:
        """Return the stages as a PipelineModule.

        Every stage has the same number of layers; other stages' layers are placeholders on this
        rank.
        """
        import_deepspeed()
        from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

        layout, local_stage = self._mesh.layout, self._mesh.pipeline_parallel.rank
        parameters, copied = self._stage.named_parameters, self._stage.copied_parameters
        layers: list[Any] = []
        for stage in range(layout.pipeline):
            for name, holders in copied.items():
                if stage in holders:
                    weight = parameters[name] if stage == local_stage else None
                    layers.append(TiedLayerSpec(name.replace(".", "_"), TiedParameter, weight))
                else:
                    layers.append(LayerSpec(nn.Identity))
            layers.append(self._layer if stage == local_stage else LayerSpec(nn.Identity))
        topology = PipeModelDataParallelTopology(
            num_pp=layout.pipeline, num_mp=layout.tensor, num_dp=layout.data
        )
        # PipelineModule broadcasts tied weights, and torch would warn of that in each backward
        # pass.
        with torch.no_grad():
            return PipelineModule(layers=layers, topology=topology, partition_method="uniform")


def _sum_accumulated(engine: Any) -> None:
    """Let DeepSpeed sum the gradients of tied parameters where its optimizer accumulates them.

    That optimizer moves each gradient to `grad_accum`, in fp32, but DeepSpeed's own instruction
    sums `grad`, which is then empty: each stage would change its copy of the parameter differently.
    """
    from deepspeed.runtime.pipe import schedule

    def reduce_tied(engine: Any) -> None:
        for weight, group in engine.module.get_tied_weights_and_groups():
            dist.all_reduce(weight.grad_accum, group=group)

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, schedule.ReduceTiedGrads: reduce_tied}


def _time_instructions(engine: Any, mesh: ProcessMesh) -> None:
    """Measure DeepSpeed's instructions as phases of the step.

    They also beat: a middle stage, which reads no samples, would otherwise show no progress within
    an iteration.
    """
    from deepspeed.runtime.pipe import schedule

    wait = wait_phase(mesh.pipeline_parallel)
    phases = {
        schedule.RecvActivation: wait,
        schedule.RecvGrad: wait,
        schedule.BackwardPass: "backward-compute",
        schedule.OptimizerStep: "optimizer",
    }

    def timed(run: Callable[..., None], phase: str) -> Callable[..., None]:
        def instruction(engine: Any, **options: Any) -> None:
            with mesh.time(phase):
                run(engine, **options)

        return instruction

    instructions = engine._INSTRUCTION_MAP
    engine._INSTRUCTION_MAP = {
        **instructions,
        **{each: timed(instructions[each], phase) for each, phase in phases.items()},
    }
