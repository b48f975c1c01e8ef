"""Logical parts of our tensors, such as queries, keys and values, and names of permutations.

A fused projection has no axis of its own for queries, keys and values. A comparison needs them
apart: a converter that confuses two of them, or reads the rows of one program's layout as those of
another's, gives a permutation that has a name.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megacore.compare.relations import describe_permutation
from megacore.compare.side import Reading
from megacore.config.model import ModelConfig

LAYER = re.compile(r"^(?P<stack>\w+)\.layers\.(?P<number>\d+)\.(?P<local>.+)$")
_FUSED = "query_key_value"
_PARTS = ("query", "key", "value")
_GATE, _UP = "dense_h_to_4h_gate", "dense_h_to_4h"


class Named(NamedTuple):
    """Cause and description of an arrangement."""

    cause: str
    text: str


@dataclass(frozen=True)
class Group:
    """Tensors that are compared together because a converter can confuse them."""

    tensors: tuple[str, ...]
    """Global names of the tensors."""
    kind: str
    """attention, mlp or single."""

    def parts(self, reading: Reading) -> dict[str, Tensor]:
        """Return the logical parts by name; rows are heads x size of a head where there are any."""
        model = reading.spec.model
        parts: dict[str, Tensor] = {}
        for name in self.tensors:
            if name in reading.tensors:
                parts |= split(name, reading.rows(name), model)
        return parts


def split(name: str, tensor: Tensor, model: ModelConfig) -> dict[str, Tensor]:
    """Return the parts of one tensor by name."""
    stem, _, kind = name.rpartition(".")
    prefix, _, layer = stem.rpartition(".")
    if layer not in (_FUSED, "key_value"):
        return {name: tensor}
    names = _PARTS if layer == _FUSED else _PARTS[1:]
    head = model.head_dim
    if len(tensor) % (len(names) * head):
        return {name: tensor}
    by_part = tensor.reshape(-1, len(names), head, *tensor.shape[1:]).unbind(1)
    return {
        f"{prefix}.{part}.{kind}": value.reshape(-1, *tensor.shape[1:])
        for part, value in zip(names, by_part, strict=True)
    }


def tensor_of(part: str, tensors: Mapping[str, object]) -> str:
    """Return the tensor that contains a part."""
    if part in tensors:
        return part
    stem, _, kind = part.rpartition(".")
    prefix = stem.rpartition(".")[0]
    fused = f"{prefix}.{_FUSED}.{kind}"
    return fused if fused in tensors else f"{prefix}.key_value.{kind}"


def groups(names: Iterator[str] | list[str]) -> list[Group]:
    """Return the groups of a model's tensors, in order."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for name in names:
        stem, _, kind = name.rpartition(".")
        prefix, _, layer = stem.rpartition(".")
        if layer in (_FUSED, "key_value", "query") and "attention" in prefix:
            grouped.setdefault(("attention", f"{prefix}.{kind}"), []).append(name)
        elif layer in (_GATE, _UP):
            grouped.setdefault(("mlp", f"{prefix}.{kind}"), []).append(name)
        else:
            grouped.setdefault(("single", name), []).append(name)
    return [Group(tuple(tensors), kind) for (kind, _), tensors in grouped.items()]


def name_order(part: str, rows: Tensor, model: ModelConfig, *, columns: bool) -> Named:
    """Name the permutation p of a part's rows or columns, B = A[p]."""
    local = _local(part)
    head, heads = model.head_dim, model.num_attention_heads
    unit = "columns" if columns else "rows"
    if local in _PARTS or (columns and local == "dense" and "attention" in part):
        count = model.query_groups if local in ("key", "value") else heads
        if len(rows) % head == 0:
            count = len(rows) // head
        for named, order in _head_orders(count, head, model):
            if torch.equal(order, rows):
                return named
        return Named("head_order", f"{unit} {describe_permutation(rows)}")
    if local in ("q_layernorm", "k_layernorm"):
        for named, order in _head_orders(1, head, model):
            if torch.equal(order, rows):
                return named
    shift = describe_permutation(rows)
    if "position" in local and not columns:
        return Named("position_offset", f"{unit} {shift}")
    if local in ("word_embeddings", "output_layer") and not columns:
        return Named("vocabulary_order", f"{unit} {shift}")
    cause = "shard_order" if "blocks" in shift or "shifted" in shift else "order"
    return Named(cause, f"{unit} {shift}")


def _local(part: str) -> str:
    return part.rpartition(".")[0].rpartition(".")[2] or part


