"""Perplexity of complete checkpoints on the validation and the test split.

Includes the baseline that training must beat: the perplexity of a unigram model, which knows only
the frequency of each token.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megacore.artifact.workspace import WEIGHTS_PREFIX
from megacore.checkpoint.collective import RankGroup, verify_together
from megacore.checkpoint.format import read_state, reading
from megacore.checkpoint.load import load_checkpoint, names_of_all
from megacore.checkpoint.shard import part_of_rank
from megacore.data.one_epoch import one_epoch, train_tokens
from megacore.data.samples import Dataset
from megacore.errors import DataFormatError
from megacore.hardware import resolve_precision
from megacore.jobs.run import EvaluateJob
from megacore.kernels.choice import choose_kernels
from megacore.kernels.implementation import DTYPES, Setting
from megacore.models.base import LM_LOSS
from megacore.models.stage import Stage
from megacore.observe.logging import (
    PPL_TOLERANCE,
    logger,
    perplexity,
    short_number,
    source_line,
)
from megacore.parallel.mesh import ProcessMesh
from megacore.train.checkpoints import PRECISION_KEY, VALIDATION_KEY
from megacore.train.evaluate import batches_of_rank, evaluate, evaluated_samples
from megacore.train.source_losses import named_losses

_BLOCK_TOKENS = 1 << 24


class CheckpointScorer:
    """Scorer of a run's checkpoints, which it loads into one model, one after another.

    Every rank scores its share of the samples.
    """

    def __init__(self, job: EvaluateJob, mesh: ProcessMesh, device: torch.device) -> None:
        """Build the model and open the splits.

        Raises DataFormatError if a split has no sample to score.
        """
        self._job = job
        self._config = job.config
        self._mesh = mesh
        # As in training, so that both measure the same perplexity.
        precision = resolve_precision(job.precision or job.config.train.precision, device.type)
        self._precision = precision
        self._stage = Stage(
            job.config,
            job.vocab_size,
            mesh,
            special_tokens=job.special_tokens,
            device=device,
            kernels=choose_kernels(
                Setting(
                    device,
                    DTYPES[precision],
                    softcapped=job.config.model.attn_logit_softcapping is not None,
                ),
                config=job.config.train.kernels.for_evaluation,
            ),
        )
        parameters = self._stage.named_parameters
        self._weights = {name: parameter.data for name, parameter in parameters.items()}
        """Weights in fp32, the precision of checkpoints."""
        self._names = names_of_all(f"{WEIGHTS_PREFIX}{name}" for name in self._weights)
        for parameter in parameters.values():
            parameter.data = parameter.data.to(DTYPES[precision])
        self._splits = {
            name: one_epoch(
                job.token_prefixes,
                job.index_directory,
                name,
                job.config,
                Path(job.exit_directory),
                tokenizer_directory=job.tokenizer_directory,
            )
            for name in ("test", "valid")
        }

    def score(self, checkpoint: Path) -> dict[str, Any]:
        """Return the losses and perplexities of one checkpoint. Collective.

        `disagreement` is None, or says that training measured another `valid_ppl`.

        Raises:
            CheckpointError: the checkpoint is damaged or of another model.
        """
        partitions = self._stage.partitions
        weights = {
            f"{WEIGHTS_PREFIX}{name}": part_of_rank(weight, partitions.get(name))
            for name, weight in self._weights.items()
        }
        with reading(checkpoint):
            self._mesh.beat("verify")
            iteration = verify_together(
                checkpoint, RankGroup(None), progress=partial(self._mesh.beat, "verify")
            ).iteration
            self._mesh.beat("load")
            load_checkpoint(
                checkpoint,
                weights,
                prefix=WEIGHTS_PREFIX,
                expected=self._names,
                progress=partial(self._mesh.beat, "load"),
            )
        for name, parameter in self._stage.named_parameters.items():
            parameter.data.copy_(self._weights[name])  # no copy in fp32: both are the same memory
        result: dict[str, Any] = {"iteration": iteration}
        for name, dataset in self._splits.items():
            evaluation = evaluate(
                self._stage,
                dataset,
                samples=evaluated_samples(dataset, self._config),
                micro_batch_size=self._config.evaluate.micro_batch_size,
                mesh=self._mesh,
            )
            result |= {
                f"{name}_loss": evaluation.loss,
                f"{name}_ppl": evaluation.ppl,
                f"{name}_samples": evaluation.samples,
                f"{name}_by_position": evaluation.position_rows,
                **{
                    f"{name}_{term}": loss
                    for term, loss in evaluation.losses.items()
                    if term != LM_LOSS
                },
            }
            if evaluation.by_source:
                losses = named_losses(evaluation.by_source, self._config.data)
                result[f"{name}_by_source"] = losses
                logger.info(source_line(f"iteration {iteration} | {name} loss", losses))
        result["disagreement"] = self._disagreement(
            checkpoint, result["valid_ppl"], result["valid_samples"]
        )
        if result["disagreement"] and self._mesh.rank == 0:
            logger.warning(result["disagreement"])
        logger.info(
            "iteration %d | test_loss: %.6E | test_ppl: %s | valid_loss: %.6E | valid_ppl: %s",
            iteration,
            result["test_loss"],
            short_number(result["test_ppl"], ".4f"),
            result["valid_loss"],
            short_number(result["valid_ppl"], ".4f"),
        )
        return result

    def unigram(self) -> dict[str, float]:
        """Return the unigram perplexity of each split.

        The frequencies are those of the train split, the target tokens those that `score` counts.
        """
        job = self._job
        tokens = train_tokens(
            job.token_prefixes,
            job.index_directory,
            job.config,
            tokenizer_directory=job.tokenizer_directory,
        )
        model = UnigramModel(in_blocks(tokens, partial(self._mesh.beat, "unigram")), job.vocab_size)
        return {
            name: model.perplexity(self._targets(dataset)) for name, dataset in self._splits.items()
        }

    def _targets(self, dataset: Dataset) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the labels that `score` counts, in parts."""
        for indices in batches_of_rank(
            evaluated_samples(dataset, self._config),
            self._config.evaluate.micro_batch_size,
            0,
            1,
        ):
            fields = self._stage.rules.read(torch.from_numpy(dataset.gather(indices)))
            yield (
                fields.labels if fields.loss_mask is None else fields.labels[fields.loss_mask]
            ).numpy()

    def _disagreement(self, checkpoint: Path, valid_ppl: float, samples: int) -> str | None:
        """Describe how `valid_ppl` differs from what training measured for this checkpoint.

        None if they agree, or if training measured other samples or none.
        """
        state = read_state(checkpoint)
        trained = state.get(VALIDATION_KEY) or {}
        if trained.get("samples") != samples or trained.get("loss") is None:
            return None
        expected = perplexity(trained["loss"])
        difference = abs(valid_ppl - expected) / expected
        if difference <= PPL_TOLERANCE:
            return None
        measured, before = (short_number(value, ".4f") for value in (valid_ppl, expected))
        return (
            f"valid_ppl of {checkpoint.name} is {measured} in {self._precision}, but training "
            f"measured {before} in {state.get(PRECISION_KEY, 'an unknown precision')} on the "
            f"same {samples} samples, a relative difference of {difference:.1e} where "
            f"{PPL_TOLERANCE:.0e} is expected: the checkpoint, the layout or the kernels change "
            "the model; evaluate again with train.kernels plain and with another "
            "launch.nproc_per_node to find which"
        )


