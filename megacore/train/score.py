"""Perplexity of finished checkpoints on the validation and the test split."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megacore.checkpoint.format import verify
from megacore.checkpoint.load import load_checkpoint, names_of_all
from megacore.checkpoint.shard import TensorShard
from megacore.data.gpt_dataset import GPTDataset
from megacore.data.index_maps import MAP_NAMES, build_split, map_path, plan_epochs
from megacore.data.indexed_dataset import IndexedDataset
from megacore.data.splits import split_ranges
from megacore.data.unigram import UnigramModel
from megacore.engine.native import DTYPES
from megacore.engine.precision import resolve_precision
from megacore.errors import DataFormatError
from megacore.launch.job import EvaluateJob
from megacore.models.stage import Stage
from megacore.observe.logging import logger
from megacore.parallel.mesh import ProcessMesh
from megacore.train.evaluate import Evaluation, batches_of_rank, evaluate


class Scorer:
    """Loads checkpoints of one run into one model and scores them; every rank takes its share of the samples."""

    def __init__(self, job: EvaluateJob, mesh: ProcessMesh, device: torch.device) -> None:
        """Open the splits. Raises DataFormatError when one has no sample to score."""
        self._job = job
        self._config = job.config
        self._mesh = mesh
        self._device = device
        # A GPU computes as in training; on a CPU fp32 costs little and differs from no other machine.
        precision = resolve_precision(job.config.train.precision, device.type) if device.type == "cuda" else "fp32"
        self._stage = Stage(job.config, job.vocab_size, mesh, device=device)
        parameters = self._stage.named_parameters
        self._weights = {name: parameter.data for name, parameter in parameters.items()}
        """fp32, as a checkpoint holds them."""
        self._names = names_of_all(f"model.{name}" for name in self._weights)
        for parameter in parameters.values():
            parameter.data = parameter.data.to(DTYPES[precision])
        self._splits = {name: _one_epoch(job, name) for name in ("test", "valid")}

    def score(self, checkpoint: Path) -> dict[str, Any]:
        """Losses and perplexities of one checkpoint; collective.

        Raises:
            CheckpointError: it is damaged or of another model.
        """
        iteration = verify(checkpoint).iteration
        weights = {f"model.{name}": self._part(name, weight) for name, weight in self._weights.items()}
        load_checkpoint(checkpoint, weights, prefix="model.", expected=self._names)
        for name, parameter in self._stage.named_parameters.items():
            parameter.data.copy_(self._weights[name])  # in fp32 they are the same
        result: dict[str, Any] = {"iteration": iteration}
        for name, dataset in self._splits.items():
            evaluation = self._evaluate(dataset)
            result |= {
                f"{name}_loss": evaluation.loss,
                f"{name}_ppl": evaluation.ppl,
                f"{name}_samples": evaluation.samples,
            }
        logger.info(
            "iteration %d | test loss: %.6E | test PPL: %.4f | validation loss: %.6E | validation PPL: %.4f",
            iteration,
            result["test_loss"],
            result["test_ppl"],
            result["valid_loss"],
            result["valid_ppl"],
        )
        return result

    def unigram(self) -> dict[str, float]:
        """Perplexity of the train split's token frequencies on the very tokens that `score` predicts, by split."""
        job = self._job
        model = UnigramModel(job.tokens_prefix, job.config.data.split_weights, job.vocab_size)
        return {
            name: model.perplexity(np.concatenate([dataset.gather(ids)[:, 1:] for ids in self._batches(dataset)]))
            for name, dataset in self._splits.items()
        }

    def _batches(self, dataset: GPTDataset) -> list[list[int]]:
        return batches_of_rank(self._samples(dataset), self._config.evaluate.micro_batch_size, 0, 1)

    def _samples(self, dataset: GPTDataset) -> int:
        limit = self._config.evaluate.max_samples
        return len(dataset) if limit is None else min(limit, len(dataset))

    def _part(self, name: str, weight: Tensor) -> Tensor | TensorShard:
        """A weight as the checkpoint sees it."""
        partition = self._stage.partitions.get(name)
        return (
            weight if partition is None else TensorShard.of_runs([(0, weight)], weight.shape, weight.dtype, partition)
        )

    def _evaluate(self, dataset: GPTDataset) -> Evaluation:
        return evaluate(
            self._stage.loss_sum,
            dataset,
            samples=self._samples(dataset),
            micro_batch_size=self._config.evaluate.micro_batch_size,
            mesh=self._mesh,
            device=self._device,
        )


def _one_epoch(job: EvaluateJob, name: str) -> GPTDataset:
    """The samples of one pass over a split: the run's maps if they make one, else maps built for the purpose.

    Raises DataFormatError for a split that is too small for one sample.
    """
    config = job.config
    tokens = IndexedDataset(job.tokens_prefix)
    first, last = split_ranges(config.data.split_weights, len(tokens))[name]
    seq_length = config.data.seq_length
    plan = plan_epochs(max(1, tokens.count_tokens(first, last)), seq_length, None)
    if plan.samples == 0:
        raise DataFormatError(
            f"the {name} split of {job.tokens_prefix} has {tokens.count_tokens(first, last)} tokens and one sample "
            f"takes {seq_length} + 1: give it more of data.split (now {config.data.split_weights})"
        )
    dataset = GPTDataset(job.tokens_prefix, job.index_directory, name, seq_length)
    if len(dataset) == plan.samples:
        return dataset
    maps = build_split(np.require(tokens.lengths, np.int32, ["C", "A"]), first, last, plan, seq_length, config.seed)
    with tempfile.TemporaryDirectory(dir=Path(job.output).parent) as directory:
        arrays = (maps.document_index, maps.sample_index, maps.shuffle_index)
        for map_name, values in zip(MAP_NAMES, arrays, strict=True):
            np.save(map_path(directory, name, map_name), values)
        # Opened files outlive their names.
        return GPTDataset(job.tokens_prefix, directory, name, seq_length)
