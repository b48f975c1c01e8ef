"""The engine made of torch alone: data-parallel mixed-precision training with fp32 main weights and gradients.

Mixed precision follows Micikevicius et al. 2018 (arXiv:1710.03740): weights and activations in bf16 or fp16, main
weights, accumulated gradients and moments in fp32; only fp16 needs a loss scale.
"""

import math
from typing import Any

import torch
from torch import Tensor

from megacore.config.run import RunConfig
from megacore.data_parallel.grad_sync import GradSync
from megacore.engine.base import Update
from megacore.models.gpt import GPTModel
from megacore.optim.adam import MainWeightAdamW
from megacore.optim.grad_clip import clip_by_norm_, global_norm
from megacore.optim.grad_scaler import DynamicLossScaler
from megacore.parallel.mesh import ProcessMesh

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class NativeEngine:
    """Implements `megacore.engine.base.Engine`."""

    def __init__(self, model: GPTModel, config: RunConfig, mesh: ProcessMesh, precision: str) -> None:
        """Take over a model in fp32 and cast it to the compute type.

        Args:
            model: with its initial weights, on the device to train on.
            config: the run.
            mesh: this process's groups.
            precision: fp32, bf16 or fp16.
        """
        self.precision = precision
        self._model = model.train()
        self._clip_grad = config.optim.clip_grad
        replicas = mesh.data_parallel
        self._micro_steps = config.train.global_batch_size // (config.train.micro_batch_size * replicas.size)
        parameters = dict(model.named_parameters())
        self.device = next(iter(parameters.values())).device
        self._optimizer = MainWeightAdamW(parameters, config.optim, DTYPES[precision])
        self._grad_sync = GradSync(parameters, replicas, config.parallel.grad_reduce_bucket_mb)
        self._scaler = DynamicLossScaler(config.optim.loss_scale) if precision == "fp16" else None
        self._losses: list[Tensor] = []
        self.kernels = {
            "attention": "torch scaled_dot_product_attention",
            "optimizer": "torch fused AdamW",
            "all_reduce": "none" if replicas.size == 1 else "nccl" if self.device.type == "cuda" else "gloo",
        }

    @property
    def parameters(self) -> int:
        """Number of the model's parameters."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""
        return self._model.padded_vocab_size

    @property
    def loss_scale(self) -> float:
        """Factor on the loss before backward: 1 but for fp16."""
        return self._scaler.scale if self._scaler else 1.0

    def start_iteration(self) -> None:
        """Forget the gradients of the iteration before."""
        self._losses.clear()
        self._grad_sync.zero()

    def micro_step(self, tokens: Tensor, *, last: bool) -> None:
        """Forward and backward of one micro batch: ids [b, s + 1]."""
        loss = self._model.loss(tokens[:, :-1], tokens[:, 1:]).mean()
        with self._grad_sync.micro_step(last=last):
            (loss * (self.loss_scale / self._micro_steps)).backward()  # type: ignore[no-untyped-call]
        self._losses.append(loss.detach())

    def update(self, lr: float) -> Update:
        """Average the gradients over the ranks, clip them, and make one optimizer step.

        A gradient that is not finite leaves the weights alone and lowers the loss scale of fp16. Every rank decides
        alike, since all hold the same gradients by then.
        """
        self._grad_sync.finish()
        scale = self.loss_scale
        norm = global_norm(self._grad_sync.buffers) / scale
        # One transfer to the host per iteration: a bad gradient has to be seen before the weights are touched.
        *losses, grad_norm = torch.stack([*self._losses, norm]).tolist()
        applied = math.isfinite(grad_norm)
        fatal = not applied and (self._scaler is None or self._scaler.exhausted)
        if self._scaler:
            self._scaler.update(overflow=not applied)
        if applied:
            clip_by_norm_(self._grad_sync.buffers, norm, self._clip_grad, scale=scale)
            self._optimizer.step(self._grad_sync.gradients, lr)
        return Update(tuple(losses), grad_norm, applied, fatal)

    def token_losses(self, tokens: Tensor) -> Tensor:
        """Loss of every target without dropout or gradients: ids [b, s + 1] -> fp32 [b, s]."""
        self._model.eval()
        try:
            with torch.inference_mode():
                return self._model.loss(tokens[:, :-1], tokens[:, 1:])
        finally:
            self._model.train()

    def tensors(self) -> dict[str, Tensor]:
        """fp32 main weights `model.*` and moments `optimizer.exp_avg.*`, `optimizer.exp_avg_sq.*`."""
        return self._optimizer.tensors()

    def state(self) -> dict[str, Any]:
        """Number of updates and, for fp16, the loss scale."""
        return {
            "optimizer_steps": self._optimizer.steps,
            "loss_scaler": self._scaler.state() if self._scaler else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state` and from the tensors, which were loaded in place before."""
        self._optimizer.steps = int(state["optimizer_steps"])
        if self._scaler and state["loss_scaler"] is not None:
            self._scaler.load_state(state["loss_scaler"])
        self._optimizer.write_back()
