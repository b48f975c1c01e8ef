"""DeepSpeed engine: ZeRO 0 to 3 with offload (Rajbhandari et al. 2020, Ren et al. 2021).

`DeepSpeedBase` is shared with the pipeline engine in `pipeline.py`. Models, data, events and
checkpoints are those of the native engine.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megacore.checkpoint.shard import TensorShard
from megacore.config.deepspeed import zero_of
from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.engine.base import Engine, Reduced, Update, communication, global_means
from megacore.engine.deepspeed.join import (
    MeshUnit,
    checkpoint_activations,
    import_deepspeed,
    join_ranks,
    prepare_parameters,
    show_log,
)
from megacore.engine.deepspeed.optimizer import (
    DeepSpeedLossScale,
    WholeGradients,
    make_adam,
    set_hyperparameters,
)
from megacore.engine.deepspeed.settings import deepspeed_settings
from megacore.engine.deepspeed.state import DeepSpeedState, main_weights, shape_of
from megacore.kernels.choice import Kernels
from megacore.models.base import LossTotals, Model, loss_sums
from megacore.models.init import initial_weight
from megacore.models.inputs import InputRules
from megacore.models.stage import Stage
from megacore.parallel.collectives import MAX, all_reduce_
from megacore.parallel.mesh import ProcessMesh


class DeepSpeedBase(Engine):
    """DeepSpeed's engine, the model stage that it trains, and their fp32 state."""

    def __init__(
        self,
        config: RunConfig,
        vocab_size: int,
        mesh: ProcessMesh,
        *,
        special_tokens: SpecialTokens,
        device: torch.device,
        precision: str,
        kernels: Kernels,
        compiled_adam: bool,
    ) -> None:
        """Build this rank's part of the model with its initial weights and partition it with ZeRO.

        Collective. The arguments and errors are those of `megacore.engine.build.build_engine`.
        """
        self.device, self.precision = device, precision
        self._config, self._mesh = config, mesh
        self._zero_stage = zero_of(config).stage
        self._settings: dict[str, Any] = deepspeed_settings(
            config,
            precision=precision,
            device_type=device.type,
            data_parallel_size=mesh.data_parallel.size,
        )
        # With pipeline stages, DeepSpeed uses a special optimizer for bf16, as with ZeRO.
        self._clips_itself = self._zero_stage == 0 and (
            precision == "fp32" or mesh.pipeline_parallel.size == 1
        )
        if self._clips_itself:
            self._settings["gradient_clipping"] = 0.0  # see `WholeGradients`
        show_log(self._settings)
        self._losses: list[Tensor] = []
        self._updates = 0
        join_ranks()
        mpu = MeshUnit(mesh)
        with self._divided_from_the_start(mpu):
            self._stage = Stage(
                config,
                vocab_size,
                mesh,
                special_tokens=special_tokens,
                device=device,
                kernels=kernels,
                initial_weights=self._zero_stage < 3,
            )
        (model,) = self._stage.chunks
        prepare_parameters(model, mesh)
        self._adam, self._moments = make_adam(
            self._stage.named_parameters,
            config.optim,
            compiled=compiled_adam and zero_of(config).offload_optimizer != "none",
        )
        checkpoint_activations(model, config.family, self._settings, mpu)
        self._engine, optimizer = self._initialize(mpu)
        self._take_over(optimizer, ModelSpec.of(config, vocab_size), mpu)

    @abstractmethod
    def _initialize(self, mpu: MeshUnit) -> tuple[Any, Any]:
        """Return DeepSpeed's engine of the stage and DeepSpeed's wrapper of our optimizer."""

    can_withhold = False

    @property
    def loss_scale(self) -> float:
        """Factor on the loss before backward; 1 unless the precision is fp16."""
        return self._scale.scale if self._scale else 1.0

    def tensors(self) -> dict[str, Tensor | TensorShard]:
        """Return copies of this rank's fp32 main weights `model.*` and moments `optimizer.*`.

        `load_state` writes them back.
        """
        return self._state.tensors()

    def state(self) -> dict[str, Any]:
        """Return the number of updates and, for fp16, the loss scale."""
        return {
            "optimizer_steps": self._updates,
            "loss_scaler": self._scale.state() if self._scale else None,
        }

    def load_state(
        self, state: dict[str, Any], tensors: Mapping[str, Tensor | TensorShard]
    ) -> None:
        """Restore `state` and the values that were read into `tensors`."""
        self._state.write(tensors)
        self._updates = int(state["optimizer_steps"])
        self._moments.set_steps(self._updates)
        if self._scale and state["loss_scaler"] is not None:
            self._scale.load_state(state["loss_scaler"])

    def _divided_from_the_start(self, mpu: MeshUnit) -> AbstractContextManager[Any]:
        """Return the context in which ZeRO-3 partitions parameters as soon as they are created.

        Without it, a rank would temporarily hold the whole model.
        """
        if self._zero_stage < 3:
            return nullcontext()
        # The type is in the settings: on a CPU, DeepSpeed replaces a type argument with bf16.
        context: AbstractContextManager[Any] = import_deepspeed().zero.Init(
            data_parallel_group=mpu.get_data_parallel_group(),
            config_dict_or_path=self._settings,
            mpu=mpu,
        )
        return context

    def _take_over(self, optimizer: Any, spec: ModelSpec, mpu: MeshUnit) -> None:
        """Store DeepSpeed's model and optimizer, and initialize the main weights."""
        parameters = self._stage.named_parameters
        self._whole = (
            WholeGradients(
                self._adam,
                self._stage,
                main_weights(optimizer, parameters),
                self._config.optim.clip_grad,
            )
            if self._clips_itself
            else None
        )
        self._state = DeepSpeedState(
            parameters, self._stage.partitions, optimizer, self._moments, mpu.data_parallel
        )
        # DeepSpeed may have stepped once, at a learning rate of 0, to allocate its state.
        self._moments.set_steps(0)
        self._scale = (
            DeepSpeedLossScale(optimizer.loss_scaler, self._config.optim.loss_scale)
            if self.precision == "fp16"
            else None
        )
        self.kernels = {
            **self._stage.kernels.names,
            "optimizer": f"deepspeed {type(optimizer).__name__} over {type(self._adam).__name__}",
            "communication": communication(self._mesh, self.device),
        }
        if self._zero_stage < 3 and self.precision == "fp32":
            return
        # Main weights start in fp32, not rounded to the compute type. Under ZeRO-3 they have no
        # values yet.
        for name, parameter in parameters.items():
            partition = self._stage.partitions.get(name)
            shape = tuple(shape_of(parameter))
            values = initial_weight(name, shape, spec, seed=self._config.seed, partition=partition)
            self._state.set_weight(name, values)

    def _set_batch(self, micro_batches: int) -> None:
        """Set DeepSpeed's number of micro batches, which grows while the batch ramps up."""
        if micro_batches != self._engine.gradient_accumulation_steps():
            replica = micro_batches * self._config.train.micro_batch_size
            self._engine.set_train_batch_size(replica * self._mesh.data_parallel.size)

    def update(
        self,
        lr: float,
        weight_decay: float,
        *,
        notices: Sequence[bool] = (),
        withhold: Callable[[Sequence[float]], bool] | None = None,
    ) -> Update:
        """Clip the averaged gradients and make one optimizer step.

        A gradient that is not finite leaves the weights unchanged and lowers the loss scale of
        fp16. DeepSpeed cannot withhold an update.
        """
        assert withhold is None, "DeepSpeed's engines cannot withhold an update"
        set_hyperparameters(self._adam, lr, weight_decay)
        micro_batches = self._step()
        losses = global_means(
            self._losses, micro_batches, len(self.loss_names), self._mesh, self.device, notices
        )
        if not self._engine.was_step_applied():
            grad_norm = math.inf
        else:
            grad_norm = (
                self._whole.norm if self._whole else float(self._engine.get_global_grad_norm())
            )
        applied = math.isfinite(grad_norm)
        self._updates += applied
        if self._scale:
            self._scale.update(overflow=not applied)
        fatal = not applied and (self._scale is None or self._scale.exhausted)
        reduced = Reduced.of(losses.tolist(), self.loss_names, len(notices))
        return reduced.update(grad_norm, applied=applied, fatal=fatal)

    @abstractmethod
    def _step(self) -> int:
        """Let DeepSpeed clip and step; return this replica's number of micro batches."""


