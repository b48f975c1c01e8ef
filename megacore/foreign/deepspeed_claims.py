"""Reader of DeepSpeed's JSON for a fine-tuning, which yields claims and normalizes the JSON."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megacore.foreign.deepspeed import AcceptedKeys, read_keys
from megacore.foreign.deepspeed_keys import AUTO, REFUSED, Key, Refused, definitions
from megacore.foreign.files import Claim, leaves, nested

STAGES = {"zero2": 2, "zero3": 3, "zero3-offload": 3}
"""ZeRO stage of each value of `launch.distributed`."""
COURSES = {
    "WarmupLR": "constant_with_warmup",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
}
"""Equivalent of each DeepSpeed scheduler in `optim.lr_scheduler`."""
_ADAMS = ("Adam", "AdamW")
_PARAMETERS = {
    "SGD": ("momentum", "dampening", "nesterov"),
    "RMSprop": ("alpha", "eps", "momentum", "centered"),
    "Adamax": ("betas", "eps"),
    "NAdam": ("betas", "eps", "momentum_decay", "decoupled_weight_decay"),
    "RAdam": ("betas", "eps", "decoupled_weight_decay"),
    "Adam": ("betas", "eps", "torch_adam", "adam_w_mode"),
    "AdamW": ("betas", "eps", "torch_adam", "adam_w_mode"),
}
"""Parameters of the supported optimizers in addition to lr and weight_decay. DeepSpeed takes these
optimizers from PyTorch, so that nothing is compiled, and they update each weight independently,
which ZeRO needs."""

_NOT_USED = "models of transformers do not use it: remove it, and see train.gradient_checkpointing"
_MONITOR = "what it would write goes to MLflow: remove it"
_BLOCKS = {
    "activation_checkpointing": _NOT_USED,
    "aio": "nothing is offloaded to nvme: remove it",
    **dict.fromkeys(("tensorboard", "csv_monitor", "wandb", "comet"), _MONITOR),
}
"""Blocks that a pretraining accepts and a fine-tuning refuses."""
_REASONS = {
    "the flow reads the data: see the section data": (
        "dataloader_drop_last data_efficiency curriculum_learning"
    ),
    "checkpoints are the flow's: see the section checkpoint": (
        "checkpoint datastates_ckpt nebula zero_optimization.elastic_checkpoint "
        "zero_optimization.load_from_fp32_weights zero_optimization.pipeline_loading_checkpoint"
    ),
    "every rank has samples of its own and the same model: remove it": (
        "tensor_parallel pipeline sequence_parallel_size data_parallel_size "
        "seq_parallel_communication_data_type"
    ),
    "torch's Adam is taken as it is: remove it": (
        "optimizer.params.fused optimizer.params.foreach optimizer.params.set_grad_none"
    ),
    "DeepSpeed's Adam does not have it: set it to false": "optimizer.params.amsgrad",
    "torch's Adam always has it: set it to true": "optimizer.params.bias_correction",
    "nothing is fused here: remove it": "optimizer.legacy_fusion",
    "the model has it: remove it": "vocabulary_size",
    "Muon would be compiled: remove it": "zero_optimization.save_muon_momentum_buffer_in_memory",
    "the optimizer is offloaded whole: set it to 1.0": "zero_optimization.offload_optimizer.ratio",
    "it starts jobs of its own: use --find-batch-size": "autotuning",
}
"""Reasons for refusals that differ from those of a pretraining."""
_OWN_REASONS = {key: reason for reason, keys in _REASONS.items() for key in keys.split()}
_NUMBERS = ("momentum", "dampening", "alpha", "momentum_decay")
_FLAGS = ("nesterov", "centered", "decoupled_weight_decay")
_PASSED_HERE = {
    "fp16.auto_cast": Key("flag"),
    "zero_optimization.round_robin_gradients": Key("flag"),
    **{f"optimizer.params.{name}": Key("number") for name in _NUMBERS},
    **{f"optimizer.params.{name}": Key("flag") for name in _FLAGS},
}
"""Keys that a fine-tuning accepts and a pretraining does not."""
_TORCH_ADAM = "optimizer.params.torch_adam"
_COMPILED = "DeepSpeed's Adam would be compiled: set it to"
_REFUSED_HERE = {
    "optimizer.params.max_grad_norm": Refused("DeepSpeed takes gradient_clipping: use that"),
    _TORCH_ADAM: Refused(f"{_COMPILED} true", (True,)),
    "zero_force_ds_cpu_optimizer": Refused(f"{_COMPILED} false"),
    **{name: Refused(reason) for name, reason in _BLOCKS.items()},
}
_FILLED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "fp16.enabled",
    "bf16.enabled",
    "fp16.loss_scale",
    "fp16.initial_scale_power",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "optimizer.params.",
    "scheduler.params.",
)
"""Keys whose "auto" is filled when the run starts; for other keys it means DeepSpeed's default."""


