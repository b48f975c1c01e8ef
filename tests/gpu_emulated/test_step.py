"""One iteration of every shipped configuration on fake GPUs."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from megacore.config.load import CONF_DIR, load_config
from tests.gpu_emulated.step import Case, Record

_VOCAB_SIZES = {"llama-1b": 32000}


def _world_size(conf: str) -> int:
    """Return the number of ranks of a configuration; 1 if it takes those of the host."""
    launch = load_config(conf).launch
    return 1 if launch.nproc_per_node == "auto" else int(launch.nnodes or 1) * launch.nproc_per_node


def _short(conf: str, **overrides: Any) -> dict[str, Any]:
    """Return overrides with which a configuration has few layers and micro batches."""
    config = load_config(conf, overrides)
    parallel = config.parallel
    stages = parallel.pipeline_model_parallel_size
    chunks = stages * (parallel.virtual_pipeline_model_parallel_size or 1)
    world_size = _world_size(conf)
    replicas = max(1, world_size // stages // parallel.tensor_model_parallel_size)
    return {
        "model.num_layers": max(2, chunks),
        "train.global_batch_size": config.train.micro_batch_size * replicas * max(2, stages),
        "train.rampup_batch_size": None,
        "train.compile": "off",
        **overrides,
    }


CASES = {
    path.stem: Case(
        path.stem,
        rank=_world_size(path.stem) - 1,
        world_size=_world_size(path.stem),
        overrides=_short(path.stem),
        vocab_size=_VOCAB_SIZES.get(path.stem, 50257),
    )
    for path in sorted(CONF_DIR.glob("*.yaml"))
}


@pytest.fixture(scope="module")
def records() -> Iterator[dict[str, Record | str]]:
    """Return the record of each case, or the traceback of its failure."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.gpu_emulated.step"],
        input="".join(json.dumps(asdict(case)) + "\n" for case in CASES.values()),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answers = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == len(CASES), process.stdout
    yield {
        name: answer["error"] if "error" in answer else Record(**answer["record"])
        for name, answer in zip(CASES, answers, strict=True)
    }


@pytest.mark.parametrize("name", CASES)
def test_step_waits_once_for_the_gpu(records: dict[str, Any], name: str) -> None:
    record = records[name]
    assert isinstance(record, Record), record
    assert len(record.synchronizations) == 1, record.synchronizations
    assert record.copies == []
    assert record.events == 0
