"""Several sources and shards: each is a separate task, and only changed ones run again."""

import contextlib
import json
import math
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tokenizers
import yaml
from tokenizers import decoders, models, pre_tokenizers

from flows.prepare_data import prepare_data
from flows.pretrain import pretrain
from megacore.artifact import Workspace, open_artifact
from megacore.corpus import collect as corpus
from megacore.errors import DataFormatError, WorkerLostError
from megacore.inspect.provenance import find_origins, read_document
from megacore.ranks import stages
from megacore.token_files.indexed_dataset import IndexedDataset, token_prefixes
from megacore.tokenizer import tokenize as shards
from tasks._stage_runner import StageRunner
from tasks.curate import curation_metrics
from tests._limits import HANG
from tests.flows import _warm_ranks
from tests.flows.conftest import on_report, outcomes, tiny_config

Rows = dict[str, str]


@pytest.fixture
def place(tmp_path: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a separate workspace on the session's server and a tokenizer without training."""
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path / "workspace"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'workspace' / 'mlflow.db'}")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*alphabet, "<|endoftext|>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def rows() -> Iterator[Rows]:
    """Provide the outcome of each stage of the last run."""
    rows: Rows = {}

    def remember(runner: StageRunner[Any]) -> None:
        rows.clear()
        rows.update(outcomes(runner))

    with on_report(remember):
        yield rows


