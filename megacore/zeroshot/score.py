"""Zero-shot scores of a causal model; each data-parallel rank scores its share of the batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megacore.config.rope import same_up_to
from megacore.config.train import PasskeyConfig
from megacore.models.gpt import GPTModel
from megacore.observe.logging import logger, perplexity, short_number
from megacore.parallel.mesh import ProcessMesh
from megacore.tokenizer import Tokenizer
from megacore.train.evaluate import batches_of_rank
from megacore.zeroshot.texts import (
    Passage,
    Passkey,
    WikiText,
    check_passkeys,
    check_windows,
    make_passkeys,
    windows,
)


@dataclass(frozen=True)
class WikiTextScore:
    """Perplexity of a model on WikiText."""

    word_ppl: float
    """exp(negative log-likelihood / number of words), comparable between vocabularies."""
    token_ppl: float
    """exp(negative log-likelihood / number of tokens)."""
    loss: float
    """Mean loss in nats per token."""
    words: int
    tokens: int
    windows: int
    seq_length: int
    """Tokens per window."""
    overlapping_eval: int
    """Stride of the windows in tokens."""


@dataclass(frozen=True)
class LambadaScore:
    """Accuracy of a model on the last words of LAMBADA's passages."""

    accuracy: float
    """Fraction of passages where every token of the last word is the most probable one."""
    target_ppl: float
    """exp(mean negative log-likelihood of the last words)."""
    passages: int
    correct: int
    shortened: int
    """Number of passages cut at the beginning because they exceed the window."""
    left_out: int
    """Number of passages that do not count, because the tokenizer has no token for their last
    words, or only the one for unknown text."""


@dataclass(frozen=True)
class PasskeyCell:
    """Results of the passkey test at one length and depth."""

    length: int
    """Longest prompt in tokens, with its number."""
    depth: float
    """Place of the number as a fraction of the filler text."""
    prompts: int
    accuracy: float
    """Fraction of prompts where every token of the number is the most probable one."""
    ranked_accuracy: float
    """Fraction of prompts where the number is more likely than all other candidates."""


@dataclass(frozen=True)
class PasskeyScore:
    """Accuracy of a model that must repeat a number hidden in filler text."""

    accuracy: float
    """Mean of the cells' `accuracy`: what greedy decoding would write."""
    ranked_accuracy: float
    """Mean of the cells' `ranked_accuracy`."""
    chance: float
    """`ranked_accuracy` of a model that guesses."""
    prompts: int
    cells: tuple[PasskeyCell, ...]
    """Results by length and depth."""


@dataclass(frozen=True)
class _Read:
    """Token sequence to score, and the number of its last predictions that count."""

    tokens: np.ndarray
    """[s + 1] ids: the inputs are the first s, the labels the last s."""
    scored: int
    """Number of predictions at the end that count."""


