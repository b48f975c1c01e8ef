"""BERT (Devlin et al. 2018, arXiv:1810.04805) with Megatron-LM's parameter names.

Its norms are after or before each branch.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.config.model import ModelConfig
from megacore.kernels.choice import Kernels
from megacore.models.base import LM_LOSS, SENTENCE_LOSSES, Losses, LossTerm, Model
from megacore.models.inputs import ModelInput
from megacore.models.layers.attention_bias import attention_bias
from megacore.models.layers.norm import make_norm, parameters_of
from megacore.models.layers.shared import Shared
from megacore.parallel.mesh import ParallelGroup
from megacore.tensor_parallel import ColumnParallelLinear, Partition, column_parallel
from megacore.tensor_parallel.mappings import gather_from_tensor_parallel_region
from megacore.tensor_parallel.partition import divide

SEGMENTS = 2
"""Rows of the table of token types."""
ANSWERS = 2
"""Of the binary head: the segments are in their order, or are not."""
SentenceTask = Literal["sop", "nsp"]


class BertModel(Model):
    """An encoder that predicts masked tokens and if two segments belong together; or a chunk.

    The table of tokens is the decoder of the masked LM's head too.
    """

    tokentypes = SEGMENTS

    def __init__(
        self, model: ModelConfig, *, sentence_task: SentenceTask = "sop", **options: Any
    ) -> None:
        """Allocate the parameters.

        Args:
            model: the architecture.
            sentence_task: what the binary head predicts, which names its loss.
            options: those of `Model`.

        Raises:
            ParallelLayoutError: heads, widths or vocabulary cannot be divided over the ranks.
        """
        super().__init__(model, **options)
        self.sentence_loss = SENTENCE_LOSSES[sentence_task] if model.bert_binary_head else None
        self.loss_names = (
            (LM_LOSS,) if self.sentence_loss is None else (LM_LOSS, self.sentence_loss)
        )

    def _build(self, device: torch.device | str) -> None:
        model, tp = self.model, self.tp
        self.encoder = self._stack(
            self.chunk.layers,
            device,
            final_layernorm=self.has_head,
            recomputed=self.recompute_num_layers,
            causal=False,
        )
        if self.has_head:
            self.lm_head = MaskedLmHead(
                model, self.padded_vocab_size, self.kernels, tp, self.sequence_parallel, device
            )
            if model.bert_binary_head:
                self.pooler = Pooler(model.hidden_size, tp, self.sequence_parallel, device)
                self.binary_head = ColumnParallelLinear(model.hidden_size, ANSWERS, device=device)

    def forward(self, given: ModelInput) -> tuple[Tensor, Tensor | None]:
        """The whole model's logits, gathered over the ranks.

        [b, s, v] of each token; [b, 2] of the binary head.
        """
        logits, answers = self._heads(self._hidden(given, None, None))
        return gather_from_tensor_parallel_region(logits, self.tp), answers

    def run(
        self,
        given: ModelInput | None,
        hidden: Tensor | None = None,
        *,
        dropout_seed: int | None = None,
    ) -> Tensor | Losses:
        """What this chunk makes of one micro batch.

        Args:
            given: the micro batch; every chunk needs to know where padding is.
            hidden: what the chunk before returned; None for a chunk with the embedding.
            dropout_seed: of the micro batch (`megacore.parallel.rng.micro_batch_seed`), for
                training with dropout.

        Returns:
            Activations [b, s, h], with sequence parallelism [b, s/t, h]; from a chunk with the head
            the losses of the labels [b, s] and of the samples [b], for which the logits are not
            gathered.
        """
        assert given is not None
        hidden = self._hidden(given, hidden, dropout_seed)
        return self._losses(hidden, given) if self.has_head else hidden

    def _hidden(self, given: ModelInput, hidden: Tensor | None, dropout_seed: int | None) -> Tensor:
        if self.has_embedding:
            hidden = self.embedding(
                given.tokens,
                dropout_seed,
                position_ids=given.position_ids,
                tokentypes=given.tokentypes,
            )
        assert hidden is not None
        length = given.tokens.shape[1]
        bias = attention_bias(
            queries=length,
            keys=length,
            causal=False,
            dtype=hidden.dtype,
            device=hidden.device,
            documents=given.documents,
            present=given.present,
        )
        return self.encoder(hidden, dropout_seed, shared=Shared(bias=bias))  # type: ignore[no-any-return]

    def _heads(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """[b, s, h] -> logits [b, s, v/t] and [b, 2]."""
        answers, hidden = self._answers(hidden), self.lm_head(hidden)
        # Asked for after the head has run, which under ZeRO-3 gives its own parameters back.
        output = (self._output_weight(), self.lm_head.bias)
        return column_parallel(hidden, [output], self.tp, self.sequence_parallel)[0], answers

    def _answers(self, hidden: Tensor) -> Tensor | None:
        """The binary head's logits [b, 2]."""
        return None if self.sentence_loss is None else self.binary_head(self.pooler(hidden))

    def _losses(self, hidden: Tensor, given: ModelInput) -> Losses:
        answers, hidden = self._answers(hidden), self.lm_head(hidden)
        found = {LM_LOSS: self._label_losses(hidden, given, self.lm_head.bias)}
        if self.sentence_loss is not None:
            assert answers is not None
            assert given.sentence_labels is not None
            found[self.sentence_loss] = LossTerm(
                F.cross_entropy(
                    answers.to(found[LM_LOSS].losses.dtype), given.sentence_labels, reduction="none"
                )
            )
        return found


class MaskedLmHead(nn.Module):
    """What stands between encoder or decoder and vocabulary: norm(activation(dense(x))).

    It is whole on every rank, and with sequence parallelism works on the rank's part of the
    sequence. `bias` is the decoder's and divided with its rows.
    """

    def __init__(
        self,
        model: ModelConfig,
        padded_vocab_size: int,
        kernels: Kernels,
        tp: ParallelGroup,
        sequence_parallel: bool,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        self.activation = model.activation
        self.kernels = kernels
        self.dense = ColumnParallelLinear(model.hidden_size, model.hidden_size, device=device)
        self.layernorm = make_norm(model, model.hidden_size, kernels, device)
        self.bias = nn.Parameter(
            torch.empty(divide(padded_vocab_size, tp, "the padded vocabulary of"), device=device)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h], with sequence parallelism [b, s/t, h] on both sides."""
        (inner,) = column_parallel(x, [(self.dense.weight, None)])
        return self.layernorm(self.kernels.bias_activation(inner, self.dense.bias, self.activation))  # type: ignore[no-any-return]

    def partitions(self) -> dict[str, Partition]:
        """The decoder's bias is divided as its weight is."""
        return {"bias": Partition(0, self.tp.rank, self.tp.size)}

    def partial_gradients(self) -> frozenset[str]:
        """With sequence parallelism each rank's head sees its own positions."""
        return parameters_of(self, "dense", "layernorm") if self.sequence_parallel else frozenset()


class Pooler(nn.Module):
    """tanh(dense(x)) of the first token, [CLS]; the same on every rank."""

    def __init__(
        self,
        hidden_size: int,
        tp: ParallelGroup,
        sequence_parallel: bool,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        self.dense = ColumnParallelLinear(hidden_size, hidden_size, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h], with sequence parallelism [b, s/t, h] -> [b, h]."""
        first = x[:, 0]
        if self.sequence_parallel:
            # The first rank has the first token: each gets all ranks' first, and the gradient goes
            # there alone.
            first = gather_from_tensor_parallel_region(first, self.tp)[:, : x.shape[2]]
        return torch.tanh(self.dense(first))