def finetuning_keys(name: str) -> AcceptedKeys:
    """Return the keys that a fine-tuning accepts; `name` is the name of the file in messages."""
    known = definitions(name)
    blocks = tuple(f"{block}." for block in _BLOCKS)
    keys = {
        key: kind
        for key, kind in known.keys.items()
        if key not in _REFUSED_HERE and not key.startswith(blocks)
    }
    refused = {
        key: value._replace(reason=_OWN_REASONS.get(key, value.reason))
        for key, value in REFUSED.items()
        if key not in _PASSED_HERE
    }
    return AcceptedKeys(
        known,
        keys | _PASSED_HERE,
        name,
        refused | _REFUSED_HERE,
        tuple(_PARAMETERS),
        "and DeepSpeed would compile it, or fails with it: use one of "
        f"{', '.join(sorted(_PARAMETERS))}, or remove optimizer",
        "and no optim.lr_scheduler is like it",
    )


def read_deepspeed(
    content: dict[str, Any], values: Mapping[str, Any], name: str, batch: Mapping[str, int]
) -> Iterator[Claim]:
    """Yield the JSON's settings as values of the configuration, without those that are "auto".

    For a key that a block omits, DeepSpeed's default applies if the configuration has no value.

    Args:
        content: content of the JSON, which is normalized in place: DeepSpeed's current names,
            parsed values, the resolved ZeRO stage and offload, and "auto" for everything that
            follows from the configuration.
        values: values of the configuration by section, including earlier claims.
        name: name of the file in messages.
        batch: defaults of the fields of `train` whose product is the batch of a rank.

    Raises:
        ValueError: a key is unknown or refused, or a value is invalid here.
    """
    accepted = finetuning_keys(name)
    flat = dict(read_keys(content, accepted))
    torch_adam = dict(leaves(content)).get(_TORCH_ADAM) in (True, "true", "True")
    yield from _zero(flat, values, name)
    yield from _precision(flat, values, name)
    for key, field in (
        ("train_micro_batch_size_per_gpu", "train.micro_batch_size"),
        ("gradient_accumulation_steps", "train.gradient_accumulation_steps"),
        ("gradient_clipping", "optim.clip_grad"),
    ):
        yield from _number(flat, key, field, name, accepted.definitions.default(key))
    yield from _optimizer(flat, accepted, torch_adam)
    yield from _scheduler(flat, accepted)
    _check_batch(flat, values, name, batch)
    plain = {key: value for key, value in flat.items() if value != AUTO or key.startswith(_FILLED)}
    content.clear()
    content.update(nested(plain))


def _number(
    flat: Mapping[str, Any], key: str, field: str, name: str, default: Any = None
) -> Iterator[Claim]:
    if key not in flat and default is not None:
        clause = f"{key} of {name} is {default} by DeepSpeed's default"
        yield Claim(field, default, clause, by_default=True)
    elif flat.get(key, AUTO) != AUTO:
        yield Claim(field, flat[key], f"{key} of {name} is {flat[key]}")