class ZeroshotScorer:
    """Zero-shot scorer of one model."""

    def __init__(
        self,
        model: GPTModel,
        mesh: ProcessMesh,
        device: torch.device,
        *,
        vocab_size: int,
        batch_size: int,
    ) -> None:
        """Initialize the scorer.

        Args:
            model: causal model in evaluation mode.
            mesh: process groups of the ranks.
            device: device of the model.
            vocab_size: the model's vocabulary size before padding; padding rows get no probability.
            batch_size: sequences per forward pass.
        """
        self._model = model
        self._mesh = mesh
        self._device = device
        self._vocab_size = vocab_size
        self._batch_size = batch_size

    def wikitext(
        self, text: WikiText, seq_length: int, overlapping_eval: int | None = None
    ) -> WikiTextScore:
        """Compute the perplexity of a text; collective over all ranks.

        As in NVIDIA/Megatron-LM's zero-shot evaluation, the first token and the first word are not
        scored.

        Args:
            text: text to score.
            seq_length: tokens per window.
            overlapping_eval: stride of the windows in tokens; None means `seq_length`.

        Raises:
            ConfigError: if windows are longer than the model's positions, or `overlapping_eval` is
                longer than a window.
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
            "WikiText | PPL per word: %s | PPL per token: %s | tokens: %d",
            short_number(score.word_ppl, ".4f"),
            short_number(score.token_ppl, ".4f"),
            score.tokens,
        )
        return score

    def lambada(self, passages: Sequence[Passage], seq_length: int) -> LambadaScore:
        """Compute the accuracy on the passages' last words; collective over all ranks.

        Passages without a target are left out.

        Args:
            passages: passages, at least one of them with a target.
            seq_length: tokens per window.

        Raises:
            ConfigError: if `seq_length` exceeds the model's positions.
        """
        check_windows(seq_length, None, self._model.max_position_embeddings)
        total = len(passages)
        passages = [passage for passage in passages if len(passage.target)]
        if len(passages) < total:
            logger.warning(
                "LAMBADA | %d of %d passages are left out, because the tokenizer has no token for "
                "their last words",
                total - len(passages),
                total,
            )
        sequences = [
            np.concatenate([passage.context, passage.target]).astype(np.int64)
            for passage in passages
        ]
        reads = [
            _Read(ids[-seq_length - 1 :], min(len(passage.target), seq_length))
            for ids, passage in zip(sequences, passages, strict=True)
        ]
        logger.info("LAMBADA | passages: %d", len(reads))
        scores = self._scores(reads)
        correct = int((scores[:, 1] == 0).sum())
        score = LambadaScore(
            accuracy=correct / len(reads),
            target_ppl=perplexity(float(scores[:, 0].mean())),
            passages=len(reads),
            correct=correct,
            shortened=sum(len(ids) > seq_length + 1 for ids in sequences),
            left_out=total - len(passages),
        )
        logger.info(
            "LAMBADA | accuracy: %.4f | PPL of last words: %s",
            score.accuracy,
            short_number(score.target_ppl, ".4f"),
        )
        return score

    def passkey(self, tokenizer: Tokenizer, config: PasskeyConfig) -> PasskeyScore:
        """Compute the accuracy of retrieval by length and depth; collective over all ranks.

        Raises:
            ConfigError: see `check_passkeys`.
        """
        check_passkeys(tokenizer, config, self._model.max_position_embeddings)
        cells = []
        for length in config.lengths:
            for depth in config.depths:
                cell = self._passkey_cell(
                    make_passkeys(tokenizer, config, length, depth), length, depth
                )
                logger.info(
                    "passkey | length: %d | depth: %g | accuracy: %.4f | among %d candidates: %.4f",
                    length,
                    depth,
                    cell.accuracy,
                    config.candidates,
                    cell.ranked_accuracy,
                )
                cells.append(cell)
        return PasskeyScore(
            accuracy=fmean(cell.accuracy for cell in cells),
            ranked_accuracy=fmean(cell.ranked_accuracy for cell in cells),
            chance=1 / config.candidates,
            prompts=sum(cell.prompts for cell in cells),
            cells=tuple(cells),
        )

    def _passkey_cell(self, passkeys: Sequence[Passkey], length: int, depth: float) -> PasskeyCell:
        reads = [
            _Read(np.concatenate([passkey.prompt, number]).astype(np.int64), len(number))
            for passkey in passkeys
            for number in passkey.numbers
        ]
        scores = self._scores(reads).view(len(passkeys), -1, 2)
        losses, wrong = scores.unbind(-1)
        likeliest = losses[:, 0] < losses[:, 1:].min(1).values
        return PasskeyCell(
            length=length,
            depth=depth,
            prompts=len(passkeys),
            accuracy=float((wrong[:, 0] == 0).double().mean()),
            ranked_accuracy=float(likeliest.double().mean()),
        )

    @torch.inference_mode()
    def _scores(self, reads: Sequence[_Read]) -> Tensor:
        """Return each read's summed loss and number of wrong predictions, fp64 [reads, 2].

        A prediction is wrong if the label is not the most probable token. Reads of similar length
        share a batch to keep padding small.
        """
        scores = torch.zeros(len(reads), 2, dtype=torch.float64, device=self._device)
        order = sorted(range(len(reads)), key=lambda number: -len(reads[number].tokens))
        replicas = self._mesh.data_parallel
        for batch in batches_of_rank(len(reads), self._batch_size, replicas.rank, replicas.size):
            numbers = [order[position] for position in batch]
            for number, score in zip(
                numbers, self._batch([reads[number] for number in numbers]), strict=True
            ):
                scores[number] = score
        if replicas.size > 1:
            dist.all_reduce(scores, group=replicas.group)
        return scores.cpu()

    def _batch(self, reads: Sequence[_Read]) -> Iterator[Tensor]:
        """Yield summed loss and number of wrong predictions of each read.

        Shorter reads are padded on the right, which causal attention never sees. Logits are
        computed only from the first prediction that counts.
        """
        tokens = torch.zeros(len(reads), max(len(read.tokens) for read in reads), dtype=torch.int64)
        for row, read in zip(tokens, reads, strict=True):
            row[: len(read.tokens)] = torch.from_numpy(read.tokens)
        tokens = tokens.to(self._device)
        first = min(len(read.tokens) - 1 - read.scored for read in reads)
        logits = self._model(
            tokens[:, :-1],
            position_ids=self._positions(reads, tokens.shape[1] - 1),
            last=tokens.shape[1] - 1 - first,
        )
        for row, read, row_logits in zip(tokens, reads, logits, strict=True):
            stop = len(read.tokens)
            labels = row[stop - read.scored : stop]
            selected = row_logits[stop - 1 - read.scored - first : stop - 1 - first]
            selected = selected[:, : self._vocab_size].float()
            losses = F.cross_entropy(selected, labels, reduction="none").double()
            yield torch.stack([losses.sum(), (selected.argmax(-1) != labels).sum().double()])

    def _positions(self, reads: Sequence[_Read], width: int) -> Tensor | None:
        """Return the positions [b, width] of a padded batch; None counts from 0.

        Where rotations depend on the largest position of a row, padding repeats the last one.
        """
        if same_up_to(self._model.model.rope_scaling) is None:
            return None
        last = torch.tensor([[len(read.tokens) - 2] for read in reads], device=self._device)
        return torch.arange(width, device=self._device)[None].minimum(last)
