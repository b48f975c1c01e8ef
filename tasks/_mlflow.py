"""The MLflow store, and the single MLflow run of a training.

`mlflow` is imported when the store is first used, not when this module is imported.
"""

import hashlib
import json
import logging
import os
import platform
import shlex
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import unquote, urlsplit

import yaml

from megacore.artifact import Artifact, Workspace, lock
from megacore.artifact.build import try_lock
from megacore.artifact.files import (
    canonical_json,
    read_json,
    reason_of,
    workspace_errors,
    write_json,
)
from megacore.errors import FileAccessError, TrackingError, WorkspaceError, one_line
from megacore.hardware import installed_version
from megacore.paths import exists, glob
from megacore.plan.epochs import Epochs
from megacore.redact import redact, redact_values
from tasks._environment import sqlite_file, sqlite_url, tracking_uri
from tasks._flow_config import FlowConfig
from tasks._temporary_server import database_fault

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

STORE_ERRORS = (TrackingError, WorkspaceError, FileAccessError)
"""Errors that `Tracking.errors` raises."""
RunStatus = Literal["FINISHED", "FAILED", "KILLED"]
Answer = TypeVar("Answer")

RUN_ID_FILE = "mlflow.json"
"""Name of the file in the run directory with the id of its MLflow run."""
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "prefect", "mlflow", "megacore")
"""Packages whose versions a run records, in addition to Python's."""

ANSWERS = "mlflow.answers.json"
"""Name of the file in the workspace with answers of an unchanged store."""
_SQLITE = b"SQLite format 3\0"
_DAMAGED = ("file is not a database", "database disk image is malformed")
"""SQLite's errors for a file with other content."""
_ROLLBACK = b"\1\1"
"""Versions in the header of a SQLite file without a write-ahead log."""
_PARAMS_PER_BATCH = 100
_PARAM_LENGTH = 6000
_DIGEST_LENGTH = 36
_MOST_STEPS = 2500
"""Steps that MLflow returns at once; of more, it returns a sample."""
_TAG_KIND = "mlflow.experimentKind"
"""Tag by which MLflow's UI chooses the views of an experiment."""
VIEW = "by-ppl"
"""Key of the view of an experiment's runs that `runs_url` opens."""
_TAG_VIEW = f"mlflow.sharedViewState.{VIEW}"
"""Tag in which MLflow's UI keeps a shared view."""
_VIEW_STATE = {
    "searchFilter": "",
    "orderByKey": "metrics.`valid_ppl`",
    "orderByAsc": True,
    "startTime": "ALL",
    "lifecycleFilter": "Active",
    "modelVersionFilter": "All Runs",
    "datasetsFilter": [],
    "selectedColumns": [
        "metrics.`valid_ppl`",
        "metrics.`test_ppl`",
        "metrics.`valid_accuracy`",
        "metrics.`test_accuracy`",
        "tags.`tokens`",
        "tags.`step`",
        "tags.`attempts`",
    ],
    "columnOrder": [],
    "columnWidths": {},
    "runsExpanded": {},
    "runsPinned": [],
    "runsHidden": [],
    "runsVisibilityMap": {},
    "runsHiddenMode": "FIRST_10_RUNS",
    "viewMaximized": False,
    "runListHidden": False,
    "isAccordionReordered": False,
    "useGroupedValuesInCharts": True,
    "hideEmptyCharts": True,
    "groupBy": None,
    "groupsExpanded": {},
    "autoRefreshEnabled": True,
    "globalLineChartConfig": {
        "xAxisKey": "step",
        "lineSmoothness": 0,
        "selectedXAxisMetricKey": "",
    },
}
"""The whole state of MLflow 3.17's page of runs: it does not fill in what a shared view lacks."""
_TAG_TOKEN = "megacore.run_token"
_TAG_CONFIG = "megacore.config_sha256"
_TAG_CHANGED = "changed."
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    # The forwarder has its own retries; MLflow would by default retry one request for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_QUIET_LOGGERS = {
    "alembic": logging.WARNING,
    "mlflow.store.model_registry.abstract_store": logging.WARNING,
    "mlflow.store.db.utils": logging.CRITICAL,  # with a traceback, the error that it then raises
}


