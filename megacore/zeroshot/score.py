"""Scores of a causal model; every data-parallel rank takes its share of the batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megacore.models.gpt import GPTModel
from megacore.observe.logging import logger, perplexity
from megacore.parallel.mesh import ProcessMesh
from megacore.train.evaluate import batches_of_rank
from megacore.zeroshot.texts import Passage, WikiText, check_windows, windows


@dataclass(frozen=True)
class WikiTextScore:
    """How well a model predicts a text."""

    word_ppl: float
    """exp(negative log-likelihood of the text / its words): the same measure for every
    vocabulary."""
    token_ppl: float
    """exp(negative log-likelihood of the text / its tokens)."""
    loss: float
    """Nats per token."""
    words: int
    tokens: int
    windows: int
    seq_length: int
    """Tokens of a window."""
    overlapping_eval: int
    """Tokens between the starts of windows."""


@dataclass(frozen=True)
class LambadaScore:
    """How often a model completes a passage."""

    accuracy: float
    """Share of the passages of whose last word every token is the most probable one."""
    target_ppl: float
    """exp(mean negative log-likelihood of a last word)."""
    passages: int
    correct: int
    shortened: int
    """Passages that lost their beginning because they are longer than the model's positions."""


@dataclass(frozen=True)
class _Read:
    """Tokens that a model reads, and how many predictions after them count, the last ones."""

    tokens: np.ndarray
    """[s + 1]: what is read, one place later what is predicted."""
    scored: int


class ZeroshotScorer:
    """Scores texts with one model."""

    def __init__(
        self,
        model: GPTModel,
        mesh: ProcessMesh,
        device: torch.device,
        *,
        vocab_size: int,
        batch_size: int,
    ) -> None:
        """`vocab_size` is the model's before padding.

        The padding's rows have no part in a probability.
        """
        self._model = model
        self._mesh = mesh
        self._device = device
        self._vocab_size = vocab_size
        self._batch_size = batch_size

    def wikitext(
        self, text: WikiText, seq_length: int, overlapping_eval: int | None = None
    ) -> WikiTextScore:
        """Perplexity of a text; collective.

        As in NVIDIA/Megatron-LM's zero-shot evaluation the first token and the first word are
        given.

        Args:
            text: what is scored.
            seq_length: tokens of a window.
            overlapping_eval: tokens between the starts of windows; None means `seq_length`.

        Raises:
            ConfigError: windows are longer than the model's positions, or `overlapping_eval` than a
                window.
        """
        check_windows(seq_length, overlapping_eval, self._model.max_position_embeddings)
        ids = text.tokens.astype(np.int64)
        plan = windows(len(ids), seq_length, overlapping_eval)
        logger.info(
            "WikiText | tokens: %d | windows of %d tokens: %d", len(ids), seq_length, len(plan)
        )
        reads = [_Read(ids[window.start : window.stop + 1], window.scored) for window in plan]
        loss_sum = float(self._scores(reads)[:, 0].sum())
        tokens, words = len(ids) - 1, max(text.words - 1, 1)
        score = WikiTextScore(
            word_ppl=perplexity(loss_sum / words),
            token_ppl=perplexity(loss_sum / tokens),
            loss=loss_sum / tokens,
            words=words,
            tokens=tokens,
            windows=len(plan),
            seq_length=seq_length,
            overlapping_eval=overlapping_eval or seq_length,
        )
        logger.info(
            "WikiText | PPL per word: %.4f | PPL per token: %.4f | tokens: %d",
            score.word_ppl,
            score.token_ppl,
            score.tokens,
        )
        return score

    def lambada(self, passages: Sequence[Passage], seq_length: int) -> LambadaScore:
        """Accuracy on the last words; collective.

        Raises ConfigError when windows are longer than the positions.
        """
        check_windows(seq_length, None, self._model.max_position_embeddings)
        whole = [
            np.concatenate([passage.context, passage.target]).astype(np.int64)
            for passage in passages
        ]
        reads = [
            _Read(ids[-seq_length - 1 :], min(len(passage.target), seq_length))
            for ids, passage in zip(whole, passages, strict=True)
        ]
        logger.info("LAMBADA | passages: %d", len(reads))
        scores = self._scores(reads)
        correct = int((scores[:, 1] == 0).sum())
        score = LambadaScore(
            accuracy=correct / len(reads),
            target_ppl=perplexity(float(scores[:, 0].mean())),
            passages=len(reads),
            correct=correct,
            shortened=sum(len(ids) > seq_length + 1 for ids in whole),
        )
        logger.info(
            "LAMBADA | accuracy: %.4f | PPL of last words: %.4f", score.accuracy, score.target_ppl
        )
        return score

    @torch.inference_mode()
    def _scores(self, reads: Sequence[_Read]) -> Tensor:
        """Of each read the summed loss and the number of wrong predictions, fp64 [reads, 2].

        Wrong are those that are not the most probable.

        Reads of a length go together, so that there is little padding.
        """
        found = torch.zeros(len(reads), 2, dtype=torch.float64, device=self._device)
        order = sorted(range(len(reads)), key=lambda number: -len(reads[number].tokens))
        replicas = self._mesh.data_parallel
        for batch in batches_of_rank(len(reads), self._batch_size, replicas.rank, replicas.size):
            numbers = [order[place] for place in batch]
            for number, score in zip(
                numbers, self._batch([reads[number] for number in numbers]), strict=True
            ):
                found[number] = score
        if replicas.size > 1:
            dist.all_reduce(found, group=replicas.group)
        return found.cpu()

    def _batch(self, reads: Sequence[_Read]) -> Iterator[Tensor]:
        """The two numbers of each read.

        Shorter ones are padded on the right, where nothing looks.
        """
        tokens = torch.zeros(len(reads), max(len(read.tokens) for read in reads), dtype=torch.int64)
        for row, read in zip(tokens, reads, strict=True):
            row[: len(read.tokens)] = torch.from_numpy(read.tokens)
        tokens = tokens.to(self._device)
        logits = self._model(tokens[:, :-1])
        for row, read, predicted in zip(tokens, reads, logits, strict=True):
            stop = len(read.tokens)
            labels = row[stop - read.scored : stop]
            own = predicted[stop - 1 - read.scored : stop - 1, : self._vocab_size].float()
            losses = F.cross_entropy(own, labels, reduction="none").double()
            yield torch.stack([losses.sum(), (own.argmax(-1) != labels).sum().double()])
