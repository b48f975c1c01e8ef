"""The flow `pretrain` with ranks on two hosts, compared with both ranks on one host."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megacore.artifact.manifest import Manifest
from megacore.jobs.run import TrainJob
from tests._limits import HANG
from tests.flows.conftest import tiny_config, write_corpus
from tests.hosts import _jobs
from tests.hosts._rig import Rig

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def conf(rig: Rig, empty_store: Path) -> Path:
    """Return the configuration of a flow on both hosts, whose corpus is on host a."""
    write_corpus(rig.disk("a") / "corpus")
    shutil.copy(empty_store, rig.disk("a") / "mlflow.db")
    config = tiny_config(rig.workspace / "corpus")
    config["train"] |= {
        "global_batch_size": 8,
        "train_iters": 6,
        "eval_interval": 3,
        "profile": {"from": 5, "to": 5},
    }
    config["checkpoint"] = {"save_interval": 3, "keep_last": 2}
    config["launch"] = {
        "hostfile": str(rig.hostfile()),
        "ssh_config": str(rig.ssh_config),
        "data_placement": "node_local",
        "threads_per_rank": 1,
        "retries": 0,
    }
    path = rig.shared / "hosts.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(
    scope="module", params=["torchrun", pytest.param("deepspeed", marks=pytest.mark.long)]
)
def trained(rig: Rig, conf: Path, prefect_database: Path, request: pytest.FixtureRequest) -> Path:
    """Run the flow with a launcher and return the directory of its run on host a.

    It is moved away there, so that another launcher trains too.
    """
    kind = request.param
    pytest.importorskip("deepspeed")
    environment = {
        "MEGACORE_WORKSPACE": str(rig.workspace),
        "MLFLOW_TRACKING_URI": f"sqlite:///{rig.workspace / 'mlflow.db'}",
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(rig.workspace / "prefect"),
    }
    database = shutil.copy(prefect_database, rig.shared / f"{kind}.db")
    overrides = json.dumps({"launch.kind": kind})
    words = [sys.executable, "-m", "tests.hosts._flow", str(database), str(conf), overrides]
    result = rig.run("a", words, env=environment, timeout=2 * HANG)
    assert result.returncode == 0, (result.stdout + result.stderr)[-5000:]
    (run,) = (path for path in (rig.disk("a") / "runs").glob("[0-9a-f]*") if path.is_dir())
    return run.rename(rig.disk("a") / f"trained-{kind}")


@pytest.fixture(scope="module")
def events_on_one_host(
    rig: Rig, trained: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Return events of the same training with both ranks on host a."""
    job = TrainJob.read(trained / "run.json")
    launch = job.config.launch.model_copy(
        update={
            "kind": "torchrun",
            "hostfile": None,
            "ssh_config": None,
            "data_placement": "shared",
            "nproc_per_node": 2,
        }
    )
    run = rig.workspace / f"{trained.name}-on-one-host"
    update = {
        "config": job.config.model_copy(update={"launch": launch}),
        "hosts": {},
        "run_directory": str(run),
    }
    path = _jobs.write_job(
        rig, job.model_copy(update={**update, "exit_directory": str(run / "exit")})
    )
    outcome = tmp_path_factory.mktemp("one") / "outcome"
    result = rig.run("a", [sys.executable, "-m", "tests.hosts._train", str(path), str(outcome)])
    assert json.loads(outcome.read_text())["error"] == "", result.stderr
    return _jobs.events(_jobs.as_seen_outside(rig, run))


def computed_values(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the computed values of the events, to the last bit."""
    names = ("iteration", "lm_loss", "grad_norm", "consumed_samples", "validation_loss", "loss")
    kinds = ("step", "evaluation")
    return [tuple(event.get(name) for name in names) for event in events if event["kind"] in kinds]


def test_two_hosts_train_like_one(trained: Path, events_on_one_host: list[dict[str, Any]]) -> None:
    values = computed_values(_jobs.events(trained))
    assert len([row for row in values if row[1] is not None]) >= 6
    assert values == computed_values(events_on_one_host)
    assert (
        "hosts: a (rank 0 through eth0), b (rank 1 through eth0)"
        in (trained / "logs" / "attempt-001.log").read_text()
    )


def test_all_files_of_the_run_are_on_the_starting_host(rig: Rig, trained: Path) -> None:
    names = {path.name for path in (trained / "checkpoints" / "iter_0000006").iterdir()}
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "complete.json"} <= names
    assert {path.name for path in (trained / "exit").glob("*.beat")} == {
        "rank_00000.beat",
        "rank_00001.beat",
    }
    assert {"rank_0.json.gz", "rank_1.json.gz"} <= {
        path.name for path in (trained / "profile").iterdir()
    }
    for stage in ("evaluations", "exports"):
        assert [path for path in (rig.disk("a") / stage).iterdir() if path.is_dir()]
    other_disk = rig.disk("b")
    assert not [*other_disk.rglob("*.tmp-*"), *other_disk.rglob("rank_1.json.gz")]
    assert all((path / "copied").exists() for path in other_disk.glob("runs/*/checkpoints/iter_*"))


def test_other_host_gets_only_the_files_its_ranks_read(rig: Rig, trained: Path) -> None:
    job = TrainJob.read(trained / "run.json")
    for directory in (
        job.index_directory,
        job.tokenizer_directory,
        str(Path(job.token_prefixes[0]).parent),
    ):
        source, copy = (_jobs.as_seen_outside(rig, Path(directory), host) for host in "ab")
        expected_names = {*Manifest.read(source).files, "manifest.json"}
        assert {
            name: content
            for name, content in _jobs.digests(source).items()
            if name in expected_names
        } == _jobs.digests(copy)
    assert not (rig.disk("b") / "corpora").exists()
    assert not (rig.disk("b") / "exports").exists()
