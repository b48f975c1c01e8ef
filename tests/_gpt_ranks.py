"""Results of each of t tensor-parallel ranks for whole GPT models and their chunks."""

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
from tests._loss import loss_of
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
    """Build a float64 model with parameters far from their initial zero or one in every layout."""
    config = tiny_config(**values)
    if sequence and tp.size > 1:
        parallel = config.parallel.model_copy(update={"sequence_parallel": True})
        config = config.model_copy(update={"parallel": parallel})
    module = build_model(config, VOCAB, ProcessMesh(tensor_parallel=tp), chunk=chunk).double()
    parts = partitions(module)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            shape = (
                parts[name].global_shape(tuple(parameter.shape))
                if name in parts
                else parameter.shape
            )
            generator = torch.Generator().manual_seed(sum(name.encode("ascii")))
            noise = 0.1 * torch.randn(shape, dtype=torch.float64, generator=generator)
            parameter.add_(parts[name].shard(noise) if name in parts else noise)
    return module


def grads(module: GPTModel) -> dict[str, Tensor]:
    """Return all gradients by name and clear them."""
    gradients = {
        name: parameter.grad
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    module.zero_grad()
    return gradients


def initial(tp: ParallelGroup, *, tokens: Tensor) -> dict[str, Any]:
    """Return initial weights of models and of chunks; a vocabulary of 117 is padded to 128."""
    results = {}
    for name, values in {"fused": {}, "groups": {"num_query_groups": 2}}.items():
        module = build_model(
            tiny_config(num_layers=4, make_vocab_size_divisible_by=128, **values),
            117,
            ProcessMesh(tensor_parallel=tp),
        )
        results[name] = {
            "weights": {name: parameter.detach() for name, parameter in module.named_parameters()},
            "partitions": partitions(module),
        }
    config = tiny_config(num_layers=4, make_vocab_size_divisible_by=128)
    for number, chunk in enumerate(CHUNKS):
        module = build_model(config, 117, ProcessMesh(tensor_parallel=tp), chunk=chunk)
        results[f"chunk {number}"] = {
            name: parameter.detach() for name, parameter in module.named_parameters()
        }
    return results


def gpt(tp: ParallelGroup, *, tokens: Tensor) -> dict[str, Any]:
    """Return logits, losses and every gradient of `VARIANTS`."""
    results = {}
    for name, values in VARIANTS.items():
        module = model(tp, **values)
        loss = loss_of(module, tokens, tokens.roll(-1, 1))
        loss.mean().backward()
        results[name] = {
            "partitions": partitions(module),
            "partial": partial_gradients(module),
            "logits": module(tokens).detach(),
            "loss": loss.detach(),
            "evaluated": loss_of(module.eval(), tokens, tokens.roll(-1, 1)).detach(),
            "grads": grads(module),
        }
    return results


class Sink:
    """A gradient sink that counts its contributions."""

    def __init__(self, weight: Tensor) -> None:
        self.main_grad = torch.zeros(weight.shape, dtype=torch.float32)
        self.contributions = 0
        self.delays = False
        self.add_product = weight_gradient.reference

    def contribute(self, add: Callable[[], None]) -> None:
        """Add one contribution and count it."""
        add()
        self.contributions += 1


def sinks(tp: ParallelGroup, *, tokens: Tensor) -> dict[str, Any]:
    """Return main gradients, contributions and autograd's gradients of two passes.

    The model is in fp32, with and without recomputation.
    """
    results = {}
    for recompute in ("none", "full"):
        module = model(
            tp, sequence=True, num_query_groups=2, train={"recompute": recompute}
        ).float()
        for _ in range(2):
            loss_of(module, tokens, tokens.roll(-1, 1)).mean().backward()
        expected = grads(module)
        for parameter in module.parameters():
            parameter.grad_sink = Sink(parameter)  # type: ignore[attr-defined]
        for _ in range(2):
            loss_of(module, tokens, tokens.roll(-1, 1)).mean().backward()
        gradients = grads(module)
        results[recompute] = {
            "expected": expected,
            "autograd": gradients,
            "main": {name: p.grad_sink.main_grad for name, p in module.named_parameters()},  # type: ignore[attr-defined]
            "contributions": {
                name: p.grad_sink.contributions for name, p in module.named_parameters()
            },  # type: ignore[attr-defined]
        }
    return results


def dropout(tp: ParallelGroup, *, tokens: Tensor) -> dict[str, dict[str, dict[str, Tensor]]]:
    """Return losses and gradients with all dropouts on.

    Cases: every kind of recomputation, chunks, and two micro batches in flight.
    """
    results: dict[str, dict[str, dict[str, Tensor]]] = {}
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
        results[kind] = {way: compute() for way, compute in ways.items()}
    return results


def _pass(chunks: list[GPTModel], tokens: Tensor) -> dict[str, Tensor]:
    """Run two micro batches through the chunks, after random draws that must not matter.

    Gradients of shared embeddings are summed.
    """
    results: dict[str, Tensor] = {}
    for number in range(2):
        micro_batch, x = ModelInput(tokens, tokens.roll(-1, 1)), None
        for chunk in chunks:
            torch.rand(number + 3)
            x = chunk.run(micro_batch, x, dropout_seed=SEED + number)
        losses = x["lm_loss"].losses
        results[f"loss {number}"] = losses.detach()
        losses.mean().backward()
    for chunk in chunks:
        for name, grad in grads(chunk).items():
            results[name] = results[name] + grad if name in results else grad
    return results


def _two_in_flight(module: GPTModel, tokens: Tensor) -> dict[str, Tensor]:
    """Do the same as `_pass` with both forward passes before the backward passes."""
    losses = [
        loss_of(module, tokens, tokens.roll(-1, 1), dropout_seed=SEED + number)
        for number in range(2)
    ]
    results = {f"loss {number}": loss.detach().clone() for number, loss in enumerate(losses)}
    for loss in losses:
        loss.mean().backward()
    return results | grads(module)


CASES = (initial, gpt, sinks, dropout)
