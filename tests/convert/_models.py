"""Tiny models of every supported class of transformers, with distinct weights."""

from typing import Any

import torch
from torch import Tensor

from megacore.config.model import ModelConfig
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.convert.hf.forms import hf_form_of, model_config
from megacore.models.build import build_bare
from megacore.models.inputs import BertRules, MaskRules, ModelInput, T5Rules
from megacore.parallel.mesh import ProcessMesh

VOCAB_SIZE = 100
"""Size of the vocabulary, padded to 112."""
SEQ_LENGTH = 24
DECODER_LENGTH = 10

_BASE: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "make_vocab_size_divisible_by": 16,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
_LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "ffn_hidden_size": 48,
    "untie_embeddings_and_output_weights": True,
    "layernorm_epsilon": 1e-6,
}
_NEOX: dict[str, Any] = {
    "position_embedding_type": "rope",
    "rotary_percent": 0.25,
    "parallel_residual": True,
    "activation": "gelu",
    "untie_embeddings_and_output_weights": True,
}
_T5: dict[str, Any] = {
    "position_embedding_type": "relative",
    "normalization": "rmsnorm",
    "activation": "relu",
    "add_bias_linear": False,
    "kv_channels": 6,
    "num_decoder_layers": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "layernorm_epsilon": 1e-6,
}
_BERT: dict[str, Any] = {"activation": "gelu", "layernorm_epsilon": 1e-12}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("gpt", "GPT2LMHeadModel", {}),
    "gpt2-untied": (
        "gpt",
        "GPT2LMHeadModel",
        {"untie_embeddings_and_output_weights": True, "activation": "relu"},
    ),
    "llama": ("gpt", "LlamaForCausalLM", _LLAMA),
    "llama-grouped": (
        "gpt",
        "LlamaForCausalLM",
        _LLAMA | {"num_query_groups": 2, "rotary_base": 5e5},
    ),
    "llama-biases": (
        "gpt",
        "LlamaForCausalLM",
        _LLAMA
        | {
            "add_bias_linear": True,
            "num_query_groups": 1,
            "untie_embeddings_and_output_weights": False,
        },
    ),
    "llama-heads": (
        "gpt",
        "LlamaForCausalLM",
        _LLAMA | {"kv_channels": 12, "activation": "geglu_tanh"},
    ),
    "mistral": ("gpt", "MistralForCausalLM", _LLAMA | {"sliding_window": 7, "num_query_groups": 2}),
    "qwen2": (
        "gpt",
        "Qwen2ForCausalLM",
        _LLAMA | {"add_qkv_bias": True, "num_query_groups": 2},
    ),
    "qwen2-window": (
        "gpt",
        "Qwen2ForCausalLM",
        _LLAMA
        | {
            "add_qkv_bias": True,
            "sliding_window": 5,
            "untie_embeddings_and_output_weights": False,
            "rope_scaling": {
                "kind": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "llama3": (
        "gpt",
        "LlamaForCausalLM",
        _LLAMA
        | {
            "num_query_groups": 2,
            "untie_embeddings_and_output_weights": False,
            "rotary_base": 5e5,
            "rope_scaling": {
                "kind": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "llama-dynamic": (
        "gpt",
        "LlamaForCausalLM",
        _LLAMA
        | {
            "rope_scaling": {
                "kind": "dynamic",
                "factor": 2.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "phi3": (
        "gpt",
        "Phi3ForCausalLM",
        _LLAMA
        | {
            "num_query_groups": 2,
            "sliding_window": 9,
            "rotary_percent": 0.5,
            "untie_embeddings_and_output_weights": False,
            "rope_scaling": {
                "kind": "longrope",
                "factor": 2.0,
                "original_max_position_embeddings": 16,
                "short_factor": (1.0, 1.5),
                "long_factor": (2.0, 4.0),
            },
        },
    ),
    "phi3-ungrouped": (
        "gpt",
        "Phi3ForCausalLM",
        _LLAMA | {"rotary_percent": 0.75, "layernorm_epsilon": 1e-5},
    ),
    "qwen3": (
        "gpt",
        "Qwen3ForCausalLM",
        _LLAMA | {"qk_layernorm": True, "num_query_groups": 2, "kv_channels": 16},
    ),
    "qwen3-window": (
        "gpt",
        "Qwen3ForCausalLM",
        _LLAMA | {"qk_layernorm": True, "sliding_window": 5},
    ),
    "neox": ("gpt", "GPTNeoXForCausalLM", _NEOX),
    "neox-serial": (
        "gpt",
        "GPTNeoXForCausalLM",
        _NEOX
        | {
            "parallel_residual": False,
            "rotary_percent": 1.0,
            "activation": "gelu_tanh",
            "rotary_base": 500.0,
        }
        | {"untie_embeddings_and_output_weights": False},
    ),
    "bert": ("bert", "BertForPreTraining", _BERT | {"norm_position": "post"}),
    "megatron-bert": ("bert", "MegatronBertForPreTraining", _BERT | {"activation": "gelu_tanh"}),
    "bert-masked": (
        "bert",
        "BertForMaskedLM",
        _BERT | {"norm_position": "post", "bert_binary_head": False},
    ),
    "megatron-bert-masked": (
        "bert",
        "MegatronBertForMaskedLM",
        _BERT | {"bert_binary_head": False},
    ),
    "t5": ("t5", "T5ForConditionalGeneration", _T5),
    "t5-v1.1": (
        "t5",
        "T5ForConditionalGeneration",
        _T5 | {"activation": "geglu_tanh", "untie_embeddings_and_output_weights": True},
    ),
    "t5-silu": (
        "t5",
        "T5ForConditionalGeneration",
        _T5 | {"activation": "swiglu", "num_decoder_layers": 3},
    ),
}
"""Family, class of transformers and architecture, by name of the test case."""


def tiny_spec(name: str, **model: Any) -> ModelSpec:
    """Return the specification of one of MODELS."""
    family, _, values = MODELS[name]
    special = {
        "gpt": SpecialTokens(eod=2),
        "bert": SpecialTokens(eod=3, pad=0, cls=2, sep=3, mask=4, unk=1),
        "t5": SpecialTokens(eod=1, pad=0, sep=1, unk=2, sentinels=(80, 81, 82)),
    }[family]
    return ModelSpec(
        family=family,
        model=ModelConfig(**(_BASE | values | model)),
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
    )


def randomize(model: torch.nn.Module, seed: int = 7) -> Any:
    """Draw every parameter, including biases and norms: zeros and ones would hide a swap."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.2 * drawn if is_norm else 0.2 * drawn)
    return model.eval()


def our_model(spec: ModelSpec) -> Any:
    """Return megacore's model with random parameters."""
    return randomize(build_bare(spec, ProcessMesh.serial(), device="cpu"))


def their_model(spec: ModelSpec) -> Any:
    """Return the model of transformers for the exported config.json, with random parameters."""
    import transformers

    values = model_config(spec, "float32")
    architecture = values.pop("architectures")[0]
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model = getattr(transformers, architecture)(config)
    if spec.family == "t5" and spec.model.untie_embeddings_and_output_weights:
        # transformers 5 ties the head of every T5 until it finds another in the files.
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return randomize(model, seed=11)


def on_disk(spec: ModelSpec, theirs: Any) -> dict[str, Tensor]:
    """Return the parameters of a model of transformers under the names of its files."""
    _, form = hf_form_of(spec)
    table = form.key_map(spec)
    state = theirs.state_dict()
    return {
        name: state[form.name_when_loaded(name)].detach().clone() for name in table.their_shapes
    }


def samples(spec: ModelSpec, count: int = 3) -> ModelInput:
    """Return random ids, with padding for BERT and T5."""
    generator = torch.Generator().manual_seed(1)

    def ids(length: int) -> Tensor:
        return torch.randint(5, VOCAB_SIZE, (count, length), generator=generator)

    if spec.family == "gpt":
        rules = MaskRules(
            None,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            padded=False,
        )
        return rules.read(ids(SEQ_LENGTH + 1))
    tokens = ids(SEQ_LENGTH)
    tokens[1, 15:] = -1
    if spec.family == "t5":
        labels = ids(DECODER_LENGTH)
        labels[2, 6:] = -1
        return T5Rules(SEQ_LENGTH, 0).read(torch.cat([tokens, labels], 1))
    labels = ids(SEQ_LENGTH)
    labels[:, ::3] = -1
    labels[tokens < 0] = -1
    segments = (torch.arange(SEQ_LENGTH) >= 9).long().expand(count, -1).masked_fill(tokens < 0, -1)
    answers = torch.arange(count)[:, None] % 2
    return BertRules().read(torch.cat([tokens, labels, segments, answers], 1))
