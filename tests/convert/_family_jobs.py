"""Inputs of the convert stage for BERT, T5 and Llama."""

from pathlib import Path
from typing import Any

import numpy as np

from megacore.config.load import parse_config
from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec
from megacore.corpus.documents import CorpusWriter
from megacore.data.index_options import IndexOptions, Mixture, SentenceOptions
from megacore.data.sentence_maps import build_sentence_maps
from megacore.jobs.run import ConvertJob
from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter
from megacore.tokenizer import load_tokenizer
from megacore.tokenizer.build import build_tokenizer
from tests.convert._models import our_model
from tests.convert._tiny import convert_job, make_folders

SEQ_LENGTH = 48
_MODELS: dict[str, dict[str, Any]] = {
    "bert": {"norm_position": "post", "activation": "gelu", "layernorm_epsilon": 1e-12},
    "t5": {
        "position_embedding_type": "relative",
        "normalization": "rmsnorm",
        "activation": "relu",
        "add_bias_linear": False,
        "num_decoder_layers": 1,
    },
}
_FIRST = ("", "re", "un", "pre", "over", "sub", "mis", "out", "in", "under", "inter", "trans")
_SECOND = (
    "step",
    "value",
    "three",
    "load",
    "write",
    "count",
    "format",
    "start",
    "turn",
    "view",
    "plan",
    "mark",
)
_TOKENIZERS: dict[str, dict[str, Any]] = {
    "bert": {"kind": "train-wordpiece", "vocab_size": 257},
    "t5": {
        "kind": "train-bpe",
        "vocab_size": 300,
        "special_tokens": ["<pad>"],
        "vocab_extra_ids": 12,
    },
}


def family_config(family: str, **export: Any) -> RunConfig:
    """Return a configuration of two layers of width 32."""
    values = {
        "name": f"tiny-{family}",
        "family": family,
        "data": {
            "source": {"kind": "source_tree"},
            "tokenizer": _TOKENIZERS[family],
            "split": "60,20,20",
            "seq_length": SEQ_LENGTH,
            "split_sentences": True,
            "sentence_splitter": "rules",
            "append_eod": False,
            **({"span_corruption": {"decoder_seq_length": 24}} if family == "t5" else {}),
        },
        "model": {
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "make_vocab_size_divisible_by": 16,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **_MODELS[family],
        },
        "optim": {"lr": 1e-3},
        "train": {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 5},
        "checkpoint": {"save_interval": 5},
        "export": {
            "parity_samples": 3,
            "sample_tokens": 12,
            "sample_prompt": "step three",
            **export,
        },
    }
    return parse_config(values, origin="family_config")


def sentences(document: int) -> list[str]:
    """Return a text of a few short sentences."""
    words = [first + second for first in _FIRST for second in _SECOND]
    return [
        " ".join(
            words[(document * 7 + sentence * 3 + place * 5) % len(words)]
            for place in range(3 + sentence % 4)
        )
        + "."
        for sentence in range(4 + document % 5)
    ]


def family_job(root: Path, config: RunConfig) -> ConvertJob:
    """Write all inputs below `root`, and return the job that exports to `root/export`."""
    folders = make_folders(root)
    documents = [sentences(number) for number in range(60)]
    with CorpusWriter(folders["corpus"]) as corpus:
        for number, texts in enumerate(documents):
            corpus.add(" ".join(texts), f"document {number}")
    counts = build_tokenizer(config.data.tokenizer, folders["corpus"], folders["tokenizer"])
    tokenizer = load_tokenizer(folders["tokenizer"])
    prefix = folders["tokens"] / "tokens_text_sentence"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for texts in documents:
            ids, lengths = tokenizer.encode_flat(texts)
            writer.add_batch(ids.astype(np.uint16), lengths, np.array([len(lengths)]))
    kind = "bert" if config.family == "bert" else "t5"
    options = SentenceOptions(kind, minimum_sentences=2 if kind == "bert" else 1)
    build_sentence_maps(
        Mixture.single(str(prefix)),
        folders["index"],
        IndexOptions(
            split=config.data.split_weights, seq_length=SEQ_LENGTH, seed=1, sentences=options
        ),
        (40, 9, 9),
    )
    model = our_model(ModelSpec.of(config, counts["vocab_size"]))
    card = {"data": "sentences", "test PPL": "12.34"}
    return convert_job(root, config, folders, counts, prefix, model, card)
