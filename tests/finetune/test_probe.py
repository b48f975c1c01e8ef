"""Probes with real models in one process.

A limit is really reached, and what else fails is no answer.
"""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.errors import ConfigError, DataFormatError, LossError, MemoryExhaustedError
from megacore.finetune import probe
from megacore.finetune.batch_size import Answer, Fits, TooLarge, largest_batch
from megacore.jobs.finetune import ProbeJob
from tests._dist import run_distributed, still_alive
from tests.finetune._tiny_models import prepare, tiny_config, write_data, write_model

CPU = torch.device("cpu")
ROOM = 48 * 10**6
"""Bytes that a rank may have beyond what it has before the model."""
LIMIT = 1 << 20


def job_of(root: Path, batch: int, memory_limit: int | None = None, **changed: Any) -> ProbeJob:
    """A probe of the model and samples below `root`, which are made where they are not there."""
    config = tiny_config(root / "model", root, "classification", train={"micro_batch_size": batch})
    if not (root / "model").exists():
        write_model(root / "model", "deberta")
        prepare(config, write_data(root, "classification") / "stages")
    values = {
        "config": config,
        "pretrained_directory": str(root / "stages" / "pretrained"),
        "examples_directory": str(root / "stages" / "examples"),
        "run_directory": str(root),
        "exit_directory": str(root / "exit"),
        "ranks": 1,
        "threads_per_rank": 1,
        "output": str(root / "result.json"),
        "steps": 2,
        "memory_limit": memory_limit,
    }
    return ProbeJob(**values | changed)


def resident() -> int:
    return probe._status("VmRSS")


def answers(directory: str) -> dict[str, Any]:
    """What a rank of its own finds.

    The largest micro batch in ROOM, and whether the limit is gone after that.
    """
    root = Path(directory)
    probe.run_probe(job_of(root, 1), CPU)  # the libraries are there from now on
    still_alive()

    def one(batch: int) -> Answer:
        still_alive()
        try:
            return Fits(probe.run_probe(job_of(root, batch, resident() + ROOM), CPU))
        except MemoryExhaustedError as error:
            return TooLarge(str(error))

    before = resource.getrlimit(resource.RLIMIT_DATA)
    found = largest_batch(one, limit=LIMIT, start=64)
    too_large = [batch for batch, answer in found.tried.items() if isinstance(answer, TooLarge)]
    return {
        "batch": found.batch,
        "reason": found.reason,
        "smallest that is too large": min(too_large),
        "limit restored": resource.getrlimit(resource.RLIMIT_DATA) == before,
    }


def unlimited(directory: str, batch: int) -> int:
    """The peak memory of a batch in a process of its own, as a search has it.

    oneDNN may not recover from a lack.
    """
    return probe.run_probe(job_of(Path(directory), batch), CPU)


def test_the_largest_micro_batch_under_a_limit_is_found(tmp_path: Path) -> None:
    job_of(tmp_path, 1)
    (found,) = run_distributed(1, answers, str(tmp_path), timeout=60)
    assert 16 <= found["batch"] < LIMIT
    assert found["smallest that is too large"] == found["batch"] + 1
    assert f"out of memory with a micro batch of {found['batch'] + 1} (" in found["reason"]
    assert "allocate" in found["reason"]
    (beyond,) = run_distributed(
        1, unlimited, str(tmp_path), found["smallest that is too large"], timeout=60
    )
    assert beyond > ROOM
    assert found["limit restored"]


def test_a_limit_that_leaves_nothing_for_the_model_is_refused(tmp_path: Path) -> None:
    limit = resident() // 2
    with (
        pytest.raises(
            ConfigError,
            match=rf"is {limit / 1e9:.2f} GB, and it has .* raise find_batch_size.memory_limit",
        ),
        probe.limited_memory(limit, CPU),
    ):
        pass


def test_what_onednn_says_of_a_lack_of_memory_is_known() -> None:
    limit = resident() + 10**9
    with (
        pytest.raises(
            MemoryExhaustedError, match=r"micro batch of 4 .oneDNN cannot allocate memory"
        ),
        probe.memory_errors(4),
        probe.limited_memory(limit, CPU),
    ):
        raise RuntimeError("could not create a primitive")
    with pytest.raises(RuntimeError, match="something else"), probe.limited_memory(limit, CPU):
        raise RuntimeError("something else")


def test_missing_samples_are_not_taken_for_a_lack_of_memory(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataFormatError, match=r"task\.json"):
        probe.run_probe(job_of(tmp_path, 1, examples_directory=str(tmp_path / "nothing")), CPU)


class Overflowing:
    """Optimizer steps in fp16 of which the first `skipped` overflow."""

    def __init__(self, skipped: int) -> None:
        self.left = skipped
        self.taken = 0
        self.before_step: Any = None
        self.after_step: Any = None

    def train_from(self, checkpoint: None, begin: Any) -> None:
        begin()
        while True:
            self.before_step()
            self.left -= 1
            self.taken += self.left < 0
            self.after_step(type("Step", (), {"skipped": self.left >= 0}))


@pytest.mark.parametrize("skipped", [0, 7, probe.MOST_SKIPPED - 1])
def test_steps_that_fp16_skips_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skipped: int
) -> None:
    stepper = Overflowing(skipped)
    take_steps(tmp_path, monkeypatch, stepper)
    assert stepper.taken == 2


def test_a_model_that_overflows_for_ever_is_no_matter_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LossError, match="skipped 50 steps in a row"):
        take_steps(tmp_path, monkeypatch, Overflowing(10**6))


def take_steps(root: Path, monkeypatch: pytest.MonkeyPatch, stepper: Overflowing) -> None:
    monkeypatch.setattr(probe, "prepare", lambda *_, **__: stepper)
    monkeypatch.setattr(probe, "Longest", lambda *_: None)
    values = {
        "pretrained_directory": "",
        "examples_directory": "",
        "run_directory": "",
        "exit_directory": "",
    }
    config = tiny_config("model", root, "classification")
    job = ProbeJob(
        config=config, ranks=1, threads_per_rank=1, output="", steps=2, memory_limit=None, **values
    )
    probe.take_steps(job, None, CPU, lambda step: None)  # type: ignore[arg-type]


def test_rows_are_repeated_without_being_copied() -> None:
    rows = [{"input_ids": [1]}, {"input_ids": [2]}]
    repeated = probe.Repeated(rows, 3)
    assert len(repeated) == 6
    assert [repeated[number]["input_ids"][0] for number in range(6)] == [1, 2, 1, 2, 1, 2]
    assert repeated[4] is rows[0]
