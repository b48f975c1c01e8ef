"""Formats of the weights and configuration of each transformers class, one `HfForm` each."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pydantic import ValidationError

from megacore.config.model import MOST_LAYERS, Family, ModelConfig, check_model
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.convert.counterparts import COUNTERPARTS, Counterpart, by_architecture, counterpart
from megacore.convert.hf import bert as hf_bert
from megacore.convert.hf import gpt2 as hf_gpt2
from megacore.convert.hf import llama as hf_llama
from megacore.convert.hf import neox
from megacore.convert.hf import t5 as hf_t5
from megacore.convert.hf.config import WITHOUT_EFFECT, WITHOUT_EFFECT_IN, HfConfig
from megacore.convert.key_map import KeyMap
from megacore.errors import ConversionError
from megacore.foreign.files import shortened

ModulePairs = list[tuple[str, str]]


@dataclass(frozen=True)
class HfForm:
    """Mapping between the files of one transformers class and our models."""

    key_map: Callable[[ModelSpec], KeyMap]
    """Function that builds the table of the weights, with their names on disk."""
    write_config: Callable[[ModelSpec], dict[str, Any]]
    """Function that returns the class-specific values of config.json."""
    read_config: Callable[[HfConfig], dict[str, Any]]
    """Function that translates a config.json to values of `ModelConfig`. It raises ConversionError
    for values that our models do not support."""
    module_pairs: Callable[[ModelSpec], ModulePairs]
    """Function that returns the names of corresponding modules (ours, theirs) whose outputs must
    agree, in execution order."""
    prefix: str
    """Prefix of all weights except the heads'; absent in checkpoints of a model without heads."""
    heads: tuple[str, ...] = ("lm_head.",)
    """Prefixes of the heads' weights."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Alternative names of weights in files: pairs of pattern and replacement."""
    held: tuple[tuple[str, str], ...] = ()
    """Names that differ between files and loaded model: pairs of pattern and replacement."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Name of the original tensor in the table, by the name of a possible duplicate in files."""
    ignored: str = r"(?!)"
    """Pattern of names that are not weights, such as masks and computed tables."""

    def name_on_disk(self, name: str, known: Mapping[str, Any]) -> str | None:
        """Return the table's name of a tensor in a file; None if it is not a weight."""
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        if name not in known and not name.startswith((self.prefix, *self.heads)):
            name = self.prefix + name
        return None if re.search(self.ignored, name) else name

    def name_when_loaded(self, name: str) -> str:
        """Return the loaded model's name of a tensor of the table."""
        for pattern, replacement in self.held:
            name = re.sub(pattern, replacement, name)
        return name


_LLAMA = HfForm(
    hf_llama.key_map,
    hf_llama.write_config,
    hf_llama.read_config,
    hf_llama.module_pairs,
    prefix="model.",
    copies={"lm_head.weight": "model.embed_tokens.weight"},
    ignored=r"\.rotary_emb\.inv_freq$",
)


def _llama_like(layer_entries: hf_llama.LayerEntries) -> HfForm:
    """Return Llama's form with other layers."""
    return replace(_LLAMA, key_map=partial(hf_llama.key_map, layer_entries=layer_entries))


