"""Numbers of samples of a run and of ranks of a job."""

from pathlib import Path

import pytest

from megacore.artifact import Artifact, Manifest, StageKey
from megacore.artifact.build import seal
from megacore.artifact.files import write_json
from megacore.checkpoint.format import FileRecord, Marker
from megacore.config import RunConfig
from megacore.config.launch import LaunchConfig
from megacore.errors import ParallelLayoutError, WorkspaceError
from megacore.hardware import Hardware
from megacore.jobs.run import ConvertJob, EvaluateJob, TrainJob
from megacore.token_files.indexed_dataset import TOKENS_NAMES
from megacore.train.state import TrainState
from tasks import train
from tasks.index import RunData, requested_samples
from tasks.preflight import planned_epochs
from tasks.train import job_of, make_job, precision_of, training_counts
from tests.data._files import write_tokens
from tests.tasks.conftest import make_config

RAMP = {"start": 1, "increment": 1, "samples": 10}


def test_number_of_samples_follows_from_the_batches(run_directory: Path) -> None:
    config, ramp = make_config(), make_config(rampup_batch_size=RAMP)
    assert requested_samples(config) == (200, 20, None)
    assert requested_samples(ramp) == (190, 20, None)
    index = Artifact(
        stage="index",
        key="ab" * 8,
        path=str(run_directory),
        digest="f" * 64,
        counts={"train": {"tokens": 1600, "samples": 200, "epochs": 2}},
    )
    counts = training_counts(run_directory, config, index)
    assert (counts["tokens"], counts["epochs"]) == (200 * 16, 2.0)
    assert training_counts(run_directory, ramp, index)["tokens"] == 190 * 16


def test_only_complete_checkpoints_are_subtracted_from_the_room_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "checkpoints"
    complete, stale = root / "iter_0000004", root / "iter_0000002.tmp-12-ab"
    for directory in (complete, stale):
        directory.mkdir(parents=True)
        (directory / "__0_0.distcp").write_bytes(bytes(40))
    Marker(4, None, {"__0_0.distcp": FileRecord.of(complete / "__0_0.distcp")}).write(complete)
    needed: list[int] = []
    monkeypatch.setattr("tasks.train.checkpoints_on_disk", lambda *values: (3, 100))
    monkeypatch.setattr("tasks.train.require_space", lambda path, size, why: needed.append(size))
    train._require_checkpoint_space(make_config(), tmp_path, 128)
    assert needed == [300 - 40]


@pytest.mark.parametrize("check", ["make_job", "check_hosts", "_require_checkpoint_space"])
def test_refused_extension_keeps_the_finished_training(
    check: str, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*values: object) -> None:
        raise WorkspaceError("no room")

    config, key = make_config(train_iters=200), StageKey("train", 1, {}, {})
    tokenizer = artifact(run_directory, vocab_size=128, special_tokens={"eod": 0})
    data = RunData(artifact(run_directory), tokenizer, artifact(run_directory))
    job = job_of(config, run_directory, data, ranks=1, threads=1)
    monkeypatch.setattr(train, "make_job", lambda *values: job)
    monkeypatch.setattr(train, check, refuse)
    seal(run_directory, key, {"iterations": 100}, 1.0)
    with pytest.raises(WorkspaceError, match="no room"):
        train._run(config, key, run_directory, data, 0)
    assert Manifest.read(run_directory).counts == {"iterations": 100}


