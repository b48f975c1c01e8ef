"""What DeepSpeed is told beside the rest of the configuration: by its section, or by a JSON."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from megacore.config.base import Section, unkeyed

if TYPE_CHECKING:
    from megacore.config.run import RunConfig

OffloadDevice = Literal["none", "cpu", "nvme"]


class DeepSpeedConfig(Section):
    """ZeRO (Rajbhandari et al. 2020), offload (Ren et al. 2021) and buckets of DeepSpeed.

    Sizes are in elements, as in DeepSpeed's own files; null leaves a value to DeepSpeed. With
    engine native all of it is left alone, so that one value changes the engine.
    """

    config: str | dict[str, Any] | None = unkeyed(None)
    """DeepSpeed's own JSON: a path, or its content; it takes the place of the fields below up to
    cpu_checkpointing, which fill what it leaves to "auto"."""
    zero_stage: Literal[0, 1, 2, 3] | None = unkeyed(None)
    """What the replicas divide: 1 the optimizer's state, 2 gradients too, 3 weights too; null means
    1 with parallel.use_distributed_optimizer, else 0."""
    offload_optimizer: OffloadDevice = unkeyed("none")
    """Where the optimizer's state and its arithmetic go, with ZeRO stage 1 to 3; nvme with stage 3
    alone."""
    offload_param: OffloadDevice = unkeyed("none")
    """Where weights lie while they are not used, with ZeRO stage 3."""
    nvme_path: str | None = unkeyed(None, min_length=1)
    """Directory on a local NVMe disk for what is offloaded there."""
    pin_memory: bool = unkeyed(True)
    """Whether what is offloaded to the CPU lies in page-locked memory; without a GPU nothing is
    locked."""
    overlap_comm: bool | None = unkeyed(None)
    """Whether gradients travel while backward runs; null means with stage 3 alone."""
    reduce_bucket_size: int | None = unkeyed(None, gt=0)
    """Gradients that travel at a time; null means parallel.grad_reduce_bucket_mb."""
    allgather_bucket_size: int | None = unkeyed(None, gt=0)
    """Updated weights that travel at a time, with ZeRO stage 1 and 2."""
    sub_group_size: int | None = unkeyed(None, gt=0)
    """Weights that are updated at a time, with ZeRO stage 3."""
    stage3_prefetch_bucket_size: int | None = unkeyed(None, ge=0)
    """Weights that are gathered ahead of their use."""
    stage3_param_persistence_threshold: int | None = unkeyed(None, ge=0)
    """Parameters with fewer elements are not divided."""
    stage3_max_live_parameters: int | None = unkeyed(None, ge=0)
    """Gathered weights that a rank holds at most."""
    stage3_max_reuse_distance: int | None = unkeyed(None, ge=0)
    """Weights that are used again within so many others stay gathered."""
    partition_activations: bool = unkeyed(False)
    """Whether tensor-parallel ranks divide what full recomputation keeps of each layer."""
    cpu_checkpointing: bool = unkeyed(False)
    """Whether what full recomputation keeps lies in main memory."""
    cpu_adam: Literal["auto", "deepspeed", "torch"] = unkeyed("auto")
    """Adam of an offloaded optimizer: DeepSpeedCPUAdam, which is compiled once before the training,
    or torch's; auto takes DeepSpeed's where it builds."""
    build_timeout: float = unkeyed(600.0, gt=0)
    """Seconds in which each of DeepSpeed's operators must be compiled."""


