"""Files config.json as the publishers of the models wrote them: every key is known."""

import json
from typing import Any

import pytest

from megacore.config.rope import Llama3Rope, LongRope
from megacore.convert.hf.config import HfConfig
from megacore.convert.hf.forms import read_spec

_LLAMA = """{"architectures": ["LlamaForCausalLM"], "attention_bias": false,
 "attention_dropout": 0.0, "bos_token_id": 128000, "hidden_act": "silu", "hidden_size": 4096,
 "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072,
 "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
 "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor":
 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
 "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype":
 "bfloat16", "transformers_version": "4.43.0.dev0", "use_cache": true, "vocab_size": 128256,
 "eos_token_id": [128001, 128008, 128009]}"""
_PHI3 = """{"_name_or_path": "Phi-3-mini-128k-instruct", "architectures": ["Phi3ForCausalLM"],
 "attention_bias": false, "attention_dropout": 0.0, "auto_map": {"AutoConfig":
 "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
 "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size":
 3072, "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
 "model_type": "phi3", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads":
 32, "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0,
 "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings":
 false, "torch_dtype": "bfloat16", "transformers_version": "4.40.2", "use_cache": true,
 "attention_bias": false, "vocab_size": 32064}"""
FILES: dict[str, tuple[str, dict[str, Any], int]] = {
    "Llama 3.1 8B": (_LLAMA, {}, 8_030_261_248),
    "Llama 3.2 1B": (
        _LLAMA,
        {
            "head_dim": 64,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "tie_word_embeddings": True,
        },
        1_235_814_400,
    ),
    "SmolLM2 135M": (
        """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout":
 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
 "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": true,
 "max_position_embeddings": 8192, "mlp_bias": false, "model_type": "llama", "num_attention_heads":
 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1,
 "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null, "rope_theta": 100000,
 "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.42.3",
 "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "use_cache": true,
 "vocab_size": 49152}""",
        {},
        134_515_008,
    ),
    "Mistral 7B": (
        """{"architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
 "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
 "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
 "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
 "sliding_window": 4096, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
 "transformers_version": "4.34.0.dev0", "use_cache": true, "vocab_size": 32000}""",
        {},
        7_241_732_096,
    ),
    "Qwen2.5 7B": (
        """{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id":
 151643, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 3584, "initializer_range":
 0.02, "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28,
 "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads":
 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072,
 "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.40.1",
 "use_cache": true, "use_mrope": false, "use_sliding_window": false, "vocab_size": 152064}""",
        {},
        7_615_616_512,
    ),
    "Qwen3 0.6B": (
        """{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout":
 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
 "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
 "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
 "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps":
 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
 "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
 "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}""",
        {},
        596_049_920,
    ),
    "Phi-3 mini 4k": (
        _PHI3,
        {"max_position_embeddings": 4096, "rope_scaling": None, "sliding_window": 2047},
        3_821_079_552,
    ),
    "Phi-3 mini 128k": (
        _PHI3,
        {
            "rope_scaling": {
                "long_factor": [1.07 + index for index in range(48)],
                "short_factor": [1.0 + index / 20 for index in range(48)],
                "type": "longrope",
            }
        },
        3_821_079_552,
    ),
    "Phi-4 mini": (
        _PHI3,
        {
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "mlp_bias": False,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {
                "long_factor": [1 + index for index in range(48)],
                "short_factor": [1.0] * 48,
                "type": "longrope",
            },
            "tie_word_embeddings": True,
            "vocab_size": 200064,
        },
        3_836_021_760,
    ),
    "Pythia 70M": (
        """{"architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0,
 "hidden_act": "gelu", "hidden_size": 512, "initializer_range": 0.02, "intermediate_size": 2048,
 "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "gpt_neox",
 "num_attention_heads": 8, "num_hidden_layers": 6, "rotary_emb_base": 10000, "rotary_pct": 0.25,
 "tie_word_embeddings": false, "torch_dtype": "float16", "transformers_version": "4.24.0",
 "use_cache": true, "use_parallel_residual": true, "vocab_size": 50304}""",
        {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0},
        70_426_624,
    ),
    "GPT-2": (
        """{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop":
 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
 "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
 "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": null,
 "summary_first_dropout": 0.1, "summary_proj_to_labels": true, "summary_type": "cls_index",
 "summary_use_proj": true, "task_specific_params": {"text-generation": {"do_sample": true,
 "max_length": 50}}, "vocab_size": 50257}""",
        {"_num_labels": 1, "gradient_checkpointing": False, "output_past": True},
        124_439_808,
    ),
    "BERT base": (
        """{"architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1,
 "gradient_checkpointing": false, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size":
 768, "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-12,
 "max_position_embeddings": 512, "model_type": "bert", "num_attention_heads": 12,
 "num_hidden_layers": 12, "pad_token_id": 0, "position_embedding_type": "absolute",
 "transformers_version": "4.6.0.dev0", "type_vocab_size": 2, "use_cache": true, "vocab_size":
 30522}""",
        {
            "classifier_dropout": None,
            "directionality": "bidi",
            "pooler_fc_size": 768,
            "pooler_num_attention_heads": 12,
            "pooler_num_fc_layers": 3,
            "pooler_size_per_head": 128,
            "pooler_type": "first_token_transform",
        },
        109_514_298,
    ),
    "T5 small": (
        """{"architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64, "d_model":
 512, "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1, "initializer_factor":
 1.0, "is_encoder_decoder": true, "layer_norm_epsilon": 1e-06, "model_type": "t5", "n_positions":
 512, "num_heads": 8, "num_layers": 6, "output_past": true, "pad_token_id": 0,
 "relative_attention_num_buckets": 32, "task_specific_params": {"summarization": {"num_beams": 4}},
 "vocab_size": 32128}""",
        {},
        60_506_624,
    ),
}
"""Text, changed values, and number of parameters by name; long lists are shortened or made up."""


@pytest.mark.parametrize("name", FILES)
def test_a_published_configuration_is_read(name: str) -> None:
    from megacore.models.parameters import parameter_count

    text, changes, parameters = FILES[name]
    _, spec = read_spec(HfConfig({**json.loads(text), **changes}, "config.json"))
    unpadded = spec.model.model_copy(update={"make_vocab_size_divisible_by": 1})
    assert parameter_count(spec.model_copy(update={"model": unpadded})) == parameters
    scaling = spec.model.rope_scaling
    if name.startswith("Llama"):
        assert isinstance(scaling, Llama3Rope)
        assert scaling.factor == (8.0 if "3.1" in name else 32.0)
    if name in ("Phi-3 mini 128k", "Phi-4 mini"):
        assert isinstance(scaling, LongRope)
        assert scaling.factor == 32.0
        assert scaling.scale == pytest.approx(1.190238)
