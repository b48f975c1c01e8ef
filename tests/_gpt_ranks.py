"""What each of t tensor-parallel ranks computes with whole models and chunks of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megacore.kernels import weight_gradient
from megacore.models.build import build_model
from megacore.models.gpt import GPTModel
from megacore.models.inputs import ModelInput
from megacore.parallel.mesh import ParallelGroup, ProcessMesh
from megacore.pipeline_parallel.partition import ModelChunk
from megacore.tensor_parallel import partial_gradients, partitions
from tests._tiny import tiny_config

VOCAB = 128
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"num_query_groups": 2},
    "sequence": {"sequence": True},
    "sequence and groups": {"sequence": True, "num_query_groups": 1},
    "llama": {
        "position_embedding_type": "rope",
        "normalization": "rmsnorm",
        "activation": "swiglu",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "num_query_groups": 2,
        "sequence": True,
    },
    "neox": {
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "parallel_residual": True,
        "activation": "gelu",
        "qk_layernorm": True,
        "sequence": True,
    },
    "alibi": {
        "position_embedding_type": "alibi",
        "sliding_window": 5,
        "activation": "geglu",
        "kv_channels": 16,
    },
    "losses": {"train": {"label_smoothing": 0.1, "z_loss": 0.01}},
}
"""Whole models whose losses and gradients are compared with the serial ones."""
CHUNKS = (
    ModelChunk(range(0, 1), True, False),
    ModelChunk(range(1, 3), False, False),
    ModelChunk(range(3, 4), False, True),
)
"""Four layers in three chunks."""
SEED = 77


def model(
    tp: ParallelGroup, *, sequence: bool = False, chunk: ModelChunk | None = None, **values: Any
) -> GPTModel:
    """A float64 model in which every parameter is far from its initial zero or one, the same for
    every layout."""
    config = tiny_config(**values)
    if sequence and tp.size > 1:
        parallel = config.parallel.model_copy(update={"sequence_parallel": True})
        config = config.model_copy(update={"parallel": parallel})
    own = build_model(config, VOCAB, ProcessMesh(tensor_parallel=tp), chunk=chunk).double()
    parts = partitions(own)
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            shape = (
                parts[name].global_shape(tuple(parameter.shape))
                if name in parts
                else parameter.shape
            )
            generator = torch.Generator().manual_seed(sum(name.encode("ascii")))
            noise = 0.1 * torch.randn(shape, dtype=torch.float64, generator=generator)
            parameter.add_(parts[name].shard(noise) if name in parts else noise)
    return own


def grads(own: GPTModel) -> dict[str, Tensor]:
    """Every gradient by name, and none afterwards."""
    found = {
        name: parameter.grad
        for name, parameter in own.named_parameters()
        if parameter.grad is not None
    }
    own.zero_grad()
    return found


def initial(tp: ParallelGroup, *, tokens: Tensor) -> dict[str, Any]:
    """Initial weights of whole models and of chunks; a vocabulary of 117 is padded to 128."""
    found = {}
    for name, values in {"fused": {}, "groups": {"num_query_groups": 2}}.items():
        own = build_model(
            tiny_config(num_layers=4, make_vocab_size_divisible_by=128, **values),
            117,
            ProcessMesh(tensor_parallel=tp),
        )
        found[name] = {
            "weights": {name: parameter.detach() for name, parameter in own.named_parameters()},
            "partitions": partitions(own),
        }
    config = tiny_config(num_layers=4, make_vocab_size_divisible_by=128)
    for number, chunk in enumerate(CHUNKS):
        own = build_model(config, 117, ProcessMesh(tensor_parallel=tp), chunk=chunk)
        found[f"chunk {number}"] = {
            name: parameter.detach() for name, parameter in own.named_parameters()
        }
    return found


def gpt(tp: ParallelGroup, *, tokens: Tensor) -> dict[str, Any]:
    """Logits, losses and every gradient of `VARIANTS`."""
    found = {}
    for name, values in VARIANTS.items():
        own = model(tp, **values)
        loss = own.loss(tokens, tokens.roll(-1, 1))
        loss.mean().backward()
        found[name] = {
            "partitions": partitions(own),
            "partial": partial_gradients(own),
            "logits": own(tokens).detach(),
            "loss": loss.detach(),
            "evaluated": own.eval().loss(tokens, tokens.roll(-1, 1)).detach(),
            "grads": grads(own),
        }
    return found


class Sink:
    """Counts its contributions."""

    def __init__(self, weight: Tensor) -> None:
        self.main_grad = torch.zeros(weight.shape, dtype=torch.float32)
        self.contributions = 0
        self.add_product = weight_gradient.reference

    def accumulated(self) -> None:
        """One more."""
        self.contributions += 1


def sinks(tp: ParallelGroup, *, tokens: Tensor) -> dict[str, Any]:
    """Main gradients and contributions of two passes against autograd's gradients, in fp32 and with
    recomputation."""
    found = {}
    for recompute in ("none", "full"):
        own = model(tp, sequence=True, num_query_groups=2, train={"recompute": recompute}).float()
        for _ in range(2):
            own.loss(tokens, tokens.roll(-1, 1)).mean().backward()
        expected = grads(own)
        for parameter in own.parameters():
            parameter.grad_sink = Sink(parameter)  # type: ignore[attr-defined]
        for _ in range(2):
            own.loss(tokens, tokens.roll(-1, 1)).mean().backward()
        got = grads(own)
        found[recompute] = {
            "expected": expected,
            "autograd": got,
            "main": {name: p.grad_sink.main_grad for name, p in own.named_parameters()},  # type: ignore[attr-defined]
            "contributions": {
                name: p.grad_sink.contributions for name, p in own.named_parameters()
            },  # type: ignore[attr-defined]
        }
    return found


def dropout(tp: ParallelGroup, *, tokens: Tensor) -> dict[str, dict[str, dict[str, Tensor]]]:
    """Losses and gradients with all dropouts on: recomputed in every way, in chunks, and two micro
    batches at once."""
    found: dict[str, dict[str, dict[str, Tensor]]] = {}
    values: dict[str, Any] = {"num_layers": 4, "hidden_dropout": 0.2, "attention_dropout": 0.3}
    for kind in ("plain", "sequence"):
        sequence = kind == "sequence"
        ways: dict[str, Callable[[], dict[str, Tensor]]] = {
            recompute: lambda recompute=recompute, sequence=sequence: _pass(
                [model(tp, sequence=sequence, train={"recompute": recompute}, **values)], tokens
            )
            for recompute in ("none", "selective", "full")
        }
        some = {"recompute": "full", "recompute_num_layers": 1}
        ways["chunks"] = lambda sequence=sequence, some=some: _pass(
            [model(tp, sequence=sequence, chunk=chunk, train=some, **values) for chunk in CHUNKS],
            tokens,
        )
        ways["two in flight"] = lambda sequence=sequence: _two_in_flight(
            model(tp, sequence=sequence, **values), tokens
        )
        found[kind] = {way: compute() for way, compute in ways.items()}
    return found


def _pass(chunks: list[GPTModel], tokens: Tensor) -> dict[str, Tensor]:
    """Two micro batches through the chunks, after draws that must not matter.

    The tables' gradients are summed.
    """
    found: dict[str, Tensor] = {}
    for number in range(2):
        given, x = ModelInput(tokens, tokens.roll(-1, 1)), None
        for chunk in chunks:
            torch.rand(number + 3)
            x = chunk.run(given, x, dropout_seed=SEED + number)
        losses = x["lm_loss"].losses
        found[f"loss {number}"] = losses.detach()
        losses.mean().backward()
    for chunk in chunks:
        for name, grad in grads(chunk).items():
            found[name] = found[name] + grad if name in found else grad
    return found


def _two_in_flight(own: GPTModel, tokens: Tensor) -> dict[str, Tensor]:
    """The same as `_pass` with both forward passes before the backward passes."""
    losses = [
        own.loss(tokens, tokens.roll(-1, 1), dropout_seed=SEED + number) for number in range(2)
    ]
    found = {f"loss {number}": loss.detach().clone() for number, loss in enumerate(losses)}
    for loss in losses:
        loss.mean().backward()
    return found | grads(own)


CASES = (initial, gpt, sinks, dropout)
