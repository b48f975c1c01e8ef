"""Lookups, refusals and registry entries of the flow finetune, without running it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from megacore.artifact import Artifact, Workspace
from megacore.artifact.build import StageKey, seal
from megacore.config.finetune import FinetuneConfig
from megacore.errors import ConfigError, TrackingError
from megacore.finetune.metrics import ANSWERS_NAME, Answer, write_answers
from megacore.hardware import Hardware
from tasks import finetune_preflight, finetune_publish
from tasks._mlflow import Tracking
from tasks._parent import note_parent, parent_directory, parent_of, pinned
from tasks._registry import publish_model
from tasks.finetune import _parent_tags, run_facts
from tasks.finetune_data import examples_key
from tests.finetune._tiny_models import tiny_config, write_model


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Provide an export: a model, its reports and its manifest."""
    directory = tmp_path / "exports" / "0123456789abcdef"
    write_model(directory / "model", "bert")
    for name in ("parity.json", "sample.txt"):
        (directory / name).write_text("{}", encoding="utf-8")
    seal(directory, StageKey("convert", 1, {}, {}), {}, 0.0)
    return directory


@pytest.fixture
def workspace(tracking: Tracking, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Set the test's store as the workspace of the tasks."""
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tracking.workspace.root))
    return tracking.workspace


def config_of(path: Path | str, **sections: Any) -> FinetuneConfig:
    return tiny_config(path, Path("data"), "classification", **sections)


def publish(tracking: Tracking, export: Path, name: str = "bert-base") -> dict[str, str]:
    from megacore.artifact import Manifest

    run = tracking.client.create_run(tracking.experiment_id)
    digest = Manifest.read(export).digest
    return publish_model(
        tracking, run.info.run_id, export, name, digest=digest, iteration=3, metrics={}, tags={}
    )


def test_alias_is_resolved_to_a_version_with_files_and_lineage(
    tracking: Tracking, workspace: Workspace, export: Path, tmp_path: Path
) -> None:
    receipt = publish(tracking, export)
    config = pinned(config_of("models:/bert-base@candidate"))
    assert config.model.path == "models:/bert-base/1"
    directory = parent_directory(config)
    assert directory is not None
    assert (directory / "config.json").read_bytes() == (
        export / "model" / "config.json"
    ).read_bytes()
    parent = parent_of(config)
    assert (parent.name, parent.version, parent.run_id) == ("bert-base", "1", receipt["run_id"])
    assert parent.model_id == receipt["model_id"]
    # The export's directory is the same parent according to its manifest.
    by_path = parent_of(config_of(export / "model"))
    assert by_path.tags() == parent.tags() | {"parent_model": str(export / "model")}
    # So is an export of the same model with another sample.
    other = Path(shutil.copytree(export, export.with_name("other")))
    (other / "sample.txt").write_text("other", encoding="utf-8")
    seal(other, StageKey("convert", 1, {"sample_prompt": "other"}, {}), {}, 0.0)
    by_content = parent_of(config_of(other / "model"))
    assert by_content.tags() == parent.tags() | {"parent_model": str(other / "model")}
    random_weights = parent_of(config_of("models:/bert-base/1", model={"random_weights": True}))
    assert random_weights.tags() == parent.tags() | {"parent_weights": "not taken: drawn at random"}
    (tmp_path / "lineage.json").write_text('{"path": "x"}', encoding="utf-8")
    note_parent(tmp_path, parent)
    noted = json.loads((tmp_path / "lineage.json").read_text(encoding="utf-8"))
    assert noted == {"path": "x", "registry": parent.tags()}