@dataclass(frozen=True)
class Dataset:
    """Data that a run reads, and to which its metrics can refer."""

    name: str
    digest: str
    """Hash of the content; MLflow keeps its first characters."""
    uri: str
    profile: Mapping[str, Any]
    """Counts of its parts, such as tokens."""

    @classmethod
    def of(cls, artifact: Artifact) -> "Dataset":
        """Return an artifact as data."""
        name = f"{artifact.stage}-{artifact.key}"
        return cls(name, artifact.digest, artifact.path, artifact.counts)

    @property
    def recorded_digest(self) -> str:
        """Digest as MLflow records it."""
        return self.digest[:_DIGEST_LENGTH]


@dataclass(frozen=True)
class RunFacts:
    """Facts that a run records in addition to its configuration."""

    key: str
    """Key of the training stage: the name of the run directory."""
    datasets: Mapping[str, Dataset] = field(default_factory=dict)
    """Data that training reads, by role, such as `train` and `valid`."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Further tags, such as the flow run's name."""
    epochs: Epochs | None = None
    """Epochs of a pretraining over its data, recorded as the metric `epochs`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further metrics without a step, such as those of the curation of the data."""


class Tracking:
    """An MLflow store: MLFLOW_TRACKING_URI if set, otherwise the workspace's SQLite file."""

    def __init__(self, workspace: Workspace, experiment: str) -> None:
        self.workspace = workspace
        self.experiment = experiment
        self.uri = os.environ.get("MLFLOW_TRACKING_URI") or tracking_uri(workspace)
        self._experiments: dict[str, str] = {}
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)

    @classmethod
    def of(cls, config: FlowConfig) -> "Tracking":
        """Return the store and experiment of a configuration's run."""
        return cls(Workspace.of(), config.tracking.experiment)

    @property
    def exists(self) -> bool:
        """True unless the store is a SQLite file that does not exist, and so has no runs."""
        file = sqlite_file(self.uri)
        return file is None or exists(file)

    @cached_property
    def client(self) -> "MlflowClient":
        """MLflow's client.

        The first use of a new SQLite file creates its tables, which takes seconds.
        """
        for name, level in _QUIET_LOGGERS.items():
            logging.getLogger(name).setLevel(level)
        from mlflow import MlflowClient

        with self.errors("open its store"):
            create_store(self.uri)
            return MlflowClient(
                tracking_uri=self.uri,
                registry_uri=os.environ.get("MLFLOW_REGISTRY_URI") or self.uri,
            )

    @cached_property
    def experiment_id(self) -> str:
        """Id of the experiment, which is created if absent, with its view of runs by perplexity.

        Its files are in the workspace if the store is the workspace's own.
        """
        from mlflow.exceptions import MlflowException

        view = json.dumps(_VIEW_STATE)
        with self.errors(f"open experiment {self.experiment!r}"):
            experiment = self.client.get_experiment_by_name(self.experiment)
            if experiment is None:
                try:
                    return self.client.create_experiment(
                        self.experiment,
                        artifact_location=self._artifact_location(),
                        tags={_TAG_KIND: "custom_model_development", _TAG_VIEW: view},
                    )
                except MlflowException as error:
                    if error.error_code != "RESOURCE_ALREADY_EXISTS":
                        raise
                    experiment = self.client.get_experiment_by_name(self.experiment)
            if experiment is None or experiment.lifecycle_stage != "active":
                raise TrackingError(
                    f"experiment {self.experiment!r} was deleted in MLflow at {redact(self.uri)}: "
                    "restore it there or set tracking.experiment to another name"
                )
            if experiment.tags.get(_TAG_VIEW) != view:
                self.client.set_experiment_tag(experiment.experiment_id, _TAG_VIEW, view)
            self._warn_of_old_place(experiment.artifact_location)
            return str(experiment.experiment_id)

    def experiment_of(self, run_id: str) -> str:
        """Return the id of a run's experiment, in which its models are.

        It differs from `experiment_id` if `tracking.experiment` was changed for a run that is
        continued. Raises TrackingError.
        """
        if run_id not in self._experiments:
            with self.errors(f"look up run {run_id}"):
                self._experiments[run_id] = self.client.get_run(run_id).info.experiment_id
        return self._experiments[run_id]

    def _warn_of_old_place(self, location: str) -> None:
        """Warn if the store has the experiment's files where the workspace was before a move."""
        expected = self._artifact_location()
        if expected is None or location == expected:
            return
        old, here = (Path(unquote(urlsplit(each).path)) for each in (location, expected))
        inner = here.relative_to(self.workspace.root).parts  # more than two for an experiment a/b
        if old.parts[-len(inner) :] == inner and old.resolve() != here.resolve():
            root = old.parents[len(inner) - 1]
            links = [shlex.quote(str(each)) for each in (self.workspace.root, root)]
            logging.getLogger("prefect.megacore").warning(
                "MLflow's store has the files of experiment %r in %s, where the workspace was "
                "before, and continues to read and write them there: `ln -s %s` makes it use "
                "the workspace's",
                self.experiment,
                old,
                " ".join(links),
            )

    @property
    def keeps_answers(self) -> bool:
        """True if `recall` can keep answers of this store."""
        return self._state() is not None

    def recall(self, question: Any, ask: Callable[[], Answer]) -> Answer:
        """Return `ask()`, or its answer to the same question if the store is unchanged since.

        This saves the import of mlflow, which takes seconds of processor time. Answers are kept
        only for a SQLite store that nobody, including `ask`, wrote meanwhile. With the content of
        the store, the JSON value `question` determines the answer.
        """
        state = self._state()
        if state is None:
            return ask()
        path = self.workspace.root / ANSWERS
        name = hashlib.sha256(canonical_json(question)).hexdigest()
        answers = _read_answers(path, state)
        if name in answers:
            answer: Answer = answers[name]
            return answer
        answer = ask()
        if self._state() == state:
            with suppress(WorkspaceError, FileAccessError, OSError):  # the next run asks again
                answers = _read_answers(path, state) | {name: answer}
                write_json(path, {"state": state, "answers": answers})
        return answer

    def _state(self) -> list[Any] | None:
        """Return values that change with each transaction, or None if the store has none."""
        file = sqlite_file(self.uri)
        if file is None or os.environ.get("MLFLOW_REGISTRY_URI", self.uri) != self.uri:
            return None
        try:
            with open(file, "rb") as opened:
                header, status = opened.read(28), os.fstat(opened.fileno())
        except OSError:
            return None
        logs = (file.with_name(f"{file.name}-{ending}") for ending in ("journal", "wal"))
        if header[:16] != _SQLITE or header[18:20] != _ROLLBACK or any(map(exists, logs)):
            return None
        view = hashlib.sha256(canonical_json(_VIEW_STATE)).hexdigest()
        programs = [installed_version(package) for package in ("mlflow", "megacore")]
        counter = header[24:28].hex()  # of transactions
        return [
            self.uri,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            counter,
            view,
            *programs,
        ]

    def _artifact_location(self) -> str | None:
        """Return the location of the experiment's files, or None to let a server decide."""
        if self.uri != tracking_uri(self.workspace):
            return None
        # A name such as /team/gpt2 is no path of this host.
        return (self.workspace.mlflow_artifacts / self.experiment.lstrip("/")).as_uri()

    @contextmanager
    def errors(self, action: str) -> Iterator[None]:
        """Translate errors of MLflow into a TrackingError that names the failed action.

        An error of this host's disk becomes a WorkspaceError or FileAccessError instead.
        """
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        file = sqlite_file(self.uri)
        try:
            with workspace_errors(file or self.workspace.mlflow_artifacts):
                yield
        except (MlflowException, SQLAlchemyError, OSError) as error:
            if file is not None and (fault := database_fault("MLflow", file, str(error))):
                raise WorkspaceError(fault) from error
            # After the first line, SQLAlchemy shows the whole statement.
            reason = redact(one_line(str(error).partition("[SQL:")[0]))[:500]
            remedy = "check that it is up (MLFLOW_TRACKING_URI names another one), then start again"
            if file is not None and any(each in reason for each in _DAMAGED):
                remedy = (
                    f"restore {file} from a copy, or move it away: the same command then makes "
                    "another one and sends its run again"
                )
            raise TrackingError(
                f"MLflow at {redact(self.uri)} did not {action}: {reason}: {remedy}"
            ) from error


