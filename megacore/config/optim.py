"""Section `optim`: the optimizer, its learning-rate schedule and loss scaling."""

from typing import Literal

from megacore.config.base import Section, keyed

OptimizerName = Literal["adam", "muon"]
LrDecayStyle = Literal["cosine", "linear", "constant", "inverse-square-root", "WSD"]
LrWarmupStyle = Literal["linear", "log"]
LrWsdDecayStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]


class LossScaleConfig(Section):
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018), with Megatron's hysteresis."""

    initial: float = keyed(2.0**32, gt=0)
    """Initial loss scale, at least minimum."""
    window: int = keyed(1000, gt=0)
    """Iterations without overflow after which the scale doubles."""
    hysteresis: int = keyed(2, gt=0)
    """Number of overflows since the scale last grew at which the scale is first halved; each
    further overflow halves it again."""
    minimum: float = keyed(1.0, gt=0)
    """Smallest loss scale; the scale is never reduced below it."""
    patience: int = keyed(10, gt=0)
    """Consecutive skipped iterations at the minimum scale after which the run stops."""


class OptimConfig(Section):
    """Options of the optimizer, AdamW or Muon, with fp32 main weights."""

    name: OptimizerName = keyed("adam", omit_default=True)
    """Optimizer: adam is AdamW (Loshchilov and Hutter 2019); muon (Jordan et al. 2024) updates the
    matrices of the layers by their orthogonalized momentum, scaled as in Liu et al. 2025, so that
    lr and weight_decay of AdamW suit it, and everything else by AdamW."""
    muon_momentum: float = keyed(0.95, omit_default=True, ge=0, lt=1)
    """Decay rate of Muon's momentum; used with name muon only."""
    lr: float = keyed(1e-3, gt=0)
    """Peak learning rate."""
    min_lr: float = keyed(0.0, ge=0)
    """Learning rate at and after lr_decay_iters, and lower bound of inverse-square-root."""
    lr_decay_style: LrDecayStyle = keyed("cosine")
    """Shape of the decay from lr to min_lr. WSD (Hu et al. 2024) stays at lr until the last
    lr_wsd_decay_iters iterations."""
    lr_wsd_decay_style: LrWsdDecayStyle = keyed("exponential")
    """Shape of WSD's final decay; refused for other styles unless it has its default."""
    lr_wsd_decay_iters: int | None = keyed(None, gt=0)
    """Iterations of WSD's final decay, which ends at lr_decay_iters; required for WSD, refused for
    other styles."""
    lr_decay_iters: int | None = keyed(None, gt=0)
    """Iteration at which the decay ends; null means train.train_iters."""
    lr_warmup_iters: int | None = keyed(None, ge=0)
    """Warm-up in iterations. Give at most one of this, lr_warmup_samples and lr_warmup_fraction;
    without any there is no warm-up."""
    lr_warmup_samples: int | None = keyed(None, ge=0)
    """Warm-up in samples, including those of the batch-size ramp-up."""
    lr_warmup_fraction: float | None = keyed(None, ge=0, lt=1)
    """Warm-up as a fraction of lr_decay_iters."""
    lr_warmup_init: float = keyed(0.0, ge=0)
    """Learning rate at which the warm-up starts."""
    lr_warmup_style: LrWarmupStyle = keyed("linear")
    """Shape of the warm-up: linear, or logarithmic as by default in DeepSpeed's schedulers."""
    weight_decay: float = keyed(0.01, ge=0)
    """Decoupled weight decay; biases and norm weights are not decayed."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = keyed("constant")
    """Change of the weight decay from start_weight_decay to end_weight_decay over
    lr_decay_iters."""
    start_weight_decay: float | None = keyed(None, ge=0)
    """Initial weight decay; null means weight_decay."""
    end_weight_decay: float | None = keyed(None, ge=0)
    """Final weight decay; null means weight_decay."""
    adam_beta1: float = keyed(0.9, ge=0, lt=1)
    """Decay rate of Adam's first moment."""
    adam_beta2: float = keyed(0.999, ge=0, lt=1)
    """Decay rate of Adam's second moment."""
    adam_eps: float = keyed(1e-8, gt=0)
    """Term added to the square root of the second moment for numerical stability."""
    clip_grad: float = keyed(1.0, ge=0)
    """Maximum global gradient norm, to which larger gradients are scaled down; 0 disables
    clipping."""
    loss_scale: LossScaleConfig = keyed(LossScaleConfig())
    """Loss scaling; used with precision fp16 only."""
