"""Names of a model's tensors in checkpoints of Megatron core.

They are those of `table`, renamed. All layers of a tensor are one tensor with a further dimension
in front, or one tensor per layer. Transformer Engine names the norms before a linear layer as part
of it; local layers of early versions name them as modules of their own.

Source: NVIDIA/Megatron-LM, megatron/core/models/gpt/gpt_layer_specs.py and
megatron/core/transformer/transformer_block.py.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megacore.config.spec import ModelSpec
from megacore.convert.megatron.table import Slot, slots

_STACKS = {"gpt": "decoder", "bert": "encoder"}
"""Module with the layers, by family."""
_IN_LAYER: dict[str, tuple[str, ...]] = {
    "input_layernorm.": ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    "self_attention.query_key_value.": ("self_attention.linear_qkv.",),
    "self_attention.q_layernorm.": ("self_attention.q_layernorm.",),
    "self_attention.k_layernorm.": ("self_attention.k_layernorm.",),
    "self_attention.dense.": ("self_attention.linear_proj.",),
    "post_attention_layernorm.": ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    "mlp.dense_h_to_4h.": ("mlp.linear_fc1.",),
    "mlp.dense_4h_to_h.": ("mlp.linear_fc2.",),
}
"""Beginnings of the names within a layer; of several names, the first is written."""
_OUTSIDE = (
    ("language_model.encoder.", "{stack}."),
    ("language_model.", ""),
    ("lm_head.bias", "output_layer.bias"),
    ("lm_head.layernorm.", "lm_head.layer_norm."),
    ("", ""),
)
"""Beginnings of the names of all other tensors; the first that fits is replaced."""
_LAYER = re.compile(r"^language_model\.encoder\.layers\.(\d+)\.(.+)$")
GATED = "mlp.linear_fc1."
"""Beginning of the name of a gated layer, whose halves are two tensors in some versions."""
HALVES = ("_w", "_v")
"""Ends of the names of these two tensors."""
OTHERS = re.compile(
    r"^(?:optimizer\.|chained_\d+\.|common_state/|rng_state(?:/|$)|rerun_state_machine_state)"
    r"|\._extra_state(?:/|$)"
)
"""Names of what is no parameter: the optimizer's state, states of random number generators, and
what Transformer Engine keeps for training in 8 bits."""


@dataclass(frozen=True)
class CoreName:
    """Place of a tensor of the table in Megatron core's form."""

    names: tuple[str, ...]
    """Names of the tensor, one of which is present; each may have `{layer}`."""
    layer: int | None
    """Number of the layer; None outside layers."""

    def separate(self) -> tuple[str, ...]:
        """Return the names with the layer's number."""
        return tuple(name.replace("layers.", f"layers.{self.layer}.", 1) for name in self.names)


def core_slots(spec: ModelSpec) -> tuple[Slot, ...]:
    """Return the table of a model, without copies for the last pipeline stage."""
    model = spec.model
    table = [slot for slot in slots(spec) if slot.place != "head copy"]
    if model.qk_layernorm:
        table += [
            Slot(f"language_model.{name}", (name,), ((model.head_dim,),), layer)
            for layer in range(model.num_layers)
            for name in _norms_of_heads(spec, layer)
        ]
    return tuple(table)


def _norms_of_heads(spec: ModelSpec, layer: int) -> Iterator[str]:
    for norm in ("q_layernorm", "k_layernorm"):
        for end in ("weight", "bias") if spec.model.normalization == "layernorm" else ("weight",):
            yield f"encoder.layers.{layer}.self_attention.{norm}.{end}"


def core_name(slot: Slot, family: str) -> CoreName:
    """Return the place of a slot's tensor."""
    stack = _STACKS[family]
    if match := _LAYER.match(slot.name):
        rest = match[2]
        old = next(beginning for beginning in _IN_LAYER if rest.startswith(beginning))
        names = tuple(f"{stack}.layers.{new}{rest.removeprefix(old)}" for new in _IN_LAYER[old])
        return CoreName(names, int(match[1]))
    old, new = next(pair for pair in _OUTSIDE if slot.name.startswith(pair[0]))
    return CoreName((new.format(stack=stack) + slot.name.removeprefix(old),), None)
