"""Lines of the tables that several classes of transformers share."""

from megacore.config.spec import ModelSpec
from megacore.convert.key_map import SAME, Entry, Layout, Shape, interleaved_rows, padded_rows


def embedding(spec: ModelSpec, theirs: str) -> Entry:
    """The table of tokens, without its padding there."""
    return _rows(spec, "embedding.word_embeddings.weight", theirs)


def output_layer(spec: ModelSpec, theirs: str) -> tuple[Entry, ...]:
    """The weights of the output layer, where it has its own."""
    untied = spec.model.untie_embeddings_and_output_weights
    return (_rows(spec, "output_layer.weight", theirs),) if untied else ()


def _rows(spec: ModelSpec, ours: str, theirs: str) -> Entry:
    shape = (spec.padded_vocab_size, spec.model.hidden_size)
    return Entry(ours, shape, (theirs,), padded_rows(spec.vocab_size, spec.padded_vocab_size))


def linear(
    ours: str, theirs: str, shape: Shape, *, bias: bool, weight_layout: Layout = SAME, bias_layout: Layout = SAME
) -> tuple[Entry, ...]:
    """A weight of `shape`, and the bias of its rows if there is one."""
    weight = Entry(f"{ours}.weight", shape, (f"{theirs}.weight",), weight_layout)
    return (weight, Entry(f"{ours}.bias", shape[:1], (f"{theirs}.bias",), bias_layout)) if bias else (weight,)


def norm(spec: ModelSpec, ours: str, theirs: str, size: int | None = None) -> tuple[Entry, ...]:
    """A norm of the model's kind, of vectors of `size` (None: hidden_size)."""
    shape = (size or spec.model.hidden_size,)
    return linear(ours, theirs, shape, bias=spec.model.normalization == "layernorm")


def interleaved(
    ours: str, theirs: tuple[str, ...], shape: Shape, heads: int, head_dim: int, *, bias: bool
) -> tuple[Entry, ...]:
    """One linear layer of rows [head][part][d] against a layer of rows [head][d] for each part."""
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


def queries_keys_values(spec: ModelSpec, ours: str, query: str, key: str, value: str) -> tuple[Entry, ...]:
    """The projections of self-attention `ours` against three linear layers of rows [head][d]."""
    model = spec.model
    hidden, size, bias = model.hidden_size, model.attention_size, model.add_bias_linear
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
