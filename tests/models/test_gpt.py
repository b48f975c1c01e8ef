"""GPT compared with plain torch and with transformers."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.models.build import build_model
from megacore.models.gpt import GPTModel
from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.rng import micro_batch_seed
from tests._loss import loss_of
from tests._tensor_ranks import VOCAB, ids
from tests._tiny import tiny_config

TOKENS = ids(2, 16)
LABELS = TOKENS.roll(-1, 1)


def _model(**values: Any) -> GPTModel:
    """Return a float64 model whose parameters are far from their initial zeros and ones."""
    model = build_model(tiny_config(**values), VOCAB, ProcessMesh.serial()).double()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.1 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            )
    return model


def _grads(model: GPTModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def _plain_logits(parameters: dict[str, Tensor], tokens: Tensor, layers: int, heads: int) -> Tensor:
    """Compute the logits of GPT-2 with every operation by its formula."""

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * parameters[f"{name}.weight"] + parameters[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ parameters[f"{name}.weight"].T + parameters[f"{name}.bias"]

    def attention(x: Tensor, name: str) -> Tensor:
        batch, length, hidden = x.shape
        size = hidden // heads
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mixed = linear(x, f"{name}.query_key_value").view(batch, length, heads, 3 * size)
        contexts = []
        for head in range(heads):
            query, key, value = mixed[:, :, head].split(size, -1)
            scores = (query @ key.transpose(1, 2) / math.sqrt(size)).masked_fill(~causal, -math.inf)
            contexts.append(scores.softmax(-1) @ value)
        return linear(torch.cat(contexts, -1), f"{name}.dense")

    def mlp(x: Tensor, name: str) -> Tensor:
        u = linear(x, f"{name}.dense_h_to_4h")
        gelu = 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
        return linear(gelu, f"{name}.dense_4h_to_h")

    table = parameters["embedding.word_embeddings.weight"]
    x = table[tokens] + parameters["embedding.position_embeddings.weight"][: tokens.shape[1]]
    for number in range(layers):
        name = f"encoder.layers.{number}"
        x = x + attention(norm(x, f"{name}.input_layernorm"), f"{name}.self_attention")
        x = x + mlp(norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
    return norm(x, "encoder.final_layernorm") @ table.T


def test_logits_losses_and_gradients_equal_plain_torch() -> None:
    model = _model()
    grads = _grads(model, loss_of(model, TOKENS, LABELS).mean())
    leaves = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in model.named_parameters()
    }
    logits = _plain_logits(leaves, TOKENS, layers=2, heads=4)
    losses = F.cross_entropy(logits.flatten(0, 1), LABELS.flatten(), reduction="none").view(2, 16)
    losses.mean().backward()
    torch.testing.assert_close(model(TOKENS), logits)
    torch.testing.assert_close(loss_of(model, TOKENS, LABELS), losses)
    assert grads.keys() == leaves.keys()
    for name, leaf in leaves.items():
        torch.testing.assert_close(
            grads[name], leaf.grad, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_shorter_sequence_gives_the_same_logits() -> None:
    model = _model()
    torch.testing.assert_close(model(TOKENS[:, :5]), model(TOKENS)[:, :5])


def _to_transformers(model: GPTModel, heads: int) -> dict[str, Tensor]:
    names = {
        "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
        "self_attention.query_key_value": "attn.c_attn", "self_attention.dense": "attn.c_proj",
        "mlp.dense_h_to_4h": "mlp.c_fc", "mlp.dense_4h_to_h": "mlp.c_proj",
    }  # fmt: skip
    state = {}
    for name, value in model.state_dict().items():
        *path, kind = name.split(".")
        if path[0] == "embedding":
            state[
                "transformer.wte.weight"
                if path[1] == "word_embeddings"
                else "transformer.wpe.weight"
            ] = value
        elif path[1] == "final_layernorm":
            state[f"transformer.ln_f.{kind}"] = value
        else:
            module = ".".join(path[3:])
            if module.endswith("query_key_value"):
                value = value.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
            value = value.T if value.dim() == 2 else value
            state[f"transformer.h.{path[2]}.{names[module]}.{kind}"] = value
    state["lm_head.weight"] = state["transformer.wte.weight"]
    return state


def test_logits_and_gradients_equal_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=4,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    theirs = transformers.GPT2LMHeadModel(config).double()
    model = _model()
    missing = theirs.load_state_dict(_to_transformers(model, heads=4), strict=True)
    assert not missing.missing_keys
    torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits)
    grads = _grads(model, loss_of(model, TOKENS, LABELS).mean())
    F.cross_entropy(theirs(TOKENS).logits.flatten(0, 1), LABELS.flatten()).backward()
    torch.testing.assert_close(
        grads["embedding.word_embeddings.weight"], theirs.transformer.wte.weight.grad
    )
    fc = theirs.transformer.h[0].mlp.c_fc.weight.grad
    torch.testing.assert_close(grads["encoder.layers.0.mlp.dense_h_to_4h.weight"], fc.T)


@pytest.mark.parametrize("kind", ["hidden_dropout", "attention_dropout"])
def test_dropout_follows_the_seed_and_stops_in_evaluation(kind: str) -> None:
    model = _model(**{kind: 0.4})

    def losses(first_sample: int) -> Tensor:
        return loss_of(
            model, TOKENS, LABELS, dropout_seed=micro_batch_seed(1, first_sample)
        ).detach()

    first = losses(0)
    assert torch.equal(losses(0), first)
    assert not torch.equal(losses(1), first)
    model.eval()
    assert torch.equal(losses(0), losses(1))
    torch.testing.assert_close(losses(0), loss_of(_model(), TOKENS, LABELS).detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_give_fp32_losses_near_the_exact_ones(dtype: torch.dtype) -> None:
    exact = build_model(tiny_config(), VOCAB, ProcessMesh.serial())
    losses = loss_of(
        build_model(tiny_config(), VOCAB, ProcessMesh.serial()).to(dtype), TOKENS, LABELS
    )
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, loss_of(exact, TOKENS, LABELS), rtol=0.01, atol=0.01)
