"""Tiny float64 models of every family, with distinct weights that do not depend on the layout."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megacore.config.model import Family, ModelConfig
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.models.base import LM_LOSS, Losses, Model
from megacore.models.bert import BertModel
from megacore.models.gpt import GPTModel
from megacore.models.inputs import BertRules, MaskRules, ModelInput, T5Rules
from megacore.models.t5 import T5Model
from megacore.parallel.mesh import SINGLE_RANK, ParallelGroup
from megacore.pipeline_parallel.partition import ModelChunk
from megacore.tensor_parallel import partitions

VOCAB = 64
"""Size of the vocabulary, which needs no padding."""
LENGTH, DECODER_LENGTH = 12, 8
"""Tokens of a sequence, and of a decoder sequence of T5."""
LAYERS = 2

LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
NEOX: dict[str, Any] = {
    "position_embedding_type": "rope",
    "rotary_percent": 0.25,
    "activation": "gelu",
    "parallel_residual": True,
    "untie_embeddings_and_output_weights": True,
}
GEMMA2: dict[str, Any] = LLAMA | {
    "activation": "geglu_tanh",
    "kv_channels": 12,
    "norm_position": "sandwich",
    "apply_layernorm_1p": True,
    "scale_embeddings": True,
    "sliding_window": 5,
    "window_attn_skip_freq": 2,
    "query_pre_attn_scalar": 9,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 2.0,
    "untie_embeddings_and_output_weights": False,
}
OLMO2: dict[str, Any] = LLAMA | {
    "norm_position": "reordered",
    "qk_layernorm": True,
    "qk_layernorm_scope": "projection",
}
DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": LLAMA,
    "llama tied, one group": LLAMA
    | {"untie_embeddings_and_output_weights": False, "num_query_groups": 1},
    "llama with biases, wide heads": LLAMA
    | {"add_bias_linear": True, "kv_channels": 12, "num_query_groups": None},
    "llama geglu, long base": LLAMA | {"activation": "geglu_tanh", "rotary_base": 500000.0},
    "mistral": LLAMA | {"sliding_window": 5},
    "qwen3": LLAMA | {"qk_layernorm": True, "kv_channels": 12},
    "qwen2": LLAMA | {"add_qkv_bias": True, "kv_channels": 12, "sliding_window": 5},
    "qwen2 tied, no groups": LLAMA
    | {
        "add_qkv_bias": True,
        "num_query_groups": None,
        "untie_embeddings_and_output_weights": False,
        "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 6},
    },
    "llama 3": LLAMA
    | {
        "untie_embeddings_and_output_weights": False,
        "rope_scaling": {"kind": "llama3", "factor": 8.0, "original_max_position_embeddings": 8},
    },
    "llama dynamic": LLAMA
    | {"rope_scaling": {"kind": "dynamic", "factor": 2.0, "original_max_position_embeddings": 6}},
    "phi-3": LLAMA
    | {
        "rotary_percent": 0.5,
        "sliding_window": 7,
        "rope_scaling": {
            "kind": "longrope",
            "factor": 2.0,
            "original_max_position_embeddings": 6,
            "short_factor": (1.0, 1.5),
            "long_factor": (2.0, 4.0),
        },
    },
    "neox": NEOX,
    "neox serial": NEOX | {"parallel_residual": False, "rotary_percent": 1.0},
    "gemma2": GEMMA2,
    "gemma2 full, untied": GEMMA2
    | {
        "sliding_window": None,
        "window_attn_skip_freq": None,
        "query_pre_attn_scalar": None,
        "untie_embeddings_and_output_weights": True,
        "num_query_groups": None,
    },
    "olmo2": OLMO2,
    "olmo2 one group, tied": OLMO2
    | {"num_query_groups": 1, "untie_embeddings_and_output_weights": False},
    "olmo2 all heads": OLMO2 | {"num_query_groups": None},
    "starcoder2": {
        "position_embedding_type": "rope",
        "num_query_groups": 2,
        "sliding_window": 5,
    },
    "starcoder2 without biases": {
        "position_embedding_type": "rope",
        "num_query_groups": 1,
        "activation": "gelu",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
    },
}
"""GPT options that correspond to a model in transformers, by name."""
MPT: dict[str, Any] = {
    "position_embedding_type": "alibi",
    "activation": "gelu",
    "add_bias_linear": False,
}
BERTS: dict[str, dict[str, Any]] = {
    "bert": {"norm_position": "post", "activation": "gelu"},
    "bert gelu_new": {"norm_position": "post"},
    "bert masked lm": {"norm_position": "post", "activation": "gelu", "bert_binary_head": False},
    "megatron bert": {"activation": "gelu"},
}
_T5: dict[str, Any] = {
    "position_embedding_type": "relative",
    "normalization": "rmsnorm",
    "add_bias_linear": False,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 9,
}
T5S: dict[str, dict[str, Any]] = {
    "t5 v1.0": _T5 | {"activation": "relu"},
    "t5 v1.1": _T5
    | {
        "activation": "geglu_tanh",
        "ffn_hidden_size": 48,
        "kv_channels": 12,
        "num_decoder_layers": 3,
        "untie_embeddings_and_output_weights": True,
    },
}
VARIANTS: dict[str, tuple[Family, dict[str, Any]]] = {
    **{name: ("gpt", values) for name, values in DECODERS.items()},
    "alibi": ("gpt", MPT),
    "groups of norms": (
        "gpt",
        LLAMA | {"qk_layernorm": True, "num_query_groups": 1, "normalization": "layernorm"},
    ),
    **{name: ("bert", values) for name, values in BERTS.items()},
    **{name: ("t5", values) for name, values in T5S.items()},
}
"""Family and options of every model, by name."""


def spec(name: str, **values: Any) -> ModelSpec:
    """Return the specification of a variant; `values` replace its configuration."""
    family, options = VARIANTS[name]
    model = ModelConfig(
        **{
            "num_layers": LAYERS,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "max_position_embeddings": LENGTH,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "make_vocab_size_divisible_by": 8,
            **options,
            **values,
        }
    )
    return ModelSpec(
        family=family, model=model, vocab_size=VOCAB, special_tokens=SpecialTokens(eod=1, pad=0)
    )


def model(
    model_spec: ModelSpec,
    tp: ParallelGroup = SINGLE_RANK,
    *,
    chunk: ModelChunk | None = None,
    **options: Any,
) -> Model:
    """Build a chunk of the model, the same in every layout, with parameters far from 0 and 1."""
    classes = {"gpt": GPTModel, "bert": BertModel, "t5": T5Model}
    module: Model = classes[model_spec.family](
        model_spec.model,
        padded_vocab_size=model_spec.padded_vocab_size,
        max_position_embeddings=model_spec.max_position_embeddings,
        chunk=chunk,
        tp=tp,
        **options,
    ).double()
    parts = partitions(module)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            shape = (
                parts[name].global_shape(tuple(parameter.shape))
                if name in parts
                else tuple(parameter.shape)
            )
            generator = torch.Generator().manual_seed(
                sum(index * byte for index, byte in enumerate(name.encode()))
            )
            drawn = 0.2 * torch.randn(shape, dtype=torch.float64, generator=generator)
            if name.endswith("layernorm.weight"):
                drawn += 1
            parameter.copy_(parts[name].shard(drawn) if name in parts else drawn)
    return module


def chunks(model_spec: ModelSpec) -> list[ModelChunk]:
    """Return chunks of one layer each that make up the model."""
    if model_spec.family != "t5":
        last = model_spec.model.num_layers - 1
        return [ModelChunk(range(n, n + 1), n == 0, n == last) for n in range(last + 1)]
    encoder, last = model_spec.model.num_layers, model_spec.model.decoder_layers - 1
    return [
        *(ModelChunk(range(n, n + 1), n == 0, False) for n in range(encoder)),
        *(ModelChunk(range(0), False, n == last, range(n, n + 1)) for n in range(last + 1)),
    ]


def given(model_spec: ModelSpec) -> ModelInput:
    """Return three samples; those of BERT and T5 have padding and labels that do not count."""
    generator = torch.Generator().manual_seed(3)

    def ids(length: int, lengths: tuple[int, ...] = ()) -> Tensor:
        rows = torch.randint(2, VOCAB, (3, length), generator=generator)
        for row, count in enumerate(lengths):
            rows[row, count:] = -1
        return rows

    if model_spec.family == "gpt":
        tokens = ids(LENGTH + 1)
        mask = torch.rand(3, LENGTH, generator=generator) < 0.7
        return ModelInput(tokens[:, :-1], tokens[:, 1:], loss_mask=mask)
    lengths = (LENGTH, LENGTH - 3, 5)
    tokens = ids(LENGTH, lengths)
    if model_spec.family == "t5":
        return T5Rules(LENGTH, 0).read(
            torch.cat([tokens, ids(DECODER_LENGTH, (DECODER_LENGTH, 5, 3))], 1)
        )
    predicted = torch.rand(3, LENGTH, generator=generator) < 0.4
    labels = ids(LENGTH, lengths).where(predicted, -1)
    segments = (torch.arange(LENGTH) >= 3).long().expand(3, -1).where(tokens >= 0, -1)
    return BertRules().read(torch.cat([tokens, labels, segments, torch.tensor([[0], [1], [1]])], 1))


FIRST = 5
"""Tokens of the first document of `documents` in sequences of LENGTH tokens."""


def document_rows(seed: int, length: int = LENGTH) -> Tensor:
    """Return ids [2, s + 1] of several documents; the first is drawn with the seed. 1 ends one."""
    first = length * FIRST // LENGTH
    ids = torch.randint(2, VOCAB, (2, length + 1), generator=torch.Generator().manual_seed(1))
    drawn = torch.randint(2, VOCAB, (2, first), generator=torch.Generator().manual_seed(seed))
    ids[:, :first] = drawn
    ids[:, first - 1] = ids[1, length * 2 // 3] = 1
    return ids


def document_rules() -> MaskRules:
    """Return the rules of separate documents."""
    return MaskRules(
        1, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=False, padded=False
    )


def documents(seed: int, length: int = LENGTH) -> ModelInput:
    """Return `document_rows` as a micro batch in which the first document's labels do not count."""
    counts = torch.arange(length).expand(2, -1) >= length * FIRST // LENGTH
    return replace(document_rules().read(document_rows(seed, length)), loss_mask=counts)


