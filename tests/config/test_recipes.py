"""The numbers of public recipes in the shipped configurations."""

import json
from typing import Any

import pytest

from megacore.config import RunConfig, load_config, read_config
from tests.config.test_load import CONF_DIR

NAMES = sorted(path.stem for path in CONF_DIR.glob("*.yaml"))

GPT2_345M = {
    "model.num_layers": 24,
    "model.hidden_size": 1024,
    "model.num_attention_heads": 16,
    "model.max_position_embeddings": 1024,
    "model.hidden_dropout": 0.1,
    "model.attention_dropout": 0.1,
    "model.init_method_std": 0.02,
    "model.layernorm_epsilon": 1e-5,
    "model.make_vocab_size_divisible_by": 128,
    "data.seq_length": 1024,
    "data.split": "949,50,1",
    "data.append_eod": True,
    "data.source.kind": "hub",
    "data.source.dataset": "Salesforce/wikitext",
    "data.source.config": "wikitext-103-raw-v1",
    "data.source.split": "train",
    "data.source.key": "text",
    "data.tokenizer.kind": "hf",
    "data.tokenizer.name": "openai-community/gpt2",
    "optim.lr": 1.5e-4,
    "optim.min_lr": 1e-5,
    "optim.lr_decay_style": "cosine",
    "optim.lr_decay_iters": 320_000,
    "optim.lr_warmup_fraction": 0.01,
    "lr_warmup_iters": 3_200,
    "optim.weight_decay": 0.01,
    "optim.adam_beta1": 0.9,
    "optim.adam_beta2": 0.999,
    "optim.adam_eps": 1e-8,
    "optim.clip_grad": 1.0,
    "optim.loss_scale.initial": 2.0**32,
    "optim.loss_scale.window": 1000,
    "optim.loss_scale.hysteresis": 2,
    "optim.loss_scale.minimum": 1.0,
    "train.train_iters": 500_000,
    "train.precision": "fp16",
    "train.recompute": "full",
    "train.log_interval": 100,
    "train.eval_interval": 1_000,
    "train.eval_iters": 10,
    "checkpoint.save_interval": 10_000,
    "seed": 1234,
}

DEEPSPEED_345M = {
    **{key: value for key, value in GPT2_345M.items() if key != "optim.lr_warmup_fraction"},
    "lr_warmup_iters": 32_000,
    "optim.adam_beta2": 0.95,
    "train.eval_interval": 100,
    "train.micro_batch_size": 8,
    "train.global_batch_size": 32,
    "engine": "deepspeed",
    "launch.nproc_per_node": 4,
    "launch.kind": "torchrun",
}
"""Megatron-LM's values, and those in which the public DeepSpeed recipe differs."""

GPT_7B = DEEPSPEED_345M | {
    "model.num_layers": 32,
    "model.hidden_size": 4096,
    "model.num_attention_heads": 32,
    "model.max_position_embeddings": 2024,
    "data.seq_length": 2024,
    "train.micro_batch_size": 4,
    "train.global_batch_size": 16,
}

BERT_345M = {
    "family": "bert",
    "data.source.dataset": "Salesforce/wikitext",
    "data.split_sentences": True,
    "data.append_eod": False,
    "data.split": "949,50,1",
    "data.seq_length": 512,
    "data.masked_lm.masked_lm_prob": 0.15,
    "data.masked_lm.short_seq_prob": 0.1,
    "data.masked_lm.whole_word_masking": True,
    "data.masked_lm.max_ngram": 3,
    "data.masked_lm.sentence_task": "sop",
    "model.num_layers": 24,
    "model.hidden_size": 1024,
    "model.num_attention_heads": 16,
    "model.max_position_embeddings": 512,
    "model.norm_position": "pre",
    "model.bert_binary_head": True,
    "model.hidden_dropout": 0.1,
    "model.attention_dropout": 0.1,
    "optim.lr": 1e-4,
    "optim.min_lr": 1e-5,
    "optim.lr_decay_style": "linear",
    "optim.lr_decay_iters": 990_000,
    "lr_warmup_iters": 9_900,
    "optim.weight_decay": 0.01,
    "optim.clip_grad": 1.0,
    "train.micro_batch_size": 4,
    "train.global_batch_size": 8,
    "train.train_iters": 2_000_000,
    "train.precision": "fp16",
    "train.log_interval": 100,
    "train.eval_interval": 1_000,
    "train.eval_iters": 10,
    "checkpoint.save_interval": 10_000,
    "launch.nproc_per_node": 1,
}

