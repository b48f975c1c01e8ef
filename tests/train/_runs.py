"""Small training runs on generated tokens: data, configuration, and a call that trains."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megacore.config.data import PrefixSource
from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.data.build import open_split
from megacore.data.index_maps import build_index_maps
from megacore.data.index_options import IndexOptions, Mixture
from megacore.data.one_epoch import one_epoch
from megacore.engine.build import build_engine
from megacore.jobs.run import TrainJob
from megacore.observe.flops import Peaks
from megacore.observe.recorder import Recorder
from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.rank_layout import RankLayout
from megacore.pipeline_parallel.partition import shared_stages
from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter
from megacore.train.loop import Datasets, Trainer
from tests._dist import own_groups

VOCAB_SIZE = 61
EOD_ID = 0
TOKENS = SpecialTokens(eod=EOD_ID)
SEQ_LENGTH = 16
SAMPLES = 400


def config(engine: str = "native", **sections: dict[str, Any]) -> RunConfig:
    """Return the configuration of a two-layer model.

    Each keyword but the first replaces values of one section.
    """
    values: dict[str, dict[str, Any]] = {
        "data": {
            "source": {"kind": "source_tree"},
            "tokenizer": {"kind": "train-bpe", "vocab_size": 512},
            "split": "80,10,10",
            "seq_length": SEQ_LENGTH,
        },
        "model": {
            "num_layers": 2,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "make_vocab_size_divisible_by": 64,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "optim": {"lr": 1e-2, "lr_warmup_iters": 2, "lr_decay_iters": 20, "weight_decay": 0.1},
        "train": {
            "micro_batch_size": 2,
            "global_batch_size": 8,
            "train_iters": 6,
            "precision": "fp32",
            "log_interval": 1,
            "eval_interval": 4,
            "eval_iters": 1,
        },
        "checkpoint": {"save_interval": 3},
        "launch": {"nproc_per_node": 1},
    }
    for section, changes in sections.items():
        values[section] = values.get(section, {}) | changes
    return RunConfig.model_validate({"name": "tiny", "engine": engine, **values})


def write_data(directory: Path, run: RunConfig) -> Path:
    """Write token files and index maps; return the prefix.

    The tokens follow a pattern, so that a model learns.
    """
    prefix = directory / "tokens_text_document"
    random = np.random.RandomState(0)
    directory.mkdir(parents=True, exist_ok=True)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(100):
            start, length = random.randint(0, VOCAB_SIZE), random.randint(40, 120)
            writer.add_document((start + 3 * np.arange(length)) % VOCAB_SIZE)
    (directory / "index").mkdir()
    build_index_maps(
        Mixture.single(str(prefix)),
        directory / "index",
        IndexOptions(
            split=run.data.split_weights,
            seq_length=run.data.seq_length,
            seed=run.seed,
            packing=run.data.packing,
        ),
        (SAMPLES, 8, None),
    )
    return prefix


def prefixes_of(run: RunConfig, data: Path) -> list[str]:
    """Return the token files of a run: those of its blend, or of `write_data`."""
    members = [member.source for member in run.data.train_blend]
    prefixes = [source.prefix for source in members if isinstance(source, PrefixSource)]
    return prefixes or [str(data / "tokens_text_document")]


def job(run: RunConfig, data: Path, run_directory: Path, **changes: Any) -> TrainJob:
    """Return the content of the job file for `write_data(data, run)`."""
    values: dict[str, Any] = {
        "config": run,
        "token_prefixes": [str(data / "tokens_text_document")],
        "index_directory": str(data / "index"),
        "tokenizer_directory": str(data),
        "vocab_size": VOCAB_SIZE,
        "special_tokens": {"eod": EOD_ID},
        "run_directory": str(run_directory),
        "exit_directory": str(run_directory / "exit"),
        "ranks": 1,
        "threads_per_rank": 1,
    }
    return TrainJob(**values | changes)


def mesh(run: RunConfig | None = None) -> ProcessMesh:
    """Return the mesh of a run over the default group's ranks, or of a single process."""
    if not dist.is_initialized():
        return ProcessMesh.serial()
    parallel = (run or config()).parallel
    layout = RankLayout.of_world(
        dist.get_world_size(),
        pipeline=parallel.pipeline_model_parallel_size,
        tensor=parallel.tensor_model_parallel_size,
        context=parallel.context_parallel_size,
    )
    return ProcessMesh.build(layout, shared_stages=shared_stages(run or config(), VOCAB_SIZE))


def trainer(
    run: RunConfig,
    data: Path,
    run_directory: Path,
    process_mesh: ProcessMesh,
    recorder: Recorder,
    *,
    planned_samples: int | None = None,
) -> Trainer:
    """Return a trainer with initial weights on this process."""
    engine = build_engine(
        run,
        VOCAB_SIZE,
        process_mesh,
        special_tokens=TOKENS,
        device=torch.device("cpu"),
        precision=run.train.precision,
    )
    prefixes = prefixes_of(run, data)
    train, valid = (
        open_split(prefixes, data / "index", name, run, tokenizer_directory=data)
        for name in ("train", "valid")
    )
    valid_pass = one_epoch(
        prefixes,
        data / "index",
        "valid",
        run,
        data,
        tokenizer_directory=data,
    )
    spec = ModelSpec.of(run, VOCAB_SIZE, TOKENS)
    return Trainer(
        run,
        engine,
        process_mesh,
        Datasets(train, valid, valid_pass),
        recorder,
        run_directory,
        spec=spec,
        peaks=Peaks(2.0, 1.0),
        planned_samples=planned_samples,
    )


def train(run: RunConfig, data: Path, run_directory: Path, attempt: int = 1) -> None:
    """Train as one rank of the default group, or as a single process."""
    with own_groups():
        ranks = mesh(run)
        with Recorder(
            run_directory, attempt=attempt, rank=ranks.rank, tensorboard=False
        ) as recorder:
            trainer(run, data, run_directory, ranks, recorder).run()


def events(run_directory: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the events a run reported, optionally only those of one kind."""
    lines = (run_directory / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if kind in (None, event["kind"])]


def losses(run_directory: Path) -> dict[int, float]:
    """Return the training loss of each iteration."""
    return {event["iteration"]: event["lm_loss"] for event in events(run_directory, "step")}