class MicroBatch(nn.Module):
    """Wrapper of a model for DeepSpeed: ids of a micro batch in, minimized loss out."""

    def __init__(self, model: Model, rules: InputRules) -> None:
        super().__init__()
        self.model = model
        self._rules = rules

    def forward(self, batch: Tensor, dropout_seed: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the sum of the mean losses, and each mean loss [terms].

        In evaluation, return 0, and the result of `loss_sums`.

        Args:
            batch: ids [b, width].
            dropout_seed: dropout seed of the micro batch.
        """
        losses = self.model.run(self._rules.read(batch), dropout_seed=dropout_seed)
        assert isinstance(losses, dict)
        if not self.training:
            return batch.new_zeros(()), loss_sums(losses)
        means = torch.stack([term.mean() for term in losses.values()])
        return means.sum(), means.detach()


class DeepSpeedEngine(DeepSpeedBase):
    """Engine for models without pipeline stages."""

    def _initialize(self, mpu: MeshUnit) -> tuple[Any, Any]:
        (model,) = self._stage.chunks
        engine, optimizer, _, _ = import_deepspeed().initialize(
            model=MicroBatch(model, self._stage.rules),
            optimizer=self._adam,
            mpu=mpu,
            config=self._settings,
        )
        return engine, optimizer

    def forward_backward(
        self, batches: Iterator[Tensor], seeds: Sequence[int], *, seq_length: int | None = None
    ) -> None:
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
        """Let DeepSpeed clip and step; return the number of micro batches."""
        with self._mesh.time("optimizer"):
            self._engine.step()
        return len(self._losses)

    def loss_sum(
        self, batches: Iterator[Tensor], sizes: Sequence[int], totals: LossTotals
    ) -> Tensor:
        """Add the sums of the losses to `totals`, and return them all, without dropout."""
        padding = 0
        if self._zero_stage == 3:
            # Each pass gathers weights from all replicas, also from those without a further sample.
            passes = torch.tensor(len(sizes), device=self.device)
            padding = int(all_reduce_(passes, self._mesh.data_parallel, MAX)) - len(sizes)
        self._engine.eval()
        try:
            # In inference mode ZeRO-3 would gather weights that no later backward pass may use.
            with torch.no_grad():
                for batch in batches:
                    totals.add(self._engine(batch)[1])
                for _ in range(padding):
                    self._engine(self._padding())
        finally:
            self._engine.train()
        return totals.total

    def _padding(self) -> Tensor:
        """Return ids [1, width] of a micro batch whose losses do not count."""
        return torch.zeros(1, self._config.row_width, dtype=torch.int64, device=self.device)