def test_samples_of_a_resumed_run_begin_at_those_of_the_checkpoint(
    tmp_path: Path, run_directory: Path
) -> None:
    state = TrainState(iteration=40, consumed_samples=400)
    write_json(tmp_path / "state.json", {"train": state.to_json()})
    values = make_config().model_dump(mode="json")
    values["resume"]["checkpoint"] = str(tmp_path)
    config = RunConfig.model_validate(values)
    assert requested_samples(config) == (400 + 60 * 2, 20, None)
    counts = {"train": {"tokens": 1600, "samples": 520, "epochs": 6}}
    index = Artifact(stage="index", key="ab" * 8, path="maps", digest="f" * 64, counts=counts)
    trained = training_counts(run_directory, config, index)
    assert (trained["tokens"], trained["epochs"]) == (520 * 16, 5.2)
    documents = Artifact(
        stage="collect", key="ab" * 8, path="", digest="f" * 64, counts={"bytes": 4 * 800}
    )
    planned = planned_epochs(config, {"collect": documents})
    assert planned is not None
    assert (planned.trained, planned.size) == (520 * 16, 775)
    assert planned.sources[0][1] == 520 * 16 / 775
    write_json(tmp_path / "state.json", {"train": TrainState(40, 20).to_json()})
    assert requested_samples(config) == (20 + 60 * 2, 20, None)


def artifact(tmp_path: Path, **counts: int) -> Artifact:
    write_tokens(tmp_path / TOKENS_NAMES[0], [3])
    return Artifact(
        stage="tokenize", key="ab" * 8, path=str(tmp_path), digest="f" * 64, counts=counts
    )


def test_vocabulary_that_ranks_cannot_divide_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Hardware, "detect", classmethod(lambda cls: Hardware(cores=4, memory=2**33))
    )
    config = tensor_parallel_config()
    inputs = RunData(
        artifact(tmp_path),
        artifact(tmp_path, vocab_size=510, special_tokens={"eod": 0}),
        artifact(tmp_path),
    )
    job = make_job(config, tmp_path, inputs)
    assert (job.ranks, job.precision) == (2, "fp32")
    odd = RunData(
        artifact(tmp_path),
        artifact(tmp_path, vocab_size=511, special_tokens={"eod": 0}),
        artifact(tmp_path),
    )
    with pytest.raises(
        ParallelLayoutError, match="padded vocabulary of 511 entries is not a multiple"
    ):
        make_job(config, tmp_path, odd)


def test_job_of_one_rank_ignores_the_layout(tmp_path: Path) -> None:
    tokenizer = artifact(tmp_path, vocab_size=511, special_tokens={"eod": 0})
    job = job_of(
        tensor_parallel_config(),
        tmp_path,
        RunData(artifact(tmp_path), tokenizer, artifact(tmp_path)),
        ranks=1,
        threads=3,
    )
    assert (job.ranks, job.threads_per_rank, job.vocab_size) == (1, 3, 511)
    # Every stage of the run starts its ranks with these fields and its own.
    names = ("checkpoint", "output_directory")
    ConvertJob(**job.model_dump(), **dict.fromkeys(names, "/"), card={})
    EvaluateJob(**job.model_dump(), checkpoints=(), unigram=True, output="/")
    assert TrainJob(**job.model_dump(), planned_samples=8).planned_samples == 8


def test_other_hosts_are_asked_only_for_the_precision_auto(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def answer(launch: LaunchConfig) -> Hardware:
        asked.append(launch)
        return Hardware(8, 2**33, native_bf16=True, host="worker-1")

    monkeypatch.setattr(train, "hardware_of", answer)
    config = tensor_parallel_config()
    fixed = config.model_copy(
        update={"train": config.train.model_copy(update={"precision": "fp16"})}
    )
    assert precision_of(fixed) == "fp16"
    assert not asked
    assert config.train.precision == "auto"
    assert precision_of(config) == "bf16"
    assert asked == [config.launch]


def tensor_parallel_config() -> RunConfig:
    """Return a configuration of two tensor-parallel ranks without vocabulary padding."""
    config = make_config()
    changes = {
        "parallel": config.parallel.model_copy(update={"tensor_model_parallel_size": 2}),
        "model": config.model.model_copy(update={"make_vocab_size_divisible_by": 1}),
        "launch": config.launch.model_copy(update={"nproc_per_node": "auto"}),
    }
    return config.model_copy(update=changes)