def _read_answers(path: Path, state: list[Any]) -> dict[str, Any]:
    """Return the answers that the store gave in this state."""
    try:
        content = read_json(path)
        return dict(content["answers"]) if content["state"] == state else {}
    except (OSError, ValueError, KeyError, TypeError, FileAccessError):
        return {}


def create_store(uri: str) -> None:
    """Create the tables of a SQLite store that does not exist yet.

    Other stores are not touched.

    MLflow's migrations take seconds and cannot be resumed after an interruption: a killed process
    would leave a file that no later run can open. Therefore they run on a temporary file, which is
    then renamed.
    """
    path = sqlite_file(uri)
    if path is None or exists(path):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock(path):
        if exists(path):
            return
        for stale in glob(path.parent, f"{path.name}.tmp-*"):
            stale.unlink()
        temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine

        engine = create_sqlalchemy_engine(sqlite_url(temporary))
        try:
            _initialize_tables(engine)
        finally:
            engine.dispose()
        os.replace(temporary, path)


def page_url(server: str, route: str = "experiments") -> str:
    """Return the address of a page of MLflow's UI, with the views of model training.

    Without this parameter MLflow 3 shows its views for generative AI, which are empty here.
    """
    return f"{server}/#/{route}?workflowType=machine_learning"


