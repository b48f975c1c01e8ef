"""One perplexity on every page of a deployed run, also after a kill in the middle."""

import json
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import yaml

from tests._browser import Browser, browser
from tests._limits import HANG
from tests.flows.conftest import tiny_config, write_corpus
from tests.scripts._clone import Clone, ask

if TYPE_CHECKING:
    from mlflow import MlflowClient

DEPLOYMENT = "pretrain/gpt2-tiny"
FIRST = "bert-345m"
"""Deployment at the top of Prefect's page."""
REPORTED = "prefect.flow_runs.worker - Check whether"
"""Beginning of the worker's last message about a flow run whose process was killed."""
ITERATIONS = [60, 120, 180]

pytestmark = pytest.mark.slow


@dataclass
class Team:
    """Servers of a clone, on which one run was killed in the middle, retried and finished."""

    clone: Clone
    flow_run: str
    log: str
    """Output of the worker and of its flow runs."""

    def prefect(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer of Prefect's API."""
        return prefect(self.clone, path, body)

    @property
    def run_directory(self) -> Path:
        """Directory of the only run."""
        (directory,) = (self.clone.workspace / "runs").glob("[!.]*")
        return directory

    @property
    def mlflow(self) -> "MlflowClient":
        """Client of the store of the runs."""
        from mlflow import MlflowClient

        return MlflowClient(f"sqlite:///{self.clone.workspace / 'mlflow.db'}")

    def mlflow_page(self, path: str) -> str:
        """Return the address of a page of the experiment."""
        experiment = self.mlflow.get_experiment_by_name("pretrain").experiment_id
        port = self.clone.ports[1]
        return (
            f"http://127.0.0.1:{port}/#/experiments/{experiment}/{path}"
            "?workflowType=machine_learning"
        )


def prefect(clone: Clone, path: str, body: dict[str, Any]) -> Any:
    status, text = ask(f"http://127.0.0.1:{clone.ports[0]}/api/{path}", body, clone.login)
    assert status == 200, text
    return json.loads(text)


def worker_log(clone: Clone) -> str:
    return (clone.workspace / "servers" / "worker.log").read_text(encoding="utf-8")


def wait_for(clone: Clone, condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline, f"not {what}:\n{worker_log(clone)[-4000:]}"
        time.sleep(0.1)


def flow_run(clone: Clone) -> dict[str, Any]:
    (run,) = prefect(clone, "flow_runs/filter", {})
    return dict(run)


def kill_flow(clone: Clone) -> None:
    """Kill the process of the flow run that the worker started."""
    worker = psutil.Process(clone.state()["processes"]["worker"]["pid"])
    (flow,) = (
        child
        for child in worker.children(recursive=True)
        if "prefect.engine" in " ".join(child.cmdline())
        or "flow_engine" in " ".join(child.cmdline())
    )
    flow.kill()


@pytest.fixture(scope="module")
def team(
    empty_store: Path, prefect_database: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Team]:
    clone = Clone(tmp_path_factory.mktemp("team"))
    clone.deploy_only("gpt2-tiny", FIRST)
    (clone.workspace / "prefect").mkdir(parents=True, exist_ok=True)
    shutil.copy(empty_store, clone.workspace / "mlflow.db")
    shutil.copy(prefect_database, clone.workspace / "prefect" / "prefect.db")
    write_corpus(clone.root / "corpus")
    config = tiny_config(clone.root / "corpus")
    config["train"] |= {"train_iters": ITERATIONS[-1], "log_interval": 20, "eval_interval": 60}
    config["checkpoint"] = {"save_interval": ITERATIONS[0], "keep_last": len(ITERATIONS) + 1}
    conf = clone.root / "conf" / "flow-test.yaml"
    conf.write_text(yaml.safe_dump(config), encoding="utf-8")
    try:
        started = clone.servers("start")
        assert started.returncode == 0, started.stderr
        run = clone.prefect("deployment", "run", DEPLOYMENT, "--param", "conf=flow-test")
        assert run.returncode == 0, run.stdout + run.stderr
        first = f"runs/*/checkpoints/iter_{ITERATIONS[0]:07d}/complete.json"
        wait_for(clone, lambda: any(clone.workspace.glob(first)), "saved")
        kill_flow(clone)
        # The worker's last report of the crash would undo an earlier retry.
        wait_for(clone, lambda: REPORTED in worker_log(clone), "reported")
        assert flow_run(clone)["state"]["type"] == "CRASHED"
        retried = clone.prefect("flow-run", "retry", flow_run(clone)["id"])
        assert retried.returncode == 0, retried.stdout + retried.stderr
        wait_for(clone, lambda: flow_run(clone)["state"]["type"] == "COMPLETED", "finished")
        yield Team(clone, str(flow_run(clone)["id"]), worker_log(clone))
    finally:
        clone.servers("stop")


@pytest.fixture(scope="module")
def page(team: Team) -> Iterator[Browser]:
    """Provide a browser that is logged in like a user's."""
    login, (prefect_port, mlflow_port) = team.clone.login, team.clone.ports
    with browser() as tab:
        tab.open(f"http://127.0.0.1:{prefect_port}/deployments")
        tab.wait_for_element("input")
        assert FIRST not in tab.text()
        tab.enter(login)
        tab.wait_for("Deployments", FIRST)
        tab.open(f"http://{login}@127.0.0.1:{mlflow_port}/version")  # the browser keeps the login
        tab.wait_for(version("mlflow"))
        yield tab


@dataclass
class Best:
    """The best checkpoint, and its perplexities as the pages show them."""

    iteration: int
    valid_ppl: str
    test_ppl: str


@pytest.fixture(scope="module")
def measured(team: Team) -> dict[int, float]:
    """Return the validation PPL that training measured of each checkpoint, by iteration."""
    lines = (team.run_directory / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [event for event in map(json.loads, lines) if event["kind"] == "perplexity"]
    assert {event["attempt"] for event in events} == {1, 2}
    return {event["iteration"]: event["valid_ppl"] for event in events}


@pytest.fixture(scope="module")
def best(team: Team, measured: dict[int, float]) -> Best:
    """Return the best checkpoint as training measured it, with the test PPL of `evaluate`."""
    iteration = min(measured, key=lambda iteration: measured[iteration])
    (test_ppl,) = set(re.findall(rf"iteration {iteration} \| .*test_ppl: ([0-9.]+)", team.log))
    return Best(iteration, f"{measured[iteration]:.2f}", f"{float(test_ppl):.2f}")


def test_killed_and_retried_run_has_one_row_per_checkpoint(
    team: Team, measured: dict[int, float]
) -> None:
    iterations = sorted(measured)
    assert set(ITERATIONS) <= set(iterations)
    tasks = team.prefect("task_runs/filter", {"flow_runs": {"id": {"any_": [team.flow_run]}}})
    names = [task["name"] for task in tasks if task["name"].startswith("evaluate iter_")]
    assert sorted(names) == [f"evaluate iter_{iteration:07d}" for iteration in iterations]
    table = json.loads(newest_artifact(team, "perplexity")["data"])
    assert [row["iteration"] for row in table] == iterations
    experiment = team.mlflow.get_experiment_by_name("pretrain").experiment_id
    models = team.mlflow.search_logged_models([experiment], "model_type = 'checkpoint'")
    assert sorted(int(model.params["step"]) for model in models) == iterations
    for model in models:
        logged = Counter(metric.key for metric in model.metrics)
        assert logged["valid_ppl"] == logged["test_ppl"] == 1
    assert len(team.mlflow.search_runs([experiment])) == 1


def newest_artifact(team: Team, key: str) -> dict[str, Any]:
    (latest,) = team.prefect("artifacts/latest/filter", {"artifacts": {"key": {"any_": [key]}}})
    (artifact,) = team.prefect(
        "artifacts/filter", {"artifacts": {"id": {"any_": [latest["latest_id"]]}}}
    )
    return dict(artifact)


def test_terminal_shows_the_perplexities(team: Team, best: Best) -> None:
    listed = team.clone.command(str(Path(sys.executable).with_name("megacore")), "runs")
    for shown in (team.log, listed.stdout):
        assert best.valid_ppl in shown
        assert best.test_ppl in shown


@pytest.mark.parametrize("key", ["perplexity", "summary"])
def test_artifact_in_prefect_shows_the_perplexities(
    team: Team, best: Best, page: Browser, key: str
) -> None:
    identifier = newest_artifact(team, key)["id"]
    page.open(f"http://127.0.0.1:{team.clone.ports[0]}/artifacts/artifact/{identifier}")
    page.wait_for(best.valid_ppl, best.test_ppl)


def test_run_in_mlflow_shows_the_perplexities(team: Team, best: Best, page: Browser) -> None:
    experiment = team.mlflow.get_experiment_by_name("pretrain").experiment_id
    (run,) = team.mlflow.search_runs([experiment])
    page.open(team.mlflow_page(f"runs/{run.info.run_id}"))
    page.wait_for("valid_ppl", best.valid_ppl, "test_ppl", best.test_ppl)


def test_checkpoint_and_exported_model_in_mlflow_show_the_perplexities(
    team: Team, best: Best, page: Browser
) -> None:
    experiment = team.mlflow.get_experiment_by_name("pretrain").experiment_id
    models = team.mlflow.search_logged_models([experiment], f"params.step = '{best.iteration}'")
    assert len(models) == 2
    for model in models:
        page.open(team.mlflow_page(f"models/{model.model_id}"))
        page.wait_for(model.name, best.valid_ppl, best.test_ppl)


def test_report_shows_the_perplexities(team: Team, best: Best, page: Browser) -> None:
    page.open((team.run_directory / "report.html").as_uri())
    page.wait_for(f"Test PPL\n{best.test_ppl}", f"Validation PPL\n{best.valid_ppl}")
