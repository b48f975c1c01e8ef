"""How the model and the batch are divided over ranks: the section `parallel`, and what can work.

The divisions that can work, and the nearest ones that do, are found by arithmetic alone. What is
computed stays the same but for rounding, and for what dropout drops of activations that
tensor-parallel ranks divide. Of T5, a pipeline stage has layers of the encoder or of the decoder,
never of both.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple

from megacore.config.base import Section, unkeyed
from megacore.config.deepspeed import asked_of
from megacore.config.model import Family, ModelConfig
from megacore.config.train import TrainConfig

if TYPE_CHECKING:
    from megacore.config.run import RunConfig

PROPOSALS = 3
"""Layouts that a refusal names at most."""
Style = Literal["balanced", "uniform"] | tuple[int, ...]


class ParallelConfig(Section):
    """Sizes of the axes.

    What tensor and pipeline parallelism leave of the ranks is data parallel.
    """

    tensor_model_parallel_size: int = unkeyed(1, gt=0)
    """Ranks that share each layer (tp; Shoeybi et al. 2019)."""
    sequence_parallel: bool = unkeyed(False)
    """Whether norms and dropout work on the tensor-parallel rank's part of the sequence
    (Korthikanti et al. 2022)."""
    pipeline_model_parallel_size: int = unkeyed(1, gt=0)
    """Stages of consecutive layers (pp; Huang et al. 2019)."""
    virtual_pipeline_model_parallel_size: int = unkeyed(1, gt=0)
    """Chunks of layers per stage (v); above 1 the schedule is interleaved 1F1B (Narayanan et al.
    2021)."""
    pipeline_schedule: Literal["1f1b", "gpipe"] = unkeyed("1f1b")
    """Order of forward and backward passes: 1f1b (Narayanan et al. 2019) keeps at most pp micro
    batches in flight."""
    pipeline_partition: Literal["balanced", "uniform"] | tuple[int, ...] = unkeyed("balanced")
    """Layers of each chunk: balanced counts embedding and head as well, uniform gives all the same
    number, a list says it for each of the pp x v chunks in the order of the model."""
    pipeline_model_parallel_split_rank: int | None = unkeyed(None, gt=0)
    """Pipeline stage at which T5's decoder begins; null divides the stages by cost."""
    use_distributed_optimizer: bool = unkeyed(False)
    """Whether main weights and moments are divided over data-parallel ranks (ZeRO-1; Rajbhandari et
    al. 2020)."""
    grad_reduce_bucket_mb: float = unkeyed(25.0, gt=0)
    """Size of a gradient reduction bucket, in MiB of fp32."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = unkeyed("fp32")
    """Type in which gradients travel between data-parallel ranks; they accumulate in fp32 all the
    same."""


@dataclass(frozen=True)
class T5Stages:
    """What is asked of the pipeline of an encoder and a decoder."""

    encoder: int
    """model.num_layers."""
    decoder: int
    """model.num_decoder_layers, resolved."""
    stages: int
    """parallel.pipeline_model_parallel_size."""
    split: int | None = None
    """parallel.pipeline_model_parallel_split_rank: the first stage of the decoder; None leaves it
    open."""
    style: Style = "balanced"
    """parallel.pipeline_partition."""

    def splits(self) -> list[int]:
        """First stages of the decoder that can work; none where `problem` has something to say."""
        return [
            split
            for split in range(1, self.stages)
            if split in (self.split or split,) and self._works(split)
        ]

    def problem(self) -> tuple[str, str] | None:
        """Why no division can work, in one clause with all the numbers, and what would help.

        None if one can.
        """
        size = f"parallel.pipeline_model_parallel_size {self.stages}"
        if self.split is not None and not 0 < self.split < self.stages:
            what = f"parallel.pipeline_model_parallel_split_rank is {self.split}"
            if self.stages == 1:
                return f"{what} but {size} has no second stage", "set it to null"
            return (
                f"{what} and {size} has the stages 0 to {self.stages - 1}",
                f"use 1 to {self.stages - 1}, or null",
            )
        if isinstance(self.style, tuple) and (refusal := self._list_problem(self.style, size)):
            return refusal
        if self.stages == 1 or self.splits():
            return None
        return self._division_problem(size)

    def _works(self, split: int) -> bool:
        """Whether the encoder can be on the stages before `split`, the decoder on the others."""
        stacks = ((self.encoder, split), (self.decoder, self.stages - split))
        if isinstance(self.style, tuple):
            return sum(self.style[:split]) == self.encoder
        if self.style == "uniform":
            return all(layers % stages == 0 for layers, stages in stacks)
        return all(layers >= stages for layers, stages in stacks)

    def _list_problem(self, sizes: Sequence[int], size: str) -> tuple[str, str] | None:
        name, both = f"parallel.pipeline_partition {list(sizes)}", self.encoder + self.decoder
        layers = f"model.num_layers {self.encoder} and model.num_decoder_layers {self.decoder}"
        if len(sizes) != self.stages:
            return f"{name} has {len(sizes)} entries for {size}", f"give it {self.stages}"
        if min(sizes) < 1:
            return f"{name} has a stage of {min(sizes)} layers", "give each stage of T5 at least 1"
        if sum(sizes) != both:
            return (
                f"{name} adds up to {sum(sizes)} layers and {layers} to {both}",
                f"make it add up to {both}",
            )
        if self.stages == 1 or self.splits():
            return None
        sums = list(accumulate(sizes))
        if self.split is None:
            return (
                (
                    f"{name} has a stage with layers of both stacks: its stages end after "
                    f"{_listed(sums)} layers, and model.num_layers is {self.encoder}"
                ),
                f"let the encoder's stages add up to {self.encoder}",
            )
        return (
            (
                f"{name} has {sums[self.split - 1]} layers before "
                f"parallel.pipeline_model_parallel_split_rank {self.split} and model.num_layers is "
                f"{self.encoder}"
            ),
            f"let the stages before it add up to {self.encoder}, or set it to null",
        )

    def _division_problem(self, size: str) -> tuple[str, str]:
        """Of balanced and uniform."""
        where = size if self.split is None else f"{size}, split at {self.split}"
        layers = f"model.num_layers {self.encoder} and model.num_decoder_layers {self.decoder}"
        if self.style == "uniform":
            return (
                (
                    f"{layers} cannot be divided evenly over {where}, which "
                    "parallel.pipeline_partition uniform needs"
                ),
                "set parallel.pipeline_partition to balanced",
            )
        return f"{layers} cannot be divided over {where}: each stage needs a layer of one stack", ""


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


@dataclass(frozen=True, order=True)
class ParallelLayout:
    """Sizes of the axes of parallelism."""

    tensor: int = 1
    """Ranks that share each layer (tp)."""
    pipeline: int = 1
    """Stages of consecutive layers (pp)."""
    virtual: int = 1
    """Chunks of layers per stage (v)."""
    data: int = 1
    """Replicas (dp)."""

    @classmethod
    def of(cls, parallel: ParallelConfig, ranks: int | None) -> "ParallelLayout":
        """What a configuration asks for; of an unknown number of ranks one replica."""
        tensor, pipeline = (
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
        )
        data = 1 if ranks is None else max(1, ranks // (tensor * pipeline))
        return cls(tensor, pipeline, parallel.virtual_pipeline_model_parallel_size, data)

    @property
    def chunks(self) -> int:
        """Chunks of layers of the whole model (pp x v)."""
        return self.pipeline * self.virtual

    def distance(self, other: "ParallelLayout") -> float:
        """How many doublings and halvings of the four sizes lead to another layout."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return sum(abs(math.log2(mine / theirs)) for mine, theirs in pairs)

    def named(self, *, data: bool) -> str:
        """`tensor 4 x pipeline 2`.

        Virtual stages where there are any, data-parallel ranks when asked.
        """
        virtual = f" x virtual {self.virtual}" if self.virtual > 1 else ""
        return (
            f"tensor {self.tensor} x pipeline "
            f"{self.pipeline}{virtual}{f' x data {self.data}' if data else ''}"
        )