_BERT = HfForm(
    hf_bert.key_map,
    hf_bert.write_config,
    hf_bert.read_config,
    hf_bert.module_pairs,
    prefix="bert.",
    heads=("cls.",),
    renamed=((r"\.gamma$", ".weight"), (r"\.beta$", ".bias")),
    copies={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    ignored=r"\.embeddings\.(position_ids|token_type_ids)$",
)
FORMS: Mapping[str, HfForm] = {
    "gpt2": HfForm(
        hf_gpt2.key_map,
        hf_gpt2.write_config,
        hf_gpt2.read_config,
        hf_gpt2.module_pairs,
        prefix="transformer.",
        copies={"lm_head.weight": "transformer.wte.weight"},
        ignored=r"\.attn\.(bias|masked_bias)$",
    ),
    **{
        model_type: _LLAMA if of.layer_entries is None else _llama_like(of.layer_entries)
        for model_type, of in hf_llama.CLASSES.items()
    },
    "gpt_neox": HfForm(
        neox.key_map,
        neox.write_config,
        neox.read_config,
        neox.module_pairs,
        prefix="gpt_neox.",
        heads=("embed_out.",),
        renamed=((r"^lm_head\.", "embed_out."),),
        held=((r"^embed_out\.", "lm_head."),),
        copies={"embed_out.weight": "gpt_neox.embed_in.weight"},
        ignored=r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$",
    ),
    "bert": _BERT,
    "megatron-bert": _BERT,
    "t5": HfForm(
        hf_t5.key_map,
        hf_t5.write_config,
        hf_t5.read_config,
        hf_t5.module_pairs,
        prefix="",
        copies={
            "encoder.embed_tokens.weight": "shared.weight",
            "decoder.embed_tokens.weight": "shared.weight",
            "lm_head.weight": "shared.weight",
        },
        ignored=r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",
    ),
}
"""Formats by `model_type`."""


def hf_form_of(spec: ModelSpec) -> tuple[Counterpart, HfForm]:
    """Return the transformers class for this model, and its format.

    Raises:
        ConversionError: if there is none.
    """
    hf_class = counterpart(spec.family, spec.model)
    return hf_class, FORMS[hf_class.model_type]


def model_config(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """Return the content of `config.json` for an export in `dtype`."""
    hf_class, form = hf_form_of(spec)
    return {
        "architectures": [hf_class.architecture],
        "model_type": hf_class.model_type,
        "vocab_size": spec.vocab_size,
        **form.write_config(spec),
        "dtype": dtype,
    }


def read_spec(config: HfConfig) -> tuple[Counterpart, ModelSpec]:
    """Return the class and the spec that a config.json describes, without the tokenizer.

    Raises:
        ConversionError: if our models do not support a value; the message names it and its key.
    """
    hf_class = _counterpart_of(config)
    config.refuse_quantized()
    _check_layers(config)
    values = FORMS[hf_class.model_type].read_config(config)
    vocab_size = config.get("vocab_size", int)
    for key, value in (_PARTS | {"is_encoder_decoder": hf_class.family == "t5"}).items():
        config.refuse_unless(key, value)
    config.refuse_unread(WITHOUT_EFFECT, WITHOUT_EFFECT_IN.get(hf_class.model_type, {}))
    if hf_class.family == "bert":
        values["bert_binary_head"] = bool(hf_class.options["bert_binary_head"][0])
    try:
        spec = ModelSpec(
            family=hf_class.family,
            model=ModelConfig(**values),
            vocab_size=vocab_size,
            special_tokens=_special_tokens(config, hf_class.family, vocab_size),
        )
        check_model(spec.family, spec.model, 1)
    except ValueError as error:
        raise ConversionError(
            f"{config.path} describes no model ({_reason(error)}): copy it again"
        ) from error
    _check_exportable(config, hf_class, spec)
    exported = counterpart(spec.family, spec.model)
    same_form = FORMS[exported.model_type] is FORMS[hf_class.model_type]
    return exported if same_form else hf_class, spec


def _check_exportable(config: HfConfig, hf_class: Counterpart, spec: ModelSpec) -> None:
    """Raise ConversionError for a model of the class that could not be exported again."""
    lacking = [entry.obstacles(spec.model) for entry in COUNTERPARTS if entry.family == spec.family]
    if not all(lacking):
        return
    of_class = [entry for entry in COUNTERPARTS if entry.model_type == hf_class.model_type]
    option, value, supported = min((entry.obstacles(spec.model) for entry in of_class), key=len)[0]
    raise ConversionError(
        f"{config.path} describes a model with {option} {value}, which models here lack: only "
        f"{supported} can be read"
    )


def _check_layers(config: HfConfig) -> None:
    """Refuse a number of layers for which the readers of some classes would build long lists."""
    for key in ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"):
        layers = config.values.get(key)
        if isinstance(layers, int) and abs(layers) > MOST_LAYERS:
            raise ConversionError(
                f"{config.path} describes no model (num_layers is {shortened(str(layers))}: Input "
                f"should be from 1 to {MOST_LAYERS}): copy it again"
            )


_PARTS: dict[str, object] = {
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
}
"""Keys of all classes that add, remove or share parts, with the values of our models."""


def _reason(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    named = f"{where} is {shortened(repr(first['input']))}: " if where else ""
    return f"{named}{first['msg'].removeprefix('Value error, ')}"


def _counterpart_of(config: HfConfig) -> Counterpart:
    architectures = config.optional("architectures", list) or []
    model_type = config.optional("model_type", str)
    match = by_architecture(architectures[0]) if architectures else None
    if match is not None and match.model_type == model_type:
        return match
    by_type = [entry for entry in COUNTERPARTS if entry.model_type == model_type]
    if not by_type or (
        architectures and not str(architectures[0]).endswith(("Model", "ForCausalLM"))
    ):
        known = ", ".join(dict.fromkeys(entry.architecture for entry in COUNTERPARTS))
        raise ConversionError(
            f"{config.path} has architectures {architectures!r} of model_type {model_type!r}, "
            f"which models here lack: only {known} can be read"
        )
    return by_type[0]


def _special_tokens(config: HfConfig, family: Family, vocab_size: int) -> SpecialTokens:
    """Return the special tokens in config.json, a subset of the tokenizer's."""
    end, pad = config.token("eos_token_id"), config.token("pad_token_id")
    begin = config.token("bos_token_id") if family == "gpt" else None
    known = begin is not None and begin < vocab_size and begin != end
    if family == "gpt" and pad is not None and pad >= vocab_size:
        pad = None  # transformers would not load an export that names it
    special = SpecialTokens(
        eod=end,
        pad=0 if pad is None and family == "t5" else pad,
        sep=end if family == "t5" else None,
        bos=begin if known else None,
    )
    return special.with_ends(config.tokens("eos_token_id"), vocab_size)
