"""Causes that the fields of a run's configuration stand for, and how they change a loss."""

AT_ONCE = frozenset(
    {
        "seed",
        "data",
        "tokenizer",
        "sample_order",
        "samples",
        "initial_weights",
        "resumed_from",
        "architecture",
        "dropout",
        "precision",
        "loss",
        "batch_size",
        "skipped_iterations",
        "family",
    }
)
"""Causes that change the loss or the gradient of the first iteration in which they apply."""
ROUNDING = frozenset(
    {
        "layout",
        "kernels",
        "versions",
        "hardware",
        "micro_batch_size",
        "recompute",
        "engine",
        "determinism",
    }
)
"""Causes that change results by rounding only, if nothing is wrong."""
_FIELDS = {
    "seed": "seed",
    "family": "family",
    "name": "remark",
    "verify": "remark",
    "data.tokenizer": "tokenizer",
    "data.source": "data",
    "data.sources": "data",
    "data.workers": "remark",
    "data.shard": "remark",
    "data.dask": "remark",
    "data.max_document_mb": "data",
    "data": "samples",
    "model.hidden_dropout": "dropout",
    "model.attention_dropout": "dropout",
    "model.init_method_std": "initial_weights",
    "model": "architecture",
    "optim.lr": "lr_schedule",
    "optim.min_lr": "lr_schedule",
    "optim": "optimizer",
    "train.global_batch_size": "batch_size",
    "train.rampup_batch_size": "batch_size",
    "train.micro_batch_size": "micro_batch_size",
    "train.precision": "precision",
    "train.pretrained_checkpoint": "initial_weights",
    "train.skip_samples": "skipped_iterations",
    "train.label_smoothing": "loss",
    "train.z_loss": "loss",
    "train.loss_scale": "loss_scale",
    "train.initial_loss_scale": "loss_scale",
    "train.min_loss_scale": "loss_scale",
    "train.hysteresis": "loss_scale",
    "train.kernels": "kernels",
    "train.compile": "kernels",
    "train.cuda_graphs": "kernels",
    "train.tf32": "precision",
    "train.deterministic": "determinism",
    "train.recompute": "recompute",
    "train.train_iters": "train_iters",
    "train.loss_spike": "skipped_iterations",
    "train.exit": "remark",
    "train.log_interval": "remark",
    "train.eval": "remark",
    "train.profile": "remark",
    "train": "training",
    "resume": "resumed_from",
    "engine": "engine",
    "deepspeed": "engine",
    "parallel": "layout",
    "launch": "remark",
    "checkpoint": "remark",
    "evaluate": "remark",
    "export": "remark",
    "tracking": "remark",
    "limits": "samples",
    "task": "data",
}
"""Cause by the longest beginning of a field's dotted name."""


def cause_of_field(name: str) -> str:
    """Return the cause that a value of the configuration stands for, or "configuration"."""
    matches = [
        prefix for prefix in _FIELDS if name == prefix or name.startswith((f"{prefix}.", prefix))
    ]
    return _FIELDS[max(matches, key=len)] if matches else "configuration"