class Refusal(NamedTuple):
    """Why a layout cannot work."""

    problem: str
    """One clause with all the numbers."""
    remedy: str = ""
    """What else than another layout would help."""


def check_layout(
    config: "RunConfig", ranks: int | None, padded_vocab_size: int | None = None
) -> ParallelLayout:
    """The layout that a configuration asks for.

    Args:
        config: the run.
        ranks: that are started; None where the machine decides it, then one replica is looked at.
        padded_vocab_size: entries of the padded vocabulary, None where it is not known yet.

    Raises:
        ValueError: it cannot work; the message has all the numbers and the nearest layouts that do.
    """
    asked = ParallelLayout.of(config.parallel, ranks)
    refusal = _refused_world(asked, ranks) or refused(config, asked, padded_vocab_size)
    if refusal is None:
        return asked
    world = asked.tensor * asked.pipeline if ranks is None else ranks
    near = nearest_layouts(
        config, asked, world, padded_vocab_size, data=1 if ranks is None else None
    )
    ways = [refusal.remedy] if refusal.remedy else []
    if near:
        names = [layout.named(data=ranks is not None) for layout in near]
        ways.append(
            f"use {' or '.join([', '.join(names[:-1]), names[-1]] if names[1:] else names)}"
        )
    advice = ", or ".join(ways) or f"no layout of {world} ranks works, use another number"
    raise ValueError(f"{refusal.problem}: {advice}")


