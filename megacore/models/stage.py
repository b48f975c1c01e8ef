"""The part of a model that one rank holds: its chunks, and how micro batches pass through them."""

from collections.abc import Iterator, Sequence
from itertools import tee

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.data_parallel.grad_sync import GradSync
from megacore.kernels.choice import Kernels, plain_kernels
from megacore.models.base import Losses
from megacore.models.build import build_model
from megacore.models.inputs import input_rules
from megacore.models.parameters import parameter_count
from megacore.parallel.mesh import ParallelGroup, ProcessMesh
from megacore.pipeline_parallel.executor import Executor
from megacore.pipeline_parallel.partition import ModelChunk, chunks_of, copied_parameters
from megacore.pipeline_parallel.schedules import (
    Direction,
    Message,
    Pass,
    Pipeline,
    build_schedule,
    forward_only,
)
from megacore.tensor_parallel import Partition, partitions


class Stage:
    """One rank's chunks of a model; with one pipeline stage a single chunk, the model itself."""

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
    ) -> None:
        """Build the chunks with their initial weights, the same for every layout.

        Args:
            config: the run.
            vocab_size: entries of the tokenizer, before padding.
            mesh: this process's groups.
            special_tokens: ids of the tokens that have a role.
            device: where the parameters are.
            kernels: what computes; None is plain torch.
            initial_weights: whether parameters get their values here; else they are left
                uninitialised.

        Raises:
            ParallelLayoutError: heads, widths, vocabulary or layers cannot be divided over the
                ranks.
        """
        self.mesh = mesh
        self.kernels = kernels or plain_kernels()
        self.parameter_count = parameter_count(ModelSpec.of(config, vocab_size))
        """Parameters of the whole model."""
        self.rules = input_rules(config, special_tokens)
        self._config = config
        stages = mesh.pipeline_parallel
        virtual = config.parallel.virtual_pipeline_model_parallel_size if stages.size > 1 else 1
        self._parts = chunks_of(config, vocab_size) if stages.size > 1 else []
        own: list[ModelChunk | None] = [*self._parts[stages.rank :: stages.size]] or [None]
        self.chunks = [
            build_model(
                config,
                vocab_size,
                mesh,
                device=device,
                chunk=part,
                kernels=kernels,
                initial_weights=initial_weights,
            )
            for part in own
        ]
        self.device = torch.device(device)
        self._pipeline = Pipeline(stages.size, virtual)
        self._passes: dict[int, tuple[Pass, ...]] = {}

    @property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter of this rank by its global name."""
        return {
            name: parameter for chunk in self.chunks for name, parameter in chunk.named_parameters()
        }

    @property
    def partitions(self) -> dict[str, Partition]:
        """How those that are divided over tensor-parallel ranks are divided."""
        return {name: part for chunk in self.chunks for name, part in partitions(chunk).items()}

    @property
    def shared_parameters(self) -> dict[str, ParallelGroup]:
        """Those that other pipeline stages hold too, with the stages' group.

        The mesh was built with all of them.
        """
        copied, rank = self.copied_parameters, self.mesh.pipeline_parallel.rank
        return {name: self.mesh.copies[stages] for name, stages in copied.items() if rank in stages}

    @property
    def copied_parameters(self) -> dict[str, tuple[int, ...]]:
        """The pipeline stages that hold a parameter, where there are several, in the whole model.

        By the parameter's global name.
        """
        return copied_parameters(self._parts, self.mesh.pipeline_parallel.size, self._config.model)

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Names of the losses whose sum is minimised, `lm_loss` first."""
        return self.chunks[0].loss_names

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.chunks[0].padded_vocab_size

    @property
    def reads_tokens(self) -> bool:
        """Whether this rank needs the samples.

        Stages in between take hidden states, and some need masks as well.
        """
        return self.mesh.is_first_stage or self.mesh.is_last_stage or self.rules.for_every_stage

    def hidden_shape(self, samples: int, chunk: int) -> torch.Size:
        """Shape of the hidden states that one of the model's chunks takes: [b, s(/t), h].

        T5's decoder hands on what the encoder returned and its own: [b, (s_e + s_d)(/t), h].
        """
        data, parallel = self._config.data, self._config.parallel
        length = data.seq_length
        if self._parts[chunk - 1].decoder_layers:
            length += data.span_corruption.decoder_seq_length
        if parallel.sequence_parallel:
            length //= self.mesh.tensor_parallel.size
        return torch.Size((samples, length, self._config.model.hidden_size))

    def train_pass(
        self,
        batches: Iterator[Tensor],
        seeds: Sequence[int],
        syncs: Sequence[GradSync],
        *,
        scale: float,
    ) -> list[Tensor]:
        """Forward and backward of all micro batches of an iteration.

        Args:
            batches: ids [b, width] of each micro batch, on this rank's device; empty unless
                `reads_tokens`.
            seeds: of the dropout of each micro batch.
            syncs: of each chunk; its last backward pass lets gradients travel.
            scale: factor on the loss of a micro batch, the sum of its mean losses.

        Returns:
            The mean losses of each micro batch in the order of `loss_names`, [terms], on the last
            stage; nothing on the others.
        """
        work = _Training(self, batches, seeds, syncs, scale)
        samples = self._config.train.micro_batch_size
        self._executor().run(
            self._training_passes(len(seeds)), work, lambda message: self._shape(message, samples)
        )
        return work.losses

    @torch.inference_mode()
    def loss_sum(self, batches: Iterator[Tensor], sizes: Sequence[int]) -> Tensor:
        """Of each loss the sum over all that counts, and its number, without dropout.

        Args:
            batches: ids [b, width] of each micro batch, on this rank's device; empty unless
                `reads_tokens`.
            sizes: samples (b) of each micro batch.

        Returns:
            fp64 [terms, 2], in the order of `loss_names`; zeros on all stages but the last.
        """
        work = _Scoring(self, batches)
        for chunk in self.chunks:
            chunk.eval()
        try:
            passes = (
                forward_only(self._pipeline.stages, len(sizes), self._pipeline.chunks)
                if sizes
                else ((),) * self._pipeline.stages
            )
            own = passes[self.mesh.pipeline_parallel.rank]
            self._executor().run(
                own, work, lambda message: self._shape(message, sizes[message.micro_batch])
            )
        finally:
            for chunk in self.chunks:
                chunk.train()
        return work.total

    def _shape(self, message: Message, samples: int) -> torch.Size:
        """Of hidden states, or their gradient, which goes back to the chunk before."""
        return self.hidden_shape(samples, message.chunk + (message.direction is Direction.BACKWARD))

    def _training_passes(self, micro_batches: int) -> tuple[Pass, ...]:
        """This rank's passes, made once for each number of micro batches.

        A ramp-up of the batch has several.
        """
        if micro_batches not in self._passes:
            style = self._config.parallel.pipeline_schedule
            schedule = build_schedule(
                style, self._pipeline.stages, micro_batches, self._pipeline.chunks
            )
            self._passes[micro_batches] = schedule[self.mesh.pipeline_parallel.rank]
        return self._passes[micro_batches]

    def _executor(self) -> Executor:
        dtype = next(self.chunks[0].parameters()).dtype
        return Executor(self.mesh, self._pipeline, dtype, self.device)


