"""Search for settings that reduce a rank's memory.

The planner estimates each change, and those that save most are proposed.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pydantic import ValidationError

from megacore.config.deepspeed import (
    FIELD_BY_KEY,
    DeepSpeedConfig,
    UserSettings,
    user_settings_of,
    zero_of,
)
from megacore.config.parallel import ZERO_STAGES
from megacore.config.run import RunConfig
from megacore.engine.deepspeed.operators import require_deepspeed
from megacore.errors import ConfigError
from megacore.foreign.deepspeed_keys import AUTO
from megacore.plan.layouts import layout_of
from megacore.plan.memory import GIB, MemoryEstimate, estimate_stages

COUNT = 3
"""Maximum number of settings in a message."""
_STAGE = "zero_optimization.stage"
_GATHERED = "zero_optimization.allgather_bucket_size"
"""Key that is invalid with ZeRO stage 3."""
_OFFLOADS = ("offload_optimizer", "offload_param")


@dataclass(frozen=True)
class Deployment:
    """Ranks and hardware for which a configuration is estimated."""

    ranks: int
    """Number of ranks of the job."""
    vocab_size: int
    """Number of vocabulary entries before padding."""
    precision: str
    """Data type of the computation: fp32, bf16 or fp16."""
    device_type: str
    """Type of the device: cpu or cuda."""
    host: int
    """Bytes of host memory available to a rank in addition to its GPU."""

    def estimate(self, config: RunConfig, rank: int | None = None) -> MemoryEstimate:
        """Return the memory of `rank`, or of a rank on the stage that needs most if `rank` is None.

        Raises ParallelLayoutError.
        """
        layout = layout_of(config, self.ranks)
        stages = estimate_stages(
            config, self.vocab_size, self.precision, self.device_type, layout.data
        )
        return (
            max(stages, key=lambda stage: stage.total)
            if rank is None
            else stages[layout.coordinate(rank).pipeline]
        )


class Saving(NamedTuple):
    """Valid change of the configuration that needs less memory."""

    kind: str
    """Kind of change: batch, recompute, zero, offload, tensor, pipeline, sequence or ranks."""
    setting: str
    """Changed setting as text, such as `train.micro_batch_size: 16 -> 8`."""
    before: MemoryEstimate
    after: MemoryEstimate
    share: float = 1.0
    """Ratio of the number of ranks after the change to the number before."""

    @property
    def bytes(self) -> float:
        """Bytes that the change saves in the memory of one previous rank."""
        return self.before.total - self.after.total * self.share

    def __str__(self) -> str:
        """Return the setting with both predictions as text."""
        fewer = " for each of them" if self.share < 1 else ""
        return f"{self.setting} (predicted {pair(self.before.total, self.after.total)}{fewer})"


class _Change(NamedTuple):
    kind: str
    values: dict[str, Any]
    """New values by dotted name."""
    share: float = 1.0


def savings(
    config: RunConfig,
    deployment: Deployment,
    *,
    fits: Callable[["Saving"], bool] = lambda saving: False,
    rank: int | None = None,
) -> list[Saving]:
    """Return the changes that save most memory, at most one of each kind, in descending order.

    Args:
        config: configuration of the run, which must be valid.
        deployment: ranks and hardware.
        fits: function that returns True if a change suffices. Sufficient changes come first, and
            the smallest sufficient change of each kind is chosen.
        rank: rank whose memory is reduced; None for a rank on the stage that needs most.
    """
    before, dump = deployment.estimate(config, rank), config.model_dump()
    best: dict[str, Saving] = {}
    for change in _changes(config, deployment):
        changed = _valid(dump, change.values)
        if changed is None:
            continue
        target = replace(deployment, ranks=round(deployment.ranks * change.share))
        try:
            layout_of(changed, target.ranks, target.vocab_size)
            after = target.estimate(changed, rank if change.kind not in _MOVES else None)
        except ConfigError:  # invalid with this number of ranks or this vocabulary
            continue
        saving = Saving(
            change.kind, _as_text(config, dump, change.values), before, after, change.share
        )
        previous = best.get(change.kind)
        better = previous is None or (
            not fits(previous) and (fits(saving) or saving.bytes > previous.bytes)
        )
        if saving.bytes > 0 and after.host <= deployment.host and better:
            best[change.kind] = saving
    return sorted(best.values(), key=lambda saving: (not fits(saving), -saving.bytes))


def lighter_recompute(config: RunConfig, deployment: Deployment, room: int) -> str | None:
    """Return one sentence about the lightest recomputation that fits; None if it is configured.

    Of the `room` bytes of device memory per rank a tenth stays free.
    """
    everywhere = {} if config.train.recompute_num_layers is None else _ALL_LAYERS
    for kind in _RECOMPUTATIONS[: _RECOMPUTATIONS.index(config.train.recompute)]:
        changed = _valid(config.model_dump(), {"train.recompute": kind} | everywhere)
        if changed is None:
            continue
        need = deployment.estimate(changed)
        if need.total <= _FILLED * room and need.host <= deployment.host:
            return (
                f"train.recompute {kind} fits, too: about {need.total / GIB:.1f} GiB of "
                f"{room / GIB:.1f} GiB per rank; {config.train.recompute} is slower"
            )
    return None


_RECOMPUTATIONS = ("none", "selective", "full")
"""Kinds of recomputation from light to heavy."""
_ALL_LAYERS = {"train.recompute_num_layers": None}
_FILLED = 0.9
"""Largest share of the memory in a recommendation; allocators lose some to fragments."""
_MOVES = ("tensor", "pipeline", "ranks")
"""Kinds of changes that move ranks to other places in the layout."""


def memory_advice(config: RunConfig, deployment: Deployment, rank: int | None = None) -> str:
    """Return one clause with the predicted memory of a rank by parts and the best savings.

    A `rank` of None is the rank that needs most.
    """
    need, best = deployment.estimate(config, rank), savings(config, deployment, rank=rank)[:COUNT]
    who = "the rank that needs most" if rank is None else f"rank {rank}"
    what = (
        f"what helps most: {'; '.join(map(str, best))}"
        if best
        else "no setting is known that would save any"
    )
    return f"predicted for {who}: {parts_of(need)}; {what}"


def parts_of(need: MemoryEstimate) -> str:
    """Return an estimate with its parts as text, such as `12.3 GiB (weights 4.1, …)`."""
    names = (
        *("weights", "gradients", "optimizer", "activations"),
        *("logits", "buffers", "step", "process"),
    )
    shown = [f"{name} {getattr(need, name) / GIB:.2f}" for name in names if getattr(need, name)]
    host = f", and {need.host / GIB:.2f} GiB of host memory" if need.host else ""
    return f"{need.total / GIB:.2f} GiB ({', '.join(shown)}{host})"


def pair(before: int, after: int) -> str:
    """Return two numbers of bytes in the same unit, such as `61.2 -> 37.5 GiB`."""
    unit, name = (GIB, "GiB") if before >= GIB else (2**20, "MiB")
    digits = 1 if before >= 10 * unit else 2
    return f"{before / unit:.{digits}f} -> {after / unit:.{digits}f} {name}"


def _changes(config: RunConfig, deployment: Deployment) -> Iterator[_Change]:
    """Yield candidate changes, from small to large for each kind; not all are valid."""
    train, parallel, launch = config.train, config.parallel, config.launch
    gpu = deployment.device_type == "cuda"
    # A divisor of the size keeps the batch divisible: half the size if it is even, else the next
    # smaller divisor.
    smaller = (
        size
        for size in range(train.micro_batch_size // 2, 0, -1)
        if train.micro_batch_size % size == 0
    )
    if size := next(smaller, None):
        yield _Change("batch", {"train.micro_batch_size": size})
    everywhere = {} if train.recompute_num_layers is None else _ALL_LAYERS
    if train.recompute == "none":
        yield _Change("recompute", {"train.recompute": "selective"})
    if train.recompute != "full":
        yield _Change("recompute", {"train.recompute": "full"} | everywhere)
    elif everywhere:
        yield _Change("recompute", everywhere)
    yield from _divided_further(config, gpu=gpu)
    for name in ("tensor", "pipeline"):
        key = f"{name}_model_parallel_size"
        yield _Change(name, {f"parallel.{key}": 2 * getattr(parallel, key)})
    yield _Change("sequence", {"data.seq_length": config.data.seq_length // 2})
    single_host = launch.hostfile is None and launch.kind in ("torchrun", "deepspeed")
    if (
        not gpu
        and single_host
        and isinstance(launch.nproc_per_node, int)
        and deployment.ranks % 2 == 0
    ):
        yield _Change("ranks", {"launch.nproc_per_node": deployment.ranks // 2}, share=0.5)


def _divided_further(config: RunConfig, *, gpu: bool) -> Iterator[_Change]:
    """Yield changes that use more of ZeRO and offload, from small to large."""
    zero, pipelined = zero_of(config), config.parallel.pipeline_model_parallel_size > 1
    most, native_most = (1, 2) if pipelined else (3, 3)
    user_settings = user_settings_of(config) if config.engine == "deepspeed" else None
    for stage in range(zero.stage + 1, (most if user_settings else native_most) + 1):
        yield _Change(
            "zero",
            _asking(config.deepspeed, user_settings, {_STAGE: stage})
            if user_settings
            else {"parallel.data_parallel_sharding": ZERO_STAGES[stage]},
        )
    if not gpu:  # the CPU has only one memory
        return
    divided = max(most, zero.stage)
    stage_too = {_STAGE: divided} if divided > zero.stage or user_settings is None else {}
    optimizer, weights = (f"zero_optimization.{what}.device" for what in _OFFLOADS)
    more = {optimizer: "cpu"} if zero.offload_optimizer == "none" else {}
    if more and user_settings is not None and zero.stage > 0:
        yield _Change("offload", _asking(config.deepspeed, user_settings, more))
    if more and stage_too:
        yield _Change("offload", _asking(config.deepspeed, user_settings, stage_too | more))
    if zero.offload_param == "none" and divided == 3:
        yield _Change(
            "offload", _asking(config.deepspeed, user_settings, stage_too | more | {weights: "cpu"})
        )


def _asking(
    section: DeepSpeedConfig, asked: UserSettings | None, requested: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values of the configuration, by dotted name, that request DeepSpeed's options.

    Args:
        section: section `deepspeed` of the configuration.
        asked: settings of the user; None if the engine is not DeepSpeed.
        requested: values by DeepSpeed's dotted keys; they are set in the user's JSON if it exists.
    """
    engine = {} if asked else {"engine": "deepspeed"}
    if requested.get(_STAGE) == 3 and asked is not None and _GATHERED in asked.values:
        requested = {**requested, _GATHERED: None}
    if asked is None or not asked.in_file:
        return engine | {
            f"deepspeed.{FIELD_BY_KEY[key]}": value for key, value in requested.items()
        }
    content = section.config
    assert isinstance(content, dict)
    return {
        f"deepspeed.{FIELD_BY_KEY[key]}"
        if _value_at(content, key) == AUTO
        else f"deepspeed.config.{key}": value
        for key, value in requested.items()
    }


