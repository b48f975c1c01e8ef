"""Search for the batch size: results of probes and configurations of the methods.

Small scripts stand in for the ranks.
"""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.cluster.start import Start
from megacore.config.finetune import DISTRIBUTIONS, FinetuneConfig
from megacore.errors import (
    ConfigError,
    DataFormatError,
    MemoryExhaustedError,
    RankLostError,
)
from megacore.hardware import Gpu, Hardware
from megacore.jobs.finetune import FinetuneJob, ProbeJob
from megacore.ranks import batch_size_search, stages
from megacore.ranks.batch_size_search import (
    Answer,
    Fits,
    TooLarge,
    Watch,
    check_methods,
    compare,
    largest_batch,
    memory_limit_of,
    method_config,
    try_batch,
)
from tests.finetune._tiny_models import tiny_config

ONE_GPU = Hardware(4, 32 * 10**9, (Gpu("card", 80 * 10**9),))
NO_GPU = Hardware(4, 32 * 10**9)


def config(**sections: Any) -> FinetuneConfig:
    return tiny_config("model", Path("data"), "classification", **sections)


def job(directory: Path, **sections: Any) -> FinetuneJob:
    return FinetuneJob(
        config=config(launch={"nproc_per_node": 1}, **sections),
        pretrained_directory="pretrained",
        examples_directory="examples",
        run_directory=str(directory),
        exit_directory=str(directory / "exit"),
        ranks=1,
        threads_per_rank=1,
    )


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Provide a function that replaces the rank by a script, in which `job` is the job file."""

    def stand_in(script: str) -> None:
        def start(launch: Any, module: str, job: Any, job_file: Path, env: Any = None) -> Start:
            text = f"import json, os, sys\njob = json.load(open({str(job_file)!r}))\n{script}"
            return Start([sys.executable, "-c", text], {})

        monkeypatch.setattr(stages, "start_ranks", start)

    return stand_in


WRITE_PEAK_MEMORY = (
    "open(job['output'], 'w').write(json.dumps({'peak_memory': 10 * "
    "job['config']['train']['micro_batch_size']}))\n"
)


def failing_rank(error: str, message: str) -> str:
    reason = {"rank": 0, "error": error, "message": message, "time": 0.0, "secondary": False}
    return (
        "os.makedirs(job['exit_directory'], exist_ok=True)\n"
        f"open(job['exit_directory'] + '/rank_0.json', 'w').write(json.dumps({reason!r}))\n"
        "sys.exit(7)\n"
    )


def test_successful_probe_returns_its_peak_memory(tmp_path: Path, rank: Any) -> None:
    rank(WRITE_PEAK_MEMORY)
    assert try_batch(job(tmp_path), None, tmp_path, Watch()) == Fits(40)
    probed = ProbeJob.read(tmp_path / "job.json")
    assert (probed.steps, probed.memory_limit) == (3, None)


def test_memory_exhaustion_of_a_rank_is_too_large(tmp_path: Path, rank: Any) -> None:
    rank(failing_rank("MemoryExhaustedError", "out of memory with a micro batch of 4 (no)"))
    answer = try_batch(job(tmp_path), 10**9, tmp_path, Watch())
    assert answer == TooLarge("rank 0: out of memory with a micro batch of 4 (no)")
    assert ProbeJob.read(tmp_path / "job.json").memory_limit == 10**9


def test_abort_by_bad_alloc_is_too_large(tmp_path: Path, rank: Any) -> None:
    rank(
        "sys.stderr.write(\"terminate called after throwing an instance of 'std::bad_alloc'\\n\")\n"
        "os.abort()\n"
    )
    answer = try_batch(job(tmp_path), 10**9, tmp_path, Watch())
    assert isinstance(answer, TooLarge)
    assert answer.reason.startswith("std::bad_alloc: ")


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (failing_rank("DataFormatError", "task.json is damaged"), DataFormatError),
        ("os.kill(os.getpid(), 11)\n", RankLostError),
        ("sys.exit(1)\n", RankLostError),
    ],
)
def test_other_failures_of_a_probe_are_raised(
    tmp_path: Path, rank: Any, script: str, error: type[Exception]
) -> None:
    rank(script)
    with pytest.raises(error):
        try_batch(job(tmp_path), None, tmp_path, Watch())


def rank_with_memory_for(room: int) -> str:
    """Return a script of a rank with memory for `room` samples: it runs probes and the epoch."""
    failure = failing_rank("MemoryExhaustedError", "out of memory")
    probe = f"if job['config']['train']['micro_batch_size'] > {room}:\n" + "".join(
        f"    {line}\n" for line in failure.splitlines()
    )
    result = {
        "train_seconds_per_epoch": 2.0,
        "evaluation_seconds": 1.0,
        "metrics": {},
        "metric": "f1",
        "value": 0.5,
    }
    return (
        f"{probe}if 'output' in job:\n    {WRITE_PEAK_MEMORY}else:\n"
        "    os.makedirs(job['run_directory'] + '/best/iter_1')\n"
        f"    open(job['run_directory'] + '/result.json', 'w').write(json.dumps({result!r}))\n"
    )


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size_search.Hardware, "detect", staticmethod(lambda: NO_GPU))


def search(directory: Path, samples: int, **values: Any) -> dict[str, Any]:
    settings = config(launch={"nproc_per_node": 1}, find_batch_size=values)
    return compare(settings, "zero2", "pretrained", "examples", samples=samples, scratch=directory)


@pytest.mark.usefixtures("no_gpu")
def test_compare_runs_each_probe_and_the_epoch_in_separate_directories(
    tmp_path: Path, rank: Any
) -> None:
    rank(rank_with_memory_for(5))
    batches: list[int] = []
    watch = Watch(on_answer=lambda batch, answer: batches.append(batch))
    settings = config(launch={"nproc_per_node": 1}, find_batch_size={"memory_limit_gb": 2.0})
    report = compare(
        settings, "zero2", "pretrained", "examples", samples=24, scratch=tmp_path, watch=watch
    )
    assert batches == [4, 8, 6, 5]
    assert {path.name for path in tmp_path.iterdir()} == {
        *(f"probe-{batch:05d}" for batch in batches),
        "epoch",
    }
    assert (report["batch"], report["peak_memory"], report["memory_limit"], report["limit"]) == (
        5,
        50,
        2 * 10**9,
        24,
    )
    assert report["reason"] == "rank 0: out of memory"
    assert report["epoch"]["value"] == 0.5
    measured = FinetuneJob.read(tmp_path / "epoch" / "run.json").config
    assert (
        measured.launch.distributed,
        measured.train.micro_batch_size,
        measured.train.num_epochs,
    ) == ("zero2", 5, 1)
    assert not (tmp_path / "epoch" / "best").exists()


@pytest.mark.usefixtures("no_gpu")
def test_samples_of_a_rank_and_max_batch_limit_the_search(tmp_path: Path, rank: Any) -> None:
    rank(rank_with_memory_for(100))
    assert search(tmp_path / "samples", 7)["batch"] == 7
    report = search(tmp_path / "setting", 7, max_batch=3)
    assert (report["batch"], report["reason"], len(report["tried"])) == (3, None, 1)


@pytest.mark.usefixtures("no_gpu")
def test_model_that_does_not_fit_has_no_epoch(tmp_path: Path, rank: Any) -> None:
    rank(rank_with_memory_for(0))
    report = search(tmp_path, 7)
    assert (report["batch"], report["epoch"], report["epoch_failure"]) == (0, None, None)
    assert report["reason"] == "rank 0: out of memory"


@pytest.mark.usefixtures("no_gpu")
def test_memory_exhaustion_of_the_epoch_is_reported(
    tmp_path: Path, rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def epoch(measured: FinetuneJob, on_poll: Any) -> None:
        raise MemoryExhaustedError("rank 0: in an evaluation")

    rank(WRITE_PEAK_MEMORY)
    monkeypatch.setattr(batch_size_search, "finetune", epoch)
    report = search(tmp_path, 4)
    assert (report["batch"], report["epoch"], report["epoch_failure"]) == (
        4,
        None,
        "rank 0: in an evaluation",
    )


@pytest.mark.usefixtures("no_gpu")
def test_abort_of_the_epoch_by_a_failed_allocation_is_reported(
    tmp_path: Path, rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def epoch(measured: FinetuneJob, on_poll: Any) -> None:
        measured.attempt_log.parent.mkdir(parents=True)
        measured.attempt_log.write_text("what():  std::bad_alloc\n")
        raise RankLostError("rank 0 was ended by SIGABRT")

    rank(WRITE_PEAK_MEMORY)
    monkeypatch.setattr(batch_size_search, "finetune", epoch)
    assert search(tmp_path, 4)["epoch_failure"] == "std::bad_alloc: rank 0 was ended by SIGABRT"


def test_method_uses_the_deepspeed_config_of_its_stage_with_auto_batch() -> None:
    json = {
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": 4,
        "train_batch_size": "auto",
    }
    settings = config(
        launch={"distributed": "zero2", "deepspeed_config": json},
        train={"num_epochs": 3, "exit_duration_minutes": 1},
    )
    same, other = method_config(settings, "zero2", 16), method_config(settings, "zero3", 16)
    assert same.launch.deepspeed_config == json | {"train_micro_batch_size_per_gpu": "auto"}
    assert other.launch.deepspeed_config is None
    assert other.launch.distributed == "zero3"
    for method in (same, other):
        train = method.train
        assert (train.micro_batch_size, train.num_epochs, train.exit_duration_minutes) == (
            16,
            1,
            None,
        )


def test_fsdp_is_searched_with_the_settings_of_the_training() -> None:
    accelerate = {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True},
    }
    settings = config(launch={"accelerate_config": accelerate, "nproc_per_node": 2})
    assert settings.launch.distributed == "fsdp"
    assert method_config(settings, "fsdp", 8).launch == settings.launch
    assert method_config(settings, "zero2", 8).launch.accelerate_config is None


def test_memory_limit_is_the_share_of_a_rank_or_the_configured_limit() -> None:
    free = memory_limit_of(config(), 2, NO_GPU)
    assert free is not None
    assert 0 < free <= 0.8 * NO_GPU.memory / 2
    limited = config(find_batch_size={"memory_limit_gb": 20})
    assert memory_limit_of(config(), 1, ONE_GPU) is None
    assert memory_limit_of(limited, 2, ONE_GPU) == memory_limit_of(limited, 2, NO_GPU) == 20 * 10**9


def test_memory_of_this_host_does_not_limit_the_gpus_of_a_scheduler() -> None:
    slurm = {"kind": "slurm", "nproc_per_node": 2}
    assert memory_limit_of(config(launch=slurm), 2, NO_GPU) is None
    limited = config(launch=slurm, find_batch_size={"memory_limit_gb": 80})
    assert memory_limit_of(limited, 2, NO_GPU) == 80 * 10**9
    assert memory_limit_of(config(launch=slurm | {"allow_cpu": True}), 2, NO_GPU) is not None


@pytest.mark.parametrize(
    ("hardware", "owner"), [(ONE_GPU, "a GPU has 80.0"), (NO_GPU, "this machine has 32.0")]
)
def test_limit_above_the_available_memory_is_refused(hardware: Hardware, owner: str) -> None:
    with pytest.raises(ConfigError, match=rf"memory_limit_gb is 90 and {owner} GB: lower it"):
        check_methods(config(find_batch_size={"memory_limit_gb": 90}), hardware)


def test_zero_method_without_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size_search.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"has zero2, which is DeepSpeed's, and deepspeed is not installed"
    ):
        check_methods(config(), NO_GPU)
    check_methods(config(find_batch_size={"methods": ["ddp"]}), NO_GPU)


def test_all_methods_are_compared_by_default() -> None:
    assert config().find_batch_size.methods == DISTRIBUTIONS
    check_methods(config(), NO_GPU)


def test_method_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="names ddp 2 times"):
        config(find_batch_size={"methods": ["ddp", "zero2", "ddp"]})


LIMITS = st.integers(1, 5000)


class Machine:
    """A probe with room for `room` samples, which records the tried batches."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.tried: list[int] = []

    def __call__(self, batch: int) -> Answer:
        self.tried.append(batch)
        return Fits(1000 * batch) if batch <= self.room else TooLarge(f"no room for {batch}")


