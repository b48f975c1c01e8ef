"""How the weights and configuration of each class of transformers are written.

There is one `HfForm` for each.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from megacore.config.model import Family, ModelConfig
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.convert.counterparts import COUNTERPARTS, Counterpart, by_architecture, counterpart
from megacore.convert.hf import bert as hf_bert
from megacore.convert.hf import gpt2 as hf_gpt2
from megacore.convert.hf import llama as hf_llama
from megacore.convert.hf import neox
from megacore.convert.hf import t5 as hf_t5
from megacore.convert.hf.config import HfConfig
from megacore.convert.key_map import KeyMap
from megacore.errors import ConversionError

ModulePairs = list[tuple[str, str]]


@dataclass(frozen=True)
class HfForm:
    """One class of transformers, between its files and our models."""

    key_map: Callable[[ModelSpec], KeyMap]
    """The table of the weights, under their names on disk."""
    write_config: Callable[[ModelSpec], dict[str, Any]]
    """What is particular to the class in config.json."""
    read_config: Callable[[HfConfig], dict[str, Any]]
    """The values of `ModelConfig` that a config.json says. Raises ConversionError for what models
    here lack."""
    module_pairs: Callable[[ModelSpec], ModulePairs]
    """Modules of ours and of theirs whose outputs must agree, in the order in which they run."""
    prefix: str
    """Of every weight but the heads'; checkpoints of the model without head leave it out."""
    heads: tuple[str, ...] = ("lm_head.",)
    """What the names of the heads' weights begin with."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Other names that files have for the same weights: pattern and replacement."""
    held: tuple[tuple[str, str], ...] = ()
    """Where a loaded model has other names than its files: pattern and replacement."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Names under which files may hold another tensor of the table once more."""
    copies_left_out: bool = False
    """Whether a tensor of its own is left out of the files when it is the same as the one of which
    it could be a copy: transformers 5 ties the head of every T5."""
    ignored: str = r"(?!)"
    """Pattern of names that hold no weights: masks and tables that are computed."""

    def name_on_disk(self, name: str, known: Mapping[str, Any]) -> str | None:
        """What the table calls a tensor of a file; None when it holds no weights."""
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        if name not in known and not name.startswith((self.prefix, *self.heads)):
            name = self.prefix + name
        return None if re.search(self.ignored, name) else name

    def name_when_loaded(self, name: str) -> str:
        """What the loaded model calls a tensor of the table."""
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
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen3": _LLAMA,
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
        copies_left_out=True,
        ignored=r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",
    ),
}
"""By `model_type`."""


def hf_form_of(spec: ModelSpec) -> tuple[Counterpart, HfForm]:
    """The class of transformers that is this model, and its form.

    Raises ConversionError when there is none.
    """
    found = counterpart(spec.family, spec.model)
    return found, FORMS[found.model_type]


def model_config(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """`config.json` of an export in `dtype`."""
    found, form = hf_form_of(spec)
    return {
        "architectures": [found.architecture],
        "model_type": found.model_type,
        "vocab_size": spec.vocab_size,
        **form.write_config(spec),
        "dtype": dtype,
    }


def read_spec(config: HfConfig) -> tuple[Counterpart, ModelSpec]:
    """The model that a config.json describes, without its tokenizer.

    Raises ConversionError naming the key and the value of what models here lack.
    """
    found = _counterpart_of(config)
    values = FORMS[found.model_type].read_config(config)
    if found.family == "bert":
        values["bert_binary_head"] = bool(found.options["bert_binary_head"][0])
    try:
        spec = ModelSpec(
            family=found.family,
            model=ModelConfig(**values),
            vocab_size=config.get("vocab_size", int),
            special_tokens=_special_tokens(config, found.family),
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConversionError(
            f"{config.path} describes no model ({where} is {first['input']!r}: {first['msg']}): "
            "copy it again"
        ) from error
    return counterpart(spec.family, spec.model), spec


def _counterpart_of(config: HfConfig) -> Counterpart:
    architectures = config.values.get("architectures") or []
    model_type = config.values.get("model_type")
    found = by_architecture(architectures[0]) if architectures else None
    if found is not None and found.model_type == model_type:
        return found
    by_type = [entry for entry in COUNTERPARTS if entry.model_type == model_type]
    if not by_type or (
        architectures and not str(architectures[0]).endswith(("Model", "ForCausalLM"))
    ):
        known = ", ".join(entry.architecture for entry in COUNTERPARTS)
        raise ConversionError(
            f"{config.path} has architectures {architectures!r} of model_type {model_type!r}, "
            f"which models here lack: only {known} can be read"
        )
    return by_type[0]


def _special_tokens(config: HfConfig, family: Family) -> SpecialTokens:
    """What config.json knows of them; a tokenizer knows more."""
    end, pad = config.token("eos_token_id"), config.token("pad_token_id")
    return SpecialTokens(
        eod=end,
        pad=0 if pad is None and family == "t5" else pad,
        sep=end if family == "t5" else None,
    )
