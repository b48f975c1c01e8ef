"""Memory probes with real models in one process."""

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacore.errors import ConfigError, DataFormatError, LossError, MemoryExhaustedError
from megacore.finetune import probe
from megacore.jobs.finetune import ProbeJob
from megacore.ranks.batch_size_search import Answer, Fits, TooLarge, largest_batch
from tests._dist import run_distributed, still_alive
from tests.finetune._tiny_models import prepare, tiny_config, write_data, write_model

CPU = torch.device("cpu")
ROOM = 48 * 10**6
"""Bytes that a rank may use in addition to its memory before the model is built."""
LIMIT = 1 << 20


def job_of(root: Path, batch: int, memory_limit: int | None = None, **changed: Any) -> ProbeJob:
    """Return a probe of the model and samples below `root`, which are written if missing."""
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
    """Return the largest micro batch in ROOM, found in a separate process.

    Also return whether the limit is removed afterwards.
    """
    root = Path(directory)
    probe.run_probe(job_of(root, 1), CPU)  # loads the libraries
    still_alive()

    def answer_of(batch: int) -> Answer:
        still_alive()
        try:
            return Fits(probe.run_probe(job_of(root, batch, resident() + ROOM), CPU))
        except MemoryExhaustedError as error:
            return TooLarge(str(error))

    before = resource.getrlimit(resource.RLIMIT_DATA)
    search = largest_batch(answer_of, limit=LIMIT, start=64)
    too_large = [batch for batch, answer in search.tried.items() if isinstance(answer, TooLarge)]
    return {
        "batch": search.batch,
        "reason": search.reason,
        "smallest that is too large": min(too_large),
        "limit restored": resource.getrlimit(resource.RLIMIT_DATA) == before,
    }


def unlimited(directory: str, batch: int) -> int:
    """Return the peak memory of a batch in a separate process, as the search does.

    OneDNN may not recover from a failed allocation.
    """
    return probe.run_probe(job_of(Path(directory), batch), CPU)


@pytest.mark.slow
def test_largest_micro_batch_within_a_limit_is_found(tmp_path: Path) -> None:
    job_of(tmp_path, 1)
    (search,) = run_distributed(1, answers, str(tmp_path))
    assert 16 <= search["batch"] < LIMIT
    assert search["smallest that is too large"] == search["batch"] + 1
    assert f"out of memory with a micro batch of {search['batch'] + 1} (" in search["reason"]
    assert "allocate" in search["reason"]
    (beyond,) = run_distributed(1, unlimited, str(tmp_path), search["smallest that is too large"])
    assert beyond > ROOM
    assert search["limit restored"]


def test_limit_without_room_for_the_model_is_refused(tmp_path: Path) -> None:
    limit = resident() // 2
    with (
        pytest.raises(
            ConfigError,
            match=rf"is {limit / 1e9:.2f} GB, and it has .* raise find_batch_size.memory_limit",
        ),
        probe.limited_memory(limit, CPU),
    ):
        pass


def test_out_of_memory_error_of_onednn_is_recognised() -> None:
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


def test_missing_samples_are_not_an_out_of_memory_error(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataFormatError, match=r"task\.json"):
        probe.run_probe(job_of(tmp_path, 1, examples_directory=str(tmp_path / "nothing")), CPU)


class OverflowingStepper:
    """A stepper of fp16 whose first `skipped` steps overflow."""

    def __init__(self, skipped: int) -> None:
        self.remaining = skipped
        self.taken = 0
        self.before_step: Any = None
        self.after_step: Any = None

    def train_from(self, checkpoint: None, begin: Any) -> None:
        begin()
        while True:
            self.before_step()
            self.remaining -= 1
            self.taken += self.remaining < 0
            self.after_step(type("Step", (), {"skipped": self.remaining >= 0}))


@pytest.mark.parametrize("skipped", [0, 7, probe.MOST_SKIPPED - 1])
def test_skipped_fp16_steps_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skipped: int
) -> None:
    stepper = OverflowingStepper(skipped)
    take_steps(tmp_path, monkeypatch, stepper)
    assert stepper.taken == 2


def test_endless_overflow_is_a_loss_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LossError, match="skipped 50 steps in a row"):
        take_steps(tmp_path, monkeypatch, OverflowingStepper(10**6))


def take_steps(root: Path, monkeypatch: pytest.MonkeyPatch, stepper: OverflowingStepper) -> None:
    monkeypatch.setattr(probe, "prepare", lambda *_, **__: stepper)
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
    task: Any = SimpleNamespace(largest_rows=lambda count: [])
    probe.take_steps(job, task, CPU, lambda step: None)


def test_repeated_rows_are_not_copied() -> None:
    rows = [{"input_ids": [1]}, {"input_ids": [2]}]
    repeated = probe.Repeated(rows, 3)
    assert len(repeated) == 6
    assert [repeated[number]["input_ids"][0] for number in range(6)] == [1, 2, 1, 2, 1, 2]
    assert repeated[4] is rows[0]