TINY = {
    "data.source.kind": "source_tree",
    "data.source.path": None,
    "launch.nproc_per_node": 2,
    "train.precision": "auto",
    "launch.allow_cpu": False,
}
"""Values of a first run: a source that is always present, and two cores."""

ZERO2 = json.loads((CONF_DIR / "ds" / "zero2.json").read_text(encoding="utf-8"))

RECIPES: dict[str, dict[str, Any]] = {
    "gpt2-345m": GPT2_345M
    | {"train.micro_batch_size": 4, "train.global_batch_size": 8, "launch.nproc_per_node": 1},
    "gpt2-345m-8gpu": GPT2_345M
    | {"train.micro_batch_size": 8, "train.global_batch_size": 64, "launch.nproc_per_node": 8},
    "gpt2-345m-h200": GPT2_345M
    | {
        "train.micro_batch_size": 32,
        "train.global_batch_size": 64,
        "train.precision": "bf16",
        "train.recompute": "none",
        "launch.nproc_per_node": 1,
    },
    "gpt2-345m-ja": GPT2_345M
    | {
        "data.source.dataset": "wikimedia/wikipedia",
        "data.source.config": "20231101.ja",
        "data.seq_length": 2048,
        "data.tokenizer.name": "llm-jp/llm-jp-3-1.8b",
        "data.tokenizer.eod_token": "</s>",
        "data.shuffle_documents": True,
        "model.max_position_embeddings": 2048,
        "optim.lr_decay_iters": 30_000,
        "lr_warmup_iters": 300,
        "train.train_iters": 30_000,
        "train.micro_batch_size": 4,
        "train.global_batch_size": 64,
        "launch.nproc_per_node": 8,
    },
    "codeparrot-small": {
        "data.source.kind": "hub",
        "data.source.dataset": "codeparrot/codeparrot-clean-train",
        "data.source.key": "content",
        "data.source.split": "train",
        "data.tokenizer.name": "codeparrot/codeparrot-small",
        "data.append_eod": True,
        "data.split": "969,30,1",
        "data.seq_length": 1024,
        "model.num_layers": 12,
        "model.hidden_size": 768,
        "model.num_attention_heads": 12,
        "model.max_position_embeddings": 1024,
        "model.hidden_dropout": 0.1,
        "model.attention_dropout": 0.1,
        "optim.lr": 5e-4,
        "optim.min_lr": 0.0,
        "optim.lr_decay_style": "cosine",
        "optim.lr_decay_iters": 150_000,
        "optim.lr_warmup_iters": 2_000,
        "optim.weight_decay": 0.1,
        "optim.adam_beta1": 0.9,
        "optim.adam_beta2": 0.999,
        "optim.clip_grad": 1.0,
        "train.micro_batch_size": 12,
        "train.global_batch_size": 192,
        "train.train_iters": 150_000,
        "train.precision": "fp16",
        "train.recompute": "none",
        "train.log_interval": 10,
        "train.eval_interval": 200,
        "train.eval_iters": 10,
        "checkpoint.save_interval": 2_000,
        "launch.nproc_per_node": 8,
    },
    "bert-345m": BERT_345M,
    "bert-345m-8gpu": BERT_345M
    | {
        "train.global_batch_size": 32,
        "train.train_iters": 1_000_000,
        "launch.nproc_per_node": 8,
    },
    "t5-220m": {
        "family": "t5",
        "data.tokenizer.vocab_extra_ids": 100,
        "data.split": "99982,9,9",
        "data.split_sentences": True,
        "data.append_eod": False,
        "data.seq_length": 512,
        "data.span_corruption.noise_density": 0.15,
        "data.span_corruption.mean_span_length": None,
        "data.span_corruption.short_seq_prob": 0.1,
        "data.span_corruption.decoder_seq_length": 128,
        "model.num_layers": 12,
        "model.decoder_layers": 12,
        "model.hidden_size": 768,
        "model.num_attention_heads": 12,
        "model.kv_channels": 64,
        "model.ffn_hidden_size": 3072,
        "model.max_position_embeddings": 512,
        "model.normalization": "rmsnorm",
        "model.position_embedding_type": "relative",
        "model.activation": "relu",
        "model.add_bias_linear": False,
        "model.untie_embeddings_and_output_weights": False,
        "optim.lr": 1e-4,
        "optim.min_lr": 1e-5,
        "optim.lr_decay_style": "linear",
        "optim.lr_decay_iters": 1_000_000,
        "lr_warmup_iters": 10_000,
        "optim.weight_decay": 0.01,
        "optim.clip_grad": 1.0,
        "train.micro_batch_size": 64,
        "train.global_batch_size": 512,
        "train.train_iters": 1_000_000,
        "train.precision": "bf16",
        "train.log_interval": 100,
        "train.eval_interval": 1_000,
        "train.eval_iters": 10,
        "checkpoint.save_interval": 500,
        "launch.nproc_per_node": 8,
    },
    "llama-1b": {
        "family": "gpt",
        "data.seq_length": 2048,
        "model.num_layers": 22,
        "model.hidden_size": 2048,
        "model.num_attention_heads": 32,
        "model.query_groups": 4,
        "model.ffn_hidden_size": 5632,
        "model.max_position_embeddings": 2048,
        "model.position_embedding_type": "rope",
        "model.rotary_base": 10_000.0,
        "model.normalization": "rmsnorm",
        "model.layernorm_epsilon": 1e-5,
        "model.activation": "swiglu",
        "model.add_bias_linear": False,
        "model.untie_embeddings_and_output_weights": True,
        "model.hidden_dropout": 0.0,
        "model.attention_dropout": 0.0,
        "optim.lr": 4e-4,
        "optim.min_lr": 4e-5,
        "optim.lr_decay_style": "cosine",
        "lr_warmup_iters": 2_000,
        "optim.weight_decay": 0.1,
        "optim.adam_beta1": 0.9,
        "optim.adam_beta2": 0.95,
        "optim.clip_grad": 1.0,
        "train.global_batch_size": 1_024,
        "train.precision": "bf16",
        "launch.nproc_per_node": 8,
    },
    "gpt2-345m-zero1": DEEPSPEED_345M | {"deepspeed.zero_stage": 1, "deepspeed.config": None},
    "gpt2-345m-zero2": DEEPSPEED_345M | {"deepspeed.zero_stage": None, "deepspeed.config": ZERO2},
    "gpt2-7b": GPT_7B | {"deepspeed.zero_stage": 1},
    "gpt2-7b-native": GPT_7B | {"engine": "native", "parallel.data_parallel_sharding": "gradients"},
    "gpt2-xl-zero3-offload": {
        "data.source.dataset": "Salesforce/wikitext",
        "data.source.config": "wikitext-2-raw-v1",
        "data.tokenizer.name": "openai-community/gpt2",
        "data.seq_length": 128,
        "model.num_layers": 48,
        "model.hidden_size": 1600,
        "model.num_attention_heads": 25,
        "model.max_position_embeddings": 1024,
        "optim.lr": 5e-4,
        "train.micro_batch_size": 16,
        "train.global_batch_size": 16,
        "train.precision": "fp16",
        "engine": "deepspeed",
        "deepspeed.zero_stage": 3,
        "deepspeed.offload_optimizer": "cpu",
        "deepspeed.offload_param": "cpu",
        "launch.nproc_per_node": 1,
    },
    "gpt2-13b-3d": {
        "data.seq_length": 2048,
        "model.num_layers": 40,
        "model.hidden_size": 5120,
        "model.num_attention_heads": 40,
        "model.max_position_embeddings": 2048,
        "model.hidden_dropout": 0.0,
        "model.attention_dropout": 0.0,
        "optim.lr": 1e-4,
        "optim.min_lr": 1e-5,
        "optim.lr_decay_style": "cosine",
        "optim.weight_decay": 0.1,
        "optim.adam_beta1": 0.9,
        "optim.adam_beta2": 0.95,
        "optim.adam_eps": 1e-8,
        "optim.clip_grad": 1.0,
        "train.global_batch_size": 1_024,
        "train.precision": "bf16",
        "train.recompute": "full",
        "engine": "deepspeed",
        "parallel.tensor_model_parallel_size": 2,
        "parallel.sequence_parallel": True,
        "parallel.pipeline_model_parallel_size": 2,
        "deepspeed.zero_stage": 1,
        "launch.nproc_per_node": 8,
    },
    "bert-tiny": TINY
    | {
        "family": "bert",
        "data.tokenizer.kind": "train-wordpiece",
        "data.sentence_splitter": "rules",
        "model.bert_binary_head": True,
    },
    "t5-tiny": TINY
    | {
        "family": "t5",
        "data.tokenizer.kind": "train-bpe",
        "data.sentence_splitter": "rules",
        "model.position_embedding_type": "relative",
        "model.normalization": "rmsnorm",
    },
    "llama-tiny": TINY
    | {
        "family": "gpt",
        "data.tokenizer.kind": "train-bpe",
        "model.position_embedding_type": "rope",
        "model.normalization": "rmsnorm",
        "model.activation": "swiglu",
        "model.query_groups": 2,
        "model.add_bias_linear": False,
    },
    "mixture-tiny": {
        "data.tokenizer.kind": "train-bpe",
        "evaluate.contamination": "remove",
        "evaluate.zero_shot.wikitext": "README.md",
        "launch.nproc_per_node": 2,
        "train.train_iters": 300,
    },
    "gpt2-tiny": TINY | {"data.tokenizer.kind": "train-bpe", "data.tokenizer.vocab_size": 8_192},
}