def source(place: Path, name: str, documents: int, size: int = 200) -> dict[str, Any]:
    path = place / f"{name}.jsonl"
    lines = (
        json.dumps({"text": f"{name} {number} " + "word " * (size // 5)})
        for number in range(documents)
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"kind": "jsonl", "files": [str(path)]}


def write_conf(place: Path, **data: Any) -> str:
    config = tiny_config(place)
    del config["data"]["source"]
    config["data"] |= {"tokenizer": {"kind": "hf", "name": str(place / "tokenizer.json")}, **data}
    conf = place / "sources.yaml"
    conf.write_text(yaml.safe_dump(config), encoding="utf-8")
    return str(conf)


def test_only_changed_parts_of_a_blend_run_again(place: Path, rows: Rows) -> None:
    members = [
        {"weight": 0.7, "source": source(place, "a", 60)},
        {"weight": 0.3, "source": source(place, "b", 60)},
    ]
    prepare_data(write_conf(place, blend=members))
    assert list(rows) == [
        "collect",
        "collect 2",
        "tokenizer",
        "tokenize",
        "tokenize 2",
        "blend",
        "index",
    ]
    assert set(rows.values()) == {"ran"}
    members[0]["weight"] = 0.5
    prepare_data(write_conf(place, blend=members))
    assert rows == dict.fromkeys(rows, "cached") | {"index": "ran"}
    members.append({"weight": 1, "source": source(place, "c", 60)})
    prepare_data(write_conf(place, blend=members))
    assert [stage for stage, outcome in rows.items() if outcome == "ran"] == [
        "collect 3",
        "tokenize 3",
        "blend",
        "index",
    ]


def test_sources_are_curated_before_they_are_tokenized(place: Path, rows: Rows) -> None:
    pytest.importorskip("datatrove", reason="the extra curate is not installed")
    members = []
    for name in "ab":
        member = source(place, name, 60)
        file = Path(member["files"][0])
        file.write_text(file.read_text(encoding="utf-8") * 2, encoding="utf-8")
        members.append({"weight": 1, "source": member})
    steps: list[dict[str, Any]] = [{"step": "exact_dedup"}]
    data = {"blend": members, "curate": steps, "curate_workers": 1}
    prepare_data(write_conf(place, **data))
    assert list(rows)[2:5] == ["curate", "curate 2", "tokenizer"]
    workspace = Workspace.of(place / "workspace")
    artifacts = [
        open_artifact(path.parent) for path in workspace.folder("blend").glob("*/manifest.json")
    ]
    (tokens,) = (artifact for artifact in artifacts if artifact.stage == "blend")
    assert tokens.counts["documents"] == 120
    assert curation_metrics(tokens) == {
        "curate/documents_read": 240,
        "curate/documents_kept": 120,
        "curate/words_read": 240 * 42,
        "curate/words_kept": 120 * 42,
        "curate/bytes_read": pytest.approx(240 * 204, abs=240),
        "curate/bytes_kept": pytest.approx(120 * 204, abs=120),
        "curate/removed_1_exact_dedup": 120,
    }
    for prefix in token_prefixes(tokens.directory):
        origins = find_origins(prefix, 60)
        assert origins is not None
        where = origins.place(7)
        assert where is not None
        document = read_document(where)
        name, number, *_ = document.text.split()
        assert document.source == f"{place / name}.jsonl:{int(number) + 1}"

    steps.append({"step": "gopher_quality", "min_doc_words": 1000})
    with pytest.raises(DataFormatError, match="keeps none of 120 documents; 1 exact_dedup removed"):
        prepare_data(write_conf(place, **data)).result()  # type: ignore[union-attr]
    assert rows["collect"] == "cached"
    steps[-1]["min_doc_words"] = 2
    steps[-1]["min_stop_words"] = 0
    prepare_data(write_conf(place, **data))
    assert (rows["collect"], rows["curate"], rows["tokenize"]) == ("cached", "ran", "ran")
    prepare_data(write_conf(place, **data))
    assert set(rows.values()) == {"cached"}


def test_duplicates_between_sources_fall_to_the_first_one(place: Path, rows: Rows) -> None:
    pytest.importorskip("datatrove", reason="the extra curate is not installed")
    members = [{"weight": 1, "source": source(place, name, 40)} for name in "abc"]
    first, second = (Path(member["source"]["files"][0]) for member in members[:2])
    shared = first.read_text(encoding="utf-8").splitlines(keepends=True)[:15]
    second.write_text("".join(shared) + second.read_text(encoding="utf-8"), encoding="utf-8")
    steps = [{"step": "exact_dedup", "across_sources": True}]
    data = {"blend": members, "curate": steps, "curate_workers": 1}
    prepare_data(write_conf(place, **data))
    assert list(rows)[3:6] == ["curate", "curate 2", "curate 3"]
    reports = [
        json.loads(path.read_bytes())
        for path in Workspace.of(place / "workspace").folder("curate").glob("*/report.json")
    ]
    assert sorted(report["documents"]["read"] for report in reports) == [40, 40, 55]
    assert [report["documents"]["kept"] for report in reports] == [40] * 3
    reasons = [report["steps"][0]["reasons"] for report in reports]
    assert sorted(reasons, key=len) == [{}, {}, {"duplicate of source 1": 15}]

    second.write_text(second.read_text(encoding="utf-8") + shared[0], encoding="utf-8")
    prepare_data(write_conf(place, **data))
    assert [rows[name] for name in ("curate", "curate 2", "curate 3")] == ["cached", "ran", "ran"]
    prepare_data(write_conf(place, **data))
    assert set(rows.values()) == {"cached"}


def test_sources_are_collected_and_tokenized_side_by_side(
    place: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    for module, name in ((corpus, "collect"), (shards, "tokenize_corpus")):
        # Each call waits for the other one, which never comes if they run in turn.
        meeting, original = threading.Barrier(2, timeout=HANG), getattr(module, name)

        def meet(
            *args: Any,
            meeting: threading.Barrier = meeting,
            original: Callable[..., Any] = original,
            **kwargs: Any,
        ) -> Any:
            meeting.wait()
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, meet)
    members = [{"weight": 1, "source": source(place, name, 60)} for name in "ab"]
    prepare_data(write_conf(place, blend=members))
    assert set(rows.values()) == {"ran"}
    assert [row for row in rows if row.startswith(("collect", "tokenize "))] == [
        "collect",
        "collect 2",
        "tokenize 2",
    ]


def test_error_of_a_source_is_the_flows_after_the_others_finished(
    place: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, original = threading.Event(), corpus.collect

    def fail_second(source: Any, directory: Path, **kwargs: Any) -> Any:
        if "b.jsonl" in source.files[0]:
            failed.set()
            raise DataFormatError("injected failure")
        assert failed.wait(HANG)
        return original(source, directory, **kwargs)

    members = [{"weight": 1, "source": source(place, name, 60)} for name in "abc"]
    conf = write_conf(place, blend=members)
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "collect", fail_second)
        with pytest.raises(DataFormatError, match="injected failure"):
            prepare_data(conf)
    assert rows == {"collect": "ran", "collect 2": "failed", "collect 3": "ran"}
    prepare_data(conf)
    assert (rows["collect"], rows["collect 2"], rows["collect 3"]) == ("cached", "ran", "cached")


@pytest.mark.slow
def test_pretraining_on_a_blend_reports_the_losses_of_its_sources(
    place: Path, rows: Rows, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setattr(stages, "supervise", _warm_ranks.supervise)
    (place / "workspace").mkdir()
    shutil.copy(empty_store, place / "workspace" / "mlflow.db")
    members = [
        {"weight": 3, "name": "web", "source": source(place, "a", 60)},
        {"weight": 1, "source": source(place, "b", 60)},
    ]
    batches = {"micro_batch_size": 1, "global_batch_size": 8, "log_interval": 3}
    conf = write_conf(place, blend=members)
    pretrain(conf, {f"train.{name}": value for name, value in batches.items()})
    assert set(rows.values()) == {"ran"}
    assert list(rows)[-3:] == ["evaluate", "convert", "publish"]

    (run,) = (path.parent for path in place.glob("workspace/runs/*/mlflow.json"))
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    last = {event["kind"]: event for event in map(json.loads, lines)}
    (score,) = (
        row
        for path in place.glob("workspace/evaluations/*/evaluation.json")
        for row in json.loads(path.read_text(encoding="utf-8"))["checkpoints"]
        if row["iteration"] == last["perplexity"]["iteration"]
    )
    recorded = json.loads((run / "mlflow.json").read_text(encoding="utf-8"))
    metrics = MlflowClient().get_run(recorded["run_id"]).data.metrics
    for losses, total, prefix, measure in (
        (last["evaluation"]["by_source"], last["evaluation"]["lm_loss"], "loss", float),
        (last["perplexity"]["by_source"], last["perplexity"]["valid_loss"], "ppl", math.exp),
        (score["valid_by_source"], score["valid_loss"], "ppl", math.exp),
        (score["test_by_source"], score["test_loss"], None, float),
    ):
        # evaluate.max_samples 8 is less than the first source has, and still both are measured.
        assert [each["source"] for each in losses] == ["web", "1-b-jsonl"]
        tokens = sum(each["tokens"] for each in losses)
        mean = sum(each["loss"] * each["tokens"] for each in losses) / tokens
        assert mean == pytest.approx(total, rel=1e-6)
        for each in losses if prefix else ():
            metric = metrics[f"validation/{prefix}_by_source/{each['source']}"]
            assert metric == pytest.approx(measure(each["loss"]), rel=1e-6)
    estimates = last["step"]["by_source"]
    assert sum(each["samples"] for each in estimates) == 24
    for each in estimates:
        assert metrics[f"train/loss_by_source/{each['source']}"] == pytest.approx(each["loss"])
        assert each["loss"] == pytest.approx(last["step"]["lm_loss"], rel=0.1)
    assert "Loss by source" in (run / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_splits_have_separate_sources(place: Path, rows: Rows) -> None:
    train = {"weight": 1, "source": source(place, "train", 60)}
    held_out = {"weight": 1, "source": source(place, "held-out", 60)}
    blends = {"train": [train], "valid": [held_out], "test": [held_out]}
    prepare_data(write_conf(place, split_blends=blends, split=None))
    assert list(rows) == [
        "collect",
        "collect 2",
        "tokenizer",
        "tokenize",
        "tokenize 2",
        "blend",
        "index",
    ]


def tokens_of(place: Path) -> tuple[bytes, bytes]:
    (directory,) = (
        path
        for path in (place / "workspace" / "tokenized").iterdir()
        if not path.name.startswith(".")
    )
    (prefix,) = token_prefixes(directory)
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.mark.slow
def test_shards_give_the_same_files_and_only_a_failed_one_runs_again(
    place: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    jsonl_source = source(place, "large", 700, size=5000)
    prepare_data(write_conf(place, source=jsonl_source))
    unsharded = tokens_of(place)
    assert (
        len(
            IndexedDataset(*token_prefixes(next((place / "workspace" / "tokenized").glob("[!.]*"))))
        )
        == 700
    )

    monkeypatch.setenv("MEGACORE_WORKSPACE", str(place / "sharded" / "workspace"))
    calls: list[Any] = []
    original: Callable[..., Any] = shards.tokenize_shard

    def fail_second_shard(shard: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(shard)
        if (
            broken
            and shard[0].start > 0
            and shard[0].stop is not None
            and shard[0].start < 1_500_000
        ):
            raise DataFormatError("injected failure")
        return original(shard, *args, **kwargs)

    broken = True
    monkeypatch.setattr(shards, "tokenize_shard", fail_second_shard)
    conf = write_conf(place, source=jsonl_source, shard_mb=1)
    with pytest.raises(DataFormatError, match="injected failure"):
        prepare_data(conf)
    assert len(calls) == 4
    broken = False
    calls.clear()
    prepare_data(conf)
    assert len(calls) == 1
    assert tokens_of(place / "sharded") == unsharded


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["processes", "dask"])
def test_shards_run_in_worker_processes(
    place: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    jsonl_source = source(place, "large", 500, size=5000)
    prepare_data(write_conf(place, source=jsonl_source))
    unsharded = tokens_of(place)
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(place / runner / "workspace"))
    prepare_data(write_conf(place, source=jsonl_source, shard_mb=1, shard_runner=runner))
    assert tokens_of(place / runner) == unsharded


def kill_workers_once_they_start(stop: threading.Event) -> None:
    """Send SIGKILL to the pool's processes, like the kernel when memory runs out."""
    while not stop.wait(0.02):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "spawn_main" in " ".join(child.cmdline()):
                    child.kill()


@pytest.mark.slow
def test_killed_shard_worker_ends_the_stage_with_one_sentence(place: Path, rows: Rows) -> None:
    jsonl_source = source(place, "large", 500, size=5000)
    stop = threading.Event()
    killer = threading.Thread(target=kill_workers_once_they_start, args=(stop,))
    killer.start()
    try:
        with pytest.raises(
            WorkerLostError, match=r"the worker of shard 1 of 3 died .*: the shards that are done"
        ):
            prepare_data(
                write_conf(place, source=jsonl_source, shard_mb=1, shard_runner="processes")
            )
    finally:
        stop.set()
        killer.join()
    assert rows["tokenize"] == "failed"
    assert not list((place / "workspace" / "tokenized").glob("[!.]*"))
