"""Checks of parallel layouts.

Valid layouts, and those nearest to an invalid one, are found by arithmetic only.
"""

import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from megacore.config.data import DataConfig
from megacore.config.deepspeed import user_settings_of
from megacore.config.model import Family, ModelConfig
from megacore.config.parallel import ParallelConfig
from megacore.config.t5_stages import T5Stages
from megacore.config.train import TrainConfig

if TYPE_CHECKING:
    from megacore.config.run import RunConfig

PROPOSALS = 3
"""Maximum number of layouts that a refusal proposes."""


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Sizes of a layout that a configuration requests, with the chunks of each stage.

    The places of its ranks are in `parallel.rank_layout.RankLayout`.
    """

    tensor: int = 1
    """Number of tensor-parallel ranks (tp)."""
    pipeline: int = 1
    """Number of pipeline stages (pp)."""
    virtual: int = 1
    """Number of chunks per pipeline stage (v)."""
    data: int = 1
    """Number of data-parallel replicas (dp)."""
    context: int = 1
    """Number of parts of each sequence (cp)."""

    @classmethod
    def of(cls, parallel: ParallelConfig, ranks: int | None) -> Self:
        """Return the layout that a configuration requests, with one replica if `ranks` is None."""
        return cls(
            tensor=parallel.tensor_model_parallel_size,
            pipeline=parallel.pipeline_model_parallel_size,
            virtual=parallel.virtual_pipeline_model_parallel_size,
            data=1 if ranks is None else max(1, ranks // parallel.ranks_per_replica),
            context=parallel.context_parallel_size,
        )

    @property
    def chunks(self) -> int:
        """Number of chunks of the whole model (pp x v)."""
        return self.pipeline * self.virtual

    def distance(self, other: "ParallelLayout") -> float:
        """Return the number of doublings and halvings of the sizes to reach another layout."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return sum(abs(math.log2(mine / theirs)) for mine, theirs in pairs)

    def named(self, *, data: bool) -> str:
        """Return the layout as text, such as `tensor 4 x pipeline 2`.

        Context and virtual sizes are included above 1, data-parallel ranks if `data` is True.
        """
        context = f" x context {self.context}" if self.context > 1 else ""
        virtual = f" x virtual {self.virtual}" if self.virtual > 1 else ""
        return (
            f"tensor {self.tensor}{context} x pipeline "
            f"{self.pipeline}{virtual}{f' x data {self.data}' if data else ''}"
        )


class Refusal(NamedTuple):
    """Reason why a layout cannot work."""

    problem: str
    """Problem in one clause with all the numbers."""
    remedy: str = ""
    """Remedy other than a different layout."""


def check_layout(
    config: "RunConfig", ranks: int | None, padded_vocab_size: int | None = None
) -> ParallelLayout:
    """Return the layout that a configuration requests, with one replica if `ranks` is None.

    Raises ValueError if the layout cannot work; the message has all the numbers and the nearest
    valid layouts. Without a padded vocabulary its division is not checked.
    """
    requested = ParallelLayout.of(config.parallel, ranks)
    launch = config.launch
    several = launch.hostfile is not None or (launch.node_range or (1, 1))[1] > 1
    refusal = _refused_world(requested, ranks, several=several) or refused(
        config, requested, padded_vocab_size
    )
    if refusal is None:
        return requested
    world = config.parallel.ranks_per_replica if ranks is None else ranks
    near = nearest_layouts(
        config, requested, world, padded_vocab_size, data=1 if ranks is None else None
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
) -> list[ParallelLayout]:
    """Return up to `PROPOSALS` valid layouts of `ranks` ranks, nearest to `asked` first.

    The layout of `config` itself is ignored. Equally near layouts are sorted by the number of
    replicas, because fewer replicas need less memory per rank. Virtual stages are proposed only if
    `asked` has some, and the context-parallel size does not change. All layouts have `data`
    replicas, unless it is None.
    """
    possible = [
        layout
        for layout in _layouts(config.model.num_layers, asked, ranks)
        if data in (None, layout.data) and refused(config, layout, padded_vocab_size) is None
    ]
    return sorted(
        possible,
        key=lambda each: (round(each.distance(asked), 6), each.data, each.virtual, each.tensor),
    )[:PROPOSALS]


