"""Additional options of DeepSpeed, from its section or from DeepSpeed's JSON."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from megacore.config.base import Section, unkeyed

if TYPE_CHECKING:
    from megacore.config.run import RunConfig

OffloadDevice = Literal["none", "cpu", "nvme"]


class DeepSpeedConfig(Section):
    """Options of DeepSpeed's ZeRO (Rajbhandari et al. 2020), offload (Ren et al. 2021) and buckets.

    Sizes are in elements, the unit of DeepSpeed's files; null means DeepSpeed's default. The engine
    native ignores the section, so the engine can be changed with one value.
    """

    config: str | dict[str, Any] | None = unkeyed(None)
    """DeepSpeed's JSON: its path or its content. It replaces the fields below down to
    cpu_checkpointing; these only fill values that the JSON sets to "auto"."""
    zero_stage: Literal[0, 1, 2, 3] | None = unkeyed(None)
    """ZeRO stage: 1 divides the optimizer state among the replicas, 2 also the gradients, 3 also
    the weights; null means that of
    parallel.data_parallel_sharding."""
    offload_optimizer: OffloadDevice = unkeyed("none")
    """Device that stores and updates the optimizer state, with ZeRO stages 1 to 3; nvme requires
    stage 3."""
    offload_param: OffloadDevice = unkeyed("none")
    """Device that stores weights while they are not used, with ZeRO stage 3."""
    nvme_path: str | None = unkeyed(None, min_length=1)
    """Directory on a local NVMe disk for offloaded state; required for nvme."""
    pin_memory: bool = unkeyed(True)
    """If true, state offloaded to the CPU is stored in page-locked host memory; without a GPU no
    memory is locked."""
    overlap_comm: bool | None = unkeyed(None)
    """If true, gradients are communicated during the backward pass; null means only with stage
    3."""
    reduce_bucket_size: int | None = unkeyed(None, gt=0)
    """Elements of gradients per communication; null means parallel.grad_reduce_bucket_mb."""
    allgather_bucket_size: int | None = unkeyed(None, gt=0)
    """Elements of updated weights per communication, with ZeRO stages 1 and 2."""
    sub_group_size: int | None = unkeyed(None, gt=0)
    """Elements of weights that are updated at a time, with ZeRO stage 3."""
    stage3_prefetch_bucket_size: int | None = unkeyed(None, ge=0)
    """Elements of weights that are gathered before they are used, with ZeRO stage 3."""
    stage3_param_persistence_threshold: int | None = unkeyed(None, ge=0)
    """Size in elements below which a parameter is not divided, with ZeRO stage 3."""
    stage3_max_live_parameters: int | None = unkeyed(None, ge=0)
    """Maximum number of gathered elements on a rank, with ZeRO stage 3."""
    stage3_max_reuse_distance: int | None = unkeyed(None, ge=0)
    """Distance in elements to the next use below which weights stay gathered, with ZeRO stage 3."""
    partition_activations: bool = unkeyed(False)
    """If true, tensor-parallel ranks divide the activations that full recomputation stores for each
    layer."""
    cpu_checkpointing: bool = unkeyed(False)
    """If true, the activations that full recomputation stores are in host memory."""
    cpu_adam: Literal["auto", "deepspeed", "torch"] = unkeyed("auto")
    """Implementation of Adam for an offloaded optimizer: deepspeed is DeepSpeedCPUAdam, which is
    compiled once before the training; torch is PyTorch's; auto takes DeepSpeed's if it can be
    compiled."""
    build_timeout: float = unkeyed(600.0, gt=0)
    """Time limit in seconds for the compilation of each DeepSpeed operator."""


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
"""Equivalent keys of DeepSpeed's JSON for each field of the section `deepspeed`."""
FIELD_BY_KEY = {key: field for field, keys in FIELDS.items() for key in keys}


@dataclass(frozen=True)
class UserSettings:
    """Options requested from DeepSpeed in addition to the rest of the configuration."""

    values: Mapping[str, Any]
    """Values by dotted names of DeepSpeed's JSON, without nulls and values left to others."""
    autos: frozenset[str]
    """Names that the JSON sets to "auto", so that the configuration fills them."""
    in_file: bool
    """True if the values come from a JSON instead of the section's fields."""

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return int(self.values[f"{_ZERO}.stage"])

    def named(self, key: str) -> str:
        """Return the name of a value in the user's configuration or JSON."""
        return f"{key} of deepspeed.config" if self.in_file else f"deepspeed.{FIELD_BY_KEY[key]}"

    def device(self, what: str) -> str:
        """Return the device of `offload_optimizer` or `offload_param`."""
        return str(self.values.get(f"{_ZERO}.{what}.device", "none"))


