"""Small models of every family, and the bytes that autograd saves for them."""

import gc

import torch

from megacore.config import RunConfig, load_config
from megacore.config.spec import SpecialTokens
from megacore.models.build import build_model
from megacore.models.inputs import input_rules
from megacore.parallel.mesh import ProcessMesh

VOCAB_SIZE = 2000
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LLAMA = {
    "model.position_embedding_type": "rope",
    "model.normalization": "rmsnorm",
    "model.activation": "swiglu",
    "model.add_bias_linear": False,
    "model.untie_embeddings_and_output_weights": True,
    "model.qk_layernorm": True,
    "model.num_query_groups": 2,
    "model.kv_channels": 64,
}
GEMMA2 = LLAMA | {
    "model.activation": "geglu_tanh",
    "model.qk_layernorm": False,
    "model.norm_position": "sandwich",
    "model.apply_layernorm_1p": True,
    "model.scale_embeddings": True,
    "model.sliding_window": 64,
    "model.window_attn_skip_freq": 2,
    "model.attn_logit_softcapping": 50.0,
    "model.final_logit_softcapping": 30.0,
}
OLMO2 = LLAMA | {"model.norm_position": "reordered", "model.qk_layernorm_scope": "projection"}
SENTENCES = {
    "data.append_eod": False,
    "data.split_sentences": True,
    "data.sentence_splitter": "rules",
}
BERT = {"family": "bert", "model.activation": "gelu", **SENTENCES}
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
T5 = {
    "family": "t5",
    "model.position_embedding_type": "relative",
    "model.normalization": "rmsnorm",
    "model.activation": "geglu_tanh",
    "model.add_bias_linear": False,
    "model.num_decoder_layers": 2,
    "data.span_corruption.decoder_seq_length": 64,
    **SENTENCES,
}


def tiny(dropout: float = 0.0, recompute: str = "none", **overrides: object) -> RunConfig:
    values = {
        "model.num_layers": 3,
        "model.hidden_dropout": dropout,
        "model.attention_dropout": dropout,
        "data.seq_length": 128,
        "train.micro_batch_size": 4,
        "train.recompute": recompute,
    }
    return load_config("gpt2-tiny", {**values, **overrides})


def layout(tp: int = 1, pp: int = 1, v: int = 1, **overrides: object) -> RunConfig:
    """Return 8 layers with 32 micro batches of 2 for one replica."""
    values = {
        "model.num_layers": 8,
        "parallel.tensor_model_parallel_size": tp,
        "parallel.pipeline_model_parallel_size": pp,
        "parallel.virtual_pipeline_model_parallel_size": v,
        "parallel.pipeline_partition": "uniform",
        "train.micro_batch_size": 2,
        "train.global_batch_size": 64,
        "launch.nproc_per_node": "auto",
    }
    return tiny(0.1, **values | overrides)


def family(**overrides: object) -> RunConfig:
    """Return a tiny model of any family, with the special tokens that it needs."""
    special = {
        "kind": "train-bpe",
        "vocab_size": VOCAB_SIZE,
        "special_tokens": SPECIAL,
        "vocab_extra_ids": 100,
    }
    return tiny(**{"data.tokenizer": special, "launch.nproc_per_node": "auto", **overrides})


def saved_bytes(config: RunConfig, precision: str) -> int:
    """Return the bytes that autograd saves in a forward pass, without parameters and logits."""
    gc.freeze()  # the search for tensors then sees only new objects
    try:
        return _saved_bytes(config, precision)
    finally:
        gc.unfreeze()


def _saved_bytes(config: RunConfig, precision: str) -> int:
    model = build_model(config, VOCAB_SIZE, ProcessMesh.serial()).to(DTYPES[precision]).train()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 2 and tensor.shape == (tensor.shape[0], model.padded_vocab_size):
            return tensor.detach()  # the logits' gradient, which the plan counts separately
        saved[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor.detach()  # a saved output would keep its own graph alive

    samples, length = config.train.micro_batch_size, config.data.seq_length
    decoder = config.data.span_corruption.decoder_seq_length
    width = {"gpt": length + 1, "bert": 3 * length + 1, "t5": length + decoder}[config.family]
    model_input = input_rules(config, SpecialTokens(eod=0, pad=0)).read(
        torch.ones(samples, width, dtype=torch.int64)
    )
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = model.run(model_input, dropout_seed=1)
    assert all(term.losses.isfinite().all() for term in losses.values())
    # Recomputed layers keep the bias that they share without calling the hooks.
    gc.collect()
    for candidate in gc.get_objects():
        if (
            type(candidate) is torch.Tensor
            and candidate.dim() == 4
            and candidate.shape[2:] in {(length, length), (decoder, decoder)}
        ):
            pack(candidate)
    return sum(
        tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in parameters
    )
