"""Parameters that several pipeline stages hold: their gradients are summed, and the norm counts them once."""

from collections.abc import Iterator

from megacore.config.run import RunConfig
from megacore.pipeline_parallel.partition import ModelChunk, chunks_of

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
"""The table of tokens, of a tied model the weight of the output layer too (Press and Wolf 2017)."""
ENCODER_BIAS = "encoder.relative_attention_bias.weight"
"""T5's relative bias, which all layers of the encoder share (Raffel et al. 2019)."""
DECODER_BIAS = "decoder.relative_attention_bias.weight"
"""The same of the decoder."""


def copied_parameters(config: RunConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """The stages that hold a parameter, by its global name; parameters of one stage alone are left out.

    Raises ParallelLayoutError where the model cannot be divided.
    """
    stages = config.parallel.pipeline_model_parallel_size
    holders: dict[str, list[int]] = {}
    for number, chunk in enumerate(chunks_of(config, vocab_size)):
        for name in _candidates(config, chunk):
            holders.setdefault(name, []).append(number % stages)
    found = {name: tuple(sorted(set(numbers))) for name, numbers in holders.items()}
    return {name: numbers for name, numbers in found.items() if len(numbers) > 1}


def shared_stages(config: RunConfig, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Every set of stages that hold the same parameters: the groups that a mesh needs, in one order."""
    return tuple(sorted(set(copied_parameters(config, vocab_size).values())))


def _candidates(config: RunConfig, chunk: ModelChunk) -> Iterator[str]:
    """Parameters of a chunk that other chunks may hold too."""
    model = config.model
    tied = not model.untie_embeddings_and_output_weights
    if chunk.has_embedding or chunk.has_decoder_embedding or (chunk.has_head and tied):
        yield WORD_EMBEDDINGS
    if model.position_embedding_type == "relative":
        if chunk.layers:
            yield ENCODER_BIAS
        if chunk.decoder_layers:
            yield DECODER_BIAS