_ZERO, _RECOMPUTE = "zero_optimization", "activation_checkpointing"
FIELDS: dict[str, tuple[str, ...]] = {
    "zero_stage": (f"{_ZERO}.stage",),
    "offload_optimizer": (f"{_ZERO}.offload_optimizer.device",),
    "offload_param": (f"{_ZERO}.offload_param.device",),
    "nvme_path": (f"{_ZERO}.offload_optimizer.nvme_path", f"{_ZERO}.offload_param.nvme_path"),
    "pin_memory": (f"{_ZERO}.offload_optimizer.pin_memory", f"{_ZERO}.offload_param.pin_memory"),
    "overlap_comm": (f"{_ZERO}.overlap_comm",),
    "reduce_bucket_size": (f"{_ZERO}.reduce_bucket_size",),
    "allgather_bucket_size": (f"{_ZERO}.allgather_bucket_size",),
    "sub_group_size": (f"{_ZERO}.sub_group_size",),
    "stage3_prefetch_bucket_size": (f"{_ZERO}.stage3_prefetch_bucket_size",),
    "stage3_param_persistence_threshold": (f"{_ZERO}.stage3_param_persistence_threshold",),
    "stage3_max_live_parameters": (f"{_ZERO}.stage3_max_live_parameters",),
    "stage3_max_reuse_distance": (f"{_ZERO}.stage3_max_reuse_distance",),
    "partition_activations": (f"{_RECOMPUTE}.partition_activations",),
    "cpu_checkpointing": (f"{_RECOMPUTE}.cpu_checkpointing",),
}
"""Fields of the section deepspeed, and the keys of DeepSpeed's JSON that say the same."""
FIELD_OF = {key: field for field, keys in FIELDS.items() for key in keys}


@dataclass(frozen=True)
class Asked:
    """What DeepSpeed is asked for beside the rest of the configuration."""

    values: Mapping[str, Any]
    """By dotted names of DeepSpeed's JSON; what is null or left to others is absent."""
    autos: frozenset[str]
    """Names that the JSON leaves to the configuration by "auto"."""
    in_file: bool
    """Whether a JSON says it, not the section's fields."""

    @property
    def stage(self) -> int:
        """ZeRO's."""
        return int(self.values[f"{_ZERO}.stage"])

    def named(self, key: str) -> str:
        """Return where a user finds a value."""
        return f"{key} of deepspeed.config" if self.in_file else f"deepspeed.{FIELD_OF[key]}"

    def device(self, what: str) -> str:
        """Return where `offload_optimizer` or `offload_param` puts things."""
        return str(self.values.get(f"{_ZERO}.{what}.device", "none"))


def asked_of(config: "RunConfig") -> Asked:
    """Return what the section or the user's JSON asks of DeepSpeed, with "auto" filled.

    Raises ValueError for a key or a value that is refused, and for a field of the section that the
    JSON contradicts.
    """
    section = config.deepspeed
    fields = {name: getattr(section, name) for name in FIELDS}
    changed = {
        name: value
        for name, value in fields.items()
        if value != DeepSpeedConfig.model_fields[name].default
    }
    values: dict[str, Any] = {}
    autos: frozenset[str] = frozenset()
    if section.config is None:
        values = {key: value for name, value in changed.items() for key in FIELDS[name]}
    elif isinstance(section.config, str):
        raise ValueError(
            f"deepspeed.config is the path {section.config!r}, which was not read: give the "
            "content of the file, or load the configuration from its YAML"
        )
    else:
        from megacore.foreign.deepspeed import read_keys
        from megacore.foreign.deepspeed_keys import AUTO

        values = dict(read_keys(section.config))
        for name, value in changed.items():
            _fill(values, name, value)
        autos = frozenset(key for key, value in values.items() if value == AUTO)
        values |= _by_width(autos, values, config.model.hidden_size)
        values = {key: value for key, value in values.items() if value != AUTO}
    values.setdefault(f"{_ZERO}.stage", int(config.parallel.use_distributed_optimizer))
    return Asked(values, autos, section.config is not None)


def _fill(values: dict[str, Any], name: str, value: Any) -> None:
    """Put a field of the section where the JSON says "auto".

    Raises ValueError where it says otherwise.
    """
    from megacore.foreign.deepspeed_keys import AUTO
    from megacore.foreign.files import shown

    keys = FIELDS[name]
    present = [key for key in keys if key in values]
    if not present:
        raise ValueError(
            f"deepspeed.{name} is {shown(value)} but deepspeed.config takes its place and does not "
            f"say {' or '.join(keys)}: write it there, or remove deepspeed.{name}"
        )
    for key in present:
        if values[key] not in (AUTO, value):
            raise ValueError(
                f"deepspeed.{name} is {shown(value)} but {key} of deepspeed.config is "
                f"{shown(values[key])}: remove one of them"
            )
        values[key] = value


