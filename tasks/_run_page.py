"""Pages of a run and its model in MLflow: descriptions, log files and events.

A description that somebody edited in MLflow is left alone.
"""

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL

from megacore.artifact.workspace import EVENTS_FILE
from megacore.jobs.run import attempt_logs
from megacore.paths import is_file
from megacore.redact import page_address, redact
from tasks._checkpoint_models import MODEL_TYPE as CHECKPOINT
from tasks._checkpoint_models import STATE_TAG, newest_metrics
from tasks._mlflow import RunFacts, Tracking, page_url
from tasks._mlflow_events import ATTEMPTS
from tasks._run_history import RunHistory, end_of

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel
    from mlflow.entities.model_registry import ModelVersion

NOTE = "mlflow.note.content"
"""Tag with the description that MLflow shows."""
NOTE_DIGEST = "megacore.description_sha256"
"""Tag with the digest of the description that was written last. Another text is somebody's edit."""
LOGS = "logs"
"""Folder of the attempts' logs, in the run directory and among the run's artifacts."""

HUB_TAG = "hub"
"""Tag with the address of the model's commit on the Hugging Face hub."""

_MODEL_LINE = "- model: "
_HUB_LINE = "- Hugging Face hub: "
_FILE_LIMIT = 4 << 20
"""Bytes of a log or of the events that become an artifact; of a longer file, the last ones."""
_MOST_ROWS = 10
_UNITS = ("tokens", "samples")
"""Counts of a data set that its line shows."""
_TEXT_LIMIT = 4900
"""Characters of a description: MLflow stores 5000 of a version's."""


def update_run_page(
    tracking: Tracking,
    run_id: str,
    run_directory: Path,
    facts: RunFacts,
    *,
    results: Sequence[str] = (),
    ending: str | None = None,
) -> None:
    """Send the run's description, the number of attempts, their logs and the events.

    The description begins with the lines `results`. `ending` is the reason why the last attempt
    ended, if its ranks did not report it. Repeating it changes nothing.

    Raises TrackingError, and DataFormatError for damaged events.
    """
    from mlflow.entities import RunTag

    history = RunHistory(run_directory / EVENTS_FILE, heads=("step",))
    with tracking.errors("take the run's description and logs"):
        run = tracking.client.get_run(run_id)
        paragraphs = [
            "\n".join([*results, *_facts_lines(facts, run_directory)]),
            "\n".join(_checkpoint_table(tracking, run.info.experiment_id, run_id)),
            "\n".join(_attempt_table(history, ending)),
        ]
        tags = note_tags("\n\n".join(filter(None, paragraphs)), run.data.tags)
        if history.attempts:
            tags[ATTEMPTS] = str(history.attempts[-1].number)
        tracking.client.log_batch(
            run_id, tags=[RunTag(name, value) for name, value in tags.items()]
        )
        _send_files(tracking, run_id, run_directory)


def describe_model(tracking: Tracking, facts: RunFacts, receipt: Mapping[str, str]) -> list[str]:
    """Describe a published model, its version and its registered name.

    Return the lines with the model's results for the description of its run. Raises TrackingError.
    """
    client, name, number = tracking.client, receipt["model_name"], receipt["version"]
    with tracking.errors(f"describe {receipt['uri']}"):
        model = client.get_logged_model(receipt["model_id"])
        version = client.get_model_version(name, number)
        results = [
            f"**{_results(model)}**",
            "",
            f"{_MODEL_LINE}`{receipt['uri']}`, step {model.params.get('step', '?')}",
            *([_HUB_LINE + version.tags[HUB_TAG]] if HUB_TAG in version.tags else []),
        ]
        text = "\n".join([*results, f"- MLflow run: `{receipt['run_id']}`", *_facts_lines(facts)])
        tags = note_tags(text, model.tags)
        if tags:
            client.set_logged_model_tags(model.model_id, tags)
        _describe_version(tracking, version, text)
        registered = client.get_registered_model(name)
        _describe(
            f"Models of the configuration `{facts.tags.get('megacore.conf', name)}`. The alias "
            f"`candidate` is the version to use next: `models:/{name}@candidate`. Each version's "
            "description has its metrics, its data and its run.",
            registered.description,
            registered.tags,
            lambda tag, value: client.set_registered_model_tag(name, tag, value),
            lambda note: client.update_registered_model(name, note),
        )
    return results


