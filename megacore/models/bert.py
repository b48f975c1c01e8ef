"""BERT (Devlin et al. 2018, arXiv:1810.04805) with Megatron-LM's parameter names.

Norms come after or before each branch.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.config.model import ModelConfig
from megacore.models.base import LM_LOSS, SENTENCE_LOSSES, Losses, LossTerm, Model
from megacore.models.inputs import ModelInput
from megacore.models.layers.attention_bias import attention_mask
from megacore.models.layers.norm import make_norm, parameters_of
from megacore.models.layers.shared import LayerSetup, Shared
from megacore.models.parameters import BINARY_CLASSES, SEGMENTS
from megacore.tensor_parallel import ColumnParallelLinear, Partition, column_parallel
from megacore.tensor_parallel.mappings import gather_from_tensor_parallel_region
from megacore.tensor_parallel.partition import divide

SentenceTask = Literal["sop", "nsp"]


class BertModel(Model):
    """BERT, or a chunk of it. It predicts masked tokens and whether two segments belong together.

    The token table is also the decoder of the masked-LM head.
    """

    tokentypes = SEGMENTS

    def __init__(
        self, model: ModelConfig, *, sentence_task: SentenceTask = "sop", **options: Any
    ) -> None:
        """Allocate the parameters.

        Args:
            model: model configuration.
            sentence_task: task of the binary head, which determines the name of its loss.
            options: options of `Model`.

        Raises:
            ParallelLayoutError: heads, widths or vocabulary cannot be divided over the ranks.
        """
        super().__init__(model, **options)
        self.sentence_loss = SENTENCE_LOSSES[sentence_task] if model.bert_binary_head else None
        self.loss_names = (
            (LM_LOSS,) if self.sentence_loss is None else (LM_LOSS, self.sentence_loss)
        )

    def _build(self, setup: LayerSetup) -> None:
        model = self.model
        self.encoder = self._stack(
            setup,
            self.chunk.layers,
            final_layernorm=self.has_head,
            recomputed=self.recompute_num_layers,
            causal=False,
        )
        if self.has_head:
            self.lm_head = MaskedLmHead(model, setup, self.padded_vocab_size)
            if model.bert_binary_head:
                self.pooler = Pooler(model.hidden_size, setup)
                self.binary_head = ColumnParallelLinear(
                    model.hidden_size, BINARY_CLASSES, device=setup.device
                )

    def forward(self, inputs: ModelInput) -> tuple[Tensor, Tensor | None]:
        """Return the whole model's logits, gathered over the ranks.

        These are the logits [b, s, v] of the tokens and [b, 2] of the binary head. The latter are
        None without this head.
        """
        logits, answers = self._heads(self._hidden(inputs, None, None))
        return gather_from_tensor_parallel_region(logits, self.tp), answers

    def run(
        self,
        inputs: ModelInput | None,
        hidden: Tensor | None = None,
        *,
        dropout_seed: int | None = None,
    ) -> Tensor | Losses:
        """Return activations [b, s, h], or the losses of labels [b, s] and samples [b].

        With sequence parallelism activations are [b, s/t, h]. The logits are not gathered for the
        losses. Every chunk needs `inputs`, for the positions of padding.
        """
        assert inputs is not None
        hidden = self._hidden(inputs, hidden, dropout_seed)
        return self._losses(hidden, inputs) if self.has_head else hidden

    def _hidden(
        self, inputs: ModelInput, hidden: Tensor | None, dropout_seed: int | None
    ) -> Tensor:
        if self.has_embedding:
            hidden = self.embedding(
                inputs.tokens,
                dropout_seed,
                position_ids=inputs.position_ids,
                tokentypes=inputs.tokentypes,
            )
        assert hidden is not None
        length = inputs.tokens.shape[1]
        mask = attention_mask(
            form=self._mask_form(),
            queries=length,
            keys=length,
            causal=False,
            dtype=hidden.dtype,
            device=hidden.device,
            documents=inputs.documents,
            present=inputs.present,
        )
        return self.encoder(hidden, dropout_seed, shared=Shared(*mask))  # type: ignore[no-any-return]

    def _heads(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map [b, s, h] to logits [b, s, v/t] of the tokens and [b, 2] of the binary head."""
        answers, hidden = self._answers(hidden), self.lm_head(hidden)
        # Get the weight after the head has run: under ZeRO-3 the head releases its own parameters.
        output = (self._output_weight(), self.lm_head.bias)
        return column_parallel(hidden, [output], self.tp, self.sequence_parallel)[0], answers

    def _answers(self, hidden: Tensor) -> Tensor | None:
        """Return the binary head's logits [b, 2], or None without this head."""
        return None if self.sentence_loss is None else self.binary_head(self.pooler(hidden))

    def _losses(self, hidden: Tensor, inputs: ModelInput) -> Losses:
        answers, hidden = self._answers(hidden), self.lm_head(hidden)
        losses = {LM_LOSS: self._label_losses(hidden, inputs, self.lm_head.bias)}
        if self.sentence_loss is not None:
            assert answers is not None
            assert inputs.sentence_labels is not None
            losses[self.sentence_loss] = LossTerm(
                F.cross_entropy(
                    answers.to(losses[LM_LOSS].losses.dtype),
                    inputs.sentence_labels,
                    reduction="none",
                )
            )
        return losses


class MaskedLmHead(nn.Module):
    """The layers before the output projection: norm(activation(dense(x))).

    Each rank has all of them and, with sequence parallelism, applies them to its part of the
    sequence. `bias` is the bias of the output projection, divided like its rows.
    """

    def __init__(self, model: ModelConfig, setup: LayerSetup, padded_vocab_size: int) -> None:
        super().__init__()
        self.kernels, self.tp = setup.kernels, setup.tp
        self.sequence_parallel = setup.sequence_parallel
        self.activation = model.activation
        hidden, device = model.hidden_size, setup.device
        self.dense = ColumnParallelLinear(hidden, hidden, device=device)
        self.layernorm = make_norm(model, hidden, setup)
        local = divide(padded_vocab_size, self.tp, "the padded vocabulary of")
        self.bias = nn.Parameter(torch.empty(local, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, s, h] to [b, s, h]; with sequence parallelism both are [b, s/t, h]."""
        (inner,) = column_parallel(x, [(self.dense.weight, None)])
        return self.layernorm(self.kernels.bias_activation(inner, self.dense.bias, self.activation))  # type: ignore[no-any-return]

    def partitions(self) -> dict[str, Partition]:
        """Return the partition of the output bias, divided like its weight."""
        return {"bias": Partition(0, self.tp.rank, self.tp.size)}

    def partial_gradients(self) -> frozenset[str]:
        """Return the parameters whose gradients are partial with sequence parallelism."""
        return parameters_of(self, "dense", "layernorm") if self.sequence_parallel else frozenset()


class Pooler(nn.Module):
    """tanh(dense(x)) of the first token, [CLS]; identical on every rank."""

    def __init__(self, hidden_size: int, setup: LayerSetup) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = setup.tp, setup.sequence_parallel
        self.dense = ColumnParallelLinear(hidden_size, hidden_size, device=setup.device)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, s, h] (with sequence parallelism [b, s/t, h]) to [b, h]."""
        first = x[:, 0]
        if self.sequence_parallel:
            # The first token is on the first rank. All ranks get the first token of each rank; the
            # gradient only flows to the first rank.
            first = gather_from_tensor_parallel_region(first, self.tp)[:, : x.shape[2]]
        return torch.tanh(self.dense(first))
