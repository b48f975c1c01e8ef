"""Publication of an export once per content, also after interruptions."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tasks._registry
from megacore.config import RunConfig
from megacore.errors import ConversionError
from tasks._mlflow import RunFacts, Tracking, ensure_run
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
    """Return a function that publishes the export under a digest."""
    picture = tmp_path / "loss.png"
    picture.write_bytes(b"png")
    report = tmp_path / "report.html"
    report.touch()

    def run(digest: str = "d1", directory: Path = export) -> dict[str, str]:
        return publish_model(
            tracking,
            ensure_run(tracking, run_directory, config, facts),
            directory,
            config.registered_model,
            digest=digest,
            iteration=100,
            metrics={"test_ppl": 99.5},
            tags={"train": "0123"},
            pictures=[picture],
            report=report,
        )

    return run


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
    assert [(metric.key, metric.value) for metric in model.metrics] == [("export/test_ppl", 99.5)]
    assert json.loads(model.tags["mlflow.modelVersions"]) == [
        {"name": "gpt2-test.v1", "version": "1"}
    ]
    artifacts = tracking.workspace.mlflow_artifacts / "pretrain" / receipt["run_id"] / "artifacts"
    assert (artifacts / "export" / "parity.json").is_file()
    assert (artifacts / "plots" / "loss.png").is_file()
    assert (artifacts / "report" / "report.html").is_file()
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(tracking.uri)
    try:
        pipeline = mlflow.transformers.load_model("models:/gpt2-test.v1@candidate")
        assert pipeline(PROMPT, max_new_tokens=2)[0]["generated_text"].startswith(PROMPT)
        assert isinstance(mlflow.pyfunc.load_model(receipt["uri"]).predict(PROMPT)[0], str)
    finally:
        mlflow.set_tracking_uri(before)


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
    second = publish("d2")
    assert [first["version"], second["version"]] == ["1", "2"]
    assert tracking.client.get_model_version_by_alias("gpt2-test.v1", "candidate").version == 2
    assert len(tracking.client.get_metric_history(first["run_id"], "export/test_ppl")) == 2


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


def test_kill_before_the_alias_is_repaired(
    tracking: Tracking,
    publish: Callable[..., dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    crash: Callable[..., None],
) -> None:
    from mlflow import MlflowClient

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "set_registered_model_alias", crash)
        with pytest.raises(KilledError):
            publish()
    assert publish()["version"] == "1"
    assert len(versions(tracking)) == 1
    assert tracking.client.get_model_version_by_alias("gpt2-test.v1", "candidate").version == 1


def test_receipt_is_valid_while_the_version_and_its_files_exist(
    tracking: Tracking, publish: Callable[..., dict[str, str]]
) -> None:
    receipt = publish()
    assert published_exists(tracking, receipt)
    assert not published_exists(tracking, {**receipt, "digest": "other"})
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
