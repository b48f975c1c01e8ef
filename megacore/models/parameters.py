"""Parameter counts of a model and of a rank's part, computed without building the model."""

from collections.abc import Iterator

from megacore.config.model import ModelConfig
from megacore.config.spec import ModelSpec
from megacore.pipeline_parallel.partition import ModelChunk

SEGMENTS = 2
"""Number of segments of BERT: rows of the table of token types."""
BINARY_CLASSES = 2
"""Number of classes of BERT's binary head: segments in order, or not."""


def parameter_count(spec: ModelSpec) -> int:
    """Count the whole model's parameters, tied embeddings once, including vocabulary padding."""
    decoder = spec.model.decoder_layers if spec.family == "t5" else 0
    whole_model = ModelChunk(
        range(spec.model.num_layers),
        has_embedding=True,
        has_head=True,
        decoder_layers=range(decoder),
    )
    return sum(chunk_sizes(spec, whole_model, 1))


def chunk_sizes(spec: ModelSpec, chunk: ModelChunk, tensor: int) -> Iterator[int]:
    """Yield the number of elements of each parameter of a chunk on one of `tensor` ranks.

    A tied head in another chunk than the embedding has its own copy of the token table.
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
        if model.norm_position != "post":
            yield from _norm(model)
        if family == "bert":
            yield from _bert_head(spec, tensor)
    if family == "t5":
        for stack in (chunk.layers, chunk.decoder_layers):
            if stack:
                yield model.relative_attention_num_buckets * model.num_attention_heads // tensor
        # The encoder's final norm is in the chunk with its last layer, not with the head.
        if chunk.layers and chunk.layers.stop == model.num_layers:
            yield from _norm(model)


def layer_sizes(model: ModelConfig, tensor: int = 1, *, decoder: bool = False) -> list[int]:
    """Return the number of elements of each parameter of a layer on one of `tensor` ranks.

    Norms and the biases of row-parallel layers are not divided. A `decoder` layer has cross
    attention.
    """
    hidden, inner, keys = (
        model.hidden_size,
        model.attention_size,
        2 * model.query_groups * model.head_dim,
    )
    grouped = model.query_groups < model.num_attention_heads
    column = [inner, keys] if grouped else [inner + keys]
    qkv_biases = [width // tensor for width in column] if model.add_qkv_bias else []
    column += [model.ffn_size] * (2 if model.gated else 1)
    row = [inner, model.ffn_size]
    norms = (4 if model.norm_position == "sandwich" else 2) * _norm(model)
    if decoder:
        column += [inner, 2 * inner]
        row.append(inner)
        norms += _norm(model)
    if model.qk_layernorm:
        whole = model.qk_layernorm_scope == "projection"
        widths = (model.attention_size, keys // 2) if whole else (model.head_dim, model.head_dim)
        norms += [size for width in widths for size in _norm(model, width)]
    biases = (
        [width // tensor for width in column] + [hidden] * len(row)
        if model.add_bias_linear
        else qkv_biases
    )
    return [width * hidden // tensor for width in column + row] + biases + norms


def _layer_matrices(model: ModelConfig, *, decoder: bool = False) -> list[tuple[int, int]]:
    """Return rows and columns of the matrices of a layer, q, k and v separately.

    They are whole, not divided over tensor-parallel ranks.
    """
    hidden, inner, keys = (
        model.hidden_size,
        model.attention_size,
        model.query_groups * model.head_dim,
    )
    rows = [inner, keys, keys, *[model.ffn_size] * (2 if model.gated else 1)]
    columns = [inner, model.ffn_size]
    if decoder:
        rows += [inner] * 3
        columns.append(inner)
    return [(width, hidden) for width in rows] + [(hidden, width) for width in columns]


def chunk_matrices(model: ModelConfig, chunk: ModelChunk) -> list[tuple[int, int]]:
    """Return rows and columns of the matrices of a chunk's layers, as `_layer_matrices`."""
    return _layer_matrices(model) * len(chunk.layers) + _layer_matrices(model, decoder=True) * len(
        chunk.decoder_layers
    )


def _norm(model: ModelConfig, width: int | None = None) -> list[int]:
    """Return the sizes of a norm's parameters; `width` defaults to the hidden size."""
    return [width or model.hidden_size] * (2 if model.normalization == "layernorm" else 1)


def _embedding_sizes(spec: ModelSpec) -> list[int]:
    """Return the sizes of the embedding's parameters other than the token table."""
    model = spec.model
    rows = (
        [spec.max_position_embeddings]
        if model.position_embedding_type == "learned_absolute"
        else []
    )
    rows += [SEGMENTS] if spec.family == "bert" else []
    return [count * model.hidden_size for count in rows] + (
        _norm(model) if model.norm_position == "post" else []
    )


def _bert_head(spec: ModelSpec, tensor: int) -> list[int]:
    """Return the sizes of the masked-LM head's dense layer, norm and vocabulary bias.

    The pooler and the binary head are included if there are any.
    """
    model, hidden = spec.model, spec.model.hidden_size
    dense = [hidden * hidden, hidden]
    sizes = [*dense, *_norm(model), spec.padded_vocab_size // tensor]
    return sizes + (
        [*dense, BINARY_CLASSES * hidden, BINARY_CLASSES] if model.bert_binary_head else []
    )