def show_pushed(tracking: Tracking, receipt: Mapping[str, str], address: str) -> None:
    """Set the address of the uploaded commit as a tag and in the descriptions of run and model.

    Repeating it changes nothing. Raises TrackingError.
    """
    from mlflow.entities import RunTag

    client, name, number = tracking.client, receipt["model_name"], receipt["version"]
    with tracking.errors(f"record {address}"):
        version = client.get_model_version(name, number)
        client.set_model_version_tag(name, number, HUB_TAG, address)
        text = _with_address(version.description or "", address)
        _describe_version(tracking, version, text)
        tags = client.get_logged_model(receipt["model_id"]).tags
        text = _with_address(tags.get(NOTE, ""), address)
        client.set_logged_model_tags(
            receipt["model_id"], {HUB_TAG: address, **note_tags(text, tags)}
        )
        tags = client.get_run(receipt["run_id"]).data.tags
        text = _with_address(tags.get(NOTE, ""), address)
        changed = {HUB_TAG: address, **note_tags(text, tags)}
        client.log_batch(
            receipt["run_id"], tags=[RunTag(tag, value) for tag, value in changed.items()]
        )


def _with_address(text: str, address: str) -> str:
    """Return a description with the model's address on the hub after the line of the model."""
    lines = [line for line in text.split("\n") if not line.startswith(_HUB_LINE)]
    place = next((n for n, line in enumerate(lines) if line.startswith(_MODEL_LINE)), None)
    if place is not None:
        lines.insert(place + 1, _HUB_LINE + address)
    return "\n".join(lines)