class _Work:
    """Computes a chunk's passes."""

    def __init__(self, stage: Stage, batches: Iterator[Tensor]) -> None:
        self._stage = stage
        self._time = stage.mesh.time
        # Micro batches come to each chunk in order; where several of a rank's chunks read them,
        # each does so in turn.
        readers = [
            number
            for number, model in enumerate(stage.chunks)
            if model.has_embedding or model.has_head or stage.rules.for_every_stage
        ]
        shares = tee(batches, len(readers)) if len(readers) > 1 else (batches,)
        self._batches = dict(zip(readers, shares, strict=False))

    def _run(self, chunk: int, hidden: Tensor | None, dropout_seed: int | None) -> Tensor | Losses:
        """What a chunk makes of its next micro batch.

        Hidden states, or from a chunk with the head the losses.
        """
        batch = next(self._batches[chunk]) if chunk in self._batches else None
        with self._time("forward-compute"):
            given = None if batch is None else self._stage.rules.read(batch)
            return self._stage.chunks[chunk].run(given, hidden, dropout_seed=dropout_seed)


class _Training(_Work):
    def __init__(
        self,
        stage: Stage,
        batches: Iterator[Tensor],
        seeds: Sequence[int],
        syncs: Sequence[GradSync],
        scale: float,
    ) -> None:
        super().__init__(stage, batches)
        self._seeds, self._syncs, self._scale = seeds, syncs, scale
        self._left = [len(seeds)] * len(stage.chunks)
        self.losses: list[Tensor] = []

    def forward(self, micro_batch: int, chunk: int, hidden: Tensor | None) -> Tensor:
        """The hidden states that leave the chunk, or the scaled sum of the mean losses."""
        output = self._run(chunk, hidden, self._seeds[micro_batch])
        if isinstance(output, Tensor):
            return output
        means = torch.stack([output[name].mean() for name in self._stage.loss_names])
        self.losses.append(means.detach())
        return means.sum() * self._scale

    def backward(
        self, micro_batch: int, chunk: int, output: GradientEdge, grad: Tensor | None
    ) -> None:
        """Gradients of the chunk's parameters, added to the main gradients, and of its input."""
        self._left[chunk] -= 1
        with (
            self._time("backward-compute"),
            self._syncs[chunk].micro_step(last=self._left[chunk] == 0),
        ):
            torch.autograd.backward(output, grad)


class _Scoring(_Work):
    def __init__(self, stage: Stage, batches: Iterator[Tensor]) -> None:
        super().__init__(stage, batches)
        self.total = torch.zeros(len(stage.loss_names), 2, dtype=torch.float64, device=stage.device)

    def forward(self, micro_batch: int, chunk: int, hidden: Tensor | None) -> Tensor:
        """The hidden states that leave the chunk, or what all losses add up to by now."""
        output = self._run(chunk, hidden, None)
        if isinstance(output, Tensor):
            return output
        self.total += torch.stack([output[name].total() for name in self._stage.loss_names])
        return self.total

    def backward(
        self, micro_batch: int, chunk: int, output: GradientEdge, grad: Tensor | None
    ) -> None:
        """Never called: the schedule has forward passes alone."""
        raise AssertionError("a forward-only schedule has a backward pass")
