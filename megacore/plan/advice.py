"""Settings that make a rank need less memory.

Each change estimated by the planner, and those that save most.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import ValidationError

from megacore.config.deepspeed import FIELD_OF, Asked, DeepSpeedConfig, asked_of, zero_of
from megacore.config.run import RunConfig
from megacore.engine.deepspeed.operators import require_deepspeed
from megacore.errors import ConfigError
from megacore.foreign.deepspeed_keys import AUTO
from megacore.plan.layouts import layout_of
from megacore.plan.memory import GIB, MemoryEstimate, estimate_stages

COUNT = 3
"""Settings that a message names."""
_STAGE = "zero_optimization.stage"
_GATHERED = "zero_optimization.allgather_bucket_size"
"""Which stage 3 does not have."""
_OFFLOADS = ("offload_optimizer", "offload_param")


@dataclass(frozen=True)
class Deployment:
    """What a configuration is estimated for."""

    ranks: int
    """Processes of the job."""
    vocab_size: int
    """Entries of the vocabulary before padding."""
    precision: str
    """fp32, bf16 or fp16."""
    device_type: str
    """cpu or cuda."""
    host: int
    """Bytes of main memory that a rank may use beside its GPU."""

    def estimate(self, config: RunConfig, rank: int | None = None) -> MemoryEstimate:
        """What `rank` needs, or, without one, a rank of the stage that needs most.

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
    """A valid configuration that needs less."""

    kind: str
    """What is changed: batch, recompute, zero, offload, tensor, pipeline, sequence or ranks."""
    setting: str
    """As in `train.micro_batch_size: 16 -> 8`."""
    before: MemoryEstimate
    after: MemoryEstimate
    share: float = 1.0
    """Ranks that share the memory afterwards, as a part of those before."""

    @property
    def bytes(self) -> float:
        """What a rank saves of the memory that it had."""
        return self.before.total - self.after.total * self.share

    def __str__(self) -> str:
        """The setting with both predictions."""
        fewer = " for each of them" if self.share < 1 else ""
        return f"{self.setting} (predicted {pair(self.before.total, self.after.total)}{fewer})"


class _Change(NamedTuple):
    kind: str
    values: dict[str, Any]
    """By dotted keys of the configuration."""
    share: float = 1.0


def savings(
    config: RunConfig,
    deployment: Deployment,
    *,
    fits: Callable[["Saving"], bool] = lambda saving: False,
    rank: int | None = None,
) -> list[Saving]:
    """The changes that save most, at most one of each kind, the greatest saving first.

    Args:
        config: the run, valid where it is.
        deployment: its ranks.
        fits: whether a change suffices: those that do come first, and of a kind the least that
            does.
        rank: whose memory it is, None for a rank of the stage that needs most.
    """
    before, dump = deployment.estimate(config, rank), config.model_dump()
    best: dict[str, Saving] = {}
    for change in _changes(config, deployment):
        changed = _valid(dump, change.values)
        if changed is None:
            continue
        there = _elsewhere(deployment, change.share)
        try:
            layout_of(changed, there.ranks, there.vocab_size)
            after = there.estimate(changed, rank if change.kind not in _MOVES else None)
        except ConfigError:  # not with this number of ranks, or this vocabulary
            continue
        saving = Saving(
            change.kind, _spoken(config, dump, change.values), before, after, change.share
        )
        known = best.get(change.kind)
        better = known is None or (not fits(known) and (fits(saving) or saving.bytes > known.bytes))
        if saving.bytes > 0 and after.host <= deployment.host and better:
            best[change.kind] = saving
    return sorted(best.values(), key=lambda saving: (not fits(saving), -saving.bytes))


_MOVES = ("tensor", "pipeline", "ranks")
"""Kinds after which a rank has another place in the layout."""


