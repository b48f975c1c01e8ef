"""Bytes that a rank needs for training a GPT.

Activations follow Korthikanti et al. 2022 (arXiv:2205.05198, section 4), written out per element size: with 2-byte
elements, dropout and fused attention a layer's terms on a GPU add up to the paper's 34 s b h.
"""

from dataclasses import dataclass

from megacore.config.run import RunConfig

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
GIB = 2**30

_PROCESS_BYTES = {"cpu": 350 * 2**20, "cuda": 600 * 2**20}
"""The interpreter with torch (resident, measured), or a CUDA context with its libraries."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank, by what they hold."""

    weights: int
    """The weights that the model computes with, and under bf16 or fp16 the fp32 main weights."""
    gradients: int
    """The fp32 gradients that accumulate over micro batches."""
    optimizer: int
    """Adam's two fp32 moments."""
    activations: int
    """What the forward pass keeps for the backward pass, for one micro batch."""
    logits: int
    """The output layer's logits and their gradient."""
    process: int
    """Interpreter and libraries, or CUDA context."""

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.process


def parameter_count(config: RunConfig, vocab_size: int) -> int:
    """Parameters of the model, tied embeddings once, the vocabulary's padding included."""
    model = config.model
    hidden, ffn = model.hidden_size, model.ffn_size
    attention = 4 * hidden * hidden + 4 * hidden
    mlp = 2 * hidden * ffn + ffn + hidden
    layernorms = 2 * 2 * hidden
    embeddings = (padded_vocab_size(config, vocab_size) + config.max_position_embeddings) * hidden
    return embeddings + model.num_layers * (attention + mlp + layernorms) + 2 * hidden


def padded_vocab_size(config: RunConfig, vocab_size: int) -> int:
    """Rows of the embedding (v)."""
    multiple = config.model.make_vocab_size_divisible_by
    return -(-vocab_size // multiple) * multiple


def layer_activation_bytes(config: RunConfig, element: int, device_type: str) -> int:
    """What one layer keeps for its backward pass, in bytes, for a micro batch of b samples.

    `element` is the size of an activation in bytes. Fused attention keeps q, k, v and its output. On CPUs torch has
    none with dropout: then softmax, mask and product are kept in fp32, [b, n, s, s] each, and the masks of hidden
    dropout are as wide as activations instead of one byte.
    """
    model = config.model
    tokens = config.train.micro_batch_size * config.data.seq_length
    hidden, ffn = model.hidden_size, model.ffn_size
    layernorms = 2 * element * hidden
    attention = 5 * element * hidden
    mlp = element * hidden + 2 * element * ffn
    masks = 2 * mask_bytes(config, element, device_type) * hidden
    fused = device_type == "cuda" or not model.attention_dropout
    scores = 0 if fused else 3 * 4 * model.num_attention_heads * config.data.seq_length
    return tokens * (layernorms + attention + mlp + masks + scores)


def mask_bytes(config: RunConfig, element: int, device_type: str) -> int:
    """Bytes of a hidden dropout's mask per activation."""
    if not config.model.hidden_dropout:
        return 0
    return 1 if device_type == "cuda" else element


def estimate_memory(config: RunConfig, vocab_size: int, precision: str, device_type: str) -> MemoryEstimate:
    """Peak memory of one data-parallel rank; `precision` is fp32, bf16 or fp16, `device_type` cpu or cuda."""
    parameters = parameter_count(config, vocab_size)
    element = ELEMENT_BYTES[precision]
    model, tokens = config.model, config.train.micro_batch_size * config.data.seq_length
    half = precision != "fp32"
    layer = layer_activation_bytes(config, element, device_type)
    kept = element * tokens * model.hidden_size
    layers = model.num_layers * kept + layer if config.train.recompute == "full" else model.num_layers * layer
    embedding_mask = tokens * model.hidden_size * mask_bytes(config, element, device_type)
    return MemoryEstimate(
        weights=parameters * (4 + element if half else 4),
        gradients=4 * parameters,
        optimizer=8 * parameters,
        activations=layers + embedding_mask + 2 * kept,  # the final norm's input and output
        logits=tokens * padded_vocab_size(config, vocab_size) * (4 + element if half else 4),
        process=_PROCESS_BYTES[device_type],
    )