def value_at(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def test_13b_trains_on_the_papers_number_of_tokens() -> None:
    """Brown et al. 2020, appendix B: 375 M tokens of warm-up, decay over 260 B, 300 B in all."""
    config = load_config("gpt2-13b-3d", conf_dir=CONF_DIR)
    batch = config.train.global_batch_size * config.data.seq_length
    assert batch == pytest.approx(2e6, rel=0.05)
    assert config.lr_warmup_iters * batch == pytest.approx(375e6, rel=0.002)
    assert config.lr_decay_iters * batch == pytest.approx(260e9, rel=1e-4)
    assert config.train.train_iters * batch == pytest.approx(300e9, rel=1e-4)


def test_every_conf_has_a_recipe() -> None:
    assert sorted(RECIPES) == NAMES


@pytest.mark.parametrize(
    ("name", "key", "expected"),
    [(name, key, value) for name, recipe in RECIPES.items() for key, value in recipe.items()],
)
def test_conf_has_the_value_of_its_recipe(name: str, key: str, expected: Any) -> None:
    assert value_at(load_config(name, conf_dir=CONF_DIR), key) == expected


@pytest.mark.parametrize("name", NAMES)
def test_conf_survives_a_round_trip(name: str, tmp_path: Any) -> None:
    config = load_config(name, conf_dir=CONF_DIR)
    path = tmp_path / "run.json"
    path.write_text(config.model_dump_json(), encoding="utf-8")
    assert read_config(path) == config
    assert config.name == name


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("-tiny")])
def test_a_prefix_can_replace_the_data_source(name: str) -> None:
    overrides = {"data.source": {"kind": "prefix", "prefix": "my-corpus_text_document"}}
    config = load_config(name, overrides, conf_dir=CONF_DIR)
    assert config.data.source.model_dump() == {
        "kind": "prefix",
        "prefix": "my-corpus_text_document",
    }
    assert config.train == load_config(name, conf_dir=CONF_DIR).train
