"""Hosts, data and resources of the run that the doctor examines."""

from dataclasses import replace
from pathlib import Path

import pytest

from megacore.artifact import Workspace
from megacore.config.launch import LaunchConfig
from megacore.config.spec import ModelSpec
from megacore.doctor.examine import examine
from megacore.doctor.subject import RunData, Subject, data_at, data_of, needs_of, own_name
from megacore.errors import ConfigError, DataFormatError, ParallelLayoutError
from megacore.models.parameters import parameter_count
from megacore.plan.memory import whole_muon_elements
from tests.train import _runs


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """Provide a workspace with one run and its data."""
    run = _runs.config()
    _runs.write_data(tmp_path / "data", run)
    directory = Workspace(tmp_path).folder("train") / "0123"
    directory.mkdir(parents=True)
    _runs.job(run, tmp_path / "data", directory).write(directory / "run.json")
    return tmp_path


def test_data_of_a_configuration_is_read_from_its_newest_run(prepared: Path) -> None:
    workspace = Workspace(prepared)
    data = data_of(_runs.config(), workspace)
    prefix = str(prepared / "data" / "tokens_text_document")
    assert data == RunData((prefix,), _runs.VOCAB_SIZE, str(prepared / "data" / "index"))
    # A configuration with other data has no data in the workspace yet.
    assert data_of(_runs.config(data={"seq_length": 32}), workspace) == RunData()
    (workspace.folder("train") / "0123" / "run.json").write_text("{}")
    assert data_of(_runs.config(), workspace) == RunData()


def test_configured_token_files_are_examined_before_a_run(prepared: Path) -> None:
    prefix = str(prepared / "data" / "tokens_text_document")
    run = _runs.config(data={"source": {"kind": "prefix", "prefix": prefix}})
    assert data_of(run, Workspace(prepared)) == RunData((prefix,), 512)
    hub = _runs.config(
        data={
            "source": {"kind": "prefix", "prefix": prefix},
            "tokenizer": {"kind": "hf", "name": "a/b"},
        }
    )
    data = data_of(hub, Workspace(prepared))
    assert data == RunData((prefix,), None)  # which vocabulary, only the hub knows
    report = examine(Subject({own_name(): 1}, prepared, data=data), full=False)
    found = next(finding for finding in report.findings if finding.check == "tokens")
    assert found.verdict == "ok"
    assert "ids are not compared" in found.found[own_name()]


def test_token_files_are_given_by_directory_or_prefix(prepared: Path) -> None:
    prefix = str(prepared / "data" / "tokens_text_document")
    assert data_at(prepared / "data", 61) == data_at(Path(prefix), 61) == RunData((prefix,), 61)
    missing = str(prepared / "missing")
    assert data_at(Path(f"{missing}.idx"), 61) == RunData((missing,), 61)
    with pytest.raises(DataFormatError, match=r"holds no token files .*: give the path of"):
        data_at(Path(prefix).parent.parent, 61)
    with pytest.raises(ConfigError, match="give --vocab-size too"):
        data_at(Path(prefix), None)


def test_needs_include_memory_gradients_and_checkpoints() -> None:
    run = _runs.config(checkpoint={"save_interval": 1, "keep_last": 2})
    subject = Subject(
        {"a": 1, "b": 1}, Path("/w"), run.launch, run, RunData(vocab_size=_runs.VOCAB_SIZE)
    )
    needs = needs_of(subject, "cpu", "fp32")
    assert needs is not None
    parameters = parameter_count(ModelSpec.of(run, _runs.VOCAB_SIZE))
    assert (needs.checkpoint, needs.gradients) == (12 * parameters, 4 * parameters)
    assert (
        needs.checkpoints == 4 * needs.checkpoint
    )  # two newest, the best, and the one being written
    assert needs.device > 100 * 2**20
    muon = _runs.config(optim={"name": "muon"})
    less = needs_of(replace(subject, config=muon), "cpu", "fp32")
    assert less is not None
    matrices = whole_muon_elements(muon, _runs.VOCAB_SIZE)
    assert less.checkpoint == 12 * parameters - 4 * matrices
    assert needs_of(Subject({"a": 1}, Path("/w")), "cpu", "fp32") is None
    with pytest.raises(ParallelLayoutError):
        needs_of(Subject({"a": 3}, Path("/w"), run.launch, run), "cpu", "fp32")


