"""Configurations of pretraining that together give each field an effect on keys."""

from typing import Any

ROWS: dict[str, Any] = {"kind": "jsonl", "files": ["a/rows.jsonl"]}
TREE: dict[str, Any] = {"kind": "source_tree", "path": "a/tree"}
HUB: dict[str, Any] = {"kind": "hub", "dataset": "some/texts", "config": "c"}
HTTP: dict[str, Any] = {"kind": "http", "files": [{"url": "https://host/a.jsonl"}]}
MEMBERS: list[dict[str, Any]] = [
    {"weight": weight, "source": source}
    for weight, source in ((1, ROWS), (2, HTTP), (3, TREE), (4, HUB))
]
BPE: dict[str, Any] = {
    "kind": "train-bpe",
    "special_tokens": ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<x>"],
}
FILES_OF_BPE: dict[str, Any] = {
    "kind": "gpt2-bpe",
    "vocab_file": "a/vocab.json",
    "merge_file": "a/words.txt",
}
CURATION: list[dict[str, Any]] = [
    {"step": "gopher_quality"},
    {"step": "gopher_repetition"},
    {"step": "c4_quality"},
    {"step": "fineweb_quality"},
    {"step": "url"},
    {"step": "pii"},
    {"step": "language_id", "model": "a/words.txt"},
    {"step": "python", "function": "a/functions.py:keep"},
    {"step": "exact_dedup"},
    {"step": "minhash_dedup"},
]
STAGES = {"launch.nproc_per_node": 4, "parallel.pipeline_model_parallel_size": 2}
TRAINED_ON_64: dict[str, Any] = {"factor": 2.0, "original_max_position_embeddings": 64}
FACTORS = [1.0] * 16
Bases = list[tuple[str, str, dict[str, Any]]]
SOURCES: Bases = [
    (
        "gpt2-tiny",
        "family data",
        {
            "data.source": HUB,
            "data.tokenizer": {"kind": "hf", "name": "some/tokenizer"},
            "data.split_sentences": True,
            "data.append_eod": False,
        },
    ),
    (
        "gpt2-tiny",
        "data",
        {"data.source": None, "data.blend": MEMBERS[:2], "data.tokenizer": FILES_OF_BPE},
    ),
    (
        "gpt2-tiny",
        "data",
        {
            "data.source": None,
            "data.blend": [{"source": member["source"]} for member in MEMBERS[:2]],
            "data.tokenizer": FILES_OF_BPE,
            "data.blend_temperature": 2.0,
            "data.blend_schedule": [
                {"samples": 8, "weights": [1, 1]},
                {"tokens": 10_000, "weights": [2, 1]},
            ],
            "data.seq_length": 8,
        },
    ),
    (
        "gpt2-tiny",
        "data",
        {
            "data.source": None,
            "data.split": None,
            "data.split_blends": {
                "train": MEMBERS[:2],
                "valid": MEMBERS[2:3],
                "test": MEMBERS[3:],
            },
            "data.tokenizer": {"kind": "sentencepiece", "model_file": "a/vocab.json"},
        },
    ),
    (
        "gpt2-tiny",
        "data",
        {
            "data.source": {"kind": "prefix", "prefix": "a/tokens/tokens_text_document"},
            "data.shard_runner": "dask",
        },
    ),
    (
        "gpt2-tiny",
        "data",
        {"data.source": None, "data.blend": MEMBERS[:2], "data.curate": CURATION},
    ),
    *(
        (
            "gpt2-tiny",
            "data",
            {"data.source": ROWS, "data.curate": [{"step": "pii"}], "data.curate_executor": each},
        )
        for each in ({"kind": "slurm"}, {"kind": "ray"})
    ),
    ("gpt2-tiny", "data", {"data.source": {"kind": "text", "files": ["a/words.txt"]}}),
    (
        "gpt2-tiny",
        "data",
        {
            "data.source": {"kind": "warc", "files": ["a/rows.jsonl"]},
            "data.curate": [{"step": "extract_text"}],
        },
    ),
    (
        "gpt2-tiny",
        "data train",
        {
            "data.source": {"kind": "parquet", "files": ["a/rows.jsonl"]},
            "train.profile": {"from": 1, "to": 3},
        },
    ),
]
TRAININGS: Bases = [
    (
        "gpt2-tiny",
        "train",
        {
            "train.rampup_batch_size": {"start": 4, "increment": 4, "samples": 60},
            "train.pretrained_checkpoint": "a/checkpoint",
        },
    ),
    ("gpt2-tiny", "train tracking", {"train.precision": "fp32", "tracking.wandb": {}}),
    ("gpt2-tiny", "train", {"train.loss_spike_action": "skip"}),
    ("gpt2-tiny", "resume train", {"resume.checkpoint": "a/checkpoint", "train.recompute": "full"}),
    ("gpt2-tiny", "parallel", STAGES | {"parallel.tensor_model_parallel_size": 2}),
    ("gpt2-tiny", "optim", {"optim.name": "muon"}),
    ("llama-tiny", "parallel", {"launch.nproc_per_node": 2, "data.seq_length": 64}),
    (
        "gpt2-tiny",
        "data",
        {
            "data.seq_length_schedule": [
                {"samples": 0, "seq_length": 16},
                {"samples": 64, "seq_length": 64},
            ],
        },
    ),
    (
        "gpt2-tiny",
        "optim",
        {
            "optim.weight_decay_incr_style": "linear",
            "optim.start_weight_decay": 0.1,
            "optim.end_weight_decay": 0.2,
        },
    ),
    ("gpt2-tiny", "optim", {"optim.lr_decay_style": "WSD", "optim.lr_wsd_decay_iters": 10}),
    ("gpt2-tiny", "optim", {"optim.lr_warmup_fraction": None, "optim.lr_warmup_iters": 4}),
    ("gpt2-tiny", "optim", {"optim.lr_warmup_fraction": None, "optim.lr_warmup_samples": 64}),
]
MODELS: Bases = [
    ("llama-tiny", "model", {}),
    *(
        ("llama-tiny", "model", {"model.rope_scaling": scaling})
        for scaling in (
            {"kind": "linear", "factor": 2.0},
            {"kind": "dynamic"} | TRAINED_ON_64,
            {"kind": "yarn"} | TRAINED_ON_64,
            {"kind": "yarn", "mscale": 1.0, "mscale_all_dim": 2.0} | TRAINED_ON_64,
            {"kind": "llama3", "factor": 2.0},
            {"kind": "longrope", "short_factor": FACTORS, "long_factor": FACTORS} | TRAINED_ON_64,
        )
    ),
    (
        "llama-tiny",
        "model",
        {
            "model.qk_layernorm": True,
            "model.sliding_window": 64,
            "model.window_attn_skip_freq": 2,
        },
    ),
    (
        "bert-tiny",
        "model data",
        {
            "data.tokenizer": {"kind": "bert-wordpiece", "vocab_file": "a/words.txt"},
        },
    ),
    ("bert-tiny", "data", {"data.tokenizer": {"kind": "train-wordpiece"}}),
    ("t5-tiny", "model data parallel", STAGES | {"data.tokenizer.vocab_extra_ids": 100}),
]
PRETRAIN_BASES: Bases = [
    (
        "gpt2-tiny",
        "",
        {
            "data.tokenizer": BPE,
            "evaluate": {
                "zero_shot": {"wikitext": "a/words.txt", "lambada": "a/words.txt"},
                "lm_eval": {"tasks": ["a"], "include_path": "a/tree"},
                "contamination": "report",
            },
        },
    ),
    (
        "gpt2-tiny",
        "data launch",
        {
            "data.tokenizer": BPE,
            "data.fim": {},
            "launch.hostfile": "a/hosts",
        },
    ),
    *SOURCES,
    *TRAININGS,
    *MODELS,
]
"""Configuration, sections to change there (none named: all), and its other values.

Together they give each field an effect. Names that begin with a/ are files.
"""
SMALL: dict[str, Any] = {
    "data.source": ROWS,
    "data.split": "2,1,1",
    "launch.nproc_per_node": 1,
    "train.micro_batch_size": 2,
}
