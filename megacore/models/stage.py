"""The part of a model that one rank holds: its chunks, and how micro batches pass through them."""

from collections.abc import Iterator, Sequence
from itertools import tee

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from megacore.config.run import RunConfig
from megacore.data_parallel.grad_sync import GradSync
from megacore.models.build import build_model
from megacore.models.masks import MaskRules
from megacore.parallel.mesh import ProcessMesh
from megacore.pipeline_parallel.executor import Executor
from megacore.pipeline_parallel.partition import chunks_of
from megacore.pipeline_parallel.schedules import Pass, Pipeline, build_schedule, forward_only
from megacore.plan.memory import parameter_count
from megacore.tensor_parallel import Partition, partitions


class Stage:
    """One rank's chunks of a model; with one pipeline stage a single chunk, the model itself."""

    def __init__(
        self,
        config: RunConfig,
        vocab_size: int,
        mesh: ProcessMesh,
        *,
        eod_id: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Build the chunks with their initial weights, the same for every layout.

        Args:
            config: the run.
            vocab_size: entries of the tokenizer, before padding.
            mesh: this process's groups.
            eod_id: id of the token that ends a document.
            device: where the parameters are.

        Raises:
            ParallelLayoutError: heads, widths, vocabulary or layers cannot be divided over the ranks.
        """
        self.mesh = mesh
        self.parameter_count = parameter_count(config, vocab_size)
        """Parameters of the whole model."""
        self.rules = MaskRules.of(config.data, eod_id)
        self._config = config
        stages = mesh.pipeline_parallel
        virtual = config.parallel.virtual_pipeline_model_parallel_size if stages.size > 1 else 1
        parts = chunks_of(config, vocab_size)[stages.rank :: stages.size] if stages.size > 1 else [None]
        self.chunks = [build_model(config, vocab_size, mesh, device=device, chunk=part) for part in parts]
        self.device = torch.device(device)
        self._pipeline = Pipeline(stages.size, virtual)
        self._passes: dict[int, tuple[Pass, ...]] = {}

    @property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter of this rank by its global name."""
        return {name: parameter for chunk in self.chunks for name, parameter in chunk.named_parameters()}

    @property
    def partitions(self) -> dict[str, Partition]:
        """How those that are divided over tensor-parallel ranks are divided."""
        return {name: part for chunk in self.chunks for name, part in partitions(chunk).items()}

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.chunks[0].padded_vocab_size

    @property
    def reads_tokens(self) -> bool:
        """Whether this rank needs the samples: stages in between do for masks alone, else they take hidden states."""
        return self.mesh.is_first_stage or self.mesh.is_last_stage or self.rules.reset_attention_mask

    def hidden_shape(self, samples: int) -> torch.Size:
        """Shape of the hidden states between two stages: [b, s, h], or [b, s/t, h] with sequence parallelism."""
        length = self._config.data.seq_length
        if self._config.parallel.sequence_parallel:
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
            batches: ids [b, s + 1] of each micro batch, on this rank's device; empty unless `reads_tokens`.
            seeds: of the dropout of each micro batch.
            syncs: of each chunk; its last backward pass lets gradients travel.
            scale: factor on the mean loss of a micro batch.

        Returns:
            The mean loss of the labels of each micro batch that count, 0-dimensional, on the last stage; nothing on
            the others.
        """
        work = _Training(self, batches, seeds, syncs, scale)
        shape = self.hidden_shape(self._config.train.micro_batch_size)
        self._executor().run(self._training_passes(len(seeds)), work, lambda _: shape)
        return work.losses

    @torch.inference_mode()
    def loss_sum(self, batches: Iterator[Tensor], sizes: Sequence[int]) -> Tensor:
        """Sum of the losses of all labels that count, and their number, without dropout.

        Args:
            batches: ids [b, s + 1] of each micro batch, on this rank's device; empty unless `reads_tokens`.
            sizes: samples (b) of each micro batch.

        Returns:
            fp64 [2]; zeros on all stages but the last.
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
            shapes = [self.hidden_shape(size) for size in sizes]
            self._executor().run(passes[self.mesh.pipeline_parallel.rank], work, shapes.__getitem__)
        finally:
            for chunk in self.chunks:
                chunk.train()
        return work.total

    def _training_passes(self, micro_batches: int) -> tuple[Pass, ...]:
        """This rank's passes, made once for each number of micro batches: a ramp-up of the batch has several."""
        if micro_batches not in self._passes:
            style = self._config.parallel.pipeline_schedule
            schedule = build_schedule(style, self._pipeline.stages, micro_batches, self._pipeline.chunks)
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
        # Micro batches come to each chunk in order; where several of a rank's chunks read them, each does so in turn.
        readers = [
            number
            for number, model in enumerate(stage.chunks)
            if model.has_embedding or model.has_head or stage.rules.reset_attention_mask
        ]
        shares = tee(batches, len(readers)) if len(readers) > 1 else (batches,)
        self._batches = dict(zip(readers, shares, strict=False))

    def _run(self, chunk: int, hidden: Tensor | None, dropout_seed: int | None) -> tuple[Tensor, Tensor | None]:
        """What a chunk makes of its next micro batch, and from a chunk with the head which of the losses count."""
        model = self._stage.chunks[chunk]
        batch = next(self._batches[chunk]) if chunk in self._batches else None
        with self._time("forward-compute"):
            if batch is None:
                assert hidden is not None
                return model.run(hidden, dropout_seed=dropout_seed), None
            given = self._stage.rules.read(batch)
            source = given.tokens if model.has_embedding else hidden
            assert source is not None
            output = model.run(
                source,
                labels=given.labels if model.has_head else None,
                dropout_seed=dropout_seed,
                position_ids=given.position_ids,
                documents=given.documents,
            )
            return output, given.loss_mask


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
        """The hidden states that leave the chunk, or the scaled mean loss."""
        output, counts = self._run(chunk, hidden, self._seeds[micro_batch])
        if not self._stage.chunks[chunk].has_head:
            return output
        loss = output.mean() if counts is None else (output * counts).sum() / counts.sum().clamp(min=1)
        self.losses.append(loss.detach())
        return loss * self._scale

    def backward(self, micro_batch: int, chunk: int, output: GradientEdge, grad: Tensor | None) -> None:
        """Gradients of the chunk's parameters, added to the main gradients, and of its input."""
        self._left[chunk] -= 1
        with self._time("backward-compute"), self._syncs[chunk].micro_step(last=self._left[chunk] == 0):
            torch.autograd.backward(output, grad)


class _Scoring(_Work):
    def __init__(self, stage: Stage, batches: Iterator[Tensor]) -> None:
        super().__init__(stage, batches)
        self.total = torch.zeros(2, dtype=torch.float64, device=stage.device)

    def forward(self, micro_batch: int, chunk: int, hidden: Tensor | None) -> Tensor:
        """The hidden states that leave the chunk, or the losses, which are added up."""
        output, counts = self._run(chunk, hidden, None)
        if self._stage.chunks[chunk].has_head:
            losses = output.double() if counts is None else output.double() * counts
            self.total[0] += losses.sum()
            self.total[1] += output.numel() if counts is None else counts.sum()
        return output

    def backward(self, micro_batch: int, chunk: int, output: GradientEdge, grad: Tensor | None) -> None:
        """Never called: the schedule has forward passes alone."""
        raise AssertionError("a forward-only schedule has a backward pass")