def test_attempt_needs_no_store_that_answers(
    tracking: Tracking,
    workspace: Workspace,
    export: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish(tracking, export)
    config = config_of("models:/bert-base/1")
    collected = Artifact(stage="pretrained", key="k", path=str(tmp_path), digest="d", counts={})
    (tmp_path / "lineage.json").write_text("{}", encoding="utf-8")
    note_parent(tmp_path, parent_of(config))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with disable_run_logger():
        tags = _parent_tags(config, collected)
    facts = run_facts(config, "key", collected, tags)
    assert facts.tags["megacore.parent_name"] == "bert-base"
    with pytest.raises(TrackingError):
        parent_of(config)


def test_files_of_a_server_are_downloaded_once(
    tracking: Tracking, workspace: Workspace, export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow.artifacts

    from tasks import _parent

    publish(tracking, export)
    config = config_of("models:/bert-base/1")
    local = parent_directory(config)
    assert local is not None
    calls = []

    def download(artifact_uri: str, dst_path: str, tracking_uri: str) -> str:
        calls.append((artifact_uri, tracking_uri))
        shutil.copytree(local, Path(dst_path, "model"))
        return dst_path

    monkeypatch.setattr(
        _parent, "_location", lambda tracking, version: "mlflow-artifacts:/1/models/m-1/artifacts"
    )
    monkeypatch.setattr(mlflow.artifacts, "download_artifacts", download)
    directories = [parent_directory(config) for _ in range(2)]
    assert calls == [("mlflow-artifacts:/1/models/m-1/artifacts", tracking.uri)]
    assert directories[0] == directories[1]
    assert directories[0] is not None
    assert directories[0].is_relative_to(workspace.root / "pretrained" / ".downloads")


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("models:/bert-base", "give models:/NAME@candidate, or models:/NAME/3"),
        ("models:/bert-base@champion", r"does not have \(it has bert-base\)"),
        ("models:/bert-base/9", r"does not have \(it has bert-base\)"),
        ("models:/other@candidate", r"does not have \(it has bert-base\)"),
    ],
)
def test_unknown_registered_model_is_refused(
    tracking: Tracking, workspace: Workspace, export: Path, path: str, sentence: str
) -> None:
    publish(tracking, export)
    with pytest.raises(ConfigError, match=sentence):
        pinned(config_of(path))


def test_version_with_deleted_files_is_refused(
    tracking: Tracking, workspace: Workspace, export: Path
) -> None:
    receipt = publish(tracking, export)
    location = tracking.client.get_logged_model(receipt["model_id"]).artifact_location
    shutil.rmtree(location.removeprefix("file://"))
    with pytest.raises(ConfigError, match=r"have no model/config\.json"):
        parent_directory(config_of("models:/bert-base/1"))


def test_missing_store_is_refused_and_not_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no MLflow store"):
        pinned(config_of("models:/bert-base@candidate"))
    assert not (tmp_path / "mlflow.db").exists()


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"train": {"precision": "fp16"}}, "train.precision is fp16, which needs a GPU"),
        (
            {"launch": {"distributed": "zero3-offload"}},
            "zero3-offload, which divides a model over the memory of GPUs",
        ),
    ],
)
def test_gpu_options_are_refused_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], sentence: str
) -> None:
    monkeypatch.setattr(Hardware, "detect", classmethod(lambda cls: Hardware(2, 2**33)))
    with pytest.raises(ConfigError, match=sentence):
        finetune_preflight.check_here(config_of("model", **sections))
    finetune_preflight.check_here(
        config_of("model", launch={"distributed": "zero2", "allow_cpu": True})
    )


@pytest.mark.parametrize(
    ("missing", "sections", "sentence"),
    [
        ("accelerate", {}, r"a fine-tuning needs accelerate, .* pip install megacore\[finetune\]"),
        (
            "deepspeed",
            {"launch": {"distributed": "zero2", "allow_cpu": True}},
            "launch.distributed is zero2, which",
        ),
        (
            "deepspeed",
            {"launch": {"kind": "deepspeed"}},
            "launch.kind is deepspeed, which needs deepspeed",
        ),
        (
            "wandb",
            {"tracking": {"wandb": {}}},
            "tracking.wandb is given and the package wandb is not installed",
        ),
    ],
)
def test_missing_libraries_are_refused(
    monkeypatch: pytest.MonkeyPatch, missing: str, sections: dict[str, Any], sentence: str
) -> None:
    known = finetune_preflight.importlib.util.find_spec
    monkeypatch.setattr(
        finetune_preflight.importlib.util,
        "find_spec",
        lambda name: None if name == missing else known(name),
    )
    with pytest.raises(ConfigError, match=sentence):
        finetune_preflight.check_here(config_of("model", **sections))