def runs_url(server: str, experiment_id: str) -> str:
    """Return the address of an experiment's runs, sorted by perplexity, with tokens and steps."""
    page = page_url(server, f"experiments/{experiment_id}/runs")
    return f"{page}&viewStateShareKey={VIEW}"


def ensure_run(tracking: Tracking, run_directory: Path, config: FlowConfig, facts: RunFacts) -> str:
    """Return the id of the run directory's MLflow run; create, reopen or describe it if needed.

    The directory gets a random token before the run is created with that token as a tag: after a
    crash between creating the run and writing its id, the tag identifies the run. A run that the
    store no longer has is replaced by a new one. Raises TrackingError.
    """
    path = run_directory / RUN_ID_FILE
    with lock(path), tracking.errors("open the run"):
        state = _read_state(path)
        run = _recorded_run(tracking, state)
        if run is None:
            if state["run_id"] is not None or state["token"] is None:
                state = {"token": uuid.uuid4().hex, "run_id": None}
                write_json(path, state)
            run = _run_with_token(tracking, state["token"]) or tracking.client.create_run(
                tracking.experiment_id,
                run_name=f"{config.name}-{facts.key[:8]}",
                tags={_TAG_TOKEN: state["token"]},
            )
            write_json(path, {**state, "run_id": run.info.run_id})
        if run.info.status != "RUNNING":
            tracking.client.update_run(run.info.run_id, status="RUNNING")
        _describe(tracking, run, run_directory, config, facts)
        return str(run.info.run_id)


def recorded_run_id(run_directory: Path) -> str | None:
    """Return the id of the run directory's MLflow run; None if it has none yet.

    Raises TrackingError.
    """
    return _read_state(run_directory / RUN_ID_FILE)["run_id"]


def end_run(tracking: Tracking, run_id: str, status: RunStatus = "FINISHED") -> None:
    """Set the run's final status. Raises TrackingError."""
    with tracking.errors(f"end run {run_id}"):
        tracking.client.set_terminated(run_id, status)


def end_trained_run(tracking: Tracking, run_id: str, run_directory: Path) -> None:
    """Set the status of a finished training's run, unless another flow now extends the training.

    A flow that starts to extend it waits until the status is set, and then sets its own.

    Raises TrackingError.
    """
    with try_lock(run_directory, shared=True) as free:
        if free:
            end_run(tracking, run_id)


def stored_steps(tracking: Tracking, run_id: str, key: str, steps: range) -> set[int] | None:
    """Return those of consecutive steps at which a run has a value of a metric.

    None if there are more than MLflow returns at once, or if the server is too old to be asked.
    MLflow's client has only whole histories, but its page draws the curves by this request.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.protos.service_pb2 import GetMetricHistoryBulkInterval
    from mlflow.store.tracking.rest_store import RestStore
    from mlflow.utils.proto_json_utils import message_to_json

    request: dict[str, Any] = {
        "run_ids": [run_id],
        "metric_key": key,
        "start_step": steps[0],
        "end_step": steps[-1],
        "max_results": _MOST_STEPS,
    }
    store = tracking.client._tracking_client.store
    if isinstance(store, RestStore):
        message = message_to_json(GetMetricHistoryBulkInterval(**request))
        try:
            found = store._call_endpoint(GetMetricHistoryBulkInterval, message).metrics
        except MlflowException:
            return None
    else:
        found = store.get_metric_history_bulk_interval(**request)
    return {each.step for each in found} if len(found) < _MOST_STEPS else None


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested values to `{"train.train_iters": "1200"}`, cut at MLflow's limit.

    Values that are not strings become JSON.
    """
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            flat[prefix + name] = redact(text)[:_PARAM_LENGTH]
    return flat