def _layouts(layers: int, asked: ParallelLayout, ranks: int) -> Iterator[ParallelLayout]:
    """Yield all layouts of `ranks` ranks with the context-parallel size of `asked`."""
    if ranks % asked.context:
        return
    shared = ranks // asked.context
    for tensor in divisors(shared):
        for pipeline in divisors(shared // tensor):
            most = layers // pipeline if asked.virtual > 1 and pipeline > 1 else 1
            for virtual in range(1, max(1, most) + 1):
                yield ParallelLayout(
                    tensor=tensor,
                    pipeline=pipeline,
                    virtual=virtual,
                    data=shared // (tensor * pipeline),
                    context=asked.context,
                )


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def refused(
    config: "RunConfig", layout: ParallelLayout, padded_vocab_size: int | None = None
) -> Refusal | None:
    """Return why `layout` cannot work for the model and batch; None if it can."""
    family, model, parallel, train = config.family, config.model, config.parallel, config.train
    return (
        _refused_graphs(config, layout)
        or _refused_sequence(config, layout)
        or _refused_context(config, layout)
        or _refused_widths(model, layout)
        or _refused_schedule(family, parallel, layout)
        or _refused_by_deepspeed(config, layout)
        or _refused_sharding(config, layout)
        or _refused_layers(family, model, parallel, layout)
        or _refused_batch(train, layout)
        or _refused_rampup(train, layout)
        or _refused_interleaving(train, layout)
        or _refused_vocabulary(model, layout, padded_vocab_size)
    )


def _refused_world(asked: ParallelLayout, ranks: int | None, *, several: bool) -> Refusal | None:
    """Check that the ranks, of `several` hosts or of one, are whole replicas."""
    if ranks is None:
        return None
    replica = asked.tensor * asked.context * asked.pipeline
    if ranks % replica == 0:
        return None
    context = f"parallel.context_parallel_size {asked.context} x " if asked.context > 1 else ""
    number = max(1, ranks // replica) * replica
    return Refusal(
        f"{ranks} rank{'s are' if ranks > 1 else ' is'} not a multiple of "
        f"parallel.tensor_model_parallel_size {asked.tensor} x {context}"
        f"parallel.pipeline_model_parallel_size {asked.pipeline} = {replica} ranks per replica",
        f"start {number} ranks on all hosts (launch.nnodes x launch.nproc_per_node, or the slots "
        "of launch.hostfile)"
        if several
        else f"set launch.nproc_per_node to {number}",
    )


def _refused_graphs(config: "RunConfig", layout: ParallelLayout) -> Refusal | None:
    """Check that no pass that a CUDA graph holds communicates."""
    if not config.train.cuda_graphs:
        return None
    sharding = config.parallel.data_parallel_sharding
    if config.parallel.zero_stage > 1:
        return Refusal(
            f"train.cuda_graphs is true and parallel.data_parallel_sharding is {sharding}, which "
            "communicates in every pass, but a graph holds no communication",
            "set train.cuda_graphs to false, or the sharding to optimizer",
        )
    for name, size in (
        ("tensor_model_parallel_size", layout.tensor),
        ("context_parallel_size", layout.context),
        ("pipeline_model_parallel_size", layout.pipeline),
    ):
        if size > 1:
            return Refusal(
                f"train.cuda_graphs is true and parallel.{name} is {size}, but a graph holds no "
                "communication",
                "set train.cuda_graphs to false, or the size to 1",
            )
    return None


def _refused_sequence(config: "RunConfig", layout: ParallelLayout) -> Refusal | None:
    if not config.parallel.sequence_parallel:
        return None
    if layout.tensor == 1:
        return Refusal(
            "parallel.sequence_parallel is true but parallel.tensor_model_parallel_size is 1, so "
            "that no ranks share a sequence",
            "set parallel.sequence_parallel to false",
        )
    lengths = _lengths(config.data)
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


def _lengths(data: DataConfig) -> dict[str, int]:
    """Return the tokens of the sequences that a training has, by the name of their field."""
    phases = enumerate(data.seq_length_schedule or ())
    scheduled = {
        f"data.seq_length_schedule[{number}].seq_length": phase.seq_length
        for number, phase in phases
    }
    return {"data.seq_length": data.seq_length} | scheduled


def _refused_context(config: "RunConfig", layout: ParallelLayout) -> Refusal | None:
    """Check what context parallelism needs of the model, the sequence and the engine."""
    if layout.context == 1:
        return None
    setting = f"parallel.context_parallel_size is {layout.context}"
    remedy = "set parallel.context_parallel_size to 1"
    if config.family != "gpt":
        return Refusal(
            f"{setting} but family is {config.family}, and only causal models divide their "
            "sequences",
            remedy,
        )
    if config.engine == "deepspeed":
        return Refusal(
            f"{setting} but engine is deepspeed, which does not divide sequences",
            f"set engine to native, or {remedy}",
        )
    if config.model.position_embedding_type == "alibi":
        return Refusal(
            f"{setting} but model.position_embedding_type is alibi, whose biases are not divided",
            remedy,
        )
    divided = config.parallel.sequence_parallel
    if divided and layout.tensor % 2 and config.model.hidden_dropout:
        return Refusal(
            f"{setting} with parallel.sequence_parallel and an odd "
            f"parallel.tensor_model_parallel_size {layout.tensor}, whose ranks would draw other "
            f"numbers for model.hidden_dropout {config.model.hidden_dropout}",
            "set parallel.sequence_parallel to false",
        )
    parts = math.lcm(2 * layout.context, layout.context * (layout.tensor if divided else 1))
    wrong = [each for each in _lengths(config.data).items() if each[1] % parts]
    if not wrong:
        return None
    (name, length), *_ = wrong
    sp = f" x parallel.tensor_model_parallel_size {layout.tensor}" if divided else ""
    return Refusal(
        f"{name} {length} is not a multiple of {parts}: it is divided into 2 x "
        f"parallel.context_parallel_size {layout.context} chunks"
        f"{f', and over {layout.context} ranks{sp} by parallel.sequence_parallel' if sp else ''}",
        f"use {max(1, round(length / parts)) * parts}, or {remedy}",
    )


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
    # With fewer groups than ranks, each rank projects a part of the keys and values of all groups.
    features = 2 * model.query_groups * model.head_dim
    if features % tensor:
        return Refusal(
            f"the {features} features of keys and values (2 x model.num_query_groups "
            f"{model.query_groups} x {model.head_dim} of a head) are not a multiple of "
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
            f"{family}, which has no decoder after an encoder",
            "set it to null",
        )
    if parallel.delay_weight_gradients:
        problem = _refused_delay(parallel, layout)
        if problem is not None:
            return Refusal(
                f"parallel.delay_weight_gradients is true but {problem}",
                "set parallel.delay_weight_gradients to false",
            )
    if layout.virtual == 1:
        return None
    setting = f"parallel.virtual_pipeline_model_parallel_size is {layout.virtual}"
    remedy = "set parallel.virtual_pipeline_model_parallel_size to 1"
    if family == "t5":
        return Refusal(
            f"{setting} but family is t5, whose stages have one chunk of one stack each", remedy
        )
    if layout.pipeline == 1:
        return Refusal(
            f"{setting} but parallel.pipeline_model_parallel_size is 1, so that there are no "
            "stages",
            remedy,
        )
    if parallel.pipeline_schedule == "gpipe":
        return Refusal(
            f"{setting} but parallel.pipeline_schedule gpipe has one chunk per stage",
            f"set it to 1f1b, or {remedy}",
        )
    return None


def _refused_delay(parallel: ParallelConfig, layout: ParallelLayout) -> str | None:
    """Return why weight gradients cannot be delayed; None if they can."""
    if layout.pipeline == 1:
        return (
            "parallel.pipeline_model_parallel_size is 1, so that no stage waits for the gradient "
            "of its output"
        )
    if parallel.data_parallel_sharding in ("gradients", "parameters"):
        return (
            f"parallel.data_parallel_sharding is {parallel.data_parallel_sharding}, which reduces "
            "the gradients when each backward pass ends"
        )
    return None


def _refused_by_deepspeed(config: "RunConfig", layout: ParallelLayout) -> Refusal | None:
    """Check the limits of DeepSpeed's pipeline.

    It has only one schedule, and it keeps all gradients until the step.
    """
    if config.engine != "deepspeed" or layout.pipeline == 1:
        return None
    user_settings, native = user_settings_of(config), "set engine to native"
    stages = f"parallel.pipeline_model_parallel_size is {layout.pipeline}"
    if user_settings.stage >= 2:
        name = user_settings.named("zero_optimization.stage")
        return Refusal(
            f"{name} is {user_settings.stage} but {stages}, and DeepSpeed's pipeline keeps the "
            "gradients of all micro batches until the step, so that replicas can divide only the "
            "optimizer's state",
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
            "deepspeed, whose pipeline has only 1F1B",
            f"set it to 1f1b, or {native}",
        )
    if config.parallel.delay_weight_gradients:
        return Refusal(
            "parallel.delay_weight_gradients is true but engine is deepspeed, whose backward "
            "passes are whole",
            f"set it to false, or {native}",
        )
    return None


def _refused_sharding(config: "RunConfig", layout: ParallelLayout) -> Refusal | None:
    """Check that divided weights are not gathered again for each micro batch of each stage."""
    sharding = config.parallel.data_parallel_sharding
    if sharding != "parameters" or layout.pipeline == 1 or config.engine == "deepspeed":
        return None
    return Refusal(
        f"parallel.data_parallel_sharding is parameters but parallel.pipeline_model_parallel_size "
        f"is {layout.pipeline}, and the layers of a stage, which alternate between forward and "
        "backward passes of different micro batches, would be gathered twice for each",
        "set parallel.data_parallel_sharding to gradients, or "
        "parallel.pipeline_model_parallel_size to 1",
    )


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
            "give each at least 1, or 0 only to the last, which has the head",
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
    """Check that micro batches form groups of pp for interleaved 1F1B (Narayanan et al. 2021)."""
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
    """Return the samples of one forward pass over all replicas as text."""
    micro = train.micro_batch_size
    if layout.data == 1:
        return f"train.micro_batch_size {micro}"
    return (
        f"train.micro_batch_size {micro} x {layout.data} data-parallel ranks = "
        f"{micro * layout.data}"
    )
