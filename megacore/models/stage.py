"""The chunks of a model on one rank, and the passes of micro batches through them."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import tee

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.data_parallel.grad_sync import Contributions, GradSync
from megacore.kernels.choice import Kernels, plain_kernels
from megacore.models.base import Losses, LossTotals, loss_sums
from megacore.models.build import build_model
from megacore.models.gpt import GPTModel
from megacore.models.init import initial_weights
from megacore.models.inputs import input_rules
from megacore.models.layers.attention import CrossAttention, SelfAttention
from megacore.models.layers.transformer import TransformerLayer
from megacore.models.parameters import parameter_count
from megacore.optim.muon import RowParts
from megacore.parallel.mesh import ParallelGroup, ProcessMesh
from megacore.pipeline_parallel.executor import AHEAD, Executor, StageWork
from megacore.pipeline_parallel.partition import ModelChunk, chunks_of, copied_parameters
from megacore.pipeline_parallel.schedules import (
    Direction,
    Message,
    Pipeline,
    StagePasses,
    build_schedule,
    forward_only,
    passes_of_stage,
)
from megacore.tensor_parallel import (
    ColumnParallelLinear,
    Partition,
    RowParallelLinear,
    partitions,
)


class Stage:
    """One rank's chunks of a model; without pipeline parallelism one chunk, the whole model."""

    def __init__(
        self,
        config: RunConfig,
        vocab_size: int,
        mesh: ProcessMesh,
        *,
        special_tokens: SpecialTokens,
        device: torch.device | str = "cpu",
        kernels: Kernels | None = None,
        initial_weights: bool = True,
        stored: bool = True,
    ) -> None:
        """Build the chunks with initial weights that do not depend on the layout.

        Args:
            config: the run's configuration.
            vocab_size: size of the tokenizer's vocabulary, before padding.
            mesh: process groups of this rank.
            special_tokens: ids of the special tokens.
            device: device of the parameters.
            kernels: kernels to compute with; None means plain torch.
            initial_weights: initialize the parameters; otherwise they are left uninitialized.
            stored: allocate the parameters; otherwise the engine does, and fills them with
                `initial_weights`.

        Raises:
            ParallelLayoutError: heads, widths, vocabulary or layers cannot be divided over the
                ranks.
        """
        self.mesh = mesh
        self.kernels = kernels or plain_kernels()
        self._spec = ModelSpec.of(config, vocab_size)
        self.parameter_count = parameter_count(self._spec)
        """Number of parameters of the whole model."""
        self.stored = stored
        """True if the parameters have memory."""
        self.rules = input_rules(config, special_tokens)
        self._config = config
        stages = mesh.pipeline_parallel
        virtual = config.parallel.virtual_pipeline_model_parallel_size if stages.size > 1 else 1
        self._parts = chunks_of(config, vocab_size) if stages.size > 1 else []
        local_chunks: list[ModelChunk | None] = [*self._parts[stages.rank :: stages.size]] or [None]
        self.chunks = [
            build_model(
                config,
                vocab_size,
                mesh,
                device=device,
                chunk=part,
                kernels=kernels,
                initial_weights=initial_weights,
                stored=stored,
            )
            for part in local_chunks
        ]
        self.device = torch.device(device)
        self._pipeline = Pipeline(stages.size, virtual)
        self._passes: dict[tuple[int, bool], StagePasses] = {}
        self._known: set[tuple[str, frozenset[int | None]]] = set()
        """Kinds and sizes of the passes that have run."""

    @property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of this rank by global name."""
        return {
            name: parameter for chunk in self.chunks for name, parameter in chunk.named_parameters()
        }

    @property
    def initial_weights(self) -> dict[str, Callable[[], Tensor]]:
        """Functions that return the initial values of this rank's parameters, fp32 on the CPU."""
        return {
            name: partial(initial, name)
            for chunk in self.chunks
            for initial in [initial_weights(chunk, self._spec, seed=self._config.seed)]
            for name in dict(chunk.named_parameters())
        }

    @property
    def partitions(self) -> dict[str, Partition]:
        """Partitions of the parameters that are divided over tensor-parallel ranks."""
        return {name: part for chunk in self.chunks for name, part in partitions(chunk).items()}

    @property
    def matrices(self) -> dict[str, RowParts]:
        """Weights of the layers' linear projections, with the matrices in them."""
        return {
            name: parts for chunk in self.chunks for name, parts in layer_matrices(chunk).items()
        }

    @property
    def units(self) -> list[nn.Module]:
        """Modules whose weights nothing else uses, in the order of their forward passes.

        They are the layers, and a GPT's embedding if the head has separate weights. T5 embeds
        twice.
        """
        modules: list[nn.Module] = []
        for chunk in self.chunks:
            if isinstance(chunk, GPTModel) and chunk.has_embedding and chunk.output_layer:
                modules.append(chunk.embedding)
            modules += [each for each in chunk.modules() if isinstance(each, TransformerLayer)]
        return modules

    @property
    def shared_parameters(self) -> dict[str, ParallelGroup]:
        """Groups of the parameters that other pipeline stages also have copies of, by name.

        The mesh has all of these groups.
        """
        copied, rank = self.copied_parameters, self.mesh.pipeline_parallel.rank
        return {name: self.mesh.copies[stages] for name, stages in copied.items() if rank in stages}

    @property
    def copied_parameters(self) -> dict[str, tuple[int, ...]]:
        """Pipeline stages that have a copy of each shared parameter of the whole model.

        The keys are the parameters' global names.
        """
        return copied_parameters(self._parts, self.mesh.pipeline_parallel.size, self._config.model)

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Names of the losses in the minimized sum, `lm_loss` first."""
        return self.chunks[0].loss_names

    @property
    def label_length(self) -> int:
        """Number of labels of a sample; for T5, of the decoder."""
        data = self._config.data
        t5 = self._config.family == "t5"
        return data.span_corruption.decoder_seq_length if t5 else data.seq_length

    @property
    def padded_vocab_size(self) -> int:
        """Number of rows of the embedding."""
        return self.chunks[0].padded_vocab_size

    @property
    def reads_tokens(self) -> bool:
        """True if this rank needs the samples.

        Middle stages take hidden states. They need the samples only for their masks, if any.
        """
        return self.mesh.is_first_stage or self.mesh.is_last_stage or self.rules.for_every_stage

    def hidden_shape(self, samples: int, chunk: int, seq_length: int | None = None) -> torch.Size:
        """Return the shape [b, s(/cp/t), h] of the hidden states that the model's `chunk` takes.

        T5's decoder chunks also pass on the encoder's output: [b, (s_e + s_d)(/t), h]. Samples cut
        into sequences of `seq_length` tokens (l) have the shape [b s / l, l(/cp/t), h].
        """
        data, parallel = self._config.data, self._config.parallel
        length = seq_length or data.seq_length
        samples *= data.seq_length // length
        if self._parts[chunk - 1].decoder_layers:
            length += data.span_corruption.decoder_seq_length
        length //= self.mesh.context_parallel.size
        if parallel.sequence_parallel:
            length //= self.mesh.tensor_parallel.size
        return torch.Size((samples, length, self._config.model.hidden_size))

    def train_pass(
        self,
        batches: Iterator[Tensor],
        seeds: Sequence[int],
        syncs: Sequence[GradSync],
        *,
        scale: float | Tensor,
        complete: bool = True,
        seq_length: int | None = None,
    ) -> list[Tensor]:
        """Run forward and backward passes of all micro batches of an iteration, or of some.

        Args:
            batches: ids [b, width] of each micro batch, on this rank's device; empty unless
                `reads_tokens`.
            seeds: dropout seed of each micro batch.
            syncs: gradient synchronization of each chunk, which starts with the chunk's last
                backward pass.
            scale: factor on the loss of a micro batch, which is the sum of its mean losses; a
                scalar tensor in a CUDA graph, which would store a number.
            complete: False if these are not all micro batches of the iteration, so that none of
                their backward passes starts the synchronization.
            seq_length: tokens of each sequence; None means data.seq_length.

        Returns:
            The mean losses [terms] of each micro batch in the order of `loss_names`, on the last
            stage; an empty list on the others.
        """
        kind = "training", frozenset({seq_length})
        # The first passes load the code of weight gradients before anything waits for them.
        delays = self._config.parallel.delay_weight_gradients and kind in self._known
        passes = self._training_passes(len(seeds), delays=delays)
        delayed = frozenset(
            each.chunk for each in passes.passes if each.direction is Direction.WEIGHTS
        )
        work = _Training(self, batches, seeds, syncs, scale, delayed, complete=complete)
        samples = self._config.train.micro_batch_size
        self._run(
            passes, work, lambda message: self._shape(message, samples, seq_length), kind=kind
        )
        return work.losses

    @torch.inference_mode()
    def loss_sum(
        self, batches: Iterator[Tensor], sizes: Sequence[int], totals: LossTotals
    ) -> Tensor:
        """Add the sums of the losses to `totals`, and return them all, without dropout.

        Args:
            batches: ids [b, width] of each micro batch, on this rank's device; empty unless
                `reads_tokens`.
            sizes: samples (b) of each micro batch.
            totals: sums of earlier micro batches.

        Returns:
            fp64 [terms + POSITION_BUCKETS + sources, 2], see `LossTotals`; the losses are in the
            order of `loss_names`. Only the last stage adds anything.
        """
        for chunk in self.chunks:
            chunk.eval()
        try:
            schedule = (
                forward_only(self._pipeline.stages, len(sizes), self._pipeline.chunks)
                if sizes
                else ((),) * self._pipeline.stages
            )
            self._run(
                passes_of_stage(schedule, self.mesh.pipeline_parallel.rank),
                _Scoring(self, batches, totals),
                lambda message: self._shape(message, sizes[message.micro_batch]),
                kind=("scoring", frozenset(sizes)),
            )
        finally:
            for chunk in self.chunks:
                chunk.train()
        return totals.total

    def _shape(self, message: Message, samples: int, seq_length: int | None = None) -> torch.Size:
        """Return the shape of hidden states, or of their gradient for the previous chunk."""
        chunk = message.chunk + (message.direction is Direction.BACKWARD)
        return self.hidden_shape(samples, chunk, seq_length)

    def _training_passes(self, micro_batches: int, *, delays: bool) -> StagePasses:
        """Return this rank's passes, built once for each number of micro batches.

        During a ramp-up of the batch size, the number of micro batches grows. With `delays`, weight
        gradients are separate passes.
        """
        if (micro_batches, delays) not in self._passes:
            schedule = build_schedule(
                self._config.parallel.pipeline_schedule,
                self._pipeline.stages,
                micro_batches,
                self._pipeline.chunks,
                delayed=delays,
            )
            self._passes[micro_batches, delays] = passes_of_stage(
                schedule, self.mesh.pipeline_parallel.rank
            )
        return self._passes[micro_batches, delays]

    def _run(
        self,
        passes: StagePasses,
        work: StageWork,
        shape: Callable[[Message], torch.Size],
        *,
        kind: tuple[str, frozenset[int | None]],
    ) -> None:
        """Run passes; those of a new `kind` load code, and therefore post no receives ahead."""
        dtype = next(self.chunks[0].parameters()).dtype
        Executor(self.mesh, self._pipeline, dtype, self.device).run(
            passes, work, shape, ahead=AHEAD if kind in self._known else 0
        )
        self._known.add(kind)


class _Work(StageWork):
    """Base class of the computations that the passes of a schedule run."""

    def __init__(self, stage: Stage, batches: Iterator[Tensor]) -> None:
        self._stage = stage
        self._time = stage.mesh.time
        # Micro batches reach each chunk in order. If several of a rank's chunks read them, each has
        # its own iterator.
        readers = [
            number
            for number, model in enumerate(stage.chunks)
            if model.has_embedding or model.has_head or stage.rules.for_every_stage
        ]
        shares = tee(batches, len(readers)) if len(readers) > 1 else (batches,)
        self._batches = dict(zip(readers, shares, strict=False))

    def _run(self, chunk: int, hidden: Tensor | None, dropout_seed: int | None) -> Tensor | Losses:
        """Run a chunk on its next micro batch.

        Returns hidden states, or the losses if the chunk has the head.
        """
        batch = next(self._batches[chunk]) if chunk in self._batches else None
        with self._time("forward-compute"):
            inputs = (
                None
                if batch is None
                else self._stage.rules.read(batch).part(self._stage.mesh.context_parallel)
            )
            return self._stage.chunks[chunk].run(inputs, hidden, dropout_seed=dropout_seed)


class _Training(_Work):
    def __init__(
        self,
        stage: Stage,
        batches: Iterator[Tensor],
        seeds: Sequence[int],
        syncs: Sequence[GradSync],
        scale: float | Tensor,
        delayed: Collection[int],
        *,
        complete: bool,
    ) -> None:
        """Create the work of a rank.

        `delayed` are its chunks whose weight gradients are separate passes; the others are the
        arguments of `Stage.train_pass`.
        """
        super().__init__(stage, batches)
        self._seeds, self._syncs, self._scale = seeds, syncs, scale
        self._complete = complete
        self._delays = delayed
        self._delayed: dict[tuple[int, int], Contributions] = {}
        self.losses: list[Tensor] = []

    def forward(self, micro_batch: int, chunk: int, hidden: Tensor | None) -> Tensor:
        """Return the chunk's hidden states, or the scaled sum of the mean losses."""
        output = self._run(chunk, hidden, self._seeds[micro_batch])
        if isinstance(output, Tensor):
            return output
        means = torch.stack([output[name].mean() for name in self._stage.loss_names])
        self.losses.append(means.detach())
        return means.sum() * self._scale

    def backward(
        self, micro_batch: int, chunk: int, output: GradientEdge, grad: Tensor | None
    ) -> None:
        """Accumulate the gradients of the chunk's parameters, and compute that of its input.

        Weight gradients are left to `weight_gradients` if the schedule delays them.
        """
        with self._micro_step(micro_batch, chunk), self._delay(micro_batch, chunk):
            torch.autograd.backward(output, grad)

    def weight_gradients(self, micro_batch: int, chunk: int) -> None:
        """Accumulate the weight gradients that a backward pass has delayed."""
        contributions = self._delayed.pop((micro_batch, chunk))
        with self._micro_step(micro_batch, chunk), torch.no_grad():
            while contributions:
                contributions.popleft()()

    @contextmanager
    def _micro_step(self, micro_batch: int, chunk: int) -> Iterator[None]:
        """Surround a pass; gradients reach a chunk in the order of the micro batches."""
        last = self._complete and micro_batch == len(self._seeds) - 1
        with self._time("backward-compute"), self._syncs[chunk].micro_step(last=last):
            yield

    @contextmanager
    def _delay(self, micro_batch: int, chunk: int) -> Iterator[None]:
        """Collect the weight gradients of a backward pass, if the schedule delays them."""
        if chunk not in self._delays:
            yield
            return
        with self._syncs[chunk].delayed_contributions() as contributions:
            yield
        self._delayed[micro_batch, chunk] = contributions