def git_facts(repository: Path) -> dict[str, str]:
    """Return the tags of a work tree's commit and of uncommitted changes.

    Outside of git, the commit is that of the variable MEGACORE_GIT_COMMIT, if it is set.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(repository), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        # An image is built without .git; this variable contains its commit.
        build_commit = os.environ.get("MEGACORE_GIT_COMMIT")
        return {"mlflow.source.git.commit": build_commit} if build_commit else {}
    return {"mlflow.source.git.commit": commit, "megacore.git_dirty": str(dirty).lower()}


def versions() -> dict[str, str]:
    """Return the versions of Python and of PACKAGES, without importing any package."""
    versions_by_tag = {"version.python": platform.python_version()}
    for package in PACKAGES:
        versions_by_tag[f"version.{package}"] = installed_version(package) or "not installed"
    return versions_by_tag


def _read_state(path: Path) -> dict[str, str | None]:
    try:
        values = read_json(path)
        return {"token": values["token"], "run_id": values["run_id"]}
    except FileNotFoundError:
        return {"token": None, "run_id": None}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrackingError(
            f"{path} is damaged ({reason_of(error)}): delete it, and a new MLflow run is made"
        ) from error


def _recorded_run(tracking: Tracking, state: Mapping[str, str | None]) -> "Run | None":
    """Return the run recorded in the directory, or None if it was lost or deleted in the store."""
    from mlflow.exceptions import MlflowException

    run_id = state["run_id"]
    if run_id is None:
        return None
    try:
        run = tracking.client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return run if run.info.lifecycle_stage == "active" else None


def _run_with_token(tracking: Tracking, token: str | None) -> "Run | None":
    runs = tracking.client.search_runs(
        [tracking.experiment_id], f"tags.`{_TAG_TOKEN}` = '{token}'", max_results=1
    )
    return runs[0] if runs else None


def _describe(
    tracking: Tracking, run: "Run", run_directory: Path, config: FlowConfig, facts: RunFacts
) -> None:
    """Update the run's parameters, tags, inputs and config.yaml.

    A run whose description is up to date is not touched.
    """
    from mlflow.entities import RunTag

    text = yaml.safe_dump(redact_values(config.model_dump(mode="json")), sort_keys=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    if run.data.tags.get(_TAG_CONFIG) == digest:
        return
    run_id = run.info.run_id
    tags = {
        **versions(),
        **git_facts(Path(__file__).resolve().parent.parent),
        **{name: redact(value) for name, value in facts.tags.items()},
        **_log_params(tracking, run, flatten(redact_values(config.model_dump(mode="json")))),
        "megacore.run_key": facts.key,
        "megacore.run_directory": str(run_directory),
    }
    tracking.client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])
    if facts.epochs is not None:
        tracking.client.log_metric(run_id, "epochs", facts.epochs.epochs)
    for name, value in facts.metrics.items():
        tracking.client.log_metric(run_id, name, value)
    log_datasets(tracking, run_id, facts.datasets)
    tracking.client.log_text(run_id, text, "config.yaml")
    # Last, so that after a crash before this line the run is described again.
    tracking.client.set_tag(run_id, _TAG_CONFIG, digest)


def _log_params(tracking: Tracking, run: "Run", params: Mapping[str, str]) -> dict[str, str]:
    """Log the parameters that the run lacks.

    Return the parameters whose values changed as tags, because MLflow's parameters are immutable.
    """
    from mlflow.entities import Param

    logged = run.data.params
    missing = [Param(name, value) for name, value in params.items() if name not in logged]
    for start in range(0, len(missing), _PARAMS_PER_BATCH):
        tracking.client.log_batch(
            run.info.run_id, params=missing[start : start + _PARAMS_PER_BATCH]
        )
    return {
        _TAG_CHANGED + name: value
        for name, value in params.items()
        if logged.get(name, value) != value or _TAG_CHANGED + name in run.data.tags
    }


def log_datasets(tracking: Tracking, run_id: str, datasets: Mapping[str, Dataset]) -> None:
    """Log data as inputs of the run; MLflow ignores those that it has. Raises TrackingError."""
    from mlflow.entities import Dataset as MlflowDataset
    from mlflow.entities import DatasetInput, InputTag

    inputs = [
        DatasetInput(
            MlflowDataset(
                name=dataset.name,
                digest=dataset.recorded_digest,
                source_type="local",
                source=json.dumps({"uri": dataset.uri}),
                profile=json.dumps(dict(dataset.profile)),
            ),
            [InputTag("mlflow.data.context", role)],
        )
        for role, dataset in datasets.items()
    ]
    if inputs:
        with tracking.errors("take the run's data sets"):
            tracking.client.log_inputs(run_id, datasets=inputs)
