"""Publication of an export once per content, also after interruptions."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger

import tasks._registry
from megacore.artifact import Workspace
from megacore.artifact.build import StageKey, is_locked, seal
from megacore.config import RunConfig
from megacore.errors import ConversionError, TrackingError
from tasks._aliases import Measurement, alias_problem, standing
from tasks._mlflow import RunFacts, Tracking, ensure_run
from tasks._publication import (
    RECEIPT,
    build_publication,
    mlflow_lines,
    read_receipt,
    receipt_problem,
)
from tasks._registry import publish_model, published_exists
from tests.tasks.conftest import KilledError

PROMPT = "def f"


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a tiny export as the convert stage writes it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("export")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "<|endoftext|>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(
        directory / "model"
    )
    eod = len(alphabet)
    shape = GPT2Config(
        vocab_size=eod + 1,
        n_positions=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=eod,
        eos_token_id=eod,
    )
    GPT2LMHeadModel(shape).save_pretrained(directory / "model")
    (directory / "parity.json").write_text("{}")
    (directory / "sample.txt").write_text(PROMPT)
    return directory


@pytest.fixture
def publish(
    tracking: Tracking,
    run_directory: Path,
    config: RunConfig,
    facts: RunFacts,
    export: Path,
    tmp_path: Path,
) -> Callable[..., dict[str, str]]:
    """Return a function that publishes a model with a test PPL; models differ by their number."""
    picture = tmp_path / "loss.png"
    picture.write_bytes(b"png")
    report = tmp_path / "report.html"
    report.touch()

    def run(
        number: int = 1,
        ppl: float = 99.5,
        *,
        directory: Path | None = None,
        data: str | None = "books",
        larger_is_better: bool = False,
        force: bool = False,
    ) -> dict[str, str]:
        if directory is None:
            directory = tmp_path / f"export-{number}"
            if not directory.is_dir():
                shutil.copytree(export, directory)
                (directory / "model" / "merges.txt").write_text(str(number))
        return publish_model(
            tracking,
            ensure_run(tracking, run_directory, config, facts),
            directory,
            config.registered_model,
            digest=f"d{number}",
            iteration=100,
            metrics={"test_ppl": ppl},
            tags={"train": "0123"},
            measurement=None if data is None else measured(ppl, data, larger_is_better),
            force_alias=force,
            pictures=[picture],
            report=report,
        )

    return run


def measured(ppl: float, data: str, larger_is_better: bool = False) -> Measurement:
    name = "test_accuracy" if larger_is_better else "test_ppl"
    return Measurement.of(name, ppl, {"tokens": data}, larger_is_better=larger_is_better)


def holder(tracking: Tracking, alias: str = "candidate") -> int:
    return int(tracking.client.get_model_version_by_alias("gpt2-test.v1", alias).version)


def lost(tracking: Tracking, number: int) -> dict[str, str]:
    tags = tracking.client.get_model_version("gpt2-test.v1", str(number)).tags
    return {name: value for name, value in tags.items() if name.startswith("lost_to")}


def words(tracking: Tracking, receipt: dict[str, str]) -> str:
    return standing(tracking, receipt["model_name"], receipt["version"])


def versions(tracking: Tracking, name: str = "gpt2-test.v1") -> list[Any]:
    return list(tracking.client.search_model_versions(f"name = '{name}'"))


def test_candidate_is_a_loadable_mlflow_model(
    tracking: Tracking, publish: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    receipt = publish()
    version = tracking.client.get_model_version_by_alias("gpt2-test.v1", "candidate")
    assert (version.version, version.tags["train"]) == (1, "0123")
    assert receipt["uri"] == "models:/gpt2-test.v1/1"
    model = tracking.client.get_logged_model(receipt["model_id"])
    assert [(metric.key, metric.value) for metric in model.metrics] == [("test_ppl", 99.5)]
    assert json.loads(model.tags["mlflow.modelVersions"]) == [
        {"name": "gpt2-test.v1", "version": "1"}
    ]
    artifacts = tracking.workspace.mlflow_artifacts / "pretrain" / receipt["run_id"] / "artifacts"
    assert (artifacts / "export" / "parity.json").is_file()
    assert (artifacts / "plots" / "loss.png").is_file()
    assert (artifacts / "report" / "report.html").is_file()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking.uri)
    pipeline = mlflow.transformers.load_model("models:/gpt2-test.v1@candidate")
    assert pipeline(PROMPT, max_new_tokens=2)[0]["generated_text"].startswith(PROMPT)
    assert isinstance(mlflow.pyfunc.load_model(receipt["uri"]).predict(PROMPT)[0], str)


def test_all_tokenizer_files_are_published(
    tracking: Tracking, publish: Callable[..., dict[str, str]], export: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(export, tmp_path / "copy"))
    for name in ("vocab.txt", "spm.model", "README.md"):
        (copy / "model" / name).write_text("", encoding="utf-8")
    receipt = publish(directory=copy)
    location = tracking.client.get_logged_model(receipt["model_id"]).artifact_location.removeprefix(
        "file://"
    )
    names = {path.name for path in Path(location, "components", "tokenizer").iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json", "vocab.txt", "spm.model"}


def test_repeated_publication_keeps_the_version(
    tracking: Tracking, publish: Callable[..., dict[str, str]]
) -> None:
    first = publish()
    assert publish() == first
    second = publish(2, 99.0)
    assert [first["version"], second["version"]] == ["1", "2"]
    assert holder(tracking) == 2
    assert len(tracking.client.get_metric_history(first["run_id"], "test_ppl")) == 2


def test_export_adds_no_second_point_to_the_curve_of_its_checkpoint(
    tracking: Tracking,
    publish: Callable[..., dict[str, str]],
    run_directory: Path,
    config: RunConfig,
    facts: RunFacts,
) -> None:
    run_id = ensure_run(tracking, run_directory, config, facts)
    tracking.client.log_metric(run_id, "test_ppl", 99.5, timestamp=1000, step=100)
    model = tracking.client.get_logged_model(publish()["model_id"])
    assert [(metric.value, metric.timestamp) for metric in model.metrics] == [(99.5, 1000)]
    assert len(tracking.client.get_metric_history(run_id, "test_ppl")) == 1


def test_another_sample_replaces_the_reports_and_keeps_the_version(
    tracking: Tracking, publish: Callable[..., dict[str, str]], export: Path, tmp_path: Path
) -> None:
    copies = [Path(shutil.copytree(export, tmp_path / name)) for name in "ab"]
    for copy in copies:
        for path in (copy / "sample.txt", copy / "parity.json", copy / "model" / "README.md"):
            path.write_text(f"{path.name} of {copy.name}")
        seal(copy, StageKey("convert", 1, {"sample_prompt": copy.name}, {}), {}, 0.0)
    first, second = (publish(number, directory=copy) for number, copy in enumerate(copies, start=1))
    assert second == first | {"digest": "d2"}
    assert published_exists(tracking, first)
    assert published_exists(tracking, second)
    assert len(versions(tracking)) == 1
    artifacts = tracking.workspace.mlflow_artifacts / "pretrain" / first["run_id"] / "artifacts"
    assert (artifacts / "export" / "sample.txt").read_text() == "sample.txt of b"
    location = tracking.client.get_logged_model(first["model_id"]).artifact_location
    card = Path(location.removeprefix("file://"), "model", "README.md")
    assert card.read_text() == "README.md of b"
    # Other weights are another version.
    (copies[1] / "model" / "merges.txt").write_text("b")
    (copies[1] / "manifest.json").unlink()
    assert publish(2, directory=copies[1])["version"] == "2"


def test_version_from_before_the_model_digest_is_found(
    tracking: Tracking, publish: Callable[..., dict[str, str]]
) -> None:
    first = publish()
    tracking.client.delete_logged_model_tag(first["model_id"], "model_digest")
    tracking.client.delete_model_version_tag("gpt2-test.v1", "1", "model_digest")
    assert published_exists(
        tracking, {name: value for name, value in first.items() if name != "model_digest"}
    )
    assert publish() == first
    assert published_exists(tracking, first)


def test_candidate_moves_only_to_a_lower_test_ppl_on_the_same_data(
    tracking: Tracking, publish: Callable[..., dict[str, str]]
) -> None:
    books, web = (f"best-{measured(1, data).data}" for data in ("books", "web"))
    assert words(tracking, publish(1, 77.9)) == "alias candidate"
    second = publish(2, 80.1)
    assert (holder(tracking), holder(tracking, books)) == (1, 1)
    assert lost(tracking, 2) == {"lost_to": "1", "lost_to_test_ppl": "77.9"}
    assert (
        words(tracking, second)
        == "candidate stays version 1, whose test PPL is lower (77.90 < 80.10)"
    )
    assert words(tracking, publish(3, 77.9)).endswith("whose test PPL is the same (77.90)")
    fourth = publish(4, 77.899)
    assert (holder(tracking), holder(tracking, books)) == (4, 4)
    assert lost(tracking, 4) == {}
    assert words(tracking, second) == "candidate is version 4"
    assert published_exists(tracking, second)
    # Nothing is comparable with the first version on other data, so the newer one is the candidate.
    publish(5, 300.0, data="web")
    assert (holder(tracking), holder(tracking, books), holder(tracking, web)) == (5, 4, 5)
    assert publish(4, 77.899) == fourth
    assert holder(tracking) == 5
    # It is comparable with the best version on its data, though not with the candidate.
    publish(6, 79.0)
    assert (holder(tracking), holder(tracking, books)) == (6, 4)
    assert lost(tracking, 6) == {"lost_to": "4", "lost_to_test_ppl": "77.899"}


def test_version_without_test_ppl_is_not_compared(
    tracking: Tracking, publish: Callable[..., dict[str, str]]
) -> None:
    publish(1, 10.0)
    publish(2, 20.0, data=None)
    assert holder(tracking) == 2
    publish(3, 30.0)
    assert holder(tracking) == 3
    publish(4, float("nan"))
    assert holder(tracking) == 3
    tracking.client.delete_model_version("gpt2-test.v1", "3")
    receipt = publish(4, 40.0)
    assert holder(tracking) == 4
    assert lost(tracking, 4) == {"lost_to": "1", "lost_to_test_ppl": "10.0"}
    assert words(tracking, receipt) == "alias candidate"


def test_larger_metric_wins_where_larger_is_better(
    tracking: Tracking, publish: Callable[..., dict[str, str]]
) -> None:
    publish(1, 0.85, larger_is_better=True)
    receipt = publish(2, 0.81, larger_is_better=True)
    assert words(tracking, receipt).endswith("whose test accuracy is higher (0.85 > 0.81)")
    publish(3, 0.86, larger_is_better=True)
    assert holder(tracking) == 3


def test_forced_alias_needs_another_publication_until_it_has_moved(
    tracking: Tracking, publish: Callable[..., dict[str, str]]
) -> None:
    def problem(receipt: dict[str, str], *, force: bool) -> str | None:
        return alias_problem(tracking, receipt["model_name"], receipt["version"], force=force)

    publish(1, 77.9)
    receipt = publish(2, 80.1)
    assert problem(receipt, force=False) is None
    assert problem(receipt, force=True) == (
        "tracking.force_alias is true and candidate is version 1"
    )
    assert publish(2, 80.1, force=True) == receipt
    assert (holder(tracking), holder(tracking, f"best-{measured(1, 'books').data}")) == (2, 1)
    assert words(tracking, receipt) == "alias candidate"
    assert problem(receipt, force=True) is None
    tracking.client.delete_registered_model_alias("gpt2-test.v1", "candidate")
    assert problem(receipt, force=False) == "no version has the alias candidate"


def test_cached_publication_tells_the_alias_and_is_repeated_to_force_it(
    tracking: Tracking,
    publish: Callable[..., dict[str, str]],
    config: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tracking.workspace.root))
    publish(1, 77.9)
    receipt = publish(2, 80.1)
    key = StageKey("publish", 1, {}, {})
    directory = tracking.workspace.folder("publish") / key.key
    directory.mkdir()
    (directory / RECEIPT).write_text(json.dumps(receipt))
    seal(directory, key, {}, 0.0)
    assert mlflow_lines(tracking, read_receipt(directory))[0] == (
        "- registered: `models:/gpt2-test.v1/2` (candidate stays version 1, whose test PPL is "
        "lower (77.90 < 80.10))"
    )
    assert receipt_problem(config, key) is None
    section = config.tracking.model_copy(update={"force_alias": True})
    problem = receipt_problem(config.model_copy(update={"tracking": section}), key)
    assert problem == "tracking.force_alias is true and candidate is version 1"


def test_new_measurement_of_a_version_replaces_its_metric_and_tags(
    tracking: Tracking,
    publish: Callable[..., dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    crash: Callable[..., None],
) -> None:
    from mlflow import MlflowClient

    publish(1, 77.9)
    receipt = publish(2, 80.1)
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "delete_model_version_tag", crash)
        with pytest.raises(KilledError):
            publish(2, 70.0)
    assert publish(2, 70.0) == receipt
    assert holder(tracking) == 2
    assert lost(tracking, 2) == {}
    model = tracking.client.get_logged_model(receipt["model_id"])
    assert {metric.value for metric in model.metrics} == {80.1, 70.0}


@pytest.mark.parametrize("step", ["_upload", "_ensure_version", "log_model_metrics"])
def test_kill_between_steps_leaves_one_version(
    tracking: Tracking,
    publish: Callable[..., dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    crash: Callable[..., None],
    step: str,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tasks._registry, step, crash)
        with pytest.raises(KilledError):
            publish()
    assert versions(tracking) == []
    receipt = publish()
    assert receipt["version"] == "1"
    models = tracking.client.search_logged_models([tracking.experiment_id])
    assert [model.status for model in models] == ["READY"]
    assert published_exists(tracking, receipt)


@pytest.mark.parametrize(
    ("step", "ppl"), [("set_registered_model_alias", 70.0), ("set_model_version_tag", 80.0)]
)
def test_kill_before_aliases_and_tags_is_repaired(
    tracking: Tracking,
    publish: Callable[..., dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    crash: Callable[..., None],
    step: str,
    ppl: float,
) -> None:
    from mlflow import MlflowClient

    publish(1, 75.0)
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, step, crash)
        with pytest.raises(KilledError):
            publish(2, ppl)
    assert publish(2, ppl)["version"] == "2"
    assert len(versions(tracking)) == 2
    assert holder(tracking) == (2 if ppl < 75 else 1)
    assert lost(tracking, 2) == ({} if ppl < 75 else {"lost_to": "1", "lost_to_test_ppl": "75.0"})


def test_receipt_is_valid_while_the_version_and_its_files_exist(
    tracking: Tracking, publish: Callable[..., dict[str, str]]
) -> None:
    receipt = publish()
    assert published_exists(tracking, receipt)
    assert not published_exists(tracking, {**receipt, "model_digest": "other"})
    location = tracking.client.get_logged_model(receipt["model_id"]).artifact_location
    shutil.rmtree(location.removeprefix("file://"))
    assert not published_exists(tracking, receipt)
    assert publish() == receipt
    assert published_exists(tracking, receipt)
    tracking.client.delete_model_version(receipt["model_name"], receipt["version"])
    assert not published_exists(tracking, receipt)
    assert publish()["version"] == "2"


def test_lookup_does_not_create_a_missing_store(tracking: Tracking) -> None:
    store = Path(tracking.uri.removeprefix("sqlite:///"))
    store.unlink()
    assert not published_exists(tracking, {"uri": "models:/x/1"})
    assert not store.exists()


def test_incomplete_export_is_refused(
    publish: Callable[..., dict[str, str]], export: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(export, copy)
    (copy / "parity.json").unlink()
    with pytest.raises(ConversionError, match=r"parity\.json is missing: delete .*copy"):
        publish(directory=copy)


def test_one_flow_at_a_time_publishes_a_run(
    tracking: Tracking,
    run_directory: Path,
    config: RunConfig,
    facts: RunFacts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tracking.workspace.root))
    locked = []

    def send(tracking: Tracking, run_id: str) -> dict[str, str]:
        locked.append(is_locked(run_directory / "publication"))
        raise TrackingError("no answer")

    key = StageKey("publish", 1, {}, {})
    with disable_run_logger(), pytest.raises(TrackingError, match="no answer"):
        build_publication(config, key, run_directory, lambda: facts, send)
    assert locked == [True]
    assert not is_locked(run_directory / "publication")


def test_name_with_spaces_and_brackets_has_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host:5000")
    monkeypatch.setattr("tasks._publication.standing", lambda *names: "alias candidate")
    monkeypatch.setattr("tasks._publication.run_url", lambda *names: "run")
    tracking = Tracking(Workspace(tmp_path), "pretrain")
    monkeypatch.setitem(vars(tracking), "experiment_id", "7")
    receipt = {"uri": "models:/my model (2)/1", "model_name": "my model (2)", "version": "1"}
    line = mlflow_lines(tracking, receipt | {"run_id": "abc"})[0]
    assert "(http://host:5000/#/models/my%20model%20%282%29/versions/1?" in line