def _zero(flat: dict[str, Any], values: Mapping[str, Any], name: str) -> Iterator[Claim]:
    """Yield the claims for the ZeRO stage and offload.

    `launch.distributed` determines a stage that is missing or "auto", and a device that is "auto".
    """
    key, distributed = "zero_optimization.stage", values["launch"].get("distributed")
    if flat.get(key, AUTO) == AUTO:
        if distributed is None:
            raise ValueError(
                f"{key} of {name} is missing, and launch.distributed too: give one of them"
            )
        if distributed not in STAGES:
            raise ValueError(
                f"{name} is DeepSpeed's JSON but launch.distributed is {distributed}: set the "
                f"latter to {', '.join(STAGES)}, or remove the former"
            )
        flat[key] = STAGES[distributed]
    stage, offload = flat[key], "cpu" if distributed == "zero3-offload" else "none"
    clause = f"{key} of {name} is {stage}"
    if stage not in STAGES.values():
        raise ValueError(
            f"{clause}: use 2 or 3, or launch.distributed ddp without launch.deepspeed_config"
        )
    yield Claim(key, stage, clause, ours=False)
    devices = []
    for what in ("offload_optimizer", "offload_param"):
        device_key = f"zero_optimization.{what}.device"
        if flat.get(device_key) == AUTO:
            flat[device_key] = offload
        device = flat.get(device_key, "none")
        device_clause = f"{device_key} of {name} is {device}"
        if device == "nvme":
            raise ValueError(f"{device_clause}: use cpu or none, nvme is not used here")
        if stage == 2 and device == "cpu" and what == "offload_param":
            raise ValueError(f"{device_clause} but {clause}: use stage 3, or none")
        yield Claim(device_key, device, device_clause, ours=False)
        devices.append(device)
        if device == "none":
            block = f"zero_optimization.{what}."
            for part in [key for key in flat if key.startswith(block) and key != device_key]:
                del flat[part]
    kind, where = f"zero{stage}", " without offload of both parts" if stage == 3 else ""
    if stage == 3 and devices == ["cpu", "cpu"]:
        kind, where = "zero3-offload", " with both parts offloaded"
    yield Claim("launch.distributed", kind, f"{clause}{where}")


def _precision(flat: Mapping[str, Any], values: Mapping[str, Any], name: str) -> Iterator[Claim]:
    """Yield the claim for the precision: the enabled block's, or fp32 if both are disabled."""
    train = values.get("train")
    precision = train.get("precision") if isinstance(train, dict) else None
    fp16, bf16 = (flat.get(f"{kind}.enabled") for kind in ("fp16", "bf16"))
    if fp16 is True and bf16 is True:
        raise ValueError(f"fp16.enabled and bf16.enabled of {name} are both true: keep one of them")
    for kind, on in (("fp16", fp16), ("bf16", bf16)):
        if on is True:
            yield Claim("train.precision", kind, f"{kind}.enabled of {name} is true")
    if True in (fp16, bf16):
        return
    if bf16 is False and (fp16 is False or precision != "fp16"):
        clause = f"bf16.enabled of {name} is false"
        if fp16 is False:
            clause = f"fp16.enabled and bf16.enabled of {name} are false"
        yield Claim("train.precision", "fp32", clause)
    elif fp16 is False and precision == "fp16":
        raise ValueError(
            f"fp16.enabled of {name} is false but train.precision is fp16: change one of them"
        )


