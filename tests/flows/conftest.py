"""Prefect server, workspace, tiny corpus and short configuration of all flow tests."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests._prefect import prefect_harness

if TYPE_CHECKING:
    from tasks._stage_runner import StageRunner

ROOT = Path(__file__).parents[2]


def server_environment(workspace: Path) -> dict[str, str]:
    """Return the environment to run a flow in `workspace` on the session's Prefect server."""
    from prefect.settings import PREFECT_API_URL

    return {
        "MEGACORE_WORKSPACE": str(workspace),
        "MLFLOW_TRACKING_URI": f"sqlite:///{workspace / 'mlflow.db'}",
        "PREFECT_API_URL": str(PREFECT_API_URL.value()),
        "PREFECT_HOME": str(workspace / "prefect"),
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(workspace / "prefect" / "results"),
    }


def write_corpus(directory: Path, files: int = 60) -> None:
    """Write a small tree of Python source, different in every file."""
    directory.mkdir(parents=True)
    for number in range(files):
        lines = [
            f"def function_{number}_{line}(value):\n    return value * {line} + {number}\n"
            for line in range(30)
        ]
        (directory / f"module_{number:03d}.py").write_text("\n".join(lines), encoding="utf-8")


def tiny_config(corpus: Path) -> dict[str, Any]:
    """Return the configuration of three training steps of a two-layer model."""
    return {
        "name": "flow-test",
        "data": {
            "source": {"kind": "source_tree", "path": str(corpus)},
            "tokenizer": {"kind": "train-bpe", "vocab_size": 320},
            "split": "80,10,10",
            "seq_length": 32,
        },
        "model": {
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "optim": {"lr": 1e-3},
        "train": {
            "micro_batch_size": 2,
            "global_batch_size": 2,
            "train_iters": 3,
            "precision": "fp32",
            "log_interval": 1,
            "eval_interval": 2,
            "eval_iters": 2,
        },
        "checkpoint": {"save_interval": 2, "keep_last": 2},
        "evaluate": {"max_samples": 8},
        "export": {"parity_samples": 2, "sample_tokens": 8},
        # Threads of a rank would wait for each other on cores that other tests use.
        "launch": {"nproc_per_node": 1, "threads_per_rank": 1, "retries": 0},
    }


@contextmanager
def use_workspace(root: Path, store: Path) -> Iterator[None]:
    """Let the flows of the body use the workspace `root` with a copy of an empty MLflow store.

    The Prefect server is the session's.
    """
    root.mkdir(exist_ok=True)
    shutil.copy(store, root / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGACORE_WORKSPACE", str(root))
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / 'mlflow.db'}")
        yield


@contextmanager
def on_report(call: "Callable[[StageRunner[Any]], object]") -> Iterator[None]:
    """Call a function with the runner of each flow that ends in the body, before its report."""
    from tasks._stage_runner import StageRunner

    report = StageRunner._report

    def call_and_report(runner: StageRunner[Any]) -> None:
        call(runner)
        report(runner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageRunner, "_report", call_and_report)
        yield


def outcomes(runner: "StageRunner[Any]") -> dict[str, str]:
    """Return the outcome of each stage, in order."""
    return {row.stage: row.outcome for row in runner.rows}


@dataclass
class FlowRun:
    """Outcomes of the stages of one run of `pretrain`."""

    outcomes: dict[str, str] = field(default_factory=dict)
    error: BaseException | None = None
    flow_run_id: str = ""

    def stages(self, outcome: str) -> list[str]:
        """Return the names of the stages with this outcome, in order."""
        return [stage for stage, result in self.outcomes.items() if result == outcome]


@dataclass
class Bench:
    """The shared workspace and a function that runs the flow in it."""

    workspace: Path
    conf: Path
    corpus: Path
    pretrain: Callable[..., FlowRun]


@pytest.fixture(scope="session")
def workspace(
    empty_store: Path, prefect_database: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Provide a workspace with Prefect's temporary server and results in it."""
    root = tmp_path_factory.mktemp("workspace")
    from prefect.settings import (
        PREFECT_LOCAL_STORAGE_PATH,
        PREFECT_SERVER_ANALYTICS_ENABLED,
        temporary_settings,
    )

    settings = {
        PREFECT_LOCAL_STORAGE_PATH: root / "prefect" / "results",
        PREFECT_SERVER_ANALYTICS_ENABLED: False,
    }
    with (
        use_workspace(root, empty_store),
        temporary_settings(settings),
        prefect_harness(prefect_database),
    ):
        yield root


@pytest.fixture
def separate_workspace(workspace: Path, empty_store: Path, tmp_path: Path) -> Iterator[Path]:
    """Provide a workspace for one test, on the session's server."""
    root = tmp_path / "workspace"
    with use_workspace(root, empty_store):
        yield root


@pytest.fixture(scope="module")
def warm_ranks() -> Iterator[None]:
    """Fork the single ranks of the flows of a file from a warm process."""
    from megacore.ranks import stages
    from tests.flows import _warm_ranks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "supervise", _warm_ranks.supervise)
        yield


@pytest.fixture
def lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first attempt of a training lose a rank once its first checkpoint is complete."""
    from megacore.ranks import stages

    start_ranks = stages.start_ranks

    def start(launch: Any, module: str, *arguments: Any) -> Any:
        if module in ("megacore.ranks.pretrain", "megacore.ranks.finetune"):
            monkeypatch.setenv("MEGACORE_TEST_RANK", module)
            module = "tests.flows._lost_rank"
        return start_ranks(launch, module, *arguments)

    monkeypatch.setattr(stages, "start_ranks", start)


@pytest.fixture(scope="session")
def bench(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Provide the flow `pretrain` on a tiny corpus.

    It returns each stage's outcome instead of raising. Its ranks are forked from a warm process.
    """
    directory = tmp_path_factory.mktemp("conf")
    write_corpus(directory / "corpus")
    conf = directory / "flow-test.yaml"
    conf.write_text(yaml.safe_dump(tiny_config(directory / "corpus")), encoding="utf-8")

    from flows.pretrain import pretrain
    from megacore.ranks import stages
    from tests.flows import _warm_ranks

    def run(**overrides: Any) -> FlowRun:
        result = FlowRun()

        def remember(runner: "StageRunner[Any]") -> None:
            result.outcomes = outcomes(runner)

        def remember_run(flow: Any, flow_run: Any, state: Any) -> None:
            result.flow_run_id = str(flow_run.id)

        with on_report(remember), pytest.MonkeyPatch.context() as patch:
            patch.setattr(pretrain, "on_failure_hooks", [remember_run])
            patch.setattr(stages, "supervise", _warm_ranks.supervise)
            try:
                pretrain(
                    str(conf), {key.replace("__", "."): value for key, value in overrides.items()}
                )
            except Exception as error:
                result.error = error
        return result

    return Bench(workspace, conf, directory / "corpus", run)