def _valid(dump: Mapping[str, Any], values: Mapping[str, Any]) -> RunConfig | None:
    """Return the changed configuration; None if it is refused."""
    changed = deepcopy(dict(dump))
    for key, value in values.items():
        *parents, leaf = key.split(".")
        target: Any = changed
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):  # for example "zero_optimization": true
                return None
        target[leaf] = value
    try:
        config = RunConfig.model_validate(changed)
        require_deepspeed(config)
    except (ValidationError, ConfigError):
        return None
    return config


def _as_text(config: RunConfig, dump: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """Return changed values as text, such as `engine: native -> deepspeed`."""
    inside = "deepspeed.config."
    changes = []
    for key, value in values.items():
        name = f"{key.removeprefix(inside)} of deepspeed.config" if key.startswith(inside) else key
        current = _value_at(dump, key)
        if key.startswith(inside) and current is None:
            current = user_settings_of(config).values.get(key.removeprefix(inside))
        if current == value:
            continue
        changes.append(f"{name}: {_plain(current)} -> {_plain(value)}")
    return ", ".join(changes)


def _value_at(values: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key; None if it is absent."""
    value: Any = values
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _plain(value: Any) -> str:
    integral = isinstance(value, float) and value.is_integer()
    return value if isinstance(value, str) else json.dumps(int(value) if integral else value)
