"""Tests of the check of a training's inputs while its ranks run."""

import os
from pathlib import Path
from typing import Any

import pytest

from megacore.artifact import StageKey, build_artifact
from megacore.config.launch import LaunchConfig
from megacore.config.run import RunConfig
from megacore.errors import ArtifactError, HostsSilentError, MemoryExhaustedError
from megacore.hardware import Hardware
from megacore.jobs.run import TrainJob
from megacore.plan.advice import Deployment
from megacore.ranks import stages
from tests.artifact.test_manifest import flip
from tests.train import _runs


@pytest.fixture
def job(tmp_path: Path) -> TrainJob:
    def fill(directory: Path) -> dict[str, int]:
        (directory / "tokens_text_document.bin").write_bytes(bytes(100))
        return {}

    data = build_artifact(tmp_path, StageKey("tokenize", 1, {}, {}), fill)[0].directory
    old = tmp_path / "my run" / "checkpoints" / "iter_0000001" / "complete.json"
    old.parent.mkdir(parents=True)
    old.touch()
    os.utime(old, (1, 1))
    values = _runs.job(_runs.config(), data, tmp_path / "my run", ranks=1).model_dump()
    return TrainJob(**{**values, "token_prefixes": (str(data / "tokens_text_document"),)})


def interrupt(reading: object) -> None:
    raise KeyboardInterrupt


def run(job: TrainJob) -> None:
    """Train for as long as the comparison takes, and save a checkpoint meanwhile."""
    data = Path(job.token_prefixes[0]).parent
    with stages.first_read(job, [data], stages.nothing) as polled:
        marker = Path(job.run_directory) / "checkpoints" / "iter_0000002" / "complete.json"
        marker.parent.mkdir(exist_ok=True)
        marker.touch()
        polled()


def test_a_training_on_damaged_data_names_the_checkpoints_to_delete(job: TrainJob) -> None:
    run(job)
    flip(Path(f"{job.token_prefixes[0]}.bin"))
    with pytest.raises(
        ArtifactError,
        match=r"document\.bin has other content .*; delete '[^']*/iter_0000002' as well",
    ):
        run(job)


def test_checkpoints_of_an_attempt_that_ended_before_the_comparison_are_named(
    job: TrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(Path(f"{job.token_prefixes[0]}.bin"))
    with monkeypatch.context() as patch:
        patch.setattr(stages.FirstRead, "check", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(job)
    both = r"; delete '[^']*/my run/checkpoints/iter_0000001' '[^']*iter_0000002' as well"
    with (
        pytest.raises(ArtifactError, match=both),
        stages.first_read(job, [Path(job.token_prefixes[0]).parent], stages.nothing),
    ):
        pass


def test_a_quick_check_does_not_read_the_data(job: TrainJob) -> None:
    flip(Path(f"{job.token_prefixes[0]}.bin"))
    run(job.model_copy(update={"config": job.config.model_copy(update={"verify": "quick"})}))


def test_memory_advice_is_for_the_hosts_of_the_ranks(
    job: TrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Hardware(cores=8, memory=3 * 2**30, host="worker-1")
    monkeypatch.setattr(stages, "hardware_of", lambda launch: there)
    assert stages._memory_advice(job).endswith("(3.0 GiB of host memory on host worker-1)")


def test_memory_advice_for_a_scheduler_is_for_the_ranks_of_one_of_its_hosts(
    job: TrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Hardware(cores=8, memory=8 * 2**30)
    monkeypatch.setattr(stages, "hardware_of", lambda launch: here)
    shares: list[int] = []

    def advise(config: RunConfig, deployment: Deployment) -> str:
        shares.append(deployment.host)
        return "use less"

    monkeypatch.setattr(stages, "memory_advice", advise)
    slurm = {"kind": "slurm", "nproc_per_node": 2, "nnodes": 4, "hostfile": None}

    def advice(**launch: Any) -> str:
        section = LaunchConfig.model_validate(slurm | launch)
        config = job.config.model_copy(update={"launch": section})
        return stages._memory_advice(job.model_copy(update={"config": config, "ranks": 8}))

    assert advice(allow_cpu=True)
    assert shares == [4 * 2**30]
    assert advice() == "", "the scheduler's GPUs are not known here"


@pytest.mark.parametrize("advice", ["", None])
def test_advice_that_cannot_be_given_does_not_replace_the_lack_of_memory(
    tmp_path: Path, advice: str | None
) -> None:
    def ask() -> str:
        if advice is None:
            raise HostsSilentError("worker-1 does not answer")
        return advice

    lack = MemoryExhaustedError("rank 3 ran out of host memory")
    with pytest.raises(MemoryExhaustedError) as caught, stages.advising(tmp_path, ask):
        raise lack
    assert caught.value is lack