def user_settings_of(config: "RunConfig") -> UserSettings:
    """Return the options requested by the section or the user's JSON, with "auto" filled in.

    Raises ValueError for a refused key or value, and for a field of the section that contradicts
    the JSON.
    """
    section = config.deepspeed
    changed = {name: getattr(section, name) for name in FIELDS if not section.has_default(name)}
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
    values.setdefault(f"{_ZERO}.stage", config.parallel.zero_stage)
    return UserSettings(values, autos, section.config is not None)


def _fill(values: dict[str, Any], name: str, value: Any) -> None:
    """Fill "auto" in the JSON with the value of a section's field.

    Raises ValueError if the JSON lacks the key or has another value.
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
    """Return the sizes that Hugging Face's integrations derive from the model's width."""
    sizes = {f"{_ZERO}.reduce_bucket_size": width * width}
    if values.get(f"{_ZERO}.stage") == 3:
        sizes[f"{_ZERO}.stage3_prefetch_bucket_size"] = width * width * 9 // 10
        sizes[f"{_ZERO}.stage3_param_persistence_threshold"] = 10 * width
    return {key: size for key, size in sizes.items() if key in autos}


def with_defaults(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return plain values with DeepSpeed's defaults for values that neither they nor the JSON set.

    Args:
        values: values of a run by section; wrong types are left for their section to refuse.

    Raises:
        ValueError: the JSON has a refused key or value.
    """
    section = values.get("deepspeed")
    content = section.get("config") if isinstance(section, dict) else None
    if values.get("engine") != "deepspeed" or not isinstance(content, dict):
        return values
    from megacore.foreign.deepspeed import read_keys

    train = values.get("train")
    precision = train.get("precision") if isinstance(train, dict) else None
    merged = copy.deepcopy(dict(values))
    optim = merged.setdefault("optim", {})
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
    keys: Mapping[str, Any], precision: Any, optim: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield fields of `optim` with DeepSpeed's defaults for the keys that a JSON omits."""
    from megacore.foreign.deepspeed import pretraining_keys

    known = pretraining_keys().definitions
    silent = {key: known.default(key) for key in known.keys if key not in keys}
    if "optimizer.params.max_grad_norm" not in keys and "gradient_clipping" in silent:
        yield "clip_grad", silent["gradient_clipping"]
    if precision == "fp16":
        power = "fp16.initial_scale_power"
        if power in silent:
            yield "loss_scale.initial", 2.0 ** silent[power]
        for field, key in LOSS_SCALE.items():
            if key in silent:
                yield f"loss_scale.{field}", silent[key]
    if "optimizer.type" not in keys:
        return
    adam = {key: value for key, value in known.optimizer(keys).items() if key in silent}
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
"""Keys of DeepSpeed's JSON for the fields of optim.loss_scale, except the initial scale."""


@dataclass(frozen=True)
class ZeroSettings:
    """ZeRO stage and offload of a run."""

    stage: int = 0
    """ZeRO stage: 0 divides nothing, 1 the optimizer state, 2 also gradients, 3 also weights."""
    offload_optimizer: OffloadDevice = "none"
    """Device that stores the optimizer state."""
    offload_param: OffloadDevice = "none"
    """Device that stores weights while they are not used."""
    nvme_path: str | None = None
    """Directory of the state that is offloaded to NVMe."""


def zero_of(config: "RunConfig") -> ZeroSettings:
    """Return the ZeRO settings of the DeepSpeed engine, or their equivalent of the native engine.

    Raises ValueError if the user's JSON is invalid.
    """
    if config.engine == "native":
        return ZeroSettings(stage=config.parallel.zero_stage)
    user_settings, nvme_path = user_settings_of(config), None
    optimizer, param = (
        cast(OffloadDevice, user_settings.device(what))
        for what in ("offload_optimizer", "offload_param")
    )
    for what, device in (("offload_optimizer", optimizer), ("offload_param", param)):
        if device == "nvme":
            nvme_path = nvme_path or user_settings.values.get(f"{_ZERO}.{what}.nvme_path")
    return ZeroSettings(user_settings.stage, optimizer, param, nvme_path)