class _Scoring(_Work):
    def __init__(self, stage: Stage, batches: Iterator[Tensor], totals: LossTotals) -> None:
        super().__init__(stage, batches)
        self._totals = totals

    def forward(self, micro_batch: int, chunk: int, hidden: Tensor | None) -> Tensor:
        """Return the chunk's hidden states, or the sums of all losses so far."""
        output = self._run(chunk, hidden, None)
        if isinstance(output, Tensor):
            return output
        self._totals.add(loss_sums(output))
        return self._totals.total


def layer_matrices(model: nn.Module) -> dict[str, RowParts]:
    """Return the weights of the linear projections in transformer layers, by global name.

    Muon updates them. Embeddings, heads, biases and norms are not among them. A weight that
    projects to q, k and v, or to k and v, has rows [head][q, k, v][d] or [group][k, v][d].
    """
    return {
        f"{layer_name}.{name}.weight" if layer_name else f"{name}.weight": parts
        for layer_name, layer in model.named_modules()
        if isinstance(layer, TransformerLayer)
        for name, parts in _projections(layer)
    }


def _projections(layer: TransformerLayer) -> Iterator[tuple[str, RowParts]]:
    fused = {}
    for name, module in layer.named_modules():
        if isinstance(module, SelfAttention | CrossAttention):
            fused[f"{name}.query_key_value"] = RowParts(3, module.head_dim)
            fused[f"{name}.key_value"] = RowParts(2, module.head_dim)
    for name, module in layer.named_modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            yield name, fused.get(name, RowParts())
