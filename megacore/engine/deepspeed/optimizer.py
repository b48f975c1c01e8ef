"""Adam and the dynamic loss scale of DeepSpeed engines.

Adam is torch's fused kernel, or DeepSpeed's for parameters offloaded to the CPU. The state of the
loss scale has the format of a checkpoint, which the native engine reads and writes too.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megacore.config.optim import LossScaleConfig, OptimConfig
from megacore.engine.deepspeed.join import import_deepspeed
from megacore.engine.deepspeed.state import Moments, shape_of
from megacore.models.stage import Stage
from megacore.optim.adam import clip_divisor, has_weight_decay
from megacore.optim.grad_scaler import LossScaleState
from megacore.parallel.collectives import all_reduce

_DECAYS = "decays"
"""Key of a parameter group: True if weight decay applies to it."""


def make_adam(
    parameters: Mapping[str, nn.Parameter], optim: OptimConfig, *, compiled: bool
) -> tuple[torch.optim.Optimizer, Moments]:
    """Return AdamW over all parameters, and its state.

    Its learning rate and weight decay are 0 until they are set.

    Args:
        parameters: parameters by global name.
        optim: betas and epsilon.
        compiled: True to use DeepSpeed's compiled CPU Adam, for offloaded parameters.
    """
    members: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in parameters.items():
        members[has_weight_decay(name, len(shape_of(parameter)))].append(parameter)
    groups = [{"params": each, _DECAYS: decays} for decays, each in members.items() if each]
    values: dict[str, Any] = {
        "lr": 0.0,
        "betas": (optim.adam_beta1, optim.adam_beta2),
        "eps": optim.adam_eps,
        "weight_decay": 0.0,
    }
    adam: torch.optim.Optimizer
    if compiled:
        import_deepspeed()
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        adam, moments = (
            DeepSpeedCPUAdam(groups, adamw_mode=True, **values),
            Moments(lambda weight: 0),
        )
    else:
        adam, moments = torch.optim.AdamW(groups, fused=True, **values), Moments(_zero_steps)
    adam.state = moments
    return adam, moments


def set_hyperparameters(adam: torch.optim.Optimizer, lr: float, weight_decay: float) -> None:
    """Set the learning rate and weight decay of the next update."""
    for group in adam.param_groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay if group[_DECAYS] else 0.0


class WholeGradients:
    """Norm and clipping of gradients without ZeRO.

    DeepSpeed provides no norm in fp32, and in bf16 one without the parts on other tensor-parallel
    ranks.
    """

    def __init__(
        self,
        adam: torch.optim.Optimizer,
        stage: Stage,
        main_weights: Mapping[str, Tensor],
        max_norm: float,
    ) -> None:
        """Register a hook that examines the gradients before each step of `adam`.

        Args:
            adam: optimizer of `main_weights`.
            stage: stage with the corresponding parameters.
            main_weights: main weights by global name.
            max_norm: norm to clip to; 0 does not clip.
        """
        self._stage, self._main_weights, self._max_norm = stage, main_weights, max_norm
        self.norm = 0.0
        """Norm of the last step's gradients, before clipping."""
        adam.register_step_pre_hook(self._clip_or_drop)

    def _clip_or_drop(self, adam: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        """Clip the gradients, or remove them if they are not finite.

        Adam changes nothing without gradients.
        """
        stage = self._stage
        parameters, partitions = stage.named_parameters, stage.partitions
        counted = [
            weight.grad.flatten()
            for name, weight in self._main_weights.items()
            if weight.grad is not None
            and (name in partitions or stage.mesh.tensor_parallel.rank == 0)
            and not getattr(parameters[name], "ds_pipe_replicated", False)
        ]
        norm = (
            all_reduce(
                stage.kernels.sum_of_squares(counted, stage.device), stage.mesh.model_parallel
            )
            .sqrt()
            .float()
        )
        self.norm = float(norm)
        finite, divisor = math.isfinite(self.norm), clip_divisor(norm, self._max_norm)
        for weight in self._main_weights.values():
            if not finite:
                weight.grad = None
            elif weight.grad is not None and self._max_norm > 0:
                weight.grad.div_(divisor)


def _zero_steps(weight: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=weight.device)


class DeepSpeedLossScale:
    """Wrapper of DeepSpeed's loss scaler that gives it the behaviour of megacore's."""

    def __init__(self, scaler: Any, config: LossScaleConfig) -> None:
        """Wrap DeepSpeed's `DynamicLossScaler`.

        At its minimum it must not raise an error but continue, like megacore's scaler. It must not
        change the scale on its own either: DeepSpeed raises the scale between backward and the
        division by it. This halves the gradients of that iteration and, with ZeRO-3, the reported
        norm.
        """
        self._scaler, self._config = scaler, config
        self._move, scaler.update_scale = scaler.update_scale, lambda overflow: None
        self._skipped_at_minimum = 0
        scaler.raise_error_at_min_scale = False

    @property
    def scale(self) -> float:
        """Factor on the loss before backward."""
        return float(self._scaler.cur_scale)

    @property
    def exhausted(self) -> bool:
        """True if the last `patience` iterations in a row overflowed at the minimum."""
        return self._skipped_at_minimum >= self._config.patience

    def update(self, *, overflow: bool) -> None:
        """Count an iteration and choose the scale of the next."""
        at_minimum = self.scale <= self._config.minimum
        self._skipped_at_minimum = self._skipped_at_minimum + at_minimum if overflow else 0
        self._move(overflow)

    def state(self) -> LossScaleState:
        """Return the values for a checkpoint."""
        scaler, window = self._scaler, self._config.window
        # Only the position within the window matters; at the end of a window the scale grows in the
        # next good iteration.
        good = scaler.cur_iter - scaler.last_overflow_iter - 1
        return {
            "scale": self.scale,
            "growth_tracker": (good - 1) % window + 1 if good else 0,
            "hysteresis_tracker": scaler.cur_hysteresis,
            "skipped_at_minimum": self._skipped_at_minimum,
        }

    def load_state(self, state: LossScaleState) -> None:
        """Restore a checkpoint's values."""
        self._scaler.cur_scale = float(state["scale"])
        self._scaler.cur_iter, self._scaler.last_overflow_iter = int(state["growth_tracker"]), -1
        self._scaler.cur_hysteresis = max(1, int(state["hysteresis_tracker"]))
        self._skipped_at_minimum = int(state.get("skipped_at_minimum", 0))