@pytest.mark.parametrize(
    ("kind", "model", "labels", "version"),
    [
        ("classification", {}, None, 2),
        ("classification", {}, ["0", "1"], 2),
        ("classification", {}, ["1", "2"], 4),
        ("classification", {}, ["False", "True"], 2),
        ("classification", {}, ["True", "False"], 4),
        ("classification", {"is_encoder_decoder": True}, None, 3),
        ("multiple_choice", {}, None, 2),
        ("causal_lm", {}, None, 2),
        ("seq2seq", {"is_encoder_decoder": True}, None, 3),
        ("seq2seq", {"is_encoder_decoder": True, "model_type": "mbart"}, None, 4),
    ],
)
def test_only_examples_that_change_are_built_again(
    tmp_path: Path, kind: str, model: dict[str, Any], labels: list[str] | None, version: int
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(model), encoding="utf-8")
    collected = Artifact(stage="pretrained", key="k", path=str(tmp_path), digest="d", counts={})
    config = tiny_config(
        "model", Path("data"), kind, **({} if labels is None else {"task": {"labels": labels}})
    )
    assert examples_key(config, collected, collected).version == version


def test_large_model_is_refused_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hardware, "detect", classmethod(lambda cls: Hardware(2, 2**33)))
    (tmp_path / "model").mkdir()
    shape = {"hidden_size": 1536, "num_hidden_layers": 24, "vocab_size": 128_100}
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    assert (
        finetune_preflight.parameter_count(tmp_path / "model") == 128_100 * 1536 + 12 * 24 * 1536**2
    )
    model = Artifact(stage="pretrained", key="k", path=str(tmp_path), digest="d", counts={})
    counts = {"train": 400_000, "tokens": 400_000 * 128, "longest": 128}
    samples = Artifact(stage="examples", key="k", path=str(tmp_path), digest="d", counts=counts)
    with pytest.raises(
        ConfigError,
        match=r"is sized for GPUs and this machine has none.* steps of 876 M parameters",
    ):
        finetune_preflight.check_cost(config_of("model"), model, samples)
    allowed = finetune_preflight.check_cost(
        config_of("model", launch={"allow_cpu": True}), model, samples
    )
    assert "876.2 M parameters on 1 CPU rank: 100000 steps" in allowed


def test_warmup_that_does_not_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 8}', encoding="utf-8")
    counts = {"train": 21, "tokens": 21 * 8, "longest": 8}
    samples = Artifact(stage="examples", key="k", path=str(tmp_path), digest="d", counts=counts)

    def cost(warmup: int) -> str:
        # Six batches of 4 rows, the last incomplete.
        sections = {"optim": {"warmup_steps": warmup}, "train": {"num_epochs": 2}}
        return finetune_preflight.check_cost(config_of("model", **sections), samples, samples)

    assert ": 12 steps" in cost(11)
    with pytest.raises(
        ConfigError, match=r"warmup_steps 12 does not end before the 12 steps of 2 epochs"
    ):
        cost(12)


def test_parameter_count_comes_from_the_weights(tmp_path: Path) -> None:
    from safetensors import safe_open

    write_model(tmp_path, "bert")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        expected = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert finetune_preflight.parameter_count(tmp_path) == expected


def test_summary_shows_the_answers_of_the_best_model(tmp_path: Path) -> None:
    assert finetune_publish._answer_lines(tmp_path, 20) == []
    for step, text in ((10, "no"), (20, "a | <b>\nand")):
        write_answers(tmp_path / ANSWERS_NAME, step, 1, [Answer("why?", "so", text)])
    assert finetune_publish._answer_lines(tmp_path, 20) == [
        "| question | reference | answer |",
        "| --- | --- | --- |",
        r"| why? | so | a \| \<b\> and |",
        "",
    ]