def _by_width(autos: frozenset[str], values: Mapping[str, Any], width: int) -> dict[str, int]:
    """Sizes that Hugging Face's integrations fill from the model's width."""
    sizes = {f"{_ZERO}.reduce_bucket_size": width * width}
    if values.get(f"{_ZERO}.stage") == 3:
        sizes[f"{_ZERO}.stage3_prefetch_bucket_size"] = width * width * 9 // 10
        sizes[f"{_ZERO}.stage3_param_persistence_threshold"] = 10 * width
    return {key: size for key, size in sizes.items() if key in autos}


def with_defaults(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return plain values with DeepSpeed's defaults where neither its JSON nor they say anything.

    Args:
        values: of a run, by section; wrong types are left for their section to refuse.

    Raises:
        ValueError: the JSON has a key or a value that is refused.
    """
    section = values.get("deepspeed")
    content = section.get("config") if isinstance(section, dict) else None
    if values.get("engine") != "deepspeed" or not isinstance(content, dict):
        return values
    from megacore.foreign.deepspeed import read_keys

    train = values.get("train")
    precision = train.get("precision") if isinstance(train, dict) else None
    merged = copy.deepcopy(dict(values))
    optim = merged.get("optim")
    if isinstance(optim, dict):
        for name, value in _defaults(dict(read_keys(content)), precision, optim):
            *blocks, field = name.split(".")
            block = optim
            for part in blocks:
                block = block.setdefault(part, {})
            if isinstance(block, dict):
                block.setdefault(field, value)
    return merged


def _defaults(
    said: Mapping[str, Any], precision: Any, optim: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Fields of optim, and what DeepSpeed takes for the keys that a JSON does not have."""
    from megacore.foreign.deepspeed import pretraining_keys

    known = pretraining_keys().definitions
    silent = {key: known.default(key) for key in known.keys if key not in said}
    if "optimizer.params.max_grad_norm" not in said and "gradient_clipping" in silent:
        yield "clip_grad", silent["gradient_clipping"]
    if precision == "fp16":
        power = "fp16.initial_scale_power"
        if power in silent:
            yield "loss_scale.initial", 2.0 ** silent[power]
        for field, key in LOSS_SCALE.items():
            if key in silent:
                yield f"loss_scale.{field}", silent[key]
    if "optimizer.type" not in said:
        return
    adam = {key: value for key, value in known.optimizer(said).items() if key in silent}
    if "weight_decay_incr_style" not in optim and "optimizer.params.weight_decay" in adam:
        yield "weight_decay", adam["optimizer.params.weight_decay"]
    if "optimizer.params.eps" in adam:
        yield "adam_eps", adam["optimizer.params.eps"]
    for number, beta in enumerate(adam.get("optimizer.params.betas", ())):
        yield f"adam_beta{number + 1}", beta


LOSS_SCALE = {
    "window": "fp16.loss_scale_window",
    "hysteresis": "fp16.hysteresis",
    "minimum": "fp16.min_loss_scale",
}
"""Fields of optim.loss_scale that DeepSpeed has keys for, beside the first scale."""


@dataclass(frozen=True)
class ZeroSettings:
    """How far weights, gradients and the optimizer's state are divided, and where they lie."""

    stage: int = 0
    """0 divides nothing, 1 the optimizer's state, 2 gradients too, 3 weights too."""
    offload_optimizer: OffloadDevice = "none"
    """Where the optimizer's state lies."""
    offload_param: OffloadDevice = "none"
    """Where weights lie while they are not used."""
    nvme_path: str | None = None
    """Directory of what is offloaded to NVMe."""


def zero_of(config: "RunConfig") -> ZeroSettings:
    """Return what the replicas divide, as DeepSpeed is asked or as the native engine does.

    Raises ValueError when the user's JSON is not one that can be read.
    """
    if config.engine == "native":
        return ZeroSettings(stage=int(config.parallel.use_distributed_optimizer))
    asked, nvme_path = asked_of(config), None
    optimizer, param = (
        cast(OffloadDevice, asked.device(what)) for what in ("offload_optimizer", "offload_param")
    )
    for what, device in (("offload_optimizer", optimizer), ("offload_param", param)):
        if device == "nvme":
            nvme_path = nvme_path or asked.values.get(f"{_ZERO}.{what}.nvme_path")
    return ZeroSettings(asked.stage, optimizer, param, nvme_path)