def note_tags(text: str, tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags that make `text` the description; none if it is that, or was edited."""
    note, text = tags.get(NOTE, ""), text[:_TEXT_LIMIT]
    if note == text or _digest(note) != tags.get(NOTE_DIGEST, _digest("")):
        return {}
    return {NOTE: text, NOTE_DIGEST: _digest(text)}


def flow_run_link() -> str | None:
    """Return the current flow run as a markdown link; None without a configured server."""
    page = flow_run.ui_url if PREFECT_API_URL.value() else None
    return f"[{flow_run.name}]({page_address(page)})" if page else None


def _describe(
    text: str,
    note: str | None,
    tags: Mapping[str, str],
    set_tag: Callable[[str, str], None],
    set_note: Callable[[str], object],
) -> None:
    """Set a description that is no tag, unless it was edited."""
    note, text = note or "", text[:_TEXT_LIMIT]
    written = tags.get(NOTE_DIGEST, _digest("")).split()
    if note == text or _digest(note) not in written:
        return
    # Both digests, so that a crash between the calls does not look like an edit.
    set_tag(NOTE_DIGEST, f"{_digest(note)} {_digest(text)}")
    set_note(text)
    set_tag(NOTE_DIGEST, _digest(text))


def _describe_version(tracking: Tracking, version: "ModelVersion", text: str) -> None:
    client, name, number = tracking.client, version.name, str(version.version)
    _describe(
        text,
        version.description,
        version.tags,
        lambda tag, value: client.set_model_version_tag(name, number, tag, value),
        lambda note: client.update_model_version(name, number, note),
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _facts_lines(facts: RunFacts, run_directory: Path | None = None) -> Iterator[str]:
    """Yield markdown lines with the data, the run and the flow run."""
    for role, dataset in facts.datasets.items():
        sizes = (
            f", {dataset.profile[unit]:,} {unit}" for unit in _UNITS if unit in dataset.profile
        )
        yield f"- {role} data: `{dataset.name}`" + "".join(sizes)
    if facts.epochs is not None:
        yield f"- {facts.epochs.sentence()}"
        warning = facts.epochs.warning()
        if warning:
            yield f"- **warning:** {warning}"
    yield f"- run: `{facts.key}`" + ("" if run_directory is None else f" in `{run_directory}`")
    link = flow_run_link()
    if link is not None:
        yield f"- Prefect: {link}"


def _results(model: "LoggedModel") -> str:
    """Return the metrics of a model in one line, the perplexities first."""
    values = _metrics(model)
    names = sorted(values, key=lambda name: (name.startswith("unigram"), "ppl" not in name, name))
    return ", ".join(f"{_title(name)} {values[name]:.5g}" for name in names) or "not measured"


def _title(name: str) -> str:
    return name.replace("valid_", "validation ").replace("ppl", "PPL").replace("_", " ")


def _metrics(model: "LoggedModel") -> dict[str, float]:
    """Return the newest value of each metric of a model."""
    return {name: metric.value for name, metric in newest_metrics(model).items()}


def _checkpoint_table(tracking: Tracking, experiment_id: str, run_id: str) -> list[str]:
    """Return a markdown table of the run's checkpoints, the lowest perplexity first."""
    rows = [(model, _metrics(model)) for model in _checkpoints(tracking, experiment_id, run_id)]
    measured = {name for _, metrics in rows for name in metrics}
    perplexities = [name for name in ("valid_ppl", "test_ppl") if name in measured]
    names: list[str] = [*perplexities] or sorted(measured)[:4]
    rows.sort(key=lambda row: (row[1].get("valid_ppl", float("inf")), -_step(row[0])))
    if not rows:
        return []

    def page(model_id: str) -> str:
        # Relative to the server, because its address is not known here.
        return page_url("", f"experiments/{experiment_id}/models/{model_id}").removeprefix("/")

    return [
        f"| checkpoint | step | tokens | {' | '.join(map(_title, names))} |",
        "| --- |" + " ---: |" * (2 + len(names)),
        *(
            " | ".join(
                (
                    f"| [{model.name}]({page(model.model_id)}){_deleted(model)}",
                    str(_step(model)),
                    model.params.get("consumed_tokens", ""),
                    *(f"{metrics[name]:.5g}" if name in metrics else "" for name in names),
                )
            )
            + " |"
            for model, metrics in rows[:_MOST_ROWS]
        ),
    ]


def _checkpoints(tracking: Tracking, experiment_id: str, run_id: str) -> "list[LoggedModel]":
    """Return all LoggedModels of the run's checkpoints."""
    models: list[LoggedModel] = []
    token = None
    while True:
        page = tracking.client.search_logged_models(
            [experiment_id],
            f"source_run_id = '{run_id}' AND model_type = '{CHECKPOINT}'",
            page_token=token,
        )
        models += page
        token = page.token
        if not token:
            return models


def _deleted(model: "LoggedModel") -> str:
    return " (deleted)" if model.tags.get(STATE_TAG) == "deleted" else ""


def _step(model: "LoggedModel") -> int:
    return int(model.params["step"])


def _attempt_table(history: RunHistory, ending: str | None) -> list[str]:
    """Return a markdown table of the attempts, the last one first."""
    if not history.attempts:
        return []
    last = history.attempts[-1]
    shown = list(reversed(history.attempts))[:_MOST_ROWS]
    return [
        "| attempt | steps | minutes | ended |",
        "| ---: | --- | ---: | --- |",
        *(
            f"| {attempt.number} | {attempt.first_iteration} to {attempt.last_iteration} | "
            f"{attempt.seconds / 60:.1f} | "
            f"{(ending if attempt is last else None) or end_of(attempt, last=attempt is last)} |"
            for attempt in shown
        ),
    ]


def _send_files(tracking: Tracking, run_id: str, run_directory: Path) -> None:
    """Log the events, the newest log, and the logs that the run lacks as artifacts."""
    client = tracking.client
    sent = {file.path for file in client.list_artifacts(run_id, LOGS)}
    logs = attempt_logs(run_directory)
    files = [(path, LOGS) for path in logs if path is logs[-1] or f"{LOGS}/{path.name}" not in sent]
    with tempfile.TemporaryDirectory(dir=tracking.workspace.root, prefix="publish.tmp-") as scratch:
        for path, folder in [*files, (run_directory / EVENTS_FILE, None)]:
            if is_file(path):
                copy = Path(scratch, path.name)
                copy.write_text(_last_lines(path), encoding="utf-8")
                client.log_artifact(run_id, str(copy), folder)


def _last_lines(path: Path) -> str:
    """Return the lines in the last _FILE_LIMIT bytes of a file, without secrets."""
    with open(path, "rb") as file:
        skipped = max(0, path.stat().st_size - _FILE_LIMIT)
        file.seek(skipped)
        content = file.read(_FILE_LIMIT)
    if skipped:
        content = content[content.find(b"\n") + 1 :]
    return redact(content.decode("utf-8", errors="replace"))
