"""Checked access to `config.json` of a transformers directory. Imports no torch.

A value that our models do not support raises an error with its key. So does a key that nothing
reads, unless it is listed here with the reason why it does not change what a model computes.
"""

import math
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, TypeVar

from megacore.artifact.files import read_json
from megacore.config.model import Activation
from megacore.errors import ConversionError, listed
from megacore.foreign.files import shortened

CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"

_PLAIN: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "relu": "relu",
}
_GATES: dict[str, Activation] = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_python": "geglu",
    "gelu_new": "geglu_tanh",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_fast": "geglu_tanh",
}
THEIR_ACTIVATION: dict[Activation, str] = {
    "gelu_tanh": "gelu_new",
    "gelu": "gelu",
    "relu": "relu",
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_new",
}
"""transformers' name of each activation, for a gated unit that of its gate's function."""

_QUANTIZATION = ("quantization_config", "compression_config", "quantization")
"""Keys with the format of quantized weights; the last one is MLX's."""
T = TypeVar("T")


class HfConfig:
    """Values of a config.json.

    Methods raise ConversionError with key and value if a value is missing or not supported.
    """

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        """Wrap `values`; errors name `path`."""
        self.values = values
        self.path = path
        self._read = set[str]()

    @classmethod
    def read(cls, directory: Path, name: str = CONFIG_NAME) -> "HfConfig":
        """Read a configuration of a transformers directory.

        Raises:
            ConversionError: if the file cannot be read or is not a JSON object.
        """
        path = directory / name
        try:
            values = read_json(path)
        except OSError as error:
            raise ConversionError(
                f"{path} cannot be read ({error.strerror}): give a directory that transformers' "
                "save_pretrained wrote"
            ) from error
        except ValueError as error:
            raise ConversionError(f"{path} is not JSON ({error}): copy it again") from error
        if not isinstance(values, dict):
            raise ConversionError(
                f"{path} holds {type(values).__name__}, not an object: copy it again"
            )
        return cls(values, str(path))

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Return the value of `key`, which must be of type `kind`.

        A missing value is replaced by `default` unless that is None. Integers are accepted for
        float.
        """
        self._read.add(key)
        value = self.values.get(key, default)
        if kind is float and type(value) is int:
            try:
                value = float(value)
            except OverflowError:
                value = math.inf
        if isinstance(value, float) and not math.isfinite(value):
            raise ConversionError(f"{self.path} has {key} {value}: give a finite number")
        if value is None and default is None:
            raise ConversionError(
                f"{self.path} has no {key}: it is not the configuration of a whole model"
            )
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConversionError(
                f"{self.path} has {key} {shortened(repr(value))} where a value of type "
                f"{kind.__name__} belongs"
            )
        return value

    def optional(self, key: str, kind: type[T]) -> T | None:
        """Return the value of `key`, or None if it is missing or null."""
        self._read.add(key)
        return None if self.values.get(key) is None else self.get(key, kind)

    def refuse_unless(self, key: str, *allowed: Any) -> None:
        """Raise ConversionError unless `key` is missing, null or one of `allowed`.

        Our models do not support other values.
        """
        self._read.add(key)
        value = self.values.get(key)
        if value is not None and value not in allowed:
            supported = " or ".join(map(repr, allowed)) or "null"
            raise ConversionError(
                f"{self.path} has {key} {shortened(repr(value))}, which models here lack: only "
                f"{supported} can be read"
            )

    def refuse_quantized(self) -> None:
        """Raise ConversionError if the weights are quantized, with what to do about it."""
        for key in _QUANTIZATION:
            value = self.values.get(key)
            if value is not None:
                kind = value.get("quant_method") if isinstance(value, dict) else value
                raise ConversionError(
                    f"{self.path} has a {key}{f' of {shortened(repr(kind))}' if kind else ''}: its "
                    "weights are quantized, and models here have weights in fp32, bf16 or fp16: "
                    "give the model's version before quantization, or one that its `dequantize()` "
                    "in transformers gives"
                )

    def refuse_unread(self, *without_effect: Container[str]) -> None:
        """Raise ConversionError for a key that nothing has read and that may have an effect.

        Args:
            without_effect: keys that cannot change what the model computes. A key whose value is
                null has no effect either.
        """
        unknown = [
            key
            for key, value in self.values.items()
            if key not in self._read
            and value is not None
            and not any(key in keys for keys in without_effect)
        ]
        if unknown:
            named = listed(
                [f"{shortened(key)} {shortened(repr(self.values[key]))}" for key in unknown]
            )
            raise ConversionError(
                f"{self.path} has {named}, which nothing here reads: the model may compute "
                "something else with it; remove it only if the model's own code does not read it"
            )

    def activation(self, key: str, default: str, *, gated: bool) -> Activation:
        """Return our name of the activation under `key`."""
        return self.activation_named(self.get(key, str, default), key, gated=gated)

    def activation_named(self, name: str, key: str, *, gated: bool) -> Activation:
        """Return our name of the activation `name`, which the value of `key` contains."""
        known = _GATES if gated else _PLAIN
        if name not in known:
            raise ConversionError(
                f"{self.path} has {key} {name!r}, which models here lack: only {', '.join(known)} "
                "can be read"
            )
        return known[name]

    def tokens(self, key: str) -> tuple[int, ...]:
        """Return the valid ids of special tokens under `key`, whose value is an id or a list."""
        self._read.add(key)
        value = self.values.get(key)
        values = value if isinstance(value, list) else [value]
        return tuple(each for each in values if type(each) is int and each >= 0)

    def token(self, key: str) -> int | None:
        """Return the first valid id of a special token under `key`, or None."""
        return next(iter(self.tokens(key)), None)


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
            "_num_labels",
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
    "gemma2": _table(
        {
            "the class reads hidden_activation": ("hidden_act",),
            "copy of sliding_window": ("sliding_window_size",),
            "option of generation": ("cache_implementation",),
        }
    ),
    "starcoder2": _table(
        {
            "name that the class does not read": ("activation_function", "scale_attn_weights"),
            "precision of the same operations": (
                "attention_softmax_in_fp32",
                "scale_attention_softmax_in_fp32",
            ),
        }
    ),
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