def leaks(
    build: Callable[[], list[Model]], length: int = LENGTH, cp: ParallelGroup = SINGLE_RANK
) -> list[str]:
    """Return the losses and gradients of other documents that change with the first document.

    The sequences have `length` tokens, which the ranks of `cp` divide.
    """
    batches = [documents(seed, length).part(cp) for seed in (2, 3)]
    before, after = (backward(build(), batch) for batch in batches)
    losses, counts = f"losses of {LM_LOSS}", batches[0].loss_mask
    assert counts is not None
    assert not torch.equal(before[losses][~counts], after[losses][~counts])
    for results in (before, after):
        results[losses] = results[losses][counts]
    return [name for name, value in before.items() if not torch.equal(value, after[name])]


def total(losses: Tensor | Losses) -> Tensor:
    """Return the loss that is minimised."""
    assert isinstance(losses, dict)
    return torch.stack([term.mean() for term in losses.values()]).sum()


def logits(module: Model, micro_batch: ModelInput) -> list[Tensor]:
    """Return all predictions of a whole model.

    Tokens are [b, s, v]; BERT's binary head, if any, is [b, 2].
    """
    if isinstance(module, GPTModel):
        return [module(micro_batch.tokens)]
    predictions = module(micro_batch)
    return (
        [part for part in predictions if part is not None]
        if isinstance(predictions, tuple)
        else [predictions]
    )


