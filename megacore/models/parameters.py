"""How many parameters a model has, and a rank's part of it, counted without building it."""

from collections.abc import Iterator

from megacore.config.model import ModelConfig
from megacore.config.spec import ModelSpec
from megacore.pipeline_parallel.partition import ModelChunk

_SEGMENTS = 2
_ANSWERS = 2


def parameter_count(spec: ModelSpec) -> int:
    """Count the whole model, tied embeddings once, the vocabulary's padding included."""
    decoder = spec.model.decoder_layers if spec.family == "t5" else 0
    whole = ModelChunk(
        range(spec.model.num_layers),
        has_embedding=True,
        has_head=True,
        decoder_layers=range(decoder),
    )
    return sum(chunk_sizes(spec, whole, 1))


def chunk_sizes(spec: ModelSpec, chunk: ModelChunk, tensor: int) -> Iterator[int]:
    """Yield the elements of each parameter tensor of a chunk on one of `tensor` ranks.

    A head whose table of tokens is elsewhere too has a copy.
    """
    model, family = spec.model, spec.family
    table = spec.padded_vocab_size // tensor * model.hidden_size
    untied = model.untie_embeddings_and_output_weights
    yield from layer_sizes(model, tensor) * len(chunk.layers)
    yield from layer_sizes(model, tensor, decoder=True) * len(chunk.decoder_layers)
    if chunk.has_embedding or chunk.has_decoder_embedding or (chunk.has_head and not untied):
        yield table
    if chunk.has_embedding:
        yield from _embedding_sizes(spec)
    if chunk.has_head:
        if untied:
            yield table
        if model.norm_position == "pre":
            yield from _norm(model)
        if family == "bert":
            yield from _bert_head(spec, tensor)
    if family == "t5":
        for stack in (chunk.layers, chunk.decoder_layers):
            if stack:
                yield model.relative_attention_num_buckets * model.num_attention_heads // tensor
        # The encoder's final norm is where its last layer is, and not with the head.
        if chunk.layers and chunk.layers.stop == model.num_layers:
            yield from _norm(model)


def layer_sizes(model: ModelConfig, tensor: int = 1, *, decoder: bool = False) -> list[int]:
    """Elements of each parameter tensor of a layer on one of `tensor` ranks.

    Norms and the biases of row-parallel layers are whole. `decoder` is for a layer with cross
    attention.
    """
    hidden, inner, keys = (
        model.hidden_size,
        model.attention_size,
        2 * model.query_groups * model.head_dim,
    )
    grouped = model.query_groups < model.num_attention_heads
    column = [inner, keys] if grouped else [inner + keys]
    column += [model.ffn_size] * (2 if model.gated else 1)
    row = [inner, model.ffn_size]
    norms = 2 * _norm(model)
    if decoder:
        column += [inner, 2 * inner]
        row.append(inner)
        norms += _norm(model)
    if model.qk_layernorm:
        norms += 2 * _norm(model, model.head_dim)
    biases = (
        [width // tensor for width in column] + [hidden] * len(row) if model.add_bias_linear else []
    )
    return [width * hidden // tensor for width in column + row] + biases + norms


def _norm(model: ModelConfig, width: int | None = None) -> list[int]:
    """Parameters of a norm, of hidden states unless `width` says otherwise."""
    return [width or model.hidden_size] * (2 if model.normalization == "layernorm" else 1)


def _embedding_sizes(spec: ModelSpec) -> list[int]:
    """Return the sizes of what is beside the table of tokens."""
    model = spec.model
    rows = (
        [spec.max_position_embeddings]
        if model.position_embedding_type == "learned_absolute"
        else []
    )
    rows += [_SEGMENTS] if spec.family == "bert" else []
    return [count * model.hidden_size for count in rows] + (
        _norm(model) if model.norm_position == "post" else []
    )


def _bert_head(spec: ModelSpec, tensor: int) -> list[int]:
    """Return the sizes of the masked LM's dense layer, norm and vocabulary bias.

    With the pooler and the binary head, where there are any.
    """
    model, hidden = spec.model, spec.model.hidden_size
    dense = [hidden * hidden, hidden]
    sizes = [*dense, *_norm(model), spec.padded_vocab_size // tensor]
    return sizes + ([*dense, _ANSWERS * hidden, _ANSWERS] if model.bert_binary_head else [])
