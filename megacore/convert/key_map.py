"""Bidirectional tables for renaming and relayout of tensors between two formats of a model.

An entry names one of our tensors, the tensors with the same numbers in the other format, and the
relayout between them. Both directions stream: the tensors of one entry are in memory at a time. The
source is any mapping from name to tensor, such as a dict or a lazily read checkpoint. The functions
at the end build entries that several formats share.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.config.spec import ModelSpec
from megacore.errors import ConversionError, listed

Shape = tuple[int, ...]


class LazyTensors(Mapping[str, Tensor]):
    """Mapping of tensors by name, each computed on access.

    Names, their number and the question for a name (`in`) compute no tensor.
    """

    def __init__(self, names: Iterable[str], compute: Callable[[str], Tensor]) -> None:
        """Take the names, in order, and the function that returns the tensor of a name."""
        self._names = dict.fromkeys(names)
        self._compute = compute

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._compute(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class Relayout:
    """Bijection between one of our tensors and one or more tensors of the other format."""

    split: Callable[[Tensor], tuple[Tensor, ...]]
    """Function from our tensor to the other format's tensors."""
    merge: Callable[[tuple[Tensor, ...]], Tensor]
    """Function from the other format's tensors to ours."""

    def then(
        self, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> "Relayout":
        """Compose with `forward` on each of their tensors; `backward` is its inverse."""
        return Relayout(
            lambda ours: tuple(forward(part) for part in self.split(ours)),
            lambda theirs: self.merge(tuple(backward(part) for part in theirs)),
        )


SAME = Relayout(lambda ours: (ours,), lambda theirs: theirs[0])
"""Identity."""


def qkv_blocks(heads: int, head_dim: int) -> Relayout:
    """Return the relayout from rows [head][q, k, v][d] to blocks [q, k, v][head][d].

    It applies to a weight [3h, h] or a bias [3h].
    """

    def to_blocks(ours: Tensor) -> Tensor:
        rest = ours.shape[1:]
        return ours.reshape(heads, 3, head_dim, *rest).transpose(0, 1).reshape(ours.shape)

    def to_heads(theirs: Tensor) -> Tensor:
        rest = theirs.shape[1:]
        return theirs.reshape(3, heads, head_dim, *rest).transpose(0, 1).reshape(theirs.shape)

    return SAME.then(to_blocks, to_heads)


def interleaved_rows(heads: int, parts: int, head_dim: int) -> Relayout:
    """Return the relayout from rows [head][part][d] to one tensor of rows [head][d] per part.

    It applies to weights and biases.
    """

    def split(ours: Tensor) -> tuple[Tensor, ...]:
        rest = ours.shape[1:]
        by_part = ours.reshape(heads, parts, head_dim, *rest).unbind(1)
        return tuple(part.reshape(heads * head_dim, *rest) for part in by_part)

    def merge(theirs: tuple[Tensor, ...]) -> Tensor:
        rest = theirs[0].shape[1:]
        return torch.stack([part.reshape(heads, head_dim, *rest) for part in theirs], 1).flatten(
            0, 2
        )

    return Relayout(split, merge)


def padded_rows(rows: int, padded: int) -> Relayout:
    """Return the relayout from `padded` rows to the first `rows`; its inverse pads with zeros."""
    if rows == padded:
        return SAME  # without a copy

    def pad(theirs: Tensor) -> Tensor:
        return torch.cat([theirs, theirs.new_zeros(padded - rows, *theirs.shape[1:])])

    return SAME.then(lambda ours: ours[:rows], pad)


@dataclass(frozen=True)
class Entry:
    """Entry of the table: one of our parameters and its counterparts."""

    ours: str
    """Global name of the parameter."""
    shape: Shape
    """Shape of the parameter; the other format's shapes follow from the layout."""
    theirs: tuple[str, ...]
    """Names in the other format."""
    layout: Relayout = SAME

    def their_shapes(self) -> dict[str, Shape]:
        """Return the shape of each tensor of the other format."""
        parts = self.layout.split(torch.empty(self.shape, device="meta"))
        return {name: tuple(part.shape) for name, part in zip(self.theirs, parts, strict=True)}


@dataclass(frozen=True)
class Fused:
    """Entry of several of our parameters, whose rows follow each other in one of their tensors."""

    parts: tuple[Entry, ...]
    """Entries whose tensors of the other format follow each other; they need no names there."""
    name: str
    """Name in the other format."""

    @property
    def ours(self) -> str:
        """Global names of the parameters, for messages."""
        return " and ".join(part.ours for part in self.parts)

    def their_shapes(self) -> dict[str, Shape]:
        """Return the shape of the tensor of the other format."""
        shapes = [shape for part in self.parts for shape in part.their_shapes().values()]
        return {self.name: (sum(shape[0] for shape in shapes), *shapes[0][1:])}

    def rows(self) -> dict[str, slice]:
        """Return the rows of each parameter in the tensor of the other format."""
        result, start = {}, 0
        for part in self.parts:
            end = start + sum(shape[0] for shape in part.their_shapes().values())
            result[part.ours], start = slice(start, end), end
        return result


class KeyMap:
    """Table of entries with unique names, read in both directions: `forward` and `ours`."""

    def __init__(self, entries: tuple[Entry | Fused, ...]) -> None:
        self.entries = entries
        self.our_shapes: dict[str, Shape] = {}
        """Shape of each of our tensors."""
        self.their_shapes: dict[str, Shape] = {}
        """Shape of each tensor of the other format, in the order of `forward`."""
        self._places: dict[str, tuple[Entry, Fused | None]] = {}
        for entry in entries:
            fused = entry if isinstance(entry, Fused) else None
            for part in entry.parts if isinstance(entry, Fused) else (entry,):
                _add_once(self.our_shapes, {part.ours: part.shape})
                self._places[part.ours] = part, fused
            _add_once(self.their_shapes, entry.their_shapes())

    def theirs(self, ours: str) -> tuple[str, ...]:
        """Return the names in the other format of the tensors that contain our tensor."""
        entry, fused = self._places[ours]
        return entry.theirs if fused is None else (fused.name,)

    def merged(self, ours: str, whole: Callable[[str], Tensor]) -> Tensor:
        """Return one of our tensors, contiguous, from those that `whole` returns by their names."""
        entry, fused = self._places[ours]
        if fused is None:
            parts = tuple(map(whole, entry.theirs))
        else:
            rows = whole(fused.name)[fused.rows()[ours]]
            sizes = [shape[0] for shape in entry.their_shapes().values()]
            parts = rows.split(sizes)  # type: ignore[no-untyped-call]
        return entry.layout.merge(parts).contiguous()

    def forward(self, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor of the other format, in the table's order.

        The tensors are views of our tensors if the layout permits.

        Raises:
            ConversionError: if `ours` lacks a name, has an unknown one, or has a wrong shape.
        """
        _check_names(ours, self.our_shapes, "the checkpoint")
        for entry in self.entries:
            parts = list(translated(entry, ours))
            names = tuple(entry.their_shapes())
            assert len(parts) == len(names), f"layout of {entry.ours} gives {len(parts)} tensors"
            for name in names:
                yield name, parts.pop(0)  # pop, so that no reference remains here

    def ours(
        self, theirs: Mapping[str, Tensor], where: str = "the transformers model"
    ) -> LazyTensors:
        """Return our tensors by name, in the table's order.

        Each tensor is computed on access and contiguous.

        Args:
            theirs: tensors of the other format by name.
            where: the other format's name in errors.

        Raises:
            ConversionError: if `theirs` lacks a name or has an unknown one; on access, if a tensor
                has a wrong shape.
        """
        _check_names(theirs, self.their_shapes, where)

        def whole(name: str) -> Tensor:
            return _taken(theirs, name, self.their_shapes[name], where)

        def merged(name: str) -> Tensor:
            tensor = self.merged(name, whole)
            assert tuple(tensor.shape) == self.our_shapes[name], f"layout of {name}"
            return tensor

        return LazyTensors(self.our_shapes, merged)


def translated(entry: Entry | Fused, ours: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Return an entry's tensors of the other format, views of our tensors if the layout permits.

    Raises:
        ConversionError: if a tensor has a wrong shape.
    """
    if isinstance(entry, Fused):
        return (torch.cat([rows for part in entry.parts for rows in translated(part, ours)]),)
    return entry.layout.split(_taken(ours, entry.ours, entry.shape, "the checkpoint"))


def _add_once(known: dict[str, Shape], added: dict[str, Shape]) -> None:
    duplicates = known.keys() & added.keys()
    assert not duplicates, f"the table names {sorted(duplicates)} twice"
    known.update(added)


def _check_names(tensors: Mapping[str, Tensor], expected: Mapping[str, Shape], where: str) -> None:
    mismatch = name_mismatch(tensors, expected)
    if mismatch is not None:
        raise ConversionError(
            f"{where} is of another model than the configuration: {mismatch}: give the "
            "configuration it was trained with"
        )


def _taken(tensors: Mapping[str, Tensor], name: str, shape: Shape, where: str) -> Tensor:
    tensor = tensors[name]
    if tuple(tensor.shape) != shape:
        raise ConversionError(
            f"{where}: {name} has shape {tuple(tensor.shape)} where the configuration says "
            f"{shape}: give the configuration the model was trained with"
        )
    return tensor


def name_mismatch(names: Collection[str], expected: Collection[str]) -> str | None:
    """Return clauses about tensors that are missing or unknown; None if the names agree."""
    missing = [name for name in expected if name not in names]
    unknown = [name for name in names if name not in expected]
    clauses = {"it lacks": missing, "it has no place for": unknown}
    return "; ".join(f"{verb} {listed(which)}" for verb, which in clauses.items() if which) or None


def decoder_pairs(
    spec: ModelSpec, embedding: str, layers: str, modules: Mapping[str, str], final: str
) -> list[tuple[str, str]]:
    """Return corresponding modules (ours, theirs) of a decoder, in execution order.

    Args:
        spec: spec of the model.
        embedding: name in the other format of the embedding.
        layers: name of the list of layers.
        modules: names within a layer by ours, in execution order.
        final: name of the final norm.
    """
    pairs = [("embedding", embedding)]
    for layer in range(spec.model.num_layers):
        ours, theirs = f"encoder.layers.{layer}", f"{layers}.{layer}"
        pairs += [(f"{ours}.{name}", f"{theirs}.{their}") for name, their in modules.items()]
        pairs.append((ours, theirs))
    return [*pairs, ("encoder.final_layernorm", final)]


def embedding(spec: ModelSpec, theirs: str) -> Entry:
    """Return the entry of the token embedding, without padding in the other format."""
    return _rows(spec, "embedding.word_embeddings.weight", theirs)


def output_layer(spec: ModelSpec, theirs: str) -> tuple[Entry, ...]:
    """Return the entry of the output layer's weight, if it is not tied to the embedding."""
    untied = spec.model.untie_embeddings_and_output_weights
    return (_rows(spec, "output_layer.weight", theirs),) if untied else ()


def _rows(spec: ModelSpec, ours: str, theirs: str) -> Entry:
    shape = (spec.padded_vocab_size, spec.model.hidden_size)
    return Entry(ours, shape, (theirs,), padded_rows(spec.vocab_size, spec.padded_vocab_size))


def linear(ours: str, theirs: str, shape: Shape, *, bias: bool) -> tuple[Entry, ...]:
    """Return the entries of a weight of `shape` and, if `bias`, the bias of its rows."""
    weight = Entry(f"{ours}.weight", shape, (f"{theirs}.weight",))
    return (weight, Entry(f"{ours}.bias", shape[:1], (f"{theirs}.bias",))) if bias else (weight,)


def norm(spec: ModelSpec, ours: str, theirs: str, size: int | None = None) -> tuple[Entry, ...]:
    """Return the entries of a norm of the model's kind over `size` (None: hidden_size)."""
    shape = (size or spec.model.hidden_size,)
    return linear(ours, theirs, shape, bias=spec.model.normalization == "layernorm")


def interleaved(
    ours: str, theirs: tuple[str, ...], shape: Shape, heads: int, head_dim: int, *, bias: bool
) -> tuple[Entry, ...]:
    """Return the entries of a linear layer with rows [head][part][d].

    The other format has one layer with rows [head][d] per part.
    """
    layout = interleaved_rows(heads, len(theirs), head_dim)
    kinds = ("weight", "bias") if bias else ("weight",)
    return tuple(
        Entry(
            f"{ours}.{kind}",
            shape if kind == "weight" else shape[:1],
            tuple(f"{name}.{kind}" for name in theirs),
            layout,
        )
        for kind in kinds
    )


def queries_keys_values(
    spec: ModelSpec, ours: str, query: str, key: str, value: str
) -> tuple[Entry, ...]:
    """Return the entries of self-attention's query, key and value projections.

    The other format has three linear layers with rows [head][d].
    """
    model = spec.model
    hidden, size, bias = model.hidden_size, model.attention_size, model.qkv_bias
    if model.query_groups == model.num_attention_heads:
        return interleaved(
            f"{ours}.query_key_value",
            (query, key, value),
            (3 * size, hidden),
            model.num_attention_heads,
            model.head_dim,
            bias=bias,
        )
    groups = model.query_groups
    rows = (2 * groups * model.head_dim, hidden)
    return (
        *linear(f"{ours}.query", query, (size, hidden), bias=bias),
        *interleaved(f"{ours}.key_value", (key, value), rows, groups, model.head_dim, bias=bias),
    )


def self_attention(spec: ModelSpec, ours: str, theirs: str) -> tuple[Entry, ...]:
    """Return the entries of self-attention's projections q_proj, k_proj, v_proj and o_proj."""
    model = spec.model
    names = (f"{theirs}.{part}_proj" for part in "qkv")
    shape = (model.hidden_size, model.attention_size)
    return (
        *queries_keys_values(spec, ours, *names),
        *linear(f"{ours}.dense", f"{theirs}.o_proj", shape, bias=model.add_bias_linear),
    )


def gated_mlp(spec: ModelSpec, ours: str, theirs: str) -> tuple[Entry, ...]:
    """Return the entries of a gated MLP's gate_proj, up_proj and down_proj."""
    model = spec.model
    hidden, inner, bias = model.hidden_size, model.ffn_size, model.add_bias_linear
    return (
        *linear(f"{ours}.dense_h_to_4h_gate", f"{theirs}.gate_proj", (inner, hidden), bias=bias),
        *linear(f"{ours}.dense_h_to_4h", f"{theirs}.up_proj", (inner, hidden), bias=bias),
        *linear(f"{ours}.dense_4h_to_h", f"{theirs}.down_proj", (hidden, inner), bias=bias),
    )


def fused_layer(
    spec: ModelSpec, ours: str, theirs: str, attention: str
) -> tuple[Entry | Fused, ...]:
    """Return the entries of Llama's layer with fused projections, without biases.

    The other format has one linear layer qkv_proj with rows [q, k, v][head][d] in its module
    `attention`, and one linear layer gate_up_proj with the rows of both in its gated MLP.
    """
    model = spec.model
    hidden, inner, size = model.hidden_size, model.ffn_size, model.attention_size
    parts = queries_keys_values(spec, f"{ours}.self_attention", "q", "k", "v")
    mlp, their_mlp = f"{ours}.mlp", f"{theirs}.mlp"
    gated = tuple(
        Entry(f"{mlp}.{name}.weight", (inner, hidden), (name,))
        for name in ("dense_h_to_4h_gate", "dense_h_to_4h")
    )
    dense, their_dense = f"{ours}.self_attention.dense", f"{theirs}.{attention}.o_proj"
    return (
        *norm(spec, f"{ours}.input_layernorm", f"{theirs}.input_layernorm"),
        Fused(parts, f"{theirs}.{attention}.qkv_proj.weight"),
        *linear(dense, their_dense, (hidden, size), bias=False),
        *norm(spec, f"{ours}.post_attention_layernorm", f"{theirs}.post_attention_layernorm"),
        Fused(gated, f"{their_mlp}.gate_up_proj.weight"),
        *linear(f"{mlp}.dense_4h_to_h", f"{their_mlp}.down_proj", (hidden, inner), bias=False),
    )
