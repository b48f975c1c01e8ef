"""Keys of config.json that do not change what a model computes, with the reason for each.

A key that is neither read nor listed here is refused.
"""

from collections.abc import Mapping


def _table(reasons: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Return the reason by key."""
    return {key: reason for reason, keys in reasons.items() for key in keys}


WITHOUT_EFFECT = _table(
    {
        "names the files' origin or program": (
            "_name_or_path",
            "name_or_path",
            "_commit_hash",
            "transformers_version",
            "transformers.js_config",
            "unsloth_version",
            "unsloth_fixed",
            "auto_map",  # code that is never run here
            "keys_to_ignore_at_inference",
            "language",
            "license",
        ),
        "type in which weights are stored or computed": ("dtype", "torch_dtype", "use_bfloat16"),
        "implementation or memory of the same function": (
            "attn_implementation",
            "_attn_implementation",
            "_attn_implementation_autoset",
            "_flash_attn_2_enabled",
            "chunk_size_feed_forward",
            "gradient_checkpointing",
            "torchscript",
            "use_cache",
        ),
        "what a call returns": (
            "output_attentions",
            "output_hidden_states",
            "output_past",
            "output_scores",
            "return_dict",
            "return_dict_in_generate",
            "tie_last_hidden_states",
        ),
        "option of generation": (
            "assistant_confidence_threshold",
            "assistant_lookbehind",
            "bad_words_ids",
            "begin_suppress_tokens",
            "decoder_start_token_id",
            "diversity_penalty",
            "do_sample",
            "early_stopping",
            "encoder_no_repeat_ngram_size",
            "encoder_repetition_penalty",
            "epsilon_cutoff",
            "eta_cutoff",
            "exponential_decay_length_penalty",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "length_penalty",
            "max_length",
            "max_new_tokens",
            "min_length",
            "no_repeat_ngram_size",
            "num_assistant_tokens",
            "num_assistant_tokens_schedule",
            "num_beam_groups",
            "num_beams",
            "num_return_sequences",
            "prefix",
            "remove_invalid_values",
            "repetition_penalty",
            "suppress_tokens",
            "target_lookbehind",
            "temperature",
            "top_k",
            "top_p",
            "typical_p",
        ),
        "names a token, for tokenizers and generation": (
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "sep_token_id",
            "cls_token_id",
            "mask_token_id",
            "unk_token_id",
            "tokenizer_class",
        ),
        "heads of other tasks": (
            "classifier_dropout",
            "finetuning_task",
            "id2label",
            "label2id",
            "num_labels",
            "problem_type",
            "task_specific_params",
        ),
        "option of TensorFlow's classes": ("tf_legacy_loss",),
    }
)
"""Keys of every class. The reason is for readers of this file only."""
_LENGTHS = "length of inputs, which is max_position_embeddings"
WITHOUT_EFFECT_IN: Mapping[str, Mapping[str, str]] = {
    "gpt2": _table(
        {
            _LENGTHS: ("n_ctx",),
            "order of the same operations": ("reorder_and_upcast_attn",),
            "heads of other tasks": (
                "summary_activation",
                "summary_first_dropout",
                "summary_proj_to_labels",
                "summary_type",
                "summary_use_proj",
            ),
        }
    ),
    "llama": _table(
        {_LENGTHS: ("max_sequence_length",), "name of the class": ("is_llama_config",)}
    ),
    "phi3": _table({"dropout that the class does not apply": ("embd_pdrop",)}),
    "gpt_neox": _table(
        {
            "names of BERT's dropouts, which the class does not read": (
                "attention_probs_dropout_prob",
                "hidden_dropout_prob",
            )
        }
    ),
    "bert": _table(
        {
            "pooling of other programs": (
                "pooler_fc_size",
                "pooler_num_attention_heads",
                "pooler_num_fc_layers",
                "pooler_size_per_head",
                "pooler_type",
            ),
        }
    ),
    "t5": _table({"scale of initial weights": ("initializer_factor",)}),
}
"""Further keys by `model_type`."""