def nearest_layouts(
    config: "RunConfig",
    asked: ParallelLayout,
    ranks: int,
    padded_vocab_size: int | None = None,
    *,
    data: int | None = None,
    count: int = PROPOSALS,
) -> list[ParallelLayout]:
    """Up to `count` layouts of `ranks` ranks that can work, those nearest to `asked` first.

    Among equally near ones those with fewer replicas come first, which need less memory per rank.
    Virtual stages are proposed only to those who asked for some.

    Args:
        config: the run; its own layout is not looked at.
        asked: what was asked for.
        ranks: of each layout.
        padded_vocab_size: entries of the padded vocabulary, None where it is not known yet.
        data: data-parallel size of each layout, None for any.
        count: how many.
    """
    possible = [
        layout
        for layout in _layouts(config.model.num_layers, asked, ranks)
        if data in (None, layout.data) and refused(config, layout, padded_vocab_size) is None
    ]
    return sorted(
        possible, key=lambda each: (round(each.distance(asked), 6), each.data, each.virtual, each)
    )[:count]


def _layouts(layers: int, asked: ParallelLayout, ranks: int) -> Iterator[ParallelLayout]:
    """Every layout of `ranks` ranks."""
    for tensor in _divisors(ranks):
        for pipeline in _divisors(ranks // tensor):
            most = layers // pipeline if asked.virtual > 1 and pipeline > 1 else 1
            for virtual in range(1, max(1, most) + 1):
                yield ParallelLayout(tensor, pipeline, virtual, ranks // (tensor * pipeline))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def refused(
    config: "RunConfig", layout: ParallelLayout, padded_vocab_size: int | None = None
) -> Refusal | None:
    """Why `layout` cannot work for this model and batch, None when it can."""
    family, model, parallel, train = config.family, config.model, config.parallel, config.train
    return (
        _refused_sequence(config, layout)
        or _refused_widths(model, layout)
        or _refused_schedule(family, parallel, layout)
        or _refused_by_deepspeed(config, layout)
        or _refused_layers(family, model, parallel, layout)
        or _refused_batch(train, layout)
        or _refused_rampup(train, layout)
        or _refused_interleaving(train, layout)
        or _refused_vocabulary(model, layout, padded_vocab_size)
    )


def _refused_world(asked: ParallelLayout, ranks: int | None) -> Refusal | None:
    if ranks is None:
        return None
    if ranks < 1:
        return Refusal(f"launch.nproc_per_node is {ranks}", "at least one rank is needed")
    replica = asked.tensor * asked.pipeline
    if ranks % replica == 0:
        return None
    return Refusal(
        f"{ranks} rank{'s are' if ranks > 1 else ' is'} not a multiple of "
        f"parallel.tensor_model_parallel_size {asked.tensor} x "
        f"parallel.pipeline_model_parallel_size {asked.pipeline} = {replica} ranks per replica",
        f"set launch.nproc_per_node to {max(1, ranks // replica) * replica}",
    )


def _refused_sequence(config: "RunConfig", layout: ParallelLayout) -> Refusal | None:
    if not config.parallel.sequence_parallel:
        return None
    if layout.tensor == 1:
        return Refusal(
            "parallel.sequence_parallel is true but parallel.tensor_model_parallel_size is 1, so "
            "that no ranks share a sequence",
            "set parallel.sequence_parallel to false",
        )
    lengths = {"data.seq_length": config.data.seq_length}
    if config.family == "t5":
        lengths["data.span_corruption.decoder_seq_length"] = (
            config.data.span_corruption.decoder_seq_length
        )
    for name, length in lengths.items():
        if length % layout.tensor:
            return Refusal(
                f"{name} {length} is not a multiple of parallel.tensor_model_parallel_size "
                f"{layout.tensor}, which parallel.sequence_parallel divides it by",
                "set parallel.sequence_parallel to false",
            )
    return None


def _refused_widths(model: ModelConfig, layout: ParallelLayout) -> Refusal | None:
    tensor = layout.tensor
    for name, width in (
        ("num_attention_heads", model.num_attention_heads),
        ("ffn_hidden_size", model.ffn_size),
    ):
        if width % tensor:
            return Refusal(
                f"model.{name} {width} is not a multiple of parallel.tensor_model_parallel_size "
                f"{tensor}"
            )
    if model.query_groups % tensor and tensor % model.query_groups:
        return Refusal(
            f"model.num_query_groups {model.query_groups} is neither a multiple nor a divisor of "
            f"parallel.tensor_model_parallel_size {tensor}"
        )
    return None


def _refused_vocabulary(
    model: ModelConfig, layout: ParallelLayout, padded_vocab_size: int | None
) -> Refusal | None:
    if padded_vocab_size is None or padded_vocab_size % layout.tensor == 0:
        return None
    multiple = model.make_vocab_size_divisible_by
    return Refusal(
        f"the padded vocabulary of {padded_vocab_size} entries is not a multiple of "
        f"parallel.tensor_model_parallel_size {layout.tensor}",
        f"set model.make_vocab_size_divisible_by (now {multiple}) to "
        f"{math.lcm(multiple, layout.tensor)}",
    )


def _refused_schedule(
    family: Family, parallel: ParallelConfig, layout: ParallelLayout
) -> Refusal | None:
    split = parallel.pipeline_model_parallel_split_rank
    if split is not None and family != "t5":
        return Refusal(
            f"parallel.pipeline_model_parallel_split_rank is {split} but family is "
            f"{family}, which has no decoder beside an encoder",
            "set it to null",
        )
    if layout.virtual == 1:
        return None
    asked = f"parallel.virtual_pipeline_model_parallel_size is {layout.virtual}"
    remedy = "set parallel.virtual_pipeline_model_parallel_size to 1"
    if family == "t5":
        return Refusal(
            f"{asked} but family is t5, whose stages have one chunk of one stack each", remedy
        )
    if layout.pipeline == 1:
        return Refusal(
            f"{asked} but parallel.pipeline_model_parallel_size is 1, so that there are no stages",
            remedy,
        )
    if parallel.pipeline_schedule == "gpipe":
        return Refusal(
            f"{asked} but parallel.pipeline_schedule gpipe has one chunk per stage",
            f"set it to 1f1b, or {remedy}",
        )
    return None


def _refused_by_deepspeed(config: "RunConfig", layout: ParallelLayout) -> Refusal | None:
    """Its pipeline has one schedule, and keeps all gradients until the step."""
    if config.engine != "deepspeed" or layout.pipeline == 1:
        return None
    asked, stages = asked_of(config), f"parallel.pipeline_model_parallel_size is {layout.pipeline}"
    native = "set engine to native"
    if asked.stage >= 2:
        name = asked.named("zero_optimization.stage")
        return Refusal(
            f"{name} is {asked.stage} but {stages}, and DeepSpeed's pipeline keeps the gradients "
            "of all micro batches until the step, so that replicas can divide the optimizer's "
            "state alone",
            f"set {name} to 1",
        )
    if layout.virtual > 1:
        return Refusal(
            f"parallel.virtual_pipeline_model_parallel_size is {layout.virtual} but engine is "
            "deepspeed, whose stages have one chunk each",
            f"set it to 1, or {native}",
        )
    if config.parallel.pipeline_schedule != "1f1b":
        return Refusal(
            f"parallel.pipeline_schedule is {config.parallel.pipeline_schedule} but engine is "
            "deepspeed, whose pipeline has 1F1B alone",
            f"set it to 1f1b, or {native}",
        )
    return None


def _refused_layers(
    family: Family, model: ModelConfig, parallel: ParallelConfig, layout: ParallelLayout
) -> Refusal | None:
    layers, partition, chunks = model.num_layers, parallel.pipeline_partition, layout.chunks
    if family == "t5":
        split = parallel.pipeline_model_parallel_split_rank
        problem = T5Stages(
            layers, model.decoder_layers, layout.pipeline, split, partition
        ).problem()
        return None if problem is None else Refusal(*problem)
    into = f"parallel.pipeline_model_parallel_size {layout.pipeline}"
    if layout.virtual > 1:
        into += (
            f" x parallel.virtual_pipeline_model_parallel_size {layout.virtual} = {chunks} chunks"
        )
    if isinstance(partition, tuple):
        return _refused_list(layers, partition, chunks, into)
    if partition == "uniform" and layers % chunks:
        return Refusal(
            f"model.num_layers {layers} is not a multiple of {into}, which "
            "parallel.pipeline_partition uniform needs",
            "set parallel.pipeline_partition to balanced" if layers >= chunks else "",
        )
    if layers < chunks:
        return Refusal(
            f"model.num_layers {layers} is less than {into}, and each chunk needs a layer"
        )
    return None


def _refused_list(
    layers: int, partition: tuple[int, ...], chunks: int, into: str
) -> Refusal | None:
    if len(partition) != chunks:
        return Refusal(
            f"parallel.pipeline_partition {list(partition)} has {len(partition)} entries for "
            f"{into}",
            f"give it {chunks}",
        )
    if min((*partition[:-1], partition[-1] + (chunks > 1))) < 1:
        return Refusal(
            f"parallel.pipeline_partition {list(partition)} has a chunk of {min(partition)} layers",
            "give each at least 1, or 0 to the last alone, which has the head",
        )
    if sum(partition) != layers:
        return Refusal(
            f"parallel.pipeline_partition {list(partition)} adds up to {sum(partition)} layers and "
            f"model.num_layers is {layers}",
            f"make it add up to {layers}",
        )
    return None


def _refused_batch(train: TrainConfig, layout: ParallelLayout) -> Refusal | None:
    total, step = train.global_batch_size, train.micro_batch_size * layout.data
    if total % step == 0:
        return None
    return Refusal(
        f"train.global_batch_size {total} is not a multiple of {_micro_batches(train, layout)}",
        f"use {(total // step + 1) * step}",
    )


def _refused_rampup(train: TrainConfig, layout: ParallelLayout) -> Refusal | None:
    rampup, step = train.rampup_batch_size, train.micro_batch_size * layout.data
    for name, size in (
        () if rampup is None else (("start", rampup.start), ("increment", rampup.increment))
    ):
        if size % step:
            return Refusal(
                f"train.rampup_batch_size.{name} {size} is not a multiple of "
                f"{_micro_batches(train, layout)}",
                f"use {(size // step + 1) * step}",
            )
    return None


def _refused_interleaving(train: TrainConfig, layout: ParallelLayout) -> Refusal | None:
    """Interleaved 1F1B takes micro batches in groups of pp (Narayanan et al. 2021)."""
    if layout.virtual == 1:
        return None
    rampup, micro = train.rampup_batch_size, train.micro_batch_size * layout.data
    sizes = [("train.global_batch_size", train.global_batch_size)]
    if rampup is not None:
        sizes += [
            ("train.rampup_batch_size.start", rampup.start),
            ("train.rampup_batch_size.increment", rampup.increment),
        ]
    for name, size in sizes:
        if size // micro % layout.pipeline:
            step = micro * layout.pipeline
            return Refusal(
                f"{name} {size} / ({_micro_batches(train, layout)}) = {size // micro} micro "
                "batches, which is not a multiple of parallel.pipeline_model_parallel_size "
                f"{layout.pipeline} as parallel.virtual_pipeline_model_parallel_size "
                f"{layout.virtual} needs it",
                f"use {(size // step + 1) * step}",
            )
    return None


def _micro_batches(train: TrainConfig, layout: ParallelLayout) -> str:
    """The samples that all replicas take at once, spelled out."""
    micro = train.micro_batch_size
    if layout.data == 1:
        return f"train.micro_batch_size {micro}"
    return (
        f"train.micro_batch_size {micro} x {layout.data} data-parallel ranks = "
        f"{micro * layout.data}"
    )