def _optimizer(flat: dict[str, Any], accepted: AcceptedKeys, torch_adam: bool) -> Iterator[Claim]:
    kind, prefix, name = flat.get("optimizer.type"), "optimizer.params.", accepted.name
    if kind is None:
        return
    known = ("lr", "weight_decay", *_PARAMETERS[kind])
    for key in (key for key in flat if key.startswith(prefix)):
        if key.removeprefix(prefix) not in known:
            raise ValueError(
                f"{key} of {name} is no parameter of {kind}, which has {', '.join(known)}: remove "
                "it"
            )
    defaults = accepted.definitions.optimizer({**flat, _TORCH_ADAM: torch_adam})
    yield from _number(flat, f"{prefix}lr", "optim.lr", name)  # the learning rate has no default
    pairs = {"weight_decay": "optim.weight_decay"}
    if kind in _ADAMS:
        pairs["eps"] = "optim.adam_eps"
        betas = flat.get(f"{prefix}betas", defaults[f"{prefix}betas"])
        for number, beta in enumerate(betas if betas != AUTO else ()):
            part = f"{prefix}betas[{number}]"
            present = {part: beta} if f"{prefix}betas" in flat else {}
            yield from _number(present, part, f"optim.adam_beta{number + 1}", name, beta)
    for key, field in pairs.items():
        at = f"{prefix}{key}"
        yield from _number(flat, at, field, name, defaults[at])
    filled = ("lr", *pairs, *(("betas",) if kind in _ADAMS else ()))
    for key in known:
        if key in filled:
            flat.setdefault(f"{prefix}{key}", AUTO)
        elif flat.get(f"{prefix}{key}") == AUTO:  # PyTorch's default applies
            del flat[f"{prefix}{key}"]


def _scheduler(flat: dict[str, Any], accepted: AcceptedKeys) -> Iterator[Claim]:
    kind, prefix, name = flat.get("scheduler.type"), "scheduler.params.", accepted.name
    if kind is None:
        return
    yield Claim("optim.lr_scheduler", COURSES[kind], f"scheduler.type of {name} is {kind}")
    steps, total = (flat.get(f"{prefix}{key}") for key in ("warmup_num_steps", "total_num_steps"))
    if steps == 0:
        raise ValueError(
            f'{prefix}warmup_num_steps of {name} is 0: DeepSpeed takes 1 or more, or "auto"'
        )
    if isinstance(steps, int) and isinstance(total, int) and steps >= total:
        raise ValueError(
            f"{prefix}warmup_num_steps of {name} is {steps} but total_num_steps is {total}: the "
            "warm-up must end before"
        )
    defaults = accepted.definitions.schedulers[kind]
    yield from _number(flat, f"{prefix}warmup_max_lr", "optim.lr", name)
    at = f"{prefix}warmup_num_steps"
    yield from _number(flat, at, "optim.warmup_steps", name, defaults["warmup_num_steps"])
    for key in ("warmup_max_lr", "warmup_num_steps", "total_num_steps"):
        if key in defaults:
            flat.setdefault(f"{prefix}{key}", AUTO)
    for key in ("warmup_min_ratio", "cos_min_ratio", "warmup_type"):
        if flat.get(f"{prefix}{key}") == AUTO:
            del flat[f"{prefix}{key}"]


def _check_batch(
    flat: Mapping[str, Any], values: Mapping[str, Any], name: str, batch: Mapping[str, int]
) -> None:
    """Raise ValueError if the batch differs from micro batch x accumulation x ranks."""
    total, train = flat.get("train_batch_size", AUTO), values.get("train") or {}
    if not isinstance(train, Mapping):
        return  # its section refuses it
    factors = {key: train.get(key, default) for key, default in batch.items()}
    if total == AUTO or not all(isinstance(each, int) and each > 0 for each in factors.values()):
        return
    ranks = _ranks(values["launch"])
    product = math.prod(factors.values()) * (ranks or 1)
    if total % product or (ranks is not None and total != product):
        terms = [f"train.{key} {factor}" for key, factor in factors.items()]
        terms += [f"{ranks} ranks"] if ranks is not None else []
        raise ValueError(
            f"train_batch_size of {name} is {total} but {' x '.join(terms)} = {product}: change "
            'one of them, or say "auto" in the JSON'
        )


def _ranks(launch: Mapping[str, Any]) -> int | None:
    """Return the number of ranks of the job if the configuration gives it, else None."""
    per_host, nodes = launch.get("nproc_per_node"), launch.get("nnodes") or 1
    if isinstance(per_host, int) and isinstance(nodes, int) and launch.get("hostfile") is None:
        return per_host * nodes
    return None