def backward(
    parts: list[Model], micro_batch: ModelInput, dropout_seed: int | None = None
) -> dict[str, Tensor]:
    """Run one micro batch through chunks like a pipeline; return its losses and all gradients.

    Gradients of parameters that several chunks have are summed.
    """
    inputs: list[Tensor | None] = [None]
    outputs: list[Any] = []
    for part in parts:
        outputs.append(part.run(micro_batch, inputs[-1], dropout_seed=dropout_seed))
        if part is not parts[-1]:
            inputs.append(outputs[-1].detach().requires_grad_())
    total(outputs[-1]).backward()
    for output, sent in zip(reversed(outputs[:-1]), reversed(inputs), strict=False):
        assert sent is not None
        output.backward(sent.grad)
    results = {f"losses of {name}": term.losses.detach() for name, term in outputs[-1].items()}
    for part in parts:
        for name, parameter in part.named_parameters():
            assert parameter.grad is not None, name
            results[name] = results[name] + parameter.grad if name in results else parameter.grad
    return results


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest value.

    Gradients that vanish, such as those of BERT's key biases, are compared absolutely.
    """
    assert ours.shape == theirs.shape, f"{tuple(ours.shape)} against {tuple(theirs.shape)}"
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours - theirs).abs().max()) / max(float(theirs.abs().max()), 1e-6)
