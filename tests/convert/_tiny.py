"""A tiny GPT-2 with distinct weights."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import Module

from megacore.checkpoint.save import save_checkpoint
from megacore.config.load import parse_config
from megacore.config.run import RunConfig
from megacore.corpus.documents import CorpusWriter
from megacore.data.index_maps import build_index_maps
from megacore.data.index_options import IndexOptions, Mixture
from megacore.jobs.run import ConvertJob
from megacore.models.build import build_model
from megacore.models.gpt import GPTModel
from megacore.parallel.mesh import ProcessMesh
from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter
from megacore.tokenizer import load_tokenizer
from megacore.tokenizer.build import build_tokenizer

VOCAB_SIZE = 300
SEQ_LENGTH = 48


def tiny_config(**model: Any) -> RunConfig:
    """Return a configuration of three layers of width 32 with 4 heads.

    The vocabulary of 300 is padded to 304.
    """
    values = {
        "name": "tiny",
        "data": {
            "source": {"kind": "source_tree"},
            "tokenizer": {"kind": "train-bpe", "vocab_size": VOCAB_SIZE},
            "split": "80,10,10",
            "seq_length": SEQ_LENGTH,
        },
        "model": {
            "num_layers": 3,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "make_vocab_size_divisible_by": 16,
            **model,
        },
        "optim": {"lr": 1e-3},
        "train": {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 5},
        "checkpoint": {"save_interval": 5},
        "export": {"parity_samples": 3, "sample_tokens": 60},
    }
    return parse_config(values, origin="tiny_config")


def random_model(config: RunConfig, vocab_size: int = VOCAB_SIZE) -> GPTModel:
    """Return megacore's model with all parameters random, including biases and norms.

    Zeros and ones would hide a swap.
    """
    model = build_model(config, vocab_size, ProcessMesh.serial()).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * drawn if name.endswith("layernorm.weight") else 0.2 * drawn)
    return model


def documents() -> list[str]:
    """Return texts with repetitions for a BPE to merge, some of them beyond ASCII."""
    functions = [
        f"def step_{i}(value):\n    return value * {i} + offset_{i % 7}\n" for i in range(120)
    ]
    return ["".join(functions[i : i + 4]) for i in range(0, 120, 2)] + [
        "größe = 'ναι 💡'\n" * 5
    ] * 4


def make_folders(root: Path) -> dict[str, Path]:
    """Make the empty directories of an export's inputs and of the export below `root`."""
    folders = {
        name: root / name
        for name in ("corpus", "tokenizer", "tokens", "index", "checkpoints", "export")
    }
    for folder in folders.values():
        folder.mkdir(parents=True)
    return folders


def convert_job(
    root: Path,
    config: RunConfig,
    folders: dict[str, Path],
    counts: dict[str, Any],
    prefix: Path,
    model: Module,
    card: dict[str, str],
) -> ConvertJob:
    """Save a checkpoint of the model, and return the job that exports it.

    `counts` are those of the tokenizer, `prefix` is that of the tokens.
    """
    checkpoint = save_checkpoint(
        folders["checkpoints"],
        5,
        {f"model.{name}": value.detach() for name, value in model.named_parameters()},
        {},
    )
    return ConvertJob(
        config=config,
        token_prefixes=(str(prefix),),
        index_directory=str(folders["index"]),
        tokenizer_directory=str(folders["tokenizer"]),
        vocab_size=counts["vocab_size"],
        special_tokens=counts["special_tokens"],
        run_directory=str(root / "run"),
        exit_directory=str(root / "exit"),
        ranks=1,
        threads_per_rank=1,
        checkpoint=str(checkpoint),
        output_directory=str(folders["export"]),
        card=card,
    )


def tiny_job(root: Path, config: RunConfig) -> tuple[ConvertJob, GPTModel]:
    """Write the inputs of an export below `root`, and return the job and the model.

    The inputs are a tokenizer, tokens, index maps and a checkpoint. The job exports to
    `root/export`.
    """
    folders = make_folders(root)
    with CorpusWriter(folders["corpus"]) as corpus:
        for number, text in enumerate(documents()):
            corpus.add(text, f"document {number}")
    counts = build_tokenizer(config.data.tokenizer, folders["corpus"], folders["tokenizer"])
    tokenizer = load_tokenizer(folders["tokenizer"])
    prefix = folders["tokens"] / "tokens_text_document"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for ids in tokenizer.encode_batch(documents()):
            writer.add_document([*ids.tolist(), tokenizer.eod_id])
    build_index_maps(
        Mixture.single(str(prefix)),
        folders["index"],
        IndexOptions(split=config.data.split_weights, seq_length=config.data.seq_length, seed=1),
        (None, None, None),
    )
    model = random_model(config, counts["vocab_size"])
    card = {"data": "repeated functions | twice", "test PPL": "12.34"}
    return convert_job(root, config, folders, counts, prefix, model, card), model
