"""How many parameters a model has, and a rank's part of it, counted without building it."""

from megacore import tokenizer
from megacore.config.model import ModelConfig
from megacore.config.run import RunConfig
from megacore.pipeline_parallel.partition import ModelChunk

_SEGMENTS = 2
_ANSWERS = 2


def parameter_count(config: RunConfig, vocab_size: int) -> int:
    """Parameters of the whole model, tied embeddings once, the vocabulary's padding included."""
    decoder = config.model.decoder_layers if config.family == "t5" else 0
    whole = ModelChunk(range(config.model.num_layers), has_embedding=True, has_head=True, decoder_layers=range(decoder))
    return chunk_parameters(config, vocab_size, whole, 1)


def padded_vocab_size(config: RunConfig, vocab_size: int) -> int:
    """Rows of the embedding (v)."""
    return tokenizer.padded_vocab_size(vocab_size, config.model.make_vocab_size_divisible_by)


def chunk_parameters(config: RunConfig, vocab_size: int, chunk: ModelChunk, tensor: int) -> int:
    """Parameters of a chunk on one of `tensor` ranks; a head whose table of tokens is elsewhere too has a copy."""
    model, family = config.model, config.family
    table = padded_vocab_size(config, vocab_size) // tensor * model.hidden_size
    count = len(chunk.layers) * layer_parameters(model, tensor)
    count += len(chunk.decoder_layers) * layer_parameters(model, tensor, decoder=True)
    untied = model.untie_embeddings_and_output_weights
    if chunk.has_embedding or chunk.has_decoder_embedding or (chunk.has_head and not untied):
        count += table
    if chunk.has_embedding:
        count += _embedding_parameters(config)
    if chunk.has_head:
        count += table if untied else 0
        count += _norm(model) if model.norm_position == "pre" else 0
        count += _bert_head(config, vocab_size, tensor) if family == "bert" else 0
    if family == "t5":
        stacks = (len(chunk.layers) > 0) + (len(chunk.decoder_layers) > 0)
        count += stacks * model.relative_attention_num_buckets * model.num_attention_heads // tensor
        # The encoder's final norm is where its last layer is, and not with the head.
        if chunk.layers and chunk.layers.stop == model.num_layers:
            count += _norm(model)
    return count


def layer_parameters(model: ModelConfig, tensor: int = 1, *, decoder: bool = False) -> int:
    """Parameters of one layer on one of `tensor` ranks; norms and the biases of row-parallel layers are whole.

    `decoder` is for a layer with cross attention.
    """
    hidden, ffn, inner = model.hidden_size, model.ffn_size, model.attention_size
    bias = int(model.add_bias_linear)
    inputs = 2 * ffn if model.gated else ffn
    divided = (inner + 2 * model.query_groups * model.head_dim + inputs) * (hidden + bias) + hidden * (inner + ffn)
    whole = 2 * _norm(model) + 2 * hidden * bias
    if model.qk_layernorm:
        whole += 2 * _norm(model) // hidden * model.head_dim
    if decoder:
        divided += 3 * inner * (hidden + bias) + hidden * inner
        whole += _norm(model) + hidden * bias
    return divided // tensor + whole


def _norm(model: ModelConfig) -> int:
    """Parameters of a norm of hidden states."""
    return model.hidden_size * (2 if model.normalization == "layernorm" else 1)


def _embedding_parameters(config: RunConfig) -> int:
    """What is beside the table of tokens."""
    model = config.model
    rows = config.max_position_embeddings if model.position_embedding_type == "learned_absolute" else 0
    rows += _SEGMENTS if config.family == "bert" else 0
    return rows * model.hidden_size + (_norm(model) if model.norm_position == "post" else 0)


def _bert_head(config: RunConfig, vocab_size: int, tensor: int) -> int:
    """The masked LM's dense layer, norm and bias of the vocabulary; the pooler and the binary head."""
    model, hidden = config.model, config.model.hidden_size
    dense = hidden * (hidden + 1)
    count = dense + _norm(model) + padded_vocab_size(config, vocab_size) // tensor
    return count + (dense + _ANSWERS * (hidden + 1) if model.bert_binary_head else 0)