def test_unknown_ranks_are_those_of_a_start() -> None:
    """ZeRO shards the state over one rank on each GPU, or the ranks of one replica without GPUs."""
    zero = {"data_parallel_sharding": "optimizer"}
    run = _runs.config(parallel=zero, launch={"nproc_per_node": "auto"})
    unknown = Subject.of_launch(run.launch, Path("/w"), run, RunData())
    assert dict(unknown.hosts) == {own_name(): 0}
    assert dict(unknown.with_ranks({own_name(): 4}).hosts) == {own_name(): 4}
    assert dict(unknown.with_ranks({}).hosts) == {own_name(): 1}
    two = _runs.config(parallel={"tensor_model_parallel_size": 2}, launch=run.launch.model_dump())
    assert dict(replace(unknown, config=two).with_ranks({}).hosts) == {own_name(): 2}
    assert dict(replace(unknown, config=None).with_ranks({}).hosts) == {own_name(): 0}
    assert dict(Subject({"a": 3}, Path("/w")).with_ranks({"a": 8}).hosts) == {"a": 3}
    given = needs_of(Subject({"a": 4}, Path("/w"), run.launch, run), "cpu", "fp32")
    assert needs_of(unknown.with_ranks({own_name(): 4}), "cpu", "fp32") == given
    one = needs_of(unknown.with_ranks({}), "cpu", "fp32")
    assert one is not None
    assert given is not None
    assert one.device > given.device


def test_a_schedulers_run_has_the_ranks_of_all_its_hosts() -> None:
    zero = {"data_parallel_sharding": "optimizer"}
    launch = {"kind": "slurm", "allow_cpu": True, "nproc_per_node": 2}
    for nodes, slots in ((2, {"a": 2, "b": 2}), ("1:2", {"a": 2})):
        run = _runs.config(parallel=zero, launch=launch | {"nnodes": nodes})
        subject = Subject.of_launch(run.launch, Path("/w"), run, RunData())
        assert dict(subject.with_ranks({own_name(): 8}).hosts) == {own_name(): 2}
        expected = needs_of(Subject(slots, Path("/w"), LaunchConfig(), run), "cpu", "fp32")
        assert needs_of(subject, "cpu", "fp32") == expected


def test_elastic_run_needs_the_memory_of_its_fewest_hosts() -> None:
    """ZeRO shards the state over these hosts: on fewer hosts each rank needs more memory."""
    hosts = {"a": 2, "b": 2, "c": 2}
    zero = {"data_parallel_sharding": "optimizer"}
    fixed = _runs.config(parallel=zero, launch={"hostfile": "h", "nnodes": 2})
    elastic = _runs.config(parallel=zero, launch={"hostfile": "h", "nnodes": "2:3"})
    expected = needs_of(Subject({"a": 2, "b": 2}, Path("/w"), fixed.launch, fixed), "cpu", "fp32")
    needs = needs_of(Subject(hosts, Path("/w"), elastic.launch, elastic), "cpu", "fp32")
    assert needs is not None
    assert needs == expected
    minimal = _runs.config(parallel=zero, launch={"hostfile": "h", "nnodes": "1:3"})
    most = needs_of(
        Subject(dict.fromkeys(hosts, 1), Path("/w"), minimal.launch, minimal), "cpu", "fp32"
    )
    assert most is not None
    assert most.device > needs.device


def test_hosts_of_a_run_are_the_selected_hosts_of_its_hostfile(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(prepared))
    (prepared / "hosts").write_text("a slots=2\nb slots=2\n")
    run = _runs.config(
        launch={"hostfile": str(prepared / "hosts"), "nproc_per_node": "auto", "exclude": ["b:1"]}
    )
    subject = Subject.of_run(_runs.job(run, prepared / "data", prepared / "run", ranks=3))
    assert dict(subject.hosts) == {"a": 2, "b": 1}
    assert subject.shared


def test_subject_without_a_hostfile_is_this_host(prepared: Path) -> None:
    subject = Subject.of_launch(LaunchConfig(), prepared, None, RunData())
    assert dict(subject.hosts) == {own_name(): 0}
    assert not subject.shared


@pytest.mark.parametrize("damaged", [False, True], ids=["intact", "damaged"])
def test_damaged_data_of_a_run_is_an_error(prepared: Path, damaged: bool) -> None:
    run = _runs.config()
    if damaged:
        with open(prepared / "data" / "tokens_text_document.bin", "r+b") as file:
            file.seek(200)
            file.write((_runs.VOCAB_SIZE).to_bytes(2, "little"))
        (prepared / "data" / "index" / "train_document_index.npy").unlink()
    data = data_of(run, Workspace(prepared))
    report = examine(Subject.of_launch(run.launch, prepared, run, data), full=False)
    findings = {finding.check: finding for finding in report.findings}
    wrong = {name for name, finding in findings.items() if finding.verdict == "error"}
    assert wrong == ({"tokens", "index maps"} if damaged else set())
    if damaged:
        assert "holds the id 61 (at token 100)" in findings["tokens"].advice
        assert "train_document_index.npy does not exist" in findings["index maps"].advice
    else:
        assert "tokens below 61" in findings["tokens"].found[own_name()]
