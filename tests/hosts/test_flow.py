"""The flow `pretrain` on host a with ranks on a and b, by either launcher, is the flow with both
ranks on one host."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megacore.artifact.manifest import Manifest
from megacore.jobs.run import TrainJob
from tests.flows.conftest import tiny_config, write_corpus
from tests.hosts import _jobs
from tests.hosts._rig import Rig

KINDS = ("torchrun", "deepspeed")


@pytest.fixture(scope="module")
def flows(rig: Rig) -> Rig:
    """The hosts after one flow by each launcher.

    What was trained lies in `trained-0` and `trained-1` of host a.
    """
    pytest.importorskip("deepspeed")
    write_corpus(rig.disk("a") / "corpus")
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
        "retries": 0,
    }
    conf = rig.shared / "hosts.yaml"
    conf.write_text(yaml.safe_dump(config))
    # The doctor examines the hosts once.
    first, second = ({"launch.kind": kind} for kind in KINDS)
    overrides = [json.dumps(first), json.dumps(second | {"launch.preflight": "off"})]
    environment = {
        "MEGACORE_WORKSPACE": str(rig.workspace),
        "MLFLOW_TRACKING_URI": f"sqlite:///{rig.workspace / 'mlflow.db'}",
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(rig.workspace / "prefect"),
    }
    words = [sys.executable, "-m", "tests.hosts._flow", str(conf), *overrides]
    done = rig.run("a", words, env=environment, timeout=500)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return rig


@pytest.fixture(scope="module")
def on_one_host(flows: Rig, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Events of the same training with both ranks on host a."""
    there = flows.disk("a") / "trained-0"
    told = TrainJob.read(there / "run.json")
    launch = told.config.launch.model_copy(
        update={
            "hostfile": None,
            "ssh_config": None,
            "data_placement": "shared",
            "nproc_per_node": 2,
        }
    )
    run = flows.workspace / "runs" / "one"
    update = {
        "config": told.config.model_copy(update={"launch": launch}),
        "hosts": {},
        "run_directory": str(run),
    }
    path = _jobs.write_job(
        flows, told.model_copy(update={**update, "exit_directory": str(run / "exit")})
    )
    outcome = tmp_path_factory.mktemp("one") / "outcome"
    done = flows.run(
        "a", [sys.executable, "-m", "tests.hosts._train", str(path), str(outcome)], timeout=120
    )
    assert json.loads(outcome.read_text())["error"] == "", done.stderr
    return _jobs.events(_jobs.as_seen_outside(flows, run))


def numbers(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What was computed, to the last bit."""
    names = ("iteration", "lm_loss", "grad_norm", "consumed_samples", "validation_loss", "loss")
    kinds = ("step", "evaluation")
    return [tuple(event.get(name) for name in names) for event in events if event["kind"] in kinds]


@pytest.mark.parametrize("number", range(len(KINDS)), ids=KINDS)
def test_two_hosts_train_as_one_does(
    flows: Rig, on_one_host: list[dict[str, Any]], number: int
) -> None:
    trained = flows.disk("a") / f"trained-{number}"
    found = numbers(_jobs.events(trained))
    assert len([row for row in found if row[1] is not None]) >= 6
    assert found == numbers(on_one_host)
    assert (
        "hosts: a (rank 0 through eth0), b (rank 1 through eth0)"
        in (trained / "logs" / "attempt-001.log").read_text()
    )


def test_every_file_of_the_run_is_on_the_host_that_started_it(flows: Rig) -> None:
    for number in range(len(KINDS)):
        trained = flows.disk("a") / f"trained-{number}"
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
        assert [path for path in (flows.disk("a") / stage).iterdir() if path.is_dir()]
    left = flows.disk("b")
    assert not [*left.rglob("*.tmp-*"), *left.rglob("rank_1.json.gz")]
    assert all((path / "copied").exists() for path in left.glob("runs/*/checkpoints/iter_*"))


def test_host_b_has_what_its_ranks_read_and_no_more(flows: Rig) -> None:
    told = TrainJob.read(flows.disk("a") / "trained-0" / "run.json")
    for directory in (
        told.index_directory,
        told.tokenizer_directory,
        str(Path(told.token_prefixes[0]).parent),
    ):
        here, there = (_jobs.as_seen_outside(flows, Path(directory), host) for host in "ab")
        named = {*Manifest.read(here).files, "manifest.json"}
        assert {
            name: content for name, content in _jobs.digests(here).items() if name in named
        } == _jobs.digests(there)
    assert not (flows.disk("b") / "corpora").exists()
    assert not (flows.disk("b") / "exports").exists()
