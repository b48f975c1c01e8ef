"""The optimizer and its schedule."""

from typing import Literal

from megacore.config.base import Section, keyed

LrDecayStyle = Literal["cosine", "linear", "constant", "inverse-square-root", "WSD"]
LrWarmupStyle = Literal["linear", "log"]
LrWsdDecayStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]


class LossScaleConfig(Section):
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018), with Megatron's hysteresis."""

    initial: float = keyed(2.0**32, gt=0)
    """First loss scale."""
    window: int = keyed(1000, gt=0)
    """Iterations without overflow after which the scale doubles."""
    hysteresis: int = keyed(2, gt=0)
    """Overflows since the scale last grew, from which on each further one halves it."""
    minimum: float = keyed(1.0, gt=0)
    """The scale never falls below this."""
    patience: int = keyed(10, gt=0)
    """Iterations in a row skipped at the minimum after which the run stops."""


class OptimConfig(Section):
    """AdamW (Loshchilov and Hutter 2019) over fp32 main weights."""

    lr: float = keyed(gt=0)
    """Peak learning rate."""
    min_lr: float = keyed(0.0, ge=0)
    """Learning rate at and after lr_decay_iters; inverse-square-root never falls below it."""
    lr_decay_style: LrDecayStyle = keyed("cosine")
    """Shape of the decay from lr to min_lr; WSD (Hu et al. 2024) stays at lr until its last
    lr_wsd_decay_iters."""
    lr_wsd_decay_style: LrWsdDecayStyle = keyed("exponential")
    """Shape of WSD's last part."""
    lr_wsd_decay_iters: int | None = keyed(None, gt=0)
    """Iterations of WSD's last part, which ends at lr_decay_iters; needed for WSD and for nothing
    else."""
    lr_decay_iters: int | None = keyed(None, gt=0)
    """Iteration at which the decay ends; null means train.train_iters."""
    lr_warmup_iters: int | None = keyed(None, ge=0)
    """Iterations of warm-up; give this, lr_warmup_samples or lr_warmup_fraction."""
    lr_warmup_samples: int | None = keyed(None, ge=0)
    """Warm-up in samples, batch-size ramp-up counted."""
    lr_warmup_fraction: float | None = keyed(None, ge=0, lt=1)
    """Warm-up as a fraction of lr_decay_iters."""
    lr_warmup_init: float = keyed(0.0, ge=0)
    """Learning rate at which the warm-up starts."""
    lr_warmup_style: LrWarmupStyle = keyed("linear")
    """Shape of the warm-up: a straight line, or a logarithm, which DeepSpeed's schedulers have by
    default."""
    weight_decay: float = keyed(0.01, ge=0)
    """Decoupled weight decay; none on biases and layer norms."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = keyed("constant")
    """How weight decay goes from start_weight_decay to end_weight_decay over lr_decay_iters."""
    start_weight_decay: float | None = keyed(None, ge=0)
    """First weight decay; null means weight_decay."""
    end_weight_decay: float | None = keyed(None, ge=0)
    """Last weight decay; null means weight_decay."""
    adam_beta1: float = keyed(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    adam_beta2: float = keyed(0.999, ge=0, lt=1)
    """Decay of the second moment."""
    adam_eps: float = keyed(1e-8, gt=0)
    """Added to the root of the second moment."""
    clip_grad: float = keyed(1.0, ge=0)
    """Maximum global gradient norm; 0 does not clip."""
    loss_scale: LossScaleConfig = keyed(LossScaleConfig())
    """Used with precision fp16 only."""