def _head_orders(heads: int, head: int, model: ModelConfig) -> Iterator[tuple[Named, Tensor]]:
    """Yield the known permutations of rows [heads][head], with cause and description."""
    ids = torch.arange(heads * head).reshape(heads, head)
    widths = {model.rotary_dim, head} if model.position_embedding_type == "rope" else {head}
    for width in sorted(widths):
        for text, inner in rope_orders(head, width):
            yield Named("rope_layout", text), ids[:, inner].reshape(-1)
    inverse = ids.reshape(head, heads).t().reshape(-1)
    yield Named("head_interleaving", "rows [head][d] are read as [d][head]"), inverse
    yield Named("head_interleaving", "rows [d][head] are read as [head][d]"), ids.t().reshape(-1)
    groups = model.query_groups
    if 1 < groups < heads and heads % groups == 0:
        share = heads // groups
        for count, layout in ((groups, "[group][query head]"), (share, "[query head][group]")):
            mixed = ids.reshape(count, heads // count, head).transpose(0, 1).reshape(-1)
            yield Named("query_groups_order", f"heads {layout} are read in the other order"), mixed
    yield Named("head_order", "heads in reverse order"), ids.flip(0).reshape(-1)


def rope_orders(head: int, width: int) -> list[tuple[str, Tensor]]:
    """Return the permutations of a head's first `width` elements that change rope's layout."""
    if width < 4 or width % 2:
        return []
    rest = torch.arange(width, head)
    halves = torch.arange(width).reshape(2, -1)
    pairs = torch.arange(width).reshape(-1, 2)
    share = "" if width == head else f" (the first {width} of {head} elements)"
    return [
        (f"halves are rotated where pairs belong{share}", torch.cat([pairs.t().reshape(-1), rest])),
        (
            f"pairs are rotated where halves belong{share}",
            torch.cat([halves.t().reshape(-1), rest]),
        ),
        (
            f"the two halves of each head are swapped{share}",
            torch.cat([halves.flip(0).reshape(-1), rest]),
        ),
        (
            f"the elements of each pair are swapped{share}",
            torch.cat([pairs.flip(1).reshape(-1), rest]),
        ),
    ]


def name_mixed(rows: Tensor, model: ModelConfig) -> Named | None:
    """Name the permutation p of stacked rows [query; key; value] of self-attention, B = A[p].

    A file's layout X that is read as layout Y gives p[Y] = X, where X and Y list the rows in the
    order of the file.
    """
    head, heads, groups = model.head_dim, model.num_attention_heads, model.query_groups
    if len(rows) != (heads + 2 * groups) * head:
        return None
    layouts = list(_layouts(heads, groups, head))
    rotations = [("", torch.arange(len(rows)))]
    queries = torch.arange(heads * head).reshape(heads, head)
    keys = heads * head + torch.arange(groups * head).reshape(groups, head)
    values = torch.arange((heads + groups) * head, len(rows))
    for text, inner in rope_orders(head, head):
        mixed = torch.cat([queries[:, inner].reshape(-1), keys[:, inner].reshape(-1), values])
        rotations.append((text, mixed))
    for (theirs, first), (ours, second) in itertools.product(layouts, layouts):
        order = torch.empty_like(rows)
        order[second] = first
        for text, rotation in rotations:
            if torch.equal(order[rotation], rows):
                cause = "qkv_order" if _same_but_parts(theirs, ours) else "qkv_interleaving"
                further = f", and {text}" if text else ""
                return Named(cause, f"rows {theirs} are read as {ours}{further}")
    return None


def _same_but_parts(first: str, second: str) -> bool:
    plain = [re.sub(r"\b[qkv]\b", "?", text) for text in (first, second)]
    return plain[0] == plain[1]


def _layouts(heads: int, groups: int, head: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the layouts of a fused projection: the rows of [q; k; v] in the order of the file."""
    sizes = {"q": heads, "k": groups, "v": groups}
    starts = {"q": 0, "k": heads * head, "v": (heads + groups) * head}
    ids = {
        part: starts[part] + torch.arange(sizes[part] * head).reshape(sizes[part], head)
        for part in "qkv"
    }
    for order in itertools.permutations("qkv"):
        text = ", ".join(order)
        yield f"[{text}][head][d]", torch.cat([ids[part].reshape(-1) for part in order])
        by_group = [ids[part].reshape(groups, -1, head) for part in order]
        name = "head" if groups == heads else "group"
        yield f"[{name}][{text}][d]", torch.cat(by_group, 1).reshape(-1)
        if groups == heads:
            stacked = torch.stack([ids[part] for part in order], 1)
            yield f"[head][d][{text}]", stacked.transpose(1, 2).reshape(-1)
            yield f"[d][{text}][head]", stacked.permute(2, 1, 0).reshape(-1)
            yield f"[{text}][d][head]", stacked.permute(1, 2, 0).reshape(-1)
