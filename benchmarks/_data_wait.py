"""Iterations of the training loop over an indexed data set of random tokens.

The times are printed as JSON.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks._entrants import CASES, ENTRANTS, Work
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.data.gpt_dataset import GPTDataset
from megacore.data.index_maps import build_index_maps
from megacore.data.index_options import IndexOptions, Mixture
from megacore.engine.build import build_engine
from megacore.observe.logging import StepReport
from megacore.observe.recorder import Recorder
from megacore.observe.timers import Timers
from megacore.parallel.mesh import ProcessMesh
from megacore.ranks.process import set_up_arithmetic
from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter
from megacore.train.loop import Datasets, Trainer

ITERATIONS, INTERVAL, SAMPLES = 20, 5, 4
DOCUMENTS, LENGTH = 2000, 400


class Listening(Recorder):
    """Recorder that keeps the times of each interval; the first interval is warm-up."""

    intervals: list[tuple[float, float]]

    def step(self, report: StepReport, milliseconds: Mapping[str, float]) -> None:
        self.intervals.append((report.ms_per_iteration, milliseconds.get("batch-generator", 0.0)))


def main() -> None:
    case = replace(CASES["tiny-fp32"], micro_batch_size=2)
    train = {
        "train_iters": ITERATIONS,
        "log_interval": INTERVAL,
        "eval_interval": 10**6,
        "eval_iters": 1,
    }
    work = Work(case, ENTRANTS["megacore"], train={"global_batch_size": SAMPLES, **train})
    config, tokens = work.config(), SpecialTokens(eod=0)
    set_up_arithmetic(torch.get_num_threads())
    timers = Timers(torch.device("cpu"))
    mesh = ProcessMesh(timers=timers)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        prefix = directory / "tokens"
        random = np.random.default_rng(0)
        with IndexedDatasetWriter(prefix, np.uint16) as writer:
            for _ in range(DOCUMENTS):
                writer.add_document(random.integers(1, case.vocab_size, LENGTH))
        (directory / "index").mkdir()
        options = IndexOptions(split="80,10,10", seq_length=case.seq_length, seed=config.seed)
        build_index_maps(
            Mixture.single(str(prefix)),
            directory / "index",
            options,
            (SAMPLES * ITERATIONS, SAMPLES, None),
        )
        engine = build_engine(
            config,
            case.vocab_size,
            mesh,
            special_tokens=tokens,
            device=torch.device("cpu"),
            precision="fp32",
        )
        train_split, valid_split = (
            GPTDataset(prefix, directory / "index", split, case.seq_length)
            for split in ("train", "valid")
        )
        spec = ModelSpec.of(config, case.vocab_size, tokens)
        with Listening(directory / "run", attempt=1, rank=0, tensorboard=False) as recorder:
            recorder.intervals = []
            data = Datasets(train_split, valid_split, valid_split)
            Trainer(config, engine, mesh, data, recorder, directory / "run", spec=spec).run()
        iteration, waiting = (
            statistics.median(column) for column in zip(*recorder.intervals[1:], strict=True)
        )
    sys.stdout.write(
        json.dumps({"ms_per_iteration": iteration, "batch_generator_ms": waiting}) + "\n"
    )


if __name__ == "__main__":
    main()