def in_blocks(
    parts: Iterable[tuple[str, npt.NDArray[Any]]], beat: Callable[[], None]
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield the tokens of all parts in blocks, each with its prefix, and call `beat` before each.

    A rank without a heartbeat counts as stalled, and all tokens of a large corpus take long.
    """
    for prefix, part in parts:
        for start in range(0, len(part), _BLOCK_TOKENS):
            beat()
            yield prefix, part[start : start + _BLOCK_TOKENS]


class UnigramModel:
    """Unigram model with add-one-smoothed token frequencies."""

    def __init__(self, tokens: Iterable[tuple[str, npt.NDArray[Any]]], vocab_size: int) -> None:
        """Count the tokens, which are given in parts, each with the prefix of its token files.

        Raises DataFormatError for an id that is not below `vocab_size`.
        """
        self._vocab_size = vocab_size
        counts = np.zeros(vocab_size, np.int64)
        for prefix, part in tokens:
            counts += self._count(part, f"{prefix}.bin")
        self._log_probability = np.log(counts + 1.0) - np.log(counts.sum() + vocab_size)

    def perplexity(self, targets: Iterable[npt.NDArray[Any]]) -> float:
        """Return the perplexity of token ids, given in parts of any shape; infinite without any."""
        counts = sum(
            (self._count(part.reshape(-1), "the split") for part in targets),
            np.zeros(self._vocab_size, int),
        )
        return (
            float(np.exp(-(counts * self._log_probability).sum() / counts.sum()))
            if counts.any()
            else float("inf")
        )

    def _count(self, tokens: npt.NDArray[Any], origin: str) -> npt.NDArray[np.int64]:
        """Count the occurrences of each id; shape [v]."""
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= self._vocab_size):
            wrong = tokens.min() if tokens.min() < 0 else tokens.max()
            raise DataFormatError(
                f"{origin} holds the token id {wrong}, but the vocabulary has {self._vocab_size} "
                "entries: use the tokenizer that these tokens were made with"
            )
        return np.bincount(tokens, minlength=self._vocab_size)