def memory_advice(config: RunConfig, deployment: Deployment, rank: int | None = None) -> str:
    """What was predicted for a rank, part by part, and the settings that help most, as one clause.

    Args:
        config: the run.
        deployment: its ranks.
        rank: which one; None stands for the one that needs most.
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
    """An estimate with each of its parts, as in `12.3 GiB (weights 4.1, …)`."""
    names = (
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "logits",
        "buffers",
        "step",
        "process",
    )
    shown = [f"{name} {getattr(need, name) / GIB:.2f}" for name in names if getattr(need, name)]
    beside = f", and {need.host / GIB:.2f} GiB of main memory" if need.host else ""
    return f"{need.total / GIB:.2f} GiB ({', '.join(shown)}{beside})"


def pair(before: int, after: int) -> str:
    """Two numbers of bytes in one unit, as in `61.2 -> 37.5 GiB`."""
    unit, name = (GIB, "GiB") if before >= GIB else (2**20, "MiB")
    digits = 1 if before >= 10 * unit else 2
    return f"{before / unit:.{digits}f} -> {after / unit:.{digits}f} {name}"


def _elsewhere(deployment: Deployment, share: float) -> Deployment:
    """The same deployment with a part of the ranks."""
    if share == 1:
        return deployment
    ranks = round(deployment.ranks * share)
    return Deployment(
        ranks, deployment.vocab_size, deployment.precision, deployment.device_type, deployment.host
    )


def _changes(config: RunConfig, deployment: Deployment) -> Iterator[_Change]:
    """Whatever could help, of each kind from little to much; not all of it is valid."""
    train, parallel, launch = config.train, config.parallel, config.launch
    gpu = deployment.device_type == "cuda"
    # A divisor divides whatever the size does: half of it, of an odd one the next smaller.
    smaller = (
        size
        for size in range(train.micro_batch_size // 2, 0, -1)
        if train.micro_batch_size % size == 0
    )
    if size := next(smaller, None):
        yield _Change("batch", {"train.micro_batch_size": size})
    everywhere = {} if train.recompute_num_layers is None else {"train.recompute_num_layers": None}
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
    alone = launch.hostfile is None and launch.kind in ("torchrun", "deepspeed")
    if not gpu and alone and isinstance(launch.nproc_per_node, int) and deployment.ranks % 2 == 0:
        yield _Change("ranks", {"launch.nproc_per_node": deployment.ranks // 2}, share=0.5)


def _divided_further(config: RunConfig, *, gpu: bool) -> Iterator[_Change]:
    """What of ZeRO a configuration does not use yet, from little to much."""
    if config.engine == "native" and not config.parallel.use_distributed_optimizer:
        yield _Change("zero", {"parallel.use_distributed_optimizer": True})
    zero, most = zero_of(config), 3 if config.parallel.pipeline_model_parallel_size == 1 else 1
    asked = asked_of(config) if config.engine == "deepspeed" else None
    first = zero.stage + 1 if asked else max(2, zero.stage + 1)
    for stage in range(first, most + 1):
        yield _Change("zero", _asking(config.deepspeed, asked, {_STAGE: stage}))
    if not gpu:  # there is one memory alone
        return
    divided = max(most, zero.stage)
    stage_too = {_STAGE: divided} if divided > zero.stage or asked is None else {}
    optimizer, weights = (f"zero_optimization.{what}.device" for what in _OFFLOADS)
    more = {optimizer: "cpu"} if zero.offload_optimizer == "none" else {}
    if more and asked is not None and zero.stage > 0:
        yield _Change("offload", _asking(config.deepspeed, asked, more))
    if more and stage_too:
        yield _Change("offload", _asking(config.deepspeed, asked, stage_too | more))
    if zero.offload_param == "none" and divided == 3:
        yield _Change(
            "offload", _asking(config.deepspeed, asked, stage_too | more | {weights: "cpu"})
        )


def _asking(
    section: DeepSpeedConfig, asked: Asked | None, wanted: Mapping[str, Any]
) -> dict[str, Any]:
    """Return keys of the configuration that ask DeepSpeed for something.

    They are in the user's own JSON where there is one.
    """
    engine = {} if asked else {"engine": "deepspeed"}
    if wanted.get(_STAGE) == 3 and asked is not None and _GATHERED in asked.values:
        wanted = {**wanted, _GATHERED: None}
    if asked is None or not asked.in_file:
        return engine | {f"deepspeed.{FIELD_OF[key]}": value for key, value in wanted.items()}
    content = section.config
    assert isinstance(content, dict)
    return {
        f"deepspeed.{FIELD_OF[key]}"
        if _found(content, key) == AUTO
        else f"deepspeed.config.{key}": value
        for key, value in wanted.items()
    }


def _valid(dump: Mapping[str, Any], values: Mapping[str, Any]) -> RunConfig | None:
    """The changed configuration, None where it is refused."""
    changed = deepcopy(dict(dump))
    for key, value in values.items():
        *parents, leaf = key.split(".")
        target: Any = changed
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):  # as "zero_optimization": true
                return None
        target[leaf] = value
    try:
        config = RunConfig.model_validate(changed)
        require_deepspeed(config)
    except (ValidationError, ConfigError):
        return None
    return config


def _spoken(config: RunConfig, dump: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """As in `engine: native -> deepspeed, deepspeed.zero_stage: null -> 2`."""
    inside = "deepspeed.config."
    spoken = []
    for key, value in values.items():
        name = f"{key.removeprefix(inside)} of deepspeed.config" if key.startswith(inside) else key
        now = _found(dump, key)
        if key.startswith(inside) and now is None:
            now = asked_of(config).values.get(key.removeprefix(inside))
        if now == value:
            continue
        spoken.append(f"{name}: {_plain(now)} -> {_plain(value)}")
    return ", ".join(spoken)


def _found(values: Mapping[str, Any], key: str) -> Any:
    """What a dotted key holds, None where it is absent."""
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _plain(value: Any) -> str:
    whole = isinstance(value, float) and value.is_integer()
    return value if isinstance(value, str) else json.dumps(int(value) if whole else value)