@given(room=st.integers(0, 6000), limit=LIMITS, start=st.integers(1, 6000))
def test_largest_batch_is_found_with_few_probes(room: int, limit: int, start: int) -> None:
    machine = Machine(room)
    result = largest_batch(machine, limit=limit, start=start)
    assert result.batch == min(room, limit)
    assert result.peak_memory == (1000 * result.batch or None)
    assert result.reason == (None if room >= limit else f"no room for {result.batch + 1}")
    assert list(result.tried) == machine.tried
    assert len(set(machine.tried)) == len(machine.tried) <= 2 + 2 * math.log2(limit)
    assert all(1 <= batch <= limit for batch in machine.tried)


@given(room=st.integers(1, 5000))
def test_accurate_start_saves_probes(room: int) -> None:
    machine = Machine(room)
    largest_batch(machine, limit=2 * room + 1, start=room)
    assert len(machine.tried) <= 2 + math.log2(room)


def test_search_doubles_and_then_bisects() -> None:
    machine = Machine(11)
    largest_batch(machine, limit=100)
    assert machine.tried == [1, 2, 4, 8, 16, 12, 10, 11]


def test_search_tries_the_limit() -> None:
    machine = Machine(100)
    assert largest_batch(machine, limit=11).batch == 11
    assert machine.tried == [1, 2, 4, 8, 11]


def test_result_is_zero_if_one_sample_does_not_fit() -> None:
    machine = Machine(0)
    result = largest_batch(machine, limit=64, start=8)
    assert (result.batch, result.peak_memory, result.reason) == (0, None, "no room for 1")
    assert machine.tried == [8, 4, 2, 1]


def test_other_failure_ends_the_search() -> None:
    tried = []

    def probe(batch: int) -> Answer:
        tried.append(batch)
        if batch == 4:
            raise RankLostError("rank 1 was lost")
        return Fits(1)

    with pytest.raises(RankLostError, match="rank 1 was lost"):
        largest_batch(probe, limit=64)
    assert tried == [1, 2, 4]
